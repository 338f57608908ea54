//! The end of a dump: all of the tree is killed, stopped or let go, whoever is killed meanwhile.
//!
//! Where the tree is not to run on, a watchdog stands by before the image gets its name. Up to the
//! moment in which every thread has a stop signal waiting, it takes the image back; from then on it
//! finishes the kills. In between nobody runs: whose tracer dies meets its stop signal first. So
//! the image or the tree is there and never both, and no task sees that others are gone.

use std::time::{Duration, Instant};

use freeze::watchdog::{Target, Watchdog, send, send_on};
use freeze::{Body, Frozen, Task};
use image::{ImageId, Reader};
use resources::fd::tcp::lock::{Label, Lock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use store::Images;

use crate::{Afterwards, DumpOptions, Error, Result, halt, links};

/// How the tree of a dump is let go.
pub(crate) struct Ending {
    afterwards: Afterwards,
    images: Images,
    image: ImageId,
    lock: Option<Lock>,
    watchdog: Option<Watchdog>,
}

impl Ending {
    /// To be called before the tree is stopped: that is when there is time.
    ///
    /// # Errors
    /// [`Error::Kernel`] when no process can be made.
    pub fn new(options: &DumpOptions, image: ImageId) -> Result<Self> {
        let mut ending = Self {
            afterwards: options.afterwards,
            images: options.images.clone(),
            image,
            lock: None,
            watchdog: None,
        };
        // Which connections there are is only known when it is stopped.
        if !options.allowed.tcp_established {
            ending.stand_by()?;
        }
        Ok(ending)
    }

    /// Takes over what holds back the connections of the stopped tree.
    ///
    /// # Errors
    /// Those of [`Ending::new`].
    pub fn hold(mut self, lock: Option<Lock>) -> Result<Self> {
        self.lock = lock;
        if self.watchdog.is_none() {
            self.stand_by()?;
        }
        Ok(self)
    }

    /// Posts the watchdog of a tree that is not to run on.
    fn stand_by(&mut self) -> Result<()> {
        if self.afterwards == Afterwards::Run {
            return Ok(());
        }
        let sockets = self.lock.iter().flat_map(Lock::sockets).collect::<Vec<_>>();
        let take_back = |targets: &[Target]| {
            send_on(targets);
            self.lock.iter().for_each(Lock::revoke);
            remove(&self.images, self.image);
        };
        let finish = |targets: &[Target]| {
            if self.afterwards == Afterwards::Kill {
                send(targets, Signal::KILL);
                let _ = self.lock.as_ref().map(Lock::silence);
            }
        };
        self.watchdog = Some(Watchdog::post(&sockets, &[], take_back, finish)?);
        Ok(())
    }

    /// Ends the dump, whose image has its name. The connections of a killed tree wait for the
    /// restore: the rules that hold them back stand before the first kill. `label` says what they
    /// are for.
    ///
    /// # Errors
    /// [`Error::Kernel`]. Unless the kills have begun, the tree goes on and the image is gone when
    /// this returns.
    pub fn run(mut self, frozen: Frozen, label: impl FnOnce() -> Result<Label>) -> Result<()> {
        let Some(watchdog) = self.watchdog.take() else {
            return go_on(frozen, self.lock);
        };
        let is_killed = self.afterwards == Afterwards::Kill;
        let targets = match self.stop(&frozen, &watchdog, is_killed.then_some(label)) {
            Ok(targets) => targets,
            Err(error) => {
                // The tree goes on, whether or not the watchdog has seen to that.
                drop((frozen, watchdog));
                self.lock.iter().for_each(Lock::revoke);
                remove(&self.images, self.image);
                return Err(error);
            }
        };
        if is_killed {
            return kill(frozen, self.lock, &watchdog, &targets);
        }
        watchdog.dismiss();
        stopped(frozen, self.lock)
    }

    /// Has all of a tree stop before it runs again; one that is to be killed leaves what holds its
    /// connections back, with a label.
    fn stop(
        &mut self,
        frozen: &Frozen,
        watchdog: &Watchdog,
        label: Option<impl FnOnce() -> Result<Label>>,
    ) -> Result<Vec<Target>> {
        let targets = targets(frozen)?;
        if let (Some(lock), Some(label)) = (&mut self.lock, label) {
            lock.stay(&label()?)?;
        }
        stop_all(frozen, watchdog, &targets)?;
        Ok(targets)
    }
}

/// Removes image `id` and what was made for it. A process that is being killed may still have its
/// claim on the directory.
fn remove(images: &Images, id: ImageId) {
    const PATIENCE: Duration = Duration::from_secs(10);
    const PAUSE: Duration = Duration::from_millis(1);
    let Ok(store) = images.open() else {
        return;
    };
    let reader = Reader::open(&*store).ok();
    let Some(reader) = reader.filter(|reader| reader.id() == id) else {
        return;
    };
    let begun = Instant::now();
    while let Err(error) = image::remove(&*store, id) {
        let is_busy = matches!(
            error,
            image::Error::Store {
                source: store::Error::Busy { .. },
                ..
            }
        );
        if begun.elapsed() > PATIENCE || !is_busy {
            return;
        }
        std::thread::sleep(PAUSE);
    }
    links::remove(&links::of(&reader));
}

/// The living tasks, parents before children.
fn targets(frozen: &Frozen) -> Result<Vec<Target>> {
    let living = frozen.tasks.iter().filter(|task| !task.is_zombie());
    let target = |task: &Task| {
        Ok(Target {
            pid: task.pid(),
            start_ticks: task.stat()?.0.start_ticks,
            stopped: task.threads()[0].group_stop.is_some(),
        })
    };
    living.map(target).collect()
}

/// Sends a stop signal to every thread. As they are traced it waits, until this process lets them
/// go or ends: none of them runs before it has met it.
fn stop_all(frozen: &Frozen, watchdog: &Watchdog, targets: &[Target]) -> Result<()> {
    watchdog.tell(targets)?;
    // A parent that is told of the stop of a child has its own before.
    for thread in frozen.tasks.iter().flat_map(Task::threads) {
        match sys::signal::to_thread(thread.process.pid(), thread.tid, sys::ptrace::SIGSTOP) {
            // Somebody else has killed it.
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
            sent => {
                sent.map_err(|e| Error::kernel(format!("cannot stop thread {}", thread.tid), e))?;
            }
        }
    }
    watchdog.commit();
    Ok(())
}

/// Kills the tree, all of which has a stop signal waiting.
fn kill(frozen: Frozen, lock: Option<Lock>, watchdog: &Watchdog, targets: &[Target]) -> Result<()> {
    for Target { pid, .. } in targets {
        if *pid == sys::init::NUMBER {
            // Nobody in its namespace can kill it. The kernel does when this process ends.
            let bound = sys::ptrace::set_kill_on_exit(*pid, true);
            bound.map_err(|e| Error::kernel("cannot bind process 1 to this one's end", e))?;
            continue;
        }
        let killed = kill_process(Pid::from_raw(*pid).expect("a pid is not 0"), Signal::KILL);
        killed.map_err(|e| Error::kernel(format!("cannot kill pid {pid}"), e))?;
    }
    if let Some(lock) = &lock {
        lock.silence()?;
    }
    watchdog.dismiss();
    // What is left to do here is done while they end, and the watchdog as well.
    let mut ending = Vec::new();
    for task in frozen.tasks {
        let is_init = task.pid() == sys::init::NUMBER;
        let tids = forget(task);
        // Those of process 1 stand until this process ends.
        ending.extend(tids.into_iter().filter(|_| !is_init));
    }
    ending.into_iter().for_each(bury);
    Ok(())
}

/// Lets the tree go, whose stop signals wait, and waits until all of it is stopped.
fn stopped(frozen: Frozen, lock: Option<Lock>) -> Result<()> {
    let _leftover = lock.and_then(Lock::lift);
    let threads = frozen.tasks.iter().flat_map(Task::threads);
    let tids = threads.map(|thread| thread.tid).collect::<Vec<_>>();
    drop(frozen);
    halt::wait(&tids)
}

/// Lets the tree go. Its connections go on.
pub(crate) fn go_on(frozen: Frozen, lock: Option<Lock>) -> Result<()> {
    let _leftover = lock.and_then(Lock::lift);
    Ok(frozen.release()?)
}

/// Gives up what is held of a killed task; returns its threads in the order of their ends: that of
/// the leader is told last.
fn forget(task: Task) -> Vec<i32> {
    let tids = task.threads().iter().map(|thread| thread.tid);
    let tids = tids.rev().collect();
    match task.body {
        Body::Ended => {}
        Body::Stopped(threads) => threads.into_iter().for_each(tracee::Thread::forget),
        Body::Injected(injection) => task.close_queue.push(injection.forget().into()),
    }
    tids
}

/// Waits until a killed thread has ended.
fn bury(tid: i32) {
    while let Ok((_, event)) = sys::ptrace::wait(tid) {
        if matches!(event, sys::ptrace::Event::Ended(_)) {
            break;
        }
    }
}
