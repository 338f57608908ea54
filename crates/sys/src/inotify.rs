//! What saving an inotify instance needs besides inotify(7): files by their handles, and the
//! number of the next watch.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// The largest handle of a file, in bytes (`MAX_HANDLE_SZ`).
pub const HANDLE_MAX_BYTES: usize = libc::MAX_HANDLE_SZ as usize;

/// `struct file_handle` with room for the largest.
#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    handle: [u8; HANDLE_MAX_BYTES],
}

/// Opens the file with this handle as a place (`O_PATH`), on the file system on which `mount` is
/// any open file (open_by_handle_at(2)).
///
/// # Errors
/// The call's errno: `ESTALE` where there is no such file, `EPERM` without the privilege,
/// `EOPNOTSUPP` for a file system without handles, `EINVAL` also for a handle that is too long.
pub fn open_by_handle(mount: impl AsFd, kind: i32, handle: &[u8]) -> io::Result<OwnedFd> {
    let mut full = Handle {
        bytes: 0,
        kind,
        handle: [0; HANDLE_MAX_BYTES],
    };
    let Some(room) = full.handle.get_mut(..handle.len()) else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    room.copy_from_slice(handle);
    full.bytes = u32::try_from(handle.len()).expect("at most 128");
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    let mount = mount.as_fd().as_raw_fd();
    let number = libc::SYS_open_by_handle_at;
    // SAFETY: the kernel reads the header and as many bytes behind it as that says, all of which
    // live in `full`.
    let fd = unsafe { libc::syscall(number, mount, &raw const full, flags) };
    let fd = i32::try_from(fd).expect("a descriptor or -1");
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has the next watch of an inotify instance get number `watch`, if that is free
/// (`INOTIFY_IOC_SETNEXTWD` of linux/inotify.h).
///
/// # Errors
/// `EINVAL` for a number below 1; `ENOTTY` on a kernel without `CONFIG_CHECKPOINT_RESTORE`.
pub fn set_next_watch(inotify: impl AsFd, watch: i32) -> io::Result<()> {
    const INOTIFY_IOC_SETNEXTWD: libc::c_ulong =
        linux_raw_sys::ioctl::INOTIFY_IOC_SETNEXTWD as libc::c_ulong;
    let inotify = inotify.as_fd().as_raw_fd();
    let watch = libc::c_long::from(watch);
    // SAFETY: the argument is a number, no address.
    if unsafe { libc::ioctl(inotify, INOTIFY_IOC_SETNEXTWD, watch) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

    use super::*;

    #[test]
    fn watches_get_the_numbers_asked_for() {
        let own = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).unwrap();
        for (watch, place) in [(7, "/"), (3, "/proc"), (1 << 20, "/dev")] {
            set_next_watch(&own, watch).unwrap();
            let got = inotify::add_watch(&own, place, WatchFlags::CREATE).unwrap();
            assert_eq!(got, watch);
        }
        assert!(set_next_watch(&own, 0).is_err());
    }

    #[test]
    fn a_handle_that_is_too_long_is_refused() {
        let any = std::fs::File::open("/").unwrap();
        let error = open_by_handle(&any, 1, &[0; HANDLE_MAX_BYTES + 1]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }
}
