//! Mappings of all kinds: anonymous and of files, private and shared, of a deleted file and of a
//! sealed memfd, written and then made unreadable, growing down, locked, advised, with guards.
//! With the argument `plain`, without the kinds that peers do not save.
//!
//! `check` answers "right" while each holds the words that were written, `write` changes one word
//! in each shared one and answers "right" when its file shows it.
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};

use super::{Control, Failure, not_understood};
use crate::calls::Mapping;

const PAGE_BYTES: usize = 4096;
const PAGES: usize = 16;
const BYTES: usize = PAGES * PAGE_BYTES;
const MADV_DONTFORK: i32 = 10;
const MADV_MERGEABLE: i32 = 12;
const MADV_HUGEPAGE: i32 = 14;
const MADV_NOHUGEPAGE: i32 = 15;
const MADV_DONTDUMP: i32 = 16;
const MADV_WIPEONFORK: i32 = 18;
const MADV_GUARD_INSTALL: i32 = 102;
const MLOCK_ONFAULT: u32 = 1;
const MARK: u64 = 0xface_0000_0000;

/// A mapping and what is expected in it.
struct Kind {
    name: &'static str,
    mapping: Mapping,
    /// The pages that hold `MARK` plus their number; the others are as they came.
    written: Vec<usize>,
    /// Pages that were written over with zeros.
    zeroed: Vec<usize>,
    /// What unwritten pages begin with: zero, or this plus their number.
    background: u64,
    /// Made readable before a look, and unreadable after.
    is_hidden: bool,
    /// The file that shows what is written.
    behind: Option<File>,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let plain = arguments.first().is_some_and(|word| word == "plain");
    let mut kinds = anonymous(plain)?;
    kinds.extend(of_files(control.folder())?);
    let kinds = kinds;
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            let mut wrong = Vec::new();
            for kind in &kinds {
                wrong.extend(check(kind)?);
            }
            Ok(if wrong.is_empty() {
                "right".into()
            } else {
                wrong.join(", ")
            })
        }
        "write" => {
            let mut wrong = Vec::new();
            for kind in kinds.iter().filter(|kind| kind.behind.is_some()) {
                let value = kind.mapping.load(8) + 1;
                kind.mapping.store(8, value);
                let mut shown = [0; 8];
                if let Some(file) = &kind.behind {
                    file.read_exact_at(&mut shown, 8)?;
                }
                if u64::from_le_bytes(shown) != value {
                    wrong.push(kind.name);
                }
            }
            Ok(if wrong.is_empty() {
                "right".into()
            } else {
                wrong.join(", ")
            })
        }
        _ => not_understood(question),
    })
}

fn check(kind: &Kind) -> Result<Vec<String>, Failure> {
    let readable = ProtFlags::READ.bits().cast_signed();
    if kind.is_hidden {
        kind.mapping.protect(0..kind.mapping.bytes(), readable)?;
    }
    let mut wrong = Vec::new();
    for page in 0..kind.mapping.bytes() / PAGE_BYTES {
        if kind.name == "guarded" && page == PAGES / 2 {
            continue;
        }
        let background = if kind.background == 0 {
            0
        } else {
            kind.background + page as u64
        };
        let expected = if kind.written.contains(&page) {
            MARK + page as u64
        } else if kind.zeroed.contains(&page) {
            0
        } else {
            background
        };
        let is = kind.mapping.load(page * PAGE_BYTES);
        if is != expected {
            wrong.push(format!(
                "{} page {page}: {is:x} is not {expected:x}",
                kind.name
            ));
        }
    }
    if kind.is_hidden {
        kind.mapping.protect(0..kind.mapping.bytes(), 0)?;
    }
    Ok(wrong)
}

impl Kind {
    fn new(name: &'static str, mapping: Mapping, written: &[usize]) -> Self {
        for &page in written {
            mapping.store(page * PAGE_BYTES, MARK + page as u64);
        }
        Self {
            name,
            mapping,
            written: written.to_vec(),
            zeroed: Vec::new(),
            background: 0,
            is_hidden: false,
            behind: None,
        }
    }
}

fn anonymous(plain: bool) -> Result<Vec<Kind>, Failure> {
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let map = |flags| Mapping::anonymous(BYTES, both, flags);
    let private = MapFlags::PRIVATE;
    let mut kinds = vec![
        Kind::new("private", map(private)?, &[0, 1, 5, PAGES - 1]),
        Kind::new("untouched", map(private)?, &[]),
        Kind::new("shared", map(MapFlags::SHARED)?, &[0, 3]),
        Kind::new("no reserve", map(private | MapFlags::NORESERVE)?, &[2]),
        Kind::new(
            "growing down",
            map(private | MapFlags::GROWSDOWN)?,
            &[PAGES - 1],
        ),
    ];
    let mut hidden = Kind::new("hidden", map(private)?, &[4, 7]);
    hidden.mapping.protect(0..BYTES, 0)?;
    hidden.is_hidden = true;
    kinds.push(hidden);
    let read_only = Kind::new("read-only", map(private)?, &[1]);
    read_only
        .mapping
        .protect(0..BYTES, ProtFlags::READ.bits().cast_signed())?;
    kinds.push(read_only);
    let locked = Kind::new("locked", map(private)?, &[1]);
    locked.mapping.lock(0..2 * PAGE_BYTES, 0)?;
    kinds.push(locked);
    if !plain {
        let on_fault = Kind::new("locked on fault", map(private)?, &[1]);
        on_fault.mapping.lock(0..BYTES, MLOCK_ONFAULT)?;
        kinds.push(on_fault);
    }
    let advice = [
        ("not forked", MADV_DONTFORK),
        ("mergeable", MADV_MERGEABLE),
        ("huge", MADV_HUGEPAGE),
        ("not huge", MADV_NOHUGEPAGE),
        ("not dumped", MADV_DONTDUMP),
        ("wiped on fork", MADV_WIPEONFORK),
    ];
    for (name, advice) in advice {
        let kind = Kind::new(name, map(private)?, &[6]);
        match kind.mapping.advise(0..BYTES, advice) {
            Ok(()) => kinds.push(kind),
            // Not compiled into this kernel.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {}
            Err(error) => return Err(error.into()),
        }
    }
    if !plain {
        let guarded = Kind::new("guarded", map(private)?, &[0, PAGES - 1]);
        let middle = PAGES / 2 * PAGE_BYTES;
        match guarded
            .mapping
            .advise(middle..middle + PAGE_BYTES, MADV_GUARD_INSTALL)
        {
            Ok(()) => kinds.push(guarded),
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(kinds)
}

/// A file of [`PAGES`] pages, each beginning with `background` plus its number.
fn make_file(path: &Path, background: u64) -> Result<File, Failure> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    fill(&file, background)?;
    Ok(file)
}

fn fill(file: &File, background: u64) -> Result<(), Failure> {
    file.set_len(BYTES as u64)?;
    for page in 0..PAGES {
        let word = background + page as u64;
        file.write_all_at(&word.to_le_bytes(), (page * PAGE_BYTES) as u64)?;
    }
    Ok(())
}

fn of_files(folder: &Path) -> Result<Vec<Kind>, Failure> {
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let mut kinds = Vec::new();
    let mut add = |name, file: &File, flags, background, written: &[usize]| {
        let mapping = Mapping::of_file(file, 0, BYTES, both, flags)?;
        let mut kind = Kind::new(name, mapping, written);
        kind.background = background;
        if flags == MapFlags::SHARED {
            kind.behind = Some(file.try_clone()?);
        }
        kinds.push(kind);
        Ok::<(), Failure>(())
    };
    let file = make_file(&folder.join("mapped"), 0x1000)?;
    add("file, private", &file, MapFlags::PRIVATE, 0x1000, &[2, 9])?;
    add("file, shared", &file, MapFlags::SHARED, 0x1000, &[])?;
    let mapping = Mapping::of_file(&file, 0, BYTES, both, MapFlags::PRIVATE)?;
    let mut cleared = Kind::new("file, private, with zeros", mapping, &[4]);
    (cleared.background, cleared.zeroed) = (0x1000, vec![5, 6, PAGES - 1]);
    for page in &cleared.zeroed {
        // The file has nothing but zeros behind the first word.
        cleared.mapping.store(page * PAGE_BYTES, 0);
    }
    let deleted = make_file(&folder.join("deleted"), 0x2000)?;
    fs::remove_file(folder.join("deleted"))?;
    add(
        "deleted, private",
        &deleted,
        MapFlags::PRIVATE,
        0x2000,
        &[3],
    )?;
    add("deleted, shared", &deleted, MapFlags::SHARED, 0x2000, &[])?;
    let memfd = File::from(memfd_create(
        "a memfd",
        MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?);
    fill(&memfd, 0x3000)?;
    add("memfd, shared", &memfd, MapFlags::SHARED, 0x3000, &[])?;
    add("memfd, private", &memfd, MapFlags::PRIVATE, 0x3000, &[1])?;
    kinds.push(cleared);
    fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(kinds)
}
