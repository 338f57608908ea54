//! What is x86-64's of resources: the extended state of threads, also in signal frames, sets of
//! instructions, and code for vDSOs. On another processor, this module is written anew.

pub mod frames;
pub mod instructions;
pub mod stubs;
pub mod xstate;

/// The processor that an ELF file's code is for.
pub const ELF_MACHINE: u64 = 62;

/// The same of its 32-bit code.
pub const ELF_MACHINE_32: u64 = 3;
