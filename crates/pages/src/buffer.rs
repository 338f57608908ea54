//! Memory for pages on their way, aligned like pages: copies of whole aligned pages are faster.

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
