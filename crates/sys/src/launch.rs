//! A program that is started by a process of several threads, and held back until it may begin.
//!
//! Between the making of a process and its execve(2) lies the moment in which somebody else can be
//! told of it, as a watchdog that is to end it. A process that is not let go ends by itself when
//! this one does.

use std::ffi::{CStr, CString};
use std::io::{self, Read as _};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::proc::Capabilities;

/// What is to be started.
#[derive(Debug)]
pub struct Program<'a> {
    /// The file of the program.
    pub file: &'a CStr,
    /// Its arguments, of which the first is its name.
    pub arguments: &'a [CString],
    /// Its environment.
    pub environment: &'a [CString],
    /// The directory in which it starts.
    pub folder: &'a CStr,
    /// Its standard input, and its standard output and error.
    pub standard: [BorrowedFd<'a>; 2],
    /// Descriptors that it has under the numbers that they have here; all others should close on
    /// exec.
    pub inherited: &'a [BorrowedFd<'a>],
    /// A unix socket that listens for it: who connects sees it at the other end (`SO_PEERCRED`).
    pub listener: Option<BorrowedFd<'a>>,
    /// Whom it runs as, where that is not this process's user.
    pub user: Option<&'a User>,
}

/// Whom a program runs as.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The real, effective and saved user.
    pub uids: [u32; 3],
    /// The same groups.
    pub gids: [u32; 3],
    /// More groups.
    pub groups: Vec<u32>,
    /// Its capabilities; of a program that is started, execve(2) works out which are permitted and
    /// in effect.
    pub capabilities: Capabilities,
    /// True if no program gives it privileges (`PR_SET_NO_NEW_PRIVS`).
    pub no_new_privileges: bool,
}

/// A process that has not executed its program yet. It ends where this is dropped.
#[derive(Debug)]
pub struct Held {
    pid: Pid,
    process: OwnedFd,
    /// Let go by a byte; ended by nothing.
    gate: OwnedFd,
    /// What went wrong, or nothing when the program was executed.
    failure: OwnedFd,
}

/// A program that runs.
#[derive(Debug)]
pub struct Launched {
    /// Its process.
    pub pid: Pid,
    /// The same as a descriptor.
    pub process: OwnedFd,
}

/// All that the new process needs, so that it allocates nothing.
struct Prepared {
    file: *const libc::c_char,
    arguments: Vec<*const libc::c_char>,
    environment: Vec<*const libc::c_char>,
    folder: *const libc::c_char,
    standard: [RawFd; 2],
    inherited: Vec<RawFd>,
    listener: Option<RawFd>,
    user: Option<User>,
    gate: RawFd,
    failure: RawFd,
}

/// Makes the process of a program, in a session of its own, with all signals as they are by
/// default. See fork(2), execve(2).
///
/// # Errors
/// Those of pipe(2), fork(2) and pidfd_open(2).
pub fn hold(program: &Program<'_>) -> io::Result<Held> {
    let (gate, open) = pipe_with(PipeFlags::CLOEXEC)?;
    let (failure, fail) = pipe_with(PipeFlags::CLOEXEC)?;
    let prepared = Prepared {
        file: program.file.as_ptr(),
        arguments: pointers(program.arguments),
        environment: pointers(program.environment),
        folder: program.folder.as_ptr(),
        standard: program.standard.map(|fd| fd.as_raw_fd()),
        inherited: program.inherited.iter().map(AsRawFd::as_raw_fd).collect(),
        listener: program.listener.map(|fd| fd.as_raw_fd()),
        user: program.user.cloned(),
        gate: gate.as_raw_fd(),
        failure: fail.as_raw_fd(),
    };
    let opener = open.as_raw_fd();
    // SAFETY: the child makes nothing but system calls on memory that was prepared before.
    let pid = match unsafe { libc::fork() } {
        0 => child(&prepared, opener),
        pid if pid < 0 => return Err(io::Error::last_os_error()),
        pid => Pid::from_raw(pid).expect("the parent gets a pid above 0"),
    };
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(Held {
        pid,
        process,
        gate: open,
        failure,
    })
}

impl Held {
    /// Its process.
    #[must_use]
    pub fn process(&self) -> BorrowedFd<'_> {
        self.process.as_fd()
    }

    /// Has it execute its program, and returns when it has.
    ///
    /// # Errors
    /// Those of chdir(2), listen(2) and execve(2), and of the calls that change a process's user.
    pub fn go(self) -> io::Result<Launched> {
        rustix::io::retry_on_intr(|| rustix::io::write(&self.gate, &[1]))?;
        drop(self.gate);
        let mut told = Vec::new();
        std::fs::File::from(self.failure).read_to_end(&mut told)?;
        match <[u8; 4]>::try_from(told.as_slice()) {
            Ok(errno) => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno))),
            Err(_) => Ok(Launched {
                pid: self.pid,
                process: self.process,
            }),
        }
    }
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    let all = strings.iter().map(|string| string.as_ptr());
    all.chain([std::ptr::null()]).collect()
}

/// The new process's way to its program.
fn child(it: &Prepared, opener: RawFd) -> ! {
    // The other end of the gate is the parent's alone, whose end is to be heard of.
    // SAFETY: closes a descriptor of this copy, which drops none.
    unsafe { libc::close(opener) };
    let mut byte = 0u8;
    loop {
        // SAFETY: reads one byte into one byte.
        match unsafe { libc::read(it.gate, (&raw mut byte).cast(), 1) } {
            1 => break,
            -1 if errno() == libc::EINTR => {}
            _ => super::fork::exit_now(1),
        }
    }
    // SAFETY: a session of its own, for a process that leads no group.
    unsafe { libc::setsid() };
    set_signals_back();
    let done = furnish(it);
    if done {
        let (arguments, environment) = (it.arguments.as_ptr(), it.environment.as_ptr());
        // SAFETY: all three are pointers to strings that the parent prepared, ended by null.
        unsafe { libc::execve(it.file, arguments, environment) };
    }
    let told = errno().to_ne_bytes();
    // SAFETY: writes four bytes of four.
    unsafe { libc::write(it.failure, told.as_ptr().cast(), told.len()) };
    super::fork::exit_now(1)
}

fn furnish(it: &Prepared) -> bool {
    let [input, output] = it.standard;
    for (from, to) in [(input, 0), (output, 1), (output, 2)] {
        // SAFETY: replaces a descriptor of this copy, which drops none.
        if unsafe { libc::dup2(from, to) } < 0 {
            return false;
        }
    }
    for fd in &it.inherited {
        // SAFETY: sets a flag of a descriptor of this copy.
        if unsafe { libc::fcntl(*fd, libc::F_SETFD, 0) } < 0 {
            return false;
        }
    }
    // SAFETY: a string that the parent prepared.
    if unsafe { libc::chdir(it.folder) } != 0 {
        return false;
    }
    if it.user.as_ref().is_some_and(|user| !become_user(user)) {
        return false;
    }
    if let Some(listener) = it.listener {
        // SAFETY: makes the credentials that who connects sees those of this process.
        if unsafe { libc::listen(listener, 8) } < 0 {
            return false;
        }
    }
    true
}

/// Has this process, which has one thread, run as somebody else. Nothing of that can be undone.
fn become_user(user: &User) -> bool {
    let Capabilities {
        inheritable,
        bounding,
        ambient,
        ..
    } = user.capabilities;
    for number in (0..64).filter(|number| bounding & (1 << number) == 0) {
        // The kernel does not know those behind its last one.
        if prctl(libc::PR_CAPBSET_READ, number, 0) == 1
            && prctl(libc::PR_CAPBSET_DROP, number, 0) != 0
        {
            return false;
        }
    }
    let ([ruid, euid, suid], [rgid, egid, sgid]) = (user.uids, user.gids);
    let (count, groups) = (user.groups.len(), user.groups.as_ptr());
    // SAFETY: so many numbers of groups, which the parent prepared.
    if unsafe { libc::syscall(libc::SYS_setgroups, count, groups) } != 0 {
        return false;
    }
    // SAFETY: takes no pointers.
    if unsafe { libc::syscall(libc::SYS_setresgid, rgid, egid, sgid) } != 0 {
        return false;
    }
    // The permitted set stays as it is until it is set below.
    if prctl(libc::PR_SET_KEEPCAPS, 1, 0) != 0 {
        return false;
    }
    // SAFETY: takes no pointers.
    if unsafe { libc::syscall(libc::SYS_setresuid, ruid, euid, suid) } != 0 {
        return false;
    }
    set_capabilities(inheritable | ambient, inheritable)
        && prctl(
            libc::PR_CAP_AMBIENT,
            libc::PR_CAP_AMBIENT_CLEAR_ALL.into(),
            0,
        ) == 0
        && (0..64)
            .filter(|number| ambient & (1 << number) != 0)
            .all(|number| {
                prctl(
                    libc::PR_CAP_AMBIENT,
                    libc::PR_CAP_AMBIENT_RAISE.into(),
                    number,
                ) == 0
            })
        && (!user.no_new_privileges || prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0) == 0)
}

fn prctl(option: i32, argument: i64, other: i64) -> i32 {
    // SAFETY: none of the options that are used here takes a pointer.
    unsafe { libc::prctl(option, argument, other, 0_i64, 0_i64) }
}

/// Sets what is permitted and in effect, and what is inheritable: capset(2).
fn set_capabilities(permitted: u64, inheritable: u64) -> bool {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    let half = |shift: u32| {
        let part = |set: u64| (set >> shift) as u32;
        [part(permitted), part(permitted), part(inheritable)]
    };
    let sets = [half(0), half(32)];
    // SAFETY: the header and the two structures of the version that it names.
    unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), sets.as_ptr()) == 0 }
}

/// No signal is blocked or ignored.
fn set_signals_back() {
    for signal in 1..=64 {
        // SAFETY: the default action is one for every signal; those that cannot be set stay.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: fills the set in.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: reads the filled set.
    unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) };
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use rustix::process::{WaitOptions, waitpid};

    use super::*;

    fn shell(script: &str) -> Vec<CString> {
        let words = ["sh", "-c", script].into_iter();
        words.map(|word| CString::new(word).unwrap()).collect()
    }

    fn program<'a>(arguments: &'a [CString], standard: [BorrowedFd<'a>; 2]) -> Program<'a> {
        Program {
            file: c"/bin/sh",
            arguments,
            environment: &[],
            folder: c"/",
            standard,
            inherited: &[],
            listener: None,
            user: None,
        }
    }

    #[test]
    fn a_program_has_what_it_is_given() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        let (kept, other) = io::pipe().unwrap();
        let arguments = shell(&format!(
            "pwd; echo $MARK; test -e /proc/self/fd/{} && echo kept; \
             test -e /proc/self/fd/{} || echo closed",
            kept.as_raw_fd(),
            other.as_raw_fd(),
        ));
        let environment = [CString::new("MARK=seen").unwrap()];
        let inherited = [kept.as_fd()];
        let program = Program {
            environment: &environment,
            inherited: &inherited,
            ..program(&arguments, [null.as_fd(), writer.as_fd()])
        };
        let launched = hold(&program).unwrap().go().unwrap();
        drop(writer);
        let mut told = String::new();
        reader.read_to_string(&mut told).unwrap();
        waitpid(Some(launched.pid), WaitOptions::empty()).unwrap();
        assert_eq!(told, "/\nseen\nkept\nclosed\n");
    }

    #[test]
    fn who_is_not_let_go_ends_and_runs_nothing() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        let arguments = shell("echo begun");
        let held = hold(&program(&arguments, [null.as_fd(), writer.as_fd()])).unwrap();
        drop(writer);
        let pid = held.pid;
        drop(held);
        let mut told = String::new();
        reader.read_to_string(&mut told).unwrap();
        waitpid(Some(pid), WaitOptions::empty()).unwrap();
        assert_eq!(told, "");
    }

    #[test]
    fn a_program_runs_as_whom_it_is_to() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let null = std::fs::File::open("/dev/null").unwrap();
        // A user that may bind low ports by an ambient capability, and one without capabilities.
        for ambient in [1 << 10, 0] {
            let (mut reader, writer) = io::pipe().unwrap();
            let arguments =
                shell("grep -E '^(Uid|Gid|Groups|Cap...|NoNewPrivs):' /proc/self/status");
            let user = User {
                uids: [65533; 3],
                gids: [65532; 3],
                groups: vec![7, 107],
                capabilities: Capabilities {
                    inheritable: ambient,
                    permitted: ambient,
                    effective: ambient,
                    bounding: 1 << 10 | 1,
                    ambient,
                },
                no_new_privileges: ambient == 0,
            };
            let environment = [CString::new("PATH=/bin:/usr/bin").unwrap()];
            let program = Program {
                environment: &environment,
                user: Some(&user),
                ..program(&arguments, [null.as_fd(), writer.as_fd()])
            };
            let launched = hold(&program).unwrap().go().unwrap();
            drop(writer);
            let mut told = String::new();
            reader.read_to_string(&mut told).unwrap();
            waitpid(Some(launched.pid), WaitOptions::empty()).unwrap();
            let told = told.split_whitespace().collect::<Vec<_>>().join(" ");
            let nothing_new = i32::from(ambient == 0);
            let expected = format!(
                "Uid: 65533 65533 65533 65533 Gid: 65532 65532 65532 65532 Groups: 7 107 \
                 CapInh: {ambient:016x} CapPrm: {ambient:016x} CapEff: {ambient:016x} \
                 CapBnd: 0000000000000401 CapAmb: {ambient:016x} NoNewPrivs: {nothing_new}"
            );
            assert_eq!(told, expected);
        }
    }

    #[test]
    fn what_cannot_be_executed_is_told() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let arguments = shell("true");
        let program = Program {
            file: c"/no/such/program",
            ..program(&arguments, [null.as_fd(), null.as_fd()])
        };
        let error = hold(&program).unwrap().go().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
    }
}
