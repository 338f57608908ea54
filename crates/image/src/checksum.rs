//! The checksum of pages: XXH3 of 64 bits, by whichever of two programs is faster.
use twox_hash::XxHash3_64;
use xxhash_rust::xxh3::xxh3_64;

/// From so many bytes on it is worth asking the processor what it can: once, for 40 microseconds in
/// a virtual machine. A large run is summed up with AVX2 in three fifths of the time.
const LARGE_BYTES: usize = 512 << 10;

/// The checksum of some pages.
pub fn of_pages(bytes: &[u8]) -> u64 {
    match bytes.len() {
        ..LARGE_BYTES => xxh3_64(bytes),
        LARGE_BYTES.. => XxHash3_64::oneshot(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_are_the_same() {
        let bytes = (0..1 << 20).map(|at: u32| (at.wrapping_mul(at) >> 7) as u8);
        let bytes = bytes.collect::<Vec<_>>();
        for len in [
            0,
            1,
            240,
            241,
            4096,
            LARGE_BYTES - 1,
            LARGE_BYTES,
            bytes.len(),
        ] {
            let part = &bytes[..len];
            assert_eq!(xxh3_64(part), XxHash3_64::oneshot(part), "{len}");
            assert_eq!(of_pages(part), xxh3_64(part), "{len}");
        }
    }
}
