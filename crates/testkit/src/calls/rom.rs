//! The firmware of a machine without an operating system: it has the processor run a loop of its
//! own in ring 3, which some hosts' processors do natively, and all else slowly.
use std::arch::global_asm;

/// How long a firmware is: it ends where the first 4 GiB do, and is below 1 MiB as well.
const ROM_BYTES: usize = 64 << 10;

/// Where the processor begins.
const RESET: usize = 0xfff0;

// In real mode: tables of 2 MiB pages for the first GiB, from 0x1000 on; long mode. From there
// sysexit leads to ring 3, as a host may not emulate an iret. IOPL 3 allows all ports.
//
// The loop has r12 as the number of its pass and r13 as the number of wrong words. Both ends of
// each page from 2 MiB to 26 MiB must be as the pass before has left them. After each pass both
// numbers go to the serial port as a line of hexadecimal digits.
global_asm!(
    ".pushsection .rodata.stillframe_rom, \"a\"",
    ".globl stillframe_rom_begin, stillframe_rom_end",
    "stillframe_rom_begin:",
    ".code16",
    "jmp 1f",
    ".balign 8",
    // At 8, code of 64 bits and data; at 32, where that is.
    ".quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff",
    ".word 23",
    ".long 0xf0008",
    "1: cli",
    "cld",
    "xor ax, ax",
    "mov es, ax",
    "mov ss, ax",
    "mov di, 0x1000",
    "xor eax, eax",
    "mov ecx, 0xc00",
    "rep stosd",
    "mov dword ptr es:[0x1000], 0x2007",
    "mov dword ptr es:[0x2000], 0x3007",
    "mov di, 0x3000",
    "mov eax, 0xe7",
    "mov cx, 512",
    "2: mov es:[di], eax",
    "add eax, 0x200000",
    "add di, 8",
    "loop 2b",
    "lgdt cs:[32]",
    "mov eax, 0x20",
    "mov cr4, eax",
    "mov eax, 0x1000",
    "mov cr3, eax",
    // EFER: long mode.
    "mov ecx, 0xc0000080",
    "mov eax, 0x100",
    "xor edx, edx",
    "wrmsr",
    "mov eax, 0x80000033",
    "mov cr0, eax",
    ".byte 0x66, 0xea",
    ".long 0xf0000 + 3f - stillframe_rom_begin",
    ".word 8",
    ".code64",
    // SYSENTER_CS, from which sysexit has its segments.
    "3: mov ecx, 0x174",
    "mov eax, 8",
    "xor edx, edx",
    "wrmsr",
    "mov esp, 0x9000",
    "push 0x3002",
    "popfq",
    // edx: where it leads to.
    ".byte 0xba",
    ".long 0xf0000 + 4f - stillframe_rom_begin",
    "mov ecx, 0x8000",
    // That of 64 bits.
    ".byte 0x48, 0x0f, 0x35",
    // Ring 3.
    "4: xor r12d, r12d",
    "xor r13d, r13d",
    "5: mov r11, r12",
    "inc r12",
    "mov edi, 0x200000",
    "6: cmp [rdi], r11",
    "je 7f",
    "inc r13",
    "7: cmp [rdi + 4088], r11",
    "je 8f",
    "inc r13",
    "8: mov [rdi], r12",
    "mov [rdi + 4088], r12",
    "add rdi, 4096",
    "cmp edi, 0x1a00000",
    "jb 6b",
    "mov rbx, r12",
    "call 20f",
    "mov bl, 32",
    "call 24f",
    "mov rbx, r13",
    "call 20f",
    "mov bl, 10",
    "call 24f",
    "jmp 5b",
    // Says rbx as digits.
    "20: mov ecx, 16",
    "21: rol rbx, 4",
    "push rbx",
    "and bl, 15",
    "cmp bl, 10",
    "jb 22f",
    "add bl, 39",
    "22: add bl, 48",
    "call 24f",
    "pop rbx",
    "dec ecx",
    "jnz 21b",
    "ret",
    // Says bl, when the port can take it.
    "24: mov dx, 0x3fd",
    "25: in al, dx",
    "test al, 0x20",
    "jz 25b",
    "mov al, bl",
    "mov dx, 0x3f8",
    "out dx, al",
    "ret",
    "stillframe_rom_end:",
    ".popsection",
);

unsafe extern "C" {
    static stillframe_rom_begin: u8;
    static stillframe_rom_end: u8;
}

/// A firmware whose machine writes to 24 MiB of its memory over and over, and says after each pass
/// how many it has made, and how many words were not as the one before had left them: two numbers
/// of 16 hexadecimal digits on a line of its serial port. It needs 32 MiB.
#[must_use]
pub fn counting() -> Vec<u8> {
    let (begin, end) = (
        &raw const stillframe_rom_begin,
        &raw const stillframe_rom_end,
    );
    let bytes = end.addr() - begin.addr();
    // SAFETY: these are the bytes between both symbols, which nobody writes.
    let code = unsafe { std::slice::from_raw_parts(begin, bytes) };
    let mut rom = vec![0xf4; ROM_BYTES];
    rom[..code.len()].copy_from_slice(code);
    // A far jump to f000:0000, where the code is below 1 MiB.
    rom[RESET..RESET + 5].copy_from_slice(&[0xea, 0, 0, 0, 0xf0]);
    rom
}
