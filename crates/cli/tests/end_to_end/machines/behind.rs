//! Restored machines whose monitors are behind proxies: they are started by a program that hands
//! the socket of the monitor over to the test, and has QEMU listen at another one.

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use sys::socket::{self, Along};

use super::proxy::{Proxy, Shared};
use super::*;

/// How long a machine may wait until somebody talks to it.
const PATIENCE: Duration = Duration::from_secs(600);

/// Hands the listener of the monitor over, and executes QEMU with the one that it gets for it.
const PROGRAM: &str = "#!/usr/bin/env python3
import os, re, socket, sys
found = (re.search('stillframe-monitor,fd=([0-9]+)', word) for word in sys.argv)
number = int(next(one for one in found if one).group(1))
control = socket.socket(socket.AF_UNIX)
control.connect('CONTROL')
socket.send_fds(control, [str(os.getpid()).encode()], [number])
said, got, _, _ = socket.recv_fds(control, 1, 1)
os.dup2(got[0], number, inheritable=True)
os.execvp('QEMU', sys.argv)
";

/// Who takes the monitors of restored machines.
pub(super) struct Switch {
    folder: PathBuf,
    /// The program to start QEMU by.
    pub program: PathBuf,
    /// What is asked, and what goes wrong.
    pub course: Shared,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Switch {
    /// Makes one in an empty folder, for QEMU's program.
    pub fn new(folder: &Path, qemu: &str) -> Self {
        let control = folder.join("control");
        let program = folder.join("qemu");
        let text = PROGRAM.replace("CONTROL", control.to_str().expect("text"));
        fs::write(&program, text.replace("QEMU", qemu)).expect("written");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&program, mode).expect("it is ours");
        let listener = UnixListener::bind(&control).expect("it listens");
        let (course, is_over) = (Shared::default(), Arc::new(AtomicBool::new(false)));
        let (own, over, place) = (course.clone(), is_over.clone(), folder.to_owned());
        let thread = std::thread::spawn(move || {
            for control in listener.incoming().map_while(Result::ok) {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                let (course, place) = (own.clone(), place.clone());
                // It ends with its QEMU.
                std::thread::spawn(move || take(&control, &place, course));
            }
        });
        Self {
            folder: folder.to_owned(),
            program,
            course,
            is_over,
            thread: Some(thread),
        }
    }

    /// Where QEMU itself listens.
    pub fn socket(&self, pid: i32) -> PathBuf {
        socket(&self.folder, pid)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // Otherwise it does not hear of it.
        if UnixStream::connect(self.folder.join("control")).is_ok() {
            let _ = self.thread.take().map(JoinHandle::join);
        }
    }
}

fn socket(folder: &Path, pid: i32) -> PathBuf {
    folder.join(pid.to_string())
}

/// Takes one monitor. None of it is there any more where the machine is killed meanwhile.
fn take(control: &UnixStream, folder: &Path, course: Shared) -> Option<()> {
    let mut said = [0; 32];
    let received = socket::receive(control, &mut said, 0).ok()?;
    let said = String::from_utf8_lossy(&said[..received.len]).into_owned();
    let pid = said.parse::<i32>().ok()?;
    let listener = UnixListener::from(received.rights.into_iter().next()?);
    // Whoever starts the machine has connected before.
    let (client, _) = listener.accept().ok()?;
    drop(listener);
    let place = socket(folder, pid);
    let behind = UnixListener::bind(&place).expect("it listens");
    let upstream = UnixStream::connect(&place).expect("it listens");
    let along = Along {
        rights: &[behind.as_fd()],
        ..Along::default()
    };
    socket::send(control, b"-", along, 0).ok()?;
    drop(behind);
    let (client, upstream) = (OwnedFd::from(client), OwnedFd::from(upstream));
    Proxy::new(course, pid).run(client, upstream, PATIENCE);
    Some(())
}
