//! A userfaultfd for the memory of a stopped process.

use abi::Op;
use sys::uffd::{Features, Uffd};

use crate::handed::Handed;
use crate::{Error, Injection, Result, Thread};

const USERFAULTFD: u64 = 323;
const O_NONBLOCK: u64 = libc::O_NONBLOCK as u64;
const O_CLOEXEC: u64 = libc::O_CLOEXEC as u64;
/// `UFFD_USER_MODE_ONLY`: faults of the kernel on the process's behalf are not handed over.
const USER_MODE_ONLY: u64 = linux_raw_sys::general::UFFD_USER_MODE_ONLY as u64;

/// Creates a userfaultfd for the memory of a stopped process, with `features`, and brings it here:
/// the process itself has to ask for it, and keeps nothing of it.
///
/// `user_mode_only` is all that processes without `CAP_SYS_PTRACE` may have where
/// `vm.unprivileged_userfaultfd` is 0. It is enough for [`Features::WP_ASYNC`], where the kernel
/// resolves faults by itself; with other features, writes to protected memory by system calls fail.
///
/// # Errors
/// [`Error::Kernel`] when the kernel refuses it: `EPERM` as above, `EMFILE` when the process is at
/// its limit of open files, `EINVAL` for features that the kernel lacks; those of
/// [`Injection::fetch`].
/// The threads go on then.
pub fn userfaultfd(
    injection: Injection,
    user_mode_only: bool,
    features: Features,
) -> Result<(Vec<Thread>, Uffd)> {
    let mut flags = O_NONBLOCK | O_CLOEXEC;
    if user_mode_only {
        flags |= USER_MODE_ONLY;
    }
    let (threads, fd) = injection.fetch(Op::call(USERFAULTFD, [flags, 0, 0, 0, 0, 0]))?;
    let tid = threads[0].tid;
    let fd = fd.map_err(|e| Error::of(tid, "it may not make a userfaultfd", e))?;
    let uffd = Uffd::from(fd);
    let opened = uffd.api(features);
    opened.map_err(|e| Error::of(tid, "the kernel lacks features of userfaultfd", e))?;
    Ok((threads, uffd))
}

/// As [`userfaultfd`], of /dev/userfaultfd, which is opened here and handed to the process for a
/// moment: it needs no privilege. `taken` are the numbers of its descriptors.
///
/// # Errors
/// [`Error::Kernel`]: `ENOENT` where there is no such device, `EMFILE`, `EINVAL`; those of
/// [`Injection::fetch`]. The threads go on then.
pub fn userfaultfd_of_device(
    injection: Injection,
    taken: &[i32],
    features: Features,
) -> Result<(Vec<Thread>, Uffd)> {
    let pid = injection.threads()[0].process.pid();
    let of = |doing| move |e| Error::of(pid, doing, e);
    let handed = Handed::new(pid, taken, O_NONBLOCK | O_CLOEXEC);
    let handed = handed.map_err(of("it cannot be given /dev/userfaultfd"))?;
    let (threads, fd) = injection.fetch_last(&handed)?;
    let fd = fd.map_err(of("it cannot make a userfaultfd of the device"))?;
    let uffd = Uffd::from(fd);
    let opened = uffd.api(features);
    opened.map_err(of("the kernel lacks features of userfaultfd"))?;
    Ok((threads, uffd))
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    use sys::uffd::Modes;

    use super::*;
    use crate::testing::{cat, descriptors, echo, memory, span_of, stop, vdso};

    const TRACKING: Features = Features::WP_ASYNC;

    #[test]
    fn memory_of_another_process_is_registered() {
        let (mut child, pid) = cat();
        let before = descriptors(pid);
        let injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
        let (threads, uffd) = userfaultfd(injection, true, TRACKING).expect("a userfaultfd");
        drop(threads);
        assert_eq!(descriptors(pid), before);
        let heap = span_of(pid, "[heap]");
        uffd.register(heap, Modes::WP).expect("registered");
        uffd.write_protect(heap, true).expect("protected");
        echo(&mut child);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_process_is_handed_the_device_and_keeps_nothing() {
        testkit::needs_root!();
        if !std::path::Path::new("/dev/userfaultfd").exists() {
            testkit::skip!("there is no /dev/userfaultfd");
        }
        let (mut child, pid) = cat();
        let before = descriptors(pid);
        let injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
        let fetched = userfaultfd_of_device(injection, &before, Features::WP);
        let (threads, uffd) = fetched.expect("a userfaultfd");
        drop(threads);
        assert_eq!(descriptors(pid), before);
        let heap = span_of(pid, "[heap]");
        uffd.register(heap, Modes::WP).expect("registered");
        uffd.write_protect(heap, true).expect("protected");
        drop(uffd);
        echo(&mut child);
        // A number that is not free is no number for it.
        let injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
        let none = userfaultfd_of_device(injection, &[], Features::WP);
        none.expect_err("its numbers are others");
        assert_eq!(descriptors(pid), before);
        echo(&mut child);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_process_without_room_for_descriptors_is_refused() {
        let (mut child, pid) = cat();
        let number = Pid::from_raw(pid).expect("a pid");
        let none = Rlimit {
            current: Some(3),
            maximum: Some(3),
        };
        prlimit(Some(number), Resource::Nofile, none).expect("it may be lowered");
        // Numbers above the limit stay open; those below it are taken.
        let before = descriptors(pid);
        let injection = Injection::new(stop(pid), memory(pid), &[vdso(pid)]).expect("room");
        let error = userfaultfd(injection, true, TRACKING).expect_err("no room");
        assert_eq!(
            error.to_string(),
            format!("thread {pid}: it may not make a userfaultfd")
        );
        assert_eq!(descriptors(pid), before);
        echo(&mut child);
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
}
