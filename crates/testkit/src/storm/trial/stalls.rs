//! Dumps and restores that stand still on their way: nobody may notice, and all succeed.
use super::{OPTIONS, Refusal, SubjectView, Trial, refused, succeeded};
use crate::chance::Chance;
use crate::stillframe::Stalls;

/// How many stops there are in a dump, about.
const STOPS: u32 = 6;

impl Trial<'_> {
    /// Dumps in each way and restores, each stopped a few times.
    pub(super) fn stalled_cycle(&mut self, before: &SubjectView) -> Result<Refusal, String> {
        let first = self.dump(&["--leave-running"]);
        let apart = first.elapsed / STOPS;
        if let Some(refusal) = refused(first)? {
            return Ok(Some(refusal));
        }
        let mut stalls = Stalls::new(Chance::with(self.chance.number()), apart);
        let stalled = self.stall_all(before, &mut stalls);
        self.stalls += stalls.count;
        stalled
    }

    fn stall_all(&self, before: &SubjectView, stalls: &mut Stalls) -> Result<Refusal, String> {
        let pid = self.subject.pid();
        for way in ["--leave-running", "--live"] {
            self.stillframe.clear();
            let options = [OPTIONS, &[way]].concat();
            let dump = self.stillframe.dump_stalled(pid, &options, stalls);
            if let Some(refusal) = refused(dump)? {
                return Ok(Some(refusal));
            }
            self.compare_facts(before, &format!("after a dump {way} that stood still"))?;
        }
        self.stillframe.clear();
        let dump = self.stillframe.dump_stalled(pid, OPTIONS, stalls);
        if let Some(refusal) = refused(dump)? {
            return Ok(Some(refusal));
        }
        succeeded(self.stillframe.restore_stalled(OPTIONS, stalls))?;
        Ok(None)
    }
}
