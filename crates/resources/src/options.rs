//! What the caller allows, as far as resources ask for it; names and meanings are criu(8)'s.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::cgroup::Management;

/// The size up to which a deleted file goes into the image when nobody says otherwise, in bytes.
pub const DEFAULT_GHOST_LIMIT_BYTES: u64 = 1 << 20;

/// Options that decide whether and how a resource is dumped or restored.
///
/// Given to the dump and again to the restore; the command fills it, and nobody else has one of his
/// own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allow {
    /// `--tcp-established`: dump and restore established TCP connections.
    pub tcp_established: bool,
    /// `--tcp-close`: restore established TCP connections as closed ones.
    pub tcp_close: bool,
    /// `--skip-in-flight`: connections that wait to be accepted are dropped.
    pub skip_in_flight: bool,
    /// `--network-lock skip`: the caller keeps packets away from the tree's connections.
    pub network_unlocked: bool,
    /// `--ext-unix-sk`: unix sockets whose peer is outside of the tree.
    pub ext_unix_sk: bool,
    /// `--ext-unix-sk=INODE,…`: only these sockets of the tree; all where there are none.
    pub ext_unix_inodes: Vec<u64>,
    /// `--unix-close`: connections of unix sockets to the outside come back as ended ones.
    pub unix_close: bool,
    /// `--external`: pipes whose other end is outside of the tree.
    pub external_pipes: ExternalPipes,
    /// `--shell-job`: a terminal and session inherited from outside of the tree.
    pub shell_job: bool,
    /// `--file-locks`: dump and restore file locks.
    pub file_locks: bool,
    /// `--drop-events`: events, messages and packets that nobody has read are dropped.
    pub drop_events: bool,
    /// `--perf-events`: performance events, whose counts begin at 0 again.
    pub perf_events: bool,
    /// `--link-remap`: deleted files that still have another hard link may be linked again.
    pub link_remap: bool,
    /// `--force-irmap`: watched files are looked for by path, not by their handles.
    pub force_irmap: bool,
    /// `--irmap-scan-path`: where watched files are looked for that have no handles.
    pub irmap_scan_paths: Vec<PathBuf>,
    /// `--file-validation`: how a file is known to be the one that was open.
    pub file_validation: FileValidation,
    /// `--manage-cgroups`, `--cgroup-root`: how control groups are dealt with.
    pub cgroups: Management,
    /// `--save-files`: files that are saved with the tree although they have a name, as patterns.
    pub save_files: Vec<OsString>,
    /// `--ghost-limit`: the largest deleted file whose contents are stored, in bytes.
    pub ghost_limit_bytes: u64,
    /// `--root`, `--external mnt[…]:…` and the like: the tree's own namespaces.
    pub namespaces: NamespaceOptions,
}

/// What somebody else makes of a tree's namespaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NamespaceOptions {
    /// `--root`: the directory that a restore makes the tree's root.
    pub root: Option<PathBuf>,
    /// `--external mnt[…]:…`, `--ext-mount-map`: mounts that are external.
    pub mounts: Vec<ExternalMount>,
    /// `--external net[…]:…`: namespaces that are external.
    pub external: Vec<ExternalNamespace>,
    /// `--empty-ns`: the kinds of which the tree gets a new one, in which nothing is.
    pub empty: Vec<String>,
}

impl NamespaceOptions {
    /// The name of a namespace, where it is external.
    #[must_use]
    pub fn external_name(&self, kind: &str, inode: u64) -> Option<String> {
        let mut all = self.external.iter();
        let found = all.find(|one| one.kind == kind && one.inode == inode);
        found.map(|one| one.name.clone())
    }

    /// Tells whether the tree gets a new namespace of a kind, in which nothing is.
    #[must_use]
    pub fn is_empty(&self, kind: &str) -> bool {
        self.empty.iter().any(|one| one == kind)
    }
}

/// A namespace from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalNamespace {
    /// Its kind.
    pub kind: String,
    /// Its inode.
    pub inode: u64,
    /// The name under which a restore is handed one (`--inherit-fd`).
    pub name: String,
}

/// A mount from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExternalMount {
    /// At a dump, the directory or file on which it is mounted; at a restore, its name.
    pub key: String,
    /// At a dump, the name that it gets in the image; at a restore, the path of what is mounted.
    pub value: String,
}

/// Pipes whose other end is outside of the tree, and which a restore is handed (`--inherit-fd`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExternalPipes {
    /// All of them.
    pub all: bool,
    /// Those of these inodes.
    pub inodes: Vec<u64>,
}

/// How a file is known to be the one that was open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FileValidation {
    /// By its size, and the build ID where it is an ELF file that has one.
    #[default]
    BuildId,
    /// By its size.
    FileSize,
}

impl Default for Allow {
    fn default() -> Self {
        Self {
            tcp_established: false,
            tcp_close: false,
            skip_in_flight: false,
            network_unlocked: false,
            ext_unix_sk: false,
            ext_unix_inodes: Vec::new(),
            unix_close: false,
            external_pipes: ExternalPipes::default(),
            shell_job: false,
            file_locks: false,
            drop_events: false,
            perf_events: false,
            link_remap: false,
            force_irmap: false,
            irmap_scan_paths: Vec::new(),
            file_validation: FileValidation::default(),
            cgroups: Management::default(),
            save_files: Vec::new(),
            ghost_limit_bytes: DEFAULT_GHOST_LIMIT_BYTES,
            namespaces: NamespaceOptions::default(),
        }
    }
}
