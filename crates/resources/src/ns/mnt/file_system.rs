//! File systems that a restore makes again.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags, fsconfig_create, fsconfig_reconfigure,
    fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, fspick,
};
use sys::mountinfo;

use super::contents::{self, Node};

/// A kind of file system that is made again where the host has not mounted it.
struct Type {
    name: &'static str,
    /// The options with values that it shows, and that mount(8) takes as they are.
    values: &'static [&'static str],
    /// The options without values.
    words: &'static [&'static str],
}

/// The kinds of which a new one has what the old one had, or what [`contents`] fill in.
const KNOWN: [Type; 6] = [
    Type {
        name: "tmpfs",
        values: &["size", "nr_inodes", "mode", "uid", "gid", "huge", "mpol"],
        words: &["inode64", "inode32", "noswap"],
    },
    Type {
        name: "proc",
        values: &["hidepid", "gid", "subset"],
        words: &[],
    },
    Type {
        name: "devpts",
        values: &["uid", "gid", "mode", "ptmxmode", "max"],
        words: &[],
    },
    Type {
        name: "sysfs",
        values: &[],
        words: &[],
    },
    Type {
        name: "mqueue",
        values: &[],
        words: &[],
    },
    Type {
        name: "ramfs",
        values: &["mode"],
        words: &[],
    },
];
/// Options of every kind.
const COMMON: [&str; 5] = ["rw", "ro", "sync", "dirsync", "lazytime"];

/// A file system.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct FileSystem {
    /// Its kind.
    #[prost(string, tag = "1")]
    kind: String,
    /// Its source, as mount(2) was given it.
    #[prost(bytes = "vec", tag = "2")]
    source: Vec<u8>,
    /// Its options, with commas between them.
    #[prost(string, tag = "3")]
    options: String,
    /// The files of one that is made again: its root first, and each behind its directory.
    #[prost(message, repeated, tag = "4")]
    pub contents: Vec<Node>,
}

impl FileSystem {
    /// The file system of a mount.
    pub fn of(mount: &mountinfo::Mount) -> Self {
        Self {
            kind: mount.kind.clone(),
            source: mount.source.clone(),
            options: mount.fs_options.clone(),
            contents: Vec::new(),
        }
    }

    fn known(&self) -> Option<&'static Type> {
        KNOWN.iter().find(|known| known.name == self.kind)
    }

    /// Its kind, for messages.
    pub fn name(&self) -> String {
        format!("a {}", self.kind)
    }

    /// Tells whether its files are in the image.
    pub fn has_files(&self) -> bool {
        ["tmpfs", "ramfs"].contains(&&*self.kind)
    }

    /// The reason why none is made again, of which a mount is at `point`.
    pub fn obstacle(&self, point: &Path) -> Option<String> {
        let (kind, place) = (&self.kind, point.display());
        let Some(known) = self.known() else {
            return Some(format!("a mount of {kind} at {place}"));
        };
        let is_known = |option: &&str| match option.split_once('=') {
            Some((name, _)) => known.values.contains(&name),
            None => known.words.contains(option) || COMMON.contains(option),
        };
        let unknown = self.options.split(',').find(|option| !is_known(option));
        unknown.map(|option| format!("option {option} of the {kind} at {place}"))
    }

    pub fn is_sound(&self) -> bool {
        let is_text = |text: &[u8]| !text.contains(&0);
        is_text(&self.source)
            && is_text(self.options.as_bytes())
            && is_text(self.kind.as_bytes())
            && contents::are_sound(&self.contents)
    }

    /// Makes one, with its files. It is mounted nowhere.
    pub fn make(&self) -> rustix::io::Result<OwnedFd> {
        // No other is a file system by itself.
        self.known().ok_or(Errno::NODEV)?;
        let context = fsopen(self.kind.as_str(), FsOpenFlags::FSOPEN_CLOEXEC)?;
        if !self.source.is_empty() {
            fsconfig_set_string(&context, "source", &self.source[..])?;
        }
        let is_filled = !self.contents.is_empty();
        for option in self.options.split(',') {
            match option.split_once('=') {
                Some((name, value)) => fsconfig_set_string(&context, name, value)?,
                None if option == "rw" || (option == "ro" && is_filled) => {}
                None => fsconfig_set_flag(&context, option)?,
            }
        }
        fsconfig_create(&context)?;
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        let made = fsmount(&context, flags, MountAttrFlags::empty())?;
        if is_filled {
            contents::fill(&self.contents, made.as_fd())?;
            if self.options.split(',').any(|option| option == "ro") {
                let flags = FsPickFlags::FSPICK_CLOEXEC | FsPickFlags::FSPICK_EMPTY_PATH;
                let context = fspick(&made, "", flags)?;
                fsconfig_set_flag(&context, "ro")?;
                fsconfig_reconfigure(&context)?;
            }
        }
        Ok(made)
    }
}
