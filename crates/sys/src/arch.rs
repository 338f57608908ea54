//! What is x86-64's: registers, and how a thread makes a call. On another processor, this module
//! and those of its name in other crates are written anew.

pub mod xsave;

use abi::Addr;

/// The tag of extended state in requests of ptrace(2).
pub(crate) const NT_XSTATE: usize = 0x202;

/// The instruction that makes a system call.
pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

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

    /// What can be told of a thread that runs 32-bit code, whose registers were put here: 17 words
    /// of 32 bits, two of which stand in one of these.
    pub(crate) fn of_32_bit_code(self) -> Self {
        const CS: usize = 13;
        Self {
            cs: self.to_words()[CS / 2] >> 32,
            ..Self::default()
        }
    }

    /// The kind of code that the thread runs: 64-bit, 32-bit, or that of another segment.
    ///
    /// # Errors
    /// What it is instead of 64-bit code.
    pub fn check_code(&self) -> Result<(), String> {
        match self.cs {
            0x33 => Ok(()),
            0x23 => Err("32-bit code".to_owned()),
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
        match self.orig_rax.cast_signed() {
            ..0 => None,
            _ => Some(self.orig_rax),
        }
    }

    /// The arguments of the call that it is in.
    #[must_use]
    pub const fn args(&self) -> [u64; 6] {
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9]
    }

    /// What the call returns, as far as it is known.
    #[must_use]
    pub const fn result(&self) -> i64 {
        self.rax.cast_signed()
    }

    /// Has the call that it is in return this.
    pub const fn end_call(&mut self, result: i64) {
        self.rax = result.cast_unsigned();
        self.orig_rax = u64::MAX;
    }

    /// Where the instruction stands that has made the call that it is in.
    #[must_use]
    pub const fn call_at(&self) -> Addr {
        Addr(self.rip.wrapping_sub(SYSCALL.len() as u64))
    }

    /// Has it make a call with the instruction at `at`.
    pub const fn make_call(&mut self, at: Addr, number: u64, args: [u64; 6]) {
        self.rip = at.0;
        self.rax = number;
        self.orig_rax = u64::MAX;
        [self.rdi, self.rsi, self.rdx, self.r10, self.r8, self.r9] = args;
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
