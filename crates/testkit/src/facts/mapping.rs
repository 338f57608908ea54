//! Mappings with their flags, and what the pages hold.
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use xxhash_rust::xxh3::xxh3_64;

use super::{Depth, Facts, Page};
use crate::tree;

const PAGE_BYTES: usize = 4096;
/// How much is read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// One line group of /proc/PID/smaps.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    permissions: String,
    offset: u64,
    /// "dev:inode" of the file behind it; "00:00:0" for none.
    file: String,
    name: String,
    flags: String,
}

impl Mapping {
    fn is_anonymous(&self) -> bool {
        // Where it has huge pages, a file is behind it that nobody else can have.
        let is_huge = self.name == "/anon_hugepage (deleted)" && self.permissions.ends_with('p');
        self.file == "00:00:0" || is_huge
    }

    /// Shared memory that has no name of its own: its inode number means nothing later.
    fn is_unnamed_file(&self) -> bool {
        self.name.ends_with(" (deleted)")
    }

    /// Tells whether a page that is not present holds zeros.
    fn is_zero_where_absent(&self) -> bool {
        self.is_anonymous() && self.name != "[vdso]"
    }

    /// Pages that the kernel provides or a device owns.
    fn is_special(&self) -> bool {
        let device = |flag| matches!(flag, "io" | "pf");
        self.name.starts_with("[vvar")
            || self.name == "[vsyscall]"
            || self.flags.split(' ').any(device)
    }

    /// Tells whether `next` goes on where this one ends, as if they had been mapped in one call.
    fn continues_in(&self, next: &Mapping) -> bool {
        let offset_goes_on =
            self.is_anonymous() || self.offset + (self.end - self.start) == next.offset;
        self.end == next.start
            && offset_goes_on
            && self.permissions == next.permissions
            && self.file == next.file
            && self.name == next.name
            && self.flags == next.flags
    }
}

pub(super) fn look(facts: &mut Facts, pid: u32, depth: Depth) {
    let smaps = fs::read_to_string(format!("/proc/{}/smaps", tree::asked(pid))).unwrap_or_default();
    let mappings = merge(parse(&smaps));
    for mapping in &mappings {
        note(facts, pid, mapping, depth);
    }
    if depth == Depth::Still
        && let Ok(memory) = File::open(format!("/proc/{}/mem", tree::asked(pid)))
        && let Ok(pagemap) = File::open(format!("/proc/{}/pagemap", tree::asked(pid)))
    {
        for mapping in mappings.iter().filter(|mapping| !mapping.is_special()) {
            hash_pages(facts, pid, mapping, &memory, &pagemap);
        }
    }
}

fn note(facts: &mut Facts, pid: u32, mapping: &Mapping, depth: Depth) {
    let grows = mapping.name == "[stack]" || mapping.name == "[heap]";
    if grows && depth == Depth::Moving {
        return;
    }
    let behind = if mapping.is_anonymous() {
        String::new()
    } else if mapping.is_unnamed_file() {
        format!(" {:x} file {}", mapping.offset, facts.class(&mapping.file))
    } else {
        format!(" {:x} {}", mapping.offset, mapping.file)
    };
    let line = format!(
        "{}{behind} {} [{}]",
        mapping.permissions, mapping.name, mapping.flags
    );
    let name = format!("map {:x}-{:x}", mapping.start, mapping.end);
    facts.note(pid, &name, line);
}

fn parse(smaps: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            if let Some(last) = mappings.last_mut() {
                // "sd": a page was written since somebody last asked; "ac": it counts against the
                // limit of what may be committed; "gu": there may be guards, which a merge spreads.
                let noise = |flag: &&str| matches!(*flag, "sd" | "ac" | "gu" | "");
                let flags = flags.split(' ').filter(|flag| !noise(flag));
                last.flags = flags.collect::<Vec<_>>().join(" ");
            }
        } else if let Some(mapping) = parse_header(line) {
            mappings.push(mapping);
        }
    }
    mappings
}

/// Parses "start-end perms offset dev inode name"; none for the other lines.
fn parse_header(line: &str) -> Option<Mapping> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    let permissions = fields.next()?.to_owned();
    let offset = fields.next()?;
    let device = fields.next()?;
    let inode = fields.next()?;
    Some(Mapping {
        start: u64::from_str_radix(start, 16).ok()?,
        end: u64::from_str_radix(end, 16).ok()?,
        permissions,
        offset: u64::from_str_radix(offset, 16).ok()?,
        file: format!("{device}:{inode}"),
        name: super::without_number(fields.next().unwrap_or("").trim_start()),
        flags: String::new(),
    })
}

fn merge(mappings: Vec<Mapping>) -> Vec<Mapping> {
    let mut merged: Vec<Mapping> = Vec::new();
    for mapping in mappings {
        match merged.last_mut() {
            Some(last) if last.continues_in(&mapping) => last.end = mapping.end,
            _ => merged.push(mapping),
        }
    }
    merged
}

/// Bits of an entry of /proc/PID/pagemap: kernel document admin-guide/mm/pagemap.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const GUARD: u64 = 1 << 58;

fn hash_pages(facts: &mut Facts, pid: u32, mapping: &Mapping, memory: &File, pagemap: &File) {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut entries = vec![0; CHUNK_BYTES / PAGE_BYTES * 8];
    let mut at = mapping.start;
    while at < mapping.end {
        let bytes = CHUNK_BYTES.min((mapping.end - at) as usize);
        let entry_bytes = bytes / PAGE_BYTES * 8;
        let known = pagemap
            .read_exact_at(&mut entries[..entry_bytes], at / PAGE_BYTES as u64 * 8)
            .is_ok();
        let interesting = |page: usize| {
            let entry = u64::from_le_bytes(entries[page * 8..][..8].try_into().expect("8 bytes"));
            !known || !mapping.is_zero_where_absent() || entry & (PRESENT | SWAPPED | GUARD) != 0
        };
        let pages = bytes / PAGE_BYTES;
        if (0..pages).any(interesting) {
            let whole = memory.read_exact_at(&mut chunk[..bytes], at).is_ok();
            for page in (0..pages).filter(|&page| interesting(page)) {
                let address = at + (page * PAGE_BYTES) as u64;
                let contents = &mut chunk[page * PAGE_BYTES..][..PAGE_BYTES];
                let readable = whole || memory.read_exact_at(contents, address).is_ok();
                if mapping.name.starts_with("/[aio]") && address == mapping.start {
                    // Which of the task's contexts the ring is of: the kernel's own number.
                    contents[..4].fill(0);
                }
                note_page(facts, pid, address, readable.then_some(contents));
            }
        }
        at += bytes as u64;
    }
}

fn note_page(facts: &mut Facts, pid: u32, address: u64, contents: Option<&mut [u8]>) {
    let page = match contents {
        Some(contents) => {
            facts.blank_kernel_words(pid, address, contents);
            if contents.iter().all(|&byte| byte == 0) {
                return;
            }
            Page::Data(xxh3_64(contents))
        }
        None => Page::Unreadable,
    };
    facts.pages.insert((pid, address), page);
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "\
1000-3000 rw-p 00000000 00:00 0 \nSize: 8 kB\nVmFlags: rd wr mr mw me ac sd \n\
3000-4000 rw-p 00000000 00:00 0 \nVmFlags: rd wr mr mw me ac \n\
5000-6000 r--p 00001000 fe:00 77                         /lib/x y\nVmFlags: rd mr mw me \n";

    #[test]
    fn neighbours_that_only_history_separates_count_as_one() {
        let mappings = merge(parse(SMAPS));
        assert_eq!(mappings.len(), 2);
        assert_eq!((mappings[0].start, mappings[0].end), (0x1000, 0x4000));
        assert_eq!(mappings[0].flags, "rd wr mr mw me");
        assert_eq!(mappings[1].name, "/lib/x y");
        assert_eq!(mappings[1].file, "fe:00:77");
    }
}
