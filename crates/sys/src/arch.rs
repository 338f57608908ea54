//! What is x86-64's: registers, and how a thread makes a call. On another processor, this module
//! and those of its name in other crates are written anew.

pub mod xsave;

use abi::Addr;

/// The tag of extended state in requests of ptrace(2).
pub(crate) const NT_XSTATE: usize = 0x202;

/// The instruction that makes a system call.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// The instruction by which 32-bit code makes a system call, and 64-bit code one of 32 bits.
pub const INT_80: [u8; 2] = [0xcd, 0x80];

/// The code segments of 64-bit and of 32-bit code, and the stack segment of both.
pub const CODE_64: u64 = 0x33;
/// See [`CODE_64`].
pub const CODE_32: u64 = 0x23;
const STACK_SEGMENT: u64 = 0x2b;

/// The number of the return address among the registers of unwind tables.
pub const RETURN_ADDRESS: u16 = 16;

/// The general registers of a stopped thread, as `user_regs_struct` has them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
#[allow(missing_docs, reason = "the names are the processor's")]
pub struct Registers {
    pub r15: u64,
    pub r14: u64,
    pub r13: u64,
    pub r12: u64,
    pub rbp: u64,
    pub rbx: u64,
    pub r11: u64,
    pub r10: u64,
    pub r9: u64,
    pub r8: u64,
    pub rax: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    /// The number of the system call that the thread is in, or -1.
    pub orig_rax: u64,
    pub rip: u64,
    pub cs: u64,
    pub eflags: u64,
    pub rsp: u64,
    pub ss: u64,
    pub fs_base: u64,
    pub gs_base: u64,
    pub ds: u64,
    pub es: u64,
    pub fs: u64,
    pub gs: u64,
}

impl Registers {
    /// The size of the register set in bytes.
    pub const BYTES: usize = size_of::<Self>();

    /// The registers in the order of `user_regs_struct`.
    #[must_use]
    pub fn to_words(self) -> [u64; 27] {
        // SAFETY: the struct is repr(C) and consists of 27 u64 without padding.
        unsafe { std::mem::transmute(self) }
    }

    /// The inverse of [`Registers::to_words`].
    #[must_use]
    pub fn from_words(words: [u64; 27]) -> Self {
        // SAFETY: the struct is repr(C) and consists of 27 u64 without padding.
        unsafe { std::mem::transmute(words) }
    }

    /// Whether the thread runs 32-bit code.
    #[must_use]
    pub const fn is_32_bit(&self) -> bool {
        self.cs == CODE_32
    }

    /// Has a 32-bit thread's error stand in all of the register, as the kernel's own have it and as
    /// it looks for them where none of its calls is known to have been one of 32 bits.
    pub(crate) const fn extend_result(&mut self) {
        if self.is_32_bit() && self.call().is_some() && self.result() < 0 {
            self.rax = self.result().cast_unsigned();
        }
    }

    /// Checks that the thread runs code that the kernel gives to programs by itself.
    ///
    /// # Errors
    /// What it is instead.
    pub fn check_code(&self) -> Result<(), String> {
        let is_local = |selector: u64| selector & 4 != 0;
        let all = [self.cs, self.ss, self.ds, self.es, self.fs, self.gs];
        match self.cs {
            CODE_64 | CODE_32 if !all.into_iter().any(is_local) => Ok(()),
            CODE_64 | CODE_32 => Err("a segment of its own (modify_ldt)".to_owned()),
            other => Err(format!("code segment {other:#x}")),
        }
    }

    /// Where the thread goes on.
    #[must_use]
    pub const fn at(&self) -> Addr {
        Addr(self.rip)
    }

    /// Has it go on elsewhere.
    pub const fn go_to(&mut self, at: Addr) {
        self.rip = at.0;
    }

    /// The flags of a program that code of ours must not run with: the trap flag stops after each
    /// instruction, and the alignment check at words that are not aligned.
    pub const OWN_FLAGS: u64 = 1 << 8 | 1 << 18;

    /// Has it go on in 64-bit code of ours.
    pub const fn enter(&mut self, at: Addr) {
        self.rip = at.0;
        self.eflags &= !Self::OWN_FLAGS;
        (self.cs, self.ss) = (CODE_64, STACK_SEGMENT);
    }

    /// Has the kernel not go on with the call that it is in.
    pub const fn abandon_call(&mut self) {
        self.orig_rax = u64::MAX;
    }

    /// The top of its stack.
    #[must_use]
    pub const fn stack(&self) -> Addr {
        Addr(self.rsp)
    }

    /// The number of the call that it is in; none outside of one.
    #[must_use]
    pub const fn call(&self) -> Option<u64> {
        let number = match self.is_32_bit() {
            true => low(self.orig_rax) as i64,
            false => self.orig_rax.cast_signed(),
        };
        match number {
            ..0 => None,
            _ => Some(number.cast_unsigned()),
        }
    }

    /// The arguments of the call that it is in.
    #[must_use]
    pub const fn args(&self) -> [u64; 6] {
        const LOW: u64 = 0xffff_ffff;
        match self.is_32_bit() {
            false => [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9],
            true => [
                self.rbx & LOW,
                self.rcx & LOW,
                self.rdx & LOW,
                self.rsi & LOW,
                self.rdi & LOW,
                self.rbp & LOW,
            ],
        }
    }

    /// What the call returns, as far as it is known.
    #[must_use]
    pub const fn result(&self) -> i64 {
        match self.is_32_bit() {
            true => low(self.rax) as i64,
            false => self.rax.cast_signed(),
        }
    }

    /// Has the call that it is in return this.
    pub const fn end_call(&mut self, result: i64) {
        self.rax = result.cast_unsigned();
        self.orig_rax = u64::MAX;
    }

    /// Where the instruction stands that has made the call that it is in, or one that makes it
    /// again: where 32-bit code has called by another one, the kernel's vDSO has [`INT_80`] there.
    #[must_use]
    pub const fn call_at(&self) -> Addr {
        Addr(self.rip.wrapping_sub(SYSCALL.len() as u64))
    }

    /// Has it make a call of its own kind of code with the instruction at `at`.
    pub const fn make_call(&mut self, at: Addr, number: u64, args: [u64; 6]) {
        match self.is_32_bit() {
            false => self.call_64(at, number, args),
            true => self.call_32(at, number, args),
        }
    }

    /// Has it make a call as 64-bit code, with the [`SYSCALL`] at `at`.
    pub const fn make_call_64(&mut self, at: Addr, number: u64, args: [u64; 6]) {
        self.enter(at);
        self.call_64(at, number, args);
    }

    /// Has it make a call of 32 bits out of 64-bit code, with the [`INT_80`] at `at`.
    pub const fn make_call_32(&mut self, at: Addr, number: u64, args: [u64; 6]) {
        self.enter(at);
        self.call_32(at, number, args);
    }

    const fn call_64(&mut self, at: Addr, number: u64, args: [u64; 6]) {
        (self.rip, self.rax, self.orig_rax) = (at.0, number, u64::MAX);
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9] = args;
    }

    const fn call_32(&mut self, at: Addr, number: u64, args: [u64; 6]) {
        (self.rip, self.rax, self.orig_rax) = (at.0, number, u64::MAX);
        [self.rbx, self.rcx, self.rdx, self.rsi, self.rdi, self.rbp] = args;
    }

    /// The value of a register by its number in unwind tables, of those that a vDSO's function
    /// keeps or that tell where its stack is.
    #[must_use]
    pub const fn kept(&self, number: u16) -> Option<u64> {
        Some(match number {
            3 => self.rbx,
            6 => self.rbp,
            7 => self.rsp,
            10 => self.r10,
            12 => self.r12,
            13 => self.r13,
            14 => self.r14,
            15 => self.r15,
            _ => return None,
        })
    }
}

/// The lower half of a register, as a number with a sign.
const fn low(register: u64) -> i32 {
    (register as u32).cast_signed()
}
