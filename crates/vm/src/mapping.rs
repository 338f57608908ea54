//! Mappings of a process, as /proc/PID/maps lists them (proc_pid_maps(5)).

use abi::{Addr, Span};
use rustix::fs::{major, minor};

/// One mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    pub span: Span,
    /// `MAP_SHARED`.
    pub is_shared: bool,
    pub offset_bytes: u64,
    /// The device of the file; 0 and 0 where there is none.
    pub device: (u32, u32),
    pub inode: u64,
}

impl Mapping {
    /// Reads a line of the list.
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_ascii_whitespace();
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = words.next()?.split_once('-')?;
        let is_shared = words.next()?.ends_with('s');
        let offset_bytes = hex(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        Some(Self {
            span: Span {
                start: Addr(hex(start)?),
                end: Addr(hex(end)?),
            },
            is_shared,
            offset_bytes,
            device: (hex(major)?.try_into().ok()?, hex(minor)?.try_into().ok()?),
            inode: words.next()?.parse().ok()?,
        })
    }

    /// Tells whether the file of this device and inode is mapped.
    pub fn is_of(&self, device: u64, inode: u64) -> bool {
        (self.device, self.inode) == ((major(device), minor(device)), inode)
    }

    /// Tells whether a file is mapped shared.
    pub fn is_shared_file(&self) -> bool {
        self.is_shared && self.inode != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_maps_is_read() {
        let line = "7f4c0afff000-7f4c23fff000 rw-s 00001000 00:01 1026    /memfd:x (deleted)";
        let mapping = Mapping {
            span: Span {
                start: Addr(0x7f4c_0aff_f000),
                end: Addr(0x7f4c_23ff_f000),
            },
            is_shared: true,
            offset_bytes: 0x1000,
            device: (0, 1),
            inode: 1026,
        };
        assert!(mapping.is_shared_file() && mapping.is_of(1, 1026) && !mapping.is_of(2, 1026));
        assert_eq!(Mapping::parse(line), Some(mapping));
        let is_shared = |line: &str| Mapping::parse(line).expect("a mapping").is_shared_file();
        assert!(!is_shared(&line.replace("rw-s", "rw-p")));
        assert!(!is_shared(&line.replace("1026", "0")));
        assert_eq!(Mapping::parse("[vdso]"), None);
    }
}
