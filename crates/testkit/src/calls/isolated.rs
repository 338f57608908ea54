//! A thread in a small world of its own, for tests: network, terminals and descriptors that no
//! other test sees or holds open.

use std::io;
use std::os::fd::AsRawFd;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};

use sys::socket;

/// Runs `f`, which panics to fail, on a thread with a network namespace of its own (loopback is
/// up), terminals of its own (/dev/ptmx, /dev/pts) and no descriptors but the standard ones.
///
/// `f` is a plain function: it cannot hold a descriptor of its caller's.
///
/// # Errors
/// The calls' errno, or that no thread can be made.
///
/// # Panics
/// When `f` does.
pub fn run(f: fn()) -> io::Result<()> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, || {
            enter()?;
            f();
            Ok(())
        })?;
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

fn enter() -> io::Result<()> {
    let own = libc::CLONE_NEWNET | libc::CLONE_NEWNS | libc::CLONE_FS | libc::CLONE_FILES;
    // SAFETY: only this new thread's namespaces, directories and descriptors become its own.
    check(unsafe { libc::unshare(own) })?;
    // SAFETY: closes copies that only this thread has and that nothing of it refers to.
    let closed = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
    check(libc::c_int::try_from(closed).unwrap_or(-1))?;
    furnish()
}

/// Gives this process's own network namespace its loopback, and its own mount namespace its own
/// terminals (/dev/ptmx, /dev/pts). In namespaces of others it would change those.
///
/// # Errors
/// The calls' errno.
pub fn furnish() -> io::Result<()> {
    bring_up_loopback()?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private)?;
    let options = c"newinstance,ptmxmode=0666,mode=0620";
    mount("devpts", "/dev/pts", "devpts", MountFlags::empty(), options)?;
    Ok(mount_bind("/dev/pts/ptmx", "/dev/ptmx")?)
}

/// Sets `IFF_UP` on the interface "lo" (netdevice(7)).
fn bring_up_loopback() -> io::Result<()> {
    let any = socket::open(libc::AF_INET, libc::SOCK_DGRAM, 0)?;
    let mut request = [0u64; size_of::<libc::ifreq>().div_ceil(8)];
    request[0] = u64::from_ne_bytes(*b"lo\0\0\0\0\0\0");
    request[2] = u64::from((libc::IFF_UP | libc::IFF_RUNNING).cast_unsigned());
    let pointer = request.as_mut_ptr();
    // SAFETY: the request is as long as the structure that the kernel reads.
    check(unsafe { libc::ioctl(any.as_raw_fd(), libc::SIOCSIFFLAGS, pointer) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
