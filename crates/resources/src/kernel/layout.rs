//! Where the members of the kernel's structures are, kept for the next one who asks: the kernel's
//! description of its types has megabytes, of which a few numbers are needed.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use prost::Message;
use sys::btf::{Member, Types};

use crate::cache::Cache;

/// The name of the cache.
const NAME: &str = "kernel";

/// What is known of the running kernel's structures.
pub(super) struct Layout {
    cache: Cache,
    types: OnceLock<Result<Types, String>>,
    known: Mutex<Known>,
}

/// What was asked so far, now or earlier.
#[derive(Default)]
struct Known {
    /// By structure and member: "pid.level"; the size of a structure without a member. None for
    /// what the kernel does not have.
    places: HashMap<String, Option<Member>>,
    /// For what all that is needed was looked up.
    purposes: Vec<Vec<u8>>,
    has_more_than_kept: bool,
}

/// What is kept.
#[derive(Clone, PartialEq, Message)]
struct Kept {
    #[prost(message, repeated, tag = "1")]
    places: Vec<KeptPlace>,
    #[prost(bytes = "vec", repeated, tag = "2")]
    purposes: Vec<Vec<u8>>,
}

#[derive(Clone, PartialEq, Message)]
struct KeptPlace {
    #[prost(string, tag = "1")]
    name: String,
    /// From the structure's first bit; none for a member that the kernel does not have.
    #[prost(uint64, optional, tag = "2")]
    bit: Option<u64>,
    #[prost(uint32, tag = "3")]
    bits: u32,
}

/// Whether all that has to be known of the kernel's structures for `purpose`, as the link of a kind
/// of descriptors, is at hand without reading the kernel's description of its types.
#[must_use]
pub fn is_known_for(purpose: &[u8]) -> bool {
    Layout::of_this_kernel().is_known_for(purpose)
}

/// Reads the kernel's description of its types. Whoever needs it for `purpose` next finds in the
/// cache what is asked from here on.
pub fn learn(purpose: &[u8]) {
    Layout::of_this_kernel().learn(purpose);
}

/// Keeps what was asked, if there is anything new.
pub fn keep() {
    if let Some(layout) = LAYOUT.get() {
        layout.keep();
    }
}

/// Forgets what is kept.
pub fn forget() {
    Cache::of_this_host(NAME).forget();
}

static LAYOUT: OnceLock<Layout> = OnceLock::new();

impl Layout {
    /// That of the running kernel.
    pub fn of_this_kernel() -> &'static Self {
        LAYOUT.get_or_init(|| Self::new(Cache::of_this_host(NAME)))
    }

    /// What is kept, and what can be looked up besides.
    fn new(cache: Cache) -> Self {
        let kept = cache.load().and_then(|bytes| Kept::decode(&*bytes).ok());
        let kept = kept.unwrap_or_default();
        let place = |place: KeptPlace| {
            let bit = place.bit.and_then(|bit| usize::try_from(bit).ok());
            let bits = place.bits;
            (place.name, bit.map(|bit| Member { bit, bits }))
        };
        let known = Known {
            places: kept.places.into_iter().map(place).collect(),
            purposes: kept.purposes,
            has_more_than_kept: false,
        };
        Self {
            cache,
            types: OnceLock::new(),
            known: Mutex::new(known),
        }
    }

    /// Whether something is known of this kernel.
    pub fn check(&self) -> Result<(), String> {
        if !self.known().places.is_empty() {
            return Ok(());
        }
        self.types().as_ref().map(drop).map_err(Clone::clone)
    }

    /// The size of a structure in bytes.
    pub fn size(&self, structure: &str) -> Option<usize> {
        let size = |types: &Types| {
            let bit = types.size(structure)?;
            Some(Member { bit, bits: 0 })
        };
        self.look_up(structure.to_owned(), size)
            .map(|size| size.bit)
    }

    /// Where a member of a structure is, by its path.
    pub fn member(&self, structure: &str, path: &str) -> Option<Member> {
        let member = |types: &Types| types.member(structure, path);
        self.look_up(format!("{structure}.{path}"), member)
    }

    fn look_up(&self, name: String, look: impl FnOnce(&Types) -> Option<Member>) -> Option<Member> {
        if let Some(place) = self.known().places.get(&name) {
            return *place;
        }
        let place = look(self.types().as_ref().ok()?);
        let mut known = self.known();
        known.places.insert(name, place);
        known.has_more_than_kept = true;
        place
    }

    fn types(&self) -> &Result<Types, String> {
        self.types.get_or_init(|| {
            log::debug!("the kernel's description of its types is read");
            let types = Types::of_kernel();
            types.map_err(|error| format!("/sys/kernel/btf/vmlinux: {error}"))
        })
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_known_for(&self, purpose: &[u8]) -> bool {
        // Where there is none to be read, that is known.
        self.types.get().is_some() || self.known().purposes.iter().any(|known| known == purpose)
    }

    fn learn(&self, purpose: &[u8]) {
        if self.types().is_ok() && !self.known().purposes.iter().any(|known| known == purpose) {
            let mut known = self.known();
            known.purposes.push(purpose.to_vec());
            known.has_more_than_kept = true;
        }
    }

    fn keep(&self) {
        let mut known = self.known();
        if !std::mem::take(&mut known.has_more_than_kept) {
            return;
        }
        let place = |(name, place): (&String, &Option<Member>)| KeptPlace {
            name: name.clone(),
            bit: place.map(|place| place.bit as u64),
            bits: place.map_or(0, |place| place.bits),
        };
        let kept = Kept {
            places: known.places.iter().map(place).collect(),
            purposes: known.purposes.clone(),
        };
        self.cache.store(&kept.encode_to_vec());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_were_asked_are_known_without_reading() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = || Cache::at(folder.path().join("kernel"), "one kernel");
        let first = Layout::new(cache());
        if first.types().is_err() {
            testkit::skip!("this kernel does not describe its types");
        }
        let next = || Layout::new(cache());
        let asked = |layout: &Layout| {
            let level = layout.member("pid", "level");
            let none = layout.member("pid", "no_such_member");
            (layout.size("pid"), level, none)
        };
        assert!(!next().is_known_for(b"rings"));
        first.learn(b"rings");
        let found = asked(&first);
        assert!(found.0.is_some() && found.1.is_some() && found.2.is_none());
        first.keep();
        let second = next();
        assert!(second.is_known_for(b"rings") && !second.is_known_for(b"maps"));
        assert_eq!(second.check(), Ok(()));
        assert_eq!(asked(&second), found);
        assert!(second.types.get().is_none(), "nothing was read");
        // Another member is looked up, and kept as well.
        let number = second.member("upid", "nr");
        assert!(number.is_some() && second.types.get().is_some());
        second.keep();
        let third = next();
        assert_eq!((third.member("upid", "nr"), asked(&third)), (number, found));
        assert!(third.types.get().is_none(), "nothing was read");
    }
}
