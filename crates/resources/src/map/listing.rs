//! The kernel's listing of a process's mappings: /proc/PID/smaps (proc_pid_smaps(5)).

use abi::{Addr, Span};

use super::aio;
use crate::fd::{io_uring, memfd, segment};

/// What a mapping is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Backing {
    /// Private memory of its own: heap, stack, anonymous.
    Anonymous,
    /// A file; also shared memory and memfds, which are files without a place.
    File,
    /// The vDSO's code.
    Vdso,
    /// The vDSO's data, whatever the kernel calls its parts ("[vvar]", "[vvar_vclock]").
    Vvar,
    /// Another mapping that the kernel made by itself, by name ("[uprobes]", "[vsyscall]").
    Special,
}

/// One mapping as listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// The addresses.
    pub span: Span,
    /// `PROT_READ`, `PROT_WRITE`, `PROT_EXEC`.
    pub prot: u32,
    /// Whether writes are seen by others.
    pub shared: bool,
    /// The offset in the file in bytes.
    pub offset: u64,
    /// The file's device and inode; 0 for none.
    pub dev: u64,
    /// See `dev`.
    pub ino: u64,
    /// The path or the mark in brackets, with " (deleted)" where the kernel says so.
    pub name: Vec<u8>,
    /// The two-letter codes of `VmFlags`.
    pub flags: Vec<[u8; 2]>,
    /// How much of it is in memory, in bytes.
    pub resident_bytes: u64,
    /// How much is in the swap, in bytes.
    pub swapped_bytes: u64,
    /// How much of it other processes have mapped as well: clean and dirty pages, in bytes.
    pub common_bytes: (u64, u64),
    /// The size of the pages that the kernel keeps it in.
    pub page_bytes: u64,
    /// Its protection key (pkeys(7)); 0 where the processor has none.
    pub protection_key: u64,
}

/// The file of anonymous memory that has huge pages, private or shared, as the kernel names it.
pub const HUGE_PAGES: &[u8] = b"/anon_hugepage (deleted)";

impl Listed {
    /// What the mapping is made of.
    #[must_use]
    pub fn backing(&self) -> Backing {
        match self.name.as_slice() {
            b"[vdso]" => Backing::Vdso,
            name if name.starts_with(b"[vvar") => Backing::Vvar,
            HUGE_PAGES if !self.shared => Backing::Anonymous,
            _ if self.ino != 0 || self.segment().is_some() => Backing::File,
            b"" | b"[heap]" | b"[stack]" => Backing::Anonymous,
            name if name.starts_with(b"[anon:") => Backing::Anonymous,
            _ => Backing::Special,
        }
    }

    /// The number of the System V shared memory that it is; the kernel numbers the file by it.
    #[must_use]
    pub fn segment(&self) -> Option<i32> {
        let is_segment = self.shared && self.name.starts_with(segment::LINK);
        let deleted = self.name.ends_with(b" (deleted)");
        (is_segment && deleted).then(|| segment::number(self.ino))
    }

    /// Whether it is a ring of io_uring(7), which the kernel writes to by itself.
    #[must_use]
    pub fn is_ring(&self) -> bool {
        self.shared && self.name == io_uring::LINK
    }

    /// Whether it is a ring of asynchronous I/O (io_setup(2)), which the kernel writes to.
    #[must_use]
    pub fn is_aio(&self) -> bool {
        self.shared && self.name == aio::NAME
    }

    /// True for memory of memfd_secret(2).
    #[must_use]
    pub fn is_secret(&self) -> bool {
        self.shared && self.name == memfd::SECRET_LINK && memfd::is_secret(self.dev)
    }

    /// Whether it is memory that a socket shares with its owner.
    #[must_use]
    pub fn is_socket(&self) -> bool {
        self.name.starts_with(b"socket:[")
    }

    /// Whether `VmFlags` has the code.
    #[must_use]
    pub fn has(&self, flag: &[u8; 2]) -> bool {
        self.flags.contains(flag)
    }

    /// Whether pages are locked when they are brought in (`MLOCK_ONFAULT`). Of locked memory, the
    /// older kernels say so by a code that they have no letters for.
    #[must_use]
    pub fn locks_on_fault(&self) -> bool {
        self.has(b"lf") || self.has(b"lo") && self.has(b"??")
    }

    /// Whether it has huge pages of hugetlbfs; of files, only smaps tells.
    #[must_use]
    pub fn has_huge_pages(&self) -> bool {
        self.name == HUGE_PAGES || self.has(b"ht")
    }

    /// Whether some of its own pages may be another process's as well, by copy-on-write since a
    /// fork; a file's clean pages are everybody's.
    #[must_use]
    pub fn may_share(&self) -> bool {
        let (clean, dirty) = self.common_bytes;
        dirty > 0 || clean > 0 && self.backing() == Backing::Anonymous
    }

    /// "mapping 0x1000-0x2000 (/lib/x)", for messages.
    #[must_use]
    pub fn place(&self) -> String {
        let name = String::from_utf8_lossy(&self.name);
        if name.is_empty() {
            format!("mapping {}", self.span)
        } else {
            format!("mapping {} ({name})", self.span)
        }
    }
}

/// Reads the text of smaps.
///
/// # Errors
/// The line that could not be understood.
pub fn parse(smaps: &[u8]) -> Result<Vec<Listed>, String> {
    let mut all: Vec<Listed> = Vec::new();
    for line in smaps
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
    {
        if line[0].is_ascii_digit() || (b'a'..=b'f').contains(&line[0]) {
            let listed = header(line);
            all.push(listed.ok_or_else(|| String::from_utf8_lossy(line).into_owned())?);
            continue;
        }
        let Some(last) = all.last_mut() else { continue };
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            let codes = flags.split(u8::is_ascii_whitespace);
            last.flags = codes.filter_map(|code| code.try_into().ok()).collect();
        } else if let Some(value) = line.strip_prefix(b"Rss:") {
            last.resident_bytes = kib(value);
        } else if let Some(value) = line.strip_prefix(b"Swap:") {
            last.swapped_bytes = kib(value);
        } else if let Some(value) = line.strip_prefix(b"KernelPageSize:") {
            last.page_bytes = kib(value);
        } else if let Some(value) = line.strip_prefix(b"ProtectionKey:") {
            last.protection_key = number(value);
        } else if let Some(value) = line.strip_prefix(b"Shared_Clean:") {
            last.common_bytes.0 = kib(value);
        } else if let Some(value) = line.strip_prefix(b"Shared_Dirty:") {
            last.common_bytes.1 = kib(value);
        }
    }
    Ok(all)
}

fn kib(value: &[u8]) -> u64 {
    number(value).saturating_mul(1024)
}

fn number(value: &[u8]) -> u64 {
    let digits = value.iter().filter(|byte| byte.is_ascii_digit());
    digits.fold(0u64, |sum, digit| {
        sum.saturating_mul(10)
            .saturating_add(u64::from(digit - b'0'))
    })
}

/// "7f00-7f01 r-xp 00001000 fe:00 325835      /usr/lib/x"
fn header(line: &[u8]) -> Option<Listed> {
    let mut rest = line;
    let mut field = || {
        let end = rest
            .iter()
            .position(|byte| *byte == b' ')
            .unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        rest = after.get(1..).unwrap_or_default();
        std::str::from_utf8(word).ok()
    };
    let (start, end) = field()?.split_once('-')?;
    let prot = field()?.as_bytes();
    let offset = field()?;
    let (major, minor) = field()?.split_once(':')?;
    let ino = field()?.parse().ok()?;
    let name = rest.trim_ascii_start();
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let bit = |at: usize, letter, value| {
        if prot.get(at) == Some(&letter) {
            value
        } else {
            0
        }
    };
    let (major, minor) = (
        u32::try_from(hex(major)?).ok()?,
        u32::try_from(hex(minor)?).ok()?,
    );
    Some(Listed {
        span: Span {
            start: Addr(hex(start)?),
            end: Addr(hex(end)?),
        },
        prot: bit(0, b'r', 1) | bit(1, b'w', 2) | bit(2, b'x', 4),
        shared: prot.get(3) == Some(&b's'),
        offset: hex(offset)?,
        dev: rustix::fs::makedev(major, minor),
        ino,
        name: name.to_vec(),
        flags: Vec::new(),
        resident_bytes: 0,
        swapped_bytes: 0,
        common_bytes: (0, 0),
        page_bytes: abi::PAGE_BYTES,
        protection_key: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_locked_when_touched_is_told_by_older_kernels_too() {
        let locked = |flags: &str| {
            let text = format!("1000-3000 rw-p 00000000 00:00 0 \nVmFlags: {flags} \n");
            parse(text.as_bytes()).expect("a list")[0].locks_on_fault()
        };
        assert!(locked("rd wr lo lf") && locked("rd wr lo ??"));
        assert!(!locked("rd wr lo") && !locked("rd wr ??"));
    }

    #[test]
    fn protection_keys_are_understood() {
        let text = "1000-3000 rw-p 00000000 00:00 0 \nProtectionKey:         3\n";
        assert_eq!(parse(text.as_bytes()).expect("a list")[0].protection_key, 3);
    }

    #[test]
    fn own_listing_is_understood() {
        let text = std::fs::read("/proc/self/smaps").expect("smaps");
        let all = parse(&text).expect("understood");
        assert!(
            all.iter()
                .any(|map| map.backing() == Backing::Vdso && map.has(b"ex"))
        );
        assert!(
            all.iter()
                .any(|map| map.name == b"[stack]" && map.has(b"gd"))
        );
        assert!(
            all.iter()
                .any(|map| map.backing() == Backing::File && map.resident_bytes > 0)
        );
        assert!(
            all.windows(2)
                .all(|pair| pair[0].span.end <= pair[1].span.start)
        );
    }

    #[test]
    fn names_keep_their_spaces() {
        let text = b"7f0000-7f1000 rw-s 00002000 00:01 42       /tmp/a b (deleted)\n";
        let map = parse(text).expect("understood").remove(0);
        assert_eq!(map.name, b"/tmp/a b (deleted)");
        assert_eq!(
            (map.prot, map.shared, map.offset, map.ino),
            (3, true, 0x2000, 42)
        );
    }

    #[test]
    fn nonsense_is_named() {
        assert_eq!(parse(b"7f0000 rw-s\n"), Err("7f0000 rw-s".to_owned()));
    }
}
