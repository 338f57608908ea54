//! System calls that the stop of a thread has interrupted, and how they go on.
//!
//! A thread that is stopped while it waits in a call leaves the call with one of these results,
//! which the program never sees (signal(7)):
//! - `ERESTARTSYS`, `ERESTARTNOINTR`, `ERESTARTNOHAND`: the kernel makes the call again with the
//!   same arguments when the thread goes on, also a restored one: nothing to be done;
//! - `ERESTART_RESTARTBLOCK`: the kernel goes on with the time that remains, which it keeps where
//!   only it can see it. That is gone in a restored thread: it makes the call again with less
//!   time, or the tracer makes it once more in advance ([`Remake`]);
//! - `EINTR`, of calls that the kernel never makes again: made again here, with less time where
//!   the time is in a register. The time of those that point at it stays what it was.
//!
//! Times are relative to the thread's life: the time between dump and restore does not count.
//!
//! - What: calls that wait
//! - Kept: they go on with the time that remained; those whose time limit is in memory or in the
//!   socket wait all of it again. A thread never sees that it was stopped.
//! - CRIU 4.2: calls that the kernel makes again with their arguments go on; others with a time
//!   limit, such as nanosleep(2), poll(2), epoll_wait(2) and futex(2), return `EINTR`.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use sys::arch::{INT_80, Registers, SYSCALL};
use sys::proc::{Stat, Status, Syscall, exec_start_ns, waits_begun};
use syscalls::Sysno;

use calls::{Call, Kind, Times, may_be_32_bit, read_time, write_time};

mod calls;

const EINTR: i64 = -(libc::EINTR as i64);
const ERESTART_RESTARTBLOCK: i64 = abi::kernel::ERESTART_RESTARTBLOCK;
const TIMER_ABSTIME: u64 = libc::TIMER_ABSTIME as u64;
const FUTEX_COMMAND: u64 = 0x7f;
const FUTEX_WAIT: u64 = libc::FUTEX_WAIT as u64;

/// Calls of 64-bit code that wait for something to happen and move no data.
const WAIT_FOR_EVENTS: [Sysno; 19] = [
    Sysno::poll,
    Sysno::ppoll,
    Sysno::select,
    Sysno::pselect6,
    Sysno::epoll_wait,
    Sysno::epoll_pwait,
    Sysno::epoll_pwait2,
    Sysno::futex,
    Sysno::futex_waitv,
    Sysno::nanosleep,
    Sysno::clock_nanosleep,
    Sysno::pause,
    Sysno::rt_sigsuspend,
    Sysno::rt_sigtimedwait,
    Sysno::wait4,
    Sysno::waitid,
    Sysno::accept,
    Sysno::accept4,
    Sysno::restart_syscall,
];

/// What a thread did shortly before it was stopped. Its wait begins when it last ran: how long it
/// lasts can only be told before the stop ends it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Before {
    /// How long it had waited.
    waited: Option<Waited>,
    /// The kernel's function in which it waits, when the call alone does not say what it is.
    function: String,
    /// Whether it was nowhere in a program: on a processor, or without registers.
    is_nowhere: bool,
}

/// How long a thread had waited at what time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waited {
    time: Duration,
    then: Instant,
    /// How many waits it had begun.
    begun: u64,
}

impl Before {
    /// Looks at a thread that was not stopped yet; `read` gives files of /proc/PID/task/TID. Reads
    /// one file, or three if the thread waits in a call whose time is limited.
    pub fn read(clocks: &mut Clocks, mut read: impl FnMut(&str) -> Option<Vec<u8>>) -> Self {
        let mut before = Self::default();
        let syscall = read("syscall");
        let nowhere = |text: &[u8]| text.starts_with(b"running") || text.ends_with(b" 0x0 0x0\n");
        before.is_nowhere = syscall.as_deref().is_some_and(nowhere);
        let syscall = syscall.and_then(|text| Syscall::parse(&text).ok());
        if let Some(Syscall::In {
            number,
            args,
            stack,
        }) = syscall
        {
            // What code it runs is only told when it is stopped.
            let kinds = [Some(false), may_be_32_bit(stack).then_some(true)];
            let may_be = kinds.into_iter().flatten();
            let may_be = may_be.filter_map(|is_32_bit| Call::of(is_32_bit, number));
            let may_be = may_be.collect::<Vec<_>>();
            if may_be.iter().any(|call| call.kind == Kind::Restart) {
                let function = read("wchan").unwrap_or_default();
                before.function = String::from_utf8_lossy(&function).trim().to_owned();
            }
            if may_be.iter().any(|call| time_is_needed(call.kind, &args)) {
                before.waited = waited(clocks, &mut read);
            }
        }
        before
    }

    /// Whether it may be a thread of the kernel's, which has no registers of a program.
    #[must_use]
    pub fn may_be_kernels(&self) -> bool {
        self.is_nowhere
    }

    /// Sees, when the thread was stopped, whether that has ended the wait that was seen: otherwise
    /// it is not known how long it has waited. Reads at most one file.
    pub fn see_stopped(&mut self, mut read: impl FnMut(&str) -> Option<Vec<u8>>) {
        // To be stopped is a wait as well.
        const OWN: u64 = 1;
        if let Some(waited) = self.waited {
            let begun = read("sched").and_then(|sched| waits_begun(&sched));
            if begun.is_none_or(|begun| begun > waited.begun + OWN) {
                self.waited = None;
            }
        }
    }

    /// How long the thread has waited if it was stopped just now; 0 when that is not known.
    /// Exact to some microseconds, but without time that a hypervisor took from its processor.
    #[must_use]
    pub fn waited(&self) -> Duration {
        let waited = self.waited;
        waited.map_or(Duration::ZERO, |waited| waited.time + waited.then.elapsed())
    }
}

/// The scheduler's clocks of the processors, each looked at once: for one dump.
#[derive(Debug, Default)]
pub struct Clocks(HashMap<u32, Option<(u64, Instant)>>);

impl Clocks {
    fn now_ns(&mut self, cpu: u32) -> Option<u64> {
        let look = || Some((sys::own::scheduler_clock_ns(cpu).ok()?, Instant::now()));
        let (ns, then) = (*self.0.entry(cpu).or_insert_with(look))?;
        ns.checked_add(u64::try_from(then.elapsed().as_nanos()).ok()?)
    }
}

/// How long a sleeping thread has slept, by the clock of the processor that it ran on.
fn waited(clocks: &mut Clocks, read: &mut impl FnMut(&str) -> Option<Vec<u8>>) -> Option<Waited> {
    let sched = read("sched")?;
    let begun = waits_begun(&sched)?;
    let ran_ns = exec_start_ns(&sched).filter(|ns| *ns != 0)?;
    let cpu = Stat::parse(&read("stat")?).ok()?.processor;
    let time = Duration::from_nanos(clocks.now_ns(cpu)?.saturating_sub(ran_ns));
    let then = Instant::now();
    Some(Waited { time, then, begun })
}

/// Whether the time that a call has lasted decides about how it goes on.
fn time_is_needed(kind: Kind, args: &[u64; 6]) -> bool {
    match kind {
        Kind::Poll => timeout_ms(args[2]).is_some(),
        Kind::EpollWait | Kind::EpollPwait => timeout_ms(args[3]).is_some(),
        Kind::EpollPwait2 => args[3] != 0,
        Kind::Futex => args[1] & FUTEX_COMMAND == FUTEX_WAIT && args[3] != 0,
        // With a place to put it, the kernel says itself how much time remains.
        Kind::Nanosleep => args[1] == 0,
        Kind::ClockNanosleep => args[1] & TIMER_ABSTIME == 0 && args[3] == 0,
        Kind::Restart => true,
        Kind::Close => false,
    }
}

/// A stopped thread, as far as it matters here.
pub struct Stopped<'a> {
    /// Its registers.
    pub registers: &'a Registers,
    /// What it did before.
    pub before: &'a Before,
    /// How long it had waited.
    pub waited: Duration,
    /// Reads 16 bytes of its memory.
    pub memory: &'a dyn Fn(u64) -> Option<[u8; 16]>,
    /// It was in a job-control stop, or a handler is about to run ([`handler_waits`]): the program
    /// expects that its call is interrupted.
    pub expects_interruption: bool,
    /// It goes on in place, and has made no other call that waits: the kernel still knows the
    /// time that remains.
    pub stays: bool,
}

impl Stopped<'_> {
    /// The call that it is in, if it is one of those that matter.
    fn call(&self) -> Option<Call> {
        call(self.registers)
    }
}

fn call(registers: &Registers) -> Option<Call> {
    Call::of(registers.is_32_bit(), registers.call()?)
}

/// How a thread goes on with the call that it was in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// With the registers that it has.
    AsIs,
    /// It makes this call (again).
    Again {
        /// The call's number.
        number: u64,
        /// Its arguments.
        args: [u64; 6],
    },
    /// After the tracer has made this call in it.
    Remake(Remake),
}

/// A call to be made by a restored thread before it gets its registers, and interrupted at once,
/// so that the kernel knows again how much time remains.
///
/// When it returns `ERESTART_RESTARTBLOCK`, the thread's own registers make the kernel go on with
/// it. Any other result is the result of the thread's call ([`Remake::finish`]).
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Remake {
    /// The call's number.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Its six arguments.
    #[prost(uint64, repeated, tag = "2")]
    pub args: Vec<u64>,
    /// Which argument has to point at a `timespec`, from 0.
    #[prost(uint32, tag = "3")]
    pub time_arg: u32,
    /// What the `timespec` says, in nanoseconds.
    #[prost(uint64, tag = "4")]
    pub time_ns: u64,
    /// Whether it is a call of 32-bit code.
    #[prost(bool, tag = "5")]
    pub is_32_bit: bool,
}

impl Remake {
    /// The bytes of the `timespec`.
    #[must_use]
    pub fn timespec(&self) -> [u8; 16] {
        let call = Call::of(self.is_32_bit, self.number);
        let times = call.map_or(Times::Long, |call| call.times);
        write_time(Duration::from_nanos(self.time_ns), times)
    }

    /// The arguments, with the `timespec` at `time_at`; `None` for a record that makes no sense.
    #[must_use]
    pub fn args(&self, time_at: u64) -> Option<[u64; 6]> {
        const KNOWN: [Kind; 3] = [Kind::Nanosleep, Kind::ClockNanosleep, Kind::Futex];
        let call = Call::of(self.is_32_bit, self.number);
        let known = call.is_some_and(|call| KNOWN.contains(&call.kind));
        let mut args: [u64; 6] = self.args.as_slice().try_into().ok().filter(|_| known)?;
        *args.get_mut(self.time_arg as usize)? = time_at;
        Some(args)
    }

    /// Sets the registers of the thread whose call returned `result` when it was made again.
    pub fn finish(result: i64, registers: &mut Registers) {
        if result != ERESTART_RESTARTBLOCK {
            registers.end_call(result);
        }
    }
}

impl Resume {
    /// Has the registers make the call, if they have to.
    pub fn apply(&self, registers: &mut Registers) {
        if let Self::Again { number, args } = self {
            registers.make_call(registers.call_at(), *number, *args);
        }
    }
}

/// Whether a handler runs as soon as the thread goes on with the mask of blocked signals `mask`
/// (that of `PTRACE_GETSIGMASK`, not the one that ppoll(2) and its like install for a while).
#[must_use]
pub fn handler_waits(status: &Status, mask: u64) -> bool {
    (status.pending | status.shared_pending) & status.caught & !mask != 0
}

/// Whether the stop has ended a call that the kernel does not make again.
#[must_use]
pub fn has_ended(registers: &Registers) -> bool {
    registers.call().is_some() && registers.result() == EINTR
}

/// Whether the kernel was going on with a call of which nothing tells what it was: the thread had
/// been stopped before, and was not back in its wait when it was looked at. Let go on, it soon is.
/// `memory` reads 16 bytes of its memory.
#[must_use]
pub fn is_unknown(
    registers: &Registers,
    before: &Before,
    memory: impl FnOnce(u64) -> Option<[u8; 16]>,
) -> bool {
    const GOES_ON: [Kind; 5] = [
        Kind::Poll,
        Kind::Nanosleep,
        Kind::Futex,
        Kind::Restart,
        Kind::ClockNanosleep,
    ];
    let (restart, instruction) = match registers.is_32_bit() {
        false => (Sysno::restart_syscall as i64, SYSCALL),
        true => (0, INT_80),
    };
    let is_about_to_go_on = || {
        let code = memory(registers.at().0);
        registers.result() == restart && code.is_some_and(|code| code.starts_with(&instruction))
    };
    match call(registers) {
        // An interrupt held it up behind the way to user mode.
        None => registers.call().is_none() && is_about_to_go_on(),
        Some(call) if !GOES_ON.contains(&call.kind) => false,
        Some(call) if registers.result() == ERESTART_RESTARTBLOCK => {
            let is_known = || original(&before.function, &registers.args()).is_some();
            call.kind == Kind::Restart && !is_known()
        }
        // A fault on the way to user mode held it up.
        Some(_) => is_about_to_go_on(),
    }
}

/// Whether a thread waits in a call; `read` gives files of its /proc/PID/task/TID. One that has
/// ended is not waited for either.
pub fn is_waiting(read: impl FnOnce(&str) -> Option<Vec<u8>>) -> bool {
    let syscall = read("syscall").and_then(|text| Syscall::parse(&text).ok());
    !matches!(syscall, Some(Syscall::Running))
}

/// Whether a thread may be in a call that moves data, with this text of its /proc/PID/syscall: it
/// is neither out of all calls nor in one that waits for an event. Of 32-bit code it is not known.
#[must_use]
pub fn may_move_data(syscall: &[u8]) -> bool {
    match Syscall::parse(syscall) {
        Ok(Syscall::In { stack, .. }) if may_be_32_bit(stack) => true,
        Ok(Syscall::In { number, .. }) => {
            !WAIT_FOR_EVENTS.iter().any(|wait| *wait as u64 == number)
        }
        Ok(Syscall::Elsewhere) => false,
        Ok(Syscall::Running) | Err(_) => true,
    }
}

/// Decides how a stopped thread goes on.
#[must_use]
pub fn resume(stopped: &Stopped<'_>) -> Resume {
    let registers = stopped.registers;
    let in_call = registers.call().is_some();
    match registers.result() {
        EINTR if in_call && !stopped.expects_interruption => again(stopped),
        ERESTART_RESTARTBLOCK if in_call && !stopped.stays => go_on(stopped),
        _ => Resume::AsIs,
    }
}

/// Makes a call again that the kernel would not.
fn again(stopped: &Stopped<'_>) -> Resume {
    let mut args = stopped.registers.args();
    let Some(mut number) = stopped.registers.call() else {
        return Resume::AsIs;
    };
    let call = stopped.call();
    match call.map(|call| call.kind) {
        // The descriptor is closed whatever the result; and what was restarted once is unknown.
        Some(Kind::Close | Kind::Restart) => return Resume::AsIs,
        Some(Kind::EpollWait | Kind::EpollPwait) => {
            if let Some(timeout) = timeout_ms(args[3]) {
                args[3] = in_ms(timeout.saturating_sub(stopped.waited));
            }
        }
        // The same call with the time in a register, rounded up to milliseconds.
        Some(Kind::EpollPwait2) => {
            let time = timespec_at(stopped, args[3], Times::Long);
            if let Some((call, (timeout, _))) = call.zip(time) {
                number = call.instead(Kind::EpollPwait).number();
                args[3] = in_ms(timeout.saturating_sub(stopped.waited));
            }
        }
        _ => {}
    }
    Resume::Again { number, args }
}

/// Goes on with a call of which the kernel keeps the time that remains, without the kernel.
fn go_on(stopped: &Stopped<'_>) -> Resume {
    let mut args = stopped.registers.args();
    let call = match stopped.call() {
        None => return Resume::AsIs,
        Some(call) if call.kind == Kind::Restart => {
            match original(&stopped.before.function, &args) {
                Some(wait) => call.gone_on_with(wait),
                None => return Resume::AsIs,
            }
        }
        Some(call) => call,
    };
    let resume = match call.kind {
        Kind::Poll => {
            if let Some(timeout) = timeout_ms(args[2]) {
                args[2] = in_ms(timeout.saturating_sub(stopped.waited));
            }
            Some(made_again(call, args))
        }
        Kind::Nanosleep | Kind::ClockNanosleep => {
            let request = if call.kind == Kind::Nanosleep { 0 } else { 2 };
            let rest = args[request + 1];
            match timespec_at(stopped, rest, call.times) {
                Some((_, times)) => {
                    args[request] = rest;
                    Some(made_again(Call { times, ..call }, args))
                }
                None => remake(stopped, call, request, args),
            }
        }
        Kind::Futex if args[1] & FUTEX_COMMAND == FUTEX_WAIT => remake(stopped, call, 3, args),
        // The time is an absolute one.
        Kind::Futex => {
            let time = timespec_at(stopped, args[3], call.times);
            let times = time.map_or(call.times, |time| time.1);
            Some(made_again(Call { times, ..call }, args))
        }
        _ => None,
    };
    resume.unwrap_or(Resume::AsIs)
}

fn made_again(call: Call, args: [u64; 6]) -> Resume {
    Resume::Again {
        number: call.number(),
        args,
    }
}

/// Has the tracer make a call again with the time that remains of what an argument points at.
fn remake(stopped: &Stopped<'_>, call: Call, time_arg: usize, args: [u64; 6]) -> Option<Resume> {
    let (time, times) = timespec_at(stopped, args[time_arg], call.times)?;
    let left_ns = time.saturating_sub(stopped.waited).as_nanos();
    Some(Resume::Remake(Remake {
        number: Call { times, ..call }.number(),
        args: args.to_vec(),
        time_arg: u32::try_from(time_arg).expect("one of six"),
        time_ns: u64::try_from(left_ns).unwrap_or(u64::MAX),
        is_32_bit: stopped.registers.is_32_bit(),
    }))
}

/// The call that `restart_syscall` went on with, by the kernel's function that waits. A sleep's own
/// function counts as the scheduler's and is not named: that of the system call is. `None` for a
/// thread that was seen elsewhere, as on its way there or in a wait for a lock.
fn original(function: &str, args: &[u64; 6]) -> Option<Kind> {
    const LOWEST_POINTER: u64 = 4096;
    const ON_THE_WAY: &str = "to_user_mode";
    const SLEEPS: [&str; 4] = ["nanosleep", "nsleep", "syscall", "svc"];
    if function.contains("futex") {
        Some(Kind::Futex)
    } else if function.contains("poll") {
        Some(Kind::Poll)
    } else if function.contains(ON_THE_WAY) || !SLEEPS.iter().any(|name| function.contains(name)) {
        None
    } else if (LOWEST_POINTER..1 << 63).contains(&args[0]) {
        Some(Kind::Nanosleep)
    } else {
        Some(Kind::ClockNanosleep)
    }
}

/// A time limit in a register, in milliseconds: negative for none.
fn timeout_ms(register: u64) -> Option<Duration> {
    let ms = register as u32;
    (ms.cast_signed() >= 0).then(|| Duration::from_millis(ms.into()))
}

/// A time limit for a register: in milliseconds, rounded up.
fn in_ms(time: Duration) -> u64 {
    let ms = time.as_nanos().div_ceil(1_000_000);
    u64::try_from(ms.min(i32::MAX.unsigned_abs().into())).expect("31 bits")
}

fn timespec_at(stopped: &Stopped<'_>, at: u64, times: Times) -> Option<(Duration, Times)> {
    let bytes = (stopped.memory)(at).filter(|_| at != 0)?;
    read_time(&bytes, times)
}

#[cfg(test)]
mod tests {
    use abi::Addr;
    use sys::ptrace;

    use super::*;
    use crate::task::Facts;
    use crate::testing::Stage;

    /// Numbers of system calls.
    mod nr {
        use syscalls::Sysno;

        pub const CLOSE: u64 = Sysno::close as u64;
        pub const POLL: u64 = Sysno::poll as u64;
        pub const NANOSLEEP: u64 = Sysno::nanosleep as u64;
        pub const FUTEX: u64 = Sysno::futex as u64;
        pub const RESTART_SYSCALL: u64 = Sysno::restart_syscall as u64;
        pub const CLOCK_NANOSLEEP: u64 = Sysno::clock_nanosleep as u64;
        pub const EPOLL_WAIT: u64 = Sysno::epoll_wait as u64;
        pub const EPOLL_PWAIT: u64 = Sysno::epoll_pwait as u64;
    }

    /// How long calls wait in these tests, and after what time they are interrupted.
    const LIMIT: Duration = Duration::from_millis(900);
    const UNTIL_STOP: Duration = Duration::from_millis(100);
    /// How much later than they should calls may return on a busy machine.
    const LATE: Duration = Duration::from_secs(10);
    /// Where the test's structures are in its part of the process's memory.
    const TIME: u64 = 0x1000;
    const REST: u64 = 0x1100;
    const WORD: u64 = 0x1200;

    /// A process that waits in a call.
    struct Waiting {
        stage: Stage,
        began: Instant,
    }

    impl Waiting {
        fn new(mut stage: Stage, call: Sysno, args: &[u64]) -> Self {
            let began = Instant::now();
            stage.begin(call, args);
            let waits = Self { stage, began };
            waits.wait_until_in(call as u64);
            std::thread::sleep(UNTIL_STOP);
            waits
        }

        /// Waits until the process sleeps in the call `wanted`.
        fn wait_until_in(&self, wanted: u64) {
            self.stage.wait_for("syscall", |text| {
                let syscall = Syscall::parse(text);
                matches!(syscall, Ok(Syscall::In { number, .. }) if number == wanted)
            });
        }

        fn read(&self, name: &str) -> Option<Vec<u8>> {
            Some(self.stage.proc(name).ok()?.to_vec())
        }

        /// Stops the process and decides how it goes on.
        fn stop(&self, stays: bool) -> (Registers, Resume) {
            self.stop_after(self.look(), stays)
        }

        fn look(&self) -> Before {
            Before::read(&mut Clocks::default(), |name| self.read(name))
        }

        fn stop_after(&self, mut before: Before, stays: bool) -> (Registers, Resume) {
            let pid = self.stage.pid();
            ptrace::seize(pid, true).expect("seize");
            ptrace::interrupt(pid).expect("interrupt");
            ptrace::wait(pid).expect("wait");
            before.see_stopped(|name| self.read(name));
            let waited = before.waited();
            let registers = ptrace::registers(pid).expect("registers");
            let memory = |at: u64| {
                let mut bytes = [0; 16];
                sys::vm::read_exact(&sys::process::Process::new(pid), Addr(at), &mut bytes)
                    .ok()
                    .map(|()| bytes)
            };
            let resume = resume(&Stopped {
                registers: &registers,
                before: &before,
                waited,
                memory: &memory,
                expects_interruption: false,
                stays,
            });
            (registers, resume)
        }

        /// Has it go on as a left-running or a restored thread does.
        fn go_on(&mut self, mut registers: Registers, resume: &Resume) {
            let pid = self.stage.pid();
            resume.apply(&mut registers);
            if let Resume::Remake(call) = resume {
                self.stage.put(TIME, &call.timespec());
                let args = call.args(self.stage.data() + TIME).expect("sound");
                let call = tracee::Call {
                    at: registers.call_at(),
                    number: call.number,
                    args,
                };
                let result = call.make_interrupted(pid).expect("it is made");
                Remake::finish(result, &mut registers);
            }
            ptrace::set_registers(pid, &registers).expect("set registers");
            ptrace::detach(pid, 0).expect("detach");
        }

        /// Makes the kernel forget what it knows of the interrupted call.
        fn forget(&self, registers: &Registers) {
            let call = tracee::Call {
                at: registers.call_at(),
                number: nr::POLL,
                args: [0, 0, 3_600_000, 0, 0, 0],
            };
            let result = call.make_interrupted(self.stage.pid());
            assert_eq!(result.expect("it is made"), ERESTART_RESTARTBLOCK);
        }

        /// Waits for the call's end and checks when it comes.
        fn ends(mut self, result: i64, after: Duration) -> Stage {
            assert_eq!(self.stage.finish(), result);
            let took = self.began.elapsed();
            let early = after.saturating_sub(Duration::from_millis(20));
            assert!(
                took > early && took < after + LATE,
                "{took:?} instead of {after:?}"
            );
            self.stage
        }
    }

    fn left_running(stage: Stage, call: Sysno, args: &[u64], result: i64) -> (Resume, Stage) {
        let mut waiting = Waiting::new(stage, call, args);
        let (registers, resume) = waiting.stop(true);
        waiting.go_on(registers, &resume);
        (resume, waiting.ends(result, LIMIT))
    }

    fn restored(stage: Stage, call: Sysno, args: &[u64], result: i64) -> (Resume, Stage) {
        let mut waiting = Waiting::new(stage, call, args);
        let (registers, resume) = waiting.stop(false);
        waiting.forget(&registers);
        waiting.go_on(registers, &resume);
        (resume, waiting.ends(result, LIMIT))
    }

    /// The same after the kernel has gone on with the call once: nobody knows its number any more.
    fn restored_later(stage: Stage, call: Sysno, args: &[u64], result: i64) -> (Resume, Stage) {
        let mut waiting = Waiting::new(stage, call, args);
        let (registers, resume) = waiting.stop(true);
        assert_eq!(resume, Resume::AsIs);
        waiting.go_on(registers, &resume);
        waiting.wait_until_in(nr::RESTART_SYSCALL);
        let (registers, resume) = waiting.stop(false);
        waiting.forget(&registers);
        waiting.go_on(registers, &resume);
        // Time before the first interruption may count twice.
        assert_eq!(waiting.stage.finish(), result);
        let took = waiting.began.elapsed();
        let early = LIMIT - Duration::from_millis(20);
        assert!(took > early && took < LIMIT + LATE, "{took:?}");
        (resume, waiting.stage)
    }

    fn stage() -> (Stage, u64) {
        let mut stage = Stage::new();
        let limit = [
            0u64.to_le_bytes(),
            (LIMIT.subsec_nanos() as u64).to_le_bytes(),
        ]
        .concat();
        stage.put(TIME + 64, &limit);
        let data = stage.data();
        (stage, data)
    }

    fn limit_at(data: u64) -> u64 {
        data + TIME + 64
    }

    const LIMIT_MS: u64 = 900;
    const ETIMEDOUT: i64 = -(libc::ETIMEDOUT as i64);
    const EAGAIN: i64 = -(libc::EAGAIN as i64);

    #[test]
    fn sleeps_go_on_with_the_time_that_the_kernel_noted() {
        let (stage, data) = stage();
        let args = [limit_at(data), data + REST];
        let (resume, stage) = left_running(stage, Sysno::nanosleep, &args, 0);
        assert_eq!(resume, Resume::AsIs);
        let (resume, stage) = restored(stage, Sysno::nanosleep, &args, 0);
        let again = [data + REST, data + REST];
        assert!(matches!(resume, Resume::Again { number: 35, args } if args[..2] == again));
        let args = [1, 0, limit_at(data), data + REST];
        let (resume, _) = restored(stage, Sysno::clock_nanosleep, &args, 0);
        let again = [1, 0, data + REST, data + REST];
        assert!(matches!(resume, Resume::Again { number: 230, args } if args[..4] == again));
    }

    #[test]
    fn sleeps_that_want_no_rest_are_remade() {
        let (stage, data) = stage();
        let args = [limit_at(data), 0];
        let (resume, stage) = restored(stage, Sysno::nanosleep, &args, 0);
        assert!(
            matches!(resume, Resume::Remake(Remake { number: 35, .. })),
            "{resume:?}"
        );
        let args = [1, 0, limit_at(data), 0];
        let (resume, _) = restored(stage, Sysno::clock_nanosleep, &args, 0);
        assert!(
            matches!(resume, Resume::Remake(Remake { number: 230, .. })),
            "{resume:?}"
        );
    }

    #[test]
    fn absolute_sleeps_are_the_kernels_business() {
        let (mut stage, data) = stage();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let until = Duration::new(now.tv_sec as u64, now.tv_nsec as u32) + LIMIT;
        let nanos = u64::from(until.subsec_nanos());
        stage.put(
            TIME + 64,
            &[until.as_secs().to_le_bytes(), nanos.to_le_bytes()].concat(),
        );
        let args = [1, TIMER_ABSTIME, limit_at(data), 0];
        let (resume, _) = restored(stage, Sysno::clock_nanosleep, &args, 0);
        assert_eq!(resume, Resume::AsIs);
    }

    #[test]
    fn poll_goes_on() {
        let args = [0, 0, LIMIT_MS];
        let (resume, stage) = left_running(stage().0, Sysno::poll, &args, 0);
        assert_eq!(resume, Resume::AsIs);
        let (resume, _) = restored(stage, Sysno::poll, &args, 0);
        let Resume::Again {
            number: nr::POLL,
            args,
        } = resume
        else {
            panic!("{resume:?}");
        };
        assert!(args[2] < LIMIT_MS - 50, "{args:?}");
    }

    #[test]
    fn ppoll_and_select_have_their_time_updated_by_the_kernel() {
        let (stage, data) = stage();
        let args = [0, 0, limit_at(data), 0, 8];
        let (resume, mut stage) = restored(stage, Sysno::ppoll, &args, 0);
        assert_eq!(resume, Resume::AsIs);
        let micros = u64::from(LIMIT.subsec_micros());
        stage.put(
            TIME + 64,
            &[0u64.to_le_bytes(), micros.to_le_bytes()].concat(),
        );
        let args = [0, 0, 0, 0, limit_at(data)];
        let (resume, _) = restored(stage, Sysno::select, &args, 0);
        assert_eq!(resume, Resume::AsIs);
    }

    #[test]
    fn futex_waits_go_on() {
        let (stage, data) = stage();
        let private = 128;
        let args = [data + WORD, private, 0, limit_at(data)];
        let (resume, stage) = left_running(stage, Sysno::futex, &args, ETIMEDOUT);
        assert_eq!(resume, Resume::AsIs);
        let (resume, _) = restored(stage, Sysno::futex, &args, ETIMEDOUT);
        let Resume::Remake(Remake {
            number: nr::FUTEX,
            time_arg: 3,
            time_ns,
            ..
        }) = resume
        else {
            panic!("{resume:?}");
        };
        let most = LIMIT - Duration::from_millis(50);
        assert!(u128::from(time_ns) < most.as_nanos(), "{time_ns}");
    }

    #[test]
    fn a_futex_that_changed_meanwhile_ends_the_wait() {
        let (stage, data) = stage();
        let args = [data + WORD, 0, 0, limit_at(data)];
        let mut waiting = Waiting::new(stage, Sysno::futex, &args);
        let (registers, resume) = waiting.stop(false);
        waiting.stage.put(WORD, &[1]);
        waiting.go_on(registers, &resume);
        assert_eq!(waiting.stage.finish(), EAGAIN);
    }

    #[test]
    fn absolute_futex_waits_are_made_again() {
        let (mut stage, data) = stage();
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        let until = Duration::new(now.tv_sec as u64, now.tv_nsec as u32) + LIMIT;
        let nanos = u64::from(until.subsec_nanos());
        stage.put(
            TIME + 64,
            &[until.as_secs().to_le_bytes(), nanos.to_le_bytes()].concat(),
        );
        let args = [data + WORD, 9, 0, limit_at(data), 0, u32::MAX.into()];
        let (resume, _) = restored(stage, Sysno::futex, &args, ETIMEDOUT);
        assert_eq!(
            resume,
            Resume::Again {
                number: nr::FUTEX,
                args
            }
        );
    }

    #[test]
    fn calls_that_the_kernel_went_on_with_before_are_recognised() {
        let (stage, data) = stage();
        let (resume, stage) = restored_later(stage, Sysno::poll, &[0, 0, LIMIT_MS], 0);
        assert!(
            matches!(
                resume,
                Resume::Again {
                    number: nr::POLL,
                    ..
                }
            ),
            "{resume:?}"
        );
        let args = [limit_at(data), data + REST];
        let (resume, stage) = restored_later(stage, Sysno::nanosleep, &args, 0);
        assert!(
            matches!(
                resume,
                Resume::Again {
                    number: nr::NANOSLEEP,
                    ..
                }
            ),
            "{resume:?}"
        );
        let args = [1, 0, limit_at(data), 0];
        let (resume, stage) = restored_later(stage, Sysno::clock_nanosleep, &args, 0);
        let number = nr::CLOCK_NANOSLEEP;
        assert!(
            matches!(resume, Resume::Remake(ref call) if call.number == number),
            "{resume:?}"
        );
        let args = [data + WORD, 0, 0, limit_at(data)];
        let (resume, _) = restored_later(stage, Sysno::futex, &args, ETIMEDOUT);
        assert!(matches!(resume, Resume::Remake(ref call) if call.number == nr::FUTEX));
    }

    #[test]
    fn threads_on_their_way_back_into_a_wait_are_not_taken_to_be_in_it() {
        let registers = |orig_rax: u64, rax: i64| Registers {
            orig_rax,
            rax: rax.cast_unsigned(),
            rdi: 0x7000_0000,
            ..Registers::default()
        };
        let before = |function: &str| Before {
            function: function.to_owned(),
            ..Before::default()
        };
        let code = |first: [u8; 2]| {
            let mut bytes = [0; 16];
            bytes[..2].copy_from_slice(&first);
            move |_: u64| Some(bytes)
        };
        let unknown = |orig_rax, rax, function, first| {
            is_unknown(&registers(orig_rax, rax), &before(function), code(first))
        };
        let (again, went_on) = (nr::RESTART_SYSCALL, nr::RESTART_SYSCALL.cast_signed());
        let syscall = [0x0f, 0x05];
        let elsewhere = [
            "",
            "0",
            "handle_userfault",
            "ptrace_stop",
            "rwsem_down_read_slowpath",
            "folio_wait_bit_common",
            "syscall_exit_to_user_mode",
        ];
        for function in elsewhere {
            assert!(
                unknown(again, ERESTART_RESTARTBLOCK, function, [0, 0]),
                "{function}"
            );
        }
        for function in [
            "futex_do_wait",
            "do_sys_poll",
            "hrtimer_nanosleep",
            "do_syscall_64",
        ] {
            assert!(
                !unknown(again, ERESTART_RESTARTBLOCK, function, [0, 0]),
                "{function}"
            );
        }
        // Held up before it makes the call.
        for number in [again, nr::FUTEX, nr::POLL] {
            assert!(unknown(number, went_on, "handle_userfault", syscall));
            assert!(!unknown(number, went_on, "", [0x48, 0x3d]), "a result");
        }
        // Out of all calls, at the instruction with which it goes on.
        assert!(unknown(u64::MAX, went_on, "", syscall));
        assert!(!unknown(u64::MAX, went_on, "", [0x48, 0x3d]));
        assert!(!unknown(u64::MAX, 7, "", syscall));
        assert!(!unknown(0, went_on, "", syscall), "so many bytes were read");
        assert!(!unknown(nr::FUTEX, ERESTART_RESTARTBLOCK, "", syscall));
    }

    #[test]
    fn epoll_waits_go_on() {
        let (mut stage, data) = stage();
        let epoll = stage.call(Sysno::epoll_create1, &[0]).cast_unsigned();
        let events = data + REST;
        for stays in [true, false] {
            let args = [epoll, events, 1, LIMIT_MS];
            let run = if stays { left_running } else { restored };
            let (resume, after) = run(stage, Sysno::epoll_wait, &args, 0);
            stage = after;
            let Resume::Again {
                number: nr::EPOLL_WAIT,
                args,
            } = resume
            else {
                panic!("{resume:?}");
            };
            assert!(args[3] < LIMIT_MS - 50, "{args:?}");
        }
        let args = [epoll, events, 1, limit_at(data), 0, 8];
        let (resume, _) = restored(stage, Sysno::epoll_pwait2, &args, 0);
        assert!(
            matches!(
                resume,
                Resume::Again {
                    number: nr::EPOLL_PWAIT,
                    ..
                }
            ),
            "{resume:?}"
        );
    }

    #[test]
    fn a_wait_that_began_since_it_was_looked_at_is_not_taken_for_the_one_before() {
        let (mut stage, data) = stage();
        let epoll = stage.call(Sysno::epoll_create1, &[0]).cast_unsigned();
        let args = [epoll, data + REST, 1, LIMIT_MS];
        let mut waiting = Waiting::new(stage, Sysno::epoll_wait, &args);
        let before = waiting.look();
        assert!(before.waited() >= UNTIL_STOP / 2, "{before:?}");
        assert_eq!(waiting.stage.finish(), 0);
        let mut waiting = Waiting::new(waiting.stage, Sysno::epoll_wait, &args);
        let (registers, resume) = waiting.stop_after(before, true);
        assert!(
            matches!(resume, Resume::Again { args, .. } if args[3] == LIMIT_MS),
            "{resume:?}"
        );
        waiting.go_on(registers, &resume);
        waiting.ends(0, LIMIT);
    }

    #[test]
    fn an_endless_epoll_wait_is_made_again() {
        let (mut stage, data) = stage();
        let epoll = stage.call(Sysno::epoll_create1, &[0]).cast_unsigned();
        let event = stage.call(Sysno::eventfd2, &[0, 0]).cast_unsigned();
        stage.put(WORD, &[1, 0, 0, 0]);
        stage.call(Sysno::epoll_ctl, &[epoll, 1, event, data + WORD]);
        let args = [epoll, data + REST, 1, u64::MAX, 0, 8];
        let mut waiting = Waiting::new(stage, Sysno::epoll_pwait, &args);
        let (registers, resume) = waiting.stop(true);
        assert_eq!(
            resume,
            Resume::Again {
                number: nr::EPOLL_PWAIT,
                args
            }
        );
        waiting.go_on(registers, &resume);
        waiting.wait_until_in(nr::EPOLL_PWAIT);
        waiting.stage.add_to_eventfd(event);
        assert_eq!(waiting.stage.finish(), 1);
    }

    #[test]
    fn calls_that_point_at_their_time_wait_all_of_it_again() {
        let (mut stage, data) = stage();
        stage.put(WORD, &[0, 0, 0, 0, 0, 0, 0, 2]);
        let args = [data + WORD, 0, limit_at(data), 8];
        let longer = UNTIL_STOP + LIMIT;
        let mut waiting = Waiting::new(stage, Sysno::rt_sigtimedwait, &args);
        let (registers, resume) = waiting.stop(true);
        assert!(
            matches!(resume, Resume::Again { number: 128, .. }),
            "{resume:?}"
        );
        waiting.go_on(registers, &resume);
        let mut stage = waiting.ends(EAGAIN, longer);

        let set = stage.call(Sysno::semget, &[0, 1, 0o600]).cast_unsigned();
        stage.put(WORD, &[0, 0, 0xff, 0xff, 0, 0]);
        let args = [set, data + WORD, 1, limit_at(data)];
        let mut waiting = Waiting::new(stage, Sysno::semtimedop, &args);
        let (registers, resume) = waiting.stop(true);
        waiting.go_on(registers, &resume);
        assert!(
            matches!(resume, Resume::Again { number: 220, .. }),
            "{resume:?}"
        );
        let mut stage = waiting.ends(EAGAIN, longer);
        stage.call(Sysno::semctl, &[set, 0, 0]);
    }

    #[test]
    fn reads_from_sockets_with_a_time_limit_are_made_again() {
        let (mut stage, data) = stage();
        stage.call(Sysno::socketpair, &[1, 1, 0, data + WORD]);
        let micros = u64::from(LIMIT.subsec_micros());
        stage.put(TIME, &[0u64.to_le_bytes(), micros.to_le_bytes()].concat());
        let socket = stage.word(usize::try_from(WORD).expect("small")) & 0xffff_ffff;
        stage.call(Sysno::setsockopt, &[socket, 1, 20, data + TIME, 16]);
        let args = [socket, data + REST, 1, 0, 0, 0];
        let mut waiting = Waiting::new(stage, Sysno::recvfrom, &args);
        let (registers, resume) = waiting.stop(true);
        assert_eq!(resume, Resume::Again { number: 45, args });
        waiting.go_on(registers, &resume);
        waiting.ends(EAGAIN, UNTIL_STOP + LIMIT);
    }

    fn decide(registers: &Registers, expects_interruption: bool) -> Resume {
        resume(&Stopped {
            registers,
            before: &Before::default(),
            waited: Duration::from_micros(1500),
            memory: &|_| None,
            expects_interruption,
            stays: false,
        })
    }

    #[test]
    fn results_that_need_nothing_are_left_alone() {
        let call = |number: u64, result: i64| Registers {
            orig_rax: number,
            rax: result.cast_unsigned(),
            ..Registers::default()
        };
        // Not in a call; a result; restarted by the kernel.
        for (number, result) in [(u64::MAX, -4), (0, 17), (0, -512), (0, -513), (0, -514)] {
            assert_eq!(decide(&call(number, result), false), Resume::AsIs);
        }
        assert_eq!(decide(&call(nr::EPOLL_WAIT, -4), true), Resume::AsIs);
        assert_eq!(decide(&call(nr::CLOSE, -4), false), Resume::AsIs);
        assert_eq!(decide(&call(nr::RESTART_SYSCALL, -4), false), Resume::AsIs);
    }

    #[test]
    fn the_remaining_time_is_rounded_up_and_never_negative() {
        let wait = |timeout: u64| Registers {
            orig_rax: nr::EPOLL_WAIT,
            rax: EINTR.cast_unsigned(),
            r10: timeout,
            rip: 0x40_0002,
            ..Registers::default()
        };
        let left = |timeout| match decide(&wait(timeout), false) {
            Resume::Again { args, .. } => args[3],
            other => panic!("{other:?}"),
        };
        assert_eq!((left(100), left(1), left(0)), (99, 0, 0));
        assert_eq!(left(0xffff_ffff), 0xffff_ffff);
        let mut registers = wait(100);
        decide(&registers.clone(), false).apply(&mut registers);
        assert_eq!((registers.rip, registers.rax), (0x40_0000, nr::EPOLL_WAIT));
        assert_eq!((registers.r10, registers.orig_rax), (99, u64::MAX));
    }

    #[test]
    fn a_handler_runs_for_signals_that_are_caught_and_not_blocked() {
        let status = Status {
            pending: 1,
            shared_pending: 2,
            caught: 6,
            ..Status::default()
        };
        assert!(handler_waits(&status, 0));
        assert!(!handler_waits(&status, 2));
        assert!(!handler_waits(
            &Status {
                caught: 4,
                ..status
            },
            0
        ));
    }

    #[test]
    fn a_call_that_we_would_not_remake_is_refused() {
        let remake = |number, args: &[u64], time_arg| Remake {
            number,
            args: args.to_vec(),
            time_arg,
            time_ns: 1_500_000_000,
            is_32_bit: false,
        };
        let sound = remake(nr::FUTEX, &[1, 2, 3, 4, 5, 6], 3);
        assert_eq!(sound.args(77), Some([1, 2, 3, 77, 5, 6]));
        let words = [1u64.to_le_bytes(), 500_000_000u64.to_le_bytes()].concat();
        assert_eq!(sound.timespec().to_vec(), words);
        assert_eq!(remake(59, &[0; 6], 0).args(77), None);
        assert_eq!(remake(nr::FUTEX, &[0; 5], 0).args(77), None);
        assert_eq!(remake(nr::FUTEX, &[0; 6], 6).args(77), None);
        let old = Remake {
            number: 240,
            is_32_bit: true,
            ..sound
        };
        assert_eq!(old.args(77), Some([1, 2, 3, 77, 5, 6]));
        let words = [1u32.to_le_bytes(), 500_000_000u32.to_le_bytes()].concat();
        assert_eq!(old.timespec()[..8].to_vec(), words);
    }
}
