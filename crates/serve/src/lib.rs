//! Faults in, pages out: serves the memory of a target through a userfaultfd.
//!
//! A [`Session`] is one target: the [`Region`]s that it handed over, the image that their pages
//! come from, and what is known of each page. [`Session::serve`] answers faults, [`Session::fetch`]
//! brings in what nobody has asked for yet, and [`Session::diff`] writes what the target has
//! changed as a layer over the image, [`Session::diff_live`] while it runs on. What is known to be
//! empty is taken out of the tracking of missing pages, so that the kernel brings in zeros by
//! itself. What is known stands in a [`Ledger`], from which another process can go on:
//! [`Session::take_over`]. What the target is, and how it came here, is the caller's business.
#![forbid(unsafe_code)]

mod ability;
mod bits;
mod diff;
mod error;
mod events;
mod fetch;
mod install;
pub mod lazy;
mod ledger;
mod live;
mod metrics;
mod pending;
mod prefetch;
mod region;
mod release;
mod room;
mod session;
mod share;
mod take_over;
mod trace;

pub use ability::Ability;
pub use diff::Difference;
pub use error::{Error, Result};
pub use ledger::Ledger;
pub use live::{CopyProgress, LiveDiff};
pub use metrics::Metrics;
pub use region::Region;
pub use session::{Options, Progress, Session, Target};
pub use share::Share;
pub use trace::PageRange;
