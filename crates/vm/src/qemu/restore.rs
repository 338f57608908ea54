//! An image becomes machines that run.

use std::ffi::OsString;
use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use abi::{Addr, PAGE_BYTES};
use image::{Reader, SpaceId};
use pages::{Extent, sink};
use rustix::fs::{Mode, OFlags};
use store::Images;

use super::command;
use super::machine::written_ns;
use super::reaper::Reaper;
use super::record::{QemuBlock, QemuMachine, Saved};
use super::start::{self, Plan, Started};
use super::template::{self, Keeper};
use crate::{Error, Result};

/// The most machines that are started at once.
pub const CLONES_MAX: u32 = 1000;

/// Which machines are to be started, and how.
#[derive(Clone, Debug)]
pub struct RestoreOptions {
    /// Where the image is.
    pub images: Images,
    /// How many.
    pub clones: u32,
    /// What they are called: `{n}` is the number of each, from 1 on.
    pub name: Option<String>,
    /// How they get their memory.
    pub way: Way,
    /// Where keepers of templates listen.
    pub templates: PathBuf,
    /// Where their sockets and logs go: NAME.qmp and NAME.log.
    pub sockets: PathBuf,
    /// The program and its arguments; the recorded ones where there are none. `{n}` and `{name}`
    /// are each machine's number and name.
    pub command: Vec<OsString>,
    /// The environment that they have.
    pub environment: Vec<(OsString, OsString)>,
}

/// How machines get their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Each has a copy, which is whole before it runs.
    Eager,
    /// All map one template, and have to themselves what they write. It stays for so long after the
    /// last of them has ended.
    Share(Duration),
}

/// A machine that runs.
#[derive(Clone, Debug)]
pub struct Restored {
    /// What it is called.
    pub name: String,
    /// QEMU's process.
    pub pid: i32,
    /// Where its monitor listens.
    pub socket: PathBuf,
    /// What QEMU says.
    pub log: PathBuf,
}

/// What all machines are started with.
#[derive(Debug)]
struct Line {
    program: PathBuf,
    folder: PathBuf,
    words: Vec<String>,
}

/// The memory of one machine, or of several.
type Memory = Vec<template::File>;

/// Starts machines and returns when all of them run; then they are the caller's.
///
/// The calling process must have one thread. Calls `progress` with the bytes done and to be done.
///
/// # Errors
/// [`Error::Unfit`] where the machine cannot be had again. No machine is left of this call then,
/// nor is one if this process is killed meanwhile.
pub fn restore(
    options: &RestoreOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Vec<Restored>> {
    let store = options.images.open().map_err(Error::Store)?;
    let reader = Reader::open(&*store)?;
    if let Some(by) = reader.freed_by() {
        let id = reader.id();
        return Err(image::Error::Freed { id, by }.into());
    }
    let saved = Saved::of(&reader)?;
    let names = names(options)?;
    let line = line(options, &saved.machine)?;
    let environment = start::environment(&options.environment)?;
    let reaper = Reaper::post()?;
    let state = state(&saved.state)?;
    let memories = Memories::of(options, &reader, &saved.machine)?;
    let plan = |number: u32, name, memory| Plan {
        program: &line.program,
        words: command::fill_in(&line.words, number, name),
        environment: &environment,
        folder: &line.folder,
        name,
        rename: options.name.is_some() || options.clones > 1,
        sockets: &options.sockets,
        memory,
        private: memories.shared,
    };
    let machines = thread::scope(|scope| -> Result<Vec<Started>> {
        // QEMU starts meanwhile, and touches none of it before it is told to load.
        let filled = scope.spawn(|| memories.fill(&reader, &saved.machine, progress));
        let mut machines = Vec::new();
        for (number, name) in (1..).zip(&names) {
            let state = reopened(&state)?;
            let plan = plan(number, name, memories.of_machine(number));
            machines.push(Started::new(&plan, &state, &reaper)?);
        }
        for machine in &mut machines {
            machine.greet(&saved.machine)?;
        }
        filled
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok(machines)
    })?;
    let machines = set_running(machines, &saved.machine)?;
    memories.keep(options, &reader, &machines);
    reaper.dismiss()?;
    let restored = machines.into_iter().zip(names);
    let restored = restored.map(|(started, name)| Restored {
        name,
        socket: started.socket.clone(),
        log: started.log.clone(),
        pid: started.leave(),
    });
    let restored = restored.collect::<Vec<_>>();
    log::info!("{} machines run: {restored:?}", restored.len());
    Ok(restored)
}

/// The memory of all machines.
struct Memories {
    /// One for each machine, or one for all.
    all: Vec<Memory>,
    shared: bool,
    /// Who keeps it already.
    keeper: Option<Keeper>,
}

impl Memories {
    fn of(options: &RestoreOptions, reader: &Reader, machine: &QemuMachine) -> Result<Self> {
        if options.way == Way::Eager {
            let all = (0..options.clones).map(|_| memory(reader, machine));
            return Ok(Self {
                all: all.collect::<Result<_>>()?,
                shared: false,
                keeper: None,
            });
        }
        let wanted = machine.blocks.iter();
        let wanted = wanted.map(|block| (block.backend.clone(), bytes_of(reader, block)));
        let wanted = wanted.collect::<Vec<_>>();
        let keeper = Keeper::find(&options.templates, reader.id());
        let kept = keeper.and_then(|keeper| Some((keeper.files(&wanted)?, keeper)));
        let (memory, keeper) = match kept {
            Some((memory, keeper)) => (memory, Some(keeper)),
            None => (memory(reader, machine)?, None),
        };
        Ok(Self {
            all: vec![memory],
            shared: true,
            keeper,
        })
    }

    /// That of the machine with this number, from 1 on.
    fn of_machine(&self, number: u32) -> &Memory {
        match self.shared {
            true => &self.all[0],
            false => &self.all[number as usize - 1],
        }
    }

    /// Fills what is not filled yet.
    fn fill(
        &self,
        reader: &Reader,
        machine: &QemuMachine,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<()> {
        if self.keeper.is_some() {
            return Ok(());
        }
        fill(reader, machine, &self.all, progress)?;
        match self.shared {
            true => self.all.iter().try_for_each(|files| template::seal(files)),
            false => Ok(()),
        }
    }

    /// Has a template kept for the next ones.
    fn keep(&self, options: &RestoreOptions, reader: &Reader, machines: &[Started]) {
        let processes = machines.iter().map(Started::process).collect::<Vec<_>>();
        match (options.way, &self.keeper) {
            (Way::Eager, _) => {}
            (Way::Share(_), Some(keeper)) => keeper.count(&processes),
            (Way::Share(time), None) => {
                let (folder, files) = (&options.templates, &self.all[0]);
                let kept = template::keep(folder, reader.id(), files, &processes, time);
                if let Err(error) = kept {
                    log::warn!("the template is not kept: {error}");
                }
            }
        }
    }
}

fn set_running(mut machines: Vec<Started>, machine: &QemuMachine) -> Result<Vec<Started>> {
    for started in &mut machines {
        started.load(machine)?;
    }
    for started in &mut machines {
        started.loaded(machine)?;
    }
    for started in &mut machines {
        started.run(machine)?;
    }
    Ok(machines)
}

/// What each machine is called.
fn names(options: &RestoreOptions) -> Result<Vec<String>> {
    let unfit = |what: String| Err(Error::Unfit(what));
    if options.clones == 0 || options.clones > CLONES_MAX {
        return unfit(format!("1 to {CLONES_MAX} machines can be started at once"));
    }
    let pattern = match &options.name {
        Some(name) if options.clones > 1 && !name.contains("{n}") => {
            return unfit(format!(
                "{name} would be the name of every machine: add {{n}}"
            ));
        }
        Some(name) => name.as_str(),
        None => "vm-{n}",
    };
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    let names = (1..=options.clones).map(|number| pattern.replace("{n}", &number.to_string()));
    let names = names.collect::<Vec<_>>();
    match names
        .iter()
        .find(|name| name.is_empty() || !name.chars().all(is_plain))
    {
        Some(name) => unfit(format!(
            "{name:?} cannot be a name: letters, digits, '.', '_' and '-' can"
        )),
        None => Ok(names),
    }
}

/// The command line of all machines.
fn line(options: &RestoreOptions, machine: &QemuMachine) -> Result<Line> {
    let unfit = |what: String| Error::Unfit(what);
    let give = "give the command line behind --";
    if let Some((program, words)) = options.command.split_first() {
        let text = |word: &OsString| word.to_str().map(str::to_owned);
        let words = words.iter().map(text).collect::<Option<Vec<_>>>();
        let words = words.ok_or_else(|| unfit("the command line is no text".to_owned()))?;
        let folder = std::env::current_dir().map_err(Error::file("find", "."))?;
        return Ok(Line {
            program: program.into(),
            folder,
            words,
        });
    }
    if machine.words.is_empty() {
        return Err(unfit(format!("the image has no command line: {give}")));
    }
    if let Some(word) = machine.withheld.first() {
        let option = machine.words.get((*word as usize).saturating_sub(1));
        let option = option.map_or("an option", String::as_str);
        return Err(unfit(format!(
            "the recorded command line lacks a secret of {option}: {give}"
        )));
    }
    check_disks(machine)?;
    let many = options.clones > 1;
    let words = command::recorded(&machine.words, &machine.machine, many);
    for place in words.iter().flat_map(|words| command::listening_at(words)) {
        if is_listened_at(&place)? {
            return Err(unfit(format!(
                "somebody listens at {place}, which the recorded command line names: {give}"
            )));
        }
    }
    let more = if many {
        ", with {n} or {name} where they differ"
    } else {
        ""
    };
    Ok(Line {
        program: PathBuf::from(&machine.program),
        folder: PathBuf::from(&machine.folder),
        words: words.map_err(|what| unfit(format!("{what}: {give}{more}")))?,
    })
}

/// Whether a unix socket of this name listens: connecting would be noticed.
fn is_listened_at(place: &str) -> Result<bool> {
    let path = Path::new("/proc/net/unix");
    let all = fs::read(path).map_err(Error::file("read", path))?;
    let all = String::from_utf8_lossy(&all);
    Ok(all.lines().any(|line| listener(line) == Some(place)))
}

/// The name of a socket that listens, out of its line in /proc/net/unix.
fn listener(line: &str) -> Option<&str> {
    const LISTENS: u32 = 1 << 16;
    // Address, count, protocol, flags, type, state and inode stand before it, some filled up.
    let mut rest = line;
    let mut flags = 0;
    for column in 0..7 {
        let (word, behind) = rest.trim_start().split_once(' ')?;
        if column == 3 {
            flags = u32::from_str_radix(word, 16).ok()?;
        }
        rest = behind;
    }
    (flags & LISTENS != 0).then_some(rest)
}

/// Refuses disks that are not as they were when the machine was stopped.
fn check_disks(machine: &QemuMachine) -> Result<()> {
    for disk in &machine.disks {
        let facts =
            fs::metadata(&disk.path).map_err(Error::file("look at the disk", &disk.path))?;
        let is = (facts.len(), written_ns(&facts));
        if is != (disk.bytes, disk.written_ns) {
            return Err(Error::Unfit(format!(
                "the disk {} ({}) was written to since the machine was saved: put it back, or give \
                 the command line behind -- with another",
                disk.name, disk.path
            )));
        }
    }
    Ok(())
}

fn bytes_of(reader: &Reader, block: &QemuBlock) -> u64 {
    let space = reader.space(SpaceId(block.space)).expect("it was checked");
    space.len_pages * PAGE_BYTES
}

/// Files for the memory of a machine, empty.
fn memory(reader: &Reader, machine: &QemuMachine) -> Result<Memory> {
    let failed = |errno: rustix::io::Errno| Error::Kernel {
        doing: "cannot make memory for a machine",
        source: errno.into(),
    };
    let file = |block: &QemuBlock| {
        let bytes = bytes_of(reader, block);
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("stillframe-guest", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, bytes).map_err(failed)?;
        Ok((block.backend.clone(), bytes, file))
    };
    machine.blocks.iter().map(file).collect()
}

/// Fills memories with the image's pages, all of which are checked.
fn fill(
    reader: &Reader,
    machine: &QemuMachine,
    memories: &[Memory],
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<()> {
    let mut jobs = Vec::new();
    for (place, block) in machine.blocks.iter().enumerate() {
        let space = SpaceId(block.space);
        let whole = Extent {
            space,
            first_page: 0,
            at: Addr(0),
            pages: reader.space(space).expect("it was checked").len_pages,
        };
        let placed = pages::place(reader, &[whole])?;
        jobs.push((place, placed));
    }
    let pages = jobs.iter().flat_map(|job| &job.1);
    let bytes = pages
        .map(|piece| u64::from(piece.pages) * PAGE_BYTES)
        .sum::<u64>();
    let total = bytes * memories.len() as u64;
    let mut before = 0;
    for memory in memories {
        for (place, placed) in &jobs {
            let file = memory[*place]
                .2
                .try_clone()
                .map_err(|source| Error::Kernel {
                    doing: "cannot duplicate a descriptor",
                    source,
                })?;
            let filled = pages::fill(reader, placed, &sink::Object::new(file), &|done| {
                progress(before + done, total);
            })?;
            before += filled.pages * PAGE_BYTES;
        }
    }
    Ok(())
}

/// The state of devices in a file that QEMU can read.
fn state(bytes: &[u8]) -> Result<OwnedFd> {
    let failed = |source: std::io::Error| Error::Kernel {
        doing: "cannot keep the state of the devices",
        source,
    };
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("stillframe-state", flags);
    let file = file.map_err(|errno| failed(errno.into()))?;
    let mut writer = fs::File::from(file);
    std::io::Write::write_all(&mut writer, bytes).map_err(failed)?;
    Ok(writer.into())
}

/// The same file, read from its beginning by somebody else.
fn reopened(file: &OwnedFd) -> Result<OwnedFd> {
    let number = std::os::fd::AsRawFd::as_raw_fd(&file.as_fd());
    let path = format!("/proc/self/fd/{number}");
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let again = rustix::fs::open(Path::new(&path), flags, Mode::empty());
    again.map_err(Error::file("open", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(clones: u32, name: Option<&str>) -> RestoreOptions {
        RestoreOptions {
            images: PathBuf::from("/nowhere").into(),
            clones,
            name: name.map(str::to_owned),
            way: Way::Eager,
            templates: PathBuf::from("/nowhere"),
            sockets: PathBuf::from("/nowhere"),
            command: Vec::new(),
            environment: Vec::new(),
        }
    }

    #[test]
    fn names_differ_and_leave_no_folder() {
        let named = |clones, name| names(&options(clones, name)).ok();
        let expected = |names: &[&str]| Some(names.iter().map(|&name| name.to_owned()).collect());
        assert_eq!(named(2, None), expected(&["vm-1", "vm-2"]));
        assert_eq!(named(1, Some("one")), expected(&["one"]));
        assert_eq!(named(2, Some("x{n}y")), expected(&["x1y", "x2y"]));
        for (clones, name) in [
            (0, None),
            (2, Some("one")),
            (1, Some("../x")),
            (1, Some("")),
        ] {
            assert_eq!(named(clones, name), None, "{name:?}");
        }
        assert_eq!(named(CLONES_MAX + 1, None), None);
    }

    #[test]
    fn a_listener_is_told_by_its_flags() {
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01  1062 /run/a b";
        assert_eq!(listener(line), Some("/run/a b"));
        assert_eq!(listener(&line.replace("00010000", "00000000")), None);
        assert_eq!(
            listener("Num       RefCount Protocol Flags    Type St Inode Path"),
            None
        );
        assert_eq!(listener("0: 2 0 00010000 1 01 11326235"), None);
    }

    #[test]
    fn who_listens_is_seen_without_a_connection() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a socket");
        let name = path.to_str().expect("text");
        assert!(!is_listened_at(name).expect("told"));
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("it listens");
        assert!(is_listened_at(name).expect("told"));
        drop(listener);
        assert!(!is_listened_at(name).expect("told"));
    }

    #[test]
    fn a_line_that_lacks_something_is_refused() {
        let mut machine = QemuMachine::default();
        let error = |machine: &QemuMachine| {
            let error = line(&options(1, None), machine).expect_err("it lacks something");
            error.to_string()
        };
        assert!(error(&machine).contains("no command line"));
        machine.words = vec!["-object".to_owned(), "secret,x".to_owned()];
        machine.withheld = vec![1];
        assert!(error(&machine).contains("secret of -object"));
        let with = RestoreOptions {
            command: vec!["qemu".into(), "-m".into()],
            ..options(1, None)
        };
        assert_eq!(line(&with, &machine).expect("it is given").words, ["-m"]);
    }
}
