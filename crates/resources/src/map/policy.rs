//! Where the memory of a mapping comes from on a machine of several nodes (mbind(2)).
//!
//! - What: memory policies of mappings
//! - Kept: mode, flags and nodes (mbind(2)).
//! - CRIU 4.2: not kept.

use std::collections::HashMap;

use abi::Addr;
use prost::Message;
use syscalls::Sysno;

use super::memory::Mapping;
use crate::script::{Answers, Arg, DataAt, Script, StepAt};

/// More nodes than any kernel is built for (`CONFIG_NODES_SHIFT`).
const NODES_WORDS: usize = 16;
const NODES: u64 = 64 * NODES_WORDS as u64;
/// `MPOL_F_STATIC_NODES`, `MPOL_F_RELATIVE_NODES`, `MPOL_F_NUMA_BALANCING`.
const FLAGS: u32 = 1 << 15 | 1 << 14 | 1 << 13;

/// A memory policy other than the default one, of a mapping.
#[derive(Clone, PartialEq, Message)]
pub struct Policy {
    /// `MPOL_` mode and flags.
    #[prost(uint32, tag = "1")]
    pub mode: u32,
    /// The nodes, 64 a word.
    #[prost(fixed64, repeated, tag = "2")]
    pub nodes: Vec<u64>,
}

impl Policy {
    /// Makes buffers for a policy that a call tells: its mode, and its nodes.
    pub(crate) fn buffers(questions: &mut Script) -> [DataAt; 2] {
        [questions.buffer(8), questions.buffer(8 * NODES_WORDS)]
    }

    /// The number of bits that the calls are told there is room for: one more than they use.
    pub(crate) fn max_node() -> u64 {
        NODES + 1
    }

    /// What a call told; none if it is the default.
    pub(crate) fn told(answers: &Answers, [mode, nodes]: [DataAt; 2]) -> Option<Self> {
        let mode = answers.half(mode, 0);
        let word = |at| answers.word(nodes, 8 * at);
        let mut nodes = (0..NODES_WORDS).map(word).collect::<Vec<_>>();
        while nodes.last() == Some(&0) {
            nodes.pop();
        }
        (mode != 0).then_some(Self { mode, nodes })
    }

    /// Whether a dump may have written it.
    pub(crate) fn is_known(&self) -> bool {
        self.mode & !FLAGS <= 16 && self.nodes.len() <= NODES_WORDS
    }

    /// The arguments that set it: mode, nodes, and the number of bits.
    pub(crate) fn arguments(&self, script: &mut Script) -> [Arg; 3] {
        let mut nodes = self.nodes.clone();
        nodes.resize(NODES_WORDS, 0);
        let nodes = nodes.iter().flat_map(|word| word.to_le_bytes());
        let nodes = script.bytes(&nodes.collect::<Vec<_>>());
        [self.mode.into(), nodes.into(), Self::max_node().into()]
    }
}

/// The questions to a task about the policies of its mappings.
pub struct Policies(Vec<(Addr, StepAt, [DataAt; 2])>);

impl Policies {
    /// Asks for the policy of the mappings that begin at `starts`, each by its first page.
    pub fn ask(starts: impl Iterator<Item = Addr>, questions: &mut Script) -> Self {
        const MPOL_F_ADDR: u32 = 2;
        let ask = |start: Addr| {
            let buffers = Policy::buffers(questions);
            let [mode, nodes] = buffers.map(Arg::from);
            let bits = Policy::max_node().into();
            let args = [mode, nodes, bits, start.into(), MPOL_F_ADDR.into()];
            // Kernels without memory nodes do not have the call.
            (
                start,
                questions.attempt(Sysno::get_mempolicy, args),
                buffers,
            )
        };
        Self(starts.map(ask).collect())
    }

    /// The policies that are not the default one, by the first addresses.
    #[must_use]
    pub fn answers(&self, answers: &Answers) -> HashMap<Addr, Policy> {
        let known = self.0.iter();
        let known = known.filter(|(_, step, _)| answers.result(*step) == 0);
        known
            .filter_map(|(start, _, buffers)| Some((*start, Policy::told(answers, *buffers)?)))
            .collect()
    }
}

/// Gives a mapping its policy, before it has pages.
pub(super) fn bind(map: &Mapping, script: &mut Script) {
    let Some(policy) = &map.policy else { return };
    let [mode, nodes, bits] = policy.arguments(script);
    let span = map.span();
    let args = [
        span.start.into(),
        span.bytes().into(),
        mode,
        nodes,
        bits,
        0u32.into(),
    ];
    script.call(Sysno::mbind, args);
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::{anonymous, memory, planning};
    use super::super::layout::{Pages, plan};
    use super::*;

    fn bound(start: u64, node: u64) -> Mapping {
        const MPOL_BIND: u32 = libc::MPOL_BIND as u32;
        let nodes = vec![1 << node];
        Mapping {
            policy: Some(Policy {
                mode: MPOL_BIND,
                nodes,
            }),
            ..anonymous(start, start + 0x1000, 3)
        }
    }

    #[test]
    fn a_mapping_is_bound_before_it_has_pages() {
        let memory = memory(vec![bound(0x10000, 0), anonymous(0x11000, 0x12000, 3)]);
        let pages = Pages::default();
        let laid = plan(&planning(&memory, &pages)).expect("plans");
        let late = laid.late.to_string();
        let bind = "mbind(addr=0x10000, len=4096, mode=0x2, nodes=0x1, max=1025, flags=0)\n";
        assert_eq!(late.matches("mbind").count(), 1, "{late}");
        let first = late.find(bind).unwrap_or_else(|| panic!("{late}"));
        assert!(late.find("mmap(addr=0x10000") < Some(first), "{late}");
    }

    #[test]
    fn a_child_keeps_no_mapping_of_another_policy() {
        assert!(bound(0x10000, 0).inherits(&bound(0x10000, 0)));
        assert!(!bound(0x10000, 0).inherits(&bound(0x10000, 1)));
        assert!(!anonymous(0x10000, 0x11000, 3).inherits(&bound(0x10000, 0)));
    }

    #[test]
    fn what_no_dump_writes_is_refused() {
        let mut map = bound(0x10000, 0);
        map.policy.as_mut().expect("it has one").mode = 1 << 12;
        let error = memory(vec![map]).check().expect_err("no such mode");
        assert!(error.to_string().contains("policy 0x1000"), "{error}");
    }
}
