//! Descriptors by which a task decides on what others do with files.
//!
//! While the task is stopped, whoever uses such a file waits for it: a dump, too, so it has to be
//! known before any file is asked for.
//!
//! - What: servers of file systems (FUSE)
//! - Refused: "it serves a file system, whose users would wait for it".
//! - CRIU 4.2: refused.

use super::table::{Link, Proc, info};
use super::{Info, fanotify};
use crate::{Error, Result};

/// Refuses the descriptor of the stopped task `pid` by name if it is one of those.
///
/// # Errors
/// [`Error::Unsupported`], and those of [`info`].
pub fn check(pid: i32, proc: Proc<'_>, link: &Link) -> Result<()> {
    let why = if link.target.ends_with(b"/dev/fuse") {
        "it serves a file system, whose users would wait for it"
    } else if link.target == fanotify::LINK && is_asked((pid, link.fd), proc)? {
        fanotify::IS_ASKED
    } else {
        return Ok(());
    };
    let target = String::from_utf8_lossy(&link.target);
    let place = format!("fd {} ({target})", link.fd);
    Err(Error::unsupported(pid, place).because(why))
}

fn is_asked(at: (i32, i32), proc: Proc<'_>) -> Result<bool> {
    let (info, _): (Info, bool) = info(at, proc, &mut vec![0; 4096])?;
    Ok(fanotify::is_asked(&info))
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd, OwnedFd};

    use rustix::fs::{Mode, OFlags, open};
    use sys::close::CloseQueue;

    use super::*;

    /// What is said of a descriptor of this process.
    fn refusal(own: &OwnedFd) -> Option<String> {
        let pid = std::process::id().cast_signed();
        let proc = open("/proc/self", OFlags::PATH, Mode::empty()).expect("open");
        let fd = own.as_raw_fd();
        let target = std::fs::read_link(format!("/proc/self/fd/{fd}")).expect("a link");
        let link = Link {
            fd,
            target: target.into_os_string().into_encoded_bytes(),
            same: None,
        };
        let checked = check(pid, (proc.as_fd(), &CloseQueue::default()), &link);
        checked.err().map(|error| error.to_string())
    }

    #[test]
    fn those_who_are_asked_are_refused_by_name() {
        testkit::needs_root!();
        let group = |class| sys::fanotify::init(class, 0).expect("a group");
        assert_eq!(refusal(&group(0)), None);
        let asked = refusal(&group(sys::fanotify::CLASS_CONTENT)).expect("it is asked");
        assert!(asked.contains("(anon_inode:[fanotify])"), "{asked}");
        assert!(asked.contains(fanotify::IS_ASKED), "{asked}");
        let file = std::fs::File::open("/dev/null").expect("open");
        assert_eq!(refusal(&file.into()), None);
        match std::fs::File::open("/dev/fuse") {
            Ok(server) => {
                let serves = refusal(&server.into()).expect("it serves");
                assert!(serves.contains("it serves a file system"), "{serves}");
            }
            Err(error) => eprintln!("without /dev/fuse: {error}"),
        }
    }
}
