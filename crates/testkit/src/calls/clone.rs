//! clone(2) as subjects use it: processes that share with who made them, or have a pid of choice.

use std::io;

use rustix::process::Pid;

use sys::fork::Fork;

/// `CLONE_VM`: the memory. Only [`super::callers`] can be made with it.
pub const MEMORY: u64 = 0x100;
/// `CLONE_SIGHAND`: what is done when signals come.
pub const HANDLERS: u64 = 0x800;
/// `CLONE_PARENT`: a sibling. Only [`super::callers`] can be made so.
pub const SIBLING: u64 = 0x8000;
/// `CLONE_THREAD`, with all that it needs.
pub const THREAD: u64 = 0x1_0000 | MEMORY | HANDLERS;
/// `CLONE_FS`: working directory, root directory and umask.
pub const DIRECTORIES: u64 = 0x200;
/// `CLONE_FILES`: the descriptor table.
pub const DESCRIPTORS: u64 = 0x400;
/// `CLONE_SYSVSEM`: what is undone to semaphores.
pub const SEMAPHORE_UNDO: u64 = 0x4_0000;
/// `CLONE_IO`: the I/O context.
pub const IO_CONTEXT: u64 = 0x8000_0000;
/// `CLONE_NEWUTS`: the host's name.
pub const HOST_NAME: u64 = 0x400_0000;
/// `CLONE_NEWNET`: the network.
pub const NETWORK: u64 = 0x4000_0000;

/// Makes a copy of the calling process, which has one thread, and shares with it what `flags` say:
/// of the constants of this module. It has the pid `pid`, if one is given.
///
/// See clone(2). The C library does not know that there is a new process: the child may make no
/// threads.
///
/// # Errors
/// Those of clone3(2): `EEXIST` for a pid that is taken.
pub fn clone(flags: u64, pid: Option<Pid>) -> io::Result<Fork> {
    const SHARING: u64 = DIRECTORIES | DESCRIPTORS | SEMAPHORE_UNDO | IO_CONTEXT;
    const EXIT_SIGNAL: usize = 4;
    const SET_TID: usize = 8;
    const SET_TID_SIZE: usize = 9;
    let pid = pid.map(|pid| pid.as_raw_nonzero().get());
    let mut args = [0u64; 11];
    args[0] = flags & SHARING;
    args[EXIT_SIGNAL] = libc::SIGCHLD.cast_unsigned().into();
    if let Some(pid) = &pid {
        args[SET_TID] = std::ptr::from_ref(pid).expose_provenance() as u64;
        args[SET_TID_SIZE] = 1;
    }
    let (at, bytes) = (args.as_ptr(), size_of_val(&args));
    // SAFETY: `args` is a `struct clone_args` that outlives the call, and so does the pid that it
    // points to; no memory is shared and no stack given, so the child goes on in a copy of this
    // one, in which no other thread can have held a lock.
    let made = unsafe { libc::syscall(libc::SYS_clone3, at, bytes) };
    match i32::try_from(made).expect("a pid, or an error") {
        0 => Ok(Fork::Child),
        pid if pid < 0 => Err(io::Error::last_os_error()),
        pid => Ok(Fork::Parent(
            Pid::from_raw(pid).expect("the parent gets a pid above 0"),
        )),
    }
}

/// Gives the calling thread what `flags` say as its own: a copy, or a new namespace.
///
/// See unshare(2).
///
/// # Errors
/// Those of unshare(2).
pub fn unshare(flags: u64) -> io::Result<()> {
    const OWN: u64 = DIRECTORIES | DESCRIPTORS | SEMAPHORE_UNDO | HOST_NAME | NETWORK;
    let flags = i32::try_from(flags & OWN).expect("bits of a number without a sign");
    // SAFETY: the call changes no memory; descriptors keep their numbers.
    match unsafe { libc::unshare(flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
