//! The section of spaces: what each is, and how large.

use prost::Message;

use crate::page::PAGE_BYTES;
use crate::{SPACE_MAX_PAGES, SpaceId, strict};

/// The most spaces of an image.
const SPACES_MAX: usize = 1 << 22;

/// The longest name of a space.
const NAME_MAX_BYTES: usize = 4096;

/// Content of a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SpaceKind {
    /// The memory of a task; a page's number is that of its address.
    Memory,
    /// A memory object that several may have mapped, or that has descriptors: shared memory.
    Object,
    /// The code of a vDSO.
    Vdso,
    /// A block of a virtual machine's memory.
    Block,
    /// A volume.
    Volume,
}

/// The smallest piece of a space that is served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Granule {
    /// 4 KiB.
    #[default]
    Small,
    /// 2 MiB.
    Large,
    /// 1 GiB.
    Huge,
}

impl Granule {
    /// How many pages it has.
    #[must_use]
    pub const fn pages(self) -> u64 {
        match self {
            Self::Small => 1,
            Self::Large => (2 << 20) / PAGE_BYTES as u64,
            Self::Huge => (1 << 30) / PAGE_BYTES as u64,
        }
    }
}

/// A space, as a writer describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewSpace {
    /// Its number.
    pub id: SpaceId,
    /// Its kind.
    pub kind: SpaceKind,
    /// Its name, where it has one.
    pub name: String,
    /// How many pages it can have: the number of the page after the last.
    pub len_pages: u64,
    /// Its runs begin and end at multiples of this.
    pub granule: Granule,
}

/// A space as it is stored.
#[derive(Clone, PartialEq, Message)]
struct SpaceMessage {
    #[prost(uint32, tag = "1")]
    number: u32,
    #[prost(uint32, tag = "2")]
    kind: u32,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(uint64, tag = "4")]
    len_pages: u64,
    #[prost(uint64, tag = "5")]
    granule_bytes: u64,
}

/// All of them, by number.
#[derive(Clone, PartialEq, Message)]
struct Spaces {
    #[prost(message, repeated, tag = "1")]
    spaces: Vec<SpaceMessage>,
}

const KINDS: [SpaceKind; 5] = [
    SpaceKind::Memory,
    SpaceKind::Object,
    SpaceKind::Vdso,
    SpaceKind::Block,
    SpaceKind::Volume,
];

const GRANULES: [Granule; 3] = [Granule::Small, Granule::Large, Granule::Huge];

/// Encodes spaces, which are in order.
pub(crate) fn encode<'a>(spaces: impl Iterator<Item = &'a NewSpace>) -> Vec<u8> {
    let number = |kind| (1..).zip(KINDS).find(|known| known.1 == kind);
    let spaces = spaces.map(|space| SpaceMessage {
        number: space.id.0,
        kind: number(space.kind).expect("all kinds are listed").0,
        name: space.name.clone(),
        len_pages: space.len_pages,
        granule_bytes: space.granule.pages() * PAGE_BYTES as u64,
    });
    let spaces = spaces.collect();
    Spaces { spaces }.encode_to_vec()
}

/// Decodes and checks spaces.
pub(crate) fn decode(bytes: &[u8]) -> Result<Vec<NewSpace>, String> {
    let Spaces { spaces } = strict::decode(bytes)?;
    if spaces.len() > SPACES_MAX {
        return Err(format!("{} spaces", spaces.len()));
    }
    if let Some(pair) = spaces
        .windows(2)
        .find(|pair| pair[0].number >= pair[1].number)
    {
        return Err(format!("space {} is not in order", pair[1].number));
    }
    let checked = spaces.into_iter().map(|space| {
        let number = space.number;
        check(space).map_err(|what| format!("space {number} {what}"))
    });
    checked.collect()
}

fn check(space: SpaceMessage) -> Result<NewSpace, String> {
    let kind = (1..).zip(KINDS).find(|known| known.0 == space.kind);
    let kind = kind.ok_or_else(|| format!("has the unknown kind {}", space.kind))?;
    let bytes = |granule: &Granule| granule.pages() * PAGE_BYTES as u64;
    let granule = GRANULES
        .into_iter()
        .find(|one| bytes(one) == space.granule_bytes);
    let granule = granule.ok_or_else(|| format!("has pieces of {} bytes", space.granule_bytes))?;
    if space.len_pages > SPACE_MAX_PAGES || !space.len_pages.is_multiple_of(granule.pages()) {
        return Err(format!("has {:#x} pages", space.len_pages));
    }
    if space.name.len() > NAME_MAX_BYTES {
        return Err(format!("has a name of {} bytes", space.name.len()));
    }
    Ok(NewSpace {
        id: SpaceId(space.number),
        kind: kind.1,
        name: space.name,
        len_pages: space.len_pages,
        granule,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(id: u32, kind: SpaceKind, granule: Granule) -> NewSpace {
        NewSpace {
            id: SpaceId(id),
            kind,
            name: format!("space {id}"),
            len_pages: 1 << 20,
            granule,
        }
    }

    fn stored(change: impl Fn(&mut SpaceMessage)) -> Result<Vec<NewSpace>, String> {
        let mut stored = SpaceMessage {
            number: 1,
            kind: 1,
            name: String::new(),
            len_pages: 1 << 18,
            granule_bytes: 4096,
        };
        change(&mut stored);
        let spaces = vec![stored];
        decode(&Spaces { spaces }.encode_to_vec())
    }

    #[test]
    fn every_kind_and_granule_survives() {
        let kinds = (0..).zip(KINDS);
        let spaces = kinds.map(|(id, kind)| space(id, kind, GRANULES[id as usize % 3]));
        let spaces = spaces.collect::<Vec<_>>();
        assert_eq!(decode(&encode(spaces.iter())), Ok(spaces));
        assert_eq!(decode(&[]), Ok(vec![]));
    }

    #[test]
    fn claims_are_checked() {
        type Change = fn(&mut SpaceMessage);
        let changes: [(Change, &str); 6] = [
            (|space| space.kind = 0, "unknown kind 0"),
            (|space| space.kind = 6, "unknown kind 6"),
            (|space| space.granule_bytes = 8192, "pieces of 8192"),
            (|space| space.len_pages = (1 << 52) + 1, "pages"),
            (
                |space| (space.granule_bytes, space.len_pages) = (2 << 20, 511),
                "0x1ff pages",
            ),
            (|space| space.name = "x".repeat(4097), "name of 4097"),
        ];
        for (change, what) in changes {
            let error = stored(change).expect_err("refused");
            assert!(
                error.starts_with("space 1 ") && error.contains(what),
                "{error}"
            );
        }
        assert!(stored(|space| space.granule_bytes = 1 << 30).is_ok());
        let twice = [1, 1].map(|id| space(id, SpaceKind::Memory, Granule::Small));
        assert!(decode(&encode(twice.iter())).is_err());
    }
}
