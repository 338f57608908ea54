//! Constants of the kernel that several crates use and neither `libc` nor `linux_raw_sys` has.

/// The request for sockets of a family (linux/sock_diag.h).
pub const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// The operation of arch_prctl(2) that maps the vDSO of 32-bit code (asm/prctl.h).
pub const ARCH_MAP_VDSO_32: u32 = 0x2002;
/// The same of 64-bit code.
pub const ARCH_MAP_VDSO_64: u32 = 0x2003;
/// The result of a call that goes on by restart_syscall(2) (linux/errno.h).
pub const ERESTART_RESTARTBLOCK: i64 = -516;
/// Compares the memory of two tasks (linux/kcmp.h).
pub const KCMP_VM: i32 = 1;
/// Compares a file with one that an epoll watches (linux/kcmp.h).
pub const KCMP_EPOLL_TFD: i32 = 7;
/// Opens the file that a socket is bound to (linux/un.h).
pub const SIOCUNIXFILE: u64 = 0x89e0;
