//! States of a thread that cannot be brought back and are refused by name, before the thread is
//! made to call anything: a seccomp filter might kill it for the call.

use super::{Asked, Facts, Part, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// States that are not supported; never in an image.
pub struct Refused;

impl Part for Refused {
    fn tag(&self) -> u16 {
        tags::REFUSED
    }

    fn name(&self) -> &'static str {
        "unsupported state"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, facts: &dyn Facts, _questions: &mut Script) -> Result<Asked> {
        let status = facts.status()?;
        let what = match status.seccomp {
            0 if status.untag_mask != u64::MAX => "linear address masking".to_owned(),
            0 if status.thread_features.contains("shstk") => "a shadow stack".to_owned(),
            0 => return Ok(Asked::default()),
            1 => "seccomp strict mode".to_owned(),
            2 => "a seccomp filter".to_owned(),
            mode => format!("seccomp mode {mode}"),
        };
        Err(Error::unsupported(facts.tid(), what))
    }

    fn dump(&self, _: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn describe(&self, _payload: &[u8]) -> Result<String> {
        Err(Error::corrupt(self.name(), "never in an image"))
    }

    fn plan(&self, payload: Option<&[u8]>, who: Planned<'_>, _: &mut ThreadPlan) -> Result<()> {
        payload.map_or(Ok(()), |_| Err(who.corrupt(self, "never in an image")))
    }
}

#[cfg(test)]
mod tests {
    use syscalls::Sysno;

    use super::*;
    use crate::testing::Stage;

    #[test]
    fn a_seccomp_filter_is_refused_by_name() {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&Refused).expect("an ordinary thread"), None);
        stage.call(Sysno::prctl, &[38, 1]);
        // One instruction: BPF_RET|BPF_K, SECCOMP_RET_ALLOW.
        let filter = stage.data() + 64;
        let ret_allow = 0x7fff_0000_0000_0006;
        let words = [1, filter, 0, 0, 0, 0, 0, 0, ret_allow];
        stage.call_with(Sysno::seccomp, &words, |at| [1, 0, at]);
        let error = stage.dump(&Refused).expect_err("a filter");
        let want = format!("pid {}: a seccomp filter is not supported", stage.pid());
        assert_eq!(error.to_string(), want);
    }
}
