//! The messages between the process outside and its copy.

use prost::Message;

use crate::Stage;

/// A message to the process outside; a pidfd of the root comes along, where there is one.
#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// True: the tree runs, and no stage comes any more. (A packet without fields is none.)
    #[prost(bool, required, tag = "1")]
    pub is_last: bool,
    /// The stage that is reached, as [`number`] has it.
    #[prost(uint32, optional, tag = "2")]
    pub stage: Option<u32>,
}

/// The answer.
#[derive(Clone, PartialEq, Message)]
pub struct Answer {
    /// True if the work goes on.
    #[prost(bool, required, tag = "1")]
    pub goes_on: bool,
    /// The root's number outside.
    #[prost(int32, optional, tag = "2")]
    pub root: Option<i32>,
    /// Why it does not.
    #[prost(string, optional, tag = "3")]
    pub veto: Option<String>,
}

/// The stages, by their numbers in a message.
pub const STAGES: [Stage; 11] = [
    Stage::PreDump,
    Stage::NetworkLock,
    Stage::PostFreeze,
    Stage::PostDump,
    Stage::PreRestore,
    Stage::SetupNamespaces,
    Stage::PostSetupNamespaces,
    Stage::PostRestore,
    Stage::NetworkUnlock,
    Stage::PreResume,
    Stage::PostResume,
];

/// The number of a stage in a message.
pub fn number(stage: Stage) -> u32 {
    let position = STAGES.iter().position(|one| *one == stage);
    u32::try_from(position.expect("all are listed")).expect("a few")
}
