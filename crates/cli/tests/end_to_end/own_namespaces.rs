//! Trees with network, ipc and uts namespaces of their own.
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use testkit::chance::Chance;
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{refusing_script, stillframe};

/// Names a host, limits objects, has the loopback up with an address of its own, and talks to its
/// child by TCP, with a socket that listens, one of an abstract name, and System V shared memory
/// beside. After each round it writes what it sees of its namespaces.
const RESIDENT: &str = r#"
import ctypes, os, socket, subprocess, sys, time
folder, kinds = sys.argv[1], sys.argv[2].split()
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
def write(path, text):
    with open(path, "w") as file:
        file.write(text)
read = lambda path: open(path).read().strip()
if "uts" in kinds:
    write("/proc/sys/kernel/hostname", "resident")
    write("/proc/sys/kernel/domainname", "of.nowhere")
if "ipc" in kinds:
    write("/proc/sys/fs/mqueue/msg_max", "40")
    attributes = (ctypes.c_long * 8)(0, 35, 64)
    named = libc.mq_open(b"/resident", os.O_CREAT | os.O_RDWR, 0o600, attributes)
    libc.mq_send(named, b"named", 5, 3)
    os.setegid(65534)
    os.seteuid(65533)
    segment = libc.shmget(0x51f, 8192, 0o1640)
    os.seteuid(0)
    os.setegid(0)
    at = libc.shmat(segment, None, 0)
    ctypes.memmove(at, b"kept", 4)
    gone = libc.semget(0, 1, 0o600 | 0o1000)
    own = libc.semget(0x5e3, 3, 0o640 | 0o1000)
    libc.semctl(gone, 0, 0)
    libc.semctl(own, 0, 16, 5)
    libc.semctl(own, 2, 16, 32767)
    # It is given back when this process ends.
    libc.semop(own, (ctypes.c_short * 3)(0, -2, 0o10000), 1)
    os.seteuid(65534)
    libc.semget(0x5e4, 1, 0o600 | 0o1000)
    queue = libc.msgget(0x3e5, 0o600 | 0o1000)
    os.seteuid(0)
    for kind, text in (4, b"first"), (2, b""), (9, b"third" * 100):
        libc.msgsnd(queue, kind.to_bytes(8, "little") + text, len(text), 0)
    # Limits that what is there is beyond.
    for path, value in (
        ("fs/mqueue/msg_max", "33"), ("kernel/sem", "2\t32000\t100\t128"), ("kernel/shmmax", "4096"),
        ("kernel/msgmax", "600"), ("kernel/msgmnb", "450"), ("kernel/shmmni", "777"),
    ):
        write("/proc/sys/" + path, value)
address = "127.0.0.1"
if "net" in kinds:
    for words in (
        "link set lo up", "addr del 127.0.0.1/8 dev lo", "addr add 127.0.0.2/32 dev lo",
        "addr add 10.9.8.7/24 dev lo", "route add 10.77.0.0/16 dev lo", "link set lo mtu 70000",
    ):
        subprocess.run(["ip"] + words.split(), check=True)
    write("/proc/sys/net/ipv4/ip_forward", "1")
    write("/proc/sys/net/ipv4/ip_local_port_range", "20000\t20999")
    write("/proc/sys/net/ipv6/conf/lo/disable_ipv6", "1")
    address = "10.9.8.7"
listener = socket.create_server((address, 0))
port = listener.getsockname()[1]
if "net" in kinds:
    hidden = socket.socket(socket.AF_UNIX)
    hidden.bind("\0resident")
    hidden.listen()
if os.fork() == 0:
    peer = socket.create_connection((address, port))
    while True:
        number = peer.recv(16)
        if not number:
            sys.exit(0)
        peer.send(b"%d" % (int(number) + 1))
peer, _ = listener.accept()
number, port = 0, 0 if "net" not in kinds else port
while True:
    peer.send(b"%d" % number)
    number = int(peer.recv(16))
    told = [socket.gethostname()]
    for path in (
        "kernel/domainname", "kernel/shmmni", "kernel/shmmax", "kernel/sem", "kernel/msgmax",
        "kernel/msgmnb", "fs/mqueue/msg_max",
    ):
        told.append(read("/proc/sys/" + path))
    for path in "ip_forward", "ip_local_port_range":
        told.append(read("/proc/sys/net/ipv4/" + path))
    told.append(read("/proc/sys/net/ipv6/conf/lo/disable_ipv6"))
    if "net" in kinds:
        for file in "route", "fib_trie", "if_inet6":
            told.append(read("/proc/self/net/" + file))
        told.append(str("@resident" in read("/proc/self/net/unix")))
    if "ipc" in kinds:
        told.append(str(ctypes.string_at(at, 4)))
        rows = read("/proc/sysvipc/shm").split("\n")[1:]
        told.append(str([row.split()[:4] + row.split()[7:11] for row in rows]))
        told.append(str(libc.shmget(0x51f, 8192, 0) == segment))
        told.append(str([libc.semctl(own, one, 12) for one in range(3)]))
        libc.mq_getattr(named, attributes)
        told.append(str(list(attributes)[:4]))
        for name, columns in ("sem", range(8)), ("msg", [0, 1, 2, 3, 4, 7, 8, 9, 10]):
            rows = read("/proc/sysvipc/" + name).split("\n")[1:]
            told.append(str([[row.split()[one] for one in columns] for row in rows]))
        for place in range(3):
            room = ctypes.create_string_buffer(600)
            size = libc.msgrcv(queue, room, 500, ctypes.c_long(place), 0o44000)
            told.append(str(room.raw[:8 + max(size, 0)]))
    with open(f"{folder}/told.new", "w") as file:
        file.write(f"{port}\n" + "\n".join(told) + "\n")
    try:
        os.rename(f"{folder}/told.new", f"{folder}/told")
    except FileNotFoundError:
        pass # Another copy of this tree was faster.
    time.sleep(0.01)
"#;

const CONNECTED: &str = "--tcp-established";

/// The options for namespaces of these kinds.
fn unshare(kinds: &str) -> Vec<String> {
    let kinds = kinds.split_whitespace().map(|kind| format!("--{kind}"));
    kinds.collect()
}

/// The program, in namespaces of these kinds ("net uts"), and its folder.
fn resident(kinds: &str) -> (Spawned, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("unshare")
        .args(unshare(kinds))
        .args(["python3", "-c", RESIDENT])
        .arg(folder.path())
        .arg(kinds)
        .spawn();
    program.wait_file(&folder.path().join("told"));
    (program, folder)
}

/// Stillframe, for trees with namespaces of their own.
macro_rules! ours {
    () => {{
        needs_root!();
        needs_program!("python3");
        needs_program!("unshare");
        needs_program!("ip");
        let stillframe = stillframe();
        if stillframe.is_peer() {
            testkit::skip!("the peer has other options for this");
        }
        stillframe
    }};
}

/// The program's next report.
#[track_caller]
fn told(folder: &Path) -> String {
    let path = folder.join("told");
    let _ = fs::remove_file(&path);
    wait_for("the program", SOON, || fs::read_to_string(&path).ok())
}

/// The namespace of a process.
fn namespace(pid: u32, kind: &str) -> String {
    let link = fs::read_link(format!("/proc/{pid}/ns/{kind}"));
    link.map_or_else(|_| String::new(), |link| link.display().to_string())
}

fn is_own(pid: u32, kind: &str) -> bool {
    namespace(pid, kind) != namespace(std::process::id(), kind)
}

#[track_caller]
fn assert_own(pid: u32, kinds: &str) {
    for kind in ["net", "ipc", "uts", "pid"] {
        let wanted = kinds.split_whitespace().any(|one| one == kind);
        assert_eq!(is_own(pid, kind), wanted, "{kind}");
    }
    let child = tree::children(pid)[0];
    for kind in kinds.split_whitespace() {
        assert_eq!(namespace(child, kind), namespace(pid, kind));
    }
}

/// Restores the tree; the number of its root outside.
#[track_caller]
fn restore(stillframe: &Stillframe, options: &[&str]) -> u32 {
    let options = [&[CONNECTED, "--json"], options].concat();
    let restored = stillframe.restore(&options).must();
    let json: serde_json::Value = serde_json::from_str(restored.output.trim()).expect("JSON");
    let root = json["restore"]["root"].as_u64().expect("a number");
    u32::try_from(root).expect("a pid")
}

#[test]
fn namespaces_of_each_kind_come_back_with_what_they_had() {
    let stillframe = ours!();
    for kinds in ["uts", "ipc", "net", "net ipc uts"] {
        let (program, folder) = resident(kinds);
        let (pid, before) = (program.pid(), told(folder.path()));
        assert_own(pid, kinds);
        for round in 0..3 {
            stillframe.clear();
            stillframe.dump(pid, &[CONNECTED, "--live"]).must();
            stillframe.clear();
            stillframe.dump(pid, &[CONNECTED, "--leave-running"]).must();
            assert_eq!(told(folder.path()), before, "{kinds} {round}");
            stillframe.clear();
            stillframe.dump(pid, &[CONNECTED]).must();
            tree::reap_orphans();
            assert_eq!(restore(&stillframe, &[]), pid);
            assert_own(pid, kinds);
            assert_eq!(told(folder.path()), before, "{kinds} {round}");
        }
    }
}

#[test]
fn rounds_of_a_tree_with_its_own_network_follow_each_other() {
    let stillframe = ours!();
    let (program, folder) = resident("net");
    let (pid, before) = (program.pid(), told(folder.path()));
    let rounds = Stillframe::new(stillframe.binary()).images_at(folder.path().join("1"));
    rounds.pre_dump(pid, &[CONNECTED]).must();
    let last = Stillframe::new(stillframe.binary()).images_at(folder.path().join("2"));
    last.dump(pid, &[CONNECTED, "--prev-images-dir", "../1"])
        .must();
    tree::reap_orphans();
    assert_eq!(restore(&last, &[]), pid);
    assert_own(pid, "net");
    assert_eq!(told(folder.path()), before);
}

#[test]
fn trees_with_the_same_addresses_run_side_by_side() {
    let stillframe = ours!();
    let (program, folder) = resident("net uts");
    let before = told(folder.path());
    stillframe.dump(program.pid(), &[CONNECTED]).must();
    tree::reap_orphans();
    let roots = [(); 3].map(|()| restore(&stillframe, &["--new-pid-ns"]));
    for root in roots {
        assert_own(root, "net uts pid");
    }
    for root in &roots[1..] {
        assert!(tree::signal(*root, Signal::KILL));
        wait_until("its end", SOON, || !tree::is_alive(*root));
    }
    assert_eq!(told(folder.path()), before);
    tree::signal(roots[0], Signal::KILL);
}

#[test]
fn restorer_that_waits_is_the_parent_of_the_tree() {
    let stillframe = ours!();
    let (program, folder) = resident("net");
    let (pid, before) = (program.pid(), told(folder.path()));
    stillframe.dump(pid, &[CONNECTED]).must();
    tree::reap_orphans();
    let mut restorer = stillframe.command(&["restore", CONNECTED, "-D"]);
    let restorer = restorer.arg(stillframe.images()).spawn();
    let mut restorer = restorer.expect("it runs");
    assert_eq!(told(folder.path()), before);
    assert_eq!(tree::parent(pid), Some(restorer.id()));
    assert!(restorer.try_wait().expect("a child").is_none());
    assert!(tree::signal(pid, Signal::TERM));
    assert!(restorer.wait().expect("a child").success());
}

/// Refused names of a tree that has run `script` in namespaces of its own.
fn refused(stillframe: &Stillframe, kinds: &str, script: &str, names: &[&str]) {
    let ready = tempfile::NamedTempFile::new().expect("a file");
    let script = format!("{script}; echo x >\"$0\"; exec sleep 1000");
    let program = Program::new("unshare")
        .args(unshare(kinds))
        .args(["sh", "-ec", &script])
        .arg(ready.path())
        .spawn();
    let is_ready = || ready.as_file().metadata().is_ok_and(|file| file.len() > 0);
    wait_until("the script", SOON, is_ready);
    stillframe.clear();
    let refused = stillframe.dump(program.pid(), &[]).must_fail().names(names);
    assert_eq!(refused.status.code(), Some(3), "{}", refused.told());
    assert!(tree::is_alive(program.pid()));
}

#[test]
fn what_namespaces_have_besides_is_refused_by_name() {
    let stillframe = ours!();
    needs_program!("ipcmk");
    for (kinds, script, names) in [
        (
            "net",
            "ip link add v0 type veth peer name v1",
            &["network interface v0 (veth)"][..],
        ),
        (
            "net",
            "ip rule add from 10.0.0.0/8 table 7",
            &["a routing rule"],
        ),
        (
            "net",
            "ip route add blackhole 10.1.0.0/16",
            &["a route that leads nowhere"],
        ),
        (
            "ipc",
            "ipcmk -M 4096",
            &["System V shared memory 0, which nobody has attached,"],
        ),
        (
            "ipc",
            "python3 -c 'import ctypes as c; l = c.CDLL(None); q = l.msgget(0, 0o600)\n\
             exit(l.msgsnd(q, b\"1234567\\0\" + b\"x\" * 100, 100, 0))'; \
             echo 99 >/proc/sys/kernel/msgmax",
            &["System V message queue 0, with a message longer than kernel.msgmax is now,"],
        ),
        ("user", "true", &["its own user namespace"]),
    ] {
        refused(&stillframe, kinds, script, names);
    }
    // A child that has another one than its parent.
    let program = Program::new("unshare")
        .args(unshare("net"))
        .args(["sh", "-c", "unshare --net sleep 1000 & exec sleep 1000"])
        .spawn();
    wait_until("the child", SOON, || {
        let children = tree::children(program.pid());
        let mut others = children.iter().map(|pid| namespace(*pid, "net"));
        others.any(|other| !other.is_empty() && other != namespace(program.pid(), "net"))
    });
    stillframe.clear();
    let refused = stillframe.dump(program.pid(), &[]).must_fail();
    refused.names(&["its own net namespace"]);
}

#[test]
fn who_has_joined_from_outside_is_not_killed_with_the_tree() {
    let stillframe = ours!();
    needs_program!("nsenter");
    let maker = Program::new("unshare")
        .args(["--pid", "--fork", "--mount-proc", "setsid", "sleep", "1000"])
        .spawn();
    let root = wait_for("process 1", SOON, || {
        tree::children(maker.pid()).first().copied()
    });
    let is_it = || fs::read_to_string(format!("/proc/{root}/comm")).is_ok_and(|it| it == "sleep\n");
    wait_until("the program", SOON, is_it);
    let joined = Program::new("nsenter")
        .args([
            "--pid",
            "--mount",
            "--target",
            &root.to_string(),
            "sleep",
            "1000",
        ])
        .spawn();
    let inside = wait_for("who joins", SOON, || {
        tree::children(joined.pid()).first().copied()
    });
    stillframe.clear();
    let refused = stillframe.dump(root, &[]).must_fail();
    refused.names(&["a process that has joined the tree's pid namespace from outside"]);
    assert!(tree::is_alive(inside) && tree::is_alive(root));
    stillframe.clear();
    stillframe.dump(root, &["--leave-running"]).must();
    assert!(tree::is_alive(inside) && tree::is_alive(root));
}

/// A program as process 1 of a namespace: its maker, and its number outside.
fn first(options: &[&str], program: &[&str]) -> (Spawned, u32) {
    let options = [&["--pid", "--fork"], options].concat();
    let maker = Program::new("unshare").args(options).args(program).spawn();
    let root = wait_for("process 1", SOON, || {
        tree::children(maker.pid()).first().copied()
    });
    let name = Path::new(program[0]).file_name().expect("a program");
    let name = format!("{}\n", name.display());
    let is_it = || fs::read_to_string(format!("/proc/{root}/comm")).is_ok_and(|it| it == name);
    wait_until("the program", SOON, is_it);
    (maker, root)
}

#[test]
fn process_1_has_its_own_proc_again() {
    let stillframe = ours!();
    needs_program!("mount");
    let other = "mount --bind /proc /proc && \
        mount -o remount,bind,nosuid,nodev,noexec /proc && exec setsid sleep 1000";
    let hidden = "mount -o remount,hidepid=2 /proc && exec setsid sleep 1000";
    for (options, script) in [(&["--mount"][..], other), (&["--mount-proc"], hidden)] {
        let maker = Program::new("unshare")
            .args(["--pid", "--fork"])
            .args(options)
            .args(["sh", "-c", script])
            .spawn();
        let root = wait_for("the program", SOON, || {
            let root = tree::children(maker.pid()).first().copied()?;
            let name = fs::read_to_string(format!("/proc/{root}/comm")).ok()?;
            (name == "sleep\n").then_some(root)
        });
        // Without the numbers of mounts and devices.
        let mounts = |root: u32| {
            let text = fs::read_to_string(format!("/proc/{root}/mountinfo")).expect("it lives");
            let lines = text.lines().map(|line| {
                let words = line.split(' ').skip(3);
                words.collect::<Vec<_>>().join(" ")
            });
            let proc = lines.filter(|line| line.contains(" /proc "));
            proc.collect::<BTreeSet<_>>()
        };
        let before = mounts(root);
        stillframe.clear();
        stillframe.dump(root, &[]).must();
        let root = restore(&stillframe, &[]);
        assert_eq!(mounts(root), before);
        assert!(tree::signal(root, Signal::KILL));
    }
}

#[test]
fn job_of_a_shell_is_refused_where_it_has_namespaces() {
    let stillframe = ours!();
    let (_maker, root) = first(&["--mount-proc"], &["sleep", "1000"]);
    for options in [&["--shell-job"][..], &[]] {
        let refused = stillframe.dump(root, options).must_fail();
        refused.names(&[
            "its session 0, led from outside",
            "it has namespaces of its own",
        ]);
        assert!(tree::is_alive(root));
        stillframe.clear();
    }
}

/// Ends its first thread; another one tells of the time that has passed.
const WITHOUT_LEADER: &str = "
import ctypes, os, sys, threading, time
def tell():
    while True:
        with open(sys.argv[1] + '/told', 'w') as file:
            file.write('told')
        time.sleep(0.01)
threading.Thread(target=tell).start()
ctypes.CDLL(None).syscall(60, 0)
";

#[test]
fn tree_whose_first_thread_has_ended_is_found_in_its_namespaces() {
    let stillframe = ours!();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("unshare")
        .args(["--net", "python3", "-c", WITHOUT_LEADER])
        .arg(folder.path())
        .spawn();
    let pid = program.pid();
    wait_until("its first thread to end", SOON, || {
        tree::state(pid) == Some('Z')
    });
    stillframe.dump(pid, &[]).must();
    tree::reap_orphans();
    restore(&stillframe, &[]);
    told(folder.path());
}

/// Takes a semaphore that is given back when it ends.
const TAKER: &str = "
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
key, undo = int(sys.argv[1]), int(sys.argv[2])
own = libc.semget(key, 1, 0o600 | 0o1000)
if undo:
    libc.semctl(own, 0, 16, 1)
if libc.semop(own, (ctypes.c_short * 3)(0, -1, undo), 1):
    sys.exit(1)
open(sys.argv[3], 'w').write('taken')
time.sleep(1000 if undo else 0)
";

#[test]
fn failing_call_of_process_1_is_told_of() {
    let stillframe = ours!();
    needs_program!("ipcrm");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let taken = folder.path().join("taken");
    let (key, taken) = (
        std::process::id().to_string(),
        taken.to_str().expect("text"),
    );
    let undo = "4096";
    let program = ["setsid", "python3", "-c", TAKER, &key, undo, taken];
    let maker = Program::new("unshare")
        .args(["--pid", "--fork", "--mount-proc"])
        .args(program)
        .spawn();
    maker.wait_file(Path::new(taken));
    stillframe.dump(tree::children(maker.pid())[0], &[]).must();
    // Somebody else takes it for good.
    let other = Program::new("python3").args(["-c", TAKER, &key, "0", taken]);
    let other = other.spawn();
    wait_until("the other", SOON, || !tree::is_alive(other.pid()));
    let failed = stillframe.restore(&[]).must_fail();
    let removed = std::process::Command::new("ipcrm")
        .args(["-S", &key])
        .status();
    assert!(removed.expect("it runs").success());
    failed.names(&["pid 1: semop("]);
    wait_until("nothing to be left", SOON, || {
        stillframe.helpers().is_empty()
    });
}

#[test]
fn undone_restore_of_process_1_waits_for_nobody() {
    let stillframe = ours!();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let script = refusing_script(folder.path(), "post-restore");
    let program = ["setsid", "sh", "-c", "sleep 1000 & sleep 1000"];
    let maker = Program::new("unshare")
        .args(["--pid", "--fork", "--mount-proc"])
        .args(program)
        .spawn();
    let root = wait_for("both", SOON, || {
        let root = tree::children(maker.pid()).first().copied()?;
        (tree::children(root).len() == 2).then_some(root)
    });
    stillframe.dump(root, &[]).must();
    stillframe
        .restore(&["--action-script", &script])
        .must_fail();
    let logs = stillframe.logs();
    assert!(!logs.contains("killed tasks are still there"), "{logs}");
    wait_until("nothing to be left", SOON, || {
        stillframe.helpers().is_empty()
    });
}

/// The namespaces of these kinds that there are.
fn namespaces() -> BTreeSet<String> {
    let processes = fs::read_dir("/proc").expect("it is there").flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let all = pids.flat_map(|pid| ["net", "ipc", "uts"].map(|kind| namespace(pid, kind)));
    all.filter(|link| !link.is_empty()).collect()
}

#[test]
fn failed_restore_leaves_no_namespace() {
    let stillframe = ours!();
    let (program, folder) = resident("net ipc uts");
    let pid = program.pid();
    stillframe.dump(pid, &[CONNECTED]).must();
    tree::reap_orphans();
    let script = refusing_script(folder.path(), "pre-resume");
    let before = namespaces();
    for options in [
        &[CONNECTED, "--shell-job"][..],
        // Without the option, its connections are refused.
        &[],
        &[CONNECTED, "--action-script", &script],
    ] {
        stillframe.restore(options).must_fail();
        let logs = stillframe.logs();
        assert!(!logs.contains("killed tasks are still there"), "{logs}");
        wait_until("nothing to be left", SOON, || {
            tree::reap_orphans();
            !tree::exists(pid) && stillframe.helpers().is_empty() && namespaces().is_subset(&before)
        });
    }
    assert_eq!(restore(&stillframe, &[]), pid);
    told(folder.path());
}

#[test]
fn namespace_with_others_is_refused() {
    let stillframe = ours!();
    needs_program!("nsenter");
    let (program, folder) = resident("net uts");
    let pid = program.pid().to_string();
    let joined = ["--net", "--target", &pid, "sleep", "1000"];
    let joined = Program::new("nsenter").args(joined).spawn();
    wait_until("the other", SOON, || {
        namespace(joined.pid(), "net") == namespace(program.pid(), "net")
    });
    let refused = stillframe.dump(program.pid(), &[CONNECTED]).must_fail();
    let other = format!("process {}, which is not of the tree", joined.pid());
    refused.names(&["its own net namespace", &other]);
    told(folder.path());
    drop(joined);
    stillframe.clear();
    stillframe
        .dump(program.pid(), &[CONNECTED, "--leave-running"])
        .must();
}

/// Goes to a control group of its own, makes a cgroup namespace there, and tells which groups it
/// sees.
const GROUPED: &str = r#"
import ctypes, os, sys, time
folder = sys.argv[1]
lines = [line.split() for line in open("/proc/self/mountinfo")]
kinds = {line[4]: line[line.index("-") + 1] for line in lines}
group = next(at for at in kinds if kinds[at].startswith("cgroup")) + f"/{os.path.basename(folder)}"
os.mkdir(group)
with open(group + "/cgroup.procs", "w") as file:
    file.write("0")
if ctypes.CDLL(None).unshare(0x02000000):
    sys.exit("it has no namespace")
with open(folder + "/group", "w") as file:
    file.write(group)
while True:
    with open(folder + "/told.new", "w") as file:
        file.write(open("/proc/self/cgroup").read())
    os.rename(folder + "/told.new", folder + "/told")
    time.sleep(0.01)
"#;

#[test]
fn view_of_control_groups_comes_back() {
    let stillframe = ours!();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("python3")
        .args(["-c", GROUPED])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("told"));
    let (pid, before) = (program.pid(), told(folder.path()));
    let group = fs::read_to_string(folder.path().join("group")).expect("it is told");
    assert!(is_own(pid, "cgroup"));
    for _ in 0..2 {
        stillframe.clear();
        stillframe.dump(pid, &["--leave-running"]).must();
        stillframe.clear();
        stillframe.dump(pid, &[]).must();
        tree::reap_orphans();
        assert_eq!(restore(&stillframe, &[]), pid);
        assert!(is_own(pid, "cgroup"));
        assert_eq!(told(folder.path()), before);
        let members = fs::read_to_string(format!("{group}/cgroup.procs")).expect("it is there");
        assert_eq!(members.trim(), pid.to_string());
    }
    stillframe.clear();
    stillframe.dump(pid, &[]).must();
    tree::reap_orphans();
    let gone = || fs::remove_dir(&group).is_ok();
    wait_until("nobody to be in the group", SOON, gone);
    let refused = stillframe.restore(&[]).must_fail();
    refused.names(&["is missing, with which a cgroup namespace begins"]);
}

#[test]
fn external_network_is_the_one_that_the_restore_is_handed() {
    let stillframe = ours!();
    needs_program!("nsenter");
    let holder = Program::new("unshare")
        .args(["--net", "sleep", "1000"])
        .spawn();
    wait_until("its network", SOON, || is_own(holder.pid(), "net"));
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("nsenter")
        .args(["--net", "--target", &holder.pid().to_string()])
        .args(["python3", "-c", RESIDENT])
        .arg(folder.path())
        .arg("net")
        .spawn();
    program.wait_file(&folder.path().join("told"));
    let (pid, before) = (program.pid(), told(folder.path()));
    let refused = stillframe.dump(pid, &[CONNECTED]).must_fail();
    refused.names(&["its own net namespace", "which is not of the tree"]);
    stillframe.clear();
    let network = namespace(holder.pid(), "net");
    let inode = network.trim_matches(|one: char| !one.is_ascii_digit());
    let external = format!("net[{inode}]:outside");
    stillframe
        .dump(pid, &[CONNECTED, "--external", &external])
        .must();
    tree::reap_orphans();
    let refused = stillframe.restore(&[CONNECTED]).must_fail();
    refused.names(&["the net namespace is external (outside): --inherit-fd"]);
    let restore = stillframe.restore_command(&[CONNECTED, "--inherit-fd", "fd[9]:outside"]);
    let handed = format!("exec \"$0\" \"$@\" 9</proc/{}/ns/net", holder.pid());
    let status = std::process::Command::new("sh")
        .args(["-c", &handed])
        .arg(restore.get_program())
        .args(restore.get_args())
        .status()
        .expect("a shell");
    assert!(status.success(), "{}", stillframe.logs());
    assert_eq!(told(folder.path()), before);
    assert_eq!(namespace(pid, "net"), network);
    assert!(tree::signal(pid, Signal::KILL));
}

#[test]
fn network_that_is_empty_is_not_refused_for_its_interfaces() {
    let stillframe = ours!();
    let program = Program::new("unshare")
        .args(["--net", "sh", "-ec"])
        .arg("ip link set lo up; ip link add v0 type veth peer name v1; exec sleep 1000")
        .spawn();
    let name = format!("/proc/{}/comm", program.pid());
    wait_until("the last program", SOON, || {
        fs::read_to_string(&name).is_ok_and(|name| name == "sleep\n")
    });
    let pid = program.pid();
    stillframe
        .dump(pid, &[])
        .must_fail()
        .names(&["network interface v0"]);
    stillframe.clear();
    stillframe.dump(pid, &["--empty-ns", "net"]).must();
    tree::reap_orphans();
    let script = crate::action_script(
        stillframe.images(),
        "[ $CRTOOLS_SCRIPT_ACTION != setup-namespaces ] || \
         nsenter --net --target $CRTOOLS_INIT_PID ip link add v2 type veth peer name v3",
    );
    assert_eq!(restore(&stillframe, &["--action-script", &script]), pid);
    let devices = fs::read_to_string(format!("/proc/{pid}/net/dev")).expect("it lives");
    let has = |name: &str| devices.contains(name);
    assert!(has("lo:") && has("v2:") && !has("v0:"), "{devices}");
    assert!(tree::signal(pid, Signal::KILL));
}

#[test]
fn killed_restore_leaves_the_tree_in_its_namespaces_or_nothing() {
    let stillframe = ours!();
    let (program, folder) = resident("net ipc uts");
    let (pid, before) = (program.pid(), told(folder.path()));
    stillframe.dump(pid, &[CONNECTED]).must();
    tree::reap_orphans();
    let name = "killed_restore_leaves_the_tree_in_its_namespaces_or_nothing";
    let mut chance = Chance::of(name);
    let mut restored = 0;
    for _ in 0..20 {
        let command = stillframe.restore_command(&[CONNECTED]);
        stillframe.kill_after(command, Duration::from_micros(chance.below(120_000)));
        wait_until("nothing to be left of the command", SOON, || {
            tree::reap_orphans();
            let helpers = stillframe.helpers();
            let members = tree::members(pid);
            helpers.iter().all(|helper| members.contains(helper))
        });
        let path = folder.path().join("told");
        let _ = fs::remove_file(&path);
        // A tree that is undone may be on its way to its end.
        let text = wait_for("the program, or its end", SOON, || {
            let text = fs::read_to_string(&path).ok();
            (text.is_some() || !tree::is_alive(pid)).then_some(text)
        });
        if let Some(text) = text {
            restored += 1;
            assert_own(pid, "net ipc uts");
            assert_eq!(text, before);
            stillframe.clear();
            stillframe.dump(pid, &[CONNECTED]).must();
            tree::reap_orphans();
        }
    }
    println!("{restored} of 20 were restored");
}
