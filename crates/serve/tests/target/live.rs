//! Differences of one instant, copied while the target writes and gives pages up.
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc;

use serve::CopyProgress;
use testkit::wait::{SOON, wait_until};

use super::*;

impl Served {
    /// Makes a difference of this instant while `work` is done; what was looked at and saved, and
    /// the image.
    fn diff_live(&self, work: impl FnOnce() + Send) -> (Arc<CopyProgress>, Reader) {
        let (writer, store) = self.writer();
        let copied = Arc::new(CopyProgress::default());
        let (begun, goes_on) = mpsc::channel();
        let (own, into) = (&copied, &writer);
        self.serve(move || {
            std::thread::scope(|scope| {
                let copying = scope.spawn(move || {
                    let live = self.session.diff_live(into, own).expect("an instant");
                    begun.send(()).expect("it waits for that");
                    live.finish().expect("a difference")
                });
                goes_on.recv().expect("an instant");
                work();
                copying.join().expect("no panic")
            })
        });
        (copied, self.finish_diff(writer, &*store))
    }

    /// Does the same, but nothing is copied before `work` is done.
    fn diff_later(&self, work: impl FnOnce() + Send) -> (Arc<CopyProgress>, Reader) {
        let (writer, store) = self.writer();
        let copied = Arc::new(CopyProgress::default());
        let (own, into) = (&copied, &writer);
        self.serve(move || {
            let live = self.session.diff_live(into, own).expect("an instant");
            work();
            live.finish().expect("a difference");
        });
        (copied, self.finish_diff(writer, &*store))
    }
}

/// Does `test` with each ability that there are differences of.
fn each_tracked(bytes: usize, test: impl Fn(&Served, Granule, &str)) {
    each(bytes, |served, granule, what| {
        if served.session.ability() > Ability::Missing {
            test(served, granule, what);
        }
    });
}

#[test]
fn a_difference_is_of_one_instant_under_fire() {
    const BYTES: usize = 16 * HUGE;
    const ROUNDS: u64 = 12;
    each_tracked(BYTES, |served, granule, what| {
        let mut model = vec![Holds::Image; BYTES / PAGE];
        served.serve(|| fire_all(served, granule, &mut model, 0));
        for round in 1..ROUNDS {
            let then = model.clone();
            let (copied, reader) =
                served.diff_live(|| fire_all(served, granule, &mut model, round));
            compare(&reader, &then, &format!("{what}, round {round}"));
            let [wanted, done] = [&copied.wanted_bytes, &copied.copied_bytes];
            assert_eq!(wanted.load(Relaxed), done.load(Relaxed), "{what}");
            if round % 4 == 3 {
                let (_, reader) = served.diff();
                compare(&reader, &model, &format!("{what}, after round {round}"));
            }
        }
        served.serve(|| {
            for (page, holds) in model.iter().enumerate() {
                served.check(page as u64, *holds);
            }
        });
        let (difference, _) = served.diff();
        assert_eq!(difference.stored_pages, 0, "{what}: {difference:?}");
    });
}

/// Writes to pages.
fn write_all(served: &Served, model: &mut [Holds], pages: Range<u64>, word: u64) {
    for page in pages {
        let holds = &mut model[page as usize];
        let over_zero = match *holds {
            Holds::Image => is_zero(page),
            Holds::Zero => true,
            Holds::Written { over_zero, .. } => over_zero,
        };
        let word = word + page;
        served.write(page, word);
        *holds = Holds::Written { over_zero, word };
    }
}

#[test]
fn what_changes_before_it_is_copied_is_saved() {
    const BYTES: usize = 8 * HUGE;
    each_tracked(BYTES, |served, _, what| {
        let mut model = vec![Holds::Image; BYTES / PAGE];
        for round in 1..4_u64 {
            // Some have never been there, some were left to the kernel.
            let part = if round == 1 { 3072 } else { 4096 };
            served.serve(|| write_all(served, &mut model, 0..part, round << 32));
            let then = model.clone();
            let (copied, reader) = served.diff_later(|| {
                write_all(served, &mut model, 0..2048, (round + 10) << 32);
                served.give_up(2048..4096);
                model[2048..].fill(Holds::Zero);
                write_all(served, &mut model, 1024..4096, (round + 20) << 32);
                served.give_up(0..512);
                model[..512].fill(Holds::Zero);
            });
            compare(&reader, &then, &format!("{what}, round {round}"));
            let saved_bytes = copied.saved_bytes.load(Relaxed);
            let wanted_bytes = copied.wanted_bytes.load(Relaxed);
            match (served.session.ability(), round) {
                (Ability::Told, 1) => assert_eq!(saved_bytes, wanted_bytes, "{what}"),
                // What was given up and is there again is read at once, before it may change.
                (Ability::Told, _) => assert!(saved_bytes <= wanted_bytes, "{what}"),
                _ => assert_eq!(saved_bytes, 0, "{what}"),
            }
            if round != 2 {
                let (_, reader) = served.diff();
                compare(&reader, &model, &format!("{what}, after round {round}"));
            }
        }
    });
}

#[test]
fn who_writes_more_than_is_kept_waits_for_the_copy() {
    const BYTES: usize = 48 * HUGE;
    const PAGES: u64 = (BYTES / PAGE) as u64;
    const KEPT: u64 = 64 << 20;
    each_tracked(BYTES, |served, _, what| {
        if served.session.ability() != Ability::Told {
            return;
        }
        let mut model = vec![Holds::Image; BYTES / PAGE];
        served.serve(|| write_all(served, &mut model, 0..PAGES, 1 << 32));
        let then = model.clone();
        let (writer, store) = served.writer();
        let copied = Arc::new(CopyProgress::default());
        served.serve(|| {
            let live = served.session.diff_live(&writer, &copied);
            let live = live.expect("an instant");
            std::thread::scope(|scope| {
                let writing = scope.spawn(|| write_all(served, &mut model, 0..PAGES, 2 << 32));
                wait_until("it to wait", SOON, || {
                    copied.saved_bytes.load(Relaxed) == KEPT
                });
                assert!(!writing.is_finished(), "{what}");
                live.finish().expect("a difference");
            });
        });
        let reader = served.finish_diff(writer, &*store);
        compare(&reader, &then, what);
        compare(&served.diff().1, &model, &format!("{what}, the next one"));
    });
}

#[test]
fn what_a_live_difference_was_to_have_is_in_the_next_one_if_it_fails() {
    const BYTES: usize = 8 * HUGE;
    each_tracked(BYTES, |served, granule, what| {
        let mut model = vec![Holds::Image; BYTES / PAGE];
        served.serve(|| fire_all(served, granule, &mut model, 0));
        for round in 1..4 {
            let (writer, _store) = served.writer();
            served.serve(|| {
                let copied = Arc::new(CopyProgress::default());
                let live = served
                    .session
                    .diff_live(&writer, &copied)
                    .expect("an instant");
                if round % 2 == 0 {
                    fire_all(served, granule, &mut model, round);
                }
                // Given up, or copied but never sealed.
                match round % 3 {
                    0 => drop(live.finish().expect("a difference")),
                    _ => drop(live),
                }
                fire_all(served, granule, &mut model, round + 10);
            });
            drop(writer);
            if round > 1 {
                compare(&served.diff().1, &model, &format!("{what}, round {round}"));
            }
        }
    });
}

#[test]
fn who_does_not_tell_what_is_given_up_has_no_live_differences() {
    let features = Features::WP;
    let Some(served) = Served::begin_with(Granule::Small, features, HUGE, true) else {
        return eprintln!("skipped: no userfaultfd");
    };
    let (writer, _store) = served.writer();
    let refused = served.session.diff_live(&writer, &Arc::default());
    let refused = refused.err().expect("refused").to_string();
    assert!(refused.contains("EVENT_REMOVE"), "{refused}");
}
