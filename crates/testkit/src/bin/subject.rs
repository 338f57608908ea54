//! `subject NAME FOLDER [ARGUMENT…]`: gets into the state called NAME and answers questions.
#![forbid(unsafe_code)]

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = testkit::subjects::run(&arguments) {
        eprintln!("subject {arguments:?}: {error}");
        std::process::exit(1);
    }
}
