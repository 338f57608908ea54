//! The words exchanged with the blob: the operations of a script and the layout of its restore
//! area.
//!
//! A *script* is an array of [`Op`]s. The blob (crate `blob`) walks it inside a task: it makes the
//! system call, stores the result in place, and stops at the first failure. Everything that both
//! sides must agree on, byte for byte, stands here and nowhere else.
//!
//! ```
//! let op = abi::Op::call(39, [0; 6]); // getpid
//! assert_eq!(op.kind, abi::Kind::Call as u64);
//! ```
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

mod addr;
pub mod bits;
pub mod kernel;
pub mod spans;

pub use addr::{Addr, PAGE_BYTES, Span};

/// What the blob does with one [`Op`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Kind {
    /// The script ends: the thread counts itself in [`Header::parked`] and waits.
    End = 0,
    /// Makes the call and fails on an error.
    Call = 1,
    /// Makes the call and goes on whatever it returns.
    Try = 2,
    /// Makes the call (`clone3`); the child goes on at [`Op::extra`], the parent with the next op.
    Spawn = 3,
    /// Waits until the 32-bit word at `args[0]` is at least `args[1]`.
    Await = 4,
    /// Makes the call and fails unless it returns [`Op::extra`].
    Expect = 5,
    /// Makes the call as 32-bit code would, with up to five arguments, and fails on an error.
    Compat = 6,
}

/// One operation: 80 bytes, the same layout in Rust and in the blob's assembly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Op {
    /// A [`Kind`].
    pub kind: u64,
    /// The system call's number.
    pub number: u64,
    /// The system call's arguments, in the order of its man page.
    pub args: [u64; 6],
    /// What the call returned (negative errno on failure); [`Op::UNSET`] before it was made.
    pub result: i64,
    /// The address of the child's script ([`Kind::Spawn`]) or the result wanted
    /// ([`Kind::Expect`]).
    pub extra: u64,
}

impl Op {
    /// The result of an op that was not reached.
    pub const UNSET: i64 = i64::MIN;
    /// The size of an op in bytes.
    pub const BYTES: usize = size_of::<Op>();

    /// An op that makes a system call and fails on an error.
    #[must_use]
    pub const fn call(number: u64, args: [u64; 6]) -> Self {
        Self {
            kind: Kind::Call as u64,
            number,
            args,
            result: Self::UNSET,
            extra: 0,
        }
    }

    /// The same op with another kind and extra word.
    #[must_use]
    pub const fn with(mut self, kind: Kind, extra: u64) -> Self {
        self.kind = kind as u64;
        self.extra = extra;
        self
    }

    /// The op that ends a script.
    #[must_use]
    pub const fn end() -> Self {
        Self::call(0, [0; 6]).with(Kind::End, 0)
    }

    /// The bytes as the blob reads them.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut put = |slot: usize, word: u64| {
            out[slot * 8..slot * 8 + 8].copy_from_slice(&word.to_le_bytes());
        };
        put(0, self.kind);
        put(1, self.number);
        for (index, arg) in self.args.iter().enumerate() {
            put(2 + index, *arg);
        }
        put(8, self.result.cast_unsigned());
        put(9, self.extra);
        out
    }
}

/// What a blob thread and its tracer share besides the ops; at the start of a restore area's data.
///
/// All waiting is done with futex calls on these words (shared, not private: the waiters are in
/// several processes).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Header {
    /// How many threads have reached the end of their script.
    pub parked: u32,
    /// Set to 1 by the first failing thread, after `failed` was written.
    pub failing: u32,
    /// The address of the op that failed.
    pub failed: u64,
    /// Where a parked thread goes when its tracer has ended: 0 for nowhere, it waits for ever.
    pub resume: u64,
    /// Never written: threads that wait for ever wait on it.
    pub hold: u32,
    /// A lock of futex(2) that the tracer's thread holds: its number. A parked thread waits for it,
    /// and the kernel hands it over when the tracer ends, at once and not before.
    pub owner: u32,
    /// Not 0: a thread that fails ends its process instead of parking.
    pub fatal: u64,
    /// Not 0: other threads of the process may be in the blob.
    pub shared: u32,
    /// Nothing: keeps the size a multiple of 8 bytes.
    pub unused: u32,
}

impl Header {
    /// The size of the header in bytes.
    pub const BYTES: usize = size_of::<Header>();

    /// The bytes as the blob reads them.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[0..4].copy_from_slice(&self.parked.to_le_bytes());
        out[4..8].copy_from_slice(&self.failing.to_le_bytes());
        out[8..16].copy_from_slice(&self.failed.to_le_bytes());
        out[16..24].copy_from_slice(&self.resume.to_le_bytes());
        out[24..28].copy_from_slice(&self.hold.to_le_bytes());
        out[28..32].copy_from_slice(&self.owner.to_le_bytes());
        out[32..40].copy_from_slice(&self.fatal.to_le_bytes());
        out[40..44].copy_from_slice(&self.shared.to_le_bytes());
        out
    }
}

/// Offsets that the blob's assembly uses.
pub mod offset {
    use core::mem::offset_of;

    use super::{Header, Op};

    /// Of [`Op::number`].
    pub const NUMBER: usize = offset_of!(Op, number);
    /// Of [`Op::args`].
    pub const ARGS: usize = offset_of!(Op, args);
    /// Of [`Op::result`].
    pub const RESULT: usize = offset_of!(Op, result);
    /// Of [`Op::extra`].
    pub const EXTRA: usize = offset_of!(Op, extra);
    /// Of [`Header::parked`].
    pub const PARKED: usize = offset_of!(Header, parked);
    /// Of [`Header::failing`].
    pub const FAILING: usize = offset_of!(Header, failing);
    /// Of [`Header::failed`].
    pub const FAILED: usize = offset_of!(Header, failed);
    /// Of [`Header::resume`].
    pub const RESUME: usize = offset_of!(Header, resume);
    /// Of [`Header::hold`].
    pub const HOLD: usize = offset_of!(Header, hold);
    /// Of [`Header::owner`].
    pub const OWNER: usize = offset_of!(Header, owner);
    /// Of [`Header::shared`].
    pub const SHARED: usize = offset_of!(Header, shared);
    /// Of [`Header::fatal`].
    pub const FATAL: usize = offset_of!(Header, fatal);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn op_bytes_stand_where_the_blob_looks() {
        let op = Op::call(9, [1, 2, 3, 4, 5, 6]).with(Kind::Expect, 7);
        let bytes = op.to_bytes();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        assert_eq!(word(0), Kind::Expect as u64);
        assert_eq!(word(offset::NUMBER), 9);
        assert_eq!(word(offset::ARGS + 40), 6);
        assert_eq!(word(offset::RESULT), Op::UNSET.cast_unsigned());
        assert_eq!(word(offset::EXTRA), 7);
    }
}
