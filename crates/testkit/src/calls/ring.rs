//! Calls on rings of io_uring(7) that no restore makes.

use std::io::Result;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::AtomicU8;

use super::check;

/// Opens an io_uring. io_uring_setup(2).
///
/// # Errors
/// As io_uring_setup(2).
pub fn io_uring() -> Result<OwnedFd> {
    // The kernel's `io_uring_params`, all zeros.
    let mut params = [0_u64; 15];
    let params = params.as_mut_ptr();
    // SAFETY: 120 zeroed bytes are valid parameters, live for the call.
    let fd = check(unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, params) })?;
    // SAFETY: the kernel just returned this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// As [`sys::ring::submit`], to a ring that this thread has registered under a number.
///
/// # Errors
/// The call's errno.
pub fn submit_by_number(number: u32, count: u32) -> Result<u32> {
    const REGISTERED_RING: u32 = 1 << 4;
    let (call, none) = (libc::SYS_io_uring_enter, ptr::null::<libc::c_void>());
    // SAFETY: no arguments are passed; the writer of the entries vouches for their operations.
    let done = unsafe { libc::syscall(call, number, count, 0, REGISTERED_RING, none, 0) };
    check(done).map(|done| done as u32)
}

/// Registers memory as buffers.
///
/// # Errors
/// The call's errno.
pub fn register_buffers(ring: BorrowedFd<'_>, buffers: &[&[AtomicU8]]) -> Result<()> {
    const BUFFERS: u32 = 0;
    let iovec = |buffer: &&[AtomicU8]| [buffer.as_ptr() as u64, buffer.len() as u64];
    let iovecs = buffers.iter().map(iovec).collect::<Vec<_>>();
    register(ring, BUFFERS, iovecs.as_ptr().cast(), iovecs.len() as u32)
}

/// Gives a ring a number for this thread.
///
/// # Errors
/// The call's errno.
pub fn register_number(ring: BorrowedFd<'_>, number: u32) -> Result<()> {
    let fd = u64::from(ring.as_raw_fd().cast_unsigned());
    let mut update = [u64::from(number), fd];
    let pointer = update.as_mut_ptr();
    register(ring, sys::ring::register::RING_FDS, pointer.cast(), 1)
}

/// Registers this thread's credentials, under a number that nobody asks for.
///
/// # Errors
/// The call's errno.
pub fn register_personality(ring: BorrowedFd<'_>) -> Result<()> {
    const PERSONALITY: u32 = 9;
    register(ring, PERSONALITY, ptr::null(), 0)
}

fn register(
    ring: BorrowedFd<'_>,
    operation: u32,
    argument: *const libc::c_void,
    count: u32,
) -> Result<()> {
    let (call, fd) = (libc::SYS_io_uring_register, ring.as_raw_fd());
    // SAFETY: the callers' arguments have the operation's form and live for the call.
    check(unsafe { libc::syscall(call, fd, operation, argument, count) }).map(drop)
}
