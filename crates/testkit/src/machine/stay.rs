//! What the first process does where a tree stays on its way from kernel to kernel
//! ([`super::leg`]).
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode};
use rustix::termios;
use rustix::thread::CapabilitySet;

use super::leg::{IMAGE, NAME, PLAN};
use super::{STILLFRAME, SUBJECT};
use crate::{tree, wait};

/// The subject's folder.
const FOLDER: &str = "/tmp/around";
/// Pids from here on are free everywhere.
const PIDS_FROM: &str = "4000";
/// In how many seconds of its own clock the subject's wait until a time ends.
const DEADLINE_S: &str = "30";
/// How long the subject is waited for.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often its loops are run through in a second, at the least.
const STEPS_A_SECOND: u64 = 5;

/// Tells whether there is something to be done.
pub fn is_planned() -> bool {
    Path::new(PLAN).exists()
}

/// Tells whether this is no machine, but the host: the image goes into a file.
pub fn is_here() -> bool {
    fs::read_to_string(PLAN).is_ok_and(|plan| plan.ends_with(" /out"))
}

/// Does it. Returns the words of a [`super::Verdict`].
///
/// # Errors
/// What could not be done.
pub fn run() -> io::Result<String> {
    let plan = fs::read_to_string(PLAN)?;
    let mut words = plan.split(' ');
    let mut word = || words.next().unwrap_or_default();
    let (comes, seconds, out) = (word() == "comes", word(), word());
    let seconds = seconds.parse::<u64>().map_err(io::Error::other)?;
    fs::create_dir_all(FOLDER)?;
    let control = Path::new(FOLDER).join("control");
    rustix::fs::mknodat(CWD, &control, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    let pid_file = Path::new(IMAGE).join("pid");
    let pid = match comes {
        true => {
            stillframe(&[
                "restore",
                "-d",
                "-D",
                IMAGE,
                "-v4",
                "-o",
                "/tmp/restore.log",
            ])?;
            fs::read_to_string(&pid_file)?
        }
        false => begin()?,
    };
    let number = pid.parse().map_err(io::Error::other)?;
    stay(number, seconds)?;
    let _ = fs::remove_dir_all(IMAGE);
    stillframe(&[
        "dump",
        "-t",
        &pid,
        "-D",
        IMAGE,
        "-v4",
        "-o",
        "/tmp/dump.log",
    ])?;
    fs::write(&pid_file, &pid)?;
    send(Path::new(out))?;
    Ok(format!("passed {NAME}"))
}

/// Starts the subject; its pid. It has no privileges, as not every host has all of them.
fn begin() -> io::Result<String> {
    fs::write("/proc/sys/kernel/ns_last_pid", PIDS_FROM)?;
    // On a thread of its own, as this process needs them again.
    let started = std::thread::spawn(|| {
        // By name: the set of all has bits, too, that are no kernel's.
        for (_, one) in CapabilitySet::all().iter_names() {
            rustix::thread::remove_capability_from_bounding_set(one)?;
        }
        start()
    });
    let child = started.join().expect("it does not panic")?;
    let ready = Path::new(FOLDER).join("ready");
    let started = wait::try_wait_for(PATIENCE, || ready.exists().then_some(()));
    started.ok_or_else(|| io::Error::other("the subject does not get ready"))?;
    Ok(child.id().to_string())
}

fn start() -> io::Result<Child> {
    Command::new("/bin/setsid")
        .args([SUBJECT, "around", FOLDER, DEADLINE_S])
        .env_clear()
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

/// Runs the command; its log where it fails.
fn stillframe(arguments: &[&str]) -> io::Result<()> {
    let status = Command::new(STILLFRAME)
        .args(arguments)
        .stdin(Stdio::null())
        .status()?;
    if status.success() {
        return Ok(());
    }
    let log = arguments.last().expect("the log is named last");
    let log = fs::read_to_string(log).unwrap_or_default();
    Err(io::Error::other(format!("{arguments:?}: {status}\n{log}")))
}

/// Has the subject go on for so many seconds of its clock, and looks at it.
fn stay(pid: u32, seconds: u64) -> io::Result<()> {
    let ask = |question: &str| ask(pid, question);
    let steps = || ask("steps")?.parse::<u64>().map_err(io::Error::other);
    let before = steps()?;
    let mut now = before;
    let went_on = wait::try_wait_for(PATIENCE, || {
        now = steps().unwrap_or(before);
        (now >= before + seconds * STEPS_A_SECOND).then_some(())
    });
    let (check, deadline) = (ask("check")?, ask("deadline")?);
    println!("{before} to {now} steps, {check}, the wait until a time: {deadline}");
    let waits = deadline == "waits";
    let in_time = deadline
        .parse()
        .is_ok_and(|ms: i64| (0..5000).contains(&ms));
    if went_on.is_none() || check != "right" || !(waits || in_time) {
        return Err(io::Error::other("the tree does not go on as it should"));
    }
    Ok(())
}

fn ask(pid: u32, question: &str) -> io::Result<String> {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let folder = Path::new(FOLDER);
    let mut control = OpenOptions::new()
        .write(true)
        .open(folder.join("control"))?;
    control.write_all(format!("{number} {question}\n").as_bytes())?;
    let answer = folder.join(format!("answer-{number}"));
    let answer = wait::try_wait_for(PATIENCE, || match fs::read_to_string(&answer) {
        Ok(answer) => Some(Ok(answer)),
        Err(_) if !tree::is_alive(pid) => Some(Err(io::Error::other("the subject is dead"))),
        Err(_) => None,
    });
    answer.unwrap_or_else(|| Err(io::Error::other("the subject does not answer")))
}

/// Sends the image: each file's name and size on a line, and its bytes.
fn send(out: &Path) -> io::Result<()> {
    let mut out = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(out)?;
    let is_line = termios::isatty(out.as_fd());
    if is_line {
        let mut raw = termios::tcgetattr(&out)?;
        raw.make_raw();
        termios::tcsetattr(&out, termios::OptionalActions::Now, &raw)?;
    }
    for file in fs::read_dir(IMAGE)? {
        let file = file?;
        if !file.file_type()?.is_file() {
            continue;
        }
        let bytes = fs::read(file.path())?;
        let name = file.file_name();
        writeln!(out, "{} {}", name.to_string_lossy(), bytes.len())?;
        out.write_all(&bytes)?;
    }
    writeln!(out, "end")?;
    if is_line {
        termios::tcdrain(&out)?;
    }
    Ok(())
}
