//! Bringing in what nobody has asked for yet.
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use crate::install::{Installer, MOST_BYTES, Outcome, STARVED_AGAIN, has_starved};
use crate::prefetch::Piece;
use crate::{Result, Session};

/// How long prefetching waits while faults are being answered, at a time.
const GIVE_WAY: Duration = Duration::from_micros(50);

/// Notes that a thread brings everything in.
struct FetchGuard<'a>(&'a Session);

impl<'a> FetchGuard<'a> {
    fn new(session: &'a Session) -> Self {
        session.fetching.fetch_add(1, Relaxed);
        Self(session)
    }
}

impl Drop for FetchGuard<'_> {
    fn drop(&mut self) {
        self.0.fetching.fetch_sub(1, Relaxed);
    }
}

impl Session {
    /// Brings in everything that is not there yet, in order, giving way to faults; until it is done
    /// or `stopped` says so. Several threads may do it together.
    ///
    /// # Errors
    /// Those of [`Session::serve`].
    pub fn fetch(&self, stopped: &(dyn Fn() -> bool + Sync)) -> Result<()> {
        let next = || self.block(self.fetched.fetch_add(1, Relaxed));
        self.fetch_pieces(next, stopped)
    }

    /// Has the next [`Session::fetch`] begin anew.
    pub fn fetch_again(&self) {
        self.fetched.store(0, Relaxed);
    }

    /// Brings in what is missing of pieces until there are no more.
    pub(crate) fn fetch_pieces(
        &self,
        next: impl Fn() -> Option<Piece>,
        stopped: &(dyn Fn() -> bool + Sync),
    ) -> Result<()> {
        let mut installer = Installer::new(self);
        let _fetching = FetchGuard::new(self);
        while !stopped()
            && let Some(piece) = next()
        {
            self.fetch_piece(&mut installer, piece, stopped)?;
        }
        Ok(())
    }

    fn fetch_piece(
        &self,
        installer: &mut Installer<'_>,
        (number, range): Piece,
        stopped: &(dyn Fn() -> bool + Sync),
    ) -> Result<()> {
        let (region, known) = &self.regions[number];
        let (mut at, mut starved) = (range.start, None);
        while at < range.end && !stopped() {
            if self.busy.load(Relaxed) {
                std::thread::sleep(GIVE_WAY);
                continue;
            }
            let piece = known.missing(at..range.end);
            if piece.is_empty() {
                break;
            }
            let Some(claim) = known.claim(piece) else {
                // Whether the other one succeeds is looked at afterwards.
                std::thread::sleep(GIVE_WAY);
                continue;
            };
            let piece = claim.range.clone();
            match installer.install_early(number, piece.clone())? {
                Outcome::Done(_) => (at, starved) = (piece.end, None),
                Outcome::Starved => {
                    drop(claim);
                    if has_starved(starved) {
                        return Err(self.no_room(region.span_of(&piece)));
                    }
                    starved = starved.or_else(|| Some(Instant::now()));
                    std::thread::sleep(STARVED_AGAIN);
                }
                // Whoever reads the events goes first.
                Outcome::Again | Outcome::Claimed => {
                    drop(claim);
                    std::thread::sleep(GIVE_WAY);
                }
            }
        }
        Ok(())
    }

    /// The pages of a block of [`MOST_BYTES`], counted through all regions.
    fn block(&self, mut block: u64) -> Option<Piece> {
        for (number, (region, _)) in self.regions.iter().enumerate() {
            let blocks = region.bytes.div_ceil(MOST_BYTES);
            if block < blocks {
                let size = MOST_BYTES / region.granule_bytes().min(MOST_BYTES);
                let start = block * size;
                return Some((number, start..(start + size).min(region.len())));
            }
            block -= blocks;
        }
        None
    }
}
