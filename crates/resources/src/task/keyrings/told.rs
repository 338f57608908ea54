//! What a task tells of its session keyring itself, where nobody may look into the kernel.

use std::io;

use rustix::io::Errno;
use rustix::process::{getgid, getuid};
use syscalls::Sysno;

use super::contents::Contents;
use super::{
    PROCESS_KEYRING, Record, SESSION_KEYRING, Session, THREAD_KEYRING, USER_KEYRING,
    USER_SESSION_KEYRING, operation, own_session,
};
use crate::script::{Answers, Arg, Script};
use crate::task::Asked;
use crate::{Error, Result};

/// What a task tells of its session keyring itself.
pub(super) struct Told {
    session: i64,
    user_session: i64,
    user: i64,
    described: Vec<u8>,
    /// How many bytes of serial numbers there are, and the first of them.
    read: (i64, Vec<i32>),
    /// How many bytes of them its process's and its thread's keyring have.
    others: [i64; 2],
    destination: i64,
}

impl Told {
    const SERIALS: usize = 4;
    const DESCRIBED_BYTES: usize = 256;

    pub fn ask(questions: &mut Script) -> Asked {
        let keyring = |questions: &mut Script, which: i32| {
            questions.attempt(
                Sysno::keyctl,
                [operation::GET_KEYRING_ID.into(), which.into(), 0u32.into()],
            )
        };
        // The first question first: it has the kernel make what the others are about.
        let mut steps = Vec::new();
        for which in [SESSION_KEYRING, USER_SESSION_KEYRING, USER_KEYRING] {
            steps.push(keyring(questions, which));
        }
        let described = questions.buffer(Self::DESCRIBED_BYTES);
        let serials = questions.buffer(4 * Self::SERIALS);
        let args =
            |what: u32, at: Arg, len: usize| [what.into(), SESSION_KEYRING.into(), at, len.into()];
        let describe = args(operation::DESCRIBE, described.into(), Self::DESCRIBED_BYTES);
        steps.push(questions.attempt(Sysno::keyctl, describe));
        let read = args(operation::READ, serials.into(), 4 * Self::SERIALS);
        steps.push(questions.attempt(Sysno::keyctl, read));
        for which in [PROCESS_KEYRING, THREAD_KEYRING] {
            let args = [
                operation::READ.into(),
                which.into(),
                0u32.into(),
                0u32.into(),
            ];
            steps.push(questions.attempt(Sysno::keyctl, args));
        }
        let args = [operation::SET_REQKEY_KEYRING.into(), (-1i32).into()];
        steps.push(questions.attempt(Sysno::keyctl, args));
        Asked {
            steps,
            data: vec![described, serials],
        }
    }

    pub fn new(asked: &Asked, answers: &Answers) -> Self {
        let result = |at: usize| answers.result(asked.steps[at]);
        let words = answers.bytes(asked.data[1], 4 * Self::SERIALS);
        let serials = words.as_chunks::<4>().0.iter();
        Self {
            session: result(0),
            user_session: result(1),
            user: result(2),
            described: answers.bytes(asked.data[0], Self::DESCRIBED_BYTES).to_vec(),
            read: (
                result(4),
                serials.map(|word| i32::from_le_bytes(*word)).collect(),
            ),
            others: [result(5), result(6)],
            destination: result(7),
        }
    }

    pub fn record(&self, pid: i32) -> Result<Option<Record>> {
        let refused = |what: &str| Err(Error::unsupported(pid, what));
        match self {
            _ if self.others[0] > 0 => return refused("keys of its process keyring"),
            _ if self.others[1] > 0 => return refused("keys of its thread keyring"),
            _ if self.destination > 0 => {
                return refused(
                    "a keyring of its choice for keys that it asks for (KEYCTL_SET_REQKEY_KEYRING)",
                );
            }
            _ => {}
        }
        let failed = |errno: i64| {
            let error = io::Error::from_raw_os_error(i32::try_from(-errno).unwrap_or(0));
            Err(Error::unsupported(pid, "its session keyring").because(error.to_string()))
        };
        let revoked = -i64::from(Errno::KEYREVOKED.raw_os_error());
        if self.session == revoked {
            // Neither its number nor its permissions are told, and nobody can use it.
            return Ok(Some(Record {
                serial: -1,
                name: b"_ses".to_vec(),
                uid: getuid().as_raw(),
                gid: getgid().as_raw(),
                permissions: 0x3f03_0000,
                is_revoked: true,
                ..Record::default()
            }));
        }
        match self.session {
            ..0 => return failed(self.session),
            own if own == self.user_session => return Ok(None),
            _ => {}
        }
        let serial = i32::try_from(self.session).unwrap_or(0);
        let Some(record) = described(&self.described, serial) else {
            let error = Error::unsupported(pid, "its session keyring");
            return Err(error.because("its contents are not told"));
        };
        let is_ours = own_session() == Session::Own(serial);
        record.with(self.contents(pid), is_ours).map(Some)
    }

    fn contents(&self, pid: i32) -> Contents {
        let mut contents = Contents::default();
        let count = usize::try_from(self.read.0).map(|bytes| bytes / 4);
        let serials = count.ok().and_then(|count| self.read.1.get(..count));
        let links = serials.map(|serials| {
            let links = serials.iter().map(|serial| match i64::from(*serial) {
                serial if serial == self.user => Some(USER_KEYRING),
                serial if serial == self.user_session => Some(USER_SESSION_KEYRING),
                _ => None,
            });
            links.collect::<Option<Vec<_>>>()
        });
        match links.flatten() {
            Some(links) => contents.links = links,
            None => {
                let error = Error::unsupported(pid, "its session keyring");
                contents.refuse(error.because("its contents are not told"));
            }
        }
        contents
    }
}

/// What `KEYCTL_DESCRIBE` says: "keyring;1000;1000;3f030000;_ses".
pub(super) fn described(text: &[u8], serial: i32) -> Option<Record> {
    let text = text.split(|byte| *byte == 0).next()?;
    let mut fields = text.splitn(5, |byte| *byte == b';').skip(1);
    let mut field = || std::str::from_utf8(fields.next()?).ok();
    let (uid, gid) = (field()?.parse().ok()?, field()?.parse().ok()?);
    let permissions = u32::from_str_radix(field()?, 16).ok()?;
    let name = field()?.as_bytes().to_vec();
    Some(Record {
        serial,
        name,
        uid,
        gid,
        permissions,
        ..Record::default()
    })
}
