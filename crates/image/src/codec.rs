//! How the pages of a chunk are stored.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use lz4::block::{CompressionMode, compress_to_buffer, decompress_to_buffer};
use zstd::bulk::{Compressor, Decompressor};

use crate::page::PAGE_BYTES;

/// How the pages of a chunk are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Codec {
    /// As they are.
    #[default]
    None,
    /// As a block of LZ4.
    Lz4,
    /// As a frame of Zstandard.
    Zstd,
}

const CODECS: [Codec; 3] = [Codec::None, Codec::Lz4, Codec::Zstd];

/// How little LZ4 looks for what is repeated: 1 is its own default. docs/pages.md says what was
/// measured for it.
const LZ4_ACCELERATION: i32 = 8;

/// How an image is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Compression {
    /// With [`Codec::Lz4`].
    Lz4,
    /// With [`Codec::Zstd`], at this level.
    Zstd(i32),
}

impl Compression {
    /// The level of Zstandard where none is named: its own default.
    pub const ZSTD_LEVEL: i32 = 3;

    /// The highest level of Zstandard.
    const ZSTD_LEVEL_MAX: i32 = 22;

    fn codec(self) -> Codec {
        match self {
            Self::Lz4 => Codec::Lz4,
            Self::Zstd(_) => Codec::Zstd,
        }
    }

    /// Encodes `pages` to the front of `buffer`, which is as long, at least; gives how many bytes
    /// those are now, or none where that does not pay.
    pub(crate) fn encode(self, pages: &[u8], buffer: &mut [u8]) -> Option<(Codec, usize)> {
        // To decode costs a restore as much as to read several times that. Either library ends as
        // soon as the buffer is full.
        let buffer = &mut buffer[..pages.len() - pages.len() / 8];
        let len = match self {
            Self::Lz4 => {
                let how = CompressionMode::FAST(LZ4_ACCELERATION);
                compress_to_buffer(pages, Some(how), false, buffer).ok()
            }
            Self::Zstd(level) => compress(level, pages, buffer),
        };
        Some((self.codec(), len?))
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

impl FromStr for Compression {
    type Err = String;

    /// Reads `lz4`, `zstd` or `zstd:LEVEL`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "lz4" => Ok(Self::Lz4),
            None if text == "zstd" => Ok(Self::Zstd(Self::ZSTD_LEVEL)),
            Some(("zstd", level)) => {
                let known = 1..=Self::ZSTD_LEVEL_MAX;
                let level = level.parse().ok().filter(|level| known.contains(level));
                let most = Self::ZSTD_LEVEL_MAX;
                let level = level.ok_or(format!("the levels of zstd are 1 to {most}"))?;
                Ok(Self::Zstd(level))
            }
            _ => Err("it is lz4, zstd or zstd:LEVEL".into()),
        }
    }
}

impl Codec {
    /// The codec of this number in a chunk's entry.
    pub(crate) fn of_number(number: u8) -> Option<Self> {
        CODECS.get(usize::from(number)).copied()
    }

    /// Its number in a chunk's entry.
    pub(crate) fn number(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Lz4 => 1,
            Self::Zstd => 2,
        }
    }

    /// Its name, as a feature of images that need it; none for pages as they are.
    pub(crate) fn feature(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Lz4 => Some("lz4"),
            Self::Zstd => Some("zstd"),
        }
    }

    /// Tells whether so many bytes can be so many pages. Those that are encoded are fewer.
    pub(crate) fn fits(self, stored_bytes: u32, pages: u32) -> bool {
        let bytes = u64::from(pages) * PAGE_BYTES as u64;
        match self {
            Self::None => u64::from(stored_bytes) == bytes,
            Self::Lz4 | Self::Zstd => stored_bytes > 0 && u64::from(stored_bytes) < bytes,
        }
    }

    /// Decodes `stored` to `pages`, exactly: whatever it claims to be, it gets no more room.
    pub(crate) fn decode(self, stored: &[u8], pages: &mut [u8]) -> Result<(), String> {
        let decoded = match self {
            Self::None if stored.len() == pages.len() => {
                pages.copy_from_slice(stored);
                Ok(pages.len())
            }
            Self::None => Ok(stored.len()),
            Self::Lz4 => {
                let decoded = decompress_to_buffer(stored, Some(pages.len() as i32), pages);
                decoded.map_err(|error| error.to_string())
            }
            Self::Zstd => decompress(stored, pages),
        };
        match decoded? {
            bytes if bytes == pages.len() => Ok(()),
            bytes => Err(format!("it is {bytes} bytes of pages")),
        }
    }
}

thread_local! {
    static COMPRESSOR: RefCell<Option<(i32, Compressor<'static>)>> = const { RefCell::new(None) };
    static DECOMPRESSOR: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Compresses with this thread's own memory for it, which is kept; none where that fails.
fn compress(level: i32, pages: &[u8], buffer: &mut [u8]) -> Option<usize> {
    COMPRESSOR.with_borrow_mut(|kept| {
        if kept.as_ref().is_none_or(|(of, _)| *of != level) {
            *kept = Some((level, Compressor::new(level).ok()?));
        }
        let (_, compressor) = kept.as_mut()?;
        compressor.compress_to_buffer(pages, buffer).ok()
    })
}

fn decompress(stored: &[u8], pages: &mut [u8]) -> Result<usize, String> {
    DECOMPRESSOR.with_borrow_mut(|kept| {
        if kept.is_none() {
            *kept = Some(Decompressor::new().map_err(|error| error.to_string())?);
        }
        let decompressor = kept.as_mut().expect("just made");
        let decoded = decompressor.decompress_to_buffer(stored, pages);
        decoded.map_err(|error| error.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Compression; 3] = [
        Compression::Lz4,
        Compression::Zstd(1),
        Compression::Zstd(19),
    ];

    fn text(pages: usize) -> Vec<u8> {
        let words = ["memory ", "of ", "a ", "process ", "that ", "runs "];
        let words = (0_u32..).flat_map(|at| words[(at.wrapping_mul(at) / 7) as usize % 6].bytes());
        words.take(pages * PAGE_BYTES).collect()
    }

    fn noise(pages: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u8
        };
        std::iter::repeat_with(next)
            .take(pages * PAGE_BYTES)
            .collect()
    }

    fn encoded(compression: Compression, pages: &[u8]) -> Option<(Codec, Vec<u8>)> {
        let mut buffer = vec![0; pages.len()];
        let (codec, len) = compression.encode(pages, &mut buffer)?;
        buffer.truncate(len);
        Some((codec, buffer))
    }

    #[test]
    fn pages_survive() {
        for compression in ALL {
            for pages in [1, 16, 256] {
                let whole = text(pages);
                let (codec, stored) = encoded(compression, &whole).expect("it pays");
                assert!(codec.fits(stored.len() as u32, pages as u32));
                let mut decoded = vec![0; whole.len()];
                codec.decode(&stored, &mut decoded).expect("right");
                assert_eq!(decoded, whole);
            }
        }
    }

    #[test]
    fn what_does_not_pay_is_not_encoded() {
        for compression in ALL {
            assert_eq!(encoded(compression, &noise(16)), None);
            // A tenth less is too little.
            let mut nearly = noise(20);
            nearly[..2 * PAGE_BYTES].fill(1);
            assert_eq!(encoded(compression, &nearly), None);
            nearly[..4 * PAGE_BYTES].fill(1);
            assert!(encoded(compression, &nearly).is_some());
        }
    }

    #[test]
    fn what_decodes_to_more_or_less_is_refused() {
        for compression in ALL {
            // Gigabytes of one byte would be as long.
            let encoded = encoded(compression, &vec![3; 256 * PAGE_BYTES]);
            let (codec, stored) = encoded.expect("it pays");
            for pages in [1, 255, 257] {
                let mut buffer = vec![0; pages * PAGE_BYTES];
                assert!(
                    codec.decode(&stored, &mut buffer).is_err(),
                    "{codec:?} {pages}"
                );
            }
            let mut buffer = vec![0; 256 * PAGE_BYTES];
            let cut = stored.len() - 1;
            assert!(codec.decode(&stored[..cut], &mut buffer).is_err());
            assert!(codec.decode(&[], &mut buffer).is_err());
        }
    }

    #[test]
    fn names_are_read() {
        for (text, compression) in [
            ("lz4", Compression::Lz4),
            ("zstd", Compression::Zstd(3)),
            ("zstd:19", Compression::Zstd(19)),
        ] {
            assert_eq!(text.parse(), Ok(compression));
            assert_eq!(compression.to_string().parse(), Ok(compression));
        }
        for wrong in ["", "gzip", "lz4:1", "zstd:", "zstd:0", "zstd:23", "zstd:x"] {
            assert!(wrong.parse::<Compression>().is_err(), "{wrong}");
        }
        for codec in CODECS {
            assert_eq!(Codec::of_number(codec.number()), Some(codec));
        }
        assert_eq!(Codec::of_number(3), None);
    }
}
