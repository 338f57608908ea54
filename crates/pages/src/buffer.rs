//! Memory for pages on their way, aligned like pages: copies of whole aligned pages are faster.

use std::ops::Range;

use image::PAGE_BYTES;

/// Zeroed bytes that start on a page boundary.
pub struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Makes a buffer of `len` bytes.
    pub fn new(len: usize) -> Self {
        let bytes = vec![0; len + PAGE_BYTES];
        let start = bytes.as_ptr().addr().wrapping_neg() % PAGE_BYTES;
        Self { bytes, start, len }
    }

    /// The memory, for who fills it elsewhere: its bytes are those in the range.
    #[must_use]
    pub fn into_memory(self) -> (Vec<u8>, Range<usize>) {
        (self.bytes, self.start..self.start + self.len)
    }

    /// Takes memory back that [`Buffer::into_memory`] gave.
    #[must_use]
    pub const fn of_memory(bytes: Vec<u8>, range: Range<usize>) -> Self {
        let (start, len) = (range.start, range.end - range.start);
        Self { bytes, start, len }
    }

    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_large_enough() {
        for len in [0, 1, 4096, 1 << 20] {
            let mut buffer = Buffer::new(len);
            assert_eq!(buffer.bytes().len(), len);
            assert_eq!(buffer.bytes().as_ptr().addr() % PAGE_BYTES, 0);
        }
    }
}
