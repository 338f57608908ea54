//! Paired runs against peers.
fn main() {}
