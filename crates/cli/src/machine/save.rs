//! `stillframe vm save` and `vm pre-save`: a running machine becomes an image, or its memory one
//! round of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;
use vm::qemu::{Overlay, SaveKind, SaveOptions, SaveSummary, Watch};
use volume::{CompanionVolume, DumpSummary};

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::session::{CompressArgs, LogArgs, absolute};
use crate::with_volume::{self, CompanionSave, VolumeRequest};
use crate::{kind, output};

/// Save a virtual machine that runs under QEMU
#[derive(Debug, Args)]
pub struct Save {
    /// Have the guest go on; otherwise QEMU ends when the image is whole
    #[arg(short = 'R', long)]
    leave_running: bool,

    /// Have the guest go on at once, and save its memory as it was at that moment
    #[arg(long, requires = "leave_running")]
    live: bool,

    /// Save what the machine's disks hold, too, and the files that they are over (raw and qcow2);
    /// a disk that is written to goes on in an overlay where its file system cannot clone files
    #[arg(long)]
    with_disks: bool,

    /// Save also a machine with devices that were plugged in or unplugged since it was started,
    /// which its command line does not tell: each restore must be given one behind --
    #[arg(long)]
    for_command: bool,

    #[command(flatten)]
    volume: VolumeArgs,

    #[command(flatten)]
    what: SaveArgs,
}

/// The volume that is saved with a machine.
#[derive(Debug, Default, Args)]
struct VolumeArgs {
    /// Save the ext4 volume, named by its device or by the directory where it is mounted, in the
    /// image too, as it is while the guest is stopped: with the files of disks that are in it
    #[arg(long, value_name = "VOLUME", conflicts_with = "with_disks")]
    with_volume: Option<PathBuf>,

    /// For how long the volume of --with-volume may be frozen at a time; it is thawed then in any
    /// case, and nothing is saved
    #[arg(
        long,
        value_name = "MS",
        default_value_t = 5000,
        requires = "with_volume"
    )]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=600_000))]
    max_frozen: u64,
}

/// Save the memory of a virtual machine that runs, so that a save over it has little left to do
#[derive(Debug, Args)]
pub struct PreSave {
    #[command(flatten)]
    what: SaveArgs,
}

/// Which machine is saved, and where to.
#[derive(Debug, Args)]
struct SaveArgs {
    /// The socket of QEMU's monitor, as in -qmp unix:PATH,server=on,wait=off
    #[arg(long, value_name = "PATH")]
    qmp: PathBuf,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// The image of an earlier save or round, relative to the image's directory; pages that it has
    /// are not stored
    #[arg(long, value_name = "DIR")]
    prev_images_dir: Option<PathBuf>,

    #[command(flatten)]
    compress: CompressArgs,

    /// Do not wait until the image is on the disk
    #[arg(long)]
    no_sync: bool,

    /// How long QEMU may take to answer; it finishes requests to disks before it stops the guest
    #[arg(long, value_name = "SECONDS", default_value_t = vm::qemu::PATIENCE.as_secs())]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,

    #[command(flatten)]
    log: LogArgs,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Save {
    /// Saves the machine.
    ///
    /// # Errors
    /// Whatever the engine tells; the guest runs on then.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        let kind = match (self.live, self.leave_running) {
            (true, _) => SaveKind::Live,
            (false, true) => SaveKind::Stopped,
            (false, false) => SaveKind::Ending,
        };
        let command = Command {
            name: "vm save",
            kind,
            with_disks: self.with_disks,
            for_command: self.for_command,
            volume: self.volume,
        };
        self.what.run(command, started)
    }
}

impl PreSave {
    /// Saves the memory.
    ///
    /// # Errors
    /// Whatever the engine tells; the guest runs on.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        let command = Command {
            name: "vm pre-save",
            kind: SaveKind::Round,
            with_disks: false,
            for_command: false,
            volume: VolumeArgs::default(),
        };
        self.what.run(command, started)
    }
}

/// One of the commands.
struct Command {
    name: &'static str,
    kind: SaveKind,
    with_disks: bool,
    for_command: bool,
    volume: VolumeArgs,
}

impl SaveArgs {
    fn run(self, command: Command, started: Instant) -> Result<Status, Failure> {
        if self.log.work_dir(&self.images_dir) == self.images_dir {
            crate::session::make_dir(&self.images_dir)?;
        }
        let log = command.name.replace(' ', "-");
        self.log.open(&self.images_dir, &log, started)?;
        let beside = self.open_volume(&command)?;
        let parent = self.prev_images_dir.map(|path| self.images_dir.join(path));
        let options = SaveOptions {
            socket: self.qmp,
            images: self.images_dir.into(),
            parent: parent.as_deref().map(Into::into),
            kind: command.kind,
            with_disks: command.with_disks,
            for_command: command.for_command,
            compress: self.compress.compress,
            sync: !self.no_sync,
            patience: Duration::from_secs(self.timeout),
        };
        let bar = Bar::default();
        let progress = |done, total| bar.show(done, total);
        let mut volume = beside.as_ref().map(CompanionSave::new);
        let companion = volume.as_mut();
        let watch = Watch {
            progress: &progress,
            companion: companion.map(|volume| volume as &mut dyn image::Companion),
        };
        let saved = vm::qemu::save(&options, process::facts(), watch);
        drop(bar);
        let saved = saved.map_err(Failure::machine(command.name));
        let saved = saved.map_err(|failure| match &parent {
            Some(dir) => kind::ExpectedKind::Machine.explain(dir, failure),
            None => failure,
        })?;
        let volume = volume.and_then(CompanionSave::dumped);
        output::tell(
            self.json,
            || to_json(&log.replace('-', "_"), &saved, volume.as_ref()),
            || {
                let volume = volume.as_ref().map(with_volume::saved_to_text);
                to_text(&saved) + &volume.unwrap_or_default()
            },
        );
        Ok(Status::Done)
    }

    /// Opens the volume that is to be in the image, if there is one.
    fn open_volume(&self, command: &Command) -> Result<Option<CompanionVolume>, Failure> {
        let Some(volume) = &command.volume.with_volume else {
            return Ok(None);
        };
        let images_dir = absolute(&self.images_dir)?;
        crate::session::make_dir(&images_dir)?;
        let parent = self.prev_images_dir.as_ref();
        let wanted = VolumeRequest {
            volume,
            images_dir: &images_dir,
            parent: parent.map(|dir| images_dir.join(dir)),
            max_frozen: Duration::from_millis(command.volume.max_frozen),
            compress: self.compress.compress,
            sync: !self.no_sync,
            written: self.log.written(&images_dir)?,
        };
        wanted.open(command.name).map(Some)
    }
}

/// Returns the summary of a save as JSON, under the name of the command.
fn to_json(command: &str, saved: &SaveSummary, volume: Option<&DumpSummary>) -> serde_json::Value {
    let overlay = |one: &Overlay| {
        json!({
            "disk": one.disk,
            "former": one.former.display().to_string(),
            "file": one.file.display().to_string(),
            "node": one.node,
        })
    };
    let overlays = saved.overlays.iter().map(overlay).collect::<Vec<_>>();
    let mut told = json!({command: {
        "image": saved.image.to_string(),
        "pid": saved.pid,
        "pages": saved.pages,
        "stored_pages": saved.stored_pages,
        "zero_pages": saved.zero_pages,
        "parent_pages": saved.parent_pages,
        "state_bytes": saved.state_bytes,
        "stopped_us": saved.stopped.as_micros() as u64,
        "disk_bytes": saved.disk_bytes,
        "overlays": overlays,
    }});
    if let Some(volume) = volume {
        told[command]["volume"] = with_volume::saved_to_json(volume);
    }
    told
}

/// Returns the summary of a save as text.
fn to_text(saved: &SaveSummary) -> String {
    let mut text = format!(
        "image {} has {} pages: {} stored, {} zero, {} as in the parent image; {} bytes of \
         devices; stopped for {:.1} ms\n",
        saved.image,
        saved.pages,
        saved.stored_pages,
        saved.zero_pages,
        saved.parent_pages,
        saved.state_bytes,
        saved.stopped.as_secs_f64() * 1e3,
    );
    if saved.disk_bytes > 0 {
        text += &format!("{} bytes of disks\n", saved.disk_bytes);
    }
    for Overlay {
        disk,
        former,
        file,
        node,
    } in &saved.overlays
    {
        let (former, file) = (former.display(), file.display());
        text += &format!("the disk {disk} goes on in {file} (node {node}), over {former}\n");
    }
    text
}
