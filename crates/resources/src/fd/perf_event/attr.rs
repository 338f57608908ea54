//! What an event is: `struct perf_event_attr`, as perf_event_open(2) takes it.

use crate::{Error, Result};

/// The size of the first version of the structure (`PERF_ATTR_SIZE_VER0`).
const LEAST_BYTES: usize = 64;
/// The most that the kernel takes.
const MOST_BYTES: usize = 4096;

/// Kinds of events that have the same number everywhere: `enum perf_type_id`.
pub(super) mod kind {
    pub const HARDWARE: u32 = 0;
    pub const SOFTWARE: u32 = 1;
    pub const TRACEPOINT: u32 = 2;
    pub const CACHE: u32 = 3;
    pub const RAW: u32 = 4;
    pub const BREAKPOINT: u32 = 5;
}

/// Bits of its flags.
const DISABLED: u64 = sys::perf_event::DISABLED;
/// `PERF_FORMAT_ID`.
const READS_NUMBER: u64 = 1 << 2;

/// The attributes of an event.
pub(super) struct Attr(Vec<u8>);

impl Attr {
    /// Those that the kernel has, of which it was given as much as they say.
    pub fn seen(mut bytes: Vec<u8>) -> Self {
        let given = u32::from_ne_bytes(bytes[4..8].try_into().expect("four bytes"));
        let given = usize::try_from(given).unwrap_or(LEAST_BYTES);
        bytes.truncate(given.max(LEAST_BYTES));
        let bytes_now = u32::try_from(bytes.len()).expect("a structure");
        let mut attr = Self(bytes);
        attr.set_half(4, bytes_now);
        attr
    }

    /// Those of an image.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let is_sound = (LEAST_BYTES..=MOST_BYTES).contains(&bytes.len())
            && bytes.len().is_multiple_of(8)
            && bytes[4..8] == (bytes.len() as u32).to_ne_bytes();
        match is_sound {
            true => Ok(Self(bytes.to_vec())),
            false => Err(Error::corrupt("performance event", "has no attributes")),
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The same, of an event that does not count when it is opened.
    pub fn disabled(&self) -> Vec<u8> {
        let mut bytes = self.0.clone();
        let at = sys::perf_event::FLAGS_AT;
        bytes[at..at + 8].copy_from_slice(&(self.word(at) | DISABLED).to_ne_bytes());
        bytes
    }

    fn half(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.0[at..at + 4].try_into().expect("four bytes"))
    }

    fn set_half(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.0[at..at + 8].try_into().expect("eight bytes"))
    }

    /// [`kind`], or a number that this host has given to a driver.
    pub fn kind(&self) -> u32 {
        self.half(0)
    }

    pub fn set_kind(&mut self, kind: u32) {
        self.set_half(0, kind);
    }

    pub fn config(&self) -> u64 {
        self.word(8)
    }

    pub fn set_config(&mut self, config: u64) {
        self.0[8..16].copy_from_slice(&config.to_ne_bytes());
    }

    /// The driver that an event of the processor's names in the upper half of its number, by the
    /// number that this host has given it; 0 for none.
    pub fn driver(&self) -> u32 {
        match self.kind() {
            kind::HARDWARE | kind::CACHE => (self.config() >> 32) as u32,
            _ => 0,
        }
    }

    /// Whether what is read of it tells a number that no event can be given.
    pub fn reads_number(&self) -> bool {
        self.word(32) & READS_NUMBER != 0
    }

    /// Where a breakpoint is.
    pub fn breakpoint(&self) -> Option<u64> {
        (self.kind() == kind::BREAKPOINT).then(|| self.word(56))
    }
}
