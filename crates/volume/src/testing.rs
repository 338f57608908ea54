//! File systems for tests, and all that can be seen of one.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, XattrFlags, lsetxattr, mknodat};

use crate::ext4::{FileSystem, Inode, Kind, ROOT};
use crate::{ReadAt, Result};

/// What is seen of a file; contents are a checksum, of a sparse file too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub size: u64,
    pub modified_s: i64,
    pub device: (u32, u32),
    pub contents: u64,
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

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
fn sum(pieces: impl Iterator<Item = (u64, Vec<u8>)>) -> u64 {
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

fn sum_of_file(path: &Path) -> u64 {
    let file = fs::File::open(path).expect("a file");
    let spans = pages::source::allocated(std::os::fd::AsFd::as_fd(&file)).expect("spans");
    sum(spans.iter().map(|span| {
        let len = file.metadata().expect("facts").len().min(span.end.0) - span.start.0;
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, span.start.0).expect("read");
        (span.start.0, bytes)
    }))
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

/// All that our reader shows of a file system.
pub fn seen_by_us<S: ReadAt>(fs: &FileSystem<S>) -> Result<Tree> {
    let mut tree = Tree::new();
    let mut seen = std::collections::HashSet::from([ROOT]);
    let mut folders = vec![(ROOT, Vec::new())];
    while let Some((folder, path)) = folders.pop() {
        let folder = fs.inode(folder, 0)?;
        let mut entries = Vec::new();
        fs.walk_entries(&folder, &mut |entry| {
            entries.push(entry);
            Ok(())
        })?;
        for entry in entries {
            let mut name: Vec<u8> = path.clone();
            if !name.is_empty() {
                name.push(b'/');
            }
            name.extend(&entry.name);
            if name == b"lost+found" {
                continue;
            }
            let inode = fs.inode(entry.inode, entry.block)?;
            if inode.kind() == Kind::Directory && seen.insert(entry.inode) {
                folders.push((entry.inode, name.clone()));
            }
            tree.insert(name, facts(fs, &inode)?);
        }
    }
    Ok(tree)
}

fn facts<S: ReadAt>(fs: &FileSystem<S>, inode: &Inode) -> Result<Facts> {
    let contents = match inode.kind() {
        Kind::Regular => {
            let mut pieces = Vec::new();
            if inode.is_inline() {
                pieces.push((0, fs.inline_data(inode)?));
            } else {
                fs.walk_blocks(inode, &mut |met| {
                    let crate::ext4::Met::Blocks(mapped) = met else {
                        return Ok(());
                    };
                    let block = u64::from(fs.superblock().block_bytes);
                    for at in 0..if mapped.is_unwritten {
                        0
                    } else {
                        mapped.blocks
                    } {
                        let at_bytes = (mapped.logical + at) * block;
                        let mut bytes = fs.block(mapped.physical + at)?;
                        let len = inode.size_bytes().saturating_sub(at_bytes);
                        bytes.truncate(len.min(block) as usize);
                        pieces.push((at_bytes, bytes));
                    }
                    Ok(())
                })?;
            }
            sum(pieces.into_iter())
        }
        Kind::Link => sum(std::iter::once((0, fs.link_target(inode)?))),
        _ => 0,
    };
    let is_device = matches!(inode.kind(), Kind::Block | Kind::Character);
    let is_folder = inode.kind() == Kind::Directory;
    let all = fs.attributes(inode)?.into_iter();
    let mut attributes = all.map(|one| (one.name, one.value)).collect::<Vec<_>>();
    attributes.sort();
    Ok(Facts {
        mode: inode.mode().into(),
        uid: inode.uid(),
        gid: inode.gid(),
        size: if is_folder { 0 } else { inode.size_bytes() },
        modified_s: inode.modified().s,
        device: if is_device { inode.device() } else { (0, 0) },
        contents,
        attributes,
    })
}
