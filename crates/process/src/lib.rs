//! Process trees: freeze, collect, drain; plan, build, inject, run.
//!
//! - dump: target → [freeze](fn@freeze::freeze) → frozen → collect → inventory → drain → image,
//! - restore: image → [`plan`](mod@plan) → plan → build → inject → run → running.
#![forbid(unsafe_code)]

mod alone;
mod build;
mod chain;
mod clocks;
mod collect;
mod contents;
mod cpuinfo;
mod dedup;
mod describe;
mod draft;
mod dry_run;
mod dump;
mod end;
mod error;
mod fates;
mod halt;
mod homework;
mod host;
mod huge_pages;
mod known;
mod layer;
mod lazy;
mod links;
mod live;
mod merge;
pub mod namespaces;
mod needs;
mod network;
mod numbering;
mod obstacles;
pub mod options;
mod overcommit;
mod parent;
mod patience;
mod plan;
mod pool;
mod portion;
mod predump;
mod processor;
mod records;
pub mod report;
mod restore;
mod rights;
#[cfg(test)]
mod sample;
mod seal;
mod settle;
mod statistics;
mod stopping;
mod text;
mod track;
mod undo;

pub use cpuinfo::{CpuCap, check_cpuinfo, dump_cpuinfo};
pub use dedup::dedup;
pub use describe::describe;
pub use dry_run::dry_run;
pub use dump::dump;
pub use error::{Error, Holder, Obstacle, Result, Veto};
pub use host::{HostFacts, probe as probe_host};
pub use lazy::{Lazy, LazyPages, LazyPagesOptions, serve_lazy_pages};
pub use merge::merge;
pub use needs::{Need, needs};
pub use network::{Clearing, NetworkTable, Standing, clear_network, network_tables};
pub use options::{
    Afterwards, Allow, DedupOptions, DumpOptions, InheritFd, Inherited, MergeOptions,
    RestoreOptions,
};
pub use records::ImageKind;
pub use report::{
    DedupReport, Description, DryRunReport, DumpReport, MergeReport, Observer, Stage,
};
pub use resources::cgroup::{Management as CgroupManagement, Mode as CgroupMode};
pub use resources::{ExternalMount, ExternalNamespace, FileValidation};
pub use restore::{Job, Restored, plan, restore};
pub use seal::facts;
pub use statistics::{DumpKind, Statistics};
