//! How fast a volume is read at most.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// How far ahead of its pace a reader may be: what it does not use is not saved up for later.
const SLACK: Duration = Duration::from_millis(50);

/// A limit for all readers together.
#[derive(Debug)]
pub struct RateLimit {
    bytes_per_s: Option<u64>,
    /// When the next bytes are due.
    next: Mutex<Instant>,
}

impl RateLimit {
    /// So many bytes in a second, or as many as there are.
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self {
            bytes_per_s,
            next: Mutex::new(Instant::now()),
        }
    }

    /// Tells whether there is no limit.
    pub const fn is_unlimited(&self) -> bool {
        self.bytes_per_s.is_none()
    }

    /// Waits until so many bytes may be read.
    pub fn wait(&self, bytes: u64) {
        let due = self.due(bytes, Instant::now());
        if let Some(left) = due.checked_duration_since(Instant::now()) {
            std::thread::sleep(left);
        }
    }

    /// When so many bytes may be read that are asked for at `now`.
    fn due(&self, bytes: u64, now: Instant) -> Instant {
        let Some(rate) = self.bytes_per_s else {
            return now;
        };
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(SLACK).unwrap_or(now);
        let due = (*next).max(earliest);
        *next = due + Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_is_kept_and_pauses_are_not_made_up_for() {
        let pace = RateLimit::new(Some(1000));
        let begun = *pace.next.lock().unwrap();
        let at = |ms| begun + Duration::from_millis(ms);
        assert_eq!(pace.due(500, begun), begun);
        assert_eq!(pace.due(1000, begun), at(500));
        assert_eq!(pace.due(1, at(1400)), at(1500));
        // After a pause of ten seconds it begins anew.
        assert_eq!(pace.due(100, at(11_000)), at(10_950));
        assert_eq!(pace.due(100, at(11_000)), at(11_050));
        assert_eq!(RateLimit::new(None).due(1 << 40, begun), begun);
    }
}
