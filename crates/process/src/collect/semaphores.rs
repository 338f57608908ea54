//! Which event counters are semaphores, on kernels that do not tell.

use resources::fd::eventfd::Whether;
use resources::fd::table::Row;
use resources::script::{Answers, Script};

/// The questions to a task about its descriptors.
pub(super) struct Semaphores(Vec<(usize, Whether)>);

impl Semaphores {
    /// Whether there are descriptors of which the kernel has not told.
    pub fn are_among(rows: &[Row]) -> bool {
        rows.iter().any(Whether::is_unknown)
    }

    /// Asks about each of a task's descriptors of which the kernel has not told.
    pub fn ask(rows: &[Row], script: &mut Script) -> Self {
        let ask = |(at, row)| Some((at, Whether::ask(row, script)?));
        Self(rows.iter().enumerate().filter_map(ask).collect())
    }

    /// Adds what was answered to what the kernel has told.
    pub fn answer(&self, rows: &mut [Row], answers: &Answers) {
        for (at, whether) in &self.0 {
            whether.answer(answers, &mut rows[*at]);
        }
    }
}
