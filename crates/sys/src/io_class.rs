//! With what priority a thread's reads and writes reach a disk: ioprio_set(2).

use std::io;

/// `IOPRIO_WHO_PROCESS`: of one thread.
const WHO: libc::c_int = 1;
/// Where the class stands above the level.
const CLASS_SHIFT: u32 = 13;

/// A class, and a level of it from 0, the highest, to 7.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Before all others.
    Realtime(u8),
    /// Like others.
    BestEffort(u8),
    /// Only when nobody else wants the disk.
    Idle,
}

impl Class {
    const fn number(self) -> u32 {
        let (class, level) = match self {
            Self::Realtime(level) => (1, level),
            Self::BestEffort(level) => (2, level),
            Self::Idle => (3, 7),
        };
        class << CLASS_SHIFT | level as u32
    }
}

/// The calling thread, and those that it starts from now on, read and write in this class.
///
/// # Errors
/// `EPERM` for [`Class::Realtime`] without `CAP_SYS_NICE`, `EINVAL` for a level above 7.
pub fn set(class: Class) -> io::Result<()> {
    // Beyond the levels the kernel has other things in the number.
    if let Class::Realtime(8..) | Class::BestEffort(8..) = class {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: the call touches no memory.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, WHO, 0, class.number()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get() -> u32 {
        // SAFETY: the call touches no memory.
        unsafe { libc::syscall(libc::SYS_ioprio_get, WHO, 0) as u32 }
    }

    #[test]
    fn threads_inherit_it() {
        let thread = std::thread::spawn(|| {
            set(Class::BestEffort(6)).unwrap();
            let inherited = std::thread::spawn(get).join().unwrap();
            assert_eq!((get(), inherited), (2 << 13 | 6, 2 << 13 | 6));
            set(Class::Idle).unwrap();
            std::thread::spawn(get).join().unwrap()
        });
        assert_eq!(thread.join().unwrap(), 3 << 13 | 7);
        assert!(set(Class::BestEffort(8)).is_err());
    }
}
