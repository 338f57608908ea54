//! Sessions and process groups: a daemon that forked twice and so is in the session of a leader
//! that is gone, a session of its own with a leader, a child in a process group of its own.
//! The root is a child subreaper, so the orphan is its child. With the argument `plain`, the
//! daemon's parent stays.
//!
//! `ids` answers "role pid group session" of each as the kernel tells them.
use rustix::process::{getpid, set_child_subreaper, setpgid, setsid};
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood};
use rustix::mm::{MapFlags, ProtFlags};

use crate::calls::Mapping;
use crate::wait;

const ROLES: [&str; 3] = ["daemon", "leader", "group"];

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    set_child_subreaper(Some(getpid()))?;
    let plain = arguments.first().is_some_and(|word| word == "plain");
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let pids = Mapping::anonymous(4096, both, MapFlags::SHARED)?;
    let arrived = |role: usize| -> ! {
        pids.store(role * 8, u64::from(std::process::id()));
        loop {
            rustix::event::pause();
        }
    };
    let first = match fork()? {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            setsid()?;
            if fork()? == Fork::Child {
                arrived(0);
            }
            if plain {
                loop {
                    rustix::event::pause();
                }
            }
            std::process::exit(0);
        }
    };
    if fork()? == Fork::Child {
        setsid()?;
        arrived(1);
    }
    if fork()? == Fork::Child {
        setpgid(None, None)?;
        arrived(2);
    }
    if !plain {
        rustix::process::waitpid(Some(first), rustix::process::WaitOptions::empty())?;
    }
    wait::wait_until("three tasks", wait::SOON, || {
        (0..ROLES.len()).all(|role| pids.load(role * 8) != 0)
    });
    control.serve(|question| match question.verb.as_str() {
        "ids" => {
            let mut shown = Vec::new();
            for (role, name) in ROLES.iter().enumerate() {
                let pid = rustix::process::Pid::from_raw(pids.load(role * 8) as i32);
                let group = rustix::process::getpgid(pid)?;
                let session = rustix::process::getsid(pid)?;
                let pid = pids.load(role * 8);
                shown.push(format!("{name} {pid} {group:?} {session:?}"));
            }
            Ok(shown.join(", "))
        }
        _ => not_understood(question),
    })
}
