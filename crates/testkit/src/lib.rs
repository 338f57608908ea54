//! Subjects, fixtures and suites for tests.
//!
//! - [`calls`] are the unsafe system calls of subjects and tests;
//! - [`program::Program`] starts a real program so that it can be dumped, and
//!   [`subject::Subject`] one of our own with a state of interest and questions to ask it;
//! - [`stillframe::Stillframe`] runs the command under test;
//! - [`facts::Facts`] is what /proc and ptrace tell about a tree, to compare before and after;
//! - [`machine`] runs tests on another kernel;
//! - [`storm`] makes subjects from seeds, and finds out what of them matters where one fails;
//! - [`page_server::PageServer`] serves microVMs, and [`serve_storm`] attacks it;
//! - [`slow_disk`] is a file whose reads take their time;
//! - [`bucket`] is a store that is far away, slow and faulty;
//! - [`wait`] waits for what can be observed, [`skip`] names the tests that cannot run.
//!
//! ```no_run
//! use testkit::{facts::Facts, stillframe::Stillframe, subject::Subject};
//!
//! let stillframe = Stillframe::new("target/debug/stillframe");
//! let subject = Subject::start("busy", &[]);
//! let before = Facts::still(subject.pid());
//! stillframe.dump(subject.pid(), &["--leave-running"]).must();
//! assert_eq!(before.diff(&Facts::still(subject.pid())), Vec::<String>::new());
//! ```
#![deny(unsafe_code)]

pub mod bucket;
#[allow(unsafe_code)]
pub mod calls;
pub mod chance;
pub mod facts;
pub mod guest;
pub mod huge_pages;
pub mod machine;
pub mod machine_memory;
pub mod page_server;
pub mod program;
pub mod samples;
pub mod serve_storm;
pub mod skip;
mod slots;
pub mod slow_disk;
pub mod stepper;
pub mod stillframe;
pub mod storm;
pub mod subject;
pub mod subjects;
pub mod tree;
pub mod volumes;
pub mod wait;
