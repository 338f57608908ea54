//! What a command line of dump, pre-dump, restore or check asks for.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use freeze::tracker::DEFAULT_TRACK_TIME;
use process::options::RestoreOptions;
use process::{Afterwards, Allow, CgroupManagement, DumpKind, DumpOptions, Inherited};
use rustix::process::Pid;

use crate::logfile;
use crate::stage_listener::StageListener;

/// For how long a volume may be frozen at a time where nobody says otherwise.
const DEFAULT_MAX_FROZEN: Duration = Duration::from_secs(5);

/// All that can be asked for. The table in [`crate::criu`] says which option sets what; what the
/// engine knows as well stands in its own options here.
#[derive(Debug)]
pub struct Options {
    pub tree: Option<Pid>,
    /// Resources that the target may hold, at the dump and the restore.
    pub allowed: Allow,
    /// What a dump and a pre-dump are asked for; tree and places come when it begins.
    pub dump: DumpOptions,
    /// What a restore is asked for; places and descriptors come when it begins.
    pub restore: RestoreOptions,
    /// `--prev-images-dir`, relative to `images_dir`.
    pub prev_images_dir: Option<PathBuf>,
    pub track_mem: bool,
    pub track_time: Duration,
    pub dry_run: bool,
    /// `--pidfile`, relative to the work directory.
    pub pidfile: Option<PathBuf>,
    pub inherit_fd: Vec<(i32, Inherited)>,
    /// `--exec-cmd`, and the command behind `--`.
    pub exec_cmd: Vec<OsString>,
    pub plan: bool,
    pub lazy_pages: bool,
    pub trust_image: bool,
    pub images_dir: PathBuf,
    pub work_dir: Option<PathBuf>,
    /// `--libdir`, in which there are no plugins.
    pub libdir: Option<PathBuf>,
    pub action_script: Vec<PathBuf>,
    pub status_fd: Option<i32>,
    pub close: Vec<i32>,
    pub display_stats: bool,
    pub json: bool,
    pub log_file: Option<PathBuf>,
    pub verbosity: u32,
    pub config: Option<PathBuf>,
    /// `--with-volume`: what is saved with the tree, or where to it is restored.
    pub with_volume: Option<PathBuf>,
    /// `--max-frozen`: for how long that is frozen at a time.
    pub max_frozen: Duration,
    pub no_default_config: bool,
    /// `--feature` of check.
    pub feature: Vec<String>,
    /// `--extra`, `--experimental` or `--all` of check.
    pub extra: bool,
    /// `--image` of check.
    pub image: Option<PathBuf>,
    /// `--freeze-cgroup`: the control group that the tree is in.
    pub freeze_cgroup: Option<PathBuf>,
    /// The client for whom it is, who is told of each stage.
    pub listener: Option<Arc<dyn StageListener>>,
}

impl Default for Options {
    fn default() -> Self {
        let images_dir = PathBuf::from(".");
        Self {
            tree: None,
            allowed: Allow {
                cgroups: CgroupManagement::default(),
                ..Allow::default()
            },
            dump: DumpOptions::new(Pid::INIT, &*images_dir),
            restore: RestoreOptions::new(&*images_dir),
            prev_images_dir: None,
            track_mem: false,
            track_time: DEFAULT_TRACK_TIME,
            dry_run: false,
            pidfile: None,
            inherit_fd: Vec::new(),
            exec_cmd: Vec::new(),
            plan: false,
            lazy_pages: false,
            trust_image: false,
            images_dir,
            work_dir: None,
            libdir: None,
            action_script: Vec::new(),
            status_fd: None,
            close: Vec::new(),
            display_stats: false,
            json: false,
            log_file: None,
            verbosity: logfile::DEFAULT_VERBOSITY,
            config: None,
            with_volume: None,
            max_frozen: DEFAULT_MAX_FROZEN,
            no_default_config: false,
            feature: Vec::new(),
            extra: false,
            image: None,
            freeze_cgroup: None,
            listener: None,
        }
    }
}

impl Options {
    /// The states that a dump may save, with --cgroup-yard seen from the work directory, as with
    /// criu(8).
    pub fn allowed_in(&self, work_dir: &Path) -> Allow {
        let mut allowed = self.allowed.clone();
        let yard = &mut allowed.cgroups.yard;
        *yard = yard.take().map(|yard| work_dir.join(yard));
        allowed
    }

    /// Returns the engine's options of a dump into `images_dir`.
    pub fn to_dump(&self, kind: DumpKind, images_dir: &Path) -> DumpOptions {
        let track = self.track_mem || kind == DumpKind::PreDump;
        let parent = self.prev_images_dir.as_ref();
        DumpOptions {
            tree: self.tree.expect("the parser asks for one"),
            images: images_dir.into(),
            afterwards: match kind {
                DumpKind::Dump => self.dump.afterwards,
                DumpKind::Live | DumpKind::PreDump => Afterwards::Run,
            },
            kind,
            allowed: self.allowed_in(self.work_dir.as_deref().unwrap_or(images_dir)),
            parent: parent.map(|dir| images_dir.join(dir).into()),
            track: track.then_some(self.track_time),
            ..self.dump.clone()
        }
    }
}
