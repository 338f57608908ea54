//! Files, pipes, memfds and pidfds: status flags, sizes, seals, owners.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, memfd_create};
use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use sys::fcntl::{Owner, owner, set_owner, set_signal, signal};

use super::descriptor::{Kind, info};
use crate::samples::sample::Values;
use resources::ledger::fdinfo::OPEN_FLAGS;

/// The kinds.
#[rustfmt::skip]
pub(super) const FILES: &[Kind] = &[
    Kind::new("file", Values::Of(&OPEN_FLAGS), open, flags)
        .about(&["flags", "F_GETFL", "F_SETFL", "F_GETFD", "F_SETFD", "FIONCLEX", "FIOCLEX"]),
    Kind::new("pipe", Values::Made(pipes), pipe, read_pipe)
        .about(&["F_SETPIPE_SZ", "F_GETPIPE_SZ", "FIOASYNC", "FIONBIO"]),
    Kind::new("owned", Values::Made(owners), owned, read_owner)
        .about(&[
            "F_SETOWN", "F_GETOWN", "F_SETSIG", "F_GETSIG", "F_SETOWN_EX", "F_GETOWN_EX",
        ]),
    Kind::new("memfd", Values::Made(memfds), memfd, read_memfd)
        .about(&["F_ADD_SEALS", "F_GET_SEALS"]),
    Kind::new("pidfd", Values::These(&[0, 1, 2, 3]), pidfd, read_pidfd)
        .about(&["pidfd: Pid", "CLONE_PIDFD"]),
];

/// `O_LARGEFILE` is that of this program, and `O_CLOEXEC` is the descriptor's.
const OF_CALLS: u32 = 0o10_0000 | 0o200_0000;

/// The status flags, and whether execve(2) closes it.
fn flags(own: BorrowedFd<'_>) -> io::Result<String> {
    let flags = rustix::fs::fcntl_getfl(own)?.bits() & !OF_CALLS;
    let closes = rustix::io::fcntl_getfd(own)?;
    let kind = rustix::fs::fstat(own)?.st_mode;
    Ok(format!("{flags:o} {closes:?} {kind:o}"))
}

/// Opens a file of its own with one flag more than its access mode.
fn open(path: &Path, flag: u64) -> io::Result<Vec<OwnedFd>> {
    const MODES: u32 = 3;
    const EXCL: u32 = 0o200;
    const LARGE: u32 = 0o10_0000;
    const CLOEXEC: u32 = 0o200_0000;
    let flag = flag as u32;
    let (bits, closes) = match flag {
        // It is read and written, and so told from others.
        EXCL => (
            flag | OFlags::CREATE.bits() | OFlags::WRONLY.bits() | O_APPEND,
            true,
        ),
        LARGE => (flag | MODES, true),
        CLOEXEC => (OFlags::RDWR.bits() | O_APPEND, false),
        ..=MODES => (flag, false),
        _ if flag == OFlags::TMPFILE.bits() & !OFlags::DIRECTORY.bits() => {
            (OFlags::TMPFILE.bits() | OFlags::RDWR.bits(), true)
        }
        _ => (flag, true),
    };
    let bits = OFlags::from_bits_retain(bits);
    if bits.intersects(OFlags::DIRECTORY) {
        fs::create_dir_all(path)?;
    } else if flag != EXCL {
        fs::write(path, "contents")?;
    }
    let file = rustix::fs::open(path, bits | OFlags::CLOEXEC, Mode::from_bits_retain(0o600))?;
    if !closes {
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty())?;
    }
    Ok(vec![file])
}

const O_APPEND: u32 = 0o2000;

/// Both ends as they are, with packets, without waiting, signalling, and of several sizes.
fn pipes() -> Vec<u64> {
    (0..12).collect()
}

fn pipe(_: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    const SIZES: [usize; 3] = [65_536, 4096, 1 << 20];
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    fcntl_setpipe_size(&reader, SIZES[value as usize % 3])?;
    let flags = match value / 3 {
        0 => OFlags::empty(),
        1 => OFlags::DIRECT,
        2 => OFlags::NONBLOCK,
        _ => OFlags::from_bits_retain(0o20_000) | OFlags::NONBLOCK,
    };
    let now = rustix::fs::fcntl_getfl(&writer)?;
    rustix::fs::fcntl_setfl(&writer, now | flags)?;
    Ok(vec![reader, writer])
}

fn read_pipe(own: BorrowedFd<'_>) -> io::Result<String> {
    Ok(format!("{} {}", flags(own)?, fcntl_getpipe_size(own)?))
}

/// A thread, a process, a group, each told by the usual signal or by another one.
fn owners() -> Vec<u64> {
    let signals = |kind: u64| [0, 10, 40].map(|signal| kind << 8 | signal);
    (0..3).flat_map(signals).collect()
}

fn owned(_: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    let (kind, sent) = ((value >> 8) as i32, (value & 0xff) as i32);
    let pid = match kind {
        0 => rustix::thread::gettid(),
        1 => getpid(),
        _ => rustix::process::getpgid(None)?,
    };
    let pid = pid.as_raw_pid();
    set_owner(reader.as_fd(), Owner { kind, pid })?;
    set_signal(reader.as_fd(), sent)?;
    Ok(vec![reader, writer])
}

fn read_owner(own: BorrowedFd<'_>) -> io::Result<String> {
    Ok(format!("{:?} {}", owner(own)?, signal(own)?))
}

/// Each seal, all seals, and each flag of memfd_create(2) that stays.
fn memfds() -> Vec<u64> {
    const NOEXEC_SEAL: u64 = 8 << 8;
    const HUGE: u64 = 4 << 8;
    // The first seal is that of a memfd that cannot be sealed.
    let sealed = (1..6).map(|bit| 2 << 8 | 1 << bit);
    let flagged = [0, 2 << 8, 2 << 8 | 0x1f, NOEXEC_SEAL, HUGE];
    sealed.chain(flagged).collect()
}

fn memfd(path: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    let name = path.file_name().unwrap_or_default();
    let flags = MemfdFlags::from_bits_retain((value >> 8) as u32);
    let file = memfd_create(name, flags | MemfdFlags::CLOEXEC)?;
    if !flags.contains(MemfdFlags::HUGETLB) {
        rustix::io::write(&file, b"sealed")?;
    }
    let seals = SealFlags::from_bits_retain((value & 0xff) as u32);
    if !seals.is_empty() {
        rustix::fs::fcntl_add_seals(&file, seals)?;
    }
    Ok(vec![file])
}

fn read_memfd(own: BorrowedFd<'_>) -> io::Result<String> {
    let seals = rustix::fs::fcntl_get_seals(own)?;
    let stat = rustix::fs::fstat(own)?;
    let (mode, size, block) = (stat.st_mode, stat.st_size, stat.st_blksize);
    Ok(format!("{seals:?} {mode:o} {size} {block}"))
}

/// Of the process or of the thread, one that waits or one that does not.
fn pidfd(_: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    const THREAD: u32 = 0o200;
    let (mut flags, mut of) = (PidfdFlags::empty(), getpid());
    if value & 1 != 0 {
        flags |= PidfdFlags::from_bits_retain(THREAD);
        of = rustix::thread::gettid();
    }
    flags.set(PidfdFlags::NONBLOCK, value & 2 != 0);
    Ok(vec![pidfd_open(of, flags)?])
}

fn read_pidfd(own: BorrowedFd<'_>) -> io::Result<String> {
    info(own, &["Pid", "flags"], "")
}
