//! A thread that steps itself, and one that intercepts its own system calls.
use std::io::Result;
use std::mem::zeroed;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use super::check;

static TRAPS: AtomicU64 = AtomicU64::new(0);
static INTERCEPTED: AtomicU64 = AtomicU64::new(0);
/// Selector of syscall user dispatch: the kernel makes a call (0), or the handler gets it (1).
static SELECTOR: AtomicU8 = AtomicU8::new(0);

/// A number that no system call has.
const NO_CALL: u64 = 0x999;
/// The result of an intercepted call.
pub const ANSWER: u64 = 42;

extern "C" fn on_trap(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    TRAPS.fetch_add(1, Ordering::SeqCst);
}

extern "C" fn on_call(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // The return from here is a call itself.
    SELECTOR.store(0, Ordering::SeqCst);
    INTERCEPTED.fetch_add(1, Ordering::SeqCst);
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel hands a handler with SA_SIGINFO a valid context of its own.
    let registers = unsafe { &mut (*context).uc_mcontext.gregs };
    registers[libc::REG_RAX as usize] = ANSWER.cast_signed();
}

type Handler = extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void);

fn handle(signal: i32, handler: Handler) -> Result<()> {
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handlers store into atomics and their own context alone, at any instant.
    check(unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) }.into()).map(drop)
}

/// Handles the traps of [`step`]. sigaction(2).
///
/// # Errors
/// As sigaction(2).
pub fn count_traps() -> Result<()> {
    handle(libc::SIGTRAP, on_trap)
}

/// Makes `rounds` rounds of two instructions with the trap flag set, and gives how many traps there
/// were meanwhile: two a round and some more, where each is handled ([`count_traps`]).
#[must_use]
pub fn step(rounds: u64) -> u64 {
    let before = TRAPS.load(Ordering::SeqCst);
    // SAFETY: it uses the stack as the compiler lets it, and what it changes is told; the handler
    // of the traps was installed, or the process ends.
    unsafe {
        std::arch::asm!(
            "pushfq",
            "or qword ptr [rsp], 0x100",
            "popfq",
            "2:",
            "dec {rounds}",
            "jnz 2b",
            "pushfq",
            "and qword ptr [rsp], -0x101",
            "popfq",
            rounds = inout(reg) rounds => _,
        );
    }
    TRAPS.load(Ordering::SeqCst) - before
}

/// Has the kernel hand over this thread's calls while they are intercepted
/// (`PR_SET_SYSCALL_USER_DISPATCH` of prctl(2)). Nobody else may do so in this process.
///
/// # Errors
/// As prctl(2) and sigaction(2).
pub fn intercept_calls() -> Result<()> {
    const PR_SET_SYSCALL_USER_DISPATCH: i32 = 59;
    const ON: u64 = 1;
    handle(libc::SIGSYS, on_call)?;
    let selector = SELECTOR.as_ptr();
    // SAFETY: the selector is there as long as the process is.
    let set = unsafe { libc::prctl(PR_SET_SYSCALL_USER_DISPATCH, ON, 0, 0, selector) };
    check(set.into()).map(drop)
}

/// Spins for `rounds` with calls intercepted, or not, then makes one that is, and gives what it
/// gave: [`ANSWER`] where it was intercepted. No other call is made meanwhile.
#[must_use]
pub fn intercepted(rounds: u64, while_spinning: bool) -> u64 {
    SELECTOR.store(while_spinning.into(), Ordering::SeqCst);
    for round in 0..rounds {
        std::hint::black_box(round);
    }
    SELECTOR.store(1, Ordering::SeqCst);
    let result: u64;
    // SAFETY: a call that does not exist, which changes nothing but these registers.
    unsafe {
        std::arch::asm!(
            "syscall",
            inout("rax") NO_CALL => result,
            out("rcx") _,
            out("r11") _,
        );
    }
    SELECTOR.store(0, Ordering::SeqCst);
    result
}
