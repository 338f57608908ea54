//! Where the members of the kernel's structures are, kept for the next one who asks: the kernel's
//! description of its types has megabytes, of which a few numbers are needed.

use std::collections::HashMap;
use std::io::Result as IoResult;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

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
    purposes: Vec<String>,
    has_more_than_kept: bool,
}

impl Known {
    /// What is kept: a line for each place and each purpose.
    fn text(&self) -> String {
        let mut text = String::new();
        for (name, place) in &self.places {
            text += &match place {
                Some(Member { bit, bits }) => format!("at {bit} {bits} {name}\n"),
                None => format!("nowhere {name}\n"),
            };
        }
        for purpose in &self.purposes {
            text += &format!("for {purpose}\n");
        }
        text
    }

    /// Reads what was kept; none where it makes no sense.
    fn read(bytes: &[u8]) -> Option<Self> {
        let mut known = Self::default();
        for line in std::str::from_utf8(bytes).ok()?.lines() {
            let (what, rest) = line.split_once(' ')?;
            match what {
                "at" => {
                    let (bit, rest) = rest.split_once(' ')?;
                    let (bits, name) = rest.split_once(' ')?;
                    let (bit, bits) = (bit.parse().ok()?, bits.parse().ok()?);
                    let place = Some(Member { bit, bits });
                    known.places.insert(name.to_owned(), place);
                }
                "nowhere" => drop(known.places.insert(rest.to_owned(), None)),
                "for" => known.purposes.push(rest.to_owned()),
                _ => return None,
            }
        }
        Some(known)
    }
}

/// Whether all that has to be known of the kernel's structures for `purpose`, as the link of a kind
/// of descriptors, is at hand without reading the kernel's description of its types.
#[must_use]
pub fn is_known_for(purpose: &str) -> bool {
    Layout::of_this_kernel().is_known_for(purpose)
}

/// Reads the kernel's description of its types. Whoever needs it for `purpose` next finds in the
/// cache what is asked from here on.
pub fn learn(purpose: &str) {
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
        let kept = cache.load().and_then(|bytes| Known::read(&bytes));
        Self {
            cache,
            types: OnceLock::new(),
            known: Mutex::new(kept.unwrap_or_default()),
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

    /// A place that the kernel's description of its types does not have, and `find` finds.
    pub fn found(&self, name: &str, find: impl FnOnce() -> IoResult<u64>) -> IoResult<u64> {
        if let Some(Some(place)) = self.known().places.get(name) {
            return Ok(place.bit as u64 / 8);
        }
        let at = find()?;
        self.note(
            name.to_owned(),
            Some(Member {
                bit: 8 * at as usize,
                bits: 0,
            }),
        );
        Ok(at)
    }

    /// Where a member of a structure is that is known without reading the kernel's description of
    /// its types, in bytes.
    pub fn kept(&self, structure: &str, path: &str) -> Option<usize> {
        let known = self.known();
        let place = known.places.get(&format!("{structure}.{path}"))?.as_ref()?;
        (place.bits == 0).then_some(place.bit / 8)
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
        self.note(name, place);
        place
    }

    fn note(&self, name: String, place: Option<Member>) {
        let mut known = self.known();
        known.places.insert(name, place);
        known.has_more_than_kept = true;
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

    fn is_known_for(&self, purpose: &str) -> bool {
        // Where there is none to be read, that is known.
        self.types.get().is_some() || self.known().purposes.iter().any(|known| known == purpose)
    }

    fn learn(&self, purpose: &str) {
        if self.types().is_ok() && !self.known().purposes.iter().any(|known| known == purpose) {
            let mut known = self.known();
            known.purposes.push(purpose.to_owned());
            known.has_more_than_kept = true;
        }
    }

    fn keep(&self) {
        let mut known = self.known();
        if !std::mem::take(&mut known.has_more_than_kept) {
            return;
        }
        self.cache.store(known.text().as_bytes());
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
        assert!(!next().is_known_for("rings"));
        first.learn("rings");
        let found = asked(&first);
        assert!(found.0.is_some() && found.1.is_some() && found.2.is_none());
        first.keep();
        let second = next();
        assert!(second.is_known_for("rings") && !second.is_known_for("maps"));
        assert_eq!(second.check(), Ok(()));
        assert_eq!(asked(&second), found);
        let level = found.1.map(|place| place.bit / 8);
        assert_eq!(second.kept("pid", "level"), level);
        for (structure, member) in [("pid", "no_such_member"), ("upid", "nr")] {
            assert_eq!(second.kept(structure, member), None);
        }
        assert!(second.types.get().is_none(), "nothing was read");
        // Another member is looked up, and kept as well.
        let number = second.member("upid", "nr");
        assert!(number.is_some() && second.types.get().is_some());
        second.keep();
        let third = next();
        assert_eq!((third.member("upid", "nr"), asked(&third)), (number, found));
        assert!(third.types.get().is_none(), "nothing was read");
    }

    #[test]
    fn nonsense_is_not_believed() {
        let text = "at 64 0 list_head.prev\nnowhere pid.x\nfor anon_inode:[io_uring]\n";
        let known = Known::read(text.as_bytes()).expect("sound");
        assert_eq!(known.places.len(), 2);
        assert_eq!(known.purposes, ["anon_inode:[io_uring]"]);
        for wrong in [
            "at 64 list_head.prev",
            "at x 0 pid",
            "nowhere",
            "elsewhere pid.x",
        ] {
            assert!(Known::read(wrong.as_bytes()).is_none(), "{wrong}");
        }
    }
}
