//! Subjects, fixtures and suites for tests.
#![forbid(unsafe_code)]

pub mod skip;
