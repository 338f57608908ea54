//! Paired runs against peers.
#![forbid(unsafe_code)]
fn main() {}
