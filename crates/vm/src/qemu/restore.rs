//! An image becomes machines that run.

use std::ffi::{CString, OsString};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use guard::{Mount, UndoList};
use image::{ImageId, Reader};
use rustix::fs::{Mode, OFlags};
use store::Images;
use sys::launch::User;

use super::line::{CommandLine, line};
use super::own_disks::{MachineDisks, OwnDisks};
use super::ram::{self, Memory};
use super::record::{MachineState, QemuMachine};
use super::start::{self, Plan, QemuProcess};
use super::template::{self, Keeper};
use super::{command, disk_words, lazy, pool, user};
use crate::{Error, Result};

/// The most machines that are started at once.
pub const CLONES_MAX: u32 = 1000;

/// Which machines are to be started, and how.
#[derive(Clone, Debug)]
pub struct RestoreOptions {
    /// Place of the image.
    pub images: Images,
    /// How many.
    pub clones: u32,
    /// Pattern of their names: `{n}` is the number of each, from 1 on.
    pub name: Option<String>,
    /// How they get their memory.
    pub way: RestoreMode,
    /// Directory of the sockets of templates' keepers.
    pub templates: PathBuf,
    /// Directory of their sockets and logs: NAME.qmp and NAME.log.
    pub sockets: PathBuf,
    /// Directory of the machines' own disks, if the image has disks and they get those.
    pub disks: Option<PathBuf>,
    /// The program and its arguments; the recorded ones where there are none. `{n}` and `{name}`
    /// are each machine's number and name.
    pub command: Vec<OsString>,
    /// The environment that they have.
    pub environment: Vec<(OsString, OsString)>,
    /// The volume that is unmounted if no machine runs in the end.
    pub volume: Option<Mount>,
    /// How many more wait for the next restore.
    pub pool: u32,
    /// How long QEMU may take to answer.
    pub patience: Duration,
}

/// When somebody is told of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Its guest is about to run.
    PreResume,
    /// It runs.
    PostResume,
}

/// Observer of a restore of machines.
pub trait Observer: Sync {
    /// The bytes of memory done and to be done.
    fn progress(&self, done_bytes: u64, total_bytes: u64);

    /// Observes a moment of a machine.
    ///
    /// # Errors
    /// Why a machine must not run; then none does.
    fn moment(&self, moment: Moment, machine: &RestoredMachine) -> std::result::Result<(), String>;
}

/// How machines get their memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoreMode {
    /// Each has a copy, which is whole before it runs.
    Eager,
    /// Each has a copy, which comes while it runs.
    Lazy,
    /// All map one template, and have to themselves what they write. It stays for so long after the
    /// last of them has ended.
    Share(Duration),
}

/// A machine that runs.
#[derive(Clone, Debug)]
pub struct RestoredMachine {
    /// The number among its like, from 1 on.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// QEMU's process.
    pub pid: i32,
    /// Socket of its monitor.
    pub socket: PathBuf,
    /// The file with QEMU's output.
    pub log: PathBuf,
    /// The files that it writes to as its disks, which were made for it.
    pub disks: Vec<PathBuf>,
}

/// Starts machines and returns when all of them run; then they are the caller's.
///
/// The calling process must have one thread.
///
/// # Errors
/// [`Error::Unfit`] where the machine cannot be had again. No machine is left of this call then,
/// nor is one if this process is killed meanwhile.
pub fn restore(options: &RestoreOptions, observer: &dyn Observer) -> Result<Vec<RestoredMachine>> {
    check(options)?;
    let store = options.images.open().map_err(image::Error::Place)?;
    let reader = Arc::new(Reader::open(&*store)?);
    if let Some(by) = reader.freed_by() {
        let id = reader.id();
        return Err(image::Error::Freed { id, by }.into());
    }
    let MachineState { machine, state } = MachineState::of(&reader)?;
    let many = options.clones + options.pool > 1;
    let line = line(&options.command, &machine, many)?;
    let environment = start::environment(&options.environment)?;
    let user = user::of_restored(&machine, options.command.is_empty())?;
    let disks = own_disks(options, &reader, &machine, user.as_ref(), observer)?;
    let undo = undo_list()?;
    if let Some(volume) = &options.volume {
        undo.add_mount(volume).map_err(Error::untold)?;
    }
    let state = self::state(&state)?;
    let memories = Memories::of(options, &reader, &machine)?;
    let batch = Batch {
        line: &line,
        environment: &environment,
        user: user.as_ref(),
        pattern: options.name.as_deref(),
        rename: options.name.is_some() || many,
        sockets: &options.sockets,
        disks: disks.as_ref(),
        is_recorded: options.command.is_empty(),
        private: memories.shared,
        state: &state,
        patience: options.patience,
        machine: &machine,
    };
    let (mut machines, others) = memories.pooled(options, &batch);
    let fresh = options.clones - machines.len() as u32;
    let first = memories.numbers(options, fresh);
    let progress = |done, total| observer.progress(done, total);
    machines.extend(thread::scope(|scope| {
        // QEMU starts meanwhile, and touches none of it before it is told to load.
        let filled = scope.spawn(|| memories.fill(options.way, &reader, &machine, &progress));
        let mut started = Vec::new();
        for number in 0..fresh {
            let memory = memories.of_machine(number);
            started.push(batch.start(first + number, memory, &undo)?);
        }
        for one in &mut started {
            one.started.greet(&machine)?;
        }
        filled
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        Ok::<_, Error>(started)
    })?);
    memories.leave_servers(options, &reader, &machine, &machines)?;
    set_running(&mut machines, &machine, observer)?;
    memories.keep(options, &reader, &machines);
    dismiss(undo, others)?;
    let restored: Vec<_> = machines.into_iter().map(NumberedMachine::leave).collect();
    log::info!("{} machines run: {restored:?}", restored.len());
    provide(options, &batch, &memories, reader.id())?;
    for one in &restored {
        // It runs, and nothing is undone.
        if let Err(what) = observer.moment(Moment::PostResume, one) {
            log::warn!("{}: {what}", one.name);
        }
    }
    Ok(restored)
}

/// Starts the helper that ends machines if this process dies, from a process that has one thread.
///
/// # Errors
/// [`Error::Kernel`].
pub(crate) fn undo_list() -> Result<UndoList> {
    UndoList::start(&[]).map_err(Error::kernel("cannot post a watchdog"))
}

/// Leaves machines to themselves.
fn dismiss(one: UndoList, others: Vec<UndoList>) -> Result<()> {
    let mut lists = std::iter::once(one).chain(others);
    let dismissed = lists.try_for_each(UndoList::dismiss);
    dismissed.map_err(Error::untold)
}

/// Looks whether machines can be started of an image, as far as that can be told before anything is
/// made for them.
///
/// # Errors
/// As [`restore()`].
pub fn look(options: &RestoreOptions) -> Result<()> {
    check(options)?;
    let store = options.images.open().map_err(image::Error::Place)?;
    let saved = MachineState::of(&Reader::open(&*store)?)?;
    user::of_restored(&saved.machine, options.command.is_empty()).map(drop)
}

/// The disks that machines get: those of the image, where they are to have them.
fn own_disks(
    options: &RestoreOptions,
    reader: &Reader,
    machine: &QemuMachine,
    user: Option<&User>,
    observer: &dyn Observer,
) -> Result<Option<OwnDisks>> {
    let words = options.command.iter().filter_map(|word| word.to_str());
    let names = disk_words::names_disks(&words.map(str::to_owned).collect::<Vec<_>>());
    let progress = |done, total| observer.progress(done, total);
    match &options.disks {
        Some(folder) => OwnDisks::prepare(folder, reader, machine, user, &progress).map(Some),
        None if names || (options.command.is_empty() && machine.has_disks()) => Err(Error::Unfit(
            "say where machines have the image's disks: --disk-dir DIR".to_owned(),
        )),
        None => Ok(None),
    }
}

/// Settings that machines of one call are started with.
pub(crate) struct Batch<'a> {
    pub line: &'a CommandLine,
    environment: &'a [CString],
    /// Their user, where that is not this process's.
    user: Option<&'a User>,
    /// Pattern of their names.
    pub pattern: Option<&'a str>,
    rename: bool,
    pub sockets: &'a Path,
    /// The disks that they get.
    pub disks: Option<&'a OwnDisks>,
    /// True if the command line is the image's.
    is_recorded: bool,
    private: bool,
    /// The state of the devices.
    pub state: &'a OwnedFd,
    /// How long QEMU may take to answer.
    pub patience: Duration,
    pub machine: &'a QemuMachine,
}

/// A machine with its number.
#[derive(Debug)]
pub(crate) struct NumberedMachine {
    pub number: u32,
    pub name: String,
    pub started: QemuProcess,
}

impl Batch<'_> {
    /// Starts QEMU for the machine with this number, without waiting for it.
    ///
    /// # Errors
    /// Those of [`QemuProcess::new`].
    pub fn start(&self, number: u32, memory: &Memory, undo: &UndoList) -> Result<NumberedMachine> {
        let name = name_of(self.pattern, number);
        let state = reopened(self.state)?;
        let mut words = command::fill_in(&self.line.words, number, &name);
        let mut own = MachineDisks::default();
        if let Some(disks) = self.disks {
            own = disks.make(&name, undo)?;
            let changed = match self.is_recorded {
                true => disk_words::replace(&words, &self.line.folder, &own.given),
                false => disk_words::fill_in(&words, &own.given),
            };
            words = changed.map_err(Error::Unfit)?;
        }
        let plan = Plan {
            program: &self.line.program,
            words,
            environment: self.environment,
            user: self.user,
            folder: &self.line.folder,
            name: &name,
            rename: self.rename,
            sockets: self.sockets,
            memory,
            private: self.private,
            patience: self.patience,
        };
        let started = QemuProcess::new(&plan, own, &state, undo)?;
        Ok(NumberedMachine {
            number,
            name,
            started,
        })
    }
}

impl NumberedMachine {
    fn told(&self) -> RestoredMachine {
        RestoredMachine {
            number: self.number,
            name: self.name.clone(),
            pid: self.started.pid(),
            socket: self.started.socket.clone(),
            log: self.started.log.clone(),
            disks: self.started.disks.made.clone(),
        }
    }

    fn leave(self) -> RestoredMachine {
        let told = self.told();
        self.started.leave();
        told
    }
}

/// Fills the pool, if there is to be one.
fn provide(
    options: &RestoreOptions,
    batch: &Batch<'_>,
    memories: &Memories,
    image: ImageId,
) -> Result<()> {
    if options.pool == 0 {
        return Ok(());
    }
    match refill(options, batch, memories, image) {
        Err(error) if options.clones > 0 => {
            log::warn!("the pool is not filled: {error}");
            Ok(())
        }
        filled => filled,
    }
}

/// Sees to it that the next restore finds machines that wait: at once where there is nothing else
/// to do, or by a process that is left behind.
fn refill(
    options: &RestoreOptions,
    batch: &Batch<'_>,
    memories: &Memories,
    image: ImageId,
) -> Result<()> {
    let keeper = Keeper::find(&options.templates, image);
    let keeper = keeper.ok_or_else(|| Error::Gone("nobody keeps the template".to_owned()))?;
    let memory = &memories.all[0];
    if options.clones > 0 {
        return pool::fill_behind(batch, memory, &keeper, options.pool);
    }
    let filled = pool::fill_whole(batch, memory, &keeper, options.pool);
    if filled.is_err() && memories.keeper.is_none() {
        keeper.end_unused();
    }
    filled
}

/// The memory of all machines.
struct Memories {
    /// One for each machine, or one for all.
    all: Vec<Memory>,
    shared: bool,
    /// Its keeper, if it has one.
    keeper: Option<Keeper>,
}

impl Memories {
    fn of(options: &RestoreOptions, reader: &Reader, machine: &QemuMachine) -> Result<Self> {
        if matches!(options.way, RestoreMode::Eager | RestoreMode::Lazy) {
            let all = (0..options.clones).map(|_| ram::own(reader, machine));
            return Ok(Self {
                all: all.collect::<Result<_>>()?,
                shared: false,
                keeper: None,
            });
        }
        let wanted = machine.blocks.iter();
        let wanted = wanted.map(|block| (block.backend.clone(), ram::bytes_of(reader, block)));
        let wanted = wanted.collect::<Vec<_>>();
        let keeper = Keeper::find(&options.templates, reader.id());
        let kept = keeper.and_then(|keeper| Some((keeper.files(&wanted)?, keeper)));
        let (memory, keeper) = match kept {
            Some((memory, keeper)) => (memory, Some(keeper)),
            None => (ram::template(reader, machine)?, None),
        };
        Ok(Self {
            all: vec![memory],
            shared: true,
            keeper,
        })
    }

    /// That of the machine with this number, from 0 on.
    fn of_machine(&self, number: u32) -> &Memory {
        match self.shared {
            true => &self.all[0],
            false => &self.all[number as usize],
        }
    }

    /// Machines that wait for this, and what ends them.
    fn pooled(
        &self,
        options: &RestoreOptions,
        batch: &Batch<'_>,
    ) -> (Vec<NumberedMachine>, Vec<UndoList>) {
        let keeper = self.keeper.as_ref().filter(|_| options.pool > 0);
        let taken = keeper.map(|keeper| pool::take(keeper, batch, options.clones));
        taken.into_iter().flatten().unzip()
    }

    /// The first of the numbers of so many new machines: each has one of its own among all that
    /// come of a pool.
    fn numbers(&self, options: &RestoreOptions, count: u32) -> u32 {
        let keeper = self.keeper.as_ref().filter(|_| options.pool > 0);
        keeper.and_then(|keeper| keeper.numbers(count)).unwrap_or(1)
    }

    /// Fills what is not filled yet.
    fn fill(
        &self,
        way: RestoreMode,
        reader: &Reader,
        machine: &QemuMachine,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<()> {
        if self.keeper.is_some() || way == RestoreMode::Lazy {
            return Ok(());
        }
        ram::fill(reader, machine, &self.all, progress)?;
        match self.shared {
            true => self.all.iter().try_for_each(|files| template::seal(files)),
            false => Ok(()),
        }
    }

    /// Has the memory of machines that were started brought in while they run, where it is to be.
    fn leave_servers(
        &self,
        options: &RestoreOptions,
        reader: &Arc<Reader>,
        machine: &QemuMachine,
        machines: &[NumberedMachine],
    ) -> Result<()> {
        if options.way != RestoreMode::Lazy {
            return Ok(());
        }
        reader.open_ancestors()?;
        let machines = machines.iter().zip(&self.all);
        let mut machines = machines.map(|(one, memory)| (&one.started, memory));
        machines
            .try_for_each(|(started, memory)| lazy::leave_server(started, memory, machine, reader))
    }

    /// Has a template kept for the next ones.
    fn keep(&self, options: &RestoreOptions, reader: &Reader, machines: &[NumberedMachine]) {
        let processes = machines.iter().map(|one| one.started.process());
        let processes = processes.collect::<Vec<_>>();
        match (options.way, &self.keeper) {
            (RestoreMode::Eager | RestoreMode::Lazy, _) => {}
            (RestoreMode::Share(_), Some(keeper)) => keeper.count(&processes),
            (RestoreMode::Share(time), None) => {
                let (folder, files) = (&options.templates, &self.all[0]);
                let used = (&processes[..], options.clones);
                let kept = template::keep(folder, reader.id(), files, used, time);
                if let Err(error) = kept {
                    log::warn!("the template is not kept: {error}");
                }
            }
        }
    }
}

fn set_running(
    machines: &mut [NumberedMachine],
    machine: &QemuMachine,
    observer: &dyn Observer,
) -> Result<()> {
    for one in &mut *machines {
        one.started.load(machine)?;
    }
    for one in &mut *machines {
        one.started.loaded(machine)?;
    }
    for one in &*machines {
        let allowed = observer.moment(Moment::PreResume, &one.told());
        allowed.map_err(|what| Error::Unfit(format!("{}: {what}", one.name)))?;
    }
    for one in &mut *machines {
        one.started.begin_run()?;
    }
    for one in machines {
        one.started.run(machine)?;
    }
    Ok(())
}

/// Refuses numbers and names that cannot be.
fn check(options: &RestoreOptions) -> Result<()> {
    let unfit = |what: String| Err(Error::Unfit(what));
    let count = options.clones.saturating_add(options.pool);
    if count == 0 || count > CLONES_MAX {
        return unfit(format!("1 to {CLONES_MAX} machines can be started at once"));
    }
    if let Some(name) = &options.name
        && (options.pool > 0 || options.clones > 1)
        && !name.contains("{n}")
    {
        return unfit(format!(
            "{name} would be the name of every machine: add {{n}}"
        ));
    }
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    let name = name_of(options.name.as_deref(), 1);
    if name.is_empty() || !name.chars().all(is_plain) {
        return unfit(format!(
            "{name:?} cannot be a name: letters, digits, '.', '_' and '-' can"
        ));
    }
    Ok(())
}

/// Returns the name of the machine with this number.
fn name_of(pattern: Option<&str>, number: u32) -> String {
    let pattern = pattern.unwrap_or("vm-{n}");
    pattern.replace("{n}", &number.to_string())
}

/// The state of devices in a file that QEMU can read.
fn state(bytes: &[u8]) -> Result<OwnedFd> {
    let doing = "cannot keep the state of the devices";
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("stillframe-state", flags);
    let file = file.map_err(Error::kernel(doing))?;
    let mut writer = fs::File::from(file);
    std::io::Write::write_all(&mut writer, bytes).map_err(Error::kernel(doing))?;
    Ok(writer.into())
}

/// The same file, read from its beginning by somebody else.
pub(crate) fn reopened(file: &impl AsFd) -> Result<OwnedFd> {
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
            way: RestoreMode::Eager,
            templates: PathBuf::from("/nowhere"),
            sockets: PathBuf::from("/nowhere"),
            disks: None,
            command: Vec::new(),
            environment: Vec::new(),
            volume: None,
            pool: 0,
            patience: crate::qemu::PATIENCE,
        }
    }

    #[test]
    fn names_differ_and_leave_no_folder() {
        let named = |clones, name| {
            let options = options(clones, name);
            check(&options).ok()?;
            let names = (1..=clones).map(|number| name_of(name, number));
            Some(names.collect::<Vec<_>>().join(" "))
        };
        assert_eq!(named(2, None).as_deref(), Some("vm-1 vm-2"));
        assert_eq!(named(1, Some("one")).as_deref(), Some("one"));
        assert_eq!(named(2, Some("x{n}y")).as_deref(), Some("x1y x2y"));
        for (clones, name) in [
            (0, None),
            (2, Some("one")),
            (1, Some("../x")),
            (1, Some("")),
        ] {
            assert_eq!(named(clones, name), None, "{name:?}");
        }
        assert_eq!(named(CLONES_MAX + 1, None), None);
        let pool = RestoreOptions {
            pool: 1,
            ..options(0, None)
        };
        check(&pool).expect("machines that wait are some");
    }
}
