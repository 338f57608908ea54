//! The way back: code that gives a thread its own registers and signal mask again without help.
//!
//! While a thread of a living target runs the blob, its tracer may be killed. The thread must
//! then go on as if nothing had happened, so the code to do that is laid out before any register
//! is changed: it sets the signal mask, the flags and every register that the blob uses, and jumps
//! to where the thread was. It uses no stack and touches no vector registers.

use abi::Addr;
use sys::arch::Registers;
use sys::ptrace::Dispatch;

/// The length of [`code`] in bytes.
pub const LEN_BYTES: usize = 272;
/// Where its data begins: the signal mask, then [`TARGET_AT`].
const MASK_AT: usize = LEN_BYTES - 48;
/// Where it has the address to go to; for `iretq`, all that this takes from a stack.
const TARGET_AT: usize = MASK_AT + 8;

/// The state that a thread goes back to.
#[derive(Clone, Copy, Debug)]
pub struct WayBack {
    /// Its registers.
    pub registers: Registers,
    /// Its mask of blocked signals.
    pub mask: u64,
    /// The region and selector by which a handler of its own intercepts its calls, if one does.
    pub dispatch: Option<Dispatch>,
}

/// A byte that is 1 while a thread is on its way back: it may have been led away by a signal, and
/// comes back to code of ours.
#[derive(Clone, Copy, Debug)]
pub struct Leaving {
    /// Where the code is to stand.
    pub code: Addr,
    /// Where the byte is, within 2 GiB.
    pub flag: Addr,
}

/// Code that must be entered with any values in the general registers that the blob uses; the
/// others (`rbx`, `rbp`, `rsp`, `r14`, `r15`) must be the thread's own. A thread that was stopped
/// in a system call that restarts makes it again.
#[must_use]
pub fn code(back: &WayBack, leaving: Option<Leaving>) -> Vec<u8> {
    let regs = restarted(&back.registers);
    let mut out = Vec::with_capacity(LEN_BYTES);
    let set = |out: &mut Vec<u8>, value: u8| {
        if let Some(Leaving { code, flag }) = leaving {
            out.extend([0xc6, 0x05]); // mov byte [rip + flag], value
            let next = code.plus(out.len() as u64 + 5);
            let distance = flag.0.wrapping_sub(next.0).cast_signed();
            out.extend(i32::try_from(distance).expect("near").to_le_bytes());
            out.push(value);
        }
    };
    set(&mut out, 1);
    out.extend([0xb8, 14, 0, 0, 0]); // mov eax, 14 (rt_sigprocmask)
    out.extend([0xbf, 2, 0, 0, 0]); // mov edi, 2 (SIG_SETMASK)
    data(&mut out, &[0x48, 0x8d, 0x35], MASK_AT); // lea rsi, [rip + mask]
    out.extend([0xba, 0, 0, 0, 0]); // mov edx, 0
    out.extend([0x41, 0xba, 8, 0, 0, 0]); // mov r10d, 8
    out.extend([0x0f, 0x05]); // syscall
    if let Some(dispatch) = back.dispatch {
        intercept(&mut out, dispatch);
    }
    let steps = regs.eflags & Registers::OWN_FLAGS != 0;
    if !steps {
        out.extend(flags(regs.eflags));
    }
    let loads: [(&[u8], u64); 11] = [
        (&[0x48, 0xb8], regs.rax),
        (&[0x48, 0xb9], regs.rcx),
        (&[0x48, 0xba], regs.rdx),
        (&[0x48, 0xbe], regs.rsi),
        (&[0x48, 0xbf], regs.rdi),
        (&[0x49, 0xb8], regs.r8),
        (&[0x49, 0xb9], regs.r9),
        (&[0x49, 0xba], regs.r10),
        (&[0x49, 0xbb], regs.r11),
        (&[0x49, 0xbc], regs.r12),
        (&[0x49, 0xbd], regs.r13),
    ];
    for (mov, value) in loads {
        out.extend(mov); // movabs reg, value
        out.extend(value.to_le_bytes());
    }
    set(&mut out, 0);
    let frame = match (steps, regs.is_32_bit()) {
        // Flags that would stop our own code come with the jump.
        (true, _) => {
            data(&mut out, &[0x48, 0x8d, 0x25], TARGET_AT); // lea rsp, [rip + frame]
            out.extend([0x48, 0xcf]); // iretq
            [regs.rip, regs.cs, regs.eflags, regs.rsp, regs.ss]
        }
        (false, false) => {
            data(&mut out, &[0xff, 0x25], TARGET_AT); // jmp [rip + target]
            [regs.rip, 0, 0, 0, 0]
        }
        // jmp far [rip + target]: the address, then the segment
        (false, true) => {
            data(&mut out, &[0xff, 0x2d], TARGET_AT);
            [regs.rip | regs.cs << 32, 0, 0, 0, 0]
        }
    };
    assert!(out.len() <= MASK_AT, "{}", out.len());
    out.resize(MASK_AT, 0xcc);
    out.extend(back.mask.to_le_bytes());
    out.extend(frame.into_iter().flat_map(u64::to_le_bytes));
    out
}

/// Adds an instruction that ends with the address of `at`, where the code has data.
fn data(out: &mut Vec<u8>, op: &[u8], at: usize) {
    out.extend(op);
    let next = out.len() + 4;
    out.extend(u32::try_from(at - next).expect("short").to_le_bytes());
}

/// Has the kernel hand over the thread's calls again (`PR_SET_SYSCALL_USER_DISPATCH`, prctl(2)).
fn intercept(out: &mut Vec<u8>, dispatch: Dispatch) {
    out.extend([0xb8, 157, 0, 0, 0]); // mov eax, 157 (prctl)
    out.extend([0xbf, 59, 0, 0, 0]); // mov edi, 59
    out.extend([0xbe, dispatch.mode as u8, 0, 0, 0]); // mov esi, mode
    for (mov, value) in [
        ([0x48, 0xba], dispatch.offset),   // movabs rdx, offset
        ([0x49, 0xba], dispatch.len),      // movabs r10, len
        ([0x49, 0xb8], dispatch.selector), // movabs r8, selector
    ] {
        out.extend(mov);
        out.extend(value.to_le_bytes());
    }
    out.extend([0x0f, 0x05]); // syscall
}

/// Code that sets the status flags: overflow by an addition, the others by `sahf`. Our code changes
/// no other flag.
fn flags(eflags: u64) -> [u8; 8] {
    const OVERFLOW: u64 = 1 << 11;
    let al = if eflags & OVERFLOW == 0 { 0 } else { 0x7f };
    let ah = (eflags & 0xd5) as u8 | 2;
    // mov eax, imm32; add al, 1; sahf
    [0xb8, al, ah, 0, 0, 0x04, 1, 0x9e]
}

/// The registers with which the thread makes its interrupted system call again, as the kernel
/// would have it do without a signal handler.
#[must_use]
pub fn restarted(regs: &Registers) -> Registers {
    const RESTART_SYSCALL: u64 = 219;
    const RESTART_SYSCALL_32: u64 = 0;
    let mut regs = *regs;
    let Some(number) = regs.call() else {
        return regs;
    };
    match -regs.result() {
        512..=514 => regs.rax = number, // ERESTARTSYS, ERESTARTNOINTR, ERESTARTNOHAND
        // ERESTART_RESTARTBLOCK
        516 if regs.is_32_bit() => regs.rax = RESTART_SYSCALL_32,
        516 => regs.rax = RESTART_SYSCALL,
        _ => return regs,
    }
    regs.rip -= 2;
    regs.orig_rax = u64::MAX;
    regs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back(registers: Registers, mask: u64) -> WayBack {
        WayBack {
            registers,
            mask,
            dispatch: None,
        }
    }

    fn word(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    }

    #[test]
    fn code_has_its_length_and_targets() {
        let regs = Registers {
            cs: sys::arch::CODE_64,
            rip: 0x1234,
            orig_rax: u64::MAX,
            ..Registers::default()
        };
        let bytes = code(&back(regs, 0xff00), None);
        assert_eq!(bytes.len(), LEN_BYTES);
        assert_eq!(word(&bytes, TARGET_AT), 0x1234);
        assert_eq!(word(&bytes, MASK_AT), 0xff00);
        let dispatch = Some(Dispatch {
            mode: 1,
            selector: 0x7000,
            offset: 0,
            len: 0,
        });
        let all = WayBack {
            dispatch,
            ..back(regs, 0)
        };
        let leaving = Leaving {
            code: Addr(0x10_0000),
            flag: Addr(0x10_8000),
        };
        assert_eq!(code(&all, Some(leaving)).len(), LEN_BYTES);
        let stepping = Registers {
            eflags: 0x302,
            rsp: 0x9000,
            ..regs
        };
        let bytes = code(&back(stepping, 0), Some(leaving));
        assert_eq!(word(&bytes, TARGET_AT), 0x1234);
        assert_eq!(word(&bytes, TARGET_AT + 16), 0x302);
        assert_eq!(word(&bytes, TARGET_AT + 24), 0x9000);
    }

    #[test]
    fn a_32_bit_thread_goes_back_by_a_far_jump() {
        let regs = Registers {
            cs: sys::arch::CODE_32,
            rip: 0xf7f8_05e9,
            orig_rax: 0xffff_ffff,
            ..Registers::default()
        };
        let bytes = code(&back(regs, 0), None);
        assert_eq!(bytes.len(), LEN_BYTES);
        assert_eq!(word(&bytes, TARGET_AT), 0x23_f7f8_05e9);
        let sleeping = Registers {
            rax: (-516i64).cast_unsigned(),
            orig_rax: 407,
            ..regs
        };
        let again = restarted(&sleeping);
        assert_eq!((again.rax, again.rip), (0, 0xf7f8_05e7));
    }

    #[test]
    fn an_interrupted_call_is_made_again() {
        let in_call = |rax: i64| Registers {
            rip: 0x1002,
            rax: rax.cast_unsigned(),
            orig_rax: 35,
            ..Registers::default()
        };
        assert_eq!(restarted(&in_call(-512)).rax, 35);
        assert_eq!(restarted(&in_call(-512)).rip, 0x1000);
        assert_eq!(restarted(&in_call(-516)).rax, 219);
        assert_eq!(restarted(&in_call(-4)), in_call(-4));
        assert_eq!(restarted(&in_call(0)), in_call(0));
    }
}
