//! Rights of a task: a restore gives back those of the dump, no more and no others.
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::Path;

use sys::keys;
use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_kernel_memory, needs_program, needs_root, skip, tree};

use crate::stillframe;

/// The first lines of all programs here: system calls by number (x86-64), and files of one size, as
/// a live dump wants them.
const PRELUDE: &str = r#"
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
folder = sys.argv[1]
def put(name, text):
    fd = os.open(folder + '/' + name, os.O_WRONLY)
    os.pwrite(fd, (text + ' .').ljust(128).encode(), 0)
    os.close(fd)
def get(name):
    fd = os.open(folder + '/' + name, os.O_RDONLY)
    text = os.pread(fd, 128, 0).decode().strip(' .')
    os.close(fd)
    return text
def call(*args):
    result = libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
    return result if result >= 0 else -ctypes.get_errno()
"#;

struct Target {
    program: Spawned,
    folder: tempfile::TempDir,
}

impl Target {
    fn start(code: &str) -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let mode = |path: &Path, mode| {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(path, mode).expect("ours");
        };
        mode(folder.path(), 0o755);
        for name in ["said", "child"] {
            let path = folder.path().join(name);
            fs::write(&path, [b' '; 128]).expect("ours");
            mode(&path, 0o666);
        }
        let program = Program::new("python3")
            .args(["-c", &format!("{PRELUDE}{code}")])
            .arg(folder.path())
            .folder(folder.path())
            .spawn();
        let target = Self { program, folder };
        let says = || target.said().is_some();
        target.program.wait_ready("it to say something", says);
        target
    }

    /// The text that the program has written; `None` before it is complete.
    fn said(&self) -> Option<String> {
        let text = fs::read_to_string(self.folder.path().join("said")).expect("it is there");
        text.trim().strip_suffix(" .").map(str::to_owned)
    }

    /// The next text of the program, after its child, if it has one, has written one as well.
    fn next(&self) -> String {
        // The first text may come from a round that began before; the second one begins after it.
        for _ in 0..2 {
            for name in ["said", "child"] {
                let mut options = fs::OpenOptions::new();
                let file = options.write(true).open(self.folder.path().join(name));
                file.and_then(|file| file.write_all_at(&[b' '; 128], 0))
                    .expect("ours");
            }
            wait_until("it to say something", SOON, || self.said().is_some());
        }
        self.said().expect("nobody takes it back")
    }
}

/// A key is read by who may: the program's own, and one of whoever restores it. The child of a user
/// has the same session keyring.
const KEYS: &str = r#"
USER, SESSION = b'user', -3
def read(name):
    key, text = call(249, USER, name, None, 0), ctypes.create_string_buffer(64)
    return text.value.decode() if key > 0 and call(250, 11, key, text, 64) > 0 else '-'
assert call(250, 1, None) > 0
child = os.fork()
os.setgid(65534), os.setuid(65534)
if child:
    assert call(248, USER, b'stillframe-own', b'own', 3, SESSION) > 0
while True:
    mine = '%s %s' % (read(b'stillframe-own'), read(b'stillframe-restorers'))
    if not child:
        put('child', mine)
    elif get('child'):
        put('said', '%s %s %d' % (mine, get('child'), call(250, 0, SESSION, 0)))
    time.sleep(0.01)
"#;

#[test]
fn a_task_has_its_own_session_keyring_and_not_the_restorers() {
    needs_root!();
    needs_program!("python3");
    if !keys::are_there() {
        skip!("a kernel without keys");
    }
    needs_kernel_memory!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer gives the restorer's away");
    }
    let target = Target::start(KEYS);
    let seen = || target.next();
    wait_until("both to read it", SOON, || {
        seen().starts_with("own - own - ")
    });
    for options in [&[][..], &["--live"]] {
        let before = seen();
        stillframe.clear();
        stillframe.dump(target.program.pid(), options).must();
        target.program.kill();
        wait_until("its end", SOON, || !target.program.is_alive());
        tree::reap_orphans();
        let restore = |serial| {
            let secret = Some(&b"secret"[..]);
            keys::add(c"stillframe-restorers", secret, serial).expect("ours");
            stillframe.restore(&[]).must();
        };
        testkit::calls::in_new_session(restore).expect("a keyring");
        wait_until("both to read it", SOON, || {
            seen().starts_with("own - own - ")
        });
        assert_ne!(seen(), before, "another keyring has another number");
    }
}

#[test]
fn a_task_that_has_the_restorers_session_keyring_keeps_it() {
    needs_root!();
    needs_program!("python3");
    if !keys::are_there() {
        skip!("a kernel without keys");
    }
    needs_kernel_memory!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("it is about what we keep");
    }
    let code = "\nwhile True:\n    put('said', '%d' % call(250, 0, -3, 0))\n    time.sleep(0.01)\n";
    let cycle = |serial: i32| {
        // A key that no image has: the keyring is still there.
        keys::add(c"stillframe-inner", None, serial).expect("ours");
        let target = Target::start(code);
        assert_eq!(target.next(), serial.to_string());
        stillframe.dump(target.program.pid(), &[]).must();
        tree::reap_orphans();
        stillframe.restore(&[]).must();
        assert_eq!(target.next(), serial.to_string());
        stillframe.clear();
        stillframe.dump(target.program.pid(), &[]).must();
        tree::reap_orphans();
        target
    };
    let target = testkit::calls::in_new_session(cycle).expect("a keyring");
    let outcome = stillframe.restore(&[]).must_fail();
    outcome.names(&[
        "its session keyring was that of the dump",
        "key stillframe-inner",
    ]);
    drop(target);
}

/// Tries to leave its domain: by files, ports, or signals.
const SANDBOX: &str = r#"
handled = (ctypes.c_ulonglong * 3)(4, 0, 0)
rules = call(444, handled, 24, 0)
libc.prctl(38, 1, 0, 0, 0)
assert rules >= 0 and call(446, rules, 0) == 0
os.close(rules)
while True:
    try: open('/proc/version').close(); free = True
    except PermissionError: free = False
    put('said', 'free' if free else 'shut in')
    time.sleep(0.01)
"#;

#[test]
fn a_landlock_domain_is_refused_and_goes_on() {
    needs_root!();
    needs_program!("python3");
    if !sys::landlock::is_there() {
        skip!("a kernel without Landlock");
    }
    needs_kernel_memory!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer forgets it");
    }
    let target = Target::start(SANDBOX);
    let pid = target.program.pid().to_string();
    for options in [&[][..], &["--live"], &["--dry-run"]] {
        let outcome = stillframe.dump(target.program.pid(), options).must_fail();
        let outcome = outcome.names(&[&pid, "a Landlock domain"]);
        assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        assert_eq!(target.next(), "shut in");
    }
}

/// Can map no memory that it may read and write.
const WITHOUT_MEMORY: &str = r#"
READ_IMPLIES_EXEC, SET_MDWE = 0x0400000, 65
libc.personality(READ_IMPLIES_EXEC)
assert libc.prctl(SET_MDWE, 1, 0, 0, 0) == 0
while True:
    put('said', 'it runs')
    time.sleep(0.01)
"#;

#[test]
fn a_process_that_can_map_no_memory_is_refused_and_goes_on() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer needs no memory of it");
    }
    let target = Target::start(WITHOUT_MEMORY);
    let pid = target.program.pid().to_string();
    for options in [&[][..], &["--live"], &["--dry-run"]] {
        let outcome = stillframe.dump(target.program.pid(), options).must_fail();
        let outcome = outcome.names(&[&pid, "READ_IMPLIES_EXEC", "PR_SET_MDWE"]);
        assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        assert_eq!(target.next(), "it runs");
    }
}

/// Tries to write to sealed memory, private and shared, its own and its child's.
const SEALED: &str = r#"
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p] + [ctypes.c_long] * 5
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
memory = []
for kind in (2, 1):
    at = libc.mmap(None, 16 * 4096, 3, kind | 0x20, -1, 0)
    ctypes.memset(at, 7, 16 * 4096)
    libc.mprotect(at, 16 * 4096, 1)
    if call(462, at, 16 * 4096, 0): put('said', 'none'); time.sleep(1000)
    memory.append(at)
child = os.fork()
while True:
    sealed = all(libc.mprotect(at, 16 * 4096, 3) != 0 and ctypes.string_at(at + 4096, 1) == b'\7' for at in memory)
    if not child:
        put('child', str(sealed))
    elif get('child'):
        put('said', '%s %s' % (sealed, get('child')))
    time.sleep(0.01)
"#;

#[test]
fn sealed_memory_is_sealed_again() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer forgets it");
    }
    let target = Target::start(SEALED);
    if target.said().is_some_and(|said| said == "none") {
        skip!("a kernel without mseal");
    }
    wait_until("both to try", SOON, || target.next() == "True True");
    for options in [&[][..], &["--live"]] {
        for _ in 0..2 {
            stillframe.clear();
            stillframe.dump(target.program.pid(), options).must();
            target.program.kill();
            wait_until("its end", SOON, || !target.program.is_alive());
            tree::reap_orphans();
            stillframe.restore(&[]).must();
            wait_until("both to try", SOON, || target.next() == "True True");
        }
    }
}

/// Has memory that nobody else can read: mapped, or only open.
const SECRET: &str = r#"
fd = call(447, 0)
if fd < 0: put('said', 'none'); time.sleep(1000)
os.ftruncate(fd, 16384)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p] + [ctypes.c_long] * 5
if WHAT == 'mapped':
    at = libc.mmap(None, 16384, 3, 1, fd, 0)
    os.close(fd)
while True:
    put('said', 'there')
    time.sleep(0.01)
"#;

#[test]
fn secret_memory_is_refused_by_name() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer says something else");
    }
    for (what, place) in [("mapped", "mapping 0x"), ("open", "fd ")] {
        let target = Target::start(&SECRET.replace("WHAT", &format!("'{what}'")));
        if target.said().is_some_and(|said| said == "none") {
            skip!("no memfd_secret here");
        }
        let pid = target.program.pid();
        let told = [&pid.to_string(), place, "secret memory (memfd_secret)"];
        for options in [&[][..], &["--live"], &["--dry-run"]] {
            let outcome = stillframe.dump(pid, options).must_fail().names(&told);
            assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        }
        if what == "mapped" {
            let outcome = stillframe.pre_dump(pid, &[]).must_fail().names(&told);
            assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
        }
        assert_eq!(target.next(), "there");
    }
}

#[test]
fn nobody_else_can_take_the_name_of_a_tracker() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("it has none");
    }
    let program = Program::new("sleep").arg("1000").spawn();
    stillframe.pre_dump(program.pid(), &[]).must();
    let pid = program.pid();
    let names = fs::read_dir("/run/stillframe").expect("it is root's");
    let names = names.map(|entry| entry.expect("an entry").file_name());
    let names = names.filter_map(|name| name.into_string().ok());
    let is_own = |name: &String| name.starts_with("tracker-") && name.contains(&format!("-{pid}-"));
    let own = names.filter(is_own).collect::<Vec<_>>();
    assert_eq!(own.len(), 1, "{own:?}");
    let folder = fs::metadata("/run/stillframe").expect("it is there");
    assert_eq!(folder.permissions().mode() & 0o077, 0);
    let sockets = fs::read_to_string("/proc/net/unix").expect("it is there");
    assert!(!sockets.contains("@stillframe"), "{sockets}");
    // It goes with what it is for.
    program.kill();
    let path = Path::new("/run/stillframe").join(&own[0]);
    wait_until("the tracker's end", SOON, || !path.exists());
}

#[test]
fn an_image_of_another_user_is_not_restored_unasked() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer trusts everybody");
    }
    let program = Program::new("sleep").arg("1000").spawn();
    stillframe.dump(program.pid(), &[]).must();
    tree::reap_orphans();
    let images = stillframe.images();
    let manifest = images.join("manifest.img");
    let refused = |why: &str| {
        let outcome = stillframe.restore(&[]).must_fail();
        let outcome = outcome.names(&["is not trusted", why, "--trust-image"]);
        assert_eq!(outcome.status.code(), Some(6), "{}", outcome.told());
    };
    let mode = |path: &Path, mode| {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(path, mode).expect("ours");
    };
    chown(images, Some(65534), None).expect("root may");
    refused("it is user 65534's");
    chown(images, Some(0), None).expect("root may");
    mode(images, 0o777);
    refused("others may write to it (mode 0777)");
    mode(images, 0o755);
    chown(&manifest, Some(65534), None).expect("root may");
    refused("it is user 65534's");
    let command = stillframe.command(&["show"]).arg(images).output();
    assert!(command.expect("it can be started").status.success());
    stillframe.restore(&["--trust-image"]).must();
    assert!(program.is_alive());
}
