//! Numbers in the file system's blocks: little-endian, at offsets.

/// Two bytes at `at`.
pub fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// Four bytes at `at`.
pub fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// A number of 64 bits whose halves stand apart.
pub fn joined(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}
