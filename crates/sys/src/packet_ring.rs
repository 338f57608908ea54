//! The memory that a packet socket shares with its owner (packet(7), packet_mmap.rst): mapped once
//! more, and read and written word by word, as the kernel and others write to it as well.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::words::Words;

/// The memory of a socket's rings.
#[derive(Debug)]
pub struct PacketRing(Words);

impl PacketRing {
    /// Maps the rings of `socket`, which have so many bytes together (mmap(2)).
    ///
    /// # Errors
    /// The call's errno: `EINVAL` for another size, or without rings.
    pub fn map(socket: impl AsFd, bytes: usize) -> io::Result<Self> {
        let socket = socket.as_fd().as_raw_fd();
        Words::mapped(bytes / 8, libc::MAP_SHARED, socket).map(Self)
    }

    /// How much it is, in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    fn eight(&self, at: usize) -> &AtomicU64 {
        assert!(at.is_multiple_of(8), "aligned");
        &self.0[at / 8]
    }

    fn four(&self, at: usize) -> &AtomicU32 {
        assert!(at.is_multiple_of(4), "aligned");
        let halves = std::ptr::from_ref(&self.0[at / 8]).cast::<AtomicU32>();
        // SAFETY: each word has two halves.
        let place = unsafe { halves.add(at / 4 % 2) };
        // SAFETY: four aligned bytes of a word, which lives as long as the value.
        unsafe { &*place }
    }

    /// The 32 bits at `at`, before anything that is read afterwards.
    ///
    /// # Panics
    /// For a place outside of the memory, or that is no multiple of four.
    #[must_use]
    pub fn word(&self, at: usize) -> u32 {
        self.four(at).load(Ordering::Acquire)
    }

    /// Sets the 32 bits at `at`, after anything that was written before.
    ///
    /// # Panics
    /// As [`PacketRing::word`].
    pub fn set_word(&self, at: usize, value: u32) {
        self.four(at).store(value, Ordering::Release);
    }

    /// Sets the 32 bits at `at` where they are `was`; whether they were.
    ///
    /// # Panics
    /// As [`PacketRing::word`].
    pub fn change_word(&self, at: usize, was: u32, value: u32) -> bool {
        let (success, failure) = (Ordering::AcqRel, Ordering::Acquire);
        let changed = self.four(at).compare_exchange(was, value, success, failure);
        changed.is_ok()
    }

    /// Copies what is there at `at`, in bytes; both are multiples of eight.
    ///
    /// # Panics
    /// For a place outside of the memory.
    #[must_use]
    pub fn read(&self, at: usize, bytes: usize) -> Vec<u8> {
        let places = (at..at + bytes).step_by(8);
        let words = places.map(|at| self.eight(at).load(Ordering::Relaxed));
        words.flat_map(u64::to_ne_bytes).collect()
    }

    /// Writes `bytes`, a multiple of eight of them, at `at`.
    ///
    /// # Panics
    /// For a place outside of the memory.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        for (place, word) in (at..).step_by(8).zip(bytes.chunks_exact(8)) {
            let word = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
            self.eight(place).store(word, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::socket;

    #[test]
    fn what_is_written_is_read() {
        const SOL_PACKET: i32 = libc::SOL_PACKET;
        const PACKET_RX_RING: i32 = libc::PACKET_RX_RING;
        let Ok(socket) = socket::open(libc::AF_PACKET, libc::SOCK_RAW, 0) else {
            eprintln!("skipped: no packet sockets here");
            return;
        };
        let sizes = [4096u32, 2, 2048, 4].map(u32::to_ne_bytes).concat();
        socket::set_option(&socket, SOL_PACKET, PACKET_RX_RING, &sizes).unwrap();
        assert!(PacketRing::map(&socket, 4096).is_err());
        let ring = PacketRing::map(&socket, 8192).unwrap();
        ring.write(4096, &[7; 16]);
        ring.set_word(4100, 9);
        assert!(ring.change_word(4104, 0x0707_0707, 8) && !ring.change_word(4104, 9, 1));
        assert_eq!((ring.word(4100), ring.word(4104)), (9, 8));
        ring.set_word(4104, 0);
        let other = PacketRing::map(&socket, 8192).unwrap();
        drop(ring);
        let read = other.read(4096, 8);
        assert_eq!(read, [7, 7, 7, 7, 9, 0, 0, 0]);
    }
}
