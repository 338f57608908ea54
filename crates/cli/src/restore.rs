//! `stillframe restore`: brings a process tree back.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::time::Instant;

use process::namespaces::{Inner, Outer, Side};
use process::{Afterwards, InheritFd, Job, LazyPages, Restored};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus, wait, waitpid};
use serde_json::{Value, json};
use store::Images;
use volume::AttachedVolume;

use crate::exit::{Failure, Status};
use crate::options::Options;
use crate::session::Session;
use crate::watch::Watch;
use crate::with_volume::{self, RestoreObserver};
use crate::{logfile, output};

/// Socket of a server of lazy pages, in the work directory, as with criu(8).
pub const LAZY_PAGES_SOCKET: &str = "lazy-pages.socket";

/// Checks that there is a directory of an image.
fn check_directory(options: &Options) -> Result<(), Failure> {
    let path = options.images_dir.clone();
    if path.is_dir() {
        return Ok(());
    }
    let source = std::fs::read_dir(&path).err();
    Err(Failure::File {
        action: "open the image directory",
        path,
        source: source.unwrap_or(Errno::NOTDIR.into()),
    })
}

/// Brings the tree back.
///
/// # Errors
/// Whatever the engine tells; no task is left then. Options that exclude each other.
pub fn run(mut options: Options, idle: &[&str], started: Instant) -> Result<Status, Failure> {
    check(&options)?;
    // Its log is made in the image's directory, unless it is to be elsewhere.
    if !options.logs_with_images() {
        check_directory(&options)?;
    }
    let mut session = match options.start("restore", false, idle, started) {
        Ok(session) => session,
        Err(failure) => {
            check_directory(&options)?;
            return Err(failure);
        }
    };
    let pidfile = options.pidfile.take();
    complete(&mut options, &session)?;
    if options.plan {
        let plan = process::plan(&options.restore).map_err(Failure::engine("plan"))?;
        output::say(&plan);
        return Ok(Status::Done);
    }
    let watch = Watch::new(&session).with_pidfile(pidfile)?;
    let attached = attach(&mut options, &session)?;
    let mut watch = RestoreObserver { watch, attached };
    let mut restored = match process::restore(&options.restore, &mut watch) {
        Err(process::Error::Inside { code }) => {
            return Ok(Status::of_number(code).unwrap_or(Status::Failed));
        }
        restored => restored.map_err(Failure::engine("restore"))?,
    };
    let outer = match restored.namespace.take() {
        Some(Side::Inner(inner)) => {
            // The pidfile and the volume are the process's outside.
            std::mem::forget(watch);
            drop(session);
            stay_inside(options, &restored, inner);
        }
        Some(Side::Outer(outer)) => Some(outer),
        None => None,
    };
    watch.watch.done();
    let mounted = watch.attached.map(AttachedVolume::keep);
    session.ready();
    log::info!(
        "restored {} tasks in {} us",
        restored.tasks,
        restored.total_us
    );
    if outer.is_none() {
        options.tell(
            || to_json(&restored, mounted.as_deref()),
            || to_text(&restored),
        );
    }
    if !options.exec_cmd.is_empty() {
        return Err(execute(&options.exec_cmd, &session.work_dir));
    }
    if options.restore.detached && rustix::process::getpid().is_init() {
        stay(restored.root);
    }
    if !options.restore.detached {
        wait_for_all(restored, outer.as_ref())?;
    }
    Ok(Status::Done)
}

/// Brings back the volume that was saved with the tree, where one is asked for: it comes first.
fn attach(options: &mut Options, session: &Session) -> Result<Option<AttachedVolume>, Failure> {
    let Some(target) = options.with_volume.take() else {
        return Ok(None);
    };
    // It needs the same trust in the image.
    let opened = options.restore.images.open().map_err(image::Error::Place);
    drop(opened.map_err(|error| Failure::engine("restore")(error.into()))?);
    let attached = with_volume::attach(&session.images_dir, target)?;
    if let Some([before, now]) = attached.moved {
        let what = with_volume::moved(before, now);
        log::warn!("{what}");
        output::complain(&format!("stillframe: {what}\n"));
    }
    Ok(Some(attached))
}

/// Waits for the end of the tree, and for memory that is still to come.
fn wait_for_all(mut restored: Restored, outer: Option<&Outer>) -> Result<(), Failure> {
    logfile::flush();
    match outer {
        Some(outer) => tell_end(restored.root, outer.wait().map_err(|e| e.to_string())),
        None => wait_for(restored.root, restored.job.as_mut()),
    }
    match restored.lazy {
        Some(lazy) => lazy.outcome().map_err(Failure::engine("bring memory in")),
        None => Ok(()),
    }
}

fn check(options: &Options) -> Result<(), Failure> {
    let usage = |text: &str| Err(Failure::Usage(text.to_owned()));
    if options.restore.sibling && !options.restore.detached {
        return usage("--restore-sibling needs --restore-detached");
    }
    if !options.exec_cmd.is_empty() && options.restore.detached {
        return usage("--exec-cmd and --restore-detached exclude each other");
    }
    Ok(())
}

/// Adds to what the engine is asked for what is only known now.
fn complete(options: &mut Options, session: &Session) -> Result<(), Failure> {
    let allowed = options.allowed_in(&session.work_dir);
    let restore = &mut options.restore;
    for (number, stands_for) in options.inherit_fd.drain(..) {
        let fd = sys::inherited::duplicate(number).map_err(|source| Failure::Descriptor {
            fd: number,
            option: "--inherit-fd",
            source,
        })?;
        let fd = std::sync::Arc::new(fd);
        restore.inherit_fds.push(InheritFd { fd, stands_for });
    }
    restore.images = Images::at(&session.images_dir, options.trust_image || options.plan);
    restore.lazy = options.lazy_pages.then(|| LazyPages {
        socket: session.work_dir.join(LAZY_PAGES_SOCKET),
        log: logfile::number(),
    });
    let waits = !restore.detached && options.exec_cmd.is_empty();
    let runs = restore.afterwards == Afterwards::Run;
    restore.foreground = options.allowed.shell_job && waits && runs;
    restore.allowed = allowed;
    Ok(())
}

/// Becomes the command of `--exec-cmd`; comes back only when that fails.
fn execute(command: &[OsString], work_dir: &Path) -> Failure {
    logfile::flush();
    let mut program = std::process::Command::new(&command[0]);
    let source = program.args(&command[1..]).current_dir(work_dir).exec();
    Failure::Exec {
        command: command[0].clone(),
        source,
    }
}

/// Waits until the root task, a child of this process, has ended. How it ended does not matter.
fn wait_for(root: Pid, job: Option<&mut Job>) {
    let status = match job {
        Some(job) => job.wait(root).map_err(|error| error.to_string()),
        None => wait_for_end(root).map_err(|error| error.to_string()),
    };
    tell_end(root, status);
}

/// Logs how the root task has ended.
fn tell_end(root: Pid, status: Result<WaitStatus, String>) {
    match status.map(|status| (status.exit_status(), status.terminating_signal())) {
        Ok((Some(code), _)) => log::info!("the root task {root} exited with {code}"),
        Ok((None, signal)) => {
            let signal = signal.unwrap_or_default();
            log::info!("the root task {root} was killed by signal {signal}");
        }
        Err(error) => log::warn!("cannot wait for the root task {root}: {error}"),
    }
}

/// Stays as process 1 of a pid namespace, whose end would end the tree: reaps all that ends there,
/// and ends as the root task has ended when nothing is left.
fn stay(root: Pid) -> ! {
    log::warn!("this is process 1 of its pid namespace: it stays until the tree has ended");
    logfile::flush();
    let mut code = 0;
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == root => code = exit_code(status).unwrap_or(code),
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => break,
        }
    }
    log::info!("the tree has ended: its root task {root} with {code}");
    logfile::flush();
    std::process::exit(code)
}

/// The life of the copy in the tree's namespaces, of which it may be the first process.
fn stay_inside(mut options: Options, restored: &Restored, inner: Inner) -> ! {
    // It would keep others waiting for their end.
    options.restore.inherit_fds.clear();
    if let Some(listener) = options.listener.take() {
        listener.leave();
    }
    log::info!(
        "restored {} tasks in {} us, the root {} in namespaces of its own",
        restored.tasks,
        restored.total_us,
        restored.root
    );
    options.tell(|| to_json(restored, None), || to_text(restored));
    logfile::flush();
    let ended = inner.stay(options.restore.detached);
    let code = match ended {
        Ok(status) => status.and_then(exit_code).unwrap_or_default(),
        Err(error) => {
            log::error!("{error}");
            Status::Failed as i32
        }
    };
    if rustix::process::getpid().is_init() {
        log::info!("the tree has ended: its root {} with {code}", restored.root);
    }
    logfile::flush();
    std::process::exit(code)
}

/// How a shell tells of a process that has ended so.
fn exit_code(status: WaitStatus) -> Option<i32> {
    const SIGNALLED: i32 = 128;
    let by_signal = status.terminating_signal().map(|signal| SIGNALLED + signal);
    status.exit_status().or(by_signal)
}

fn wait_for_end(root: Pid) -> rustix::io::Result<WaitStatus> {
    loop {
        match waitpid(Some(root), WaitOptions::empty()) {
            Ok(Some((_, status))) if status.exited() || status.signaled() => return Ok(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

fn to_json(restored: &Restored, mounted: Option<&Path>) -> Value {
    let mut told = json!({"restore": {
        "root": restored.root.as_raw_nonzero().get(),
        "tasks": restored.tasks,
        "threads": restored.threads,
        "filled_pages": restored.filled_pages,
        "lazy_bytes": lazy_bytes(restored),
        "total_us": restored.total_us,
    }});
    if let Some(point) = mounted {
        told["restore"]["volume"] = json!({"mounted_on": point.display().to_string()});
    }
    told
}

/// Returns the number of bytes still to come.
fn lazy_bytes(restored: &Restored) -> u64 {
    restored.lazy.as_ref().map_or(0, |lazy| lazy.bytes)
}

fn to_text(restored: &Restored) -> String {
    format!(
        "root           {}\n\
         tasks          {}\n\
         threads        {}\n\
         pages filled   {}\n\
         bytes to come  {}\n\
         whole restore  {} us\n",
        restored.root.as_raw_nonzero(),
        restored.tasks,
        restored.threads,
        restored.filled_pages,
        lazy_bytes(restored),
        restored.total_us,
    )
}
