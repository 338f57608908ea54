//! What only a task knows of a descriptor that it inherited: whether `execve` closes it.

use resources::fd::table::Row;
use resources::script::{Answers, Script, StepAt};
use syscalls::Sysno;

const F_GETFD: u32 = 1;
const FD_CLOEXEC: i64 = 1;

/// The questions for the flags of descriptors.
pub(super) struct Flags(Vec<StepAt>);

impl Flags {
    /// Asks for those that are not known.
    pub fn ask(rows: &[Row], questions: &mut Script) -> Self {
        let unknown = rows.iter().filter(|row| row.cloexec.is_none());
        let ask = |row: &Row| questions.call(Sysno::fcntl, [row.fd.into(), F_GETFD.into()]);
        Self(unknown.map(ask).collect())
    }

    /// Fills in what the task said.
    pub fn answer(&self, rows: &mut [Row], answers: &Answers) {
        let unknown = rows.iter_mut().filter(|row| row.cloexec.is_none());
        for (row, step) in unknown.zip(&self.0) {
            row.cloexec = Some(answers.result(*step) & FD_CLOEXEC != 0);
        }
    }
}
