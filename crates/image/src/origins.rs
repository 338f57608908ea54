//! Origins: stored runs whose pages are used in more places than their own, or by other images.
//!
//! A layer names, for every page that it has from an older one, the stored run which holds it:
//! place and checksum. So nobody walks a chain to find a page, and reading one needs no other
//! image's manifest.

use crate::parts;
use crate::run::{DATA_RUN_MAX_PAGES, ENTRY_BYTES, PAGE_BYTES, Part};
use crate::{Run, RunKind, SPACE_MAX_PAGES, SpaceId};

/// The most origins of an image.
pub(crate) const ORIGINS_MAX: usize = u32::MAX as usize;

fn place(run: &Run) -> (u64, u64) {
    match run.kind {
        RunKind::Data {
            offset_bytes,
            checksum,
        } => (offset_bytes, checksum),
        other => panic!("an origin is a data run, not {other:?}"),
    }
}

/// Encodes origins, which are data runs.
pub(crate) fn encode(origins: &[Run]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(origins.len() * ENTRY_BYTES);
    for run in origins {
        let (position, checksum) = place(run);
        let (object, offset_bytes) = parts::split(position);
        let page = offset_bytes / PAGE_BYTES as u64;
        let mut entry = [0; ENTRY_BYTES];
        entry[0..4].copy_from_slice(&run.space.0.to_le_bytes());
        entry[4..8].copy_from_slice(&(object as u32).to_le_bytes());
        entry[8..16].copy_from_slice(&run.first_page.to_le_bytes());
        entry[16..24].copy_from_slice(&(page << 16 | u64::from(run.pages)).to_le_bytes());
        entry[24..32].copy_from_slice(&checksum.to_le_bytes());
        bytes.extend_from_slice(&entry);
    }
    bytes
}

/// Decodes and checks origins: they are sorted by place, do not overlap, and lie inside the pages
/// objects, whose lengths `object_bytes` tells by number.
///
/// # Errors
/// The byte where it went wrong, and how.
pub(crate) fn decode(
    bytes: &[u8],
    object_bytes: &dyn Fn(usize) -> u64,
) -> Result<Vec<Run>, (usize, String)> {
    let (entries, rest) = bytes.as_chunks::<ENTRY_BYTES>();
    if !rest.is_empty() {
        return Err((bytes.len(), "the last origin is cut".into()));
    }
    let mut origins: Vec<Run> = Vec::with_capacity(entries.len());
    let mut end = 0;
    for (number, entry) in entries.iter().enumerate() {
        let wrong = |what: &str| (number * ENTRY_BYTES, format!("origin {number}: {what}"));
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("8 bytes"));
        let (object, pages) = (word(4) as usize, long(16) as u32 & 0xffff);
        let run = Run {
            space: SpaceId(word(0)),
            first_page: long(8),
            pages,
            kind: RunKind::Zero,
        };
        if pages == 0 || pages > DATA_RUN_MAX_PAGES {
            return Err(wrong("it has a wrong number of pages"));
        }
        if run.end_page() > SPACE_MAX_PAGES {
            return Err(wrong("it is past every space"));
        }
        // 48 bits of page number: neither product nor sum reaches 64 bits.
        let offset_bytes = (long(16) >> 16) * PAGE_BYTES as u64;
        if offset_bytes + run.len_bytes() > object_bytes(object).min(parts::PART_MAX_BYTES) {
            return Err(wrong("it is not inside a pages object"));
        }
        let position = parts::position(object, offset_bytes);
        if position < end {
            return Err(wrong("it is not in order"));
        }
        end = position + run.len_bytes();
        origins.push(Run {
            kind: RunKind::Data {
                offset_bytes: position,
                checksum: long(24),
            },
            ..run
        });
    }
    Ok(origins)
}

/// Checks that `run`, which refers to an origin, lies inside it.
///
/// # Errors
/// What is wrong.
pub(crate) fn check(run: &Run, origins: &[Run]) -> Result<(), String> {
    let (part, far) = match run.kind {
        RunKind::Parent(part) => (part, true),
        RunKind::Equal(part) => (part, false),
        _ => return Ok(()),
    };
    let Some(origin) = origins.get(part.origin as usize) else {
        return Err(format!(
            "it is in origin {}, and there is none",
            part.origin
        ));
    };
    if u64::from(part.skip_pages) + u64::from(run.pages) > u64::from(origin.pages) {
        return Err(format!("it is not inside origin {}", part.origin));
    }
    let (owner, _) = parts::owner(parts::split(place(origin).0).0);
    if owner.is_some() == far {
        Ok(())
    } else {
        Err(format!("origin {} is in the wrong image", part.origin))
    }
}

/// Origins as they are found by a writer. One may stand there several times, until they are sorted.
#[derive(Default)]
pub(crate) struct Collected {
    /// The pages object by number, and the run with its offset there.
    runs: Vec<(u32, Run)>,
}

impl Collected {
    /// Returns the number of the run at `offset_bytes` of pages object `object`; none where there
    /// are too many.
    pub fn number(
        &mut self,
        object: usize,
        offset_bytes: u64,
        checksum: u64,
        run: Run,
    ) -> Option<u32> {
        let kind = RunKind::Data {
            offset_bytes,
            checksum,
        };
        let found = (object as u32, Run { kind, ..run });
        // Parts of one run are found one after the other, but for a few.
        if self.runs.last() != Some(&found) {
            self.runs.push(found);
        }
        u32::try_from(self.runs.len() - 1).ok()
    }

    /// The origins by place, in the order in which they were found.
    pub fn places(&self) -> impl Iterator<Item = (u64, u32)> {
        let places = self.runs.iter();
        places.map(|(object, run)| (parts::position(*object as usize, place(run).0), run.pages))
    }

    /// Has origins at new places inside of their pages objects, where `moved` tells one.
    pub fn follow(&mut self, moved: &dyn Fn(u64) -> Option<u64>) {
        for (object, run) in &mut self.runs {
            let (offset_bytes, checksum) = place(run);
            if let Some(to) = moved(parts::position(*object as usize, offset_bytes)) {
                let (_, offset_bytes) = parts::split(to);
                run.kind = RunKind::Data {
                    offset_bytes,
                    checksum,
                };
            }
        }
    }

    /// The numbers of the pages objects that origins lie in, sorted.
    pub fn objects(&self) -> Vec<usize> {
        let mut objects: Vec<usize> = self.runs.iter().map(|one| one.0 as usize).collect();
        objects.sort_unstable();
        objects.dedup();
        objects
    }

    /// Sorts the origins by place, each once, with the pages objects numbered anew, and tells the
    /// new number of each by its old.
    pub fn sorted(self, renumber: &dyn Fn(usize) -> usize) -> (Vec<Run>, Vec<u32>) {
        let mut all: Vec<(u64, usize)> = self
            .runs
            .iter()
            .enumerate()
            .map(|(old, (object, run))| {
                (
                    parts::position(renumber(*object as usize), place(run).0),
                    old,
                )
            })
            .collect();
        // They were found in ascending order, of each pages object: that sort makes use of it.
        all.sort();
        let mut new = vec![0; all.len()];
        let mut origins = Vec::with_capacity(all.len());
        let mut last = None;
        for (position, old) in all {
            if last.replace(position) == Some(position) {
                new[old] = origins.len() as u32 - 1;
                continue;
            }
            new[old] = origins.len() as u32;
            let run = self.runs[old].1;
            let kind = RunKind::Data {
                offset_bytes: position,
                checksum: place(&run).1,
            };
            origins.push(Run { kind, ..run });
        }
        (origins, new)
    }
}

/// Gives a run that refers to an origin the origin's new number.
pub(crate) fn renumber(run: &mut Run, new: &[u32]) {
    if let RunKind::Parent(Part { origin, .. }) | RunKind::Equal(Part { origin, .. }) =
        &mut run.kind
    {
        *origin = new[*origin as usize];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(object: usize, page: u64, pages: u32) -> Run {
        let kind = RunKind::Data {
            offset_bytes: parts::position(object, page * PAGE_BYTES as u64),
            checksum: 0x8877_6655_4433_2211,
        };
        Run {
            space: SpaceId(0x0403_0201),
            first_page: 0x0a0b,
            pages,
            kind,
        }
    }

    const TEN: u64 = 10 * PAGE_BYTES as u64;

    #[test]
    fn entries_have_the_documented_layout() {
        let bytes = encode(&[run(0x21, 0x0708, 3)]);
        assert_eq!(bytes[..8], [1, 2, 3, 4, 0x21, 0, 0, 0]);
        assert_eq!(bytes[8..16], [0x0b, 0x0a, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..24], [3, 0, 8, 7, 0, 0, 0, 0]);
        assert_eq!(bytes[24..], 0x8877_6655_4433_2211_u64.to_le_bytes());
    }

    #[test]
    fn claims_are_checked() {
        let refused = |origins: &[Run], what: &str| {
            let error = decode(&encode(origins), &|_| TEN).unwrap_err();
            assert!(error.1.contains(what), "{error:?}");
        };
        let good = [run(0, 0, 4), run(0, 4, 2), run(16, 0, 10)];
        assert_eq!(decode(&encode(&good), &|_| TEN), Ok(good.to_vec()));
        refused(&[run(0, 0, 0)], "number of pages");
        refused(&[run(0, 0, 257)], "number of pages");
        refused(&[run(16, 8, 3)], "not inside");
        refused(&[run(16, 1 << 35, 3)], "not inside");
        refused(&[run(0, 0, 4), run(0, 3, 1)], "not in order");
        refused(&[run(16, 0, 4), run(0, 3, 1)], "not in order");
        assert!(decode(&encode(&good)[..95], &|_| TEN).is_err());
        let none = |object| if object == 0 { TEN } else { 0 };
        assert!(decode(&encode(&good), &none).is_err());
        let far = Run {
            first_page: SPACE_MAX_PAGES - 1,
            ..run(0, 0, 2)
        };
        refused(&[far], "past every space");
    }

    #[test]
    fn parts_lie_inside_the_right_image() {
        let origins = [run(0, 0, 4), run(16, 0, 4)];
        let part = |origin, skip_pages, pages, far| {
            let part = Part { origin, skip_pages };
            let kind = if far {
                RunKind::Parent(part)
            } else {
                RunKind::Equal(part)
            };
            check(
                &Run {
                    kind,
                    ..run(0, 0, pages)
                },
                &origins,
            )
        };
        assert!(part(0, 1, 3, false).is_ok() && part(1, 0, 4, true).is_ok());
        for (wrong, what) in [
            (part(0, 1, 3, true), "wrong image"),
            (part(1, 1, 3, false), "wrong image"),
            (part(1, 1, 4, true), "not inside"),
            (part(2, 0, 1, true), "there is none"),
        ] {
            assert!(wrong.unwrap_err().contains(what));
        }
    }
}
