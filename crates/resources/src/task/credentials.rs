//! The ids, groups, capabilities and securebits of a thread (credentials(7), capabilities(7)).
//!
//! The order of the calls that restore them is what this file is about: every one of them may take
//! away what the next one needs. With `SECBIT_NO_SETUID_FIXUP` set, changing user ids changes no
//! capabilities, so that only the last call, `capset`, gives privileges up:
//!
//! 1. `SECBIT_NO_SETUID_FIXUP`;
//! 2. the inheritable set, while the bounding set is whole (it limits what may be added);
//! 3. the bounding set;
//! 4. groups, group ids, user ids, file system ids;
//! 5. ambient capabilities: they need the inheritable ones, and may be forbidden by
//! 6. the securebits;
//! 7. `capset`.
//!
//! - Kept: user and group ids of each thread, groups, all five sets of capabilities, securebits.
//! - At a restore: "this process does not have …" (a capability).
//! - CRIU 4.2: kept; profiles of AppArmor and labels of SELinux as well.

use linux_raw_sys::prctl::{
    PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, PR_CAPBSET_DROP, PR_GET_SECUREBITS, PR_SET_SECUREBITS,
};
use sys::proc::Status;
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

const SECBIT_NO_SETUID_FIXUP: u64 = libc::SECBIT_NO_SETUID_FIXUP as u64;
const LINUX_CAPABILITY_VERSION_3: u32 = 0x2008_0522;
/// `NGROUPS_MAX`.
const GROUPS_MAX: usize = 65_536;

/// A thread's credentials.
pub struct Credentials;

/// All credentials.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// Real, effective, saved and file system user id.
    #[prost(uint32, repeated, tag = "1")]
    pub uids: Vec<u32>,
    /// Real, effective, saved and file system group id.
    #[prost(uint32, repeated, tag = "2")]
    pub gids: Vec<u32>,
    /// The supplementary groups, ascending.
    #[prost(uint32, repeated, tag = "3")]
    pub groups: Vec<u32>,
    /// Inheritable capabilities; bit N is capability N, here and below.
    #[prost(uint64, tag = "4")]
    pub inheritable: u64,
    /// Permitted capabilities.
    #[prost(uint64, tag = "5")]
    pub permitted: u64,
    /// Effective capabilities.
    #[prost(uint64, tag = "6")]
    pub effective: u64,
    /// The bounding set.
    #[prost(uint64, tag = "7")]
    pub bounding: u64,
    /// Ambient capabilities.
    #[prost(uint64, tag = "8")]
    pub ambient: u64,
    /// `SECBIT_` flags.
    #[prost(uint64, tag = "9")]
    pub securebits: u64,
}

impl Record {
    pub(crate) fn new(status: &Status, securebits: u64) -> Self {
        let caps = status.capabilities;
        Self {
            uids: status.uids.to_vec(),
            gids: status.gids.to_vec(),
            groups: status.groups.clone(),
            inheritable: caps.inheritable,
            permitted: caps.permitted,
            effective: caps.effective,
            bounding: caps.bounding,
            ambient: caps.ambient,
            securebits,
        }
    }

    /// Root with all capabilities that there are today.
    pub(crate) fn root() -> Self {
        let all = (1 << NAMES.len()) - 1;
        Self {
            uids: vec![0; 4],
            gids: vec![0; 4],
            permitted: all,
            effective: all,
            bounding: all,
            ..Self::default()
        }
    }

    /// Whether a capability is effective.
    pub(crate) fn can(&self, capability: u32) -> bool {
        self.effective & 1 << capability != 0
    }

    /// What is wrong with the record as data, if anything.
    fn flaw(&self) -> Option<String> {
        if self.uids.len() != 4 || self.gids.len() != 4 {
            return Some(format!(
                "{} user and {} group ids",
                self.uids.len(),
                self.gids.len()
            ));
        }
        if self.groups.len() > GROUPS_MAX {
            return Some(format!("{} groups", self.groups.len()));
        }
        let outside =
            self.effective & !self.permitted | self.ambient & !(self.permitted & self.inheritable);
        (outside != 0).then(|| format!("capabilities {outside:#x} are not permitted"))
    }

    /// The capabilities that a thread that starts with `inherited` cannot get.
    fn beyond(&self, inherited: &Self) -> u64 {
        self.bounding & !inherited.bounding | self.permitted & !inherited.permitted
    }

    fn plan(&self, inherited: &Self, script: &mut Script) {
        let (none, all) = (0u64.into(), u64::MAX.into());
        securebits(script, inherited.securebits | SECBIT_NO_SETUID_FIXUP);
        if self.inheritable != inherited.inheritable {
            capset(
                script,
                inherited.effective,
                inherited.permitted,
                self.inheritable,
            );
        }
        for capability in bits(inherited.bounding & !self.bounding) {
            script.call(Sysno::prctl, [PR_CAPBSET_DROP.into(), capability.into()]);
        }
        if self.groups != inherited.groups {
            let groups: Vec<u8> = self.groups.iter().flat_map(|id| id.to_le_bytes()).collect();
            let at = script.bytes(&groups);
            script.call(Sysno::setgroups, [self.groups.len().into(), at.into()]);
        }
        if self.gids != inherited.gids {
            let [real, effective, saved, fs] = [0, 1, 2, 3].map(|which| self.gids[which]);
            script.call(
                Sysno::setresgid,
                [real.into(), effective.into(), saved.into()],
            );
            if fs != effective {
                // These give the previous id whatever happens: the second one tells.
                script.attempt(Sysno::setfsgid, [fs.into()]);
                script.expect(Sysno::setfsgid, [all], fs);
            }
        }
        if self.uids != inherited.uids {
            let [real, effective, saved, fs] = [0, 1, 2, 3].map(|which| self.uids[which]);
            script.call(
                Sysno::setresuid,
                [real.into(), effective.into(), saved.into()],
            );
            if fs != effective {
                script.attempt(Sysno::setfsuid, [fs.into()]);
                script.expect(Sysno::setfsuid, [all], fs);
            }
        }
        for capability in bits(self.ambient & !inherited.ambient) {
            let raise = PR_CAP_AMBIENT_RAISE.into();
            script.call(
                Sysno::prctl,
                [PR_CAP_AMBIENT.into(), raise, capability.into(), none],
            );
        }
        securebits(script, self.securebits);
        capset(script, self.effective, self.permitted, self.inheritable);
    }
}

impl Part for Credentials {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::CREDENTIALS
    }

    fn name(&self) -> &'static str {
        "credentials"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let step = questions.call(Sysno::prctl, [PR_GET_SECUREBITS.into()]);
        Ok(Asked {
            steps: vec![step],
            data: Vec::new(),
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let securebits = answers.result(asked.steps[0]).cast_unsigned();
        let record = Record::new(&*facts.status()?, securebits);
        Ok(Some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        let flaw = record.flaw();
        flaw.map_or(Ok(()), |flaw| Err(Error::corrupt(self.name(), flaw)))
    }

    fn describe(&self, record: &Record) -> String {
        let list = |ids: &[u32]| {
            let mut ids = ids.to_vec();
            ids.dedup();
            ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
        };
        let (uids, gids, groups) = (&record.uids, &record.gids, &record.groups);
        let mut text = format!("uid {} gid {}", list(uids), list(gids));
        if !groups.is_empty() {
            text.push_str(&format!(" groups {}", list(groups)));
        }
        text.push_str(&format!(" capabilities {:#x}", record.effective));
        text
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Err(who.corrupt(self, "missing"));
        };
        let inherited = &who.inherited.credentials;
        if record == inherited {
            return Ok(());
        }
        let beyond = record.beyond(inherited);
        if beyond != 0 {
            let names: Vec<_> = bits(beyond).map(name_of).collect();
            let what = format!("this process does not have {}", names.join(", "));
            return Err(who.mismatch(self, what));
        }
        record.plan(inherited, plan.at(Phase::Privileges));
        super::dumpable::set_again(plan);
        Ok(())
    }
}

fn bits(set: u64) -> impl Iterator<Item = u32> {
    (0..64).filter(move |bit| set & 1 << bit != 0)
}

fn securebits(script: &mut Script, bits: u64) {
    script.call(Sysno::prctl, [PR_SET_SECUREBITS.into(), bits.into()]);
    script.note("securebits");
}

fn capset(script: &mut Script, effective: u64, permitted: u64, inheritable: u64) {
    let header = [LINUX_CAPABILITY_VERSION_3, 0]
        .map(u32::to_le_bytes)
        .concat();
    let mut data = Vec::with_capacity(24);
    for shift in [0, 32] {
        for set in [effective, permitted, inheritable] {
            data.extend(((set >> shift) as u32).to_le_bytes());
        }
    }
    let (header, data) = (script.bytes(&header), script.bytes(&data));
    script.call(Sysno::capset, [header.into(), data.into()]);
    script.note(format!("effective {effective:#x}"));
}

/// The names of capabilities, by number (linux/capability.h).
const NAMES: [&str; 41] = [
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
];

fn name_of(capability: u32) -> String {
    let name = NAMES.get(capability as usize);
    name.map_or_else(
        || format!("capability {capability}"),
        |name| format!("CAP_{name}"),
    )
}

#[cfg(test)]
mod tests {
    use linux_raw_sys::prctl::PR_CAPBSET_READ;

    use super::*;
    use crate::testing::Stage;

    const SETUID: u64 = 1 << 7;
    const NET_BIND: u64 = 1 << 10;
    const NET_ADMIN: u64 = 1 << 12;

    fn survives(wanted: impl FnOnce(&mut Record)) {
        let mut record = Stage::inherited().credentials;
        wanted(&mut record);
        let payload = prost::Message::encode_to_vec(&record);
        let mut fresh = Stage::new();
        fresh.restore(&Credentials, Some(&payload));
        let again = fresh
            .dump(&Credentials)
            .expect("it is supported")
            .expect("always there");
        assert_eq!(
            image::strict::decode::<Record>(&again).expect("sound"),
            record
        );
    }

    #[test]
    fn roots_credentials_need_no_call() {
        let mut stage = Stage::new();
        let payload = stage.dump(&Credentials).expect("it is supported");
        assert_eq!(
            Stage::plan(&Credentials, payload.as_deref()).expect("sound"),
            ""
        );
    }

    #[test]
    fn an_ordinary_users_credentials_survive() {
        testkit::needs_root!();
        survives(|record| {
            record.uids = vec![1000; 4];
            record.gids = vec![1000; 4];
            record.groups = vec![4, 27, 1000];
            (record.permitted, record.effective) = (0, 0);
        });
    }

    #[test]
    fn all_ids_may_differ() {
        testkit::needs_root!();
        survives(|record| {
            record.uids = vec![1, 2, 3, 4];
            record.gids = vec![5, 6, 7, 8];
            (record.permitted, record.effective) = (SETUID | NET_ADMIN, NET_ADMIN);
        });
    }

    #[test]
    fn a_setuid_programs_credentials_survive() {
        testkit::needs_root!();
        survives(|record| {
            record.uids = vec![1000, 0, 0, 0];
            record.gids = vec![1000; 4];
            record.groups = vec![1000];
        });
    }

    #[test]
    fn capabilities_of_each_kind_and_securebits_survive() {
        testkit::needs_root!();
        survives(|record| {
            record.uids = vec![1000; 4];
            (record.permitted, record.effective) = (NET_BIND | NET_ADMIN, NET_BIND);
            (record.inheritable, record.ambient) = (NET_BIND | SETUID, NET_BIND);
            record.bounding &= !(SETUID | NET_ADMIN | 1 << 40);
            // SECBIT_NOROOT, _KEEP_CAPS, _NO_CAP_AMBIENT_RAISE, each with its lock.
            record.securebits = 0x3 | 0x30 | 0xc0;
        });
    }

    #[test]
    fn root_without_capabilities_survives() {
        testkit::needs_root!();
        survives(|record| {
            (record.permitted, record.effective, record.bounding) = (0, 0, 0);
        });
    }

    #[test]
    fn dumped_credentials_are_those_that_calls_set() {
        testkit::needs_root!();
        let mut stage = Stage::new();
        let groups = [3u64 << 32 | 2];
        stage.call_with(Sysno::setgroups, &groups, |at| [2, at]);
        stage.call(Sysno::prctl, &[PR_CAPBSET_DROP.into(), 21]);
        assert_eq!(stage.call(Sysno::prctl, &[PR_CAPBSET_READ.into(), 21]), 0);
        stage.call(Sysno::setresgid, &[10, 11, 12]);
        stage.call(Sysno::setresuid, &[20, 21, 22]);
        let payload = stage
            .dump(&Credentials)
            .expect("it is supported")
            .expect("always there");
        let record: Record = image::strict::decode(&payload).expect("sound");
        assert_eq!(
            (record.uids, record.gids),
            (vec![20, 21, 22, 21], vec![10, 11, 12, 11])
        );
        assert_eq!((record.groups, record.bounding & 1 << 21), (vec![2, 3], 0));
        assert_eq!((record.permitted, record.effective), (0, 0));
        let shown = Stage::describe(&Credentials, &payload).expect("sound");
        assert_eq!(
            shown,
            "uid 20,21,22,21 gid 10,11,12,11 groups 2,3 capabilities 0x0"
        );
    }

    #[test]
    fn privileges_go_in_an_order_that_works() {
        let inherited = Record {
            uids: vec![0; 4],
            gids: vec![0; 4],
            permitted: 0xff,
            effective: 0xff,
            bounding: 0x1ff,
            ..Record::default()
        };
        let record = Record {
            uids: vec![5, 6, 7, 8],
            gids: vec![1, 2, 3, 4],
            groups: vec![9],
            inheritable: 0x6,
            permitted: 0x3,
            effective: 0x2,
            bounding: 0x7f,
            ambient: 0x2,
            securebits: 1,
        };
        let mut facts = Stage::inherited();
        facts.credentials = inherited;
        let payload = prost::Message::encode_to_vec(&record);
        let plan = Stage::plan_with(&Credentials, Some(&payload), &facts).expect("sound");
        insta::assert_snapshot!(plan, @r"
        [Privileges]
        prctl(PR_SET_SECUREBITS, bits=0x4)  # securebits
        capset(header={version=0x20080522, pid=0}, data={effective=0xff, permitted=0xff,
            inheritable=0x6, effective_high=0, permitted_high=0, inheritable_high=0})  #
            effective 0xff
        prctl(PR_CAPBSET_DROP, capability=7)
        prctl(PR_CAPBSET_DROP, capability=8)
        setgroups(count=1, groups=[9])
        setresgid(real=1, effective=2, saved=3)
        setfsgid(gid=4) = ?
        setfsgid(gid=-1) = 4
        setresuid(real=5, effective=6, saved=7)
        setfsuid(uid=8) = ?
        setfsuid(uid=-1) = 8
        prctl(PR_CAP_AMBIENT, what=2, capability=1, zero=0)
        prctl(PR_SET_SECUREBITS, bits=0x1)  # securebits
        capset(header={version=0x20080522, pid=0}, data={effective=0x2, permitted=0x3,
            inheritable=0x6, effective_high=0, permitted_high=0, inheritable_high=0})  #
            effective 0x2
        ");
    }

    #[test]
    fn what_the_restorer_does_not_have_is_named() {
        let mut inherited = Stage::inherited();
        inherited.credentials.bounding &= !(1 << 24);
        let mut record = inherited.credentials.clone();
        record.bounding |= 1 << 24 | 1 << 63;
        let payload = prost::Message::encode_to_vec(&record);
        let error = Stage::plan_with(&Credentials, Some(&payload), &inherited).expect_err("no way");
        insta::assert_snapshot!(
            error,
            @"task 1: credentials: this process does not have CAP_SYS_RESOURCE, capability 63"
        );
    }

    #[test]
    fn impossible_sets_are_corrupt() {
        let mut record = Stage::inherited().credentials;
        record.permitted = 0;
        let payload = prost::Message::encode_to_vec(&record);
        let error = Stage::plan(&Credentials, Some(&payload)).expect_err("not permitted");
        let text = error.to_string();
        assert!(
            text.starts_with("image record task 1 credentials: capabilities 0x"),
            "{text}"
        );
        Stage::plan(&Credentials, None).expect_err("missing");
    }
}
