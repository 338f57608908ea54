//! How the pages of a chunk are stored.

use crate::run::PAGE_BYTES;

/// How the pages of a chunk are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Codec {
    /// As they are.
    #[default]
    None,
}

impl Codec {
    /// The codec of this number in a chunk's entry.
    pub(crate) fn of_number(number: u8) -> Option<Self> {
        match number {
            0 => Some(Self::None),
            _ => None,
        }
    }

    /// Its number in a chunk's entry.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::None => 0,
        }
    }

    /// Whether so many bytes can be so many pages.
    pub(crate) fn fits(self, stored_bytes: u32, pages: u32) -> bool {
        let bytes = u64::from(pages) * PAGE_BYTES as u64;
        match self {
            Self::None => u64::from(stored_bytes) == bytes,
        }
    }

    /// Decodes `stored` to `pages`, exactly.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn decode(self, stored: &[u8], pages: &mut [u8]) -> Result<(), String> {
        match self {
            Self::None if stored.len() == pages.len() => {
                pages.copy_from_slice(stored);
                Ok(())
            }
            Self::None => Err(format!("{} bytes", stored.len())),
        }
    }
}
