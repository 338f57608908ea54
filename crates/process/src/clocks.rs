//! The clocks that count from a start of the system: where a tree's stood at the dump, and how the
//! restored tree goes on from there.
//!
//! `CLOCK_MONOTONIC` and `CLOCK_BOOTTIME` are the host's, so they jump while a tree is only an
//! image, and backwards on a host that was started later. A restored tree gets a time namespace in
//! which they go on from where they stood (time_namespaces(7)).
//!
//! - What: monotonic clocks
//! - Kept: they go on from where they stood, in a time namespace.
//! - At a restore: "a monotonic clock that goes back by … s, as no time namespace can be made here
//!   (…)" (`--no-timens`).
//! - CRIU 4.2: they go on in a time namespace as well.

use std::io;
use std::os::fd::AsFd;

use freeze::Task;
use prost::Message;
use rustix::time::{ClockId, clock_gettime};
use sys::timens::{ForChildren, Offsets};

use crate::{Error, Result};

const BILLION: u64 = 1_000_000_000;
/// The kernel wants clocks to stay this side of it, about 146 years after the start.
const MOST_NS: u64 = 1 << 62;

/// What the clocks say, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(crate) struct TreeClocks {
    /// `CLOCK_MONOTONIC`.
    #[prost(uint64, tag = "1")]
    pub monotonic_ns: u64,
    /// `CLOCK_MONOTONIC_COARSE`, which is up to a tick behind: it must not go back either.
    #[prost(uint64, tag = "2")]
    pub coarse_ns: u64,
    /// `CLOCK_BOOTTIME`.
    #[prost(uint64, tag = "3")]
    pub boottime_ns: u64,
}

impl TreeClocks {
    /// This process's, now.
    pub fn now() -> Self {
        let ns = |clock| {
            let time = clock_gettime(clock);
            let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
            seconds * BILLION + u64::try_from(time.tv_nsec).unwrap_or(0)
        };
        Self {
            monotonic_ns: ns(ClockId::Monotonic),
            coarse_ns: ns(ClockId::MonotonicCoarse),
            boottime_ns: ns(ClockId::Boottime),
        }
    }

    /// Those of a stopped tree, now. `apart`: a task of it, which is in another time namespace than
    /// this process.
    ///
    /// # Errors
    /// [`Error::Kernel`] when the namespace's offsets cannot be read.
    pub fn of_stopped(apart: Option<&Task>) -> Result<Self> {
        let now = Self::now();
        let Some(task) = apart else { return Ok(now) };
        let failed = |error| {
            let doing = format!("cannot read /proc/{}/timens_offsets", task.pid());
            Error::kernel(doing, error)
        };
        let theirs = Offsets::read(task.proc.as_fd()).map_err(failed)?;
        let ours = Offsets::own();
        let ours = ours.map_err(|e| Error::kernel("cannot read this process's clocks", e))?;
        let monotonic = i128::from(theirs.monotonic_ns) - i128::from(ours.monotonic_ns);
        let boottime = i128::from(theirs.boottime_ns) - i128::from(ours.boottime_ns);
        let moved = |ns: u64, by: i128| u64::try_from(i128::from(ns) + by).unwrap_or(0);
        Ok(Self {
            monotonic_ns: moved(now.monotonic_ns, monotonic),
            coarse_ns: moved(now.coarse_ns, monotonic),
            boottime_ns: moved(now.boottime_ns, boottime),
        })
    }

    /// Reads the record of an image.
    ///
    /// # Errors
    /// [`resources::Error::Corrupt`] for clocks that the kernel would not set.
    pub fn read(payload: &[u8]) -> Result<Self> {
        let corrupt = |what: String| Error::from(resources::Error::corrupt("clocks", what));
        let clocks: Self = image::strict::decode(payload).map_err(corrupt)?;
        let all = [clocks.monotonic_ns, clocks.coarse_ns, clocks.boottime_ns];
        match all.into_iter().find(|ns| *ns >= MOST_NS) {
            None => Ok(clocks),
            Some(ns) => Err(corrupt(format!("{ns} ns are too many"))),
        }
    }

    /// How far these are ahead of `now`; none of them goes back.
    fn ahead_of(&self, now: &Self) -> Offsets {
        let ahead = |then: u64, now: u64| {
            let ns = i128::from(then) - i128::from(now);
            i64::try_from(ns).expect("both are below 2^62")
        };
        let fine = ahead(self.monotonic_ns, now.monotonic_ns);
        Offsets {
            monotonic_ns: fine.max(ahead(self.coarse_ns, now.coarse_ns)),
            boottime_ns: ahead(self.boottime_ns, now.boottime_ns),
        }
    }
}

/// How the clocks of a tree that is restored are to go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resumed(Offsets);

impl Resumed {
    /// From `saved` on, as of now: a timer that is set after this and lasts as long as it had to
    /// never ends before these clocks say that it is time.
    pub fn from_now(saved: &TreeClocks) -> Self {
        Self(saved.ahead_of(&TreeClocks::now()))
    }

    /// Makes the namespace for the next process that this thread makes; none where that is not
    /// allowed here, which is no more than a warning unless a clock would go back.
    ///
    /// # Errors
    /// [`resources::Error::Unsupported`] for the root task `root`.
    pub fn for_children(self, root: i32) -> Result<Option<ForChildren>> {
        let Self(ahead) = self;
        let made = ForChildren::new(|own| Offsets {
            monotonic_ns: own.monotonic_ns.saturating_add(ahead.monotonic_ns),
            boottime_ns: own.boottime_ns.saturating_add(ahead.boottime_ns),
        });
        match made {
            Ok(made) => Ok(Some(made)),
            Err(error) => self.without(root, &error).map(|()| None),
        }
    }

    /// What it means that no namespace can be made because of `error`.
    ///
    /// # Errors
    /// [`resources::Error::Unsupported`] for the root task `root` where a clock would go back.
    pub fn without(self, root: i32, error: &io::Error) -> Result<()> {
        let Self(ahead) = self;
        let most_ns = ahead.monotonic_ns.max(ahead.boottime_ns);
        let seconds = most_ns.unsigned_abs() as f64 / BILLION as f64;
        if most_ns > 0 {
            let what = format!(
                "a monotonic clock that goes back by {seconds:.3} s, as no time namespace can be \
                 made here ({error}),"
            );
            let refused = resources::Error::unsupported(root, what);
            return Err(refused.unless("--no-timens").into());
        }
        log::warn!(
            "monotonic clocks jump ahead by {seconds:.3} s: no time namespace can be made: {error}"
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: TreeClocks = TreeClocks {
        monotonic_ns: 50 * BILLION,
        coarse_ns: 50 * BILLION - 4_000_000,
        boottime_ns: 60 * BILLION,
    };

    #[test]
    fn clocks_go_on_from_where_they_stood() {
        let saved = TreeClocks {
            monotonic_ns: 7 * BILLION,
            coarse_ns: 7 * BILLION - 4_000_000,
            boottime_ns: 99 * BILLION,
        };
        let ahead = Offsets {
            monotonic_ns: -43_000_000_000,
            boottime_ns: 39_000_000_000,
        };
        assert_eq!(saved.ahead_of(&NOW), ahead);
    }

    #[test]
    fn the_coarse_clock_does_not_go_back_either() {
        let saved = TreeClocks {
            coarse_ns: NOW.monotonic_ns - 1_000_000,
            ..NOW
        };
        let ahead = saved.ahead_of(&NOW);
        assert_eq!((ahead.monotonic_ns, ahead.boottime_ns), (3_000_000, 0));
    }

    #[test]
    fn without_a_namespace_clocks_may_jump_ahead_but_not_back() {
        let denied = io::Error::from_raw_os_error(1);
        let resumed = |monotonic_ns, boottime_ns| {
            let ahead = Offsets {
                monotonic_ns,
                boottime_ns,
            };
            Resumed(ahead)
                .without(7, &denied)
                .map_err(|e| e.to_string())
        };
        assert_eq!(resumed(-5, -5), Ok(()));
        let refused = "pid 7: a monotonic clock that goes back by 2.500 s, as no time namespace \
                       can be made here (Operation not permitted (os error 1)), is not supported (use \
                       --no-timens to allow it)";
        assert_eq!(resumed(-5, 2_500_000_000), Err(refused.to_owned()));
    }

    #[test]
    fn clocks_of_centuries_are_refused() {
        let read = |boottime_ns| {
            let clocks = TreeClocks { boottime_ns, ..NOW };
            TreeClocks::read(&clocks.encode_to_vec()).map_err(|error| error.to_string())
        };
        assert_eq!(read(NOW.boottime_ns), Ok(NOW));
        let refused = "image record clocks: 4611686018427387904 ns are too many";
        assert_eq!(read(MOST_NS), Err(refused.to_owned()));
    }
}
