//! What a thread of the target runs for us, in x86-64's machine code, but for the blob.

pub mod self_restore;

use abi::{Addr, Span, offset};
use sys::arch::{Registers, SYSCALL};

use self::self_restore::WayBack;

/// The number of mmap(2).
pub(crate) const MMAP: u64 = 9;
/// The number of munmap(2).
pub(crate) const MUNMAP: u64 = 11;

/// The stub begins with `syscall; mov rdi, rax; mov esi, length`: what is mapped at its start …
const STUB_MAP: [u8; 6] = [SYSCALL[0], SYSCALL[1], 0x48, 0x89, 0xc7, 0xbe];
/// … is unmapped by `mov eax, 11; syscall`, which can also be entered by itself, …
const STUB_UNMAP: [u8; 7] = [0xb8, MUNMAP as u8, 0, 0, 0, SYSCALL[0], SYSCALL[1]];
/// … here, in bytes from its start.
pub(crate) const UNMAP_AT: u64 = 10;
/// Where the self-restore code follows.
const RESTORE_AT: u64 = UNMAP_AT + STUB_UNMAP.len() as u64;
/// The size of the code that an injection begins with, in bytes.
pub const STUB_BYTES: usize = UNMAP_AT as usize + STUB_UNMAP.len() + self_restore::LEN_BYTES;
/// What stands in front of the self-restore code: see [`leaders_way`] and [`closing`].
pub(crate) const WAY_BYTES: usize = 192;

/// How a landing pad begins: `mov r9, rax` (the function's result), `mov eax, 14` (rt_sigprocmask).
const PAD: [u8; 8] = [0x49, 0x89, 0xc1, 0xb8, 0x0e, 0, 0, 0];
/// Where a landing pad's data begins, in bytes.
const DATA_AT: usize = 48;
/// Where it has the signal mask.
pub(crate) const MASK_AT: usize = DATA_AT;
/// Where it has the address that it returns to.
pub(crate) const HOME_AT: usize = DATA_AT + 8;
/// Its size, in bytes.
pub(crate) const PAD_BYTES: usize = DATA_AT + 16;

/// The code that maps `len_bytes`, or unmaps what was mapped; the self-restore code follows.
pub(crate) fn stub(len_bytes: u32, back: &WayBack) -> Vec<u8> {
    let mut stub = STUB_MAP.to_vec();
    stub.extend(len_bytes.to_le_bytes());
    stub.extend(STUB_UNMAP);
    stub.extend(self_restore::code(back, None));
    stub
}

/// Whether code is a stub, or a landing pad.
pub(crate) fn is_stub(bytes: &[u8]) -> bool {
    let stub = bytes.starts_with(&STUB_MAP) && bytes[UNMAP_AT as usize..].starts_with(&STUB_UNMAP);
    stub || bytes.starts_with(&PAD)
}

/// The registers with which a thread runs the blob's code at `entry`, for these ops and header.
pub(crate) fn enter_blob(registers: &mut Registers, entry: Addr, (ops, header): (Addr, Addr)) {
    registers.abandon_call();
    registers.enter(entry);
    (registers.r12, registers.r13) = (ops.0, header.0);
}

/// A loop that has entries of a ring submitted ([`crate::Submitting`]) until the word at r13 is
/// r15, or the call takes none, and then goes round in circles. Where r12 is not 0, what is at r13
/// goes there each time, if it is not above r14.
///
/// ```text
/// 1: mov eax, [r13]; cmp eax, r15d; je 3f
///    test r12, r12; jz 2f
///    cmp eax, r14d; cmova eax, r14d; mov [r12], eax
/// 2: mov eax, 426; syscall; test eax, eax; jg 1b
/// 3: pause; jmp 3b
/// ```
pub const SUBMIT_LOOP: [u8; 40] = [
    0x41, 0x8b, 0x45, 0x00, 0x44, 0x39, 0xf8, 0x74, 0x1b, 0x4d, 0x85, 0xe4, 0x74, 0x0b, 0x44, 0x39,
    0xf0, 0x41, 0x0f, 0x47, 0xc6, 0x41, 0x89, 0x04, 0x24, 0xb8, 0xaa, 0x01, 0x00, 0x00, 0x0f, 0x05,
    0x85, 0xc0, 0x7f, 0xdc, 0xf3, 0x90, 0xeb, 0xfc,
];

/// The registers with which a thread runs [`SUBMIT_LOOP`].
pub(crate) fn enter_submit_loop(registers: &mut Registers, submitting: &crate::Submitting) {
    registers.abandon_call();
    registers.enter(submitting.code);
    let (head, limit) = submitting.head.unwrap_or((Addr(0), 0));
    (registers.r12, registers.r13) = (head.0, submitting.watched.0);
    (registers.r14, registers.r15) = (limit.into(), submitting.until.into());
    let fd = u64::from(submitting.fd.cast_unsigned());
    (registers.rdi, registers.rsi) = (fd, submitting.count.into());
    (registers.rdx, registers.r10) = (0, 0);
    (registers.r8, registers.r9) = (0, 0);
}

/// The parts of an area that is to be given up, and the stub that leads its leader back.
pub(crate) struct Ground {
    /// All of it.
    pub area: Span,
    /// How much of it is code, in bytes: whole pages where others than the leader run in it.
    pub code_bytes: u64,
    /// Where the stub is.
    pub stub: Addr,
}

/// Code for a parked leader whose tracer has ended: `munmap(area)` at the stub, which leads back.
/// `header` is the leader's.
///
/// Where others may be in the area ([`abi::Header::shared`]), it stays, for whoever stops the
/// process next ([`crate::Injection::remove`]): no thread can tell when another one has left it.
/// Then the leader takes care that nothing may be written and run, and goes back by the stub.
pub(crate) fn leaders_way(header: Addr, ground: &Ground) -> Vec<u8> {
    const READ_WRITE: u8 = 3;
    const READ_EXEC: u8 = 5;
    let Ground {
        area,
        code_bytes,
        stub,
    } = *ground;
    let mut unmapping = vec![0x48, 0xbf]; // movabs rdi, start
    unmapping.extend(area.start.0.to_le_bytes());
    unmapping.extend([0x48, 0xbe]); // movabs rsi, length
    unmapping.extend(area.bytes().to_le_bytes());
    jump(&mut unmapping, stub.plus(UNMAP_AT));
    let mut out = vec![0x48, 0xb8]; // movabs rax, shared
    out.extend(header.plus(offset::SHARED as u64).0.to_le_bytes());
    out.extend([0x83, 0x38, 0, 0x75, unmapping.len() as u8]); // cmp dword [rax], 0; jne behind
    out.extend(unmapping);
    let code = Span::new(area.start, code_bytes);
    let rest = Span::new(code.end, area.bytes() - code_bytes);
    for (span, protection) in [(code, READ_EXEC), (rest, READ_WRITE)] {
        out.extend([0x48, 0xbf]); // movabs rdi, start
        out.extend(span.start.0.to_le_bytes());
        out.extend([0x48, 0xbe]); // movabs rsi, length
        out.extend(span.bytes().to_le_bytes());
        out.extend([0xba, protection, 0, 0, 0]); // mov edx, protection
        out.extend([0xb8, 10, 0, 0, 0, 0x0f, 0x05]); // mov eax, 10 (mprotect); syscall
    }
    jump(&mut out, stub.plus(RESTORE_AT));
    out
}

/// Adds a jump to any address.
fn jump(out: &mut Vec<u8>, to: Addr) {
    out.extend([0xff, 0x25, 0, 0, 0, 0]); // jmp [rip]
    out.extend(to.0.to_le_bytes());
}

/// The code of a landing pad: restores the signal mask and returns to `home`. Its tracer stops the
/// thread at the entry of that call; without one it goes on by itself.
pub(crate) fn pad_code(home: u64, mask: u64) -> Vec<u8> {
    let mut out = PAD.to_vec();
    out.extend([0xbf, 2, 0, 0, 0]); // mov edi, 2 (SIG_SETMASK)
    data(&mut out, &[0x48, 0x8d, 0x35], MASK_AT); // lea rsi, [rip + mask]
    out.extend([0x31, 0xd2, 0x41, 0xba, 8, 0, 0, 0]); // xor edx, edx; mov r10d, 8
    out.extend([0x0f, 0x05, 0x4c, 0x89, 0xc8]); // syscall; mov rax, r9
    data(&mut out, &[0xff, 0x25], HOME_AT); // jmp [rip + home]
    assert!(out.len() <= DATA_AT, "{}", out.len());
    out.resize(DATA_AT, 0xcc);
    out.extend(mask.to_le_bytes());
    out.extend(home.to_le_bytes());
    out
}

/// Adds an instruction that ends with the address of `at`, where the pad has data.
fn data(out: &mut Vec<u8>, op: &[u8], at: usize) {
    out.extend(op);
    let next = out.len() + 4;
    out.extend(u32::try_from(at - next).expect("short").to_le_bytes());
}

/// The result of a function, of a thread that has arrived at the call of its landing pad.
pub(crate) fn result_on_pad(registers: &Registers) -> i64 {
    registers.r9.cast_signed()
}

/// Code that closes the descriptor whose number stands at `result`; a negative one is none.
pub(crate) fn closing(result: Addr) -> Vec<u8> {
    let mut out = vec![0x48, 0xb8]; // movabs rax, result
    out.extend(result.0.to_le_bytes());
    out.extend([0x8b, 0x38]); // mov edi, [rax]
    out.extend([0xb8, 3, 0, 0, 0]); // mov eax, 3 (close)
    out.extend([0x0f, 0x05]); // syscall
    out
}
