//! The checksum of pages: XXH3 of 64 bits, by whichever of two programs is faster.
use twox_hash::XxHash3_64;
use xxhash_rust::xxh3::xxh3_64;

/// From so many bytes on it is worth asking the processor what it can: once, for 40 microseconds in
/// a virtual machine. Much is summed up with AVX2 in three fifths of the time.
const LARGE_BYTES: usize = 512 << 10;

/// The checksum of pieces of `all_bytes` together.
pub fn of_many(all_bytes: usize) -> fn(&[u8]) -> u64 {
    match all_bytes {
        ..LARGE_BYTES => xxh3_64,
        LARGE_BYTES.. => XxHash3_64::oneshot,
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
            assert_eq!(of_many(len)(part), xxh3_64(part), "{len}");
        }
    }
}
