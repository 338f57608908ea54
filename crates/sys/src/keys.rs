//! The keyrings of threads: keyctl(2), keyrings(7).

use std::ffi::CStr;
use std::io::{self, Error};
use std::sync::OnceLock;

/// The session keyring of a thread, as far as it has one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Session {
    /// The default one of its user, or none, which is the same to who looks for keys.
    Default,
    /// Another one, by its serial number.
    Own(i32),
}

/// The calling thread's session keyring; none where the kernel has no keys. A child looks at it and
/// ends: the kernel gives one that has no session keyring its user's for good when it is asked.
///
/// # Errors
/// `EACCES` where the thread may not search it, `EKEYREVOKED` and `EKEYEXPIRED`; those of clone(2).
pub fn own_session() -> io::Result<Option<Session>> {
    /// A call and a half, and the C library's beginning of a child.
    const STACK_BYTES: usize = 64 << 10;
    let mut stack = vec![0u128; STACK_BYTES / size_of::<u128>()];
    let mut looked = Looked::default();
    let top = stack.as_mut_ptr_range().end.cast();
    // No signal tells of its end: whoever waits for other children is not disturbed.
    let flags = libc::CLONE_VM | libc::CLONE_VFORK;
    // SAFETY: the child has the stack, and this thread goes on when the child has ended, so it has
    // what the child writes for itself again.
    let child = unsafe { libc::clone(look, top, flags, (&raw mut looked).cast()) };
    if child < 0 {
        return Err(Error::last_os_error());
    }
    // SAFETY: the call writes no status. Who reaps all children may have come first.
    unsafe { libc::waitpid(child, std::ptr::null_mut(), libc::__WALL) };
    let told = |serial: i32| match serial {
        ..0 => Err(Error::from_raw_os_error(-serial)),
        serial => Ok(serial),
    };
    let serial = match told(looked.session) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => return Ok(None),
        serial => serial?,
    };
    Ok(Some(match told(looked.user_session)? == serial {
        true => Session::Default,
        false => Session::Own(serial),
    }))
}

/// The serial number of the default session keyring of the calling thread's user.
///
/// # Errors
/// Those of keyctl(2).
pub fn user_session() -> io::Result<i32> {
    match serial_of(USER_SESSION) {
        error @ ..0 => Err(Error::from_raw_os_error(-error)),
        serial => Ok(serial),
    }
}

/// Serial numbers of keyrings, or errors below 0.
#[derive(Default)]
struct Looked {
    session: i32,
    user_session: i32,
}

/// Looks at the keyrings of the calling task, which has the memory of who waits for it.
extern "C" fn look(looked: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the caller of clone(2) gives its own, and waits meanwhile.
    let looked = unsafe { &mut *looked.cast::<Looked>() };
    looked.session = serial_of(SESSION);
    looked.user_session = serial_of(USER_SESSION);
    0
}

/// `KEY_SPEC_SESSION_KEYRING`.
const SESSION: i32 = libc::KEY_SPEC_SESSION_KEYRING;
/// `KEY_SPEC_USER_SESSION_KEYRING`.
const USER_SESSION: i32 = libc::KEY_SPEC_USER_SESSION_KEYRING;

/// The serial number of a keyring of the calling task, which is not made; an error below 0.
fn serial_of(special: i32) -> i32 {
    const GET_KEYRING_ID: libc::c_long = 0;
    // SAFETY: the call takes numbers alone.
    let serial = unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, special, 0) };
    match serial {
        ..0 => -Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        serial => serial as i32,
    }
}

/// True if the kernel has keys; a process asks once.
#[must_use]
pub fn are_there() -> bool {
    const SET_REQKEY_KEYRING: libc::c_long = 14;
    const NO_CHANGE: libc::c_long = -1;
    static ARE_THERE: OnceLock<bool> = OnceLock::new();
    *ARE_THERE.get_or_init(|| {
        // SAFETY: the call takes numbers alone, and changes nothing.
        let told = unsafe { libc::syscall(libc::SYS_keyctl, SET_REQKEY_KEYRING, NO_CHANGE) };
        told >= 0 || Error::last_os_error().raw_os_error() != Some(libc::ENOSYS)
    })
}

/// Makes a key of type "user", or a keyring where there is no payload, in keyring `into`, and gives
/// its serial number. One of the same description there is changed.
///
/// # Errors
/// As add_key(2): `EDQUOT`, `EACCES`, `EINVAL`.
pub fn add(description: &CStr, payload: Option<&[u8]>, into: i32) -> io::Result<i32> {
    let kind = if payload.is_some() {
        c"user"
    } else {
        c"keyring"
    };
    let (at, len) = payload.map_or((std::ptr::null(), 0), |bytes| (bytes.as_ptr(), bytes.len()));
    let (kind, name) = (kind.as_ptr(), description.as_ptr());
    // SAFETY: the strings and the payload live for the call, which reads them.
    let serial = unsafe { libc::syscall(libc::SYS_add_key, kind, name, at, len, into) };
    match serial {
        ..0 => Err(Error::last_os_error()),
        serial => i32::try_from(serial).map_err(Error::other),
    }
}

/// Sets what a key's possessor, owner, group and others may do (`KEYCTL_SETPERM`).
///
/// # Errors
/// `EACCES`.
pub fn permit(serial: i32, permissions: u32) -> io::Result<()> {
    const SETPERM: libc::c_long = 5;
    // SAFETY: the call takes numbers alone.
    match unsafe { libc::syscall(libc::SYS_keyctl, SETPERM, serial, permissions) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Has a key expire in so many seconds (`KEYCTL_SET_TIMEOUT`).
///
/// # Errors
/// `EACCES`.
pub fn expire(serial: i32, in_s: u32) -> io::Result<()> {
    const SET_TIMEOUT: libc::c_long = 15;
    // SAFETY: the call takes numbers alone.
    match unsafe { libc::syscall(libc::SYS_keyctl, SET_TIMEOUT, serial, in_s) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// The keyring of this process, which is made where there is none, and which children do not
/// inherit.
pub const PROCESS_KEYRING: i32 = -2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_keyring_of_its_own_is_seen_by_the_thread_alone() {
        let Ok(Some(before)) = own_session() else {
            eprintln!("skipped: a kernel without keys");
            return;
        };
        let (joined, seen) =
            testkit::calls::in_new_session(|serial| (serial, own_session())).expect("a keyring");
        assert_eq!(seen.expect("a look"), Some(Session::Own(joined)));
        assert_eq!(own_session().expect("a look"), Some(before));
    }
}
