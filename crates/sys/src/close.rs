//! Closing many descriptors with few calls.

use std::os::fd::{IntoRawFd, OwnedFd};

/// Closes all of `descriptors`, those with consecutive numbers by one close_range(2).
pub fn all(descriptors: impl IntoIterator<Item = OwnedFd>) {
    let numbers = descriptors.into_iter().map(IntoRawFd::into_raw_fd);
    let mut numbers = numbers.collect::<Vec<_>>();
    numbers.sort_unstable();
    for stretch in numbers.chunk_by(|one, next| one + 1 == *next) {
        let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
        // SAFETY: the numbers were owned by this function, and nobody uses them any more.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn closed_pipes_end() {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let (other, last) = rustix::pipe::pipe().expect("a pipe");
        let number = writer.as_raw_fd();
        all([last, writer, other]);
        assert_eq!(
            rustix::io::read(&reader, &mut [0u8; 1]),
            Ok(0),
            "{number} is closed"
        );
    }
}
