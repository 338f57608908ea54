//! The numbers that name the entries of a folder of /proc: threads, descriptors.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::fs::RawDir;

/// The numbers among the names in `folder`, one of /proc/PID/task or /proc/PID/fd, in the
/// kernel's order.
///
/// # Errors
/// `ENOENT` and `ESRCH` when the process is gone. See getdents64(2).
pub fn of(folder: impl AsFd) -> rustix::io::Result<Vec<i32>> {
    // Entries of such a folder take 24 or 32 bytes, and the kernel gives as many as there is room
    // for: fewer than would fill it are all.
    const ROOM_BYTES: usize = 8192;
    const FULL: usize = ROOM_BYTES / 32 - 16;
    let mut room = [MaybeUninit::uninit(); ROOM_BYTES];
    let mut entries = RawDir::new(folder, &mut room);
    let mut numbers = Vec::new();
    let mut together = 0;
    while let Some(entry) = entries.next() {
        let name = entry?.file_name().to_str().ok().map(str::parse);
        if let Some(Ok(number)) = name {
            numbers.push(number);
        }
        together += 1;
        if entries.is_buffer_empty() {
            if together < FULL {
                break;
            }
            together = 0;
        }
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{Mode, OFlags, open};

    use super::*;

    #[test]
    fn few_and_many_descriptors_are_listed() {
        let files = || {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            open("/proc/self/fd", flags, Mode::empty()).unwrap()
        };
        let has = |number: &i32| of(files()).unwrap().contains(number);
        let own = |file: &rustix::fd::OwnedFd| std::os::fd::AsRawFd::as_raw_fd(file);
        let one = files();
        assert!(has(&own(&one)));
        let many = std::iter::repeat_with(files).take(700).collect::<Vec<_>>();
        let listed = of(files()).unwrap();
        assert!(many.iter().all(|file| listed.contains(&own(file))));
    }
}
