//! Kinds of events and tracepoints, which have names everywhere, and numbers that each host gives.

use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};

use rustix::fs::{Dir, Mode, OFlags, openat};
use rustix::io::{Errno, Result};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// The number that this host has given to a driver of events.
pub(super) fn driver(name: &str) -> Option<u32> {
    let path = format!("/sys/bus/event_source/devices/{name}/type");
    fs::read_to_string(sys::host::path(path))
        .ok()?
        .trim()
        .parse()
        .ok()
}

/// The tracepoints of this host, wherever tracefs is mounted or not.
pub(super) struct Tracepoints(OwnedFd);

impl Tracepoints {
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN`, `ENODEV` for a kernel without them.
    pub fn open() -> Result<Self> {
        let made = fsopen("tracefs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(made.as_fd())?;
        let (flags, read_only) = (
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::MOUNT_ATTR_RDONLY,
        );
        Ok(Self(fsmount(made.as_fd(), flags, read_only)?))
    }

    /// The number of "system/name"; none for one that is not there.
    pub fn number(&self, name: &str) -> Result<Option<u64>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = match openat(&self.0, format!("events/{name}/id"), flags, Mode::empty()) {
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
            opened => opened?,
        };
        let mut text = [0; 32];
        let len = rustix::io::read(file, &mut text)?;
        let text = std::str::from_utf8(&text[..len]).unwrap_or_default();
        Ok(text.trim().parse().ok())
    }

    /// The "system/name" of the tracepoint of a system with this number.
    pub fn name(&self, system: &str, number: u64) -> Result<Option<String>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = match openat(&self.0, format!("events/{system}"), flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(None),
            opened => opened?,
        };
        for entry in Dir::new(folder)? {
            let entry = entry?;
            let name = format!("{system}/{}", entry.file_name().to_string_lossy());
            if !name.ends_with("/.")
                && !name.ends_with("/..")
                && self.number(&name)? == Some(number)
            {
                return Ok(Some(name));
            }
        }
        Ok(None)
    }
}
