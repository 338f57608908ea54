//! The name of a thread (`PR_SET_NAME`, /proc/PID/comm).
//!
//! - What: name of a thread
//! - Kept: each thread's.
//! - CRIU 4.2: kept.

use linux_raw_sys::prctl::{PR_GET_NAME, PR_SET_NAME};
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// The longest name with its NUL, in bytes.
const NAME_BYTES: usize = 16;

/// A thread's name.
pub struct Comm;

/// A name.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// At most 15 bytes of anything but NUL.
    #[prost(bytes = "vec", tag = "1")]
    pub name: Vec<u8>,
}

impl Part for Comm {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::COMM
    }

    fn name(&self) -> &'static str {
        "name"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    // A process's stat says its leader's name, and has been read.
    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let mut asked = Asked::default();
        if facts.tid() != facts.pid() {
            let buffer = questions.buffer(NAME_BYTES);
            questions.call(Sysno::prctl, [PR_GET_NAME.into(), buffer.into()]);
            asked.data.push(buffer);
        }
        Ok(asked)
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let name = match asked.data.first() {
            Some(buffer) => {
                let name = answers.bytes(*buffer, NAME_BYTES);
                name.iter().copied().take_while(|byte| *byte != 0).collect()
            }
            None => facts.stat()?.comm.clone(),
        };
        let record = Record { name };
        Ok(Some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        match record.name.len() >= NAME_BYTES || record.name.contains(&0) {
            true => Err(Error::corrupt(self.name(), format!("{:?}", record.name))),
            false => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        String::from_utf8_lossy(&record.name).into_owned()
    }

    fn plan(&self, record: Option<&Record>, _: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record = record.cloned().unwrap_or_default();
        let script = plan.at(Phase::Alone);
        let name = script.string(&record.name);
        script.call(Sysno::prctl, [PR_SET_NAME.into(), name.into()]);
        script.note(String::from_utf8_lossy(&record.name));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn any_bytes_survive() {
        for name in [&b"a) (b\n\xff"[..], b"", b"fifteen bytes !"] {
            let record = Record {
                name: name.to_vec(),
            };
            let payload = prost::Message::encode_to_vec(&record);
            let mut fresh = Stage::new();
            fresh.restore(&Comm, Some(&payload));
            assert_eq!(fresh.dump(&Comm).expect("it is supported"), Some(payload));
            let comm = std::fs::read(format!("/proc/{}/comm", fresh.pid())).expect("it lives");
            assert_eq!(comm, [name, b"\n"].concat());
        }
    }

    #[test]
    fn a_long_name_is_corrupt() {
        let record = Record {
            name: vec![b'x'; 16],
        };
        let payload = prost::Message::encode_to_vec(&record);
        let error = Stage::plan(&Comm, Some(&payload)).expect_err("too long");
        assert!(
            error
                .to_string()
                .starts_with("image record task 1 name: [120, "),
            "{error}"
        );
    }
}
