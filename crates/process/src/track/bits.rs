//! Tracking by soft-dirty bits, on kernels without asynchronous write protection.
//!
//! The bits are read and cleared while the tree is stopped, as what is written in between would be
//! lost. They are one set for each memory, so a tracker claims them: to another one, all that the
//! task has is written, always. A memory that is new since they were cleared (fork(2), execve(2))
//! is another task's, or counts as written.
//!
//! - What: tracking what is written
//! - Kept: `pre-dump` and `--track-mem` read what was written since the last round.
//! - Refused: "tracking what is written", with what the kernel lacks or forbids of asynchronous
//!   write protection (Linux 6.7) and of soft-dirty bits.
//! - CRIU 4.2: by soft-dirty bits alone.

use std::collections::HashMap;
use std::sync::OnceLock;

use abi::spans::Spans;
use freeze::start_ticks;
use freeze::tracker::{Means, TrackedTask, claim_bits};
use memory::dirty;
use memory::scan::{Area, ScanResult};
use memory::track::TrackResult;
use sys::process::Process;

use super::{Changes, Mapped, Tracking, all_of};
use crate::Result;

/// How this kernel tells what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Protection,
    Bits,
    Neither,
}

impl Way {
    /// Finds it out once, by trying.
    pub fn here() -> Self {
        static WAY: OnceLock<Way> = OnceLock::new();
        *WAY.get_or_init(|| {
            let protection = sys::features::named("uffd_wp_async").expect("it is on the list");
            match protection.probe() {
                Ok(_) => Self::Protection,
                Err(why) => {
                    log::debug!("no asynchronous write protection: {why}");
                    match dirty::are_there() {
                        Ok(true) => Self::Bits,
                        _ => Self::Neither,
                    }
                }
            }
        })
    }

    /// Refuses to track where that is not possible.
    ///
    /// # Errors
    /// [`resources::Error::Unsupported`].
    pub fn check(self, root: i32) -> Result<()> {
        match self {
            Self::Neither => {
                // The kernel lacks it, or forbids it here: the features tell which.
                let tracking = sys::features::named("mem_dirty_track");
                let why = tracking.and_then(|feature| feature.probe().err());
                let what = "tracking what is written".to_owned();
                let refused = resources::Error::unsupported(root, what);
                Err(refused.because(why.unwrap_or_default()).into())
            }
            Self::Protection | Self::Bits => Ok(()),
        }
    }
}

impl Tracking {
    /// Finds what a stopped task has written since its bits were cleared, if they were and are
    /// `held`, and clears them, unless they are another tracker's. None where it has just died.
    ///
    /// # Errors
    /// [`crate::Error::Pages`]; [`crate::Error::Kernel`] when the tracker is gone.
    pub(super) fn take_bits(
        &mut self,
        mut mapped: Mapped,
        held: Option<TrackedTask>,
    ) -> Result<Option<Mapped>> {
        let (pid, ticks) = (mapped.pid(), mapped.start_ticks);
        let held = match held.map(|held| held.by) {
            Some(Means::Bits(claim)) => Some(claim),
            _ => None,
        };
        let were = held.is_some();
        let claim = match held {
            Some(claim) => Some(claim),
            None => claim_bits(pid, ticks)?,
        };
        // A round that fails after this must be followed by one that reads everything.
        self.client.begin()?;
        let areas = mapped.maps.iter().map(|map| map.area);
        let found = match dirty::scan(&mapped.process, &areas.collect::<Vec<_>>()) {
            Err(memory::Error::Gone { .. }) => return Ok(None),
            found => found?,
        };
        if let Some(claim) = claim {
            match dirty::forget(&mapped.process) {
                Err(memory::Error::Gone { .. }) => return Ok(None),
                forgotten => forgotten?,
            }
            self.tasks.push(TrackedTask {
                pid,
                start_ticks: ticks,
                by: Means::Bits(claim),
            });
        }
        mapped.changes = Some(changes(found, were));
        Ok(Some(mapped))
    }
}

fn changes(found: Vec<TrackResult>, known: bool) -> Changes {
    Changes::of(found.into_iter().map(|found| (found, known)))
}

/// The tasks whose bits were cleared, by pid, with the times when they were started.
#[derive(Debug, Default)]
pub(crate) struct Cleared(HashMap<i32, u64>);

impl Cleared {
    /// Those that a tracker knows.
    pub fn of(tracking: &Tracking) -> Self {
        let by_bits = |task: &&TrackedTask| matches!(task.by, Means::Bits(_));
        let tasks = tracking.tasks.iter().filter(by_bits);
        Self(tasks.map(|task| (task.pid, task.start_ticks)).collect())
    }

    /// Finds the pages of a stopped task, and which of them it has not `unwritten`; none for a task
    /// whose bits were not cleared.
    ///
    /// # Errors
    /// [`crate::Error::Pages`].
    pub fn find(
        &self,
        process: &Process,
        areas: &[Area],
        unwritten: &mut Spans,
    ) -> Result<Option<Vec<ScanResult>>> {
        let pid = process.pid();
        let known = self.0.get(&pid);
        if known.is_none() || known != start_ticks(pid).as_ref() {
            return Ok(None);
        }
        let found = dirty::scan(process, areas)?.into_iter().map(|found| {
            unwritten.extend(found.unwritten.iter().copied());
            all_of(found)
        });
        Ok(Some(found.collect()))
    }
}

#[cfg(test)]
mod tests {
    use abi::{Addr, PAGE_BYTES, Span};

    use super::*;

    #[test]
    fn bits_that_nobody_cleared_say_nothing() {
        let page = |page| Span::new(Addr::of_page(page), PAGE_BYTES);
        let found = || {
            vec![TrackResult {
                written: Spans::of([page(1), page(5)]),
                unwritten: Spans::of([page(2), page(9)]),
                ..TrackResult::default()
            }]
        };
        let known = changes(found(), true);
        assert_eq!(known.written, [page(1), page(5)]);
        assert_eq!(known.unwritten, [page(2), page(9)]);
        let new = changes(found(), false);
        let joined = Span::new(Addr::of_page(1), 2 * PAGE_BYTES);
        assert_eq!(new.written, [joined, page(5), page(9)]);
        assert_eq!(new.unwritten, []);
    }

    #[test]
    fn a_kernel_with_neither_is_refused_by_name() {
        let error = Way::Neither.check(7).expect_err("nothing can be tracked");
        let text = error.to_string();
        assert!(text.contains("pid 7: tracking what is written"), "{text}");
        Way::Bits.check(7).expect("they tell");
    }
}
