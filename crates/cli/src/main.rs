//! The stillframe command.
fn main() {}
