//! How much memory this host promises (`vm.overcommit_memory`, proc_sys_vm(5)): at once, and in
//! all.
//!
//! By its heuristic (0), the kernel refuses a call that asks for more than the machine has. Where
//! it never overcommits (2), it adds up what it has promised: an image that needs more than is left
//! is refused before anything is made, and before a tree is killed for it.
//!
//! - What: promised memory
//! - Kept: memory that grew beyond what the kernel grants at once, and what counts as promised.
//! - At a restore: "the image needs … bytes of promised memory, and this host, which never
//!   overcommits (vm.overcommit_memory is 2), has … left" (a dump is refused for the same reason).
//! - CRIU 4.2: one mapping larger than memory and swap is not restored.

use std::path::{Path, PathBuf};

use image::Reader;

use crate::records::Saved;
use crate::{Error, Result, huge_pages};

/// The mode that `vm.overcommit_memory` sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Heuristic,
    Always,
    Never,
}

impl Mode {
    fn read(proc: &Path) -> Result<Self> {
        let path = format!("{}/sys/vm/overcommit_memory", proc.display());
        let mode = sys::proc::read(&path);
        let mode = mode.map_err(|e| Error::kernel(format!("cannot read {path}"), e))?;
        Ok(match mode.trim_ascii() {
            b"1" => Self::Always,
            b"2" => Self::Never,
            _ => Self::Heuristic,
        })
    }
}

/// How many bytes of private memory the kernel promises to a task of this tree by one call.
///
/// # Errors
/// [`Error::Kernel`].
pub(crate) fn at_once_bytes(saved: &Saved<'_>) -> Result<u64> {
    let known = rustix::system::sysinfo();
    let units = known.totalram.saturating_add(known.totalswap);
    let bytes = units.saturating_mul(known.mem_unit.into());
    let bytes = (bytes & !(abi::PAGE_BYTES - 1)).max(abi::PAGE_BYTES);
    let mapped = saved.tasks.iter().map(|task| {
        let spans = task.memory.mappings.iter().map(|map| map.span().bytes());
        spans.fold(0, u64::saturating_add)
    });
    // The mode does not matter to a task that has no more in all.
    let is_little = mapped.max().unwrap_or(0) <= bytes;
    match is_little || Mode::read(&here())? == Mode::Heuristic {
        true => Ok(bytes),
        false => Ok(u64::MAX),
    }
}

/// Refuses an image that needs more memory than this host has left to promise, where it adds that
/// up. `given_up`: the tree that the image is of is there and will be gone.
///
/// # Errors
/// [`Error::Unfit`]; [`Error::Kernel`].
pub(crate) fn check(saved: &Saved<'_>, reader: &Reader, given_up: bool) -> Result<()> {
    check_in(&here(), (saved, reader), given_up)
}

/// The procfs of this host.
fn here() -> PathBuf {
    PathBuf::from(sys::procfs::path("."))
}

fn check_in(proc: &Path, (saved, reader): (&Saved<'_>, &Reader), given_up: bool) -> Result<()> {
    if Mode::read(proc)? != Mode::Never {
        return Ok(());
    }
    let path = proc.join("meminfo");
    let text = std::fs::read_to_string(&path);
    let text = text.map_err(|e| Error::kernel(format!("cannot read {}", path.display()), e))?;
    let kib = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let limits = kib("CommitLimit:").zip(kib("Committed_AS:"));
    let Some((limit, promised)) = limits.map(|(a, b)| (a * 1024, b * 1024)) else {
        return Ok(());
    };
    let shared = shared_bytes(saved, reader)?;
    let needed = private_bytes(saved, true) + shared;
    let freed = match given_up {
        true => private_bytes(saved, false) + shared,
        false => 0,
    };
    let left = limit.saturating_sub(promised.saturating_sub(freed) + kept_back(proc, saved));
    match needed <= left {
        true => Ok(()),
        false => Err(Error::Unfit(format!(
            "the image needs {needed} bytes of promised memory, and this host, which never \
             overcommits (vm.overcommit_memory is 2), has {left} left"
        ))),
    }
}

/// How many bytes the kernel promises to the tree's private memory; by a host that `never`
/// overcommits also where no promise was asked for.
fn private_bytes(saved: &Saved<'_>, never: bool) -> u64 {
    let maps = saved.tasks.iter().flat_map(|task| &task.memory.mappings);
    let promised = maps.filter(|map| map.is_promised(map.prot, never));
    promised.map(|map| map.span().bytes()).sum()
}

/// How many bytes the kernel promises to memory that is shared.
fn shared_bytes(saved: &Saved<'_>, reader: &Reader) -> Result<u64> {
    let mut bytes = 0u64;
    for (id, description) in (0u32..).zip(&saved.descriptions) {
        let memory = description.memory()?;
        let memory = memory.filter(|memory| memory.first == id && !memory.is_there);
        if let Some(memory) = memory.filter(|memory| memory.huge_page_bytes.is_none()) {
            let taken = huge_pages::taken_bytes(memory, abi::PAGE_BYTES, Vec::new(), reader);
            bytes = bytes.saturating_add(taken);
        }
    }
    Ok(bytes)
}

/// The bytes that the kernel holds back: `admin_reserve_kbytes`, and the smaller of
/// `user_reserve_kbytes` and a 32nd of the largest task.
fn kept_back(proc: &Path, saved: &Saved<'_>) -> u64 {
    let number = |name: &str| {
        let text = std::fs::read_to_string(proc.join("sys/vm").join(name));
        let number = text.ok().and_then(|text| text.trim().parse::<u64>().ok());
        number.unwrap_or_default() * 1024
    };
    let sizes = saved.tasks.iter().map(|task| {
        let maps = task.memory.mappings.iter();
        maps.map(|map| map.span().bytes()).sum::<u64>()
    });
    let largest = sizes.max().unwrap_or_default();
    number("admin_reserve_kbytes") + number("user_reserve_kbytes").min(largest / 32)
}

#[cfg(test)]
mod tests {
    use image::Reader;

    use super::*;
    use crate::sample;

    #[test]
    fn host_that_never_overcommits_is_asked_before() {
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("a folder");
            std::fs::write(path, text).expect("written");
        };
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let mut saved = Saved::read(&reader).expect("right records");
        let needed = private_bytes(&saved, true);
        assert!(needed > 0, "the sample has private memory");
        let limit = |left: u64, mode: u32| {
            write("sys/vm/overcommit_memory", &format!("{mode}\n"));
            let (limit, promised) = (1 << 20, (1 << 20) - left / 1024);
            write(
                "meminfo",
                &format!("CommitLimit:  {limit} kB\nCommitted_AS:  {promised} kB\n"),
            );
        };
        limit(needed, 2);
        check_in(folder.path(), (&saved, &reader), false).expect("it is there");
        limit(needed - 4096, 2);
        let error = check_in(folder.path(), (&saved, &reader), false).expect_err("too little");
        let want = format!("needs {needed} bytes of promised memory");
        assert!(error.to_string().contains(&want), "{error}");
        check_in(folder.path(), (&saved, &reader), true).expect("what the tree has is given up");
        // A mapping with `MAP_NORESERVE` counts as promised on a host that never overcommits.
        limit(0, 2);
        for map in &mut saved.tasks[0].memory.mappings {
            map.flags |= 0x4000;
        }
        check_in(folder.path(), (&saved, &reader), true).expect_err("it had none");
        limit(0, 0);
        check_in(folder.path(), (&saved, &reader), false).expect("nothing is added up");
    }

    #[test]
    fn mode_of_the_host_counts_where_a_task_has_more_than_the_machine() {
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let mut saved = Saved::read(&reader).expect("right records");
        let little = at_once_bytes(&saved).expect("no file is read");
        assert!(little.is_multiple_of(abi::PAGE_BYTES) && little > 0);
        saved.tasks[0].memory.mappings[0].end = 1 << 46;
        let much = at_once_bytes(&saved).expect("/proc is there");
        let mode = Mode::read(&here()).expect("/proc is there");
        match mode {
            Mode::Heuristic => assert_eq!(much, little),
            Mode::Always | Mode::Never => assert_eq!(much, u64::MAX),
        }
    }
}
