//! Tracing a thread: ptrace(2) and the waits that belong to it.
//!
//! Every function here acts on a thread that this process traces and that is stopped, unless it
//! says otherwise. A thread that died answers `ESRCH`.

use std::ffi::c_long;
use std::io;

use libc::{c_uint, c_void, iovec};

use crate::arch::{NT_XSTATE, Registers};

/// What a wait reported of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// It exited or was killed; the raw wait status.
    Ended(i32),
    /// `PTRACE_EVENT_STOP`: interrupted, or in a group stop by this signal.
    Stop(i32),
    /// At the entry or the exit of a system call.
    Call,
    /// About to get this signal.
    Signal(i32),
    /// Another ptrace event, by number.
    Other(i32),
}

/// The signal of an interruption that is no group stop.
pub const SIGTRAP: i32 = libc::SIGTRAP;
/// The event of a thread that is about to end ([`report_exit`]).
pub const EXITING: i32 = libc::PTRACE_EVENT_EXIT;
/// The signal that stops and cannot be blocked.
pub const SIGSTOP: i32 = libc::SIGSTOP;

/// Requests for the registers of a thread as 64-bit code has them, whatever code it runs.
const GETREGS: c_uint = 12;
const SETREGS: c_uint = 13;
/// Requests for which calls are handed to the thread itself, which libc does not have.
const SET_DISPATCH: c_uint = 0x4210;
const GET_DISPATCH: c_uint = 0x4211;
/// The largest extended state that is accepted, in bytes (AMX has 11 KiB).
const XSTATE_MAX_BYTES: usize = 64 << 10;

/// Makes a request of ptrace(2).
///
/// # Safety
/// 1. `addr` and `data` are numbers, or point to what the request reads and has room for what it
///    writes.
/// 2. The request does not have this process traced by another one (`PTRACE_TRACEME`).
unsafe fn request(op: c_uint, tid: i32, addr: usize, data: usize) -> io::Result<c_long> {
    // SAFETY: as the caller says; another process's memory and registers are none of ours.
    let result = unsafe { libc::ptrace(op, tid, addr as *mut c_void, data as *mut c_void) };
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

/// Requests that have a number for data and none for an address.
#[derive(Clone, Copy)]
enum Control {
    Seize = libc::PTRACE_SEIZE as isize,
    SetOptions = libc::PTRACE_SETOPTIONS as isize,
    Interrupt = libc::PTRACE_INTERRUPT as isize,
    Continue = libc::PTRACE_CONT as isize,
    Step = libc::PTRACE_SINGLESTEP as isize,
    ToCall = libc::PTRACE_SYSCALL as isize,
    Detach = libc::PTRACE_DETACH as isize,
}

fn control(what: Control, tid: i32, data: i32) -> io::Result<()> {
    // SAFETY: these requests take numbers alone.
    unsafe { request(what as c_uint, tid, 0, data.cast_unsigned() as usize) }.map(drop)
}

/// `PTRACE_O_SUSPEND_SECCOMP`, which libc does not have.
const SUSPEND_SECCOMP: i32 = libc::PTRACE_O_SUSPEND_SECCOMP;

/// What a tracer asks for: system-call stops told from signals, and the thread's end with its own.
fn options(kill_on_exit: bool) -> i32 {
    let kill = match kill_on_exit {
        true => libc::PTRACE_O_EXITKILL,
        false => 0,
    };
    libc::PTRACE_O_TRACESYSGOOD | kill
}

/// Begins to trace a running thread without stopping it (`PTRACE_SEIZE`). System-call stops are
/// told from signals; with `kill_on_exit` the thread is killed when this process ends.
///
/// # Errors
/// `EPERM` (not allowed, or traced already), `ESRCH`.
pub fn seize(tid: i32, kill_on_exit: bool) -> io::Result<()> {
    control(Control::Seize, tid, options(kill_on_exit))
}

/// As [`seize`] with `kill_on_exit`, for a thread that is about to get seccomp filters: as long as
/// it is traced, and until [`set_kill_on_exit`], they forbid it nothing.
///
/// # Errors
/// As [`seize`]; `EPERM` also without `CAP_SYS_ADMIN`, and where the caller has a filter itself.
pub fn seize_unfiltered(tid: i32) -> io::Result<()> {
    control(Control::Seize, tid, options(true) | SUSPEND_SECCOMP)
}

/// Has the thread's seccomp filters forbid it nothing as long as it is traced.
///
/// # Errors
/// `ESRCH`; `EPERM` without `CAP_SYS_ADMIN`, and where the caller has a filter itself.
pub fn suspend_filters(tid: i32) -> io::Result<()> {
    control(Control::SetOptions, tid, options(false) | SUSPEND_SECCOMP)
}

/// Sets whether the kernel kills the thread when this process ends: the first process of a pid
/// namespace as well, which no signal from inside of that kills. Its seccomp filters hold again.
///
/// # Errors
/// `ESRCH`.
pub fn set_kill_on_exit(tid: i32, kill_on_exit: bool) -> io::Result<()> {
    control(Control::SetOptions, tid, options(kill_on_exit))
}

/// Has the thread stop once more on its way out, with [`Event::Other`] of [`EXITING`]: by then it
/// executes nothing any more. It is killed when this process ends. With `unfiltered`, its seccomp
/// filters forbid it nothing as long as it is traced.
///
/// # Errors
/// `ESRCH`; `EPERM` as for [`suspend_filters`].
pub fn report_exit(tid: i32, unfiltered: bool) -> io::Result<()> {
    let suspended = if unfiltered { SUSPEND_SECCOMP } else { 0 };
    let all = options(true) | libc::PTRACE_O_TRACEEXIT | suspended;
    control(Control::SetOptions, tid, all)
}

/// Asks a seized thread, running or not, to stop (`PTRACE_INTERRUPT`).
///
/// Any other stop takes the place of the one that was asked for, that for a signal as well: the
/// kernel forgets the request when a thread stops (`ptrace_stop` in kernel/signal.c). For a tracer
/// that hears of another stop there is [`resume_to_stop`].
///
/// # Errors
/// `ESRCH`.
pub fn interrupt(tid: i32) -> io::Result<()> {
    control(Control::Interrupt, tid, 0)
}

/// Lets a thread run that came to another stop than the one that was asked for, giving it `signal`
/// if not 0, and asks for that stop once more.
///
/// # Errors
/// `ESRCH`.
pub fn resume_to_stop(tid: i32, signal: i32) -> io::Result<()> {
    interrupt(tid)?;
    resume(tid, signal)
}

/// Lets the thread run, giving it `signal` if not 0.
///
/// # Errors
/// `ESRCH`.
pub fn resume(tid: i32, signal: i32) -> io::Result<()> {
    control(Control::Continue, tid, signal)
}

/// Lets the thread execute one instruction. A thread whose tracer dies meanwhile is killed by a
/// `SIGTRAP`, so this is for threads that may die.
///
/// # Errors
/// `ESRCH`.
pub fn step(tid: i32) -> io::Result<()> {
    control(Control::Step, tid, 0)
}

/// Lets the thread run to the next entry or exit of a system call, giving it `signal` if not 0.
///
/// # Errors
/// `ESRCH`.
pub fn resume_to_call(tid: i32, signal: i32) -> io::Result<()> {
    control(Control::ToCall, tid, signal)
}

/// Which system calls of a thread are not made, but handed to its handler of `SIGSYS`
/// (`PR_SET_SYSCALL_USER_DISPATCH` of prctl(2)), as `struct ptrace_sud_config` has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Dispatch {
    /// `PR_SYS_DISPATCH_OFF` (0), `PR_SYS_DISPATCH_EXCLUSIVE_ON` (1): all but those of some code;
    /// or `PR_SYS_DISPATCH_INCLUSIVE_ON` (2): those of some code.
    pub mode: u64,
    /// The address of the byte that says whether calls are made; 0 for none.
    pub selector: u64,
    /// Where that code begins.
    pub offset: u64,
    /// How long that code is, in bytes.
    pub len: u64,
}

impl Dispatch {
    /// The kernel tells the second mode as the first one, of all other addresses, and does not take
    /// that back.
    fn settable(self) -> Self {
        let end = self.offset.wrapping_add(self.len);
        match self.offset != 0 && end <= self.offset {
            true => Self {
                mode: 2,
                offset: end,
                len: self.len.wrapping_neg(),
                ..self
            },
            false => self,
        }
    }
}

/// Which calls of a stopped thread are handed to itself, if any are (since Linux 6.4).
///
/// # Errors
/// `ESRCH`; `EIO` on an older kernel.
pub fn dispatch(tid: i32) -> io::Result<Option<Dispatch>> {
    let mut config = Dispatch::default();
    let bytes = size_of::<Dispatch>();
    // SAFETY: there is room for all of it.
    unsafe { request(GET_DISPATCH, tid, bytes, (&raw mut config) as usize) }?;
    Ok((config.mode != 0).then(|| config.settable()))
}

/// Sets which calls of a stopped thread are handed to itself.
///
/// # Errors
/// `ESRCH`; `EINVAL` for a mode that the kernel lacks; `EFAULT` for an address of its own.
pub fn set_dispatch(tid: i32, dispatch: &Dispatch) -> io::Result<()> {
    let bytes = size_of::<Dispatch>();
    // SAFETY: it is read, and all of it is there.
    unsafe { request(SET_DISPATCH, tid, bytes, (&raw const *dispatch) as usize) }.map(drop)
}

/// Ends the tracing; the thread goes on, and gets `signal` if not 0.
///
/// # Errors
/// `ESRCH`.
pub fn detach(tid: i32, signal: i32) -> io::Result<()> {
    control(Control::Detach, tid, signal)
}

/// Reads the general registers, also those of a thread that runs 32-bit code.
///
/// # Errors
/// `ESRCH`.
pub fn registers(tid: i32) -> io::Result<Registers> {
    let mut regs = Registers::default();
    // SAFETY: there is room for all registers.
    unsafe { request(GETREGS, tid, 0, (&raw mut regs) as usize) }?;
    regs.extend_result();
    Ok(regs)
}

/// Writes the general registers; the code segment says what code the thread runs then.
///
/// # Errors
/// `ESRCH`; `EIO` for values that no thread may have.
pub fn set_registers(tid: i32, regs: &Registers) -> io::Result<()> {
    // SAFETY: the registers are read, and all are there.
    unsafe { request(SETREGS, tid, 0, (&raw const *regs) as usize) }.map(drop)
}

/// The numbers of a thread's own segments, the entries of the GDT that set_thread_area(2) sets.
pub const THREAD_AREAS: std::ops::RangeInclusive<u32> = 12..=14;

/// Reads a segment of the thread's own, one of [`THREAD_AREAS`], as `struct user_desc` (its number,
/// base, limit and flags), if it is set (`PTRACE_GET_THREAD_AREA`).
///
/// # Errors
/// `ESRCH`; `EIO` where the kernel runs no 32-bit code.
pub fn thread_area(tid: i32, number: u32) -> io::Result<Option<[u32; 4]>> {
    const PTRACE_GET_THREAD_AREA: c_uint = linux_raw_sys::ptrace::PTRACE_GET_THREAD_AREA;
    /// Without base and limit, not to be written and not there: what an entry is that is not set.
    const EMPTY: u32 = 0x28;
    let mut area = [0u32; 4];
    let (op, at) = (PTRACE_GET_THREAD_AREA, area.as_mut_ptr() as usize);
    // SAFETY: there is room for the structure.
    unsafe { request(op, tid, number as usize, at) }?;
    Ok((area[1..] != [0, 0, EMPTY]).then_some(area))
}

/// Reads the extended state (x87, SSE, AVX, …) in the processor's XSAVE layout, unpacked.
///
/// # Errors
/// `ESRCH`.
pub fn xstate(tid: i32) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::<u8>::with_capacity(XSTATE_MAX_BYTES);
    let mut io = iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: XSTATE_MAX_BYTES,
    };
    let (op, set) = (libc::PTRACE_GETREGSET, NT_XSTATE);
    // SAFETY: there is room for as much as is told.
    unsafe { request(op, tid, set, (&raw mut io) as usize) }?;
    // SAFETY: the kernel has written that many bytes, of the room that it was told of.
    unsafe { bytes.set_len(io.iov_len.min(XSTATE_MAX_BYTES)) };
    Ok(bytes)
}

/// Writes the extended state.
///
/// # Errors
/// `ESRCH`; `EFAULT` or `EINVAL` for a layout or features that this processor does not have.
pub fn set_xstate(tid: i32, bytes: &[u8]) -> io::Result<()> {
    let mut io = iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let (op, set) = (libc::PTRACE_SETREGSET, NT_XSTATE);
    // SAFETY: the bytes are read, and there are as many as is told.
    unsafe { request(op, tid, set, (&raw mut io) as usize) }.map(drop)
}

/// Reads the mask of blocked signals: bit 0 is signal 1.
///
/// # Errors
/// `ESRCH`.
pub fn signal_mask(tid: i32) -> io::Result<u64> {
    let mut mask = 0u64;
    let op = libc::PTRACE_GETSIGMASK as c_uint;
    // SAFETY: the mask has the size of 8 bytes that is told.
    unsafe { request(op, tid, 8, (&raw mut mask) as usize) }?;
    Ok(mask)
}

/// Writes the mask of blocked signals: bit 0 is signal 1.
///
/// # Errors
/// `ESRCH`.
pub fn set_signal_mask(tid: i32, mask: u64) -> io::Result<()> {
    let op = libc::PTRACE_SETSIGMASK as c_uint;
    // SAFETY: the mask is read, and has the size of 8 bytes that is told.
    unsafe { request(op, tid, 8, (&raw const mask) as usize) }.map(drop)
}

/// Copies of the pending signals' `siginfo_t`, oldest first; they stay pending. `shared`: those
/// sent to the process instead of the thread.
///
/// # Errors
/// `ESRCH`.
pub fn peek_siginfo(tid: i32, shared: bool) -> io::Result<Vec<[u8; 128]>> {
    const BATCH: usize = 32;
    #[repr(C)]
    struct Args {
        off: u64,
        flags: u32,
        nr: i32,
    }
    let mut all = Vec::new();
    loop {
        let mut infos = [[0u8; 128]; BATCH];
        let args = Args {
            off: all.len() as u64,
            flags: u32::from(shared),
            nr: BATCH as i32,
        };
        let op = libc::PTRACE_PEEKSIGINFO as c_uint;
        let (asked, room) = ((&raw const args) as usize, infos.as_mut_ptr() as usize);
        // SAFETY: there is room for as many as are asked for.
        let got = unsafe { request(op, tid, asked, room) }?;
        let got = usize::try_from(got).expect("a count is not negative");
        all.extend_from_slice(&infos[..got]);
        if got < BATCH {
            return Ok(all);
        }
    }
}

/// A thread's registered area for restartable sequences (`PTRACE_GET_RSEQ_CONFIGURATION`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RseqArea {
    /// Its address; 0 when none is registered.
    pub addr: u64,
    /// Its length in bytes.
    pub len_bytes: u32,
    /// The signature in front of abort handlers.
    pub signature: u32,
    /// Flags of the registration; 0 today.
    pub flags: u32,
    pad: u32,
}

/// Reads the thread's rseq registration.
///
/// # Errors
/// `ESRCH`; `EIO` on kernels before 5.13.
pub fn rseq(tid: i32) -> io::Result<RseqArea> {
    const PTRACE_GET_RSEQ_CONFIGURATION: c_uint = libc::PTRACE_GET_RSEQ_CONFIGURATION;
    let mut area = RseqArea::default();
    let size = size_of::<RseqArea>();
    let op = PTRACE_GET_RSEQ_CONFIGURATION;
    // SAFETY: there is room for as much as is told.
    unsafe { request(op, tid, size, (&raw mut area) as usize) }?;
    Ok(area)
}

/// Reads debug register 7 of a thread: which breakpoints are on. One that a debugger has set stays
/// when the debugger ends.
///
/// # Errors
/// `ESRCH`.
pub fn breakpoints(tid: i32) -> io::Result<u64> {
    const PTRACE_PEEKUSER: c_uint = libc::PTRACE_PEEKUSER;
    const CONTROL: usize = 7;
    let at = std::mem::offset_of!(libc::user, u_debugreg) + CONTROL * size_of::<u64>();
    // SAFETY: the C library has a place of its own for the word, and returns it.
    let control = unsafe { request(PTRACE_PEEKUSER, tid, at, 0) }?;
    Ok(control.cast_unsigned())
}

/// A thread's seccomp filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Instructions of 8 bytes (`struct sock_filter`), as they were installed.
    pub program: Vec<u8>,
    /// `SECCOMP_FILTER_FLAG_LOG` or 0: the other flags are forgotten by the kernel.
    pub flags: u64,
}

/// The seccomp filters of a thread, the one installed first in front; none of one in strict mode.
///
/// # Errors
/// `ESRCH`; `EACCES` without `CAP_SYS_ADMIN`, and where the caller has a filter itself;
/// `EMEDIUMTYPE` for a filter that was no classic program.
pub fn filters(tid: i32) -> io::Result<Vec<Filter>> {
    const PTRACE_SECCOMP_GET_FILTER: c_uint = linux_raw_sys::ptrace::PTRACE_SECCOMP_GET_FILTER;
    const PTRACE_SECCOMP_GET_METADATA: c_uint = linux_raw_sys::ptrace::PTRACE_SECCOMP_GET_METADATA;
    /// `BPF_MAXINSNS`.
    const LONGEST: usize = linux_raw_sys::ptrace::BPF_MAXINSNS as usize;
    // There are no more, or never were any.
    let is_end = |error: &io::Error| {
        let errno = error.raw_os_error();
        errno == Some(libc::ENOENT) || errno == Some(libc::EINVAL)
    };
    let mut all = Vec::new();
    let mut room = vec![0u8; 8 * LONGEST];
    loop {
        let (op, at) = (PTRACE_SECCOMP_GET_FILTER, room.as_mut_ptr() as usize);
        // SAFETY: there is room for the longest program that the kernel takes.
        let got = match unsafe { request(op, tid, all.len(), at) } {
            Err(error) if is_end(&error) => return Ok(all),
            got => usize::try_from(got?).expect("a count is not negative"),
        };
        // Which filter is asked for, and its flags.
        let mut metadata = [all.len() as u64, 0];
        let (op, size) = (PTRACE_SECCOMP_GET_METADATA, size_of_val(&metadata));
        // SAFETY: there is room for as much as is told.
        unsafe { request(op, tid, size, metadata.as_mut_ptr() as usize) }?;
        all.push(Filter {
            program: room[..8 * got].to_vec(),
            flags: metadata[1],
        });
    }
}

/// Waits for the next event of the thread `tid` (or of any, with -1): its thread id and the event.
///
/// # Errors
/// `ECHILD` when nothing is left to wait for.
pub fn wait(tid: i32) -> io::Result<(i32, Event)> {
    let (tid, event) = wait_with(tid, 0)?.expect("without WNOHANG there is an event");
    Ok((tid, event))
}

/// Takes an event of the thread `tid` (or of any, with -1) if there is one.
///
/// # Errors
/// `ECHILD`.
pub fn try_wait(tid: i32) -> io::Result<Option<(i32, Event)>> {
    wait_with(tid, libc::WNOHANG)
}

/// Whether the process of a traced and stopped thread was continued by `SIGCONT` without its parent
/// having waited for that (`WCONTINUED` of wait(2)), which it still can.
///
/// # Errors
/// `ECHILD`.
pub fn was_continued(tid: i32) -> io::Result<bool> {
    let flags = libc::WCONTINUED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL;
    let mut info = std::mem::MaybeUninit::<libc::siginfo_t>::zeroed();
    // SAFETY: `info` outlives the call.
    let got = unsafe { libc::waitid(libc::P_PID, tid.cast_unsigned(), info.as_mut_ptr(), flags) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: zeroes are a valid siginfo_t, and so is what waitid writes.
    Ok(unsafe { info.assume_init() }.si_code == libc::CLD_CONTINUED)
}

/// As [`wait`], but a signal that this thread handles meanwhile (see [`crate::tick`]) ends it.
///
/// # Errors
/// `EINTR`; `ECHILD`.
pub fn wait_interruptible(tid: i32) -> io::Result<(i32, Event)> {
    wait_once(tid, 0).map(|event| event.expect("without WNOHANG there is an event"))
}

fn wait_with(tid: i32, flags: i32) -> io::Result<Option<(i32, Event)>> {
    loop {
        match wait_once(tid, flags) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

fn wait_once(tid: i32, flags: i32) -> io::Result<Option<(i32, Event)>> {
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    let got = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | flags) };
    match got {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        got => Ok(Some((got, event_of(status)))),
    }
}

fn event_of(status: i32) -> Event {
    if libc::WIFEXITED(status) || libc::WIFSIGNALED(status) {
        return Event::Ended(status);
    }
    let signal = libc::WSTOPSIG(status);
    match status >> 16 {
        libc::PTRACE_EVENT_STOP => Event::Stop(signal),
        0 if signal == libc::SIGTRAP | 0x80 => Event::Call,
        0 => Event::Signal(signal),
        other => Event::Other(other),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_stopped_child_shows_its_state() {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("cat starts");
        child
            .stdin
            .as_mut()
            .expect("piped")
            .write_all(b"x")
            .expect("cat reads");
        child
            .stdout
            .as_mut()
            .expect("piped")
            .read_exact(&mut [0])
            .expect("cat echoes");
        let tid = i32::try_from(child.id()).expect("a pid");
        seize(tid, true).expect("seize");
        interrupt(tid).expect("interrupt");
        assert_eq!(wait(tid).expect("wait"), (tid, Event::Stop(libc::SIGTRAP)));
        let regs = registers(tid).expect("registers");
        assert_eq!(Registers::from_words(regs.to_words()), regs);
        set_registers(tid, &regs).expect("set registers");
        let state = xstate(tid).expect("xstate");
        assert!(state.len() >= 576, "{}", state.len());
        set_xstate(tid, &state).expect("set xstate");
        set_signal_mask(tid, 0b10).expect("set mask");
        assert_eq!(signal_mask(tid).expect("mask"), 0b10);
        // SAFETY: sends a signal to our own child.
        unsafe { libc::kill(tid, libc::SIGINT) };
        let pending = peek_siginfo(tid, true).expect("peek");
        assert_eq!(pending.len(), 1);
        assert_eq!(
            i32::from_le_bytes(pending[0][..4].try_into().expect("4")),
            libc::SIGINT
        );
        assert!(rseq(tid).expect("rseq").len_bytes >= 32);
        detach(tid, 0).expect("detach");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
}
