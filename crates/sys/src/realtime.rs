//! Real-time priority for a while: for who must see at once that something has ended.
use std::io;

/// The calling thread has real-time priority (`SCHED_FIFO`, sched(7)) until this is dropped. What
/// it starts meanwhile has none.
#[derive(Debug)]
pub struct Realtime {
    policy: i32,
    priority: i32,
}

impl Realtime {
    /// # Errors
    /// `EPERM` without `CAP_SYS_NICE`, and where the control group has no share of real time.
    pub fn new() -> io::Result<Self> {
        // SAFETY: the call touches no memory.
        let policy = unsafe { libc::sched_getscheduler(0) };
        let mut param = libc::sched_param { sched_priority: 0 };
        // SAFETY: `param` outlives the call.
        if policy == -1 || unsafe { libc::sched_getparam(0, &raw mut param) } == -1 {
            return Err(io::Error::last_os_error());
        }
        let priority = param.sched_priority;
        set(
            libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK,
            priority.max(1),
        )?;
        Ok(Self { policy, priority })
    }
}

impl Drop for Realtime {
    fn drop(&mut self) {
        // Giving it up is never refused.
        let _ = set(self.policy, self.priority);
    }
}

fn set(policy: i32, sched_priority: i32) -> io::Result<()> {
    let param = libc::sched_param { sched_priority };
    // SAFETY: `param` outlives the call.
    match unsafe { libc::sched_setscheduler(0, policy, &raw const param) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> i32 {
        // SAFETY: the call touches no memory.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn it_ends_and_is_not_inherited() {
        let before = policy();
        match Realtime::new() {
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EPERM)),
            Ok(realtime) => {
                assert_eq!(policy(), libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK);
                let inherited = std::thread::spawn(policy).join().expect("it ends");
                assert_eq!(inherited, libc::SCHED_OTHER);
                drop(Realtime::new().expect("as before"));
                assert_eq!(policy(), libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK);
                drop(realtime);
            }
        }
        assert_eq!(policy(), before);
    }
}
