//! Descriptors that stand in a message and that no task has open any more.
use std::fs;

use testkit::program::Program;
use testkit::{needs_program, needs_root};

use crate::stillframe;

/// Sends descriptors to itself, closes them, and looks at what it receives when it is told to.
const SENDER: &str = r#"
import array, fcntl, mmap, os, select, signal, socket, sys
folder = sys.argv[1]
F_ADD_SEALS, F_GET_SEALS, F_SEAL_FUTURE_WRITE, F_SEAL_SEAL = 1033, 1034, 0x10, 1
sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
os.ftruncate(sealed, 4096)
kept = mmap.mmap(sealed, 4096)
fcntl.fcntl(sealed, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)
signal.signal(signal.SIGUSR2, lambda *_: None)
left, right = socket.socketpair()
fcntl.fcntl(left, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(left, 10, signal.SIGUSR2)
fcntl.fcntl(left, fcntl.F_SETFL, fcntl.fcntl(left, fcntl.F_GETFL) | os.O_ASYNC)
event = os.eventfd(0)
epoll = select.epoll()
epoll.register(event, select.EPOLLIN)
to, at = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
rights = array.array("i", [sealed, left.fileno(), epoll.fileno()])
to.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
os.close(sealed)
left.close()
epoll.close()
os.mkdir(folder + "/ready")
signal.sigwait([signal.SIGUSR1])
_, along, _, _ = at.recvmsg(10, 100)
sealed, left, epoll = array.array("i", along[0][2])
seals = fcntl.fcntl(sealed, F_GET_SEALS)
owner = fcntl.fcntl(left, fcntl.F_GETOWN) == os.getpid()
is_async = fcntl.fcntl(left, fcntl.F_GETFL) & os.O_ASYNC != 0
told = [hex(seals), owner, fcntl.fcntl(left, 10 + 1), is_async]
kept[0] = 1
epoll = select.epoll.fromfd(epoll)
told.append(epoll.poll(0))
os.eventfd_write(event, 1)
told.append(epoll.poll(0) == [(event, select.EPOLLIN)])
epoll.unregister(event)
told.append(epoll.poll(0))
open(folder + "/told", "w").write(repr(told))
os.mkdir(folder + "/done")
signal.pause()
"#;

#[test]
fn what_was_set_after_opening_survives_in_flight() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer loses what is set after opening");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    // The signal that it waits for is blocked from the start.
    let program = Program::new("/usr/bin/python3")
        .args([
            "-c",
            &format!("import signal\nsignal.pthread_sigmask(0, [10])\n{SENDER}"),
        ])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    stillframe.cycle(3, &program, &[]);
    testkit::tree::signal(program.pid(), rustix::process::Signal::USR1);
    program.wait_file(&folder.path().join("done"));
    let told = fs::read_to_string(folder.path().join("told")).expect("it was written");
    assert_eq!(told, "['0x11', True, 12, True, [], True, []]");
}
