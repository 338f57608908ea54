//! Attributes of the calling thread and its process that prctl(2) and its kin set.
use std::io::{Error, ErrorKind, Result};
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicU32};

use super::check;

/// The options of prctl(2) that take and return numbers alone.
const OF_NUMBERS: [i32; 27] = [
    1, 3, 4, 7, 8, 23, 24, 26, 27, 28, 29, 30, 33, 34, 38, 39, 41, 42, 47, 52, 53, 57, 58, 66, 67,
    68, 78,
];
/// `PR_GET_PDEATHSIG`, `PR_GET_TSC`, `PR_GET_CHILD_SUBREAPER`, `PR_GET_TID_ADDRESS`: the kernel
/// writes what it is asked for.
const WRITTEN: [i32; 4] = [2, 25, 37, 40];
const SET_MDWE: i32 = 65;

/// Calls prctl(2) with an option that takes numbers alone.
///
/// # Errors
/// As prctl(2); `InvalidInput` for an option that takes anything else.
pub fn set_number(option: i32, arguments: [u64; 4]) -> Result<u64> {
    if !OF_NUMBERS.contains(&option) && option != SET_MDWE {
        return Err(ErrorKind::InvalidInput.into());
    }
    let [one, two, three, four] = arguments;
    // SAFETY: these options touch no memory of the caller's.
    let got = unsafe { libc::prctl(option, one, two, three, four) };
    check(got.into()).map(i64::cast_unsigned)
}

/// Reads an attribute that prctl(2) writes to a place.
///
/// # Errors
/// As prctl(2); `InvalidInput` for another option.
pub fn written(option: i32) -> Result<u64> {
    if !WRITTEN.contains(&option) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let mut place = 0_u64;
    let at = &raw mut place;
    // SAFETY: the kernel writes up to 8 bytes, for which there is room.
    check(unsafe { libc::prctl(option, at, 0_u64, 0_u64, 0_u64) }.into())?;
    Ok(place)
}

/// The marks of memory that [`set_mark`] sets, as `PR_SET_MM_START_CODE`, with the numbers of their
/// fields in proc_pid_stat(5).
pub const MARKS: [(u64, usize); 9] = [
    (1, 26),
    (2, 27),
    (3, 45),
    (4, 46),
    (5, 28),
    (8, 48),
    (9, 49),
    (10, 50),
    (11, 51),
];

/// Sets a mark of memory, one of [`MARKS`], by which nothing but /proc goes. `PR_SET_MM`.
///
/// # Errors
/// As prctl(2); `InvalidInput` for another mark.
pub fn set_mark(mark: u64, address: u64) -> Result<()> {
    if !MARKS.iter().any(|(known, _)| *known == mark) {
        return Err(ErrorKind::InvalidInput.into());
    }
    // SAFETY: the kernel notes the address, and reads what is there for who reads /proc.
    check(unsafe { libc::prctl(libc::PR_SET_MM, mark, address, 0_u64, 0_u64) }.into()).map(drop)
}

/// Has the kernel know another auxiliary vector, of 64-bit words. `PR_SET_MM_AUXV`.
///
/// # Errors
/// As prctl(2).
pub fn set_auxiliary_vector(words: &[u64]) -> Result<()> {
    const AUXV: u64 = 12;
    let (at, bytes) = (words.as_ptr(), size_of_val(words));
    // SAFETY: the kernel copies what is there.
    check(unsafe { libc::prctl(libc::PR_SET_MM, AUXV, at, bytes, 0_u64) }.into()).map(drop)
}

/// Has all calls made, but asked for at a byte that says so for ever: of the code at `offset` alone
/// where `is_inclusive`, otherwise of all but that. `PR_SET_SYSCALL_USER_DISPATCH`.
///
/// # Errors
/// As prctl(2).
pub fn dispatch_calls(is_inclusive: bool, offset: u64, len: u64) -> Result<()> {
    /// `SYSCALL_DISPATCH_FILTER_ALLOW`
    static ALLOW: AtomicU8 = AtomicU8::new(0);
    const SET_SYSCALL_USER_DISPATCH: i32 = 59;
    let mode = 1 + u64::from(is_inclusive);
    let selector = ALLOW.as_ptr();
    // SAFETY: the byte stays for ever, and is never anything but zero: all calls are made.
    let got = unsafe { libc::prctl(SET_SYSCALL_USER_DISPATCH, mode, offset, len, selector) };
    check(got.into()).map(drop)
}

/// Sets the thread's execution domain and flags. personality(2).
///
/// # Errors
/// As personality(2).
pub fn set_personality(flags: u32) -> Result<()> {
    // SAFETY: the call touches no memory.
    check(unsafe { libc::personality(flags.into()) }.into()).map(drop)
}

/// Sets the thread's `struct sched_attr`. sched_setattr(2).
///
/// # Errors
/// As sched_setattr(2).
pub fn set_scheduling(attributes: &[u8; sys::own::SCHED_ATTR_BYTES]) -> Result<()> {
    let at = attributes.as_ptr();
    // SAFETY: it is read, and all of it is there.
    check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, at, 0) }).map(drop)
}

/// Sets the thread's memory policy, with a mask of up to 64 nodes. set_mempolicy(2).
///
/// # Errors
/// As set_mempolicy(2).
pub fn set_memory_policy(mode: i32, nodes: u64) -> Result<()> {
    let at = &raw const nodes;
    let (at, bits) = match nodes {
        0 => (ptr::null(), 0_u64),
        _ => (at, 65),
    };
    // SAFETY: the kernel reads 64 bits, or none.
    check(unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, at, bits) }).map(drop)
}

/// The thread's memory policy and its first 64 nodes. get_mempolicy(2).
///
/// # Errors
/// As get_mempolicy(2).
pub fn memory_policy() -> Result<(i32, u64)> {
    const BITS: u64 = 1024;
    let (mut mode, mut nodes) = (0, [0_u64; BITS as usize / 64]);
    let (at, nodes_at) = (&raw mut mode, nodes.as_mut_ptr());
    // SAFETY: there is room for a number, and for as many bits as are said.
    let got = unsafe { libc::syscall(libc::SYS_get_mempolicy, at, nodes_at, BITS, 0_u64, 0_u64) };
    check(got)?;
    Ok((mode, nodes[0]))
}

/// Has the kernel clear a word of the thread's own at its end, which stays for ever; its address.
/// set_tid_address(2).
pub fn clear_another_word() -> u64 {
    let word: &'static AtomicU32 = Box::leak(Box::default());
    // SAFETY: the word is only ever touched atomically, and is never given back.
    unsafe { libc::syscall(libc::SYS_set_tid_address, word.as_ptr()) };
    word.as_ptr().expose_provenance() as u64
}

/// The head of the thread's list of robust futexes, and its length. get_robust_list(2).
///
/// # Errors
/// As get_robust_list(2).
pub fn robust_list() -> Result<(u64, u64)> {
    let (mut head, mut bytes) = (0_u64, 0_u64);
    let (head_at, bytes_at) = (&raw mut head, &raw mut bytes);
    // SAFETY: the kernel writes two words.
    check(unsafe { libc::syscall(libc::SYS_get_robust_list, 0, head_at, bytes_at) })?;
    Ok((head, bytes))
}

/// Gives the thread an empty list of robust futexes that stays for ever; its address.
/// set_robust_list(2).
///
/// # Errors
/// As set_robust_list(2).
pub fn another_robust_list() -> Result<u64> {
    let head: &'static mut [u64; 3] = Box::leak(Box::new([0; 3]));
    let at = head.as_mut_ptr();
    // An empty list leads to itself.
    head[0] = at.expose_provenance() as u64;
    // SAFETY: an empty list, which nobody changes and which is never given back.
    check(unsafe { libc::syscall(libc::SYS_set_robust_list, at, size_of::<[u64; 3]>()) })?;
    Ok(at.addr() as u64)
}

/// Registers the process for a command of membarrier(2), or asks what it is registered for.
///
/// # Errors
/// As membarrier(2).
pub fn membarrier(command: i32) -> Result<u64> {
    // SAFETY: the call touches no memory.
    check(unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }).map(i64::cast_unsigned)
}

/// As whom the thread uses files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileId {
    /// setfsuid(2).
    User,
    /// setfsgid(2).
    Group,
}

/// Sets as whom the thread uses files.
///
/// # Errors
/// `PermissionDenied` where it may not.
pub fn set_file_id(which: FileId, id: u32) -> Result<()> {
    let call = match which {
        FileId::User => libc::SYS_setfsuid,
        FileId::Group => libc::SYS_setfsgid,
    };
    // SAFETY: the call touches no memory.
    unsafe { libc::syscall(call, id) };
    // SAFETY: so does this one, which answers what it was.
    let now = unsafe { libc::syscall(call, -1) };
    match now == i64::from(id) {
        true => Ok(()),
        false => Err(ErrorKind::PermissionDenied.into()),
    }
}

/// Tells whether the thread may use the cpuid instruction: `ARCH_GET_CPUID`, arch_prctl(2).
///
/// # Errors
/// As arch_prctl(2).
pub fn may_use_cpuid() -> Result<bool> {
    const ARCH_GET_CPUID: u64 = 0x1011;
    // SAFETY: the call touches no memory.
    let got = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_GET_CPUID, 0_u64) };
    check(got).map(|may| may != 0)
}

/// Has the thread use the cpuid instruction, or be ended for it: `ARCH_SET_CPUID`, arch_prctl(2).
///
/// # Errors
/// `ENODEV` where the processor cannot forbid it.
pub fn allow_cpuid(may: bool) -> Result<()> {
    const ARCH_SET_CPUID: u64 = 0x1012;
    let may = u64::from(may);
    // SAFETY: the call touches no memory.
    check(unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_CPUID, may) }).map(drop)
}

/// What the thread does at a signal, as the kernel has it. rt_sigaction(2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Action {
    /// 0 for what is done by default, 1 for nothing, or the handler's address.
    pub handler: u64,
    /// As `SA_RESTART`.
    pub flags: u64,
    /// Where a handler returns to.
    pub restorer: u64,
    /// The signals that are blocked meanwhile.
    pub mask: u64,
}

const SET_BYTES: usize = 8;

/// What is done at `signal`.
///
/// # Errors
/// As rt_sigaction(2).
pub fn action(signal: i32) -> Result<Action> {
    let mut action = Action::default();
    let (none, at) = (ptr::null::<Action>(), &raw mut action);
    // SAFETY: the kernel writes as much as there is room for.
    check(unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, none, at, SET_BYTES) })?;
    Ok(action)
}

/// Changes the flags and the mask of what is done at `signal`, which is counted where it is handled
/// (see [`super::count_signal`]), ignored, or done by default.
///
/// # Errors
/// As rt_sigaction(2).
pub fn change_action(signal: i32, disposition: Disposition, flags: u64, mask: u64) -> Result<()> {
    /// `SA_RESTORER`: without it a handler cannot return.
    const RESTORER: u64 = 0x0400_0000;
    // The C library knows where handlers return to.
    super::count_signal(signal, 0)?;
    let counted = action(signal)?;
    let handler = match disposition {
        Disposition::Default => 0,
        Disposition::Ignored => 1,
        Disposition::Counted => counted.handler,
    };
    let action = Action {
        handler,
        flags: flags | RESTORER | u64::from(libc::SA_SIGINFO.cast_unsigned()),
        mask,
        ..counted
    };
    let (at, none) = (&raw const action, ptr::null::<Action>());
    // SAFETY: the handler only stores into atomics, and returns as the C library has it.
    check(unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, at, none, SET_BYTES) }).map(drop)
}

/// How a signal is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// `SIG_DFL`.
    Default,
    /// `SIG_IGN`.
    Ignored,
    /// By a handler that counts.
    Counted,
}

/// Sets which signals the thread blocks, and answers which it did. rt_sigprocmask(2).
///
/// # Errors
/// As rt_sigprocmask(2).
pub fn swap_mask(mask: Option<u64>) -> Result<u64> {
    let new = mask.unwrap_or_default();
    let mut before = 0_u64;
    let new = match mask {
        Some(_) => &raw const new,
        None => ptr::null(),
    };
    let (how, at) = (libc::SIG_SETMASK, &raw mut before);
    // SAFETY: 8 bytes are read, if any, and 8 are written.
    check(unsafe { libc::syscall(libc::SYS_rt_sigprocmask, how, new, at, SET_BYTES) })?;
    Ok(before)
}

/// Gives the thread an alternate stack of its own that stays for ever, with flags such as
/// `SS_AUTODISARM`; without `bytes`, none. sigaltstack(2).
///
/// # Errors
/// As sigaltstack(2).
pub fn change_alternate_stack(bytes: usize, flags: i32) -> Result<()> {
    let memory = Box::leak(vec![0_u8; bytes].into_boxed_slice());
    let disabled = if bytes == 0 { libc::SS_DISABLE } else { 0 };
    let stack = libc::stack_t {
        ss_sp: memory.as_mut_ptr().cast(),
        ss_flags: flags | disabled,
        ss_size: bytes,
    };
    // SAFETY: the memory was leaked: it is this stack's for ever.
    check(unsafe { libc::sigaltstack(&raw const stack, ptr::null_mut()) }.into()).map(drop)
}

/// Sends `signal` to the process by kill(2), or to its thread `tid` by tgkill(2).
///
/// # Errors
/// As those.
pub fn send_signal(tid: Option<u32>, signal: i32) -> Result<()> {
    let pid = std::process::id();
    let sent = match tid {
        // SAFETY: the call touches no memory.
        Some(tid) => unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal) },
        // SAFETY: likewise.
        None => unsafe { libc::syscall(libc::SYS_kill, pid, signal) },
    };
    if sent == -1 {
        return Err(Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_take_addresses_are_refused() {
        // PR_SET_NAME, PR_SET_MM, PR_SET_SECCOMP.
        for option in [15, 35, 22] {
            let error = set_number(option, [0; 4]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
        assert!(set_mark(7, 0).is_err(), "the heap's end");
    }

    #[test]
    fn attributes_are_read_back() {
        let (told, hears) = std::sync::mpsc::channel();
        // Nobody could join it: the C library waits for the word that is cleared no more.
        std::thread::spawn(move || {
            set_number(libc::PR_SET_PDEATHSIG, [12, 0, 0, 0]).unwrap();
            let list = another_robust_list().unwrap();
            swap_mask(Some(1 << 11)).unwrap();
            let word = clear_another_word();
            let read = (
                written(libc::PR_GET_PDEATHSIG).unwrap() == 12,
                written(40).unwrap() == word,
                robust_list().unwrap() == (list, 24),
                swap_mask(None).unwrap() == 1 << 11,
            );
            told.send(read).unwrap();
        });
        assert_eq!(hears.recv().unwrap(), (true, true, true, true));
    }

    #[test]
    fn actions_are_read_back() {
        let signal = libc::SIGRTMIN() + 9;
        let flags = (libc::SA_RESTART | libc::SA_NODEFER).cast_unsigned().into();
        change_action(signal, Disposition::Counted, flags, 1 << 40).unwrap();
        let now = action(signal).unwrap();
        assert_eq!((now.mask, now.flags & flags), (1 << 40, flags));
        send_signal(None, signal).unwrap();
        let counted = || super::super::counted(signal).count;
        while counted() == 0 {
            std::thread::yield_now();
        }
        change_action(signal, Disposition::Ignored, 0, 0).unwrap();
        assert_eq!(action(signal).unwrap().handler, 1);
    }
}
