//! Random numbers that can be had again: the seed is printed, and can be given.
use std::time::{Duration, SystemTime};

/// The environment variable with a seed to repeat a failed test with.
pub const VARIABLE: &str = "STILLFRAME_SEED";

/// A sequence of random numbers; not for secrets.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// Starts a sequence for the test `name`: from the seed in [`VARIABLE`] where it is set, else
    /// from the clock. The seed is printed.
    ///
    /// # Panics
    /// When the variable holds no number.
    pub fn of(name: &str) -> Self {
        let seed = match std::env::var(VARIABLE) {
            Ok(text) => text.parse().expect("a seed is a number"),
            Err(_) => SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(1, |since| since.as_nanos() as u64),
        };
        println!("{name}: {VARIABLE}={seed}");
        Self(seed)
    }

    /// Starts the sequence of `seed`.
    #[must_use]
    pub const fn with(seed: u64) -> Self {
        Self(seed)
    }

    /// True once in `times`, on the average.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// One of `among`.
    ///
    /// # Panics
    /// When there is none.
    pub fn pick<T: Copy>(&mut self, among: &[T]) -> T {
        among[self.below(among.len() as u64) as usize]
    }

    /// The next number: splitmix64.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `end`.
    ///
    /// # Panics
    /// When `end` is 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// A time below `limit`.
    pub fn time(&mut self, limit: Duration) -> Duration {
        Duration::from_nanos(self.below(limit.as_nanos().max(1) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_its_sequence_again() {
        let (mut first, mut second) = (Chance(7), Chance(7));
        let numbers: Vec<u64> = (0..10).map(|_| first.below(1000)).collect();
        assert!(numbers.iter().all(|&number| second.below(1000) == number));
        assert!(numbers.windows(2).any(|two| two[0] != two[1]));
    }
}
