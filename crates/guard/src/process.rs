//! The start of a helper process.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use sys::fork::{daemonize, fork_for};
use sys::signal::SignalBlock;

use crate::Channel;

/// A helper process that is about to be started: it has no descriptors but those that it is given,
/// a name, and a session of its own, so that nothing that ends the group of its maker ends it.
#[derive(Debug)]
pub struct Helper<'a> {
    name: &'a CStr,
    kept: Vec<RawFd>,
    log: Option<RawFd>,
    is_tied: bool,
    is_deaf: bool,
}

impl<'a> Helper<'a> {
    /// One with this name, of at most 15 bytes (`PR_SET_NAME`).
    #[must_use]
    pub const fn new(name: &'a CStr) -> Self {
        Self {
            name,
            kept: Vec::new(),
            log: None,
            is_tied: false,
            is_deaf: false,
        }
    }

    /// It has these descriptors, under their numbers.
    #[must_use]
    pub fn keep<'b>(self, kept: impl IntoIterator<Item = BorrowedFd<'b>>) -> Self {
        self.keep_numbers(kept.into_iter().map(|fd| fd.as_raw_fd()))
    }

    /// The same for descriptors by number.
    #[must_use]
    pub fn keep_numbers(mut self, kept: impl IntoIterator<Item = RawFd>) -> Self {
        self.kept.extend(kept);
        self
    }

    /// It logs to the descriptor of this number; otherwise it does not log, as that number may be
    /// another file's by then.
    #[must_use]
    pub fn log(mut self, log: Option<RawFd>) -> Self {
        self.log = log;
        self.keep_numbers(log)
    }

    /// The kernel kills it when its maker ends, whatever it does.
    #[must_use]
    pub const fn tied(mut self) -> Self {
        self.is_tied = true;
        self
    }

    /// It gets no signals but those that nobody can block.
    #[must_use]
    pub const fn deaf(mut self) -> Self {
        self.is_deaf = true;
        self
    }

    /// Starts it as a child, from a process that has one thread. It calls `life` with its side of
    /// the channel, and ends.
    ///
    /// # Errors
    /// Those of socketpair(2) and fork(2); [`io::ErrorKind::ResourceBusy`] in a process of several
    /// threads.
    pub fn start(self, life: impl FnOnce(Channel)) -> io::Result<Child> {
        let (theirs, own) = Channel::pair()?;
        let helper = self.keep([theirs.as_fd()]);
        helper.flush();
        let maker = rustix::process::getpid();
        let _blocked = helper.is_deaf.then(SignalBlock::all);
        let pid = fork_for(&helper.kept, || {
            let _ = rustix::process::setsid();
            let _ = rustix::thread::set_name(helper.name);
            if helper.is_tied {
                let tied = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
                if tied.is_err() || rustix::process::getppid() != Some(maker) {
                    return;
                }
            }
            helper.live(|| life(theirs));
        })?;
        Ok(Child {
            channel: own,
            process: Process(pid),
        })
    }

    /// Leaves it behind as a process that is nobody's child here and stands in the root directory.
    /// It calls `life` with its side of the channel, and ends. Of the threads of its maker it has
    /// none: where there are some, `life` must use nothing that one of them could hold locked.
    ///
    /// # Errors
    /// Those of socketpair(2) and fork(2).
    pub fn leave(self, life: impl FnOnce(Channel)) -> io::Result<Channel> {
        let (theirs, own) = Channel::pair()?;
        let helper = self.keep([theirs.as_fd()]);
        helper.leave_alone(|| life(theirs))?;
        Ok(own)
    }

    /// The same without a channel.
    ///
    /// # Errors
    /// Those of fork(2).
    pub fn leave_alone(self, life: impl FnOnce()) -> io::Result<()> {
        self.flush();
        let _blocked = self.is_deaf.then(SignalBlock::all);
        daemonize(&self.kept, self.name, || self.live(life))
    }

    /// Writes the rest of the log, which both processes would write otherwise.
    fn flush(&self) {
        if self.log.is_some() {
            log::logger().flush();
        }
    }

    fn live(&self, life: impl FnOnce()) {
        if self.log.is_none() {
            log::set_max_level(log::LevelFilter::Off);
        }
        life();
        self.flush();
    }
}

/// Opens the standard streams of a helper that has none, so that what it opens later does not get
/// their numbers. Keep what is returned.
pub fn standard_streams() -> [io::Result<File>; 3] {
    [(); 3].map(|()| File::open(sys::host::path("/dev/null")))
}

/// A helper that is a child. Dropped, it sees the end of its messages, and is waited for.
#[derive(Debug)]
pub struct Child {
    // Dropped first.
    channel: Channel,
    process: Process,
}

/// A child's process. Dropped, it is waited for.
#[derive(Debug)]
pub(crate) struct Process(Pid);

impl Child {
    /// The channel to it.
    #[must_use]
    pub const fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Gives the channel to it; nobody waits for its end.
    #[must_use]
    pub fn into_channel(self) -> Channel {
        std::mem::forget(self.process);
        self.channel
    }

    /// The channel to it, and what waits for its end.
    pub(crate) fn split(self) -> (Channel, Process) {
        (self.channel, self.process)
    }

    /// Its process.
    #[must_use]
    pub const fn pid(&self) -> Pid {
        self.process.0
    }

    /// Kills it.
    pub fn kill(&self) {
        let _ = kill_process(self.pid(), Signal::KILL);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = rustix::io::retry_on_intr(|| waitpid(Some(self.0), WaitOptions::empty()));
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use testkit::wait::{SOON, wait_until};

    use super::*;
    use crate::harness::Note;

    /// Runs `test` in a process of one thread, and gives the text that it finds.
    fn alone(test: impl FnOnce() -> String) -> String {
        let channel = Helper::new(c"alone").leave(|channel| {
            let note = Note::text(&test());
            let _ = channel.send(&note, &[]);
        });
        let received = channel.expect("a process").receive::<Note>();
        received.expect("a note").expect("a note").0.text
    }

    #[test]
    fn helper_has_its_name_its_session_and_no_other_descriptor() {
        let told = alone(|| {
            let other = File::open("/dev/null").expect("it is there");
            let child = Helper::new(c"helper").start(|channel| {
                let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
                let links = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
                let leads = rustix::process::getsid(None) == Ok(rustix::process::getpid());
                // The list of them is one more while it is read.
                let text = format!("{} {} {leads}", name.trim(), links - 1);
                let _ = channel.send(&Note::text(&text), &[]);
            });
            let child = child.expect("a helper");
            let said = child.channel().receive::<Note>();
            drop((child, other));
            said.ok().flatten().map_or_else(String::new, |it| it.0.text)
        });
        assert_eq!(told, "helper 1 true");
    }

    #[test]
    fn end_of_the_maker_ends_the_messages_and_a_tied_helper() {
        let (ends, left) = Channel::pair().expect("a pair");
        let maker = Helper::new(c"maker").keep([left.as_fd()]).leave(|channel| {
            let life = |channel: Channel| {
                // The first message is never followed by another one.
                while let Ok(Some(_)) = channel.receive::<Note>() {}
            };
            let helpers = [
                Helper::new(c"waits").keep([left.as_fd()]).start(life),
                Helper::new(c"tied").keep([left.as_fd()]).tied().start(|_| {
                    loop {
                        rustix::event::pause();
                    }
                }),
            ];
            let _ = channel.send(&Note::text("ready"), &[]);
            let _ = channel.receive::<Note>();
            // Ends without a word to them.
            std::mem::forget(helpers);
        });
        drop(left);
        let maker = maker.expect("a process");
        maker.receive::<Note>().expect("ready").expect("ready");
        drop(maker);
        assert!(ends.receive::<Note>().expect("their end").is_none());
    }

    #[test]
    fn deaf_helper_survives_signals_and_its_maker_hears_them_again() {
        let told = alone(|| {
            let child = Helper::new(c"deaf").deaf().start(|channel| {
                let _ = channel.receive::<Note>();
                let _ = channel.send(&Note::text("there"), &[]);
            });
            let child = child.expect("a helper");
            let _ = kill_process(child.pid(), Signal::TERM);
            let answer = child.channel().ask::<Note>(&Note::text("?"), &[]);
            let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            let blocked = status.lines().find(|line| line.starts_with("SigBlk:"));
            let own = blocked.is_some_and(|line| line.ends_with("0000000000000000"));
            format!(
                "{} {own}",
                answer.map_or_else(|_| String::new(), |it| it.0.text)
            )
        });
        assert_eq!(told, "there true");
    }

    #[test]
    fn several_threads_are_refused_for_a_child_and_leave_an_orphan() {
        let (wake, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || wait.recv());
        let error = Helper::new(c"child").start(|_| {}).expect_err("threads");
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        let kept = OwnedFd::from(File::create(&file).expect("made"));
        let left = Helper::new(c"orphan").keep([kept.as_fd()]).leave_alone(|| {
            let _ = rustix::io::write(&kept, b"text");
        });
        left.expect("a process");
        wait_until("its text", SOON, || {
            std::fs::read(&file).expect("it is there") == b"text"
        });
        drop(wake);
        assert!(other.join().expect("it ends").is_err());
    }
}
