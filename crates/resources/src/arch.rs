//! What is x86-64's of resources: the extended state of threads, also in signal frames, sets of
//! instructions, and code for vDSOs. On another processor, this module is written anew.

pub mod frames;
pub mod instructions;
pub mod stubs;
pub mod xstate;

use object::elf::{EM_386, EM_X86_64, Machine};

/// The processor that an ELF file's code is for.
pub const ELF_MACHINE: Machine = EM_X86_64;

/// The same of its 32-bit code.
pub const ELF_MACHINE_32: Machine = EM_386;
