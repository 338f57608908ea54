//! A watchdog: finishes or takes back the one step of a dump or restore that is not atomic, if we
//! are killed in the middle of it.
//!
//! Killing the tasks of a saved tree, or letting those of a restored one go, takes a call a task,
//! and their connections some more. If this process is killed between two of them, half a tree
//! would be left, or connections that nobody holds back. So a child process waits meanwhile: told
//! that all went well, it ends; if instead the pipe to it breaks, it takes back what was prepared,
//! or finishes what was begun.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use guard::{Channel, Child, Helper, ListMessage};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::{Error, Result, stat_of};

/// A waiting child process. Dropped, it does what it would do if this process ended.
#[derive(Debug)]
pub struct Watchdog(Child);

/// A task that a watchdog sends signals to.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Target {
    /// Its pid.
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// When it was started, which tells it from a later one with its pid.
    #[prost(uint64, tag = "2")]
    pub start_ticks: u64,
    /// Whether it was stopped by a signal before we stopped it.
    #[prost(bool, tag = "3")]
    pub stopped: bool,
}

/// A message to a watchdog.
#[derive(Clone, PartialEq, prost::Message)]
struct Message {
    #[prost(enumeration = "MessageKind", tag = "1")]
    kind: i32,
    #[prost(message, repeated, tag = "2")]
    targets: Vec<Target>,
    #[prost(bool, tag = "3")]
    more: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
enum MessageKind {
    Unknown = 0,
    /// The tasks that it is about.
    Targets = 1,
    /// The step has begun.
    Committed = 2,
    /// Nothing is to be done.
    Dismissed = 3,
}

impl Message {
    fn of(kind: MessageKind) -> Self {
        Self {
            kind: kind as i32,
            ..Self::default()
        }
    }
}

impl ListMessage for Message {
    type Item = Target;
    const PACKET_MAX: usize = 2000;
    /// The most tasks that there can be (`PID_MAX_LIMIT`).
    const LIST_MAX: usize = 1 << 22;

    fn list(&mut self) -> &mut Vec<Target> {
        &mut self.targets
    }

    fn more(&mut self) -> &mut bool {
        &mut self.more
    }
}

impl Watchdog {
    /// Posts a watchdog that has copies of the descriptors `kept`, and sees itself when the tasks
    /// `pids` were started. When this process ends before it has dismissed it, the watchdog calls
    /// `take_back` with these tasks or those that it was told, or, after [`Watchdog::commit`],
    /// `finish`.
    ///
    /// # Errors
    /// [`Error::Kernel`] when no process can be made.
    pub fn post(
        kept: &[BorrowedFd<'_>],
        pids: &[i32],
        take_back: impl FnOnce(&[Target]),
        finish: impl FnOnce(&[Target]),
    ) -> Result<Self> {
        let helper = Helper::new(c"stillframe-wdog").keep(kept.iter().copied());
        let helper = helper.start(|maker| match end_of(&maker, found(pids)) {
            End::Dismissed => {}
            End::Before(targets) => take_back(&targets),
            End::Within(targets) => finish(&targets),
        });
        let failed = |error| Error::kernel("cannot post a watchdog", error);
        helper.map(Self).map_err(failed)
    }

    /// Tells the watchdog which tasks it is about.
    ///
    /// # Errors
    /// [`Error::Kernel`] when it is gone.
    pub fn tell(&self, targets: &[Target]) -> Result<()> {
        let message = Message {
            targets: targets.to_vec(),
            ..Message::of(MessageKind::Targets)
        };
        let sent = self.0.channel().send_list(&message, &[]);
        sent.map_err(|error| Error::kernel("cannot tell the watchdog", error))
    }

    /// Tells the watchdog that the step has begun and is to be finished, whoever ends.
    pub fn commit(&self) {
        // Where it was killed, nothing can be told.
        let committed = Message::of(MessageKind::Committed);
        let _ = self.0.channel().send(&committed, &[]);
    }

    /// Sends the watchdog away: the step is complete, or nothing is to be done about it. Its end is
    /// waited for when this is dropped.
    pub fn dismiss(&self) {
        let dismissed = Message::of(MessageKind::Dismissed);
        let _ = self.0.channel().send(&dismissed, &[]);
    }
}

/// How the process ended that a watchdog watches.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// It did not, or all went well.
    Dismissed,
    /// Before the step.
    Before(Vec<Target>),
    /// Within the step.
    Within(Vec<Target>),
}

/// The tasks with these pids.
fn found(pids: &[i32]) -> Vec<Target> {
    let target = |pid: &i32| {
        Some(Target {
            pid: *pid,
            start_ticks: stat_of(*pid)?.start_ticks,
            stopped: false,
        })
    };
    pids.iter().filter_map(target).collect()
}

fn end_of(maker: &Channel, mut targets: Vec<Target>) -> End {
    let mut committed = false;
    while let Ok(Some(packet)) = maker.receive::<Message>() {
        match packet.0.kind() {
            // Nothing has been done yet with tasks of which only some were told.
            MessageKind::Targets => {
                let whole = maker.receive_rest(packet);
                targets = whole.map_or_else(|_| Vec::new(), |(message, _)| message.targets);
            }
            MessageKind::Committed => committed = true,
            MessageKind::Dismissed => return End::Dismissed,
            MessageKind::Unknown => {}
        }
    }
    match committed {
        true => End::Within(targets),
        false => End::Before(targets),
    }
}

/// Sends a signal to those tasks that are still there.
pub fn send<'a>(targets: impl IntoIterator<Item = &'a Target>, signal: Signal) {
    for target in targets {
        self::signal(target.pid, target.start_ticks, signal);
    }
}

/// Sends a signal to the task that was started then with this pid, if it is still there.
pub fn signal(pid: i32, start_ticks: u64, signal: Signal) {
    let is_it = stat_of(pid).is_some_and(|stat| stat.start_ticks == start_ticks);
    match Pid::from_raw(pid).filter(|_| is_it) {
        Some(init) if init.is_init() && signal == Signal::KILL => bind(pid),
        Some(pid) => drop(kill_process(pid, signal)),
        None => {}
    }
}

/// Traces process 1 of this namespace, whose tracer has just ended or is about to: the kernel kills
/// it when this process ends.
fn bind(init: i32) {
    const PATIENCE: Duration = Duration::from_secs(10);
    let begun = Instant::now();
    while let Err(error) = sys::ptrace::seize(init, true) {
        let is_traced = Errno::from_io_error(&error) == Some(Errno::PERM);
        if !is_traced || begun.elapsed() > PATIENCE {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Has those tasks go on that were stopped by us and by nobody before.
pub fn send_on(targets: &[Target]) {
    send(
        targets.iter().filter(|target| !target.stopped),
        Signal::CONT,
    );
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use guard::harness::{Note, Victim, kill_at_each_message};
    use testkit::program::{Program, Spawned};
    use testkit::wait::{SOON, wait_until};

    use super::*;

    fn target(pid: i32, start_ticks: u64, stopped: bool) -> Target {
        Target {
            pid,
            start_ticks,
            stopped,
        }
    }

    fn step(channel: &Channel, targets: &[Target]) -> std::io::Result<()> {
        let message = Message {
            targets: targets.to_vec(),
            ..Message::of(MessageKind::Targets)
        };
        channel.send_list(&message, &[])?;
        channel.send(&Message::of(MessageKind::Committed), &[])?;
        channel.send(&Message::of(MessageKind::Dismissed), &[])
    }

    #[test]
    fn step_killed_at_each_message_is_undone_or_finished() {
        // Two packets.
        let targets = (1..3000).map(|pid| target(pid, u64::MAX, true));
        let targets = targets.collect::<Vec<_>>();
        kill_at_each_message(
            || Channel::pair().expect("a pair"),
            |(_, report)| vec![report.as_fd()],
            |(_, report), maker| {
                let text = match end_of(&maker, vec![target(7, 5, false)]) {
                    End::Dismissed => "dismissed".to_owned(),
                    End::Before(targets) => format!("before {}", targets.len()),
                    End::Within(targets) => format!("within {}", targets.len()),
                };
                report.send(&Note::text(&text), &[]).expect("sent");
            },
            |_, channel| drop(step(&channel, &targets)),
            |(report, _), outcome| {
                if outcome.victim == Victim::Helper && !outcome.is_whole {
                    return;
                }
                let (note, _) = report.receive::<Note>().expect("a note").expect("a note");
                let expected = match (outcome.victim, outcome.messages) {
                    (Victim::Client, 0) => "before 1",
                    // Tasks of which only some were told do not count.
                    (Victim::Client, 1) => "before 0",
                    (Victim::Client, 2) => "before 2999",
                    (Victim::Client, 3) => "within 2999",
                    _ => "dismissed",
                };
                assert_eq!(note.text, expected, "{outcome:?}");
            },
        );
    }

    #[test]
    fn signals_reach_those_that_were_told_and_no_later_ones() {
        let [one, later] = [(); 2].map(|()| Program::new("sleep").arg("1000").spawn());
        let started = |program: &Spawned| {
            let pid = program.pid().cast_signed();
            (pid, stat_of(pid).expect("it lives").start_ticks)
        };
        let ((one_pid, ticks), (later_pid, late)) = (started(&one), started(&later));
        let targets = [
            target(one_pid, ticks, false),
            target(later_pid, late - 1, false),
        ];
        send(&targets, Signal::KILL);
        wait_until("its end", SOON, || !testkit::tree::is_alive(one.pid()));
        assert!(testkit::tree::is_alive(later.pid()));
    }
}
