//! Bytes that are at hand.
use crate::{Extent, Result, Source};

/// Bytes in this process's memory; the last page is filled up with zeros.
///
/// An extent's `at` is an offset here.
#[derive(Debug)]
pub struct Bytes(pub Vec<u8>);

impl Source for Bytes {
    fn read(&self, extents: &[Extent], mut buffer: &mut [u8]) -> Result<()> {
        for extent in extents {
            let (part, rest) = buffer.split_at_mut(extent.bytes() as usize);
            buffer = rest;
            let there = self.0.get(extent.at.0 as usize..).unwrap_or_default();
            let (filled, empty) = part.split_at_mut(there.len().min(part.len()));
            filled.copy_from_slice(&there[..filled.len()]);
            empty.fill(0);
        }
        Ok(())
    }
}
