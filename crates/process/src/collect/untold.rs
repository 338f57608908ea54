//! What is not known of descriptors, and their tasks are asked: which event counters are semaphores
//! (before 6.5), and whether `execve` closes some terminals and what is inherited.

use resources::fd::eventfd::Whether;
use resources::fd::table::{Row, WhetherClosed};
use resources::script::{Answers, Script};

/// The questions to a task about its descriptors, with their places among these.
pub(super) struct Untold {
    semaphores: Vec<(usize, Whether)>,
    closed: Vec<(usize, WhetherClosed)>,
}

impl Untold {
    /// Whether there are descriptors of which something is to be asked.
    pub fn is_among(rows: &[Row]) -> bool {
        let is_untold = |row| Whether::is_unknown(row) || WhetherClosed::is_unknown(row);
        rows.iter().any(is_untold)
    }

    /// Whether there are some that cannot be described before that.
    pub fn comes_first(rows: &[Row]) -> bool {
        rows.iter().any(Whether::is_unknown)
    }

    /// Asks about each of a task's descriptors of which the kernel has not told.
    pub fn ask(rows: &[Row], script: &mut Script) -> Self {
        let mut semaphores = Vec::new();
        let mut closed = Vec::new();
        for (at, row) in rows.iter().enumerate() {
            semaphores.extend(Whether::ask(row, script).map(|whether| (at, whether)));
            closed.extend(WhetherClosed::ask(row, script).map(|whether| (at, whether)));
        }
        Self { semaphores, closed }
    }

    /// Adds what was answered to what the kernel has told.
    pub fn answer(&self, rows: &mut [Row], answers: &Answers) {
        for (at, whether) in &self.semaphores {
            whether.answer(answers, &mut rows[*at]);
        }
        for (at, whether) in &self.closed {
            whether.answer(answers, &mut rows[*at]);
        }
    }
}
