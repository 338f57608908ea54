//! The mounts that this process sees (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;

use crate::procfs;

/// The list of them, for messages.
pub const PATH: &str = "/proc/self/mountinfo";

/// One mount.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mount {
    /// Its number (`mnt_id`).
    pub id: u64,
    /// The number of the mount that it is on.
    pub parent: u64,
    /// Numbers of the device, by which programs know its files (`st_dev`).
    pub device: (u32, u32),
    /// The directory of the file system that is mounted.
    pub root: Vec<u8>,
    /// The directory on which it is mounted.
    pub point: PathBuf,
    /// Options of the mount: `rw,noatime`.
    pub options: String,
    /// How mounts on it spread: `shared:7`, `master:3`, `unbindable`.
    pub propagation: Vec<String>,
    /// The type of the file system.
    pub kind: String,
    /// The source that mount(2) was given: a device, or any word.
    pub source: Vec<u8>,
    /// Options of the file system: `rw,data=journal`.
    pub fs_options: String,
}

/// Lists them, a later one above an earlier one.
///
/// # Errors
/// The list cannot be read.
pub fn read() -> io::Result<Vec<Mount>> {
    let text = procfs::read("self/mountinfo")?;
    Ok(parse(&text))
}

/// The mounts of a list.
#[must_use]
pub fn parse(text: &[u8]) -> Vec<Mount> {
    let lines = text.split(|byte| *byte == b'\n');
    lines.filter_map(Mount::parse).collect()
}

impl Mount {
    /// The number of a group that it is in, as its propagation names it: of its peers (`shared`),
    /// or of those whose mounts it gets (`master`).
    #[must_use]
    pub fn group(&self, name: &str) -> Option<u64> {
        let mut words = self.propagation.iter();
        words.find_map(|word| {
            let (known, number) = word.split_once(':')?;
            number.parse().ok().filter(|_| known == name)
        })
    }

    /// Reads a line of the list.
    #[must_use]
    pub fn parse(line: &[u8]) -> Option<Self> {
        let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
        let mut words = line.split(|byte| *byte == b' ');
        let id = text(words.next()?).parse().ok()?;
        let parent = text(words.next()?).parse().ok()?;
        let device = text(words.next()?);
        let (major, minor) = device.split_once(':')?;
        let root = unescape(words.next()?);
        let point = PathBuf::from(OsString::from_vec(unescape(words.next()?)));
        let options = text(words.next()?);
        let mut propagation = Vec::new();
        loop {
            match words.next()? {
                b"-" => break,
                word => propagation.push(text(word)),
            }
        }
        let kind = text(words.next()?);
        let source = unescape(words.next()?);
        let fs_options = text(words.next()?);
        Some(Self {
            id,
            parent,
            device: (major.parse().ok()?, minor.parse().ok()?),
            root,
            point,
            options,
            propagation,
            kind,
            source,
            fs_options,
        })
    }
}

/// Replaces `\040` and the like by the bytes that they stand for.
fn unescape(mut word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    while let Some((first, rest)) = word.split_first() {
        let octal = rest.get(..3).filter(|_| *first == b'\\');
        let octal = octal.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        word = if byte.is_some() { &rest[3..] } else { rest };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_mountinfo_is_read() {
        let line = br"36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 - ext4 /dev/root rw,errors=c";
        let mount = Mount {
            id: 36,
            parent: 35,
            device: (98, 0),
            root: b"/mnt1".to_vec(),
            point: PathBuf::from("/mnt 2"),
            options: "rw,noatime".to_owned(),
            propagation: vec!["master:1".to_owned()],
            kind: "ext4".to_owned(),
            source: b"/dev/root".to_vec(),
            fs_options: "rw,errors=c".to_owned(),
        };
        assert_eq!(Mount::parse(line), Some(mount));
        assert_eq!(Mount::parse(b"36 35 98:0"), None);
        assert_eq!(Mount::parse(b""), None);
        assert!(!read().expect("the list").is_empty());
    }
}
