//! Performance events: perf_event_open(2).

use std::io::{self, Error};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Where `struct perf_event_attr` has its flags, in bytes: a word of 64 bits.
pub const FLAGS_AT: usize = 40;
/// Its first flag: the event begins disabled.
pub const DISABLED: u64 = 1;

/// What an event counts for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Watched {
    /// The thread; -1 for any.
    pub tid: i32,
    /// The processor; -1 for any.
    pub cpu: i32,
}

/// Opens an event, close-on-exec. `attr` is a `struct perf_event_attr` of a size that it names;
/// `leader` is the first event of its group, if it is not that itself.
///
/// # Errors
/// As perf_event_open(2): `ENOENT` for an event that is not there, `ENODEV` for a processor that is
/// not, `ESRCH`, `EACCES`, `EINVAL`, `E2BIG`.
pub fn open(attr: &[u8], watched: Watched, leader: Option<BorrowedFd<'_>>) -> io::Result<OwnedFd> {
    const CLOSE_ON_EXEC: u64 = 1 << 3;
    assert!(
        attr.len() >= FLAGS_AT + 8 && attr[4..8] == (attr.len() as u32).to_ne_bytes(),
        "the kernel reads as much as it says"
    );
    let Watched { tid, cpu } = watched;
    let leader = leader.map_or(-1, |leader| leader.as_raw_fd());
    // SAFETY: the kernel reads the attributes, whose size was checked.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            attr.as_ptr(),
            tid,
            cpu,
            leader,
            CLOSE_ON_EXEC,
        )
    };
    if fd < 0 {
        return Err(Error::last_os_error());
    }
    let fd = i32::try_from(fd).expect("a descriptor");
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The attributes of an event of the software's own, by its number (`PERF_COUNT_SW_…`), which
/// begins disabled.
#[must_use]
pub fn software(number: u64) -> Vec<u8> {
    const SIZE: u32 = 112;
    let mut attr = vec![0; SIZE as usize];
    attr[0..4].copy_from_slice(&1u32.to_ne_bytes());
    attr[4..8].copy_from_slice(&SIZE.to_ne_bytes());
    attr[8..16].copy_from_slice(&number.to_ne_bytes());
    attr[FLAGS_AT..FLAGS_AT + 8].copy_from_slice(&DISABLED.to_ne_bytes());
    attr
}

fn control(event: impl AsFd, command: libc::c_ulong, argument: u64) -> io::Result<()> {
    let fd = event.as_fd().as_raw_fd();
    // SAFETY: where the argument is an address, the callers have it point at what the kernel reads.
    match unsafe { libc::ioctl(fd, command, argument) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Has an event count.
///
/// # Errors
/// As ioctl(2).
pub fn enable(event: impl AsFd) -> io::Result<()> {
    control(event, 0x2400, 0)
}

/// Has an event count no more.
///
/// # Errors
/// As ioctl(2).
pub fn disable(event: impl AsFd) -> io::Result<()> {
    control(event, 0x2401, 0)
}

/// Has an event count until it has overflowed `times` more times.
///
/// # Errors
/// As ioctl(2): `EINVAL` for one that does not sample, or that children inherit.
pub fn refresh(event: impl AsFd, times: u32) -> io::Result<()> {
    control(event, 0x2402, times.into())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use rustix::mm::{MapFlags, ProtFlags};
    use testkit::calls::Mapping;

    use super::*;

    #[test]
    fn page_faults_are_counted_while_it_is_enabled() {
        const PAGE_FAULTS: u64 = 2;
        let watched = Watched { tid: 0, cpu: -1 };
        let event = match open(&software(PAGE_FAULTS), watched, None) {
            Err(error) if error.raw_os_error() == Some(libc::EACCES) => return,
            opened => opened.unwrap(),
        };
        let count = || {
            let mut word = [0; 8];
            let mut file = std::fs::File::from(event.try_clone().unwrap());
            file.read_exact(&mut word).unwrap();
            u64::from_ne_bytes(word)
        };
        // Memory of the allocator's may have been touched before.
        let touch = || {
            let both = ProtFlags::READ | ProtFlags::WRITE;
            let memory = Mapping::anonymous(1 << 16, both, MapFlags::PRIVATE).unwrap();
            memory.store(0, 1);
        };
        touch();
        assert_eq!(count(), 0);
        enable(&event).unwrap();
        touch();
        disable(&event).unwrap();
        let counted = count();
        assert!(counted > 0);
        touch();
        assert_eq!(count(), counted);
    }
}
