//! The checksums of ext4: CRC-32C without its last inversion, and CRC-16.

use crc::{CRC_16_MODBUS, Crc};

static CRC16: Crc<u16> = Crc::<u16>::new(&CRC_16_MODBUS);

/// Goes on with a checksum; the first one begins with all bits set.
pub fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}

/// The checksum of group descriptors without `metadata_csum`.
pub fn crc16(parts: &[&[u8]]) -> u16 {
    let mut digest = CRC16.digest();
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize()
}
