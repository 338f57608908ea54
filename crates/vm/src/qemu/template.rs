//! Memory of an image that many machines map, each privately, and the process that keeps it.
//!
//! A template is filled once and sealed, so that no machine can change what others map. Its keeper
//! listens in a folder under the image's id: the next restore gets the files from it. It ends when
//! none of the machines is left that it was told of, and nobody has asked for some time.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use image::ImageId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use sys::listener::{Failure, listen_at};
use sys::socket::{self, Along, RIGHTS_MAX};

use crate::{Error, Result};

/// How long a keeper is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a keeper is asked for: the files; to count machines; how it is; to end, and that only if it
/// has no machines. Of its pool: a machine; to take one; how many there are; numbers for new ones.
const GET: u8 = b'g';
const COUNT: u8 = b'c';
const LIST: u8 = b'l';
const DROP: u8 = b'd';
const END_UNUSED: u8 = b'u';
const TAKE: u8 = b't';
const PUT: u8 = b'p';
const POOLED: u8 = b'q';
const NUMBERS: u8 = b'n';

/// The longest message.
const MESSAGE_BYTES: usize = 64 << 10;

/// The longest message to a keeper.
const ABOUT_MAX_BYTES: usize = 16 << 10;

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
        sealed.map_err(|errno| Error::Kernel {
            doing: "cannot seal the memory of machines",
            source: errno.into(),
        })?;
    }
    Ok(())
}

/// A connection to a keeper.
#[derive(Debug)]
pub(crate) struct Keeper(OwnedFd);

impl Keeper {
    /// Connects to the keeper of an image, if there is one.
    pub fn find(folder: &Path, image: ImageId) -> Option<Self> {
        Self::at(&path(folder, &image.to_string()))
    }

    fn at(path: &Path) -> Option<Self> {
        let address = SocketAddrUnix::new(path).ok()?;
        let kind = SocketType::SEQPACKET;
        let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).ok()?;
        connect(&socket, &address).ok()?;
        let peer = sockopt::socket_peercred(&socket).ok()?;
        // What somebody else keeps may be anything.
        (peer.uid == rustix::process::geteuid()).then_some(Self(socket))
    }

    /// The files of the template, if they are what the image needs: names and lengths in `wanted`.
    pub fn files(&self, wanted: &[(String, u64)]) -> Option<Vec<File>> {
        self.send(&[GET], &[]).ok()?;
        let (_, files) = self.receive().ok()?;
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
            if let Err(error) = self.send(&[COUNT], some) {
                log::warn!("the keeper of the template is gone: {error}");
            }
        }
    }

    /// Takes a machine out of the pool.
    pub fn take(&self, key: u64) -> Option<Pooled> {
        self.send(&with(TAKE, key), &[]).ok()?;
        let (bytes, rights) = self.receive().ok()?;
        let about = bytes.get(1..).filter(|about| !about.is_empty())?.to_vec();
        Some(Pooled { key, about, rights })
    }

    /// Puts one into the pool.
    ///
    /// # Errors
    /// Those of the connection.
    pub fn put(&self, pooled: &Pooled) -> io::Result<()> {
        let rights = pooled.rights.iter().map(|right| right.as_fd());
        let what = [&with(PUT, pooled.key)[..], &pooled.about].concat();
        self.send(&what, &rights.collect::<Vec<_>>())?;
        self.receive().map(drop)
    }

    /// How many there are.
    pub fn pooled(&self, key: u64) -> Option<u64> {
        self.ask(&with(POOLED, key))
    }

    /// The first of so many numbers that no other machine gets.
    pub fn numbers(&self, count: u32) -> Option<u32> {
        self.ask(&with(NUMBERS, count.into()))?.try_into().ok()
    }

    /// Has it end, if nobody has machines of it.
    pub fn end_unused(&self) {
        // Where it has ended, there is nothing to be done.
        let _ = self.send(&[END_UNUSED], &[]).and_then(|()| self.receive());
    }

    fn ask(&self, what: &[u8]) -> Option<u64> {
        self.send(what, &[]).ok()?;
        let (bytes, _) = self.receive().ok()?;
        Some(u64::from_ne_bytes(bytes.get(1..9)?.try_into().ok()?))
    }

    /// The connection.
    pub fn line(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn send(&self, what: &[u8], rights: &[BorrowedFd<'_>]) -> io::Result<()> {
        let along = Along {
            rights,
            ..Along::default()
        };
        socket::send(&self.0, what, along, 0).map(drop)
    }

    fn receive(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let patience = Timespec::try_from(PATIENCE).expect("it is short");
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        if rustix::io::retry_on_intr(|| poll(&mut fds, Some(&patience)))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut bytes = vec![0; MESSAGE_BYTES];
        let received = socket::receive(&self.0, &mut bytes, 0)?;
        bytes.truncate(received.len);
        Ok((bytes, received.rights))
    }
}

/// A message with a number.
fn with(what: u8, number: u64) -> Vec<u8> {
    [&[what][..], &number.to_ne_bytes()].concat()
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
        let told = keeper.send(&[LIST], &[]).and_then(|()| keeper.receive());
        let Ok((words, _)) = told else { continue };
        let word = |at: usize| -> Option<u64> {
            Some(u64::from_ne_bytes(words.get(at..at + 8)?.try_into().ok()?))
        };
        let words = [0, 8, 16, 24].map(word);
        if let [Some(bytes), Some(machines), Some(seconds), Some(pooled)] = words {
            all.push(Template {
                image,
                bytes,
                machines,
                age: Duration::from_secs(seconds),
                pooled,
            });
        }
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
    let ended = keeper.send(&[DROP], &[]).and_then(|()| keeper.receive());
    ended.map(|_| true).map_err(|source| Error::Kernel {
        doing: "cannot end the keeper of the template",
        source,
    })
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
    let kernel = |source| Error::Kernel {
        doing: "cannot leave a keeper behind",
        source,
    };
    let machines = copies.collect::<io::Result<Vec<_>>>().map_err(kernel)?;
    let own = files.iter().map(|file| file.2.as_raw_fd());
    let own = own.chain(machines.iter().map(AsRawFd::as_raw_fd));
    let kept = own.chain([listener.as_raw_fd()]).collect::<Vec<_>>();
    let mut keeping = Some(Keeping {
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
    });
    let left = sys::fork::daemonize(&kept, c"stillframe-keep", || {
        if let Some(mut keeping) = keeping.take() {
            keeping.live(files);
        }
    });
    left.map_err(kernel)
}

/// The keeper's life.
struct Keeping {
    path: PathBuf,
    listener: OwnedFd,
    connections: Vec<OwnedFd>,
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
    /// Does what it is asked for, and says so.
    fn answer(
        &mut self,
        (what, number): (u8, u64),
        about: &[u8],
        rights: Vec<OwnedFd>,
        say: &dyn Fn(&[u8], &[BorrowedFd<'_>]) -> bool,
    ) -> bool {
        match what {
            TAKE => {
                let taken = self.take(number);
                let about = taken.as_ref().map_or(&[][..], |taken| &taken.about);
                let rights = taken.iter().flat_map(|taken| &taken.rights);
                let rights = rights.map(AsFd::as_fd).collect::<Vec<_>>();
                say(&[&[TAKE][..], about].concat(), &rights)
            }
            PUT => {
                self.machines.push_back(Pooled {
                    key: number,
                    about: about.to_vec(),
                    rights,
                });
                say(&[PUT], &[])
            }
            POOLED => {
                let own = self.machines.iter().filter(|it| it.key == number);
                say(&with(POOLED, own.count() as u64), &[])
            }
            _ => {
                let first = self.next;
                let count = u32::try_from(number).unwrap_or(u32::MAX);
                self.next = first.saturating_add(count);
                say(&with(NUMBERS, first.into()), &[])
            }
        }
    }

    fn take(&mut self, key: u64) -> Option<Pooled> {
        let at = self.machines.iter().position(|it| it.key == key)?;
        self.machines.remove(at)
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
    fn wait(&self, rest: Duration) -> rustix::io::Result<Vec<bool>> {
        let own = std::iter::once(&self.listener);
        let all = own.chain(&self.connections).chain(&self.machines);
        let mut fds = all
            .map(|fd| PollFd::new(fd, PollFlags::IN))
            .collect::<Vec<_>>();
        let rest = Timespec::try_from(rest).ok();
        match poll(&mut fds, rest.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
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
            && let Ok(connection) = socket::accept(&self.listener)
            && sockopt::socket_peercred(&connection)
                .is_ok_and(|peer| peer.uid == rustix::process::geteuid())
        {
            self.connections.push(connection);
        }
        goes_on
    }

    fn answer(&mut self, connection: &OwnedFd, files: &[File]) -> Answer {
        let mut bytes = [0; ABOUT_MAX_BYTES];
        let Ok(received) = socket::receive(connection, &mut bytes, 0) else {
            return Answer::Left;
        };
        let bytes = &bytes[..received.len.min(ABOUT_MAX_BYTES)];
        let number = bytes.get(1..9).and_then(|it| it.try_into().ok());
        let number = number.map_or(0, u64::from_ne_bytes);
        let say = |bytes: &[u8], rights: &[BorrowedFd<'_>]| {
            let along = Along {
                rights,
                ..Along::default()
            };
            // Nobody who asks and does not listen holds the others up.
            socket::send(connection, bytes, along, DONT_WAIT).is_ok()
        };
        let said = match (bytes.len(), bytes.first().copied().unwrap_or(0)) {
            (_, TAKE | PUT | POOLED | NUMBERS) if bytes.len() >= 9 => {
                self.pool
                    .answer((bytes[0], number), &bytes[9..], received.rights, &say)
            }
            (1, GET) => {
                let files = files.iter().map(|file| file.2.as_fd());
                say(&[GET], &files.collect::<Vec<_>>())
            }
            (1, COUNT) => {
                self.machines.extend(received.rights);
                true
            }
            (1, LIST) => {
                let bytes = |file: &File| {
                    let blocks = rustix::fs::fstat(&file.2).map_or(0, |it| it.st_blocks);
                    blocks.cast_unsigned() * 512
                };
                let bytes = files.iter().map(bytes).sum::<u64>();
                let seconds = self.begun.elapsed().as_secs();
                let pooled = self.pool.machines.len() as u64;
                let words = [bytes, self.machines.len() as u64, seconds, pooled];
                let words = words.iter().flat_map(|word| word.to_ne_bytes());
                say(&words.collect::<Vec<_>>(), &[])
            }
            (1, END_UNUSED) if !self.machines.is_empty() || !self.pool.machines.is_empty() => {
                say(&[END_UNUSED], &[])
            }
            (1, what @ (DROP | END_UNUSED)) => {
                // Before it is told: whoever asks next finds nobody.
                let _ = fs::remove_file(&self.path);
                say(&[what], &[]);
                return Answer::Ends;
            }
            _ => false,
        };
        match said {
            true => Answer::Said,
            false => Answer::Left,
        }
    }
}

/// `MSG_DONTWAIT` (send(2)).
const DONT_WAIT: i32 = 0x40;

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
