//! A virtual machine's code without an operating system: a loop that fills memory, or verifies it,
//! and reports over the serial port; and memory of ours that becomes the machine's.
use std::arch::global_asm;
use std::io::Result;
use std::os::fd::AsRawFd;

use super::{Mapping, check};

// rdi: the first address; rsi: the end; rdx: a seed; r8: a factor; rcx: 0 to fill, 1 to verify.
// Each word is (address xor seed) times the factor. In the end rdi is where it stopped.
global_asm!(
    ".pushsection .rodata.stillframe_guest, \"a\"",
    ".globl stillframe_guest_begin, stillframe_guest_end",
    "stillframe_guest_begin:",
    "test ecx, ecx",
    "jnz 3f",
    // Fill.
    "2: cmp rdi, rsi",
    "jae 5f",
    "mov rax, rdi",
    "xor rax, rdx",
    "imul rax, r8",
    "mov [rdi], rax",
    "add rdi, 8",
    "jmp 2b",
    // Verify.
    "3: cmp rdi, rsi",
    "jae 5f",
    "mov rax, rdi",
    "xor rax, rdx",
    "imul rax, r8",
    "cmp [rdi], rax",
    "jne 4f",
    "add rdi, 8",
    "jmp 3b",
    // Report: w(rong) or r(ight).
    "4: mov al, 'w'",
    "jmp 6f",
    "5: mov al, 'r'",
    "6: mov dx, 0x3f8",
    "out dx, al",
    "7: jmp 7b",
    "stillframe_guest_end:",
    ".popsection",
);

unsafe extern "C" {
    static stillframe_guest_begin: u8;
    static stillframe_guest_end: u8;
}

/// The guest's code, which may stand anywhere. In rdi it takes the first address, in rsi the end,
/// in rdx a seed, in r8 a factor, in rcx whether it verifies (1) or fills (0). It reports `r` or
/// `w` on port 0x3f8, with rdi where it stopped.
#[must_use]
pub fn code() -> &'static [u8] {
    let (begin, end) = (
        &raw const stillframe_guest_begin,
        &raw const stillframe_guest_end,
    );
    let bytes = end.addr() - begin.addr();
    // SAFETY: these are the bytes between both symbols, which nobody writes.
    unsafe { std::slice::from_raw_parts(begin, bytes) }
}

/// Makes `memory` the memory of the machine `vm` from `at` on, as its region number `slot`
/// (`KVM_SET_USER_MEMORY_REGION`). Where it is unmapped before the machine is gone, the machine
/// must not run any more.
///
/// # Errors
/// The call's errno.
pub fn lend(vm: &impl AsRawFd, slot: u32, at: u64, memory: &Mapping) -> Result<()> {
    const KVM_SET_USER_MEMORY_REGION: libc::c_ulong = 0x4020_ae46;
    // Slot and flags, where the guest has it, its size, where we have it.
    let region = [slot.into(), at, memory.bytes() as u64, memory.address()];
    let fd = vm.as_raw_fd();
    // SAFETY: the kernel reads 32 bytes, and no memory is touched before the machine runs; what is
    // in a mapping is only ever read and written as atomic words.
    let done = unsafe { libc::ioctl(fd, KVM_SET_USER_MEMORY_REGION, region.as_ptr()) };
    check(done.into()).map(drop)
}
