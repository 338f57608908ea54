//! Memory of an image that many machines map, each privately, and the process that keeps it.
//!
//! A template is filled once and sealed, so that no machine can change what others map. Its keeper
//! listens in a folder under the image's id: the next restore gets the files from it. It ends when
//! none of the machines is left that it was told of, and nobody has asked for some time.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guard::{Channel, Helper, Packet};
use image::ImageId;
use rustix::fs::SealFlags;
use rustix::net::SocketType;
use sys::listener::{Failure, listen_at};
use sys::socket::RIGHTS_MAX;

use crate::{Error, Result};

/// How long a keeper is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// A message to a keeper, and its answer, which is of the same kind.
#[derive(Clone, PartialEq, prost::Message)]
struct Message {
    #[prost(enumeration = "MessageKind", tag = "1")]
    kind: i32,
    /// What machines of the pool are for, or how many of them there are; numbers of machines.
    #[prost(uint64, tag = "2")]
    number: u64,
    /// A machine of the pool.
    #[prost(bytes = "vec", tag = "3")]
    about: Vec<u8>,
    /// Of a template: how much memory it takes, how many machines map it, for how long it has been
    /// there.
    #[prost(uint64, tag = "4")]
    bytes: u64,
    #[prost(uint64, tag = "5")]
    machines: u64,
    #[prost(uint64, tag = "6")]
    seconds: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
enum MessageKind {
    Unknown = 0,
    /// The files are wanted.
    Files = 1,
    /// Machines, as pidfds, map it; no answer.
    Count = 2,
    /// Its state is wanted.
    List = 3,
    /// It is to end.
    End = 4,
    /// It is to end if it has no machines.
    EndUnused = 5,
    /// A machine of the pool is wanted.
    Take = 6,
    /// A machine is put into the pool.
    Put = 7,
    /// The number of machines in the pool is wanted.
    Pooled = 8,
    /// Numbers for new machines are wanted.
    Numbers = 9,
}

impl Message {
    fn of(kind: MessageKind, number: u64) -> Self {
        Self {
            kind: kind as i32,
            number,
            ..Self::default()
        }
    }
}

/// Seals of a file that nobody can change any more.
const SEALS: SealFlags = SealFlags::WRITE
    .union(SealFlags::GROW)
    .union(SealFlags::SHRINK)
    .union(SealFlags::SEAL);

/// A file with the memory of one backend: its name, its length in bytes.
pub(crate) type File = (String, u64, OwnedFd);

/// A template as its keeper tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// The image.
    pub image: String,
    /// How much memory it takes, in bytes.
    pub bytes: u64,
    /// How many machines map it.
    pub machines: u64,
    /// How long it has been there.
    pub age: Duration,
    /// How many machines wait to be clones of it.
    pub pooled: u64,
}

/// A machine that waits, as a keeper has it.
#[derive(Debug)]
pub(crate) struct Pooled {
    /// What it was started for: only the same may take it.
    pub key: u64,
    /// What has to be known of it.
    pub about: Vec<u8>,
    /// Its process, its monitor, the channel to its undo list.
    pub rights: Vec<OwnedFd>,
}

/// Has nobody change the files of a template any more.
///
/// # Errors
/// [`Error::Kernel`].
pub(crate) fn seal(files: &[File]) -> Result<()> {
    for (.., file) in files {
        let sealed = rustix::fs::fcntl_add_seals(file, SEALS);
        sealed.map_err(Error::kernel("cannot seal the memory of machines"))?;
    }
    Ok(())
}

/// A connection to a keeper.
#[derive(Debug)]
pub(crate) struct Keeper(Channel);

impl Keeper {
    /// Connects to the keeper of an image, if there is one.
    pub fn find(folder: &Path, image: ImageId) -> Option<Self> {
        Self::at(&path(folder, &image.to_string()))
    }

    fn at(path: &Path) -> Option<Self> {
        // Files that another user keeps may hold anything.
        let channel = Channel::connect(path).ok()??;
        channel.set_patience(PATIENCE).ok()?;
        Some(Self(channel))
    }

    /// The files of the template, if they are what the image needs: names and lengths in `wanted`.
    pub fn files(&self, wanted: &[(String, u64)]) -> Option<Vec<File>> {
        let (_, files) = self.ask(MessageKind::Files, 0)?;
        let fits = |(file, (_, bytes)): (&OwnedFd, &(String, u64))| {
            let length = rustix::fs::fstat(file).map(|it| it.st_size.cast_unsigned());
            let seals = rustix::fs::fcntl_get_seals(file);
            length == Ok(*bytes) && seals.is_ok_and(|seals| seals.contains(SEALS))
        };
        let all = files.len() == wanted.len() && files.iter().zip(wanted).all(fits);
        let whole = |(file, (name, bytes)): (OwnedFd, &(String, u64))| (name.clone(), *bytes, file);
        all.then(|| files.into_iter().zip(wanted).map(whole).collect())
    }

    /// Has machines counted.
    pub fn count(&self, machines: &[BorrowedFd<'_>]) {
        for some in machines.chunks(RIGHTS_MAX) {
            if let Err(error) = self.0.send(&Message::of(MessageKind::Count, 0), some) {
                log::warn!("the keeper of the template is gone: {error}");
            }
        }
    }

    /// Takes a machine out of the pool.
    pub fn take(&self, key: u64) -> Option<Pooled> {
        let (Message { about, .. }, rights) = self.ask(MessageKind::Take, key)?;
        (!about.is_empty()).then_some(Pooled { key, about, rights })
    }

    /// Puts one into the pool.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn put(&self, pooled: &Pooled) -> io::Result<()> {
        let rights = pooled.rights.iter().map(AsFd::as_fd);
        let put = Message {
            about: pooled.about.clone(),
            ..Message::of(MessageKind::Put, pooled.key)
        };
        let put = self.0.ask::<Message>(&put, &rights.collect::<Vec<_>>());
        put.map(drop)
    }

    /// How many there are.
    pub fn pooled(&self, key: u64) -> Option<u64> {
        Some(self.ask(MessageKind::Pooled, key)?.0.number)
    }

    /// The first of so many numbers that no other machine gets.
    pub fn numbers(&self, count: u32) -> Option<u32> {
        let (answer, _) = self.ask(MessageKind::Numbers, count.into())?;
        answer.number.try_into().ok()
    }

    /// Has it end, if nobody has machines of it.
    pub fn end_unused(&self) {
        // Where it has ended, there is nothing to be done.
        let _ = self.ask(MessageKind::EndUnused, 0);
    }

    fn ask(&self, kind: MessageKind, number: u64) -> Option<Packet<Message>> {
        self.0.ask(&Message::of(kind, number), &[]).ok()
    }

    /// The connection.
    pub fn line(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn path(folder: &Path, image: &str) -> PathBuf {
    folder.join(format!("{image}.template"))
}

/// Lists the templates of a folder.
///
/// # Errors
/// [`Error::File`].
pub fn templates(folder: &Path) -> Result<Vec<Template>> {
    let mut all = Vec::new();
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(all),
        other => other.map_err(Error::file("read", folder))?,
    };
    for entry in entries {
        let path = entry.map_err(Error::file("read", folder))?.path();
        let Some(image) = image_of(&path) else {
            continue;
        };
        // One that has ended has left its name at most.
        let Some(keeper) = Keeper::at(&path) else {
            continue;
        };
        let Some((state, _)) = keeper.ask(MessageKind::List, 0) else {
            continue;
        };
        all.push(Template {
            image,
            bytes: state.bytes,
            machines: state.machines,
            age: Duration::from_secs(state.seconds),
            pooled: state.number,
        });
    }
    all.sort_by(|one, other| one.image.cmp(&other.image));
    Ok(all)
}

fn image_of(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?.strip_suffix(".template")?;
    Some(name.to_owned())
}

/// Ends the keeper of an image; the machines go on. Tells whether there was one.
///
/// # Errors
/// [`Error::Kernel`] where it does not end.
pub fn drop_template(folder: &Path, image: &str) -> Result<bool> {
    let is_id = |letter: char| letter.is_ascii_hexdigit();
    if image.is_empty() || !image.chars().all(is_id) {
        return Err(Error::Unfit(format!("{image:?} is no image's id")));
    }
    let Some(keeper) = Keeper::at(&path(folder, image)) else {
        return Ok(false);
    };
    let end = Message::of(MessageKind::End, 0);
    let ended = keeper.0.ask::<Message>(&end, &[]).map(|_| true);
    ended.map_err(Error::kernel("cannot end the keeper of the template"))
}

/// Leaves a process behind that keeps a template for the next restores, as long as machines live
/// and for `keep` after somebody last asked. `used`: how many numbers of machines are taken.
/// Another one that keeps it already is left alone.
///
/// # Errors
/// [`Error::File`] for the folder, [`Error::Kernel`].
pub(crate) fn keep(
    folder: &Path,
    image: ImageId,
    files: &[File],
    (machines, used): (&[BorrowedFd<'_>], u32),
    keep: Duration,
) -> Result<()> {
    let made = fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder);
    made.map_err(Error::file("make the folder", folder))?;
    let facts = fs::metadata(folder).map_err(Error::file("look at", folder))?;
    if facts.uid() != rustix::process::geteuid().as_raw() || facts.mode() & 0o022 != 0 {
        let what = format!("others can write to {}", folder.display());
        return Err(Error::Unfit(what));
    }
    let path = path(folder, &image.to_string());
    let listener = match listen_at(&path, SocketType::SEQPACKET, 64) {
        Ok(listener) => listener,
        Err(Failure::Taken) => return Ok(()),
        Err(Failure::Call(doing, errno)) => return Err(Error::file(doing, path)(errno)),
    };
    let copies = machines.iter().map(|machine| machine.try_clone_to_owned());
    let kernel = || Error::kernel("cannot leave a keeper behind");
    let machines = copies.collect::<io::Result<Vec<_>>>().map_err(kernel())?;
    let helper = Helper::new(c"stillframe-keep")
        .keep(files.iter().map(|file| file.2.as_fd()))
        .keep(machines.iter().map(AsFd::as_fd))
        .keep([listener.as_fd()]);
    let mut keeping = Keeping {
        path,
        listener,
        connections: Vec::new(),
        machines,
        begun: Instant::now(),
        asked: Instant::now(),
        keep,
        pool: Pool {
            next: used + 1,
            machines: VecDeque::new(),
        },
    };
    let left = helper.leave_alone(|| keeping.live(files));
    left.map_err(kernel())
}

/// The keeper's life.
struct Keeping {
    path: PathBuf,
    listener: OwnedFd,
    connections: Vec<Channel>,
    /// Processes that map the template.
    machines: Vec<OwnedFd>,
    begun: Instant,
    /// When somebody last asked, or the last machine ended.
    asked: Instant,
    keep: Duration,
    pool: Pool,
}

/// Machines that wait. Their undo lists end them when this is gone.
struct Pool {
    /// The next one's number.
    next: u32,
    machines: VecDeque<Pooled>,
}

impl Pool {
    fn take(&mut self, key: u64) -> Option<Pooled> {
        let at = self.machines.iter().position(|it| it.key == key)?;
        self.machines.remove(at)
    }

    /// Gives the first of so many numbers.
    fn numbers(&mut self, count: u64) -> u32 {
        let first = self.next;
        let count = u32::try_from(count).unwrap_or(u32::MAX);
        self.next = first.saturating_add(count);
        first
    }
}

impl Keeping {
    fn live(&mut self, files: &[File]) {
        loop {
            let rest = match self.machines.is_empty() && self.connections.is_empty() {
                true => self.keep.checked_sub(self.asked.elapsed()),
                false => Some(Duration::MAX),
            };
            let Some(rest) = rest else { break };
            let Ok(ready) = self.wait(rest) else { break };
            if !self.attend(&ready, files) {
                break;
            }
        }
        // Whoever connects from here on is refused, and makes a template of its own.
        let _ = fs::remove_file(&self.path);
    }

    /// Which of the listener, the connections and the machines have something to say.
    fn wait(&self, rest: Duration) -> io::Result<Vec<bool>> {
        let own = [self.listener.as_fd()].into_iter();
        let connections = self.connections.iter().map(AsFd::as_fd);
        let machines = self.machines.iter().map(AsFd::as_fd);
        let all = own.chain(connections).chain(machines).collect::<Vec<_>>();
        guard::wait_all(&all, Instant::now().checked_add(rest))
    }

    /// Takes what they say; tells whether it goes on.
    fn attend(&mut self, ready: &[bool], files: &[File]) -> bool {
        let (connections, machines) = ready[1..].split_at(self.connections.len());
        let before = self.machines.len();
        let mut at = machines.iter();
        self.machines
            .retain(|_| !at.next().copied().unwrap_or(false));
        if self.machines.len() < before {
            self.asked = Instant::now();
        }
        let mut left = Vec::new();
        let mut goes_on = true;
        for (connection, ready) in std::mem::take(&mut self.connections)
            .into_iter()
            .zip(connections)
        {
            match ready.then(|| self.answer(&connection, files)) {
                None | Some(Answer::Said) => left.push(connection),
                Some(Answer::Left) => self.asked = Instant::now(),
                Some(Answer::Ends) => goes_on = false,
            }
        }
        self.connections = left;
        if ready[0]
            && let Ok(connection) = Channel::accept(&self.listener)
            // A client that does not receive its answer holds no other one up.
            && connection.set_nonblocking().is_ok()
        {
            self.connections.push(connection);
        }
        goes_on
    }

    fn answer(&mut self, connection: &Channel, files: &[File]) -> Answer {
        let Ok(Some((message, rights))) = connection.receive::<Message>() else {
            return Answer::Left;
        };
        let (kind, key) = (message.kind(), message.number);
        let mut answer = Message::of(kind, 0);
        let mut taken = None;
        let mut with = Vec::new();
        match kind {
            MessageKind::Files => with.extend(files.iter().map(|file| file.2.as_fd())),
            MessageKind::Count => {
                self.machines.extend(rights);
                return Answer::Said;
            }
            MessageKind::List => {
                let blocks = |file: &File| rustix::fs::fstat(&file.2).map_or(0, |it| it.st_blocks);
                answer.bytes = files.iter().map(blocks).sum::<i64>().cast_unsigned() * 512;
                answer.machines = self.machines.len() as u64;
                answer.seconds = self.begun.elapsed().as_secs();
                answer.number = self.pool.machines.len() as u64;
            }
            MessageKind::Take => taken = self.pool.take(key),
            MessageKind::Put => self.pool.machines.push_back(Pooled {
                key,
                about: message.about,
                rights,
            }),
            MessageKind::Pooled => {
                let own = self.pool.machines.iter().filter(|it| it.key == key);
                answer.number = own.count() as u64;
            }
            MessageKind::Numbers => answer.number = self.pool.numbers(key).into(),
            MessageKind::End | MessageKind::EndUnused if self.ends(kind) => {
                // Before it is told: whoever asks next finds nobody.
                let _ = fs::remove_file(&self.path);
                let _ = connection.send(&answer, &[]);
                return Answer::Ends;
            }
            MessageKind::End | MessageKind::EndUnused => {}
            MessageKind::Unknown => return Answer::Left,
        }
        if let Some(taken) = &taken {
            answer.about.clone_from(&taken.about);
            with.extend(taken.rights.iter().map(AsFd::as_fd));
        }
        match connection.send(&answer, &with) {
            Ok(()) => Answer::Said,
            Err(_) => Answer::Left,
        }
    }

    /// True if a message of this kind ends it.
    fn ends(&self, kind: MessageKind) -> bool {
        let is_unused = self.machines.is_empty() && self.pool.machines.is_empty();
        kind == MessageKind::End || is_unused
    }
}

/// What became of a connection.
enum Answer {
    Said,
    Left,
    Ends,
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use testkit::wait::{SOON, wait_until};

    use super::*;

    fn file() -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("template", flags).expect("a memfd");
        rustix::fs::ftruncate(&file, 1 << 20).expect("a length");
        rustix::io::pwrite(&file, &[7; 4096], 0).expect("written");
        ("mem".to_owned(), 1 << 20, file)
    }

    /// A process, and a descriptor of it.
    fn machine() -> (Child, OwnedFd) {
        let mut command = Command::new("sleep");
        let child = command
            .arg("1000")
            .stdin(Stdio::null())
            .spawn()
            .expect("it starts");
        let pid = rustix::process::Pid::from_child(&child);
        let flags = rustix::process::PidfdFlags::empty();
        let process = rustix::process::pidfd_open(pid, flags).expect("it lives");
        (child, process)
    }

    #[test]
    fn a_template_is_kept_as_long_as_machines_live() {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path().join("templates");
        let (image, wanted) = (ImageId([5; 16]), [("mem".to_owned(), 1 << 20)]);
        assert_eq!(templates(&folder).expect("none"), []);
        let files = [file()];
        let [(mut one, first), (mut two, second)] = [machine(), machine()];
        let none = Duration::ZERO;
        // What could be changed by others is not taken.
        keep(&folder, image, &files, (&[first.as_fd()], 1), none).expect("it is kept");
        let keeper = Keeper::find(&folder, image).expect("it listens");
        assert!(keeper.files(&wanted).is_none(), "it was not sealed");
        seal(&files).expect("sealed");
        assert!(
            keeper.files(&[("mem".to_owned(), 5)]).is_none(),
            "it is of another length"
        );
        let got = keeper.files(&wanted).expect("it is there");
        let mut byte = [0];
        rustix::io::pread(&got[0].2, &mut byte, 0).expect("read");
        assert_eq!(byte, [7]);
        rustix::io::pwrite(&got[0].2, &[1], 0).expect_err("it is sealed");
        keeper.count(&[second.as_fd()]);
        drop(keeper);
        let told = templates(&folder).expect("there is one");
        assert_eq!((told[0].machines, told[0].bytes), (2, 4096));
        assert_eq!(told[0].image, image.to_string());
        one.kill().expect("killed");
        one.wait().expect("ended");
        let count = || {
            templates(&folder)
                .expect("told")
                .first()
                .map(|it| it.machines)
        };
        wait_until("one machine less", SOON, || count() == Some(1));
        two.kill().expect("killed");
        two.wait().expect("ended");
        wait_until("the keeper's end", SOON, || count().is_none());
        assert!(!path(&folder, &image.to_string()).exists());
    }

    #[test]
    fn a_template_that_is_dropped_is_gone() {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path();
        let image = ImageId([6; 16]);
        assert!(!drop_template(folder, &image.to_string()).expect("none"));
        drop_template(folder, "../x").expect_err("no id");
        let long = Duration::from_secs(1000);
        keep(folder, image, &[file()], (&[], 0), long).expect("it is kept");
        assert_eq!(templates(folder).expect("told").len(), 1);
        assert!(drop_template(folder, &image.to_string()).expect("ended"));
        assert!(Keeper::find(folder, image).is_none());
        assert!(!drop_template(folder, &image.to_string()).expect("none"));
    }
}
