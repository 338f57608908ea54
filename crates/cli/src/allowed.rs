//! The options with which a target may hold what an image cannot hold the other end of.

use std::ffi::OsStr;

use clap::{Args, ValueEnum};
use process::options::DEFAULT_GHOST_LIMIT_BYTES;
use process::{Allow, CgroupManagement, CgroupMode, FileValidation};

use crate::exit::Failure;
use crate::quick::{Fill, flag, text};

/// Given to dump and restore alike.
#[derive(Debug, Default, Args)]
pub struct AllowedArgs {
    /// The session or the terminal of the tree belongs to a shell outside of it
    #[arg(short = 'j', long)]
    shell_job: bool,

    /// Keep established TCP connections
    #[arg(long)]
    tcp_established: bool,

    /// Bring TCP connections back closed
    #[arg(long)]
    tcp_close: bool,

    /// Unix sockets may be connected to somebody outside the tree: any, or those of these inodes
    #[arg(
        short = 'x',
        long,
        value_name = "INODE,…",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
    )]
    ext_unix_sk: Vec<String>,

    /// Keep file locks; nobody outside the tree may share them
    #[arg(short = 'l', long)]
    file_locks: bool,

    /// Give a deleted file that has other names a temporary one
    #[arg(long)]
    link_remap: bool,

    /// How a file is known to be the one that was open: by its size, or in ELF files also by their
    /// build ID, which is the default
    #[arg(long, value_name = "MODE")]
    file_validation: Option<Validation>,

    /// What is done about control groups; soft makes those that are missing
    #[arg(
        long,
        value_name = "MODE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "soft",
    )]
    manage_cgroups: Option<Cgroups>,
}

impl AllowedArgs {
    /// Whether the tree is a job of the caller's shell.
    pub fn shell_job(&self) -> bool {
        self.shell_job
    }
}

/// What is done about control groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Cgroups {
    /// Nothing: the tasks come back where the restorer is.
    Ignore,
    /// The groups must be there, and stay as they are.
    None,
    /// The groups must be there, and get the limits that they had.
    Props,
    /// Groups that are missing are made, with the limits that they had.
    Soft,
    /// The same, and the others get the limits that they had.
    Full,
    /// The groups must not be there, and are made.
    Strict,
}

/// Ways to know a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Validation {
    /// By its size, and by the build ID of an ELF file that has one.
    #[value(name = "buildid")]
    BuildId,
    /// By its size.
    #[value(name = "filesize")]
    FileSize,
}

impl Fill for AllowedArgs {
    fn fill(&mut self, name: &str, value: Option<&OsStr>) -> Option<()> {
        match name {
            "shell-job" => self.shell_job = flag(value)?,
            "tcp-established" => self.tcp_established = flag(value)?,
            "tcp-close" => self.tcp_close = flag(value)?,
            "ext-unix-sk" => self
                .ext_unix_sk
                .push(value.map_or(Some(""), OsStr::to_str)?.into()),
            "file-locks" => self.file_locks = flag(value)?,
            "link-remap" => self.link_remap = flag(value)?,
            "file-validation" => {
                let mode = Validation::from_str(text(value)?, false).ok()?;
                self.file_validation = Some(mode);
            }
            "manage-cgroups" => {
                let mode = value.map_or(Some("soft"), OsStr::to_str)?;
                self.manage_cgroups = Some(Cgroups::from_str(mode, false).ok()?);
            }
            _ => return None,
        }
        Some(())
    }
}

impl TryFrom<&AllowedArgs> for Allow {
    type Error = Failure;

    fn try_from(args: &AllowedArgs) -> Result<Self, Failure> {
        let mut inodes = Vec::new();
        let words = args.ext_unix_sk.iter().flat_map(|list| list.split(','));
        for word in words.filter(|word| !word.is_empty()) {
            let inode = word.parse();
            let inode = inode.map_err(|_| {
                Failure::Usage(format!("--ext-unix-sk takes inodes, and {word:?} is none"))
            })?;
            inodes.push(inode);
        }
        Ok(Self {
            shell_job: args.shell_job,
            tcp_established: args.tcp_established,
            tcp_close: args.tcp_close,
            // Only a dump has these.
            skip_in_flight: false,
            ghost_limit_bytes: DEFAULT_GHOST_LIMIT_BYTES,
            ext_unix_sk: !args.ext_unix_sk.is_empty(),
            ext_unix_inodes: inodes,
            file_locks: args.file_locks,
            link_remap: args.link_remap,
            file_validation: match args.file_validation {
                Some(Validation::FileSize) => FileValidation::FileSize,
                Some(Validation::BuildId) | None => FileValidation::BuildId,
            },
            cgroups: CgroupManagement {
                mode: match args.manage_cgroups {
                    Some(Cgroups::Ignore) => CgroupMode::Ignore,
                    Some(Cgroups::None) => CgroupMode::None,
                    Some(Cgroups::Props) => CgroupMode::Props,
                    Some(Cgroups::Soft) | None => CgroupMode::Soft,
                    Some(Cgroups::Full) => CgroupMode::Full,
                    Some(Cgroups::Strict) => CgroupMode::Strict,
                },
                roots: Vec::new(),
            },
        })
    }
}
