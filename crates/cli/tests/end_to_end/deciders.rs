//! Trees that decide on what others do with files: while they are stopped, whoever uses such a file
//! waits for them, and a dump must not.

use std::fs;
use std::path::Path;
use std::process::Command;

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use super::stillframe;

/// A group that is asked before a file is opened, and which opens and maps that file itself.
const LISTEN: &str = "
import ctypes, mmap, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
watched = sys.argv[1]
file = open(watched, 'r+b')
memory = mmap.mmap(file.fileno(), 4096)
CLASS_CONTENT, MARK_ADD, OPEN_PERM, AT_FDCWD, ALLOW = 4, 1, 0x10000, -100, 1
group = libc.fanotify_init(CLASS_CONTENT, os.O_RDONLY)
if libc.fanotify_mark(group, MARK_ADD, ctypes.c_uint64(OPEN_PERM), AT_FDCWD, watched.encode()):
    sys.exit('cannot mark')
while True:
    events = os.read(group, 4096)
    while events:
        size, _, _, _, _, fd, _ = struct.unpack_from('=IBBHQii', events)
        os.write(group, struct.pack('=iI', fd, ALLOW))
        os.close(fd)
        events = events[size:]
";

/// Each way to dump `program` is refused with these words, and leaves it and `file` usable.
fn assert_refused(program: &Spawned, file: &Path, words: &[&str]) {
    let stillframe = stillframe();
    for options in [&[][..], &["-R"], &["--live"]] {
        let outcome = stillframe.dump(program.pid(), options).must_fail();
        if !stillframe.is_peer() {
            let outcome = outcome.names(words);
            assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        }
        assert!(program.is_alive());
        // Who opens it is answered.
        fs::read(file).expect("it can be read");
    }
    stillframe.restore(&[]).must_fail();
}

#[test]
fn who_is_asked_before_files_are_opened_is_not_waited_for() {
    needs_root!();
    needs_program!("python3");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("watched");
    fs::write(&file, [1; 4096]).expect("write");
    let program = Program::new("python3")
        .args(["-c", LISTEN])
        .arg(&file)
        .spawn();
    let mark = |pid: u32| {
        let infos = fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter();
        let infos = infos.flatten().flatten();
        let mut texts = infos.filter_map(|info| fs::read_to_string(info.path()).ok());
        texts.any(|text| text.contains("fanotify ino:"))
    };
    program.wait_ready("its mark", || mark(program.pid()));
    assert_refused(&program, &file, &["anon_inode:[fanotify]", "it is asked"]);
}

/// A tree that serves a file system to itself, and is where that is mounted.
struct Served {
    program: Spawned,
    folder: tempfile::TempDir,
}

impl Served {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (source, there) = (folder.path().join("source"), folder.path().join("there"));
        fs::create_dir(&source).expect("make a folder");
        fs::create_dir(&there).expect("make a folder");
        fs::write(source.join("file"), "contents").expect("write");
        // The user of the file system stands before its server in the tree.
        let script = "bindfs -f -o attr_timeout=0 source there & \
                      until grep -q contents there/file 2>/dev/null; do :; done; \
                      exec 5<there/file; cd there; exec sleep 1000";
        let program = Program::new("sh")
            .args(["-c", script])
            .folder(folder.path())
            .spawn();
        let served = Self { program, folder };
        served.program.wait_ready("its file system", || {
            let place = fs::read_link(format!("/proc/{}/cwd", served.program.pid()));
            place.is_ok_and(|place| place.ends_with("there"))
        });
        served
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // With its server, it is out of use.
        tree::kill(&self.program.tree());
        let there = self.folder.path().join("there");
        let _ = Command::new("umount").arg("-l").arg(there).status();
    }
}

#[test]
fn who_serves_a_file_system_is_not_waited_for() {
    needs_root!();
    needs_program!("bindfs");
    if !Path::new("/dev/fuse").exists() {
        testkit::skip!("no /dev/fuse");
    }
    let served = Served::start();
    let file = served.folder.path().join("there/file");
    let words = ["/dev/fuse", "it serves a file system"];
    assert_refused(&served.program, &file, &words);
    let alive = || served.program.tree().len() == 2;
    wait_until("both to go on", SOON, alive);
}
