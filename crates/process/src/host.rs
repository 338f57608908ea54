//! What a restore has to know of this host, kept for the next one.
//!
//! Most dumps and restores need nothing of it: what they use of the kernel they use and see.
//! Only where a vDSO has to be moved or replaced the host's own is looked at, and what was found is
//! kept in a small file, where that can be written at all.

mod uname;

use prost::Message;
use resources::cache::Cache;
use resources::map::memory::Special;
use resources::map::vdso::elf::Function;
use resources::map::vdso::{self, Host, Part};

use crate::Result;
use crate::plan::OwnVdso;
use crate::records::Saved;
pub(crate) use uname::kernel;

/// The file that has the vDSOs.
const VDSOS: &str = "host";
/// What is needed to know of this host's vDSO to restore `saved`; for most images only its build
/// id, which is at hand.
pub(crate) fn vdso_for(saved: &Saved<'_>) -> Result<OwnVdso> {
    let build_id = sys::vdso::own_build_id();
    let mut memories = saved.tasks.iter().map(|task| &task.memory);
    let needs_facts = memories
        .any(|memory| memory.vdso_is_32_bit || vdso::way(memory, build_id.as_deref()).needs_host());
    let facts = needs_facts.then(facts).transpose()?;
    let (host, host_32) = facts.map_or((None, None), |facts| (Some(facts.vdso), facts.vdso_32));
    Ok(OwnVdso {
        build_id,
        host,
        host_32,
    })
}

/// What is known of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostFacts {
    /// The vDSO that its kernel maps.
    pub vdso: Host,
    /// That of 32-bit programs, if the kernel has one.
    pub vdso_32: Option<Host>,
    /// Whether this is what was kept from an earlier time.
    pub kept: bool,
}

/// Looks at this host anew, whatever was kept, and keeps what it finds.
///
/// # Errors
/// [`Error::Resource`] when the vDSO is not one that can be used.
pub fn probe() -> Result<HostFacts> {
    // Who needs the kernel's structures looks at them again.
    resources::kernel::forget();
    probe_with(&Cache::of_this_host(VDSOS))
}

fn probe_with(cache: &Cache) -> Result<HostFacts> {
    let (vdso, vdso_32) = (Host::probe()?, Host::probe_32()?);
    let before = cache
        .load()
        .and_then(|bytes| decode(&bytes, &vdso.build_id));
    let found = (vdso, vdso_32);
    let kept = before.as_ref() == Some(&found);
    if !kept {
        cache.store(&encode(&found));
    }
    let (vdso, vdso_32) = found;
    Ok(HostFacts {
        vdso,
        vdso_32,
        kept,
    })
}

/// Tells what this host is like, from the cache or by looking.
fn facts() -> Result<HostFacts> {
    facts_with(&Cache::of_this_host(VDSOS))
}

fn facts_with(cache: &Cache) -> Result<HostFacts> {
    let own = sys::vdso::own_build_id().unwrap_or_default();
    let before = cache.load().and_then(|bytes| decode(&bytes, &own));
    let kept = before.is_some();
    let (vdso, vdso_32) = match before {
        Some(before) => before,
        None => {
            let found = (Host::probe()?, Host::probe_32()?);
            cache.store(&encode(&found));
            found
        }
    };
    Ok(HostFacts {
        vdso,
        vdso_32,
        kept,
    })
}

/// The vDSOs of a host, as they are kept.
#[derive(Clone, PartialEq, Message)]
struct KeptBoth {
    #[prost(message, optional, tag = "1")]
    own: Option<Kept>,
    #[prost(message, optional, tag = "2")]
    of_32_bits: Option<Kept>,
}

/// A vDSO of a host, as it is kept.
#[derive(Clone, PartialEq, Message)]
struct Kept {
    #[prost(bytes = "vec", tag = "1")]
    build_id: Vec<u8>,
    #[prost(message, repeated, tag = "2")]
    parts: Vec<KeptPart>,
    #[prost(message, repeated, tag = "3")]
    functions: Vec<KeptFunction>,
}

#[derive(Clone, PartialEq, Message)]
struct KeptPart {
    #[prost(bool, tag = "1")]
    is_code: bool,
    #[prost(uint64, tag = "2")]
    bytes: u64,
}

#[derive(Clone, PartialEq, Message)]
struct KeptFunction {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(uint64, tag = "2")]
    offset: u64,
}

fn encode((own, of_32_bits): &(Host, Option<Host>)) -> Vec<u8> {
    let both = KeptBoth {
        own: Some(keep(own)),
        of_32_bits: of_32_bits.as_ref().map(keep),
    };
    both.encode_to_vec()
}

fn keep(host: &Host) -> Kept {
    let parts = host.parts.iter().map(|part| KeptPart {
        is_code: part.special == Special::Vdso,
        bytes: part.bytes,
    });
    let functions = host.functions.iter().map(|function| KeptFunction {
        name: function.name.clone(),
        offset: function.offset,
    });
    Kept {
        build_id: host.build_id.clone(),
        parts: parts.collect(),
        functions: functions.collect(),
    }
}

/// The vDSOs that were kept, if the first is the one that this process has.
fn decode(bytes: &[u8], own: &[u8]) -> Option<(Host, Option<Host>)> {
    let kept = KeptBoth::decode(bytes).ok()?;
    let host = host(kept.own?).filter(|host| host.build_id == own)?;
    let of_32_bits = match kept.of_32_bits {
        Some(kept) => Some(self::host(kept)?),
        None => None,
    };
    Some((host, of_32_bits))
}

/// What was kept of a vDSO, if it makes sense.
fn host(kept: Kept) -> Option<Host> {
    let part = |part: &KeptPart| Part {
        special: if part.is_code {
            Special::Vdso
        } else {
            Special::Vvar
        },
        bytes: part.bytes,
    };
    let function = |function: KeptFunction| Function {
        name: function.name,
        offset: function.offset,
    };
    let host = Host {
        build_id: kept.build_id,
        parts: kept.parts.iter().map(part).collect(),
        functions: kept.functions.into_iter().map(function).collect(),
    };
    host.is_sound().then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_look_is_into_the_cache() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().join("host"), "one host");
        let first = facts_with(&cache).expect("a vDSO");
        let second = facts_with(&cache).expect("a vDSO");
        assert!(!first.kept && second.kept);
        assert_eq!(first.vdso, second.vdso);
    }

    #[test]
    fn a_look_mends_what_was_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().join("host"), "one host");
        let mut host = Host::probe().expect("a vDSO");
        let of_32_bits = Host::probe_32().expect("looked at");
        host.functions.pop().expect("it has functions");
        cache.store(&encode(&(host, of_32_bits)));
        assert!(!probe_with(&cache).expect("a vDSO").kept, "one is missing");
        assert!(probe_with(&cache).expect("a vDSO").kept);
        assert!(facts_with(&cache).expect("a vDSO").kept);
    }

    #[test]
    fn what_is_kept_of_another_vdso_is_not_used() {
        let host = Host::probe().expect("a vDSO");
        let both = (host.clone(), Host::probe_32().expect("looked at"));
        assert_eq!(decode(&encode(&both), &host.build_id), Some(both.clone()));
        assert_eq!(decode(&encode(&both), b"another"), None);
        let none = Host {
            parts: Vec::new(),
            ..host.clone()
        };
        for wrong in [(none.clone(), None), (host.clone(), Some(none))] {
            assert_eq!(decode(&encode(&wrong), &host.build_id), None);
        }
    }
}
