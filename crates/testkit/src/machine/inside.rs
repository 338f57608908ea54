//! What runs in the machine as process 1: it makes the system ready, runs one test after the other
//! and turns the machine off. All that it says goes to the serial line, on which the test program
//! outside listens.
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount};
use rustix::process::WaitOptions;
use rustix::system::RebootCommand;
use sys::netlink::{Batch, Netlink};

use super::{INSIDE, MARK, MODULES, PLAN, STILLFRAME, leg, stay};
use crate::{skip, stillframe, tree, wait};

/// How long a test may take, in the machine's own time: what waits for nothing but time waits that
/// long in a moment.
const LIMIT: Duration = Duration::from_secs(300);
/// Where tests note that they were skipped.
const SKIPS: &str = "/run/skips";

/// Does all of it, and never returns.
pub fn run() -> ! {
    let done = prepare().and_then(|()| match stay::is_planned() {
        true => run_stay(),
        false => run_all(),
    });
    match done {
        Ok(()) => say("end"),
        Err(error) => say(&format!("broken {error}")),
    }
    let _ = io::stdout().flush();
    if stay::is_here() {
        // There is no machine that could be turned off.
        std::process::exit(0);
    }
    let _ = rustix::system::reboot(RebootCommand::PowerOff);
    // The kernel panics, and the machine ends too.
    std::process::exit(1);
}

/// `setsid PROGRAM ARGUMENT…`: executes the program in a session of its own.
///
/// # Errors
/// Why it could not.
pub fn setsid(arguments: &[String]) -> io::Error {
    use std::os::unix::process::CommandExt;
    let Some((program, arguments)) = arguments.split_first() else {
        return io::Error::other("no program is named");
    };
    match rustix::process::setsid() {
        Ok(_) => Command::new(program).args(arguments).exec(),
        Err(errno) => errno.into(),
    }
}

/// Says something to the test program outside, on a line of its own.
fn say(what: &str) {
    println!("\n{MARK}{what}");
}

fn failed(doing: &str) -> impl FnOnce(io::Error) -> io::Error {
    let doing = doing.to_owned();
    move |error| io::Error::other(format!("{doing}: {error}"))
}

fn prepare() -> io::Result<()> {
    for (place, kind) in [
        ("/proc", "proc"),
        ("/sys", "sysfs"),
        ("/dev", "devtmpfs"),
        ("/dev/pts", "devpts"),
        ("/dev/shm", "tmpfs"),
        ("/tmp", "tmpfs"),
        ("/run", "tmpfs"),
    ] {
        let doing = format!("mount {place}");
        fs::create_dir_all(place).map_err(failed(&doing))?;
        mount(kind, place, kind, MountFlags::empty(), None)
            .map_err(|errno| failed(&doing)(errno.into()))?;
    }
    if Path::new(MODULES).exists() {
        insert_modules()?;
    }
    bring_loopback_up().map_err(failed("bring the loopback interface up"))?;
    tree::adopt_orphans();
    Ok(())
}

/// Inserts the kernel's modules. One may need another: so all are tried, as long as one goes in.
///
/// # Errors
/// Those of reading them, and of the last that does not go in.
pub(super) fn insert_modules() -> io::Result<()> {
    let files = fs::read_dir(MODULES).map_err(failed("list the modules"))?;
    let files = files.map(|file| fs::read(file?.path()));
    let mut left = files.collect::<io::Result<Vec<_>>>()?;
    while !left.is_empty() {
        let before = left.len();
        let mut error = None;
        left.retain(|module| {
            let inserted = rustix::system::init_module(module, c"");
            error = inserted.err().or(error);
            inserted.is_err()
        });
        match error {
            Some(errno) if left.len() == before => {
                return Err(failed("insert a module")(errno.into()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn bring_loopback_up() -> io::Result<()> {
    const RTM_NEWLINK: u16 = 16;
    const IFF_UP: u32 = 1;
    // struct ifinfomsg: family and type are left open; index, flags, those that are to change.
    let index = 1_u32;
    let words = [0, index, IFF_UP, IFF_UP].map(u32::to_ne_bytes);
    let mut batch = Batch::default();
    batch.message(RTM_NEWLINK, 0, &words.concat());
    Netlink::route()?.apply(batch)
}

/// What a tree does here that goes from kernel to kernel.
fn run_stay() -> io::Result<()> {
    say(&format!("begin {}", leg::NAME));
    match stay::run() {
        Ok(verdict) => say(&verdict),
        Err(error) => {
            println!("{error}");
            tell_processes();
            say(&format!("failed {}", leg::NAME));
        }
    }
    Ok(())
}

fn run_all() -> io::Result<()> {
    let plan = fs::read_to_string(PLAN).map_err(failed("read the plan"))?;
    for line in plan.lines() {
        let (program, test) = line
            .split_once(' ')
            .ok_or_else(|| io::Error::other("a line of the plan has no test"))?;
        say(&format!("begin {test}"));
        let begun = Instant::now();
        let verdict = run_one(program, test)?;
        let seconds = begun.elapsed().as_secs_f64();
        println!("after {seconds:.1} s of the machine's time");
        // Nothing of it may disturb the next one, or what is said of it.
        let strays = tree::children(std::process::id());
        if !tree::kill(&strays) {
            println!("it left processes that cannot be killed: {strays:?}");
        }
        say(&verdict);
    }
    Ok(())
}

/// Runs a test, and tells how it ended, in the words of [`super::Verdict`].
fn run_one(program: &str, test: &str) -> io::Result<String> {
    let _ = fs::remove_file(SKIPS);
    let mut child = Command::new(program)
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, "1")
        .env(stillframe::VARIABLE, STILLFRAME)
        .env(skip::VARIABLE, SKIPS)
        .env("PATH", "/bin")
        .env("RUST_BACKTRACE", "1")
        .stdin(Stdio::null())
        .spawn()
        .map_err(failed(program))?;
    let Some(status) = wait_for(&mut child)? else {
        tell_processes();
        return Ok(format!("failed {test}"));
    };
    println!("{status}");
    let skipped = fs::read_to_string(SKIPS).unwrap_or_default();
    Ok(match skipped.lines().next() {
        _ if !status.success() => format!("failed {test}"),
        Some(why) => format!("left {test} {why}"),
        None => format!("passed {test}"),
    })
}

/// Waits for the end of a test, and reaps all that has no parent any more. None when it hangs.
fn wait_for(child: &mut Child) -> io::Result<Option<ExitStatus>> {
    let ended = wait::try_wait_for(LIMIT, || child.try_wait().transpose());
    while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
    ended.transpose()
}

/// Says what each process waits for.
fn tell_processes() {
    println!("\nit does not end; every process:");
    let own = std::process::id();
    for pid in tree::members(own).into_iter().filter(|pid| *pid != own) {
        for tid in tree::threads(pid) {
            let folder = Path::new("/proc").join(pid.to_string());
            let folder = folder.join("task").join(tid.to_string());
            let read = |name: &str| fs::read_to_string(folder.join(name)).unwrap_or_default();
            let (name, state) = (read("comm"), tree::state(tid).unwrap_or('?'));
            println!(
                "{pid} {tid} {state} {} in {}",
                name.trim(),
                read("syscall").trim()
            );
            print!("{}", read("stack"));
        }
    }
}
