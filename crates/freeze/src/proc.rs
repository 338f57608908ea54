//! Files of /proc/PID, read whole.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use sys::close::CloseQueue;
use sys::process::Process;

use crate::{Error, Result};

/// Opens /proc/PID, of a process or of a thread.
pub fn open(pid: i32) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let proc = openat(CWD, sys::procfs::path(pid), flags, Mode::empty());
    proc.map_err(|errno| match errno {
        Errno::NOENT => Error::Gone { pid },
        errno => Error::kernel(format!("cannot open /proc/{pid}"), errno),
    })
}

/// Reads a file of the /proc directory of process `pid`; `close_queue` closes it.
pub fn read_at(
    dir: BorrowedFd<'_>,
    pid: i32,
    name: &str,
    close_queue: &CloseQueue,
) -> Result<Vec<u8>> {
    let failed = |errno: Errno| match errno {
        Errno::NOENT | Errno::SRCH => Error::Gone { pid },
        errno => Error::kernel(format!("cannot read /proc/{pid}/{name}"), errno),
    };
    let file =
        openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    let mut bytes = vec![0; 8192];
    let mut filled = 0;
    loop {
        let got = rustix::io::read(&file, &mut bytes[filled..]).map_err(failed)?;
        filled += got;
        // Such a file comes in one piece as far as it fits, but a list in many.
        if got == 0 || filled < bytes.len() && is_whole(name, &bytes[..filled], got) {
            bytes.truncate(filled);
            close_queue.push(file);
            return Ok(bytes);
        }
        if bytes.len() - filled < 4096 {
            bytes.resize(bytes.len() * 2, 0);
        }
    }
}

/// Reads a file of the /proc directory of a process that may end, by the thread that answers.
pub fn read_proc(process: &Process, name: &str) -> Result<Vec<u8>> {
    let pid = process.pid();
    let dir = open(process.tid()).map_err(|_| Error::Gone { pid })?;
    read_at(dir.as_fd(), pid, name, &CloseQueue::default())
}

/// `text`, of which `last` bytes were read last, has nothing behind it. The kernel gives a list of
/// /proc/PID in pieces, however large the buffer is: a piece is a page, and ends before the first
/// entry for which it has no room.
fn is_whole(name: &str, text: &[u8], last: usize) -> bool {
    const PIECE_BYTES: usize = 4096;
    const PID_BYTES: usize = 16;
    match name.rsplit('/').next() {
        Some("children") => last + PID_BYTES < PIECE_BYTES,
        Some("maps" | "smaps") => ends_with_vsyscall(&text[text.len() - last..]),
        Some("timers") => false,
        _ => true,
    }
}

/// A piece of maps or smaps has the entry of the kernel's own page. Most kernels show that page as
/// the last entry: its address is above all those of a program.
fn ends_with_vsyscall(piece: &[u8]) -> bool {
    const START: &[u8] = b"ffffffffff600000-";
    let lines = piece.split(|byte| *byte == b'\n');
    lines.into_iter().any(|line| line.starts_with(START))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn many_children_are_listed_to_the_last() {
        // More than fit into the page that the kernel gives at once.
        let sleep = |_| Command::new("sleep").arg("1000").spawn().expect("sleep");
        let mut children = (0..900).map(sleep).collect::<Vec<_>>();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let proc = openat(CWD, "/proc/self", flags, Mode::empty()).expect("/proc");
        let tid = rustix::thread::gettid().as_raw_nonzero();
        let text = read_at(
            proc.as_fd(),
            0,
            &format!("task/{tid}/children"),
            &CloseQueue::default(),
        );
        for child in &mut children {
            child.kill().expect("kill");
            child.wait().expect("wait");
        }
        let text = String::from_utf8(text.expect("its children")).expect("numbers");
        assert_eq!(text.split_ascii_whitespace().count(), children.len());
    }

    #[test]
    fn a_list_of_mappings_is_read_to_its_end() {
        let own = std::process::id().cast_signed();
        let proc = openat(CWD, "/proc/self", OFlags::RDONLY, Mode::empty()).expect("/proc");
        let close_queue = CloseQueue::default();
        let text = |name| read_at(proc.as_fd(), own, name, &close_queue).expect("a list");
        let starts = |text: Vec<u8>| {
            let text = String::from_utf8(text).expect("mappings");
            let lines = text.lines().filter_map(|line| line.split_once('-'));
            let starts = lines.filter_map(|line| u64::from_str_radix(line.0, 16).ok());
            starts.max()
        };
        let own = std::fs::read("/proc/self/maps").expect("mappings");
        assert_eq!(starts(text("maps")), starts(own.clone()));
        assert_eq!(starts(text("smaps")), starts(own));
    }

    #[test]
    fn a_name_is_not_taken_for_the_end_of_a_list() {
        let stack = b"7ffc0000-7ffd0000 rw-p 00000000 00:00 0 [stack]\n";
        let top = b"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";
        let file = b"1000-2000 r--p 00000000 08:01 7 /tmp/ffffffffff600000- [vsyscall]\n";
        let whole = |text: &[u8]| is_whole("task/1/maps", text, text.len());
        assert!(!whole(stack) && !whole(file) && whole(top));
        assert!(whole(&[stack.as_slice(), top].concat()));
        assert!(is_whole("children", b"1 2 ", 4) && !is_whole("children", b"", 4090));
        assert!(!is_whole("timers", b"", 1) && is_whole("stat", b"1", 1));
    }
}
