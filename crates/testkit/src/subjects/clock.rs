//! One task that asks its vDSO for the time without pause, through pointers that it took when it
//! began. Arguments: whose vDSO it is, the offsets of `clock_gettime`, `gettimeofday`, `time` and
//! `getcpu` in it, and what the first asks for:
//!
//! - `own`: as the kernel maps it,
//! - `moved`: its own, elsewhere,
//! - `unmapped`: none; it only answers,
//! - `foreign FILE`: another kernel's, out of a file, with made-up data,
//! - `copy FILE BYTES`: out of a file, in memory of its own behind so many bytes of zeros.
//!
//! `rounds` answers how often it has asked, `address` where the first function is, `check` "right"
//! if no clock ever stepped back and all are right now, or what is wrong; `check all` looks at
//! `time`, too, which says what made-up data says.
use rustix::mm::{MapFlags, ProtFlags};

use super::{Control, Failure, not_understood, number};
use crate::calls::Mapping;
use crate::calls::vdso::{self, Clock, Offsets};

const PAGE_BYTES: usize = 4096;
const CLOCK_REALTIME: i32 = 0;
const CLOCK_MONOTONIC: i32 = 1;
const CLOCK_REALTIME_COARSE: i32 = 5;
const CLOCK_MONOTONIC_COARSE: i32 = 6;
const ROUNDS_AT_ONCE: u32 = 1000;

/// The clocks that never step back, as last seen.
#[derive(Default)]
struct Watch {
    monotonic_ns: i64,
    coarse_ns: i64,
    rounds: u64,
    wrong: Option<String>,
}

impl Watch {
    fn look(&mut self, clock: &Clock) {
        let monotonic_ns = clock.nanoseconds(CLOCK_MONOTONIC);
        let coarse_ns = clock.nanoseconds(CLOCK_MONOTONIC_COARSE);
        for (name, now, before) in [
            ("monotonic", monotonic_ns, self.monotonic_ns),
            ("coarse", coarse_ns, self.coarse_ns),
        ] {
            if now < before && self.wrong.is_none() {
                self.wrong = Some(format!("{name} went from {before} back to {now}"));
            }
        }
        (self.monotonic_ns, self.coarse_ns) = (monotonic_ns, coarse_ns);
        self.rounds += 1;
        // Asked for the sake of being asked.
        let _ = (clock.microseconds(), clock.seconds(), clock.processor());
    }
}

pub(super) fn run(mut control: Control, arguments: &[String]) -> Result<(), Failure> {
    let which = arguments.first().map_or("", String::as_str);
    let offset = |index| number(arguments, index, 0).map(|offset| offset as usize);
    let offsets = Offsets {
        clock_gettime: offset(1)?,
        gettimeofday: offset(2)?,
        time: offset(3)?,
        getcpu: offset(4)?,
    };
    let file = || std::fs::read(arguments.get(5).ok_or("no file")?).map_err(Failure::from);
    let clock = match which {
        "own" => Clock::own(offsets)?,
        "moved" => Clock::moved(offsets)?,
        "unmapped" => {
            vdso::unmap()?;
            // Where a dump finds room for code: the program's own may end with a page that is full.
            let executable = ProtFlags::READ | ProtFlags::EXEC;
            let _room = Mapping::anonymous(PAGE_BYTES, executable, MapFlags::PRIVATE)?;
            return control.serve(|question| match question.verb.as_str() {
                "check" => Ok("right".into()),
                _ => not_understood(question),
            });
        }
        "foreign" => Clock::foreign(&file()?, offsets)?,
        "copy" => Clock::copy(&file()?, offset(6)?, offsets)?,
        _ => return Err("whose vDSO?".into()),
    };
    let mut watch = Watch::default();
    control.do_not_wait()?;
    control.ready()?;
    loop {
        (0..ROUNDS_AT_ONCE).for_each(|_| watch.look(&clock));
        let Some(question) = control.poll()? else {
            continue;
        };
        match question.verb.as_str() {
            "rounds" => control.answer(&question, watch.rounds)?,
            "address" => control.answer(&question, clock.address())?,
            "check" => {
                let all = question.words.iter().any(|word| word == "all");
                let wrong = watch.wrong.take().or_else(|| wrong(&clock, all));
                control.answer(&question, wrong.unwrap_or_else(|| "right".to_owned()))?;
            }
            _ => return not_understood(&question),
        }
    }
}

/// What a function says that is not what the system calls before and after it say.
fn wrong(clock: &Clock, all: bool) -> Option<String> {
    let mut wrong = Vec::new();
    let mut between = |name: &str, id: i32, unit: i64, now: &dyn Fn() -> i64| {
        let first = vdso::nanoseconds(id) / unit;
        let now = now();
        let last = vdso::nanoseconds(id) / unit;
        if now < first || now > last {
            wrong.push(format!("{name}: {now} is not in {first}..={last}"));
        }
    };
    for id in [CLOCK_REALTIME, CLOCK_MONOTONIC] {
        between("clock_gettime", id, 1, &|| clock.nanoseconds(id));
    }
    between("gettimeofday", CLOCK_REALTIME, 1000, &|| {
        clock.microseconds()
    });
    if all {
        let coarse = CLOCK_REALTIME_COARSE;
        between("clock_gettime", coarse, 1, &|| clock.nanoseconds(coarse));
        between("time", coarse, 1_000_000_000, &|| clock.seconds());
    }
    // It may be moved in between, but not each time.
    let same = (0..1000).any(|_| clock.processor() == vdso::processor());
    if !same {
        wrong.push("getcpu names another processor".to_owned());
    }
    (!wrong.is_empty()).then(|| wrong.join(", "))
}
