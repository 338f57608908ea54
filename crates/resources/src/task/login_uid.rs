//! The user as whom a process was logged in, for the kernel's audit (/proc/PID/loginuid).
//!
//! The number of the login session beside it cannot be chosen: the kernel gives a new one.
//!
//! - Kept: the uid; the number of the login session beside it is a new one.
//! - At a restore: "this kernel has none"; "this process lacks CAP_AUDIT_CONTROL to change … to
//!   it".
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::Result;
use crate::script::Answers;

/// Nobody has logged in.
const UNSET: u32 = u32::MAX;
const CAP_AUDIT_CONTROL: u32 = linux_raw_sys::general::CAP_AUDIT_CONTROL;

/// The login uid of a process.
pub struct LoginUid;

/// The login uid.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The user; 4294967295 for none.
    #[prost(uint32, tag = "1")]
    pub uid: u32,
}

/// What /proc/PID/loginuid says.
pub(crate) fn parse(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text).ok()?.trim().parse().ok()
}

impl Part for LoginUid {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::LOGIN_UID
    }

    fn name(&self) -> &'static str {
        "login uid"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    /// Kernels without audit do not have the file.
    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let uid = facts.proc("loginuid").ok().and_then(|text| parse(&text));
        Ok(uid.map(|uid| Record { uid }))
    }

    fn describe(&self, record: &Record) -> String {
        match record.uid {
            UNSET => "none".to_owned(),
            uid => uid.to_string(),
        }
    }

    /// Only the task itself can set it. Once it is set, changing it needs a capability.
    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        const AT_FDCWD: i32 = libc::AT_FDCWD;
        const O_WRONLY: u32 = linux_raw_sys::general::O_WRONLY;
        let Some(record) = record else {
            return Ok(());
        };
        let Record { uid } = *record;
        let inherited = who.inherited.login_uid;
        if uid == inherited.unwrap_or(UNSET) {
            return Ok(());
        }
        match inherited {
            None => return Err(who.mismatch(self, "this kernel has none")),
            Some(UNSET) => {}
            Some(_) if who.inherited.credentials.can(CAP_AUDIT_CONTROL) => {}
            Some(own) => {
                let what = format!("this process lacks CAP_AUDIT_CONTROL to change {own} to it");
                return Err(who.mismatch(self, what));
            }
        }
        let script = plan.at(Phase::Unplaced);
        let path = script.string(b"/proc/self/loginuid");
        let args = [AT_FDCWD.into(), path.into(), O_WRONLY.into()];
        script.expect(Sysno::openat, args, 0);
        let text = uid.to_string();
        let at = script.bytes(text.as_bytes());
        let args = [0u32.into(), at.into(), text.len().into()];
        script.call(Sysno::write, args);
        script.note(self.name());
        script.call(Sysno::close, [0u32.into()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn login_uid_survives() {
        testkit::needs_root!();
        let mut stage = Stage::new();
        let Some(own) = stage.dump(&LoginUid).expect("it is supported") else {
            testkit::skip!("a kernel without audit");
        };
        assert_eq!(Stage::plan(&LoginUid, Some(&own)).expect("sound"), "");
        let payload = prost::Message::encode_to_vec(&Record { uid: 4711 });
        if Stage::plan(&LoginUid, Some(&payload)).is_err() {
            testkit::skip!("no CAP_AUDIT_CONTROL");
        }
        stage.call(Sysno::close, &[0]);
        stage.restore(&LoginUid, Some(&payload));
        let text = std::fs::read_to_string(format!("/proc/{}/loginuid", stage.pid()));
        assert_eq!(text.expect("it lives"), "4711");
        assert_eq!(
            stage.dump(&LoginUid).expect("it is supported"),
            Some(payload)
        );
    }

    #[test]
    fn the_missing_capability_is_named() {
        let payload = prost::Message::encode_to_vec(&Record { uid: 1000 });
        let mut inherited = Stage::inherited();
        inherited.login_uid = Some(UNSET);
        let plan = Stage::plan_with(&LoginUid, Some(&payload), &inherited).expect("possible");
        assert!(plan.contains("\"/proc/self/loginuid\""), "{plan}");
        inherited.login_uid = Some(7);
        inherited.credentials.effective = 0;
        let error =
            Stage::plan_with(&LoginUid, Some(&payload), &inherited).expect_err("impossible");
        let want = "task 1: login uid: this process lacks CAP_AUDIT_CONTROL to change 7 to it";
        assert_eq!(error.to_string(), want);
    }
}
