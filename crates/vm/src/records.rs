//! The records of an image of a machine.

use std::collections::BTreeMap;

use image::{Reader, Record};
use prost::Message;
use serve::PageRange;

use crate::place::MEMORY;
use crate::{Error, Result};

/// Record numbers of this crate.
pub(crate) mod tag {
    /// [`super::MonitorState`], one an image.
    pub const MONITOR_STATE: u16 = 400;
    /// [`super::WorkingSet`], one an image.
    pub const WORKING_SET: u16 = 401;
    /// [`crate::qemu::record::QemuMachine`], one an image.
    pub const QEMU_MACHINE: u16 = 402;
}

/// The number of the record that tells of what was saved with a machine, and is read by its own
/// crate.
pub(crate) const OF_COMPANIONS: [u16; 1] = [500];

/// The most ranges of a working set.
const RANGES_MAX: usize = 1 << 20;

/// A monitor's state besides the memory: processors and devices.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct MonitorState {
    /// Which monitor it is of.
    #[prost(string, tag = "1")]
    pub monitor: String,
    /// Its state file, as it was.
    #[prost(bytes = "vec", tag = "2")]
    pub bytes: Vec<u8>,
}

/// The pages that machines wanted which were resumed from the image, in the order in which they
/// first did.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct WorkingSet {
    /// The numbers of the first pages of ranges that do not overlap.
    #[prost(uint64, repeated, tag = "1")]
    pub first_pages: Vec<u64>,
    /// How many pages each has.
    #[prost(uint64, repeated, tag = "2")]
    pub pages: Vec<u64>,
}

impl MonitorState {
    pub fn record(&self) -> Record {
        record(tag::MONITOR_STATE, self.encode_to_vec())
    }
}

impl WorkingSet {
    pub fn record(&self) -> Record {
        record(tag::WORKING_SET, self.encode_to_vec())
    }

    /// What a record has, of a memory of so many pages.
    fn decode_checked(payload: &[u8], memory_pages: u64) -> std::result::Result<Self, String> {
        let set = image::strict::decode::<Self>(payload)?;
        if set.first_pages.len() != set.pages.len() || set.pages.len() > RANGES_MAX {
            let (first, pages) = (set.first_pages.len(), set.pages.len());
            return Err(format!("{first} ranges begin, and {pages} have a length"));
        }
        let mut ranges = set.ranges().collect::<Vec<_>>();
        ranges.sort_unstable_by_key(|(first_page, _)| *first_page);
        let mut free = 0;
        for (first_page, pages) in ranges {
            let end = first_page.checked_add(pages);
            let end = end.filter(|end| pages > 0 && first_page >= free && *end <= memory_pages);
            free = end.ok_or(format!("{pages} pages from {first_page:#x} on are wanted"))?;
        }
        Ok(set)
    }

    fn ranges(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let pages = self.pages.iter().copied();
        self.first_pages.iter().copied().zip(pages)
    }

    /// As the page server takes it.
    pub fn wanted(&self) -> Vec<PageRange> {
        let wanted = self.ranges().map(|(first_page, pages)| PageRange {
            space: MEMORY,
            pages: first_page..first_page + pages,
        });
        wanted.collect()
    }

    /// Adds what another machine wanted and is not there yet, in its order; tells whether that is
    /// anything. Ranges that begin where the last one ends are one with it.
    pub fn merge(&mut self, wanted: &[PageRange]) -> bool {
        let known = self.ranges().map(|(first, pages)| (first, first + pages));
        let mut known = known.collect::<BTreeMap<_, _>>();
        let before = self.pages.len();
        let mut added = false;
        for wanted in wanted.iter().filter(|one| one.space == MEMORY) {
            let mut at = wanted.pages.start;
            while at < wanted.pages.end && self.pages.len() < RANGES_MAX {
                let here = known.range(..=at).next_back();
                if let Some((_, end)) = here.filter(|(_, end)| **end > at) {
                    at = *end;
                    continue;
                }
                let next = known.range(at..).next().map(|(start, _)| *start);
                let end = next.map_or(wanted.pages.end, |next| next.min(wanted.pages.end));
                known.insert(at, end);
                self.push(at, end - at, before);
                added = true;
                at = end;
            }
        }
        added
    }

    fn push(&mut self, first_page: u64, pages: u64, before: usize) {
        // What a run adds does not become one with what another did: that would change the order.
        let last = self.first_pages.len().checked_sub(1);
        let last = last.filter(|at| *at >= before);
        match last {
            Some(at) if self.first_pages[at] + self.pages[at] == first_page => {
                self.pages[at] += pages;
            }
            _ => {
                self.first_pages.push(first_page);
                self.pages.push(pages);
            }
        }
    }
}

fn record(tag: u16, payload: Vec<u8>) -> Record {
    Record {
        tag,
        version: 1,
        id: 0,
        payload,
    }
}

/// Records of an image besides the memory.
#[derive(Debug, Default)]
pub(crate) struct Records {
    pub state: Option<MonitorState>,
    pub wanted: Option<WorkingSet>,
}

impl Records {
    /// Those of an image of a memory of so many pages.
    ///
    /// # Errors
    /// [`Error::Corrupt`], also for records of other kinds.
    pub fn of(reader: &Reader, memory_pages: u64) -> Result<Self> {
        let mut all = Self::default();
        for record in reader.records() {
            let corrupt = |name: &'static str| move |what| Error::Corrupt { record: name, what };
            let is_new = match (record.tag, record.version, record.id) {
                (tag::MONITOR_STATE, 1, 0) => {
                    let state = image::strict::decode(&record.payload);
                    let state = state.map_err(corrupt("the monitor's state"))?;
                    all.state.replace(state).is_none()
                }
                (tag::WORKING_SET, 1, 0) => {
                    let set = WorkingSet::decode_checked(&record.payload, memory_pages);
                    let set = set.map_err(corrupt("the working set"))?;
                    all.wanted.replace(set).is_none()
                }
                (tag::QEMU_MACHINE, ..) => {
                    return Err(Error::Unfit(
                        "the image is one of a machine under QEMU, for `stillframe vm`".to_owned(),
                    ));
                }
                (tag, version, _) => {
                    let what = format!("record {tag}, version {version}, is not known here");
                    return Err(corrupt("a record")(what));
                }
            };
            if !is_new {
                let what = format!("record {} is there twice", record.tag);
                return Err(corrupt("a record")(what));
            }
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(ranges: &[(u64, u64)]) -> Vec<PageRange> {
        let wanted = ranges.iter().map(|(first_page, pages)| PageRange {
            space: MEMORY,
            pages: *first_page..first_page + pages,
        });
        wanted.collect()
    }

    #[test]
    fn runs_are_merged_and_their_order_is_kept() {
        let mut set = WorkingSet::default();
        assert!(set.merge(&wanted(&[(100, 10), (5, 5), (10, 2), (104, 3)])));
        let ranges = |set: &WorkingSet| set.ranges().collect::<Vec<_>>();
        assert_eq!(ranges(&set), [(100, 10), (5, 7)]);
        assert!(!set.merge(&wanted(&[(6, 2), (100, 10)])));
        assert!(set.merge(&wanted(&[(0, 200)])));
        let merged = [(100, 10), (5, 7), (0, 5), (12, 88), (110, 90)];
        assert_eq!(ranges(&set), merged);
        let payload = set.record().payload;
        assert_eq!(WorkingSet::decode_checked(&payload, 200), Ok(set));
        assert!(WorkingSet::decode_checked(&payload, 199).is_err());
    }

    #[test]
    fn forged_working_sets_are_refused() {
        for (first_pages, pages) in [
            (vec![1], vec![]),
            (vec![1], vec![0]),
            (vec![u64::MAX], vec![2]),
            (vec![1, 5], vec![5, 1]),
            (vec![99], vec![2]),
        ] {
            let set = WorkingSet { first_pages, pages };
            let payload = set.encode_to_vec();
            let decoded = WorkingSet::decode_checked(&payload, 100);
            assert!(decoded.is_err(), "{decoded:?}");
        }
    }
}
