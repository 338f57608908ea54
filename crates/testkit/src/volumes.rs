//! File systems for tests: made of a directory or mounted, and all that can be seen of one.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, SeekFrom, XattrFlags, lsetxattr, mknodat, seek};

use crate::wait::{SOON, wait_until};

/// What is seen of a file; contents are a checksum, of a sparse file too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Sort and permissions.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The length in bytes; 0 of directories.
    pub size: u64,
    /// When it was modified, in seconds.
    pub modified_s: i64,
    /// Major and minor number of a device.
    pub device: (u32, u32),
    /// A checksum of the contents.
    pub contents: u64,
    /// Extended attributes by name.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Files by path.
pub type Tree = BTreeMap<Vec<u8>, Facts>;

/// Runs a program, which must succeed.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .expect(program);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (said, complained) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {said}{complained}"
    );
    said
}

/// Makes a directory with one of everything, as far as this user may; `is_old` of what older file
/// systems can have.
pub fn populate(folder: &Path, is_old: bool) {
    let at = |name: &str| folder.join(name);
    let put = |name: &str, bytes: &[u8]| fs::write(at(name), bytes).expect(name);
    put("empty", b"");
    put("tiny", b"fits into its inode");
    put("small", &[7; 130]);
    put("block", &noise(4096, 1));
    put("odd", &noise(100_001, 2));
    fs::hard_link(at("odd"), at("odd too")).expect("a link");
    // So many extents that they take a tree of two levels.
    let file = fs::File::create(at("extents")).expect("a file");
    for number in 0..700_u64 {
        file.write_all_at(&noise(1024, number), number * 8192)
            .expect("written");
    }
    let file = fs::File::create(at("sparse")).expect("a file");
    let len = if is_old { 2_u64 << 30 } else { 20 << 30 };
    file.set_len(len).expect("a length");
    for at in [0, len / 4, len - 5000] {
        file.write_all_at(&noise(5000, at), at).expect("written");
    }
    fs::create_dir(at("names")).expect("a directory");
    for number in 0..300 {
        let name = format!("{number:05}-{}", "n".repeat(249));
        fs::write(at("names").join(name), b"").expect("a file");
    }
    fs::create_dir(at("few")).expect("a directory");
    fs::write(at("few/one"), b"1").expect("a file");
    symlink("tiny", at("short link")).expect("a link");
    symlink("x/".repeat(400), at("long link")).expect("a link");
    mknodat(
        CWD,
        at("pipe"),
        FileType::Fifo,
        Mode::from_raw_mode(0o640),
        0,
    )
    .expect("a pipe");
    if rustix::process::geteuid().is_root() {
        let device = rustix::fs::makedev(259, 0x12345);
        let mode = Mode::from_raw_mode(0o600);
        mknodat(CWD, at("device"), FileType::BlockDevice, mode, device).expect("a device");
        std::os::unix::fs::chown(at("small"), Some(70_000), Some(80_000)).expect("owned");
    }
    let set = |name: &str, attribute: &str, value: &[u8]| {
        // Not every file system that tests run on has them.
        let _ = lsetxattr(at(name), attribute, value, XattrFlags::empty());
    };
    set("block", "user.a", b"short");
    set("block", "user.long", &noise(900, 9));
    set("few", "user.of-directory", b"x");
    fs::File::open(at("odd"))
        .and_then(|file| {
            let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_009);
            file.set_modified(time)
        })
        .expect("a time");
}

/// Bytes that are not zero and not equal anywhere.
pub fn noise(len: usize, seed: u64) -> Vec<u8> {
    let words = (0..).map(|number: u64| {
        (number ^ seed.wrapping_mul(0x9e37_79b9))
            .wrapping_add(1)
            .wrapping_mul(0x2545_f491_4f6c_dd1d)
    });
    words.flat_map(u64::to_le_bytes).take(len).collect()
}

/// Makes a file system of a directory in a file.
pub fn make(file: &Path, size: &str, options: &[&str], from: Option<&Path>) {
    let file = file.to_str().expect("a name");
    let mut arguments = vec!["-q", "-F"];
    arguments.extend(options);
    if let Some(from) = from {
        arguments.extend(["-d", from.to_str().expect("a name")]);
    }
    arguments.extend([file, size]);
    run("mkfs.ext4", &arguments);
}

/// Contents as a checksum: of data and where it is, not of holes.
pub fn sum(pieces: impl Iterator<Item = (u64, Vec<u8>)>) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    for (at, bytes) in pieces {
        for (number, part) in (0..).zip(bytes.chunks(512)) {
            if part.iter().any(|byte| *byte != 0) {
                hash.update(&(at + number * 512).to_le_bytes());
                hash.update(part);
            }
        }
    }
    hash.digest()
}

/// All that the kernel shows of a directory.
pub fn seen_by_kernel(folder: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(inside) = folders.pop() {
        for entry in fs::read_dir(folder.join(&inside)).expect("a directory") {
            let name = inside.join(entry.expect("an entry").file_name());
            if name == Path::new("lost+found") {
                continue;
            }
            let path = folder.join(&name);
            let facts = fs::symlink_metadata(&path).expect("facts");
            if facts.is_dir() {
                folders.push(name.clone());
            }
            let contents = if facts.is_file() {
                sum_of_file(&path)
            } else if facts.is_symlink() {
                let target = fs::read_link(&path).expect("a target");
                sum(std::iter::once((0, target.into_os_string().into_vec())))
            } else {
                0
            };
            let is_device = facts.mode() >> 12 == 6 || facts.mode() >> 12 == 2;
            let device = if is_device {
                let number = facts.rdev();
                (rustix::fs::major(number), rustix::fs::minor(number))
            } else {
                (0, 0)
            };
            tree.insert(
                name.into_os_string().into_vec(),
                Facts {
                    mode: facts.mode(),
                    uid: facts.uid(),
                    gid: facts.gid(),
                    size: if facts.is_dir() { 0 } else { facts.size() },
                    modified_s: facts.mtime(),
                    device,
                    contents,
                    attributes: attributes(&path),
                },
            );
        }
    }
    tree
}

/// Files up to this length are read without a look at where they have holes.
const WHOLE_BYTES: u64 = 16 << 20;

fn sum_of_file(path: &Path) -> u64 {
    let file = fs::File::open(path).expect("a file");
    let len = file.metadata().expect("facts").len();
    if len <= WHOLE_BYTES {
        // Where data and holes are, the kernel does not tell right of what is not written out yet.
        let bytes = fs::read(path).expect("read");
        return sum(std::iter::once((0, bytes)));
    }
    let mut pieces = Vec::new();
    let mut at = 0;
    while let Ok(start) = seek(&file, SeekFrom::Data(at)) {
        at = seek(&file, SeekFrom::Hole(start)).expect("a hole").min(len);
        let mut bytes = vec![0; (at - start) as usize];
        file.read_exact_at(&mut bytes, start).expect("read");
        pieces.push((start, bytes));
    }
    sum(pieces.into_iter())
}

fn attributes(path: &Path) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut names = vec![0; 65_536];
    let len = rustix::fs::llistxattr(path, &mut names[..]).unwrap_or(0);
    let mut all = Vec::new();
    for name in names[..len]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let mut value = vec![0; 70_000];
        let name_os = std::ffi::OsStr::from_bytes(name);
        let len = rustix::fs::lgetxattr(path, name_os, &mut value[..]).expect("a value");
        value.truncate(len);
        all.push((name.to_vec(), value));
    }
    all.sort();
    all
}

/// A file as a loop device, which is detached when this is dropped.
#[derive(Debug)]
pub struct Loop {
    /// Its name in /dev.
    pub device: PathBuf,
    file: PathBuf,
}

impl Loop {
    /// Attaches a file.
    #[must_use]
    pub fn attach(file: &Path) -> Self {
        let name = file.to_str().expect("a name");
        let said = run("losetup", &["--find", "--show", "--direct-io=on", name]);
        let device = PathBuf::from(said.trim());
        let file = file.canonicalize().expect("it is there");
        Self { device, file }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").arg("-d").arg(&self.device).status();
        let is_told = detached.is_ok_and(|status| status.success());
        assert!(is_told || std::thread::panicking());
        // The kernel does it when nobody has the device any more.
        let name = self.device.file_name().expect("a device").to_owned();
        wait_until("a loop device to be detached", SOON, || {
            backing(&name) != Some(self.file.clone()) || std::thread::panicking()
        });
    }
}

/// The file that a block device with a name is made of, if it is a loop device that has one.
fn backing(name: &OsStr) -> Option<PathBuf> {
    let path = Path::new("/sys/block").join(name).join("loop/backing_file");
    let text = fs::read(path).ok()?;
    Some(PathBuf::from(OsStr::from_bytes(text.trim_ascii_end())))
}

/// The files that loop devices are made of, as the kernel calls them.
pub fn attached() -> impl Iterator<Item = PathBuf> {
    let devices = fs::read_dir("/sys/block").expect("it is there").flatten();
    devices.filter_map(|device| backing(&device.file_name()))
}

/// A mounted file system, which is unmounted when this is dropped.
#[derive(Debug)]
pub struct Mount {
    /// Where.
    pub point: PathBuf,
    /// The file that it was mounted from.
    file: Option<PathBuf>,
}

impl Mount {
    /// Mounts a device or a file on a directory, which is made if need be; none where this kernel
    /// does not.
    #[must_use]
    pub fn new(what: &Path, point: &Path, options: &str) -> Option<Self> {
        fs::create_dir_all(point).expect("a directory");
        let mut mount = Command::new("mount");
        let mounted = mount.args(["-o", options]).arg(what).arg(point).output();
        mounted.expect("mount").status.success().then(|| Self {
            point: point.to_owned(),
            file: what.canonicalize().ok().filter(|what| what.is_file()),
        })
    }

    /// What somebody else has mounted on a directory.
    #[must_use]
    pub const fn found(point: PathBuf) -> Self {
        Self { point, file: None }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        unmount(&self.point);
        // A loop device that was made for it goes when nobody has it any more.
        wait_until("the mounted file to be free", SOON, || {
            let file = self.file.as_ref();
            let is_held = file.is_some_and(|file| attached().any(|one| one == *file));
            !is_held || std::thread::panicking()
        });
    }
}

/// Tells whether something is mounted on a directory.
#[must_use]
pub fn is_mounted(point: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("it is there");
    let point = point.to_str();
    mounts.lines().any(|line| line.split(' ').nth(4) == point)
}

/// Unmounts what is mounted on a directory, if it still is.
#[track_caller]
pub fn unmount(point: &Path) {
    // A program that another test is just starting has its files for a moment.
    let unmount = || {
        let unmounted = Command::new("umount").arg(point).status();
        let is_done = unmounted.is_ok_and(|status| status.success()) || !is_mounted(point);
        is_done || std::thread::panicking()
    };
    wait_until("a file system to be unmounted", SOON, unmount);
}
