//! What security modules of the kernel forbid a thread: a Landlock domain, which no call tells, and
//! the labels of AppArmor, SELinux and Smack.
//!
//! A thread is in a domain where the kernel's memory says so. Where that may not be looked into,
//! the thread tries to compare itself with stillframe: a domain lets it compare itself with nobody
//! outside.
//!
//! - What: Landlock domains, security labels
//! - Kept: that a thread is in no domain; the label, where who dumps and who restores have the same
//!   one.
//! - Refused: "a Landlock domain", as "the kernel tells nobody its rules"; "a Landlock domain,
//!   which it may be in", as "finding out takes CAP_BPF and CAP_PERFMON, and a kernel with BTF"
//!   (only where it cannot gain privileges); "the security label …", as "stillframe has …,
//!   which is what restored tasks get"; "a security label for what it makes next (attr/…)".
//! - At a restore: "the label was …, and this process has …".
//! - CRIU 4.2: a restored task is outside of its Landlock domain; labels are kept.

use std::sync::OnceLock;

use rustix::io::Errno;
use sys::landlock;
use syscalls::Sysno;

use super::{Asked, Facts, Part, Planned, Scope, ThreadPlan, tags};
use crate::kernel::credentials::{Credentials, CredentialsReader};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// Which label a thread has; that it is in no domain.
pub struct Sandbox;

/// A thread's label.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// What /proc/PID/attr/current says, without the end of the line.
    #[prost(bytes = "vec", tag = "1")]
    pub label: Vec<u8>,
}

/// The label in what /proc/PID/attr/current says.
fn label_of(text: &[u8]) -> Vec<u8> {
    let end = text.iter().rposition(|byte| !matches!(byte, 0 | b'\n'));
    text[..end.map_or(0, |end| end + 1)].to_vec()
}

/// The label of this process; none where no security module gives any.
pub(crate) fn own_label() -> Option<&'static [u8]> {
    static OWN: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let own = OWN.get_or_init(|| {
        let text = sys::procfs::read("thread-self/attr/current").ok()?;
        Some(label_of(&text)).filter(|label| !label.is_empty())
    });
    own.as_deref()
}

/// Checks what can be told of a thread before it is made to call anything, given its credentials
/// where the kernel's memory tells them.
///
/// # Errors
/// [`Error::Unsupported`], [`Error::Kernel`].
pub(super) fn check(facts: &dyn Facts, seen: Option<Credentials>) -> Result<()> {
    let tid = facts.tid();
    if seen.is_some_and(|seen| seen.is_in_domain) {
        let why = "the kernel tells nobody its rules";
        return Err(Error::unsupported(tid, "a Landlock domain").because(why));
    }
    match own_label() {
        None => Ok(()),
        Some(own) => {
            check_label(tid, &label_of(&facts.proc("attr/current")?), own)?;
            check_next(facts)
        }
    }
}

/// Refuses labels that a thread has chosen for what it makes next.
fn check_next(facts: &dyn Facts) -> Result<()> {
    for name in ["exec", "fscreate", "keycreate", "sockcreate"] {
        // A module that has no such label says so.
        let label = facts.proc(&format!("attr/{name}"));
        if label.is_ok_and(|label| !label_of(&label).is_empty()) {
            let what = format!("a security label for what it makes next (attr/{name})");
            return Err(Error::unsupported(facts.tid(), what));
        }
    }
    Ok(())
}

fn check_label(tid: i32, label: &[u8], own: &[u8]) -> Result<()> {
    if label == own {
        return Ok(());
    }
    let [label, own] = [label, own].map(String::from_utf8_lossy);
    let why = format!("stillframe has {own}, which is what restored tasks get");
    Err(Error::unsupported(tid, format!("the security label {label}")).because(why))
}

impl Part for Sandbox {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::SANDBOX
    }

    fn name(&self) -> &'static str {
        "security label"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        const KCMP_VM: i32 = abi::kernel::KCMP_VM;
        if !landlock::is_there() || CredentialsReader::get().is_ok() {
            return Ok(Asked::default());
        }
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let pids = [facts.tid().into(), own.into(), KCMP_VM.into()];
        let step = questions.attempt(Sysno::kcmp, pids);
        Ok(Asked {
            steps: vec![step],
            data: Vec::new(),
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        if let Some(step) = asked.steps.first() {
            check_compared(facts, answers.result(*step))?;
        }
        let label = own_label().map(<[u8]>::to_vec);
        Ok(label.map(|label| Record { label }))
    }

    fn describe(&self, record: &Record) -> String {
        String::from_utf8_lossy(&record.label).into_owned()
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, _: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        let own = who.inherited.label.as_deref();
        if own.is_none_or(|own| own == record.label) {
            return Ok(());
        }
        let [was, own] = [&record.label[..], own.unwrap_or_default()].map(String::from_utf8_lossy);
        Err(who.mismatch(
            self,
            format!("the label was {was}, and this process has {own}"),
        ))
    }
}

/// Judges whether a thread could compare itself with this process.
fn check_compared(facts: &dyn Facts, result: i64) -> Result<()> {
    let refused = -i64::from(Errno::PERM.raw_os_error());
    if result != refused {
        return Ok(());
    }
    let tid = facts.tid();
    if !facts.status()?.no_new_privs {
        log::warn!("thread {tid}: whether it is in a Landlock domain cannot be told here");
        return Ok(());
    }
    let why = "finding out takes CAP_BPF and CAP_PERFMON, and a kernel with BTF";
    Err(Error::unsupported(tid, "a Landlock domain, which it may be in,").because(why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::ProcessCheck;
    use crate::testing::Stage;

    /// Has a stage restrict itself, as `attributes` (`struct landlock_ruleset_attr`) say.
    fn shut_in(stage: &mut Stage, attributes: [u64; 3]) -> bool {
        const PR_SET_NO_NEW_PRIVS: u64 = libc::PR_SET_NO_NEW_PRIVS as u64;
        stage.call(Sysno::prctl, &[PR_SET_NO_NEW_PRIVS, 1]);
        let bytes = attributes.iter().flat_map(|word| word.to_le_bytes());
        stage.put(0, &bytes.collect::<Vec<_>>());
        let data = stage.data();
        let rules = stage.attempt(Sysno::landlock_create_ruleset, &[data, 24, 0]);
        rules >= 0 && stage.attempt(Sysno::landlock_restrict_self, &[rules.cast_unsigned(), 0]) == 0
    }

    #[test]
    fn a_thread_in_a_domain_is_refused_by_name() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        if !landlock::is_there() {
            testkit::skip!("a kernel without Landlock");
        }
        // Files, ports and what is outside of the domain, each alone.
        for attributes in [[4, 0, 0], [0, 3, 0], [0, 0, 3]] {
            let mut stage = Stage::new();
            ProcessCheck::default().thread(&stage).expect("it is free");
            if !shut_in(&mut stage, attributes) {
                continue;
            }
            let error = ProcessCheck::default()
                .thread(&stage)
                .expect_err("it is not");
            let want = format!(
                "pid {}: a Landlock domain is not supported: the kernel tells nobody its rules",
                stage.pid()
            );
            assert_eq!(error.to_string(), want);
        }
    }

    #[test]
    fn a_thread_in_a_domain_cannot_compare_itself_with_others() {
        testkit::needs_root!();
        if !landlock::is_there() {
            testkit::skip!("a kernel without Landlock");
        }
        let compare = |stage: &mut Stage| {
            let (pid, own) = (stage.pid(), std::process::id());
            let pids = [u64::from(pid.cast_unsigned()), own.into(), 1];
            let result = stage.attempt(Sysno::kcmp, &pids);
            check_compared(stage, result)
        };
        let mut stage = Stage::new();
        compare(&mut stage).expect("it is free");
        assert!(shut_in(&mut stage, [4, 0, 0]));
        let error = compare(&mut stage).expect_err("it is not").to_string();
        assert!(
            error.contains("a Landlock domain, which it may be in,"),
            "{error}"
        );
    }

    #[test]
    fn labels_must_be_those_of_the_dumper_and_of_the_restorer() {
        assert_eq!(
            label_of(b"docker-default (enforce)\n"),
            b"docker-default (enforce)"
        );
        assert_eq!(label_of(b"unconfined_u:r:x:s0\0"), b"unconfined_u:r:x:s0");
        check_label(7, b"unconfined", b"unconfined").expect("the same");
        let error = check_label(7, b"x (enforce)", b"unconfined").expect_err("another");
        assert_eq!(
            error.to_string(),
            "pid 7: the security label x (enforce) is not supported: stillframe has unconfined, \
             which is what restored tasks get"
        );
        let payload = prost::Message::encode_to_vec(&Record {
            label: b"x".to_vec(),
        });
        let mut inherited = Stage::inherited();
        inherited.label = Some(b"x".to_vec());
        let plan = |inherited: &_| Stage::plan_with(&Sandbox, Some(&payload), inherited);
        assert_eq!(plan(&inherited).expect("the same"), "");
        inherited.label = Some(b"unconfined".to_vec());
        let error = plan(&inherited).expect_err("another");
        let want = "task 1: security label: the label was x, and this process has unconfined";
        assert_eq!(error.to_string(), want);
    }
}
