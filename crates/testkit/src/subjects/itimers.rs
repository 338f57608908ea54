//! The three interval timers, armed far ahead, the first with an interval too; or, with the
//! argument `ticking`, a real-time one that fires every 10 ms and is counted.
//!
//! `left` answers time left and interval of each in microseconds, `ticks` the count.
use crate::calls::{count_signal, counted, interval_timer_left, set_interval_timer};

use super::{Control, Failure, not_understood};

const ALARM: i32 = 14;
const REAL: i32 = 0;
const VIRTUAL: i32 = 1;
const PROFILING: i32 = 2;
const SA_RESTART: i32 = 0x1000_0000;
const HOUR_US: u64 = 3_600_000_000;

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    count_signal(ALARM, SA_RESTART)?;
    if arguments.first().is_some_and(|word| word == "ticking") {
        set_interval_timer(REAL, 10_000, 10_000)?;
    } else {
        set_interval_timer(REAL, HOUR_US, 1_234_567)?;
    }
    set_interval_timer(VIRTUAL, 2 * HOUR_US, 0)?;
    set_interval_timer(PROFILING, 3 * HOUR_US, 7_000_000)?;
    control.serve(|question| match question.verb.as_str() {
        "left" => {
            let mut shown = Vec::new();
            for which in [REAL, VIRTUAL, PROFILING] {
                let (left, interval) = interval_timer_left(which)?;
                shown.push(format!("{left} {interval}"));
            }
            Ok(shown.join(", "))
        }
        "ticks" => Ok(counted(ALARM).count.to_string()),
        _ => not_understood(question),
    })
}
