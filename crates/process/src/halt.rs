//! Waiting for threads to be stopped by a signal.

use std::time::{Duration, Instant};

use sys::proc::Stat;

use crate::{Error, Result};

/// How long a thread may take to stop: one that waits for a device does not before it has what it
/// waits for.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often a thread is looked at. The kernel tells the stop of another's child to nobody.
const PAUSE: Duration = Duration::from_micros(100);

/// Waits until each of these threads was stopped or has ended.
///
/// # Errors
/// [`Error::Kernel`] for the first that does not stop.
pub(crate) fn wait(tids: &[i32]) -> Result<()> {
    let begun = Instant::now();
    for tid in tids {
        while !is_halted(*tid) {
            if begun.elapsed() > PATIENCE {
                let late = std::io::Error::from(std::io::ErrorKind::TimedOut);
                return Err(Error::kernel(format!("thread {tid} does not stop"), late));
            }
            std::thread::sleep(PAUSE);
        }
    }
    Ok(())
}

/// Whether a thread is stopped by a signal, or has ended.
pub(crate) fn is_halted(tid: i32) -> bool {
    let stat = sys::procfs::read(format_args!("{tid}/stat")).ok();
    let stat = stat.and_then(|text| Stat::parse(&text).ok());
    stat.is_none_or(|stat| matches!(stat.state, b'T' | b'Z' | b'X'))
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, Signal, kill_process};
    use testkit::program::Program;

    use super::*;

    #[test]
    fn who_is_stopped_or_has_ended_is_not_waited_for() {
        let program = Program::new("sleep").arg("1000").spawn();
        let pid = program.pid().cast_signed();
        assert!(!is_halted(pid));
        kill_process(Pid::from_raw(pid).expect("a pid"), Signal::STOP).expect("it lives");
        wait(&[pid]).expect("it stops");
        assert!(is_halted(pid));
        kill_process(Pid::from_raw(pid).expect("a pid"), Signal::KILL).expect("it lives");
        wait(&[pid]).expect("it ends");
    }
}
