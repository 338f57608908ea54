//! What belongs to one thread: name, credentials, signal masks, scheduling, registers.
use std::{fs, io};

use sys::arch::Registers;
use sys::ptrace::{self, Dispatch, Event, RseqArea};
use xxhash_rust::xxh3::xxh3_64;

use super::{Depth, Facts, task};
use crate::tree;

/// Lines of /proc/PID/task/TID/status that stay the same.
const STATUS: &[&str] = &[
    "Umask",
    "Tgid",
    "Pid",
    "TracerPid",
    "Uid",
    "Gid",
    "Groups",
    "NStgid",
    "NSpid",
    "NSpgid",
    "NSsid",
    "VmLck",
    "Threads",
    "SigBlk",
    "SigIgn",
    "SigCgt",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "Speculation_Store_Bypass",
    "SpeculationIndirectBranch",
    "Cpus_allowed",
    "Mems_allowed",
    "CoreDumping",
    "THP_enabled",
    "x86_Thread_features",
];

pub(super) fn look(facts: &mut Facts, pid: u32, tid: u32, depth: Depth) {
    let whose = format!("{pid} thread {tid}");
    let folder = format!("/proc/{pid}/task/{tid}");
    facts.note(
        &whose,
        "comm",
        task::show(fs::read(format!("{folder}/comm"))),
    );
    let slack = fs::read(format!("/proc/{tid}/timerslack_ns"));
    // A slack of 0 comes back as one of 1 (docs/limits.md).
    let slack = match task::show(slack) {
        none if none == "0" => "1".to_owned(),
        slack => slack,
    };
    facts.note(&whose, "timerslack_ns", slack);
    look_at_status(facts, &whose, &folder, depth);
    look_at_scheduling(facts, &whose, &folder);
    if depth == Depth::Moving {
        return;
    }
    match ThreadState::take(tid) {
        Ok(examined) => look_at_examined(facts, pid, &whose, &examined),
        Err(error) => facts.note(&whose, "registers", error.to_string()),
    }
}

/// A thread as its tracer sees it.
struct ThreadState {
    registers: Registers,
    extended: Vec<u8>,
    rseq: RseqArea,
    dispatch: Option<Dispatch>,
    pending: Vec<[u8; 128]>,
    pending_shared: Vec<[u8; 128]>,
}

impl ThreadState {
    /// Stops thread `tid`, looks at it and lets it go. The call it waits in is restarted by the
    /// kernel; a job-control stop lasts.
    fn take(tid: u32) -> io::Result<Self> {
        let tid = tid.cast_signed();
        ptrace::seize(tid, false)?;
        let traced = TracedThread(tid);
        ptrace::interrupt(tid)?;
        loop {
            match ptrace::wait(tid)?.1 {
                Event::Stop(_) => break,
                Event::Ended(_) => return Err(io::ErrorKind::NotFound.into()),
                // A signal came first: hand it on and wait for the stop that was asked for.
                Event::Signal(signal) => ptrace::resume_to_stop(tid, signal)?,
                Event::Call | Event::Other(_) => ptrace::resume_to_stop(tid, 0)?,
            }
        }
        let examined = Self {
            registers: ptrace::registers(tid)?,
            extended: ptrace::xstate(tid)?,
            rseq: ptrace::rseq(tid)?,
            // Kernels before 6.4 do not tell.
            dispatch: ptrace::dispatch(tid).unwrap_or_default(),
            pending: ptrace::peek_siginfo(tid, false)?,
            pending_shared: ptrace::peek_siginfo(tid, true)?,
        };
        drop(traced);
        Ok(examined)
    }
}

/// Lets a traced thread go on drop.
struct TracedThread(i32);

impl Drop for TracedThread {
    fn drop(&mut self) {
        // It may have died meanwhile; then there is nothing to let go.
        let _ = ptrace::detach(self.0, 0);
    }
}

fn look_at_examined(facts: &mut Facts, pid: u32, whose: &str, examined: &ThreadState) {
    look_at_registers(facts, whose, examined.registers);
    facts.note(whose, "xstate", show_extended(&examined.extended));
    let rseq = &examined.rseq;
    let shown = format!("{:x} {} {:x}", rseq.addr, rseq.len_bytes, rseq.signature);
    facts.note(whose, "rseq", shown);
    facts.note(whose, "dispatch", format!("{:x?}", examined.dispatch));
    facts.note(whose, "pending", show_pending(&examined.pending));
    facts.note(pid, "pending", show_pending(&examined.pending_shared));
    if rseq.addr != 0 {
        facts.rseq_areas.push((pid, rseq.addr));
    }
}

/// Shows queued signals as the 32-bit words of their siginfo, without the zeros at the end.
fn show_pending(pending: &[[u8; 128]]) -> String {
    let show = |info: &[u8; 128]| {
        let mut words: Vec<String> = info
            .chunks_exact(4)
            .map(|word| {
                format!(
                    "{:x}",
                    u32::from_le_bytes(word.try_into().expect("4 bytes"))
                )
            })
            .collect();
        while words.last().is_some_and(|word| word == "0") {
            words.pop();
        }
        words.join(" ")
    };
    pending.iter().map(show).collect::<Vec<_>>().join(", ")
}

/// The codes in rax of a call that the kernel is going to restart: ERESTARTSYS to
/// ERESTART_RESTARTBLOCK.
const RESTARTS: std::ops::RangeInclusive<i64> = -516..=-512;

/// Notes the general registers. The number of the call is left out: one that was interrupted may
/// go on under another, and behind a call it means nothing. In a call that waits, so is what the
/// call overwrites anyway: rax, rcx, r11.
fn look_at_registers(facts: &mut Facts, whose: &str, registers: Registers) {
    let waits = RESTARTS.contains(&registers.rax.cast_signed());
    let mut shown = Registers {
        orig_rax: 0,
        ..registers
    };
    if waits {
        (shown.rax, shown.rcx, shown.r11) = (0, 0, 0);
    }
    facts.note(whose, "registers", format!("{shown:x?}"));
    facts.note(whose, "waits", waits.to_string());
}

/// Shows the state by hash, without the bytes that say which parts are in use: a part out of use
/// reads as its initial value.
fn show_extended(state: &[u8]) -> String {
    const FOR_SOFTWARE: usize = 464;
    const AFTER_HEADER: usize = 576;
    let legacy = &state[..state.len().min(FOR_SOFTWARE)];
    let rest = state.get(AFTER_HEADER..).unwrap_or_default();
    format!("{:x} {:x}", xxh3_64(legacy), xxh3_64(rest))
}

fn look_at_status(facts: &mut Facts, whose: &str, folder: &str, depth: Depth) {
    let status = task::text(&format!("{folder}/status"));
    for line in status.lines() {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        let wanted = STATUS.contains(&name) || (name == "SigPnd" && depth == Depth::Still);
        // A handler that runs has its signal blocked.
        let changes = name == "SigBlk" && depth == Depth::Moving;
        if wanted && !changes {
            let value: Vec<&str> = value.split_ascii_whitespace().collect();
            facts.note(whose, name, value.join(" "));
        }
    }
}

fn look_at_scheduling(facts: &mut Facts, whose: &str, folder: &str) {
    let Some(rest) = tree::stat_at(folder) else {
        return;
    };
    // Fields 18, 19, 40 and 41 of proc_pid_stat(5); the state letter is field 3.
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    for (number, name) in [
        (18, "priority"),
        (19, "nice"),
        (40, "rt_priority"),
        (41, "policy"),
    ] {
        if let Some(value) = fields.get(number - 3) {
            facts.note(whose, name, *value);
        }
    }
}
