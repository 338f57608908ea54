//! POSIX timers with a gap in their numbers: one that tells nobody, one that signals a thread
//! every 10 ms, one far ahead for the process.
//!
//! `left` answers number, time left and interval in milliseconds of each; `ticks` how often the
//! ticking one was heard, `value` what it carried.
use rustix::thread::gettid;

use super::{Control, Failure, not_understood};
use crate::calls::{Notify, count_signal, counted, create_timer};

const TICK: i32 = 42;
const FAR: i32 = 43;
const REALTIME: i32 = 0;
const MONOTONIC: i32 = 1;
const HOUR_MS: u64 = 3_600_000;
const SA_RESTART: i32 = 0x1000_0000;

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    count_signal(TICK, SA_RESTART)?;
    count_signal(FAR, SA_RESTART)?;
    let own = gettid().as_raw_pid().cast_unsigned();
    let silent = create_timer(MONOTONIC, Notify::Nothing, 0)?;
    let gap = create_timer(MONOTONIC, Notify::Nothing, 0)?;
    let ticking = create_timer(MONOTONIC, Notify::Thread(TICK, own), 0xbeef)?;
    let far = create_timer(REALTIME, Notify::Process(FAR), 0xcafe)?;
    gap.delete()?;
    silent.arm(HOUR_MS, 5000)?;
    ticking.arm(10, 10)?;
    far.arm(2 * HOUR_MS, 0)?;
    control.serve(|question| match question.verb.as_str() {
        "left" => {
            let mut shown = Vec::new();
            for timer in [silent, ticking, far] {
                let (left, interval) = timer.left()?;
                shown.push(format!("{} {left} {interval}", timer.0));
            }
            Ok(shown.join(", "))
        }
        "ticks" => Ok(counted(TICK).count.to_string()),
        "value" => Ok(counted(TICK).last_value.to_string()),
        _ => not_understood(question),
    })
}
