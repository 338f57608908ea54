//! Code that is written while it may be run, as just-in-time compilers do, and giving that up.
use std::io::Result;

use rustix::mm::{MapFlags, ProtFlags};

use super::{Mapping, check};

/// A function in memory that may be written and run.
#[derive(Debug)]
pub struct WrittenCode(Mapping);

impl WrittenCode {
    /// Maps memory for it.
    ///
    /// # Errors
    /// As mmap(2): `EACCES` after [`deny_write_exec`].
    pub fn map() -> Result<Self> {
        let all = ProtFlags::READ | ProtFlags::WRITE | ProtFlags::EXEC;
        Mapping::anonymous(4096, all, MapFlags::PRIVATE).map(Self)
    }

    /// Writes a function that returns `value`, and gives what it returns.
    #[must_use]
    pub fn returned(&self, value: u32) -> u32 {
        // mov eax, value; ret
        let mut code = [0xb8, 0, 0, 0, 0, 0xc3, 0xcc, 0xcc];
        code[1..5].copy_from_slice(&value.to_le_bytes());
        self.0.store(0, u64::from_le_bytes(code));
        let start = self.0.address() as *const ();
        // SAFETY: the mapping may be run, and starts with this function.
        let function = unsafe { std::mem::transmute::<*const (), extern "C" fn() -> u32>(start) };
        function()
    }
}

/// From now on, no memory of the process becomes executable that it could write (`PR_SET_MDWE`);
/// with `inherit`, nor of its children. prctl(2).
///
/// # Errors
/// `EINVAL` where the kernel cannot do that (before Linux 6.3; without `inherit`, 6.6).
pub fn deny_write_exec(inherit: bool) -> Result<()> {
    let mut bits = u64::from(libc::PR_MDWE_REFUSE_EXEC_GAIN);
    if !inherit {
        bits |= u64::from(libc::PR_MDWE_NO_INHERIT);
    }
    // SAFETY: it touches no memory.
    check(unsafe { libc::prctl(libc::PR_SET_MDWE, bits, 0u64, 0u64, 0u64) }.into())?;
    Ok(())
}
