//! Groups that are told of files, or asked before they are used: fanotify(7).

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// Whoever makes a group may be asked before files are used (`FAN_CLASS_CONTENT`).
pub const CLASS_CONTENT: u32 = libc::FAN_CLASS_CONTENT;
/// A group whose reader does not wait (`FAN_NONBLOCK`).
pub const NONBLOCK: u32 = libc::FAN_NONBLOCK;
/// A mark is added (`FAN_MARK_ADD`).
pub const ADD: u32 = libc::FAN_MARK_ADD;
/// Somebody is about to open the file, and waits (`FAN_OPEN_PERM`).
pub const OPEN_ASKED: u64 = 0x1_0000;

/// Makes a group, close-on-exec whatever its flags are (fanotify_init(2)); `event_flags` are those
/// of the descriptors that come with its events.
///
/// # Errors
/// The call's errno: `EPERM` without the privilege, `EINVAL` for flags that this kernel lacks,
/// `ENOSYS` without fanotify.
pub fn init(flags: u32, event_flags: u32) -> io::Result<OwnedFd> {
    // SAFETY: the arguments are numbers.
    let fd = unsafe { libc::syscall(libc::SYS_fanotify_init, flags, event_flags) };
    let fd = i32::try_from(fd).expect("a descriptor or -1");
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let group = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&group, rustix::io::FdFlags::CLOEXEC)?;
    Ok(group)
}

/// Reads all events of a group and closes the descriptors that come with them.
///
/// # Errors
/// The call's errno.
pub fn forget_events(group: impl AsFd) -> io::Result<()> {
    /// `struct fanotify_event_metadata`: its own length is at 0, the descriptor at 16.
    const DESCRIPTOR: usize = 16;
    let mut events = vec![0u8; 64 << 10];
    while rustix::io::ioctl_fionread(&group)? > 0 {
        let len = rustix::io::read(&group, &mut events[..])?;
        let mut rest = &events[..len];
        let word = |rest: &[u8], at: usize| {
            let four = rest.get(at..at + 4).and_then(|four| four.try_into().ok());
            four.map(u32::from_ne_bytes)
        };
        while let (Some(len), Some(fd)) = (word(rest, 0), word(rest, DESCRIPTOR)) {
            let fd = fd.cast_signed();
            if fd >= 0 {
                // SAFETY: the kernel has made this descriptor for us with the event.
                drop(unsafe { OwnedFd::from_raw_fd(fd) });
            }
            rest = rest.get(len.max(1) as usize..).unwrap_or_default();
        }
    }
    Ok(())
}

/// Changes what a group is told of the file at `path` (fanotify_mark(2)).
///
/// # Errors
/// The call's errno.
pub fn mark(group: impl AsFd, flags: u32, mask: u64, path: &CStr) -> io::Result<()> {
    let group = group.as_fd().as_raw_fd();
    let (number, at) = (libc::SYS_fanotify_mark, path.as_ptr());
    // SAFETY: the kernel reads the path.
    let result = unsafe { libc::syscall(number, group, flags, mask, libc::AT_FDCWD, at) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_asked_sees_who_waits() {
        let Ok(group) = init(CLASS_CONTENT | NONBLOCK, 0) else {
            return;
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = std::ffi::CString::new(file.path().to_str().unwrap()).unwrap();
        mark(&group, ADD, OPEN_ASKED, &path).unwrap();
        let path = file.path().to_owned();
        let opens = std::thread::spawn(move || std::fs::File::open(path).map(drop));
        let mut fds = [rustix::event::PollFd::new(
            &group,
            rustix::event::PollFlags::IN,
        )];
        let limit = rustix::event::Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        assert_eq!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1));
        assert!(!opens.is_finished());
        drop(group);
        opens.join().unwrap().unwrap();
    }
}
