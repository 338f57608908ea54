//! A mutex whose holder has the priority of whoever waits for it.
use std::cell::UnsafeCell;
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ops::{Deref, DerefMut};

/// Protects a value as [`std::sync::Mutex`] does, but is never poisoned. While a thread of higher
/// priority waits ([`crate::realtime`]), the holder runs with that, so that it is not kept from its
/// processor by others in between (`PTHREAD_PRIO_INHERIT`).
#[derive(Debug)]
pub struct Mutex<T> {
    /// At one address for as long as it lives.
    lock: Box<UnsafeCell<libc::pthread_mutex_t>>,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by one thread at a time, through the lock.
unsafe impl<T: Send> Send for Mutex<T> {}
// SAFETY: likewise.
unsafe impl<T: Send> Sync for Mutex<T> {}

/// The value, until it is dropped.
#[derive(Debug)]
pub struct Guard<'a, T> {
    mutex: &'a Mutex<T>,
    /// It is unlocked by the thread that locked it.
    _bound: std::marker::PhantomData<*const ()>,
}

impl<T> Mutex<T> {
    /// Takes the value to protect.
    ///
    /// # Panics
    /// Where the C library has no such mutexes.
    pub fn new(value: T) -> Self {
        Self {
            lock: Box::new(UnsafeCell::new(
                create().expect("futexes inherit priorities"),
            )),
            value: UnsafeCell::new(value),
        }
    }

    /// Waits until the value is free.
    ///
    /// # Panics
    /// When the calling thread has it already.
    pub fn lock(&self) -> Guard<'_, T> {
        // SAFETY: it was initialised and is at the address that it had then.
        let locked = unsafe { libc::pthread_mutex_lock(self.lock.get()) };
        assert_eq!(locked, 0, "locked twice by one thread");
        Guard {
            mutex: self,
            _bound: std::marker::PhantomData,
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> Drop for Mutex<T> {
    fn drop(&mut self) {
        // SAFETY: nobody has it locked, as a guard borrows it.
        unsafe { libc::pthread_mutex_destroy(self.lock.get()) };
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: this thread has the lock.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this thread has the lock, and the guard is borrowed for as long as the value.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        // SAFETY: this thread has locked it.
        unsafe { libc::pthread_mutex_unlock(self.mutex.lock.get()) };
    }
}

fn create() -> io::Result<libc::pthread_mutex_t> {
    let check = |answer| match answer {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    };
    let mut attributes = MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
    let attributes = attributes.as_mut_ptr();
    // SAFETY: room for the attributes.
    check(unsafe { libc::pthread_mutexattr_init(attributes) })?;
    // SAFETY: they are initialised.
    check(unsafe { libc::pthread_mutexattr_setprotocol(attributes, libc::PTHREAD_PRIO_INHERIT) })?;
    // One that is locked twice says so.
    let kind = libc::PTHREAD_MUTEX_ERRORCHECK;
    // SAFETY: likewise.
    check(unsafe { libc::pthread_mutexattr_settype(attributes, kind) })?;
    // SAFETY: all zeros is room for a mutex.
    let mut lock: libc::pthread_mutex_t = unsafe { zeroed() };
    // SAFETY: the C library has no address of a mutex that nobody has locked, so it may move.
    check(unsafe { libc::pthread_mutex_init(&raw mut lock, attributes) })?;
    // SAFETY: they are not used any more.
    check(unsafe { libc::pthread_mutexattr_destroy(attributes) })?;
    Ok(lock)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::realtime::Realtime;

    #[test]
    fn one_thread_at_a_time_has_the_value() {
        const TIMES: usize = 20_000;
        let count = Mutex::new(0_usize);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..TIMES).for_each(|_| *count.lock() += 1));
            }
        });
        assert_eq!(*count.lock(), 4 * TIMES);
    }

    /// The priority with which a thread runs: 39 for an ordinary one, negative for real time.
    fn priority() -> i64 {
        let stat = std::fs::read_to_string("/proc/thread-self/stat").expect("it is there");
        let after = stat.rsplit(") ").next().expect("fields");
        let field = after.split(' ').nth(15).expect("a priority");
        field.parse().expect("a number")
    }

    #[test]
    fn who_has_it_gets_the_priority_of_who_waits() {
        let mutex = Mutex::new(());
        let ordinary = priority();
        let held = mutex.lock();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let realtime = Realtime::new();
                drop(mutex.lock());
                realtime.is_ok()
            });
            let deadline = Instant::now() + Duration::from_secs(5);
            let mut raised = false;
            while !raised && !waiter.is_finished() && Instant::now() < deadline {
                raised = priority() < 0;
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(held);
            let is_allowed = waiter.join().expect("it ends");
            assert_eq!(raised, is_allowed);
        });
        assert_eq!(priority(), ordinary);
    }
}
