//! Subjects made from seeds, and the steps that failed once: see docs/testing.md.
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use testkit::needs_root;
use testkit::storm::generate;
use testkit::storm::step::{Step, to_text};
use testkit::storm::trial::{Ended, Variant, kept, try_steps};

use crate::{stillframe, terminal};

/// How many are tried at a time.
const JOBS: usize = 2;

/// Keeps the numbers of terminals from other tests, for steps that make one: while it is an image,
/// nobody else must get its number.
fn terminal_of(steps: &[Step]) -> Option<MutexGuard<'static, ()>> {
    let has_terminal = to_text(steps).contains("\"terminal\"");
    has_terminal.then(terminal::alone)
}

#[test]
fn what_failed_once_comes_back() {
    needs_root!();
    if stillframe().is_peer() {
        testkit::skip!("the peer saves less");
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/storm");
    let files = std::fs::read_dir(folder).expect("the steps are there");
    for file in files {
        let path = file.expect("a file").path();
        let steps = kept(&path).expect("a step on each line");
        let _alone = terminal_of(&steps);
        let ended = try_steps(&stillframe(), &steps, Variant::Plain);
        match ended {
            Ok(Ended::Restored { .. }) => {}
            other => panic!("{}: {other:?}", path.display()),
        }
    }
}

#[test]
fn fifty_seeds_come_back() {
    needs_root!();
    if stillframe().is_peer() {
        testkit::skip!("the peer saves less");
    }
    const SEEDS: u64 = 50;
    let next = AtomicU64::new(0);
    let failures = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..JOBS {
            scope.spawn(|| {
                while let Some(seed) = Some(next.fetch_add(1, Ordering::Relaxed))
                    && seed < SEEDS
                {
                    // What kills find depends on their moments: they are for the long runs by hand.
                    let variant = match Variant::of_seed(seed) {
                        Variant::Kills => Variant::Plain,
                        other => other,
                    };
                    let steps = generate::steps(seed);
                    let _alone = terminal_of(&steps);
                    let ended = try_steps(&stillframe(), &steps, variant);
                    if let Err(failure) = ended {
                        let told = format!("seed {seed}, {}: {failure}", variant.name());
                        failures.lock().expect("no panic holds it").push(told);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no panic holds it");
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
