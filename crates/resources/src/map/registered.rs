//! Memory that is registered with a userfaultfd of the tree's own: which of its pages are there,
//! and which are protected.
//!
//! A page that is missing is one of which a program expects to hear; one that is there and full of
//! zeros is not. So it is kept page by page what is there, and so is, of memory in files whose
//! contents are in the image, what those have.

use abi::spans::Spans;
use abi::{Addr, PAGE_BYTES, Span};
use prost::Message;

use super::listing::Listed;
use super::memory::Mapping;
use crate::{Error, Result};

/// The number of the record; one a process that has such memory.
pub const TAG: u16 = 304;

/// `UFFDIO_REGISTER_MODE_MISSING`.
pub const MISSING: u32 = linux_raw_sys::general::UFFDIO_REGISTER_MODE_MISSING;
/// `UFFDIO_REGISTER_MODE_WP`.
pub const PROTECTION: u32 = linux_raw_sys::general::UFFDIO_REGISTER_MODE_WP;
/// `UFFDIO_REGISTER_MODE_MINOR`.
pub const MINOR: u32 = linux_raw_sys::general::UFFDIO_REGISTER_MODE_MINOR;

/// `VmFlags` codes and the mode that sets them.
const MODES: [(&[u8; 2], u32); 3] = [(b"um", MISSING), (b"uw", PROTECTION), (b"ui", MINOR)];

/// The registered mappings of a process in an image.
#[derive(Clone, PartialEq, Message)]
pub struct Registrations {
    /// Sorted and disjoint.
    #[prost(message, repeated, tag = "1")]
    pub registrations: Vec<Registration>,
}

/// A mapping that is registered.
#[derive(Clone, PartialEq, Message)]
pub struct Registration {
    /// The first address.
    #[prost(uint64, tag = "1")]
    pub start: u64,
    /// The address after the last.
    #[prost(uint64, tag = "2")]
    pub end: u64,
    /// For which faults: 1 of missing pages, 2 by write protection, 4 of pages that are cached but
    /// not mapped.
    #[prost(uint32, tag = "3")]
    pub modes: u32,
    /// The userfaultfd's description.
    #[prost(uint32, tag = "4")]
    pub description: u32,
    /// Pages that are there: by turns, how many pages after the last such ones, and how many.
    #[prost(uint64, repeated, tag = "5")]
    pub present: Vec<u64>,
    /// Pages that are write-protected, there or not, likewise.
    #[prost(uint64, repeated, tag = "6")]
    pub protected: Vec<u64>,
    /// Pages that are lost, likewise.
    #[prost(uint64, repeated, tag = "7")]
    pub lost: Vec<u64>,
    /// Of memory in a file whose contents the image has, the pages that the file has, likewise.
    #[prost(uint64, repeated, tag = "8")]
    pub cached: Vec<u64>,
    /// The size of its pages where they are huge pages of hugetlbfs.
    #[prost(uint64, tag = "9")]
    pub huge_page_bytes: u64,
}

/// For which faults a mapping is registered, as `VmFlags` say.
#[must_use]
pub fn modes(listed: &Listed) -> u32 {
    let set = MODES.iter().filter(|(code, _)| listed.has(code));
    set.map(|(_, mode)| mode).sum()
}

/// Pages of `span` by turns: how many after the last ones, and how many.
#[must_use]
pub fn pack(span: Span, pages: &Spans) -> Vec<u64> {
    let mut at = span.start;
    let mut packed = Vec::with_capacity(2 * pages.len());
    for one in pages.iter() {
        packed.extend([(one.start.0 - at.0) / PAGE_BYTES, one.pages()]);
        at = one.end;
    }
    packed
}

impl Registration {
    /// The addresses.
    #[must_use]
    pub fn span(&self) -> Span {
        Span {
            start: Addr(self.start),
            end: Addr(self.end),
        }
    }

    /// The size of its pages in bytes.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        match self.huge_page_bytes {
            0 => PAGE_BYTES,
            bytes => bytes,
        }
    }

    /// The addresses of pages that were packed; nothing where they are not inside of it.
    fn unpacked(&self, packed: &[u64]) -> Option<Spans> {
        let mut spans = Spans::new();
        let mut at = self.start;
        for two in packed.chunks(2) {
            let [after, count] = *two else { return None };
            let bytes = |pages: u64| pages.checked_mul(PAGE_BYTES);
            let start = at.checked_add(bytes(after)?)?;
            at = start.checked_add(bytes(count)?)?;
            if count == 0 || at > self.end {
                return None;
            }
            spans.push(Span {
                start: Addr(start),
                end: Addr(at),
            });
        }
        Some(spans)
    }

    /// Pages that are there.
    #[must_use]
    pub fn present(&self) -> Spans {
        self.unpacked(&self.present).unwrap_or_default()
    }

    /// Pages that are write-protected.
    #[must_use]
    pub fn protected(&self) -> Spans {
        self.unpacked(&self.protected).unwrap_or_default()
    }

    /// Pages that are lost.
    #[must_use]
    pub fn lost(&self) -> Spans {
        self.unpacked(&self.lost).unwrap_or_default()
    }

    /// Where the pages are mapped that the file has.
    #[must_use]
    pub fn cached(&self) -> Spans {
        self.unpacked(&self.cached).unwrap_or_default()
    }

    fn is_sound(&self) -> bool {
        let all = [&self.present, &self.protected, &self.lost, &self.cached];
        let known = MISSING | PROTECTION | MINOR;
        let modes = self.modes != 0 && self.modes & !known == 0;
        let size = self.page_bytes();
        let is_size = size.is_power_of_two() && (PAGE_BYTES..=1 << 30).contains(&size);
        let is_whole = is_size && (self.start | self.end).is_multiple_of(size);
        modes && is_whole && all.iter().all(|packed| self.unpacked(packed).is_some())
    }
}

impl Registrations {
    /// Reads a record, and checks what it claims about these mappings.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn read(payload: Option<&[u8]>, mappings: &[Mapping]) -> Result<Self> {
        let corrupt = |what: String| Error::corrupt("registered memory", what);
        let Some(payload) = payload else {
            return Ok(Self::default());
        };
        let read: Self =
            image::strict::decode(payload).map_err(|what| corrupt(what.to_string()))?;
        let mut last = 0;
        for one in &read.registrations {
            let span = one.span();
            let is_mapped = mappings.iter().any(|map| map.span() == span);
            if !is_mapped || one.start < last || !one.is_sound() {
                return Err(corrupt(format!("{span} makes no sense")));
            }
            last = one.end;
        }
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registration() -> Registration {
        Registration {
            start: 0x10000,
            end: 0x20000,
            modes: MISSING,
            present: vec![1, 2, 3, 10],
            ..Registration::default()
        }
    }

    #[test]
    fn pages_come_back_as_they_were_packed() {
        let one = registration();
        let span = |start, end| Span {
            start: Addr(start),
            end: Addr(end),
        };
        let want = [span(0x11000, 0x13000), span(0x16000, 0x20000)];
        assert_eq!(one.present(), want);
        assert_eq!(pack(one.span(), &one.present()), one.present);
        assert!(one.protected().is_empty());
    }

    #[test]
    fn nonsense_is_refused() {
        let mapping = Mapping {
            start: 0x10000,
            end: 0x20000,
            ..Mapping::default()
        };
        let read = |registration: Registration| {
            let registrations = vec![registration.clone(), registration];
            let one = Registrations {
                registrations: registrations[..1].to_vec(),
            };
            let two = Registrations { registrations }.encode_to_vec();
            let mappings = std::slice::from_ref(&mapping);
            Registrations::read(Some(&two), mappings).expect_err("it is there twice");
            Registrations::read(Some(&one.encode_to_vec()), mappings)
        };
        read(registration()).expect("it is sound");
        let changes: [fn(&mut Registration); 7] = [
            |one| one.end = 0x1f000,
            |one| one.modes = 0,
            |one| one.modes = 8,
            |one| one.huge_page_bytes = 2 << 20,
            |one| one.present = vec![1],
            |one| one.lost = vec![0, 17],
            |one| one.cached = vec![u64::MAX / PAGE_BYTES, 2],
        ];
        for change in changes {
            let mut one = registration();
            change(&mut one);
            let error = read(one).expect_err("it makes no sense");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }
}
