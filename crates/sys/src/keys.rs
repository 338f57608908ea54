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

/// The calling thread's session keyring; none where the kernel has no keys. It is looked at by a
/// thread that ends with that: the kernel gives one that has no session keyring its user's for good
/// when it is asked.
///
/// # Errors
/// `EACCES` where the thread may not search it, `EKEYREVOKED` and `EKEYEXPIRED`.
pub fn own_session() -> io::Result<Option<Session>> {
    let thread = std::thread::Builder::new().spawn(session)?;
    let ended = thread.join();
    ended.unwrap_or_else(|_| Err(Error::other("the thread that looks for a keyring panicked")))
}

fn session() -> io::Result<Option<Session>> {
    let serial = match serial_of(SESSION) {
        Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => return Ok(None),
        serial => serial?,
    };
    Ok(Some(match serial_of(USER_SESSION)? == serial {
        true => Session::Default,
        false => Session::Own(serial),
    }))
}

/// `KEY_SPEC_SESSION_KEYRING`.
const SESSION: i32 = -3;
/// `KEY_SPEC_USER_SESSION_KEYRING`.
const USER_SESSION: i32 = -5;

/// The serial number of a keyring of the calling thread, which is not made.
fn serial_of(special: i32) -> io::Result<i32> {
    const GET_KEYRING_ID: libc::c_long = 0;
    // SAFETY: the call takes numbers alone.
    let serial = unsafe { libc::syscall(libc::SYS_keyctl, GET_KEYRING_ID, special, 0) };
    match serial {
        ..0 => Err(Error::last_os_error()),
        serial => i32::try_from(serial).map_err(Error::other),
    }
}

/// Runs `work` in a thread that has a new session keyring, without a name and empty.
///
/// # Errors
/// As keyctl(2): `EDQUOT`, `ENOSYS`.
pub fn in_new_session<T: Send>(work: impl FnOnce(i32) -> T + Send) -> io::Result<T> {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    let joined = || {
        let unnamed = std::ptr::null::<libc::c_char>();
        // SAFETY: without a name the call reads nothing.
        let serial = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, unnamed) };
        match serial {
            ..0 => Err(Error::last_os_error()),
            serial => Ok(work(i32::try_from(serial).map_err(Error::other)?)),
        }
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, joined)?;
        let ended = thread.join();
        ended.unwrap_or_else(|_| Err(Error::other("the thread with a session keyring panicked")))
    })
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
        let (joined, seen) = in_new_session(|serial| (serial, own_session())).expect("a keyring");
        assert_eq!(seen.expect("a look"), Some(Session::Own(joined)));
        assert_eq!(own_session().expect("a look"), Some(before));
    }
}
