//! Which mappings may have a memory policy of their own (mbind(2)).

use std::collections::HashSet;

use abi::Addr;
use freeze::Task;
use resources::map::listing::Listed;
use resources::map::policy::Policies;
use resources::script::Script;

/// Asks for the policy of each mapping of which /proc does not say that it is the default one.
pub(super) fn ask(task: &Task, listed: &[Listed], questions: &mut Script) -> Policies {
    let plain = plain(task, listed);
    let starts = listed.iter().map(|map| map.span.start);
    Policies::ask(starts.filter(|start| !plain.contains(start)), questions)
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
