//! Everything a developer runs: tidy, ci, demo, test, bench.
fn main() {}
