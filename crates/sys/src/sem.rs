//! System V semaphores: semctl(2).

use std::io;

/// How many sets there are in this process's IPC namespace.
///
/// # Errors
/// `ENOSYS` where the kernel has no semaphores.
pub fn sets() -> io::Result<u32> {
    // SAFETY: the structure is plain numbers, for which zeros are valid.
    let mut told: libc::seminfo = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the structure, which lives through the call.
    let done = unsafe { libc::semctl(0, 0, libc::SEM_INFO, &raw mut told) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(told.semusz.cast_unsigned())
}

/// How many semaphores a set has.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is no such set, `EACCES`.
pub fn count(set: i32) -> io::Result<usize> {
    // SAFETY: the structure is plain numbers, for which zeros are valid.
    let mut told: libc::semid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the structure, which lives through the call.
    let done = unsafe { libc::semctl(set, 0, libc::IPC_STAT, &raw mut told) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(told.sem_nsems as usize)
}

/// The value of a semaphore of a set.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is no such set, or the set has no such semaphore; `EACCES`.
pub fn value(set: i32, semaphore: i32) -> io::Result<i32> {
    // SAFETY: the command takes nothing.
    let value = unsafe { libc::semctl(set, semaphore, libc::GETVAL) };
    if value < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(value)
}

/// Takes `count` off a semaphore without waiting, to be given back when the last task ends that
/// shares the calling one's undo list (`SEM_UNDO`); for tests.
///
/// # Errors
/// As semop(2): `EAGAIN` where there are not so many.
pub fn borrow(set: i32, semaphore: u16, count: i16) -> io::Result<()> {
    let flags = i16::try_from(libc::SEM_UNDO | libc::IPC_NOWAIT).expect("low bits");
    let mut operation = libc::sembuf {
        sem_num: semaphore,
        sem_op: -count,
        sem_flg: flags,
    };
    // SAFETY: the kernel reads one operation, which lives through the call.
    let done = unsafe { libc::semop(set, &raw mut operation, 1) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Makes a set and gives its number. `key`: 0 (`IPC_PRIVATE`) for none.
///
/// # Errors
/// As semget(2): `EEXIST` when the key is taken, `EINVAL` for a size out of bounds, `ENOSPC`.
pub fn create(key: i32, count: i32, mode: u32) -> io::Result<i32> {
    let flags = libc::IPC_CREAT | libc::IPC_EXCL | mode.cast_signed();
    // SAFETY: the call takes three numbers.
    match unsafe { libc::semget(key, count, flags) } {
        ..0 => Err(io::Error::last_os_error()),
        set => Ok(set),
    }
}

/// The values of a set of `count` semaphores.
///
/// # Errors
/// Those of [`value`].
pub fn values(set: i32, count: usize) -> io::Result<Vec<u16>> {
    // The set may have been made again with more: the kernel would fill in all.
    const MOST: usize = 1 << 16;
    let mut values = vec![0_u16; count.max(MOST)];
    // SAFETY: there is room for more values than a set may have (`SEMMSL` is at most 65,536).
    match unsafe { libc::semctl(set, 0, libc::GETALL, values.as_mut_ptr()) } {
        ..0 => Err(io::Error::last_os_error()),
        _ => {
            values.truncate(count);
            Ok(values)
        }
    }
}

/// Gives the semaphores of a set, of as many as there are values, these values.
///
/// # Errors
/// As semctl(2): `ERANGE` for a value above 32,767.
pub fn set_values(set: i32, values: &[u16]) -> io::Result<()> {
    if count(set)? != values.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: there is a value for each semaphore.
    match unsafe { libc::semctl(set, 0, libc::SETALL, values.as_ptr()) } {
        ..0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Gives a set its owner and permissions.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is none, `EPERM`.
pub fn give(set: i32, uid: u32, gid: u32, mode: u32) -> io::Result<()> {
    // SAFETY: the structure is plain numbers, for which zeros are valid.
    let mut told: libc::semid_ds = unsafe { std::mem::zeroed() };
    (told.sem_perm.uid, told.sem_perm.gid) = (uid, gid);
    told.sem_perm.mode = mode as _;
    // SAFETY: the kernel reads the structure, which lives through the call.
    match unsafe { libc::semctl(set, 0, libc::IPC_SET, &raw mut told) } {
        ..0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Removes a set.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is none, `EPERM`.
pub fn remove(set: i32) -> io::Result<()> {
    // SAFETY: the command takes nothing.
    let done = unsafe { libc::semctl(set, 0, libc::IPC_RMID) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// A set of semaphores that goes with this value; for tests.
#[derive(Debug)]
pub struct Set(i32);

impl Set {
    /// Makes one of `count` semaphores, which are 0.
    ///
    /// # Errors
    /// As semget(2): `ENOSPC`.
    pub fn new(count: i32) -> io::Result<Self> {
        create(libc::IPC_PRIVATE, count, 0o600).map(Self)
    }

    /// Its number (semid).
    #[must_use]
    pub fn number(&self) -> i32 {
        self.0
    }

    /// Sets the value of a semaphore.
    ///
    /// # Errors
    /// `ERANGE`.
    pub fn set(&self, semaphore: i32, value: i32) -> io::Result<()> {
        // SAFETY: the command takes a number.
        let done = unsafe { libc::semctl(self.0, semaphore, libc::SETVAL, value) };
        if done < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        // One that somebody else has removed is gone as well.
        let _ = remove(self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_set_is_made_counted_and_removed() {
        let set = Set::new(3).expect("a set");
        assert!(sets().expect("the kernel has them") >= 1);
        assert_eq!(count(set.number()).expect("it is there"), 3);
        set.set(2, 7).expect("ours");
        assert_eq!(value(set.number(), 2).expect("ours"), 7);
        let number = set.number();
        // This thread gets an undo list of its own.
        let borrowed = std::thread::spawn(move || {
            crate::kcmp::forget_semaphore_undo()?;
            borrow(number, 2, 5)?;
            assert!(borrow(number, 2, 3).is_err());
            value(number, 2)
        });
        assert_eq!(borrowed.join().expect("no panic").expect("ours"), 2);
        // It was joined before the kernel has undone what it did.
        let began = Instant::now();
        while value(number, 2).expect("ours") != 7 {
            assert!(
                began.elapsed() < Duration::from_secs(30),
                "it is not undone"
            );
            std::thread::yield_now();
        }
        drop(set);
        assert!(count(number).is_err());
    }
}
