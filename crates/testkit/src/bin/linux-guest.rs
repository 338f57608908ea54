//! `linux-guest`: process 1 of a Linux machine that tests save: it counts, and answers questions.
#![forbid(unsafe_code)]

fn main() {
    assert_eq!(
        std::process::id(),
        1,
        "this is for the machines that tests start"
    );
    testkit::machine::linux::inside();
}
