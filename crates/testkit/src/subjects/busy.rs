//! One task that computes without pause: a counter, a sequence that depends on every step, in
//! integers and in floating point, each computed twice. Argument: MiB of memory that it writes
//! over and over.
//!
//! `count` answers the steps taken, `check` whether both computations agree and the memory holds
//! what was written.
use super::{Control, Failure, not_understood, number};

const STEPS_A_ROUND: u64 = 200_000;
const PAGE_WORDS: usize = 512;

/// The sequence, after as many steps as were counted.
#[derive(Clone, Copy, PartialEq)]
struct Sequence {
    count: u64,
    integer: u64,
    float: f64,
}

impl Sequence {
    const START: Self = Self {
        count: 0,
        integer: 1,
        float: 0.5,
    };

    fn step(&mut self) {
        self.count += 1;
        self.integer = self
            .integer
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        // A logistic map: chaotic, so a single lost bit shows soon.
        self.float = 3.99 * self.float * (1.0 - self.float);
    }
}

pub(super) fn run(mut control: Control, arguments: &[String]) -> Result<(), Failure> {
    let mebibytes = number(arguments, 0, 0)? as usize;
    let mut memory = vec![0_u64; mebibytes << 17];
    let mut at = Sequence::START;
    let mut again = Sequence::START;
    control.do_not_wait()?;
    control.ready()?;
    loop {
        for _ in 0..STEPS_A_ROUND {
            at.step();
        }
        while again.count < at.count {
            again.step();
        }
        for page in memory.chunks_mut(PAGE_WORDS) {
            page[0] = at.count;
        }
        let Some(question) = control.poll()? else {
            continue;
        };
        match question.verb.as_str() {
            "count" => control.answer(&question, at.count)?,
            "check" => {
                let written = memory.chunks(PAGE_WORDS).all(|page| page[0] == at.count);
                let verdict = if again == at && written {
                    "right"
                } else {
                    "wrong"
                };
                control.answer(&question, verdict)?;
            }
            _ => return not_understood(&question),
        }
    }
}
