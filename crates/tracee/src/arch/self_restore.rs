//! The way back: code that gives a thread its own registers and signal mask again without help.
//!
//! While a thread of a living target runs the blob, its tracer may be killed. The thread must
//! then go on as if nothing had happened, so the code to do that is laid out before any register
//! is changed: it sets the signal mask, the flags and every register that the blob uses, and jumps
//! to where the thread was. It uses no stack and touches no vector registers.

use sys::arch::Registers;

/// The length of [`code`] in bytes.
pub const LEN_BYTES: usize = 172;

/// Code that must be entered with any values in the general registers that the blob uses; the
/// others (`rbx`, `rbp`, `rsp`, `r14`, `r15`) must be the thread's own. A thread that was stopped
/// in a system call that restarts makes it again.
#[must_use]
pub fn code(regs: &Registers, mask: u64) -> Vec<u8> {
    let regs = restarted(regs);
    let mut out = Vec::with_capacity(LEN_BYTES);
    out.extend([0xb8, 14, 0, 0, 0]); // mov eax, 14 (rt_sigprocmask)
    out.extend([0xbf, 2, 0, 0, 0]); // mov edi, 2 (SIG_SETMASK)
    out.extend([0x48, 0x8d, 0x35]); // lea rsi, [rip + mask]
    let mask_at = LEN_BYTES - 16;
    out.extend((u32::try_from(mask_at - (out.len() + 4)).expect("short")).to_le_bytes());
    out.extend([0xba, 0, 0, 0, 0]); // mov edx, 0
    out.extend([0x41, 0xba, 8, 0, 0, 0]); // mov r10d, 8
    out.extend([0x0f, 0x05]); // syscall
    out.extend(flags(regs.eflags));
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
    let jump = match regs.is_32_bit() {
        false => [0xff, 0x25], // jmp [rip + target]
        true => [0xff, 0x2d],  // jmp far [rip + target]: the address, then the segment
    };
    out.extend(jump);
    let target_at = LEN_BYTES - 8;
    out.extend((u32::try_from(target_at - (out.len() + 4)).expect("short")).to_le_bytes());
    out.resize(mask_at, 0xcc);
    out.extend(mask.to_le_bytes());
    let target = match regs.is_32_bit() {
        false => regs.rip,
        true => regs.rip | regs.cs << 32,
    };
    out.extend(target.to_le_bytes());
    out
}

/// Code that sets the status flags: overflow by an addition, the others by `sahf`. The blob
/// changes no other flag.
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

    #[test]
    fn code_has_its_length_and_targets() {
        let regs = Registers {
            cs: sys::arch::CODE_64,
            rip: 0x1234,
            orig_rax: u64::MAX,
            ..Registers::default()
        };
        let bytes = code(&regs, 0xff00);
        assert_eq!(bytes.len(), LEN_BYTES);
        assert_eq!(bytes[LEN_BYTES - 8..], 0x1234u64.to_le_bytes());
        assert_eq!(
            bytes[LEN_BYTES - 16..LEN_BYTES - 8],
            0xff00u64.to_le_bytes()
        );
    }

    #[test]
    fn a_32_bit_thread_goes_back_by_a_far_jump() {
        let regs = Registers {
            cs: sys::arch::CODE_32,
            rip: 0xf7f8_05e9,
            orig_rax: 0xffff_ffff,
            ..Registers::default()
        };
        let bytes = code(&regs, 0);
        assert_eq!(bytes.len(), LEN_BYTES);
        assert_eq!(
            bytes[LEN_BYTES - 8..],
            [0xe9, 0x05, 0xf8, 0xf7, 0x23, 0, 0, 0]
        );
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
