//! `guest`: process 1 of a machine that runs tests on another kernel, and its setsid(1).
#![forbid(unsafe_code)]

use testkit::machine::inside;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let (name, arguments) = arguments.split_first().expect("it has a name");
    if name.ends_with("setsid") {
        eprintln!("setsid {arguments:?}: {}", inside::setsid(arguments));
        std::process::exit(1);
    }
    assert_eq!(
        std::process::id(),
        1,
        "this is for the machines that tests start"
    );
    inside::run()
}
