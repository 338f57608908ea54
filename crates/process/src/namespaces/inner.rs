//! The copy in the namespaces.

use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd as _;

use guard::Channel;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, WaitOptions, WaitStatus, pidfd_open, set_parent_process_death_signal, wait,
};
use sys::procfs;

use super::Way;
use super::message::{Answer, Event, number};
use crate::options::OwnNamespaces;
use crate::{Error, Observer, Result, Stage, Veto};

/// The name of the namespace's first process.
const NAME: &CStr = c"stillframe-init";

/// The copy in the namespace.
#[derive(Debug)]
pub struct Inner {
    pub(super) link: Channel,
    /// The root's number in the namespace, and outside as far as that is known.
    pub(super) root: Option<Pid>,
    pub(super) root_outside: Option<Pid>,
    /// The way in which the root of a restored tree is made.
    pub(crate) way: Way,
    /// The namespaces of a tree that is dumped.
    pub(super) own: OwnNamespaces,
}

impl Inner {
    /// The root's number in the namespace.
    #[must_use]
    pub fn root(&self) -> Option<Pid> {
        self.root
    }

    /// The namespaces that it has entered.
    #[must_use]
    pub fn own(&self) -> OwnNamespaces {
        self.own
    }

    /// The root's number outside, as far as it is known.
    #[must_use]
    pub fn root_outside(&self) -> Option<Pid> {
        self.root_outside
    }

    /// Tells outside that the tree runs. Where the root is not the first process of the namespace,
    /// this one lives on as that, since the kernel ends the namespace with it: until nobody else is
    /// there. Gives how the root has ended. Where it is `detached`, its standard streams are
    /// /dev/null, so that nobody waits for their end.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn stay(self, detached: bool) -> Result<Option<WaitStatus>> {
        let failed = |errno: Errno| Error::kernel("cannot leave the standard streams", errno);
        let named = rustix::thread::set_name(NAME);
        named.map_err(|errno| Error::kernel("cannot name this process", errno))?;
        if detached {
            let null =
                rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty()).map_err(failed)?;
            rustix::stdio::dup2_stdin(&null).map_err(failed)?;
            rustix::stdio::dup2_stdout(&null).map_err(failed)?;
            rustix::stdio::dup2_stderr(&null).map_err(failed)?;
        }
        let event = Event {
            is_last: true,
            stage: None,
        };
        // A process outside that is gone changes nothing for the tree.
        if let Err(error) = self.ask(&event, self.root) {
            log::warn!("the restorer is gone: {error}");
        }
        drop(self.link);
        if !rustix::process::getpid().is_init() {
            return Ok(None);
        }
        let mut ended = None;
        loop {
            match wait(WaitOptions::empty()) {
                Ok(Some((pid, status))) if Some(pid) == self.root => ended = Some(status),
                Ok(_) | Err(Errno::INTR) => {}
                // Somebody may be there who was started elsewhere, as a dump.
                Err(_) if !wait_for_others() => return Ok(ended),
                Err(_) => {}
            }
        }
    }

    /// Announces that the namespaces are there, of the kinds `flags`, with a process that is in
    /// them: the root, where that is process 1 and waits, or this one.
    ///
    /// # Errors
    /// [`Error::Vetoed`], [`Error::Kernel`].
    pub(crate) fn announce_namespaces(&self, flags: i32) -> Result<()> {
        let mut inside = rustix::process::getpid();
        if let Way::First(first) = &self.way {
            let joined = first.join(flags);
            joined.map_err(|e| Error::kernel("process 1 cannot enter its namespaces", e))?;
            inside = Pid::INIT;
        }
        for (stage, inside) in [
            (Stage::SetupNamespaces, Some(inside)),
            (Stage::PostSetupNamespaces, None),
        ] {
            let event = Event {
                is_last: false,
                stage: Some(number(stage)),
            };
            let answer = self.ask(&event, inside);
            let answer =
                answer.map_err(|error| Error::kernel("the process outside is gone", error));
            let Answer { goes_on, veto, .. } = answer?;
            if !goes_on {
                return Err(Error::Vetoed(Veto(veto.unwrap_or_default())));
            }
        }
        Ok(())
    }

    fn ask(&self, event: &Event, root: Option<Pid>) -> io::Result<Answer> {
        let pidfd = root.map(|root| pidfd_open(root, PidfdFlags::empty()));
        let pidfd = pidfd.transpose()?;
        let rights = pidfd.iter().map(|fd| fd.as_fd()).collect::<Vec<_>>();
        Ok(self.link.ask(event, &rights)?.0)
    }
}

impl Observer for Inner {
    fn stage(&mut self, stage: Stage, root: Option<Pid>) -> std::result::Result<(), Veto> {
        self.root = root.or(self.root);
        let event = Event {
            is_last: false,
            stage: Some(number(stage)),
        };
        let answer = match self.ask(&event, root) {
            Ok(answer) => answer,
            // The tree runs, whoever is there to hear of it.
            Err(_) if stage == Stage::PostResume => return Ok(()),
            Err(error) => return Err(Veto(format!("the process outside is gone: {error}"))),
        };
        if !answer.goes_on {
            return Err(Veto(answer.veto.unwrap_or_default()));
        }
        self.root_outside = answer.root.and_then(Pid::from_raw).or(self.root_outside);
        if stage == Stage::PreResume {
            let free = set_parent_process_death_signal(None);
            free.map_err(|errno| Veto(format!("cannot leave the process outside: {errno}")))?;
        }
        Ok(())
    }

    fn progress(&mut self, _done_bytes: u64, _total_bytes: u64) {}
}

/// Waits for the end of a process in this namespace that is no child of this one, its first; tells
/// whether there was one.
fn wait_for_others() -> bool {
    let me = std::process::id().cast_signed();
    let others = procfs::processes().filter(|pid| *pid != me);
    let pidfds = others.filter_map(Pid::from_raw);
    let mut pidfds = pidfds.filter_map(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let Some(other) = pidfds.next() else {
        return false;
    };
    guard::wait_for_end(other);
    true
}
