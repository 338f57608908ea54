//! Mappings with a memory policy of their own (mbind(2)), which are refused.

use std::collections::HashSet;

use abi::Addr;
use resources::map::listing::Listed;
use resources::script::{Answers, DataAt, Script, StepAt};
use syscalls::Sysno;

use crate::Result;
use crate::freeze::Task;

/// The questions to a task about its mappings.
pub(super) struct Policies(Vec<(Addr, StepAt, DataAt)>);

impl Policies {
    /// Asks for the policy of each mapping of which /proc does not say that it is the default one,
    /// by its first page.
    pub fn ask(task: &Task, listed: &[Listed], script: &mut Script) -> Self {
        const MPOL_F_ADDR: u32 = 2;
        let plain = plain(task, listed);
        let ask = |map: &Listed| {
            let mode = script.room(4);
            let start = map.span.start;
            let args = [
                mode.into(),
                0u32.into(),
                0u32.into(),
                start.into(),
                MPOL_F_ADDR.into(),
            ];
            // Kernels without memory nodes do not have the call.
            (start, script.attempt(Sysno::get_mempolicy, args), mode)
        };
        let unknown = listed.iter().filter(|map| !plain.contains(&map.span.start));
        Self(unknown.map(ask).collect())
    }

    /// Checks that they all have the default policy.
    ///
    /// # Errors
    /// [`resources::Error::Unsupported`] naming the first mapping that has not.
    pub fn check(&self, pid: i32, listed: &[Listed], answers: &Answers) -> Result<()> {
        const MPOL_DEFAULT: u32 = 0;
        for (start, step, mode) in &self.0 {
            if answers.result(*step) == 0 && answers.half(*mode, 0) != MPOL_DEFAULT {
                let map = listed.iter().find(|map| map.span.start == *start);
                let place = map.map_or_else(|| format!("mapping {start}"), Listed::place);
                let what = format!("{place}: a memory policy of its own (mbind)");
                return Err(resources::Error::unsupported(pid, what).into());
            }
        }
        Ok(())
    }
}

/// The starts of mappings with the default policy, as far as that is told by numa_maps at once; of
/// others the task is asked.
///
/// The kernel looks at every page that is there to write it: only for tasks that have few.
fn plain(task: &Task, listed: &[Listed]) -> HashSet<Addr> {
    const RESIDENT_BYTES: u64 = 4 << 20;
    let resident_bytes = listed.iter().map(|map| map.resident_bytes).sum::<u64>();
    if resident_bytes > RESIDENT_BYTES || !is_true() {
        return HashSet::new();
    }
    // What does not come with the first piece is unknown.
    let text = task.read("numa_maps").unwrap_or_default();
    starts(&text)
}

/// Of the lines "START POLICY …", the starts of those whose policy is the default one.
fn starts(text: &[u8]) -> HashSet<Addr> {
    let text = String::from_utf8_lossy(text);
    let plain = text.split_inclusive('\n').filter_map(|line| {
        let (start, rest) = line.strip_suffix('\n')?.split_once(' ')?;
        let policy = rest.split(' ').next()?;
        let start = u64::from_str_radix(start, 16).ok()?;
        (policy == "default").then_some(Addr(start))
    });
    plain.collect()
}

/// Whether numa_maps says "default" of nothing else: kernels before this one, or some of them, did
/// of policies with `MPOL_F_NUMA_BALANCING`.
fn is_true() -> bool {
    const SINCE: (u32, u32) = (6, 18);
    let release = crate::host::kernel().release().to_string_lossy();
    let mut numbers = release.split(['.', '-', '+']).map_while(|n| n.parse().ok());
    numbers.next().zip(numbers.next()) >= Some(SINCE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_default_policy_is_plain() {
        let text = b"1000 default file=/bin/x mapped=2 N0=2\n2000 bind=balancing:0 anon=1\n\
            3000 default\n4000 prefer:0\n5000 defaul";
        assert_eq!(starts(text), HashSet::from([Addr(0x1000), Addr(0x3000)]));
    }
}
