//! Why a request is not carried out, as the client is told.

use process::Error;
use rustix::io::Errno;

use crate::exit::{Failure, Status};
use crate::rpc::notes::Note;

/// A request that has failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The number of the error that criu(8) has for that: `ESRCH` where the process is not there,
    /// `EEXIST` where a pid is taken, `EBADRQC` for what the request asks for.
    pub errno: Option<i32>,
    /// Why, in one line.
    pub text: String,
    /// The exit status that belongs to it.
    pub status: Status,
}

impl Refusal {
    /// The request itself is wrong.
    pub fn request(text: impl Into<String>) -> Self {
        Self {
            errno: Some(Errno::BADRQC.raw_os_error()),
            text: text.into(),
            status: Status::Usage,
        }
    }

    /// The work has failed.
    pub fn of(failure: &Failure) -> Self {
        let mut text = failure.line();
        let obstacles = failure.obstacles();
        for obstacle in obstacles.iter().filter(|_| obstacles.len() > 1) {
            text.push_str("; ");
            text.push_str(&obstacle.to_string());
        }
        Self {
            errno: errno(failure),
            text,
            status: failure.status(),
        }
    }

    /// The work has ended so, and has left this note.
    pub fn noted(note: &Note, status: Status) -> Self {
        let noted = note.status.and_then(Status::of_number);
        Self {
            errno: note.errno,
            text: note
                .error
                .clone()
                .unwrap_or_else(|| "the work in the namespaces of the tree has failed".to_owned()),
            status: noted.unwrap_or(status),
        }
    }

    /// The note on it.
    pub fn to_note(&self) -> Note {
        Note {
            error: Some(self.text.clone()),
            errno: self.errno,
            status: Some(self.status as i32),
            dump: None,
        }
    }
}

fn errno(failure: &Failure) -> Option<i32> {
    let errno = match failure {
        Failure::Reading(_) | Failure::Configuration(_) | Failure::Usage(_) => Errno::BADRQC,
        Failure::Descriptor { .. } => Errno::BADF,
        Failure::File { source, .. } => return source.raw_os_error(),
        Failure::Engine { source, .. } => match &**source {
            Error::Gone { .. } => Errno::SRCH,
            Error::Taken { .. } => Errno::EXIST,
            Error::Forbidden(_) => Errno::PERM,
            _ => return None,
        },
        _ => return None,
    };
    Some(errno.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_numbers_that_clients_know() {
        let gone = Failure::engine("dump")(Error::Gone { pid: 7 });
        let refusal = Refusal::of(&gone);
        assert_eq!(refusal.errno, Some(3));
        assert!(refusal.text.starts_with("dump failed: pid 7"));
        let taken = Error::Taken {
            pid: 7,
            by: process::Holder::Unseen,
        };
        let taken = Failure::engine("restore")(taken);
        assert_eq!(Refusal::of(&taken).errno, Some(17));
        assert_eq!(Refusal::request("x").errno, Some(56));
    }

    #[test]
    fn notes_tell_all_of_it() {
        let refusal = Refusal::of(&Failure::Usage("no".to_owned()));
        assert_eq!(Refusal::noted(&refusal.to_note(), Status::Failed), refusal);
    }
}
