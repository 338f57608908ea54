//! How a new context comes to the size and the counters of another one.
//!
//! The kernel counts an event as fetched when the ring's head, which the program moves, has passed
//! it, and takes no more requests than there is room for: so a new context must have posted, and
//! not yet counted as fetched, at least as many events as stand in the ring. It is brought there by
//! reads of nothing, which end at once: first as many as lead to the head, counted as fetched, then
//! those that lead on to the tail.

use super::{EVENT_BYTES, events_in};
use abi::PAGE_BYTES;

/// No context is larger.
pub const MOST_PAGES: u64 = (0x1000_0000 + PAGE_BYTES) / PAGE_BYTES;

/// How many requests for each processor that there can be the kernel makes room for at least.
const FOR_EACH_CPU: u64 = 4;

/// How many pages a ring has that is made for as many requests, on a machine that can have as many
/// processors.
fn pages_of(requests: u64, cpus: u64) -> u64 {
    // As many may be kept ready on other processors; and a full ring is told from an empty one.
    let events = 2 * requests.max(FOR_EACH_CPU * cpus) + 2;
    (EVENT_BYTES + EVENT_BYTES * events).div_ceil(PAGE_BYTES)
}

/// For how many requests a context must be made to have a ring of as many pages as one for
/// `requests` had elsewhere; none where no number does.
#[must_use]
pub fn requests_for(pages: u64, requests: u32, cpus: u64) -> Option<u32> {
    if requests > 0 && pages_of(requests.into(), cpus) == pages {
        return Some(requests);
    }
    // The fewest.
    let before = (pages.checked_sub(1)? * PAGE_BYTES) / EVENT_BYTES;
    let fewest = (before.saturating_sub(3) / 2 + 1).max(1);
    let fewest = u32::try_from(fewest).ok()?;
    (pages_of(fewest.into(), cpus) == pages).then_some(fewest)
}

/// What leads a new context to where one was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Events that are to be posted and counted as fetched.
    pub fetched: u32,
    /// Events that are to be posted after that.
    pub unfetched: u32,
    /// Whether it must be gone on one processor: each keeps some room ready, which others lack.
    pub on_one_cpu: bool,
}

impl Way {
    /// To a head and a tail in a ring of as many pages.
    #[must_use]
    pub fn to(head: u32, tail: u32, pages: u64) -> Self {
        let events = u32::try_from(events_in(pages)).unwrap_or(u32::MAX);
        let unfetched = match tail.checked_sub(head) {
            Some(unfetched) => unfetched,
            None => events - head + tail,
        };
        Self {
            fetched: head,
            unfetched,
            on_one_cpu: unfetched > events / 4,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_number_makes_the_same_ring_on_the_same_machine() {
        for cpus in [1, 2, 16, 300] {
            for requests in (1..3000).chain([65_535, 65_536, 4_000_000]) {
                let pages = pages_of(requests, cpus);
                let requests = requests as u32;
                assert_eq!(requests_for(pages, requests, cpus), Some(requests));
            }
        }
    }

    #[test]
    fn another_machine_makes_the_same_ring_where_it_can() {
        // On 300 processors, one request has 1200 times 2 events.
        let pages = pages_of(1, 300);
        assert_eq!(pages, 19);
        let here = requests_for(pages, 1, 2).expect("more are asked for");
        assert_eq!(pages_of(here.into(), 2), pages);
        assert_eq!(pages_of(u64::from(here) - 1, 2), pages - 1);
        // The other way round there is no ring as small.
        assert_eq!(requests_for(1, 1, 300), None);
        assert_eq!(requests_for(1, 1, 2), Some(1));
        assert_eq!(requests_for(0, 1, 2), None);
        for pages in 1..200 {
            let requests = requests_for(pages, 0, 1).expect("there is one");
            assert_eq!(pages_of(requests.into(), 1), pages);
        }
    }

    #[test]
    fn ways_lead_to_the_tail() {
        for (head, tail) in [
            (0, 0),
            (0, 126),
            (126, 0),
            (60, 59),
            (59, 60),
            (126, 126),
            (5, 70),
        ] {
            let way = Way::to(head, tail, 1);
            assert_eq!((way.fetched + way.unfetched) % 127, tail);
            assert!(way.unfetched < 127);
        }
        assert!(Way::to(60, 59, 1).on_one_cpu && !Way::to(59, 60, 1).on_one_cpu);
    }
}
