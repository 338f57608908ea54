//! Queues of this process that are dumped, closed and opened again.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, WaitOptions, waitpid};
use sys::fork::Fork;
use testkit::calls::clone::{DESCRIPTORS, clone};
use testkit::wait::{SOON, wait_until};

use super::super::testing::World;
use super::*;

/// One test at a time: a process that one of them forks has the guards of the others' queues, who
/// then wait for it in an open, which in turn has it wait for the directory of all queues.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A queue for three messages of ten bytes, where there are queues.
fn queue(name: &str) -> Option<(OwnedFd, Named)> {
    let name = CString::new(format!("stillframe-{name}-{}", std::process::id())).expect("no NUL");
    let room = Attributes {
        max_messages: 3,
        message_bytes: 10,
        messages: 0,
    };
    match mqueue::create(&name, room) {
        Err(error) if error.raw_os_error() == Some(38) => None,
        queue => Some((queue.expect("made"), Named(name))),
    }
}

/// Goes with its name.
struct Named(CString);

impl Drop for Named {
    fn drop(&mut self) {
        let _ = mqueue::unlink(&self.0);
    }
}

fn send(queue: &OwnedFd, priority: u32, text: &str) {
    let bytes = text.as_bytes().to_vec();
    mqueue::send(queue, &mqueue::Message { priority, bytes }).expect("sent");
}

fn all(queue: &OwnedFd) -> Vec<(u32, String)> {
    let mut room = [0; 10];
    let messages = std::iter::from_fn(|| mqueue::receive(queue, &mut room).expect("received"));
    let text = |message: mqueue::Message| {
        let text = String::from_utf8(message.bytes).expect("text");
        (message.priority, text)
    };
    messages.map(text).collect()
}

#[test]
fn messages_and_their_order_survive() {
    testkit::needs_root!();
    let _alone = alone();
    let Some((both, name)) = queue("order") else {
        return;
    };
    send(&both, 2, "later");
    send(&both, 7, "first");
    send(&both, 2, "");
    let reader = mqueue::open(&name.0, OFlags::RDONLY).expect("opened");
    let mut world = World::default();
    let (both, reader) = (world.add(both), world.add(reader));
    for kept in [true, false] {
        world.dump().expect("dump");
        let told = world.describe(both);
        assert!(told.contains(" messages=3 room=3x10"), "{told}");
        if !kept {
            // As after a boot.
            mqueue::unlink(&name.0).expect("unlinked");
        }
        world.restore().expect("restore");
    }
    world.cycle();
    let flags = rustix::fs::fcntl_getfl(world.get(reader)).expect("flags");
    assert!(!flags.contains(OFlags::NONBLOCK) && !flags.contains(OFlags::RDWR));
    let texts = [(7, "first"), (2, "later"), (2, "")].map(|(at, text)| (at, text.to_owned()));
    assert_eq!(all(world.get(both)), texts);
    send(world.get(both), 0, "1234567890");
    let reader = mqueue::open(&name.0, OFlags::RDONLY | OFlags::NONBLOCK).expect("opened");
    assert_eq!(all(&reader).len(), 1, "it is the one with the name");
}

#[test]
fn a_queue_that_was_unlinked_is_shared_again() {
    testkit::needs_root!();
    let _alone = alone();
    let Some((first, name)) = queue("unlinked") else {
        return;
    };
    let second = mqueue::open(&name.0, OFlags::RDWR | OFlags::NONBLOCK).expect("opened");
    rustix::fs::fchmod(&first, Mode::from_raw_mode(0o462)).expect("chmod");
    rustix::fs::fchown(&first, Some(Uid::from_raw(5)), Some(Gid::from_raw(6))).expect("chown");
    drop(name);
    for _ in 0..3 {
        send(&first, 1, "unseen");
    }
    let mut world = World::default();
    let (first, second) = (world.add(first), world.add(second));
    world.dump().expect("dump");
    world.restore().expect("restore");
    assert!(world.describe(first).contains(" (unlinked) messages=3"));
    let stat = rustix::fs::fstat(world.get(second)).expect("stat");
    assert_eq!((stat.st_uid, stat.st_gid, stat.st_nlink), (5, 6, 0));
    assert_eq!(stat.st_mode & PERMISSIONS, 0o462);
    assert_eq!(all(world.get(second)).len(), 3);
    assert_eq!(all(world.get(first)), []);
}

#[test]
fn large_messages_have_a_space_of_their_own() {
    testkit::needs_root!();
    let _alone = alone();
    let name = CString::new(format!("stillframe-large-{}", std::process::id())).expect("text");
    let room = Attributes {
        max_messages: 100,
        message_bytes: 30_000,
        messages: 0,
    };
    let Ok(own) = mqueue::create(&name, room) else {
        testkit::skip!("no queues of this size here");
    };
    let name = Named(name);
    for size in [30_000, 1, 17_000] {
        let bytes = vec![7; size];
        mqueue::send(&own, &mqueue::Message { priority: 1, bytes }).expect("sent");
    }
    let mut world = World::default();
    let at = world.add(own);
    world.dump().expect("dump");
    drop(name);
    world.restore().expect("restore");
    let mut room = vec![0; 30_000];
    let mut size = || mqueue::receive(world.get(at), &mut room).expect("received");
    let sizes = std::iter::from_fn(|| size().map(|message| message.bytes.len()));
    assert_eq!(sizes.collect::<Vec<_>>(), [30_000, 1, 17_000]);
}

#[test]
fn a_queue_that_has_changed_is_refused() {
    testkit::needs_root!();
    let _alone = alone();
    let Some((own, name)) = queue("changed") else {
        return;
    };
    send(&own, 1, "old");
    let mut world = World::default();
    let at = world.add(own);
    world.dump().expect("dump");
    assert_eq!(all(world.get(at)).len(), 1);
    send(world.get(at), 1, "new");
    let error = world.restore().expect_err("it has changed").to_string();
    assert!(
        error.contains("other messages than at the dump: remove it"),
        "{error}"
    );
    let again = mqueue::open(&name.0, OFlags::RDWR | OFlags::NONBLOCK).expect("opened");
    assert_eq!(all(&again), [(1, "new".to_owned())]);
}

/// A process that has a queue open, and is neither in the tree nor a child of this one.
struct Outsider {
    shell: std::process::Child,
    pid: Pid,
}

impl Outsider {
    fn start(queue: &OwnedFd) -> Self {
        let folder = tempfile::tempdir().expect("make a folder");
        let mut started = std::process::Command::new("sh");
        // The shell stays its parent: this process may be the one that orphans are given to.
        let script = "exec 3<&0; sleep 100 & echo $! > draft; mv draft pid; wait";
        let started = started.args(["-c", script]).current_dir(&folder);
        started.stdin(std::process::Stdio::from(queue.try_clone().expect("dup")));
        let shell = started.spawn().expect("started");
        let pid = || std::fs::read_to_string(folder.path().join("pid"));
        wait_until("the other process", SOON, || pid().is_ok());
        let pid = pid().expect("it was started");
        let pid = Pid::from_raw(pid.trim().parse().expect("a number"));
        let pid = pid.expect("above 0");
        Self { shell, pid }
    }

    /// Insists that a refusal names it. It may still have the shell's name.
    #[track_caller]
    fn assert_named(&self, refused: &Error) {
        let told = refused.to_string();
        let who = format!("pid {} (", self.pid);
        let why = "), which is not in the tree, has it open";
        assert!(told.contains(&who) && told.contains(why), "{told}");
    }
}

impl Drop for Outsider {
    fn drop(&mut self) {
        let _ = rustix::process::kill_process(self.pid, rustix::process::Signal::KILL);
        let _ = self.shell.wait();
    }
}

#[test]
fn somebody_else_would_see_messages_vanish() {
    testkit::needs_root!();
    let _alone = alone();
    let Some((own, name)) = queue("shared") else {
        return;
    };
    let outsider = Outsider::start(&own);
    let mut world = World::default();
    let at = world.add(own);
    world
        .dump()
        .expect("without messages there is nothing to see");
    send(world.get(at), 1, "seen");
    outsider.assert_named(&world.dump().expect_err("somebody looks"));
    drop(outsider);
    assert_eq!(all(world.get(at)).len(), 1);
    drop(name);
}

#[test]
fn who_opens_it_meanwhile_waits() {
    testkit::needs_root!();
    let _alone = alone();
    let Some((own, name)) = queue("guarded") else {
        return;
    };
    for _ in 0..3 {
        send(&own, 1, "there");
    }
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut looks = 0;
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                let queue = mqueue::open(&name.0, OFlags::RDONLY).expect("opened");
                let there = mqueue::attributes(&queue).expect("asked").messages;
                // Its own, which was opened before, is there to be looked at.
                assert!(there <= 3);
                looks += 1;
            }
            looks
        });
        let mut world = World::default();
        world.add(own);
        for _ in 0..20 {
            world.dump().expect("dump");
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(looks.join().expect("nothing failed") > 0);
    });
}

#[test]
fn what_makes_no_sense_is_refused() {
    let sound = Record {
        name: b"name".to_vec(),
        unlinked: true,
        max_messages: 1,
        message_bytes: 10,
        contents: Some(Contents::default()),
        flags: 2,
        ..Record::default()
    };
    let refused = |record: &Record| {
        let opened = super::super::testing::open_alone::<MessageQueue>(record);
        let error = opened.expect_err("it makes no sense");
        assert!(
            matches!(error, Error::Corrupt { .. }),
            "{record:?}: {error}"
        );
    };
    for name in [&b""[..], b"a/b", b"a\0", &[b'x'; 256]] {
        refused(&Record {
            name: name.to_vec(),
            ..sound.clone()
        });
    }
    for (most, bytes) in [(0, 10), (10, 0), (u64::MAX, 10), (10, 1 << 40)] {
        refused(&Record {
            max_messages: most,
            message_bytes: bytes,
            ..sound.clone()
        });
    }
    refused(&Record {
        mode: 0o100_600,
        ..sound.clone()
    });
    refused(&Record {
        path: b"relative".to_vec(),
        ..sound.clone()
    });
    refused(&Record {
        contents: None,
        ..sound.clone()
    });
    for messages in contents::nonsense() {
        refused(&Record {
            contents: Some(messages),
            ..sound.clone()
        });
    }
}

/// Has a process that shares the descriptors of this one register for a queue, and end; gives its
/// number. The kernel keeps the registration: this process closes the descriptors.
fn register_and_end(queue: &OwnedFd) -> i32 {
    let child = clone(DESCRIPTORS, None).expect("a process");
    let Fork::Parent(child) = child else {
        let told = mqueue::notify(queue, mqueue::Tell::Signal(10, 7));
        testkit::calls::end_thread(i32::from(told.is_err()));
    };
    let ended = waitpid(Some(child), WaitOptions::empty());
    let (_, status) = ended.expect("a child").expect("it has ended");
    assert_eq!(status.exit_status(), Some(0), "it was registered");
    child.as_raw_nonzero().get()
}

#[test]
fn registration_that_an_ended_process_has_left_is_ended() {
    testkit::needs_root!();
    let _alone = alone();
    let Some((queue, _name)) = queue("left") else {
        return;
    };
    let register = || mqueue::notify(&queue, mqueue::Tell::Nothing);
    for texts in [&["one", "two"][..], &[]] {
        all(&queue);
        let pid = register_and_end(&queue);
        texts.iter().for_each(|text| send(&queue, 0, text));
        if texts.is_empty() {
            let busy = register().expect_err("somebody is registered");
            assert_eq!(busy.raw_os_error(), Some(libc::EBUSY));
        }
        let left = Notify::of_process(pid);
        left.end_left(queue.as_fd(), "it")
            .expect("nobody else has it");
        register().expect("nobody is registered");
        // Nor is one of a process that lives, as this one is.
        let own = std::process::id().cast_signed();
        Notify::of_process(own)
            .end_left(queue.as_fd(), "it")
            .expect("it stays");
        let busy = register().expect_err("this process is registered");
        assert_eq!(busy.raw_os_error(), Some(libc::EBUSY));
        // An empty queue is one that a message ends the registration of.
        let there = all(&queue).into_iter().map(|(_, text)| text);
        assert_eq!(there.collect::<Vec<_>>(), texts);
        send(&queue, 0, "");
        assert_eq!(all(&queue).len(), 1);
    }
    let left = Notify::of_process(register_and_end(&queue));
    let outsider = Outsider::start(&queue);
    let refused = left.end_left(queue.as_fd(), "it");
    outsider.assert_named(&refused.expect_err("somebody may wait for a message"));
    assert_eq!(all(&queue), [], "none has come");
}
