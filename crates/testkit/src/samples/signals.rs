//! Signals: actions, masks, alternate stacks, and signals that wait.

use std::io;

use crate::calls::alternate_stack_now;
use crate::calls::attributes::{
    Disposition, action, change_action, change_alternate_stack, send_signal, swap_mask,
};
use crate::calls::queue_signal;

use super::sample::{Sample, Values, status};

/// The states.
#[rustfmt::skip]
pub(super) const SIGNALS: &[Sample] = &[
    Sample::new("actions", Values::Made(all_actions), set_action, actions)
        .about(&["SigIgn", "SigCgt"])
        .adding()
        .of_process(),
    Sample::new("mask", Values::Made(masks), mask, || status("SigBlk"))
        .about(&["SigBlk", "PTRACE_GETSIGMASK"]),
    Sample::new("alternate-stack", Values::These(&[1, 2, 3, 0]), alternate, read_alternate),
    Sample::new("pending", Values::Made(sent), send, || Ok(String::new()))
        .about(&["SigPnd", "ShdPnd", "PTRACE_PEEKSIGINFO"])
        .adding()
        .read_by_tracers(),
];

/// The signals that no task of a storm ever has unblocked: those that are sent.
pub const ALWAYS_BLOCKED: u64 = 1 << 9 | 1 << 11 | !0 << 33;

/// `SIGKILL`, `SIGSTOP`, and two of the C library's own.
const NOT_SET: [u64; 4] = [9, 19, 32, 33];
/// `SIGPIPE`, which ends who writes to nobody.
const PIPE: u64 = 13;
/// The flags of sigaction(2): `SA_NOCLDSTOP`, `SA_NOCLDWAIT`, `SA_ONSTACK`, `SA_RESTART`,
/// `SA_NODEFER`, `SA_RESETHAND`, `SA_EXPOSE_TAGBITS`.
const FLAGS: [u64; 7] = [
    1,
    2,
    0x800_0000,
    0x1000_0000,
    0x4000_0000,
    0x8000_0000,
    0x800,
];

/// Each signal that has an action, with a flag.
fn all_actions() -> Vec<u64> {
    let signals = (1..=64).filter(|signal| !NOT_SET.contains(signal));
    let with_flags = |signal| (0..=FLAGS.len() as u64).map(move |flag| flag << 8 | signal);
    signals.flat_map(with_flags).collect()
}

/// Tells whether a task may be told that it, or a child, was stopped and continued, or keep it
/// pending, where state `what` has its value number `first`, or the next one where that is in
/// force: an action of `SIGCHLD` or `SIGCONT`, and a mask with that.
#[must_use]
pub fn may_tell_of_stops(what: &str, first: usize) -> bool {
    const CHILD: u64 = 17;
    const CONTINUED: u64 = 18;
    let tells = |value: u64| match what {
        "actions" => [CHILD, CONTINUED].contains(&(value & 0xff)),
        _ => value & 1 << (CONTINUED - 1) != 0,
    };
    let all = match what {
        "actions" => all_actions(),
        "mask" => masks(),
        _ => return false,
    };
    let mut numbers = [first, first + 1].into_iter();
    numbers.any(|number| tells(all[number % all.len()]))
}

fn set_action(value: u64) -> io::Result<()> {
    let (signal, flag) = (value & 0xff, value >> 8);
    let disposition = match (signal + flag) % 3 {
        0 => Disposition::Counted,
        1 => Disposition::Ignored,
        _ if signal == PIPE => Disposition::Ignored,
        _ => Disposition::Default,
    };
    let flags = FLAGS.get(flag as usize).copied().unwrap_or_default();
    let mask = 1 << flag | 1 << (signal - 1);
    change_action(signal as i32, disposition, flags, mask)
}

fn actions() -> io::Result<String> {
    let signals = (1..=64).filter(|signal| !NOT_SET.contains(signal));
    let actions = signals.map(|signal| {
        let now = action(signal as i32)?;
        let (handler, flags, restorer, mask) = (now.handler, now.flags, now.restorer, now.mask);
        Ok(format!(
            "{signal} {handler:x} {flags:x} {restorer:x} {mask:x}"
        ))
    });
    let actions: io::Result<Vec<String>> = actions.collect();
    // Where they differ, reports tell the signals alone.
    actions.map(|actions| actions.join(", "))
}

/// All signals that nobody needs, half of them, one.
fn masks() -> Vec<u64> {
    vec![!0, 0x5555_5555, 1 << 1, 1 << 16, 1 << 13, 0]
}

fn mask(others: u64) -> io::Result<()> {
    swap_mask(Some(others | ALWAYS_BLOCKED)).map(drop)
}

fn alternate(number: u64) -> io::Result<()> {
    /// `SS_AUTODISARM`
    const AUTODISARM: i32 = 1 << 31;
    match number {
        0 => change_alternate_stack(0, 0),
        1 => change_alternate_stack(64 << 10, 0),
        2 => change_alternate_stack(32 << 10, AUTODISARM),
        _ => change_alternate_stack(20_000, 0),
    }
}

fn read_alternate() -> io::Result<String> {
    alternate_stack_now().map(|stack| format!("{stack:x?}"))
}

/// Each signal that is blocked always, in each way to send one.
fn sent() -> Vec<u64> {
    let signals = (1..=64).filter(|signal| ALWAYS_BLOCKED >> (signal - 1) & 1 == 1);
    let in_ways = |signal: u64| (0..4).map(move |way| way << 8 | signal);
    signals.flat_map(in_ways).collect()
}

fn send(value: u64) -> io::Result<()> {
    let tid = rustix::thread::gettid().as_raw_pid().cast_unsigned();
    let (signal, way) = ((value & 0xff) as i32, value >> 8);
    let tid = way.is_multiple_of(2).then_some(tid);
    match way {
        0 | 1 => send_signal(tid, signal),
        _ => queue_signal(tid, signal, value << 32 | 7),
    }
}
