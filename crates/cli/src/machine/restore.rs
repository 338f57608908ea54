//! `stillframe vm restore`: an image becomes machines that run.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use store::Images;
use vm::qemu::{Moment, Observer, RestoreMode, RestoreOptions, RestoredMachine};
use volume::AttachedVolume;

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;
use crate::output;
use crate::session::LogArgs;
use crate::with_volume;

/// `{n}` in a help text: clap makes a new line of the plain one. A style that is reset where there
/// is none is not seen, and is taken out of all that goes to no terminal.
macro_rules! number {
    () => {
        "{\u{1b}[0mn}"
    };
}

const NAME_HELP: &str = concat!(
    "What they are called; ",
    number!(),
    " is the number of each, from 1 on [default: vm-",
    number!(),
    "]"
);

const COMMAND_HELP: &str = concat!(
    "QEMU and its arguments, instead of those that the image has; ",
    number!(),
    " and {name} are each machine's number and name, {disk1}, {disk2} and so on the files of its \
     disks"
);

/// Start machines under QEMU as an image has them
#[derive(Debug, Args)]
pub struct Restore {
    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// Start what an image has that another user owns or may write to, too: it names the command
    #[arg(long)]
    trust_image: bool,

    /// How many machines; none with --pool, to have some wait
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1)]
    clones: u32,

    #[arg(long, value_name = "PATTERN", help = NAME_HELP)]
    name: Option<String>,

    /// Fill the memory of each machine before it runs: it has the memory to itself, and can be
    /// saved again [default for one machine]
    #[arg(long, conflicts_with = "share")]
    eager: bool,

    /// Let each machine run at once, and fill its memory meanwhile: first what it touches
    #[arg(long, conflicts_with_all = ["eager", "share", "keep", "pool"])]
    lazy: bool,

    /// Have all machines map one copy of the memory, and pay for what they write [default for
    /// several]
    #[arg(long)]
    share: bool,

    /// How long that copy stays for later machines when no machine has it any more
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 0,
        conflicts_with = "eager"
    )]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=31_536_000))]
    keep: u64,

    /// How many more machines to start and leave waiting, for the next restore of the image with
    /// this option to take them and pay for nothing but the state of their devices; they end with
    /// the copy of the memory
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "eager")]
    pool: u32,

    /// A program to call before and after the guest of each machine runs, told by
    /// CRTOOLS_SCRIPT_ACTION (pre-resume, post-resume); may be given again
    #[arg(long, value_name = "FILE")]
    action_script: Vec<PathBuf>,

    /// Where the sockets of their monitors and what QEMU says go: NAME.qmp and NAME.log
    #[arg(long, value_name = "DIR", default_value = ".")]
    qmp_dir: PathBuf,

    /// Where each machine has a disk of its own for each one that the image has (vm save
    /// --with-disks): NAME-1.qcow2, over the image's, which are put there once
    #[arg(long, value_name = "DIR")]
    disk_dir: Option<PathBuf>,

    /// Write the volume of the image (vm save --with-volume) to the device first, and mount it
    /// where it was
    #[arg(long, value_name = "DEVICE", conflicts_with = "pool")]
    with_volume: Option<PathBuf>,

    /// How long QEMU may take to answer, and half of how long until it does for the first time
    #[arg(long, value_name = "SECONDS", default_value_t = vm::qemu::PATIENCE.as_secs())]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,

    #[command(flatten)]
    log: LogArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,

    #[arg(last = true, value_name = "QEMU", help = COMMAND_HELP)]
    command: Vec<OsString>,
}

impl Restore {
    /// Starts the machines.
    ///
    /// # Errors
    /// Whatever the engine tells; no machine is left then.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        self.log.open(&self.images_dir, "vm-restore", started)?;
        let mut command = self.command;
        if let Some(program) = command.first_mut() {
            *program = find(program);
        }
        let own = self.eager || self.lazy;
        let shared = self.share || self.pool > 0 || (!own && self.clones > 1);
        if self.keep > 0 && !shared {
            let what = "--keep is for machines that share their memory: add --share";
            return Err(Failure::Usage(what.to_owned()));
        }
        if self.clones == 0 && self.keep == 0 {
            let what = "no machine would have the memory of those that wait: add --keep";
            return Err(Failure::Usage(what.to_owned()));
        }
        let images_dir = crate::session::absolute(&self.images_dir)?;
        let mut options = RestoreOptions {
            way: match (shared, self.lazy) {
                (true, _) => RestoreMode::Share(Duration::from_secs(self.keep)),
                (false, true) => RestoreMode::Lazy,
                (false, false) => RestoreMode::Eager,
            },
            templates: super::templates::folder(),
            images: Images::at(&self.images_dir, self.trust_image),
            clones: self.clones,
            name: self.name,
            sockets: crate::session::absolute(&self.qmp_dir)?,
            disks: self
                .disk_dir
                .as_deref()
                .map(crate::session::absolute)
                .transpose()?,
            command,
            environment: std::env::vars_os().collect(),
            volume: None,
            pool: self.pool,
            patience: Duration::from_secs(self.timeout),
        };
        let mut attached = None;
        if let Some(target) = self.with_volume {
            vm::qemu::look(&options).map_err(|error| about_image(&images_dir, error))?;
            let volume = with_volume::attach(&images_dir, target)?;
            options.volume = Some(volume.mount().clone());
            attached = Some(volume);
        }
        let scripts = Scripts {
            files: self.action_script,
            images_dir,
            bar: Bar::default(),
            attached: Mutex::new(attached),
        };
        // Where it fails, no machine is left, and the volume is unmounted with the scripts.
        let restored = vm::qemu::restore(&options, &scripts);
        let restored = restored.map_err(|error| about_image(&scripts.images_dir, error))?;
        let mounted = scripts.done();
        output::tell(
            self.json,
            || to_json(&restored, mounted.as_deref()),
            || restored.iter().map(to_text).collect(),
        );
        Ok(Status::Done)
    }
}

/// Why machines are not started.
fn about_image(images_dir: &Path, error: vm::Error) -> Failure {
    ExpectedKind::Qemu.explain(images_dir, Failure::machine("vm restore")(error))
}

/// Calls the user's programs.
struct Scripts {
    files: Vec<PathBuf>,
    images_dir: PathBuf,
    bar: Bar,
    /// The volume of the image, which stays from the moment on in which a guest may run.
    attached: Mutex<Option<AttachedVolume>>,
}

impl Scripts {
    fn attached(&self) -> std::sync::MutexGuard<'_, Option<AttachedVolume>> {
        let attached = self.attached.lock();
        attached.unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Leaves the volume mounted, if there is one; gives where that is.
    fn done(self) -> Option<PathBuf> {
        let attached = self.attached().take();
        attached.map(AttachedVolume::keep)
    }
}

impl Observer for Scripts {
    fn progress(&self, done_bytes: u64, total_bytes: u64) {
        self.bar.show(done_bytes, total_bytes);
    }

    fn moment(&self, moment: Moment, machine: &RestoredMachine) -> Result<(), String> {
        let action = match moment {
            Moment::PreResume => "pre-resume",
            Moment::PostResume => "post-resume",
        };
        for file in &self.files {
            let called = Command::new(file)
                .env("CRTOOLS_SCRIPT_ACTION", action)
                .env("CRTOOLS_IMAGE_DIR", &self.images_dir)
                .env("CRTOOLS_INIT_PID", machine.pid.to_string())
                .env("STILLFRAME_VM_NUMBER", machine.number.to_string())
                .env("STILLFRAME_VM_NAME", &machine.name)
                .env("STILLFRAME_VM_QMP", &machine.socket)
                .stdin(Stdio::null())
                .status();
            let outcome = match called {
                Ok(status) if status.success() => continue,
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            };
            let file = file.display();
            return Err(format!("action script {file}: {action}: {outcome}"));
        }
        if let (Moment::PreResume, Some(attached)) = (moment, &mut *self.attached()) {
            attached.outlive();
        }
        Ok(())
    }
}

/// A program by its path, or by its name out of `PATH`.
fn find(program: &OsString) -> OsString {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_path = Path::new(program).components().count() > 1;
    let mut folders = std::env::split_paths(&path).filter(|_| !is_path);
    let found = folders.find_map(|folder| {
        let file = folder.join(program);
        file.is_file().then(|| file.into_os_string())
    });
    found.unwrap_or_else(|| program.clone())
}

fn to_json(restored: &[RestoredMachine], mounted: Option<&Path>) -> serde_json::Value {
    let machine = |one: &RestoredMachine| {
        json!({
            "name": one.name,
            "number": one.number,
            "pid": one.pid,
            "qmp": one.socket.display().to_string(),
            "log": one.log.display().to_string(),
            "disks": one.disks.iter().map(|path| path.display().to_string()).collect::<Vec<_>>(),
        })
    };
    let machines = restored.iter().map(machine).collect::<Vec<_>>();
    let mut told = json!({"vm_restore": { "machines": machines }});
    if let Some(point) = mounted {
        told["vm_restore"]["volume"] = json!({"mounted_on": point.display().to_string()});
    }
    told
}

fn to_text(one: &RestoredMachine) -> String {
    format!("{}: pid {}, {}\n", one.name, one.pid, one.socket.display())
}
