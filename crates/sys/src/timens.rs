//! Time namespaces: clocks of their own for the processes in them, time_namespaces(7).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{CWD, Mode, OFlags, openat};

/// How far the clocks of a time namespace are ahead of the host's, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offsets {
    /// Of `CLOCK_MONOTONIC`, also coarse and raw.
    pub monotonic_ns: i64,
    /// Of `CLOCK_BOOTTIME`.
    pub boottime_ns: i64,
}

/// More than the text of `timens_offsets` has.
const TEXT_BYTES: usize = 256;
const BILLION: i64 = 1_000_000_000;
const FILE: &str = "timens_offsets";
const OWN_FILE: &str = "/proc/self/timens_offsets";

impl Offsets {
    /// Reads those of the children to be of the process whose folder of /proc is `proc`; they are
    /// its own where it has not prepared another namespace for its children.
    ///
    /// # Errors
    /// `ENOENT` on a kernel without time namespaces; `ESRCH` when the process has ended.
    pub fn read(proc: BorrowedFd<'_>) -> io::Result<Self> {
        read(&openat(
            proc,
            FILE,
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )?)
    }

    /// Reads those of this process's own.
    ///
    /// # Errors
    /// As [`Offsets::read`].
    pub fn own() -> io::Result<Self> {
        read(&open(OWN_FILE, OFlags::RDONLY)?)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let mut offsets = Self::default();
        for line in std::str::from_utf8(text).ok()?.lines() {
            let mut words = line.split_ascii_whitespace();
            let clock = words.next()?;
            let mut number = || words.next()?.parse::<i64>().ok();
            let ns = number()?.checked_mul(BILLION)?.checked_add(number()?)?;
            match clock {
                "monotonic" => offsets.monotonic_ns = ns,
                "boottime" => offsets.boottime_ns = ns,
                _ => return None,
            }
        }
        Some(offsets)
    }

    fn text(self) -> String {
        let line = |clock: &str, ns: i64| {
            let (seconds, rest) = (ns.div_euclid(BILLION), ns.rem_euclid(BILLION));
            format!("{clock} {seconds} {rest}\n")
        };
        line("monotonic", self.monotonic_ns) + &line("boottime", self.boottime_ns)
    }
}

fn open(path: &str, flags: OFlags) -> io::Result<OwnedFd> {
    Ok(openat(CWD, path, flags | OFlags::CLOEXEC, Mode::empty())?)
}

fn read(file: &OwnedFd) -> io::Result<Offsets> {
    let mut bytes = [0; TEXT_BYTES];
    // Leaves the position: writes must be at the beginning, and cannot name a place.
    let got = rustix::io::pread(file, &mut bytes[..], 0)?;
    Offsets::parse(&bytes[..got]).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// While it lives, the processes that the first thread of this process makes are forked into a time
/// namespace of their own. Dropping it tries to lead back, without a word when that fails: see
/// [`ForChildren::leave`].
#[derive(Debug)]
pub struct ForChildren {
    own: Option<OwnedFd>,
}

impl ForChildren {
    /// Makes the namespace; to be called by the first thread, as the kernel tells only of that one.
    /// `offsets` gives its offsets from those of the namespace that this process is in.
    ///
    /// # Errors
    /// `EPERM` without CAP_SYS_ADMIN to make it, or without CAP_SYS_TIME to set its clocks;
    /// `ENOENT` on a kernel without time namespaces; `ENOSPC` at the limit of namespaces; `ERANGE`
    /// for clocks below 0 or centuries ahead.
    pub fn new(offsets: impl FnOnce(Offsets) -> Offsets) -> io::Result<Self> {
        let own = open("/proc/self/ns/time", OFlags::RDONLY)?;
        // SAFETY: it changes nothing but what this thread's children are forked into.
        if unsafe { libc::unshare(libc::CLONE_NEWTIME) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let made = Self { own: Some(own) };
        let file = open(OWN_FILE, OFlags::RDWR)?;
        let text = offsets(read(&file)?).text();
        rustix::io::write(&file, text.as_bytes())?;
        Ok(made)
    }

    /// The namespace.
    ///
    /// # Errors
    /// As open(2).
    pub fn namespace(&self) -> io::Result<OwnedFd> {
        open("/proc/self/ns/time_for_children", OFlags::RDONLY)
    }

    /// Has the processes that are made from now on be forked into this process's own namespace
    /// again.
    ///
    /// # Errors
    /// `EUSERS` in a process of several threads.
    pub fn leave(mut self) -> io::Result<()> {
        self.lead_back()
    }

    fn lead_back(&mut self) -> io::Result<()> {
        let Some(own) = self.own.take() else {
            return Ok(());
        };
        // SAFETY: the thread goes to where it is already; only its children are forked elsewhere.
        if unsafe { libc::setns(own.as_raw_fd(), libc::CLONE_NEWTIME) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Drop for ForChildren {
    fn drop(&mut self) {
        let _ = self.lead_back();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_read_and_written_as_the_kernel_does() {
        let offsets = Offsets {
            monotonic_ns: -1,
            boottime_ns: 5 * BILLION + 7,
        };
        assert_eq!(offsets.text(), "monotonic -1 999999999\nboottime 5 7\n");
        assert_eq!(Offsets::parse(offsets.text().as_bytes()), Some(offsets));
        let kernel = b"monotonic          -1 999999999\nboottime            5         7\n";
        assert_eq!(Offsets::parse(kernel), Some(offsets));
        assert_eq!(Offsets::parse(b"monotonic 1\n"), None);
        assert_eq!(Offsets::parse(b"lunar 1 2\n"), None);
        assert_eq!(Offsets::parse(b"monotonic 9223372036854775807 0\n"), None);
    }

    #[test]
    fn children_are_born_into_it_until_it_is_left() {
        // The libtest process has several threads, of which setns(2) wants none.
        let (mut reader, writer) = io::pipe().unwrap();
        let child = crate::fork::daemonize(&[writer.as_raw_fd()], c"timens", || {
            let told = tell();
            let _ = rustix::io::write(&writer, told.as_bytes());
        });
        child.unwrap();
        drop(writer);
        let mut told = String::new();
        io::Read::read_to_string(&mut reader, &mut told).unwrap();
        if told == "Operation not permitted (os error 1)" {
            eprintln!("skipped: no privilege to make time namespaces");
            return;
        }
        assert_eq!(told, "in 1000 s, out");
    }

    fn tell() -> String {
        const AHEAD: i64 = 1000 * BILLION;
        let made = ForChildren::new(|own| Offsets {
            monotonic_ns: own.monotonic_ns + AHEAD,
            ..own
        });
        let made = match made {
            Ok(made) => made,
            Err(error) => return error.to_string(),
        };
        let now = || rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec;
        let ahead = || {
            let before = now();
            let (mut reader, writer) = io::pipe().unwrap();
            crate::fork::fork_for(&[writer.as_raw_fd()], || {
                let _ = rustix::io::write(&writer, &now().to_le_bytes());
            })
            .unwrap();
            drop(writer);
            let mut bytes = [0; 8];
            io::Read::read_exact(&mut reader, &mut bytes).unwrap();
            i64::from_le_bytes(bytes) - before
        };
        let within = ahead();
        made.leave().unwrap();
        let after = ahead();
        match (within, after) {
            (1000..1100, 0..100) => "in 1000 s, out".to_owned(),
            other => format!("{other:?}"),
        }
    }
}
