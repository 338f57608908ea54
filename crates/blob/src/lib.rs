//! The code that runs inside a task: executes a script of operations and knows nothing else.
//!
//! [`code`] gives the bytes of a position-independent loop. It is entered with `r12` = the address
//! of the first [`abi::Op`] and `r13` = the address of an [`abi::Header`]; it uses no stack, no
//! memory but those two, and no registers but the general ones. Flags and registers are the
//! tracer's business.
//!
//! ```
//! assert!(blob::code().len() < 512);
//! ```
#![no_std]

use core::arch::global_asm;

use abi::{Kind, offset};

// The futex calls are shared (no FUTEX_PRIVATE_FLAG): scripts of several processes wait on one
// word. `syscall` destroys rcx and r11 only, so r12 and r13 survive every call.
global_asm!(
    ".pushsection .rodata.stillframe_blob, \"a\", @progbits",
    ".globl stillframe_blob_start",
    ".globl stillframe_blob_end",
    "stillframe_blob_start:",
    // -- next op: dispatch on its kind
    "2:",
    "mov rax, [r12]",
    "cmp rax, {end}",
    "je 6f",
    "cmp rax, {wait}",
    "je 5f",
    "cmp rax, {compat}",
    "je 20f",
    // -- make the call
    "mov rax, [r12 + {number}]",
    "mov rdi, [r12 + {args}]",
    "mov rsi, [r12 + {args} + 8]",
    "mov rdx, [r12 + {args} + 16]",
    "mov r10, [r12 + {args} + 24]",
    "mov r8, [r12 + {args} + 32]",
    "mov r9, [r12 + {args} + 40]",
    "syscall",
    "mov rcx, [r12]",
    "cmp rcx, {spawn}",
    "jne 3f",
    "test rax, rax",
    "jnz 3f",
    // -- the child of a spawn: leave the parent's op alone, go on at its own script
    "mov r12, [r12 + {extra}]",
    "jmp 2b",
    // -- judge the result
    "3:",
    "mov [r12 + {result}], rax",
    "cmp rcx, {try_}",
    "je 4f",
    "cmp rax, -4095",
    "jae 8f",
    "cmp rcx, {expect}",
    "jne 4f",
    "cmp rax, [r12 + {extra}]",
    "jne 8f",
    "4:",
    "add r12, {op_bytes}",
    "jmp 2b",
    // -- await: until the word is at least the value
    "5:",
    "mov rdi, [r12 + {args}]",
    "mov edx, [rdi]",
    "cmp edx, [r12 + {args} + 8]",
    "jae 4b",
    "mov eax, 202", // futex(word, FUTEX_WAIT, seen, NULL)
    "mov esi, 0",
    "mov r10d, 0",
    "syscall",
    "jmp 5b",
    // -- end: count in, wake the tracer, wait to be fetched
    "6:",
    "lock inc dword ptr [r13 + {parked}]",
    "lea rdi, [r13 + {parked}]",
    "mov eax, 202", // futex(&parked, FUTEX_WAKE, all)
    "mov esi, 1",
    "mov edx, 0x7fffffff",
    "syscall",
    "7:",
    "cmp qword ptr [r13 + {resume}], 0",
    "jne 9f",
    "lea rdi, [r13 + {hold}]",
    "mov eax, 202", // futex(&hold, FUTEX_WAIT, 0, NULL)
    "mov esi, 0",
    "mov edx, 0",
    "mov r10d, 0",
    "syscall",
    "jmp 7b",
    // The kernel gives the lock away when the tracer's thread, whose number it has, ends: 0 then,
    // or ESRCH where that has ended before. While it lives, nothing but a signal of its own ends
    // the wait, and the call is made again. Other than futex's waits, poll and nanosleep, it leaves
    // the restart block alone that the thread may have of its own interrupted call.
    "9:",
    "lea rdi, [r13 + {owner}]",
    "mov eax, 202", // futex(&owner, FUTEX_LOCK_PI, 0, NULL)
    "mov esi, 6",
    "mov edx, 0",
    "mov r10d, 0",
    "syscall",
    "cmp rax, -4", // EINTR
    "je 9b",
    "jmp qword ptr [r13 + {resume}]",
    // -- a call of 32 bits: it needs rbx, which stands in the op's result meanwhile
    "20:",
    "mov [r12 + {result}], rbx",
    "mov eax, [r12 + {number}]",
    "mov ebx, [r12 + {args}]",
    "mov ecx, [r12 + {args} + 8]",
    "mov edx, [r12 + {args} + 16]",
    "mov esi, [r12 + {args} + 24]",
    "mov edi, [r12 + {args} + 32]",
    "int 0x80",
    "mov rbx, [r12 + {result}]",
    "mov rcx, [r12]",
    "jmp 3b",
    // -- failure: the first one names its op; then the process ends, or parks to be resumed.
    // Process 1 of a pid namespace waits to be killed: with its end, all in there are killed.
    "8:",
    "mov eax, 0",
    "lock cmpxchg qword ptr [r13 + {failed}], r12",
    "mov dword ptr [r13 + {failing}], 1",
    "cmp qword ptr [r13 + {fatal}], 0",
    "je 6b",
    "lea rdi, [r13 + {failing}]",
    "mov eax, 202", // futex(&failing, FUTEX_WAKE, all)
    "mov esi, 1",
    "mov edx, 0x7fffffff",
    "syscall",
    "mov eax, 39", // getpid()
    "syscall",
    "cmp eax, 1",
    "je 21f",
    "mov edi, 1",
    "mov eax, 231", // exit_group(1)
    "syscall",
    "21:",
    "mov eax, 34", // pause()
    "syscall",
    "jmp 21b",
    "stillframe_blob_end:",
    ".popsection",
    end = const Kind::End as u64,
    wait = const Kind::Await as u64,
    spawn = const Kind::Spawn as u64,
    try_ = const Kind::Try as u64,
    expect = const Kind::Expect as u64,
    compat = const Kind::Compat as u64,
    number = const offset::NUMBER,
    args = const offset::ARGS,
    result = const offset::RESULT,
    extra = const offset::EXTRA,
    op_bytes = const abi::Op::BYTES,
    parked = const offset::PARKED,
    failing = const offset::FAILING,
    failed = const offset::FAILED,
    resume = const offset::RESUME,
    owner = const offset::OWNER,
    hold = const offset::HOLD,
    fatal = const offset::FATAL,
);

unsafe extern "C" {
    static stillframe_blob_start: u8;
    static stillframe_blob_end: u8;
}

/// The loop's bytes, to be copied to any executable address.
#[must_use]
pub fn code() -> &'static [u8] {
    let start = &raw const stillframe_blob_start;
    let end = &raw const stillframe_blob_end;
    // SAFETY: both symbols delimit one read-only section part that the assembly above defines.
    unsafe { core::slice::from_raw_parts(start, end as usize - start as usize) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn code_is_small_and_not_empty() {
        assert!(
            (64..512).contains(&super::code().len()),
            "{}",
            super::code().len()
        );
    }
}
