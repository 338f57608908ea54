//! Trees that have a mount namespace of their own.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use rustix::process::Signal;
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

/// Mounts file systems of each kind, with all kinds of files in a tmpfs, and copies of these: with
/// other attributes, over a file, in groups of peers and with masters. Writes to a file of the
/// tmpfs again and again, and tells of all that: `{folder}/told`. It sees whether a mount spreads
/// as the groups say.
const MOUNTS: &str = r#"
import ctypes, os, select, socket, subprocess, sys, time
folder = sys.argv[1]
if os.getsid(0) != os.getpid():
    os.setsid()
os.chdir("/")
def run(*words):
    subprocess.run(words, check=True)
def at(name):
    path = f"{folder}/{name}"
    os.makedirs(path, exist_ok=True)
    return path
# Those of other tests may be gone before the restore.
for line in open("/proc/self/mountinfo").readlines():
    if line.split()[4].startswith("/tmp/"):
        run("umount", "-l", line.split()[4])
t = at("t")
run("mount", "-t", "tmpfs", "-o", "size=4m,mode=751,nr_inodes=500", "mine", t)
open(f"{t}/a", "w").write("hello")
os.link(f"{t}/a", f"{t}/b")
with open(f"{t}/sparse", "wb") as file:
    file.seek(1 << 20)
    file.write(b"end")
    file.truncate(3 << 20)
os.symlink("../nowhere", f"{t}/l")
os.mkfifo(f"{t}/f", 0o640)
os.mknod(f"{t}/null", 0o20666, os.makedev(1, 3))
os.chmod(f"{t}/null", 0o666)
os.makedirs(f"{t}/d/e")
open(f"{t}/d/owned", "w").write("x" * 5000)
os.setxattr(f"{t}/d/owned", "trusted.mine", b"value")
os.chown(f"{t}/d/owned", 1234, 5678)
os.chmod(f"{t}/d/owned", 0o4755)
os.utime(f"{t}/d/owned", ns=(1_000_000_007, 2_000_000_009))
os.utime(f"{t}/d", ns=(3_000_000_007, 4_000_000_009))
os.chmod(f"{t}/d", 0o1777)
listener = socket.socket(socket.AF_UNIX)
listener.bind(f"{t}/socket")
listener.listen()
run("mount", "--bind", f"{t}/d", at("ro"))
run("mount", "-o", "remount,bind,ro,nosuid,nodev,noexec,noatime,nosymfollow", at("ro"))
open(f"{folder}/covered", "w").write("host")
run("mount", "--bind", f"{t}/a", f"{folder}/covered")
os.mkdir(f"{folder}/host")
open(f"{folder}/host/file", "w").write("of the host")
run("mount", "--bind", f"{folder}/host", at("bound"))
run("mount", "-t", "proc", "-o", "hidepid=2", "proc", at("p"))
run("mount", "-t", "devpts", "-o", "gid=5,mode=620,ptmxmode=666", "pts", at("pts"))
run("mount", "-t", "mqueue", "queues", at("mq"))
run("mount", "-t", "tmpfs", "-o", "ro", "empty", at("empty"))
run("mount", "-t", "tmpfs", "un", at("un"))
run("mount", "--make-unbindable", at("un"))
run("mount", "--make-shared", t)
run("mount", "--bind", t, at("peer"))
run("mount", "--bind", t, at("slave"))
run("mount", "--make-slave", at("slave"))
run("mount", "--bind", at("slave"), at("both"))
run("mount", "--make-shared", at("both"))
run("mount", "--bind", at("both"), at("both2"))
master = os.open(f"{folder}/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
number = ctypes.c_int()
libc = ctypes.CDLL(None, use_errno=True)
libc.ioctl(master, 0x40045431, ctypes.byref(ctypes.c_int(0)))
libc.ioctl(master, 0x80045430, ctypes.byref(number))
slave = os.open(f"{folder}/pts/{number.value}", os.O_RDWR | os.O_NOCTTY)
os.write(slave, b"unread")
log = open(f"{t}/log", "w")
unnamed = open(f"{t}/unnamed", "w+")
unnamed.write("no name")
unnamed.flush()
os.unlink(f"{t}/unnamed")
os.mkdir(f"{t}/x")
def mounts():
    # A list that was read in part before a restore has another order behind that.
    text = None
    while text != (text := open("/proc/self/mountinfo").read()):
        pass
    lines = [line.split() for line in text.splitlines()]
    points = {line[0]: line[4] for line in lines}
    groups = {}
    told = []
    for line in lines:
        end = line.index("-")
        spread = []
        for word in line[6:end]:
            kind, _, group = word.partition(":")
            if kind != "propagate_from":
                spread.append(kind + str(groups.setdefault(group, len(groups))))
        told.append(line[3:6] + [points.get(line[1], "")] + spread + line[end + 1:])
    return sorted(told)
def files():
    told = []
    for path, folders, names in os.walk(t):
        for name in sorted(folders + names):
            one = f"{path}/{name}"
            stat = os.lstat(one)
            told.append([
                one, oct(stat.st_mode), stat.st_uid, stat.st_gid, stat.st_nlink, stat.st_rdev,
                0 if name == "socket" else stat.st_mtime_ns, stat.st_size, stat.st_blocks,
                sorted(os.listxattr(one, follow_symlinks=False)),
                os.readlink(one) if os.path.islink(one) else "",
            ])
    return sorted(one for one in told if one[0] not in (f"{t}/log", f"{t}/x"))
with open(f"{t}/big", "wb") as file:
    file.write(bytes(range(256)) * 1024)
written = 0
while True:
    written += 1
    log.write(f"{written}\n")
    log.flush()
    run("mount", "-t", "tmpfs", "extra", f"{t}/x")
    spread = [line[1][len(folder):] for line in mounts() if line[1].endswith("/x")]
    run("umount", f"{t}/x")
    client = socket.socket(socket.AF_UNIX)
    client.connect(f"{folder}/peer/socket")
    listener.accept()[0].close()
    unnamed.seek(0)
    told = [str(line) for line in mounts() + files()] + [
        str(spread),
        open(f"{folder}/covered").read(),
        open(f"{folder}/bound/file").read(),
        str(open(f"{t}/log").read() == "".join(f"{one}\n" for one in range(1, written + 1))),
        str(open(f"{folder}/slave/big", "rb").read() == bytes(range(256)) * 1024),
        open(f"{t}/sparse", "rb").read().strip(b"\0").decode(),
        unnamed.read(),
        str(select.select([master], [], [], 0)[0] == [master]),
        os.ttyname(slave) + str(os.listdir(f"{folder}/pts")),
    ]
    # The folder is the host's, and its name another one for a tree with a root of its own.
    with open(f"{folder}/told.new", "w") as file:
        file.write("\n".join(told) + "\n")
    try:
        os.rename(f"{folder}/told.new", f"{folder}/told")
    except FileNotFoundError:
        pass
    time.sleep(0.01)
"#;

/// Stillframe, for trees with mounts of their own.
macro_rules! ours {
    () => {{
        needs_root!();
        needs_program!("python3");
        needs_program!("unshare");
        needs_program!("mount");
        let stillframe = stillframe();
        if stillframe.is_peer() {
            testkit::skip!("the peer has other options for this");
        }
        stillframe
    }};
}

/// The program, in namespaces that these options of unshare(1) name, and its folder.
fn mounter(options: &[&str]) -> (Spawned, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("unshare")
        .args(options)
        .args(["python3", "-c", MOUNTS])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("told"));
    (program, folder)
}

/// The program's next report.
#[track_caller]
fn told(folder: &Path) -> String {
    let path = folder.join("told");
    let _ = fs::remove_file(&path);
    wait_for("the program", SOON, || fs::read_to_string(&path).ok())
}

/// The root of the tree: the program, or what it has in a pid namespace of its own.
fn root_of(program: &Spawned, options: &[&str]) -> u32 {
    match options.contains(&"--fork") {
        true => tree::children(program.pid())[0],
        false => program.pid(),
    }
}

#[track_caller]
fn restore(stillframe: &Stillframe, options: &[&str]) -> u32 {
    let restored = stillframe.restore(&[options, &["--json"]].concat()).must();
    let json: serde_json::Value = serde_json::from_str(restored.output.trim()).expect("JSON");
    let root = json["restore"]["root"].as_u64().expect("a number");
    u32::try_from(root).expect("a pid")
}

/// Tells where two reports differ.
#[track_caller]
fn assert_same(before: &str, after: &str) {
    let [before, after] = [before, after].map(|told| told.lines().collect::<Vec<_>>());
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before, after);
    }
    assert_eq!(before.len(), after.len());
}

/// What is mounted on the host below a folder.
fn mounts_of_the_host(folder: &Path) -> Vec<String> {
    let all = fs::read_to_string("/proc/self/mountinfo").expect("the host's");
    let folder = folder.to_str().expect("a plain path");
    let below = all.lines().filter(|line| line.contains(folder));
    below.map(str::to_owned).collect()
}

/// All mount namespaces of processes.
fn namespaces() -> BTreeSet<String> {
    let processes = fs::read_dir("/proc").expect("it is there").flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let links = pids.filter_map(|pid| fs::read_link(format!("/proc/{pid}/ns/mnt")).ok());
    links.map(|link| link.display().to_string()).collect()
}

#[test]
fn mounts_of_a_tree_come_back_with_their_files() {
    let stillframe = ours!();
    for options in [
        &["--mount"][..],
        &["--mount", "--pid", "--fork", "--mount-proc"],
        &[
            "--mount",
            "--net",
            "--ipc",
            "--uts",
            "--pid",
            "--fork",
            "--mount-proc",
        ],
    ] {
        let (program, folder) = mounter(options);
        let (mut root, before) = (root_of(&program, options), told(folder.path()));
        for _ in 0..2 {
            stillframe.clear();
            stillframe.dump(root, &["--live"]).must();
            stillframe.clear();
            stillframe.dump(root, &["--leave-running"]).must();
            assert_same(&before, &told(folder.path()));
            stillframe.clear();
            stillframe.dump(root, &[]).must();
            tree::reap_orphans();
            root = restore(&stillframe, &[]);
            assert_same(&before, &told(folder.path()));
            assert_eq!(mounts_of_the_host(folder.path()), Vec::<String>::new());
        }
        assert!(tree::signal(root, Signal::KILL));
        wait_until("its end", SOON, || {
            tree::reap_orphans();
            !tree::is_alive(root)
        });
    }
}

#[test]
fn rounds_of_a_tree_with_its_own_mounts_follow_each_other() {
    let stillframe = ours!();
    let (program, folder) = mounter(&["--mount"]);
    let (pid, before) = (program.pid(), told(folder.path()));
    let images = |name| folder.path().join("host").join(name);
    let rounds = Stillframe::new(stillframe.binary()).images_at(images("1"));
    rounds.pre_dump(pid, &[]).must();
    let last = Stillframe::new(stillframe.binary()).images_at(images("2"));
    last.dump(pid, &["--prev-images-dir", "../1"]).must();
    tree::reap_orphans();
    assert_eq!(restore(&last, &[]), pid);
    assert_same(&before, &told(folder.path()));
}

/// A tree that has run `script` in a mount namespace of its own, in which `$1` is a folder.
fn after(script: &str) -> (Spawned, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let ready = folder.path().join("ready");
    // Mounts of other tests may be gone before the restore.
    let others = "for m in $(cut -d' ' -f5 /proc/self/mountinfo); do
        case $m in /tmp/*) umount -l $m;; esac; done";
    let ready_made = "echo x >$1/ready.new; mv $1/ready.new $1/ready";
    let script = format!("{others}\n{script}\n{ready_made}\nexec sleep 1000");
    let program = Program::new("unshare")
        .args(["--mount", "sh", "-ec", &script, "sh"])
        .arg(folder.path())
        .spawn();
    program.wait_file(&ready);
    wait_until("the last program", SOON, || {
        let name = fs::read_to_string(format!("/proc/{}/comm", program.pid()));
        name.is_ok_and(|name| name == "sleep\n")
    });
    (program, folder)
}

#[test]
fn mounts_that_cannot_be_made_again_are_refused_by_name() {
    let stillframe = ours!();
    for (script, names) in [
        (
            "echo x >$1/f; echo x >$1/on; mount --bind $1/f $1/on; rm $1/f",
            &["the mount at ", "/on, of a deleted file,"][..],
        ),
        (
            "mkdir $1/t; mount -t tmpfs x $1/t; echo x >$1/t/f; mount -t tmpfs y $1/t",
            &["the mount at ", "/t, which is hidden by others,"],
        ),
        (
            "mkdir $1/t; mount -t tmpfs x $1/t; head -c 70000000 /dev/zero >$1/t/f",
            &["a tmpfs at ", "/t with more than 67108864 bytes"],
        ),
        (
            "mkdir $1/t $1/u $1/w $1/l; mount -t tmpfs x $1/t; mkdir $1/t/u $1/t/w
             mount -t overlay o -o lowerdir=$1/l,upperdir=$1/t/u,workdir=$1/t/w $1/l",
            &["a mount of overlay at ", "/l"],
        ),
    ] {
        let (program, _folder) = after(script);
        stillframe.clear();
        let refused = stillframe.dump(program.pid(), &[]).must_fail().names(names);
        assert_eq!(refused.status.code(), Some(3), "{}", refused.told());
        assert!(tree::is_alive(program.pid()));
    }
}

#[test]
fn external_mount_is_the_one_that_the_restore_names() {
    let stillframe = ours!();
    let script = "mkdir $1/here; mount -t tmpfs x $1/here; exec 5<$1/here; cd $1/here";
    let (program, folder) = after(script);
    let pid = program.pid();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let outside = folder.path().join("outside");
    fs::create_dir(&outside).expect("a folder");
    fs::write(outside.join("file"), "from outside").expect("a file");
    let external = format!("mnt[{}]:data", at("here"));
    stillframe.dump(pid, &["--external", &external]).must();
    tree::reap_orphans();
    let refused = stillframe.restore(&[]).must_fail();
    refused.names(&["the mount at ", "/here is external (data): --external"]);
    for option in ["--external", "--ext-mount-map"] {
        let value = match option {
            "--external" => format!("mnt[data]:{}", outside.display()),
            _ => format!("data:{}", outside.display()),
        };
        assert_eq!(restore(&stillframe, &[option, &value]), pid);
        for place in ["cwd", "fd/5"] {
            let file = format!("/proc/{pid}/{place}/file");
            assert_eq!(
                fs::read_to_string(file).expect("it is there"),
                "from outside"
            );
        }
        assert!(tree::signal(pid, Signal::KILL));
        wait_until("its end", SOON, || {
            tree::reap_orphans();
            !tree::exists(pid)
        });
    }
}

#[test]
fn failed_restore_leaves_no_mount() {
    let stillframe = ours!();
    let (program, folder) = mounter(&["--mount"]);
    let pid = program.pid();
    let before = told(folder.path());
    stillframe.dump(pid, &[]).must();
    tree::reap_orphans();
    let hidden = folder.path().join("away");
    let there = namespaces();
    // The directory of a mount is not there.
    fs::rename(folder.path().join("ro"), &hidden).expect("it is ours");
    stillframe
        .restore(&[])
        .must_fail()
        .names(&["cannot find ", "/ro, to mount on it"]);
    fs::rename(hidden, folder.path().join("ro")).expect("it is ours");
    let script = crate::refusing_script(&folder.path().join("host"), "pre-resume");
    stillframe
        .restore(&["--action-script", &script])
        .must_fail();
    wait_until("nothing to be left", SOON, || {
        tree::reap_orphans();
        !tree::exists(pid) && stillframe.helpers().is_empty() && namespaces().is_subset(&there)
    });
    assert_eq!(mounts_of_the_host(folder.path()), Vec::<String>::new());
    assert_eq!(restore(&stillframe, &[]), pid);
    assert_same(&before, &told(folder.path()));
}
