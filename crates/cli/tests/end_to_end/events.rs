//! Events of inotify and fanotify: those that wait to be read, those that a dump causes itself, and
//! watches of files whose handles cannot be opened.
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, skip, tree};

use crate::stillframe;

/// Watches a folder, and reads no events before it is told to.
const UNREAD: &str = "
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
own = libc.inotify_init1(os.O_NONBLOCK)
CREATED = 0x100
if libc.inotify_add_watch(own, sys.argv[1].encode(), CREATED) != 1:
    sys.exit(1)
def read(*_):
    try:
        told = len(os.read(own, 4096))
    except BlockingIOError:
        told = 0
    with open(sys.argv[2] + '.part', 'w') as file:
        file.write(str(told))
    os.rename(sys.argv[2] + '.part', sys.argv[2])
signal.signal(signal.SIGUSR1, read)
read()
while True:
    signal.pause()
";

/// How many bytes of events it finds.
fn read(program: &Spawned, told: &Path) -> usize {
    std::fs::remove_file(told).expect("it has told");
    tree::signal(program.pid(), Signal::USR1);
    program.wait_file(told);
    let text = std::fs::read_to_string(told).expect("it is there");
    text.parse().expect("a number")
}

#[test]
fn unread_events_are_waited_for_named_or_dropped() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer drops them");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (watched, told) = (folder.path().join("watched"), folder.path().join("told"));
    std::fs::create_dir(&watched).expect("a folder");
    let program = Program::new("python3").args(["-c", UNREAD]);
    let program = program.arg(&watched).arg(&told).spawn();
    program.wait_file(&told);
    let event = |name: &str| drop(std::fs::File::create(watched.join(name)).expect("a file"));
    event("first");
    let refused = stillframe.dump(program.pid(), &["--timeout", "1"]);
    let refused = refused
        .must_fail()
        .names(&["unread events", "--drop-events"]);
    assert_eq!(refused.status.code(), Some(3), "{}", refused.told());
    assert!(
        refused.elapsed >= Duration::from_secs(1),
        "{}",
        refused.told()
    );
    assert!(!refused.told().contains("try again"), "{}", refused.told());
    // Where nobody can read, nobody is waited for.
    tree::signal(program.pid(), Signal::STOP);
    wait_until("it to stop", SOON, || {
        tree::state(program.pid()) == Some('T')
    });
    let refused = stillframe.dump(program.pid(), &["--timeout", "1000"]);
    refused
        .must_fail()
        .names(&["unread events", "--drop-events"]);
    tree::signal(program.pid(), Signal::CONT);
    // They are read while the dump waits.
    let dumped = std::thread::scope(|scope| {
        scope.spawn(|| {
            // It may have begun or not: it is right in either case.
            std::thread::sleep(Duration::from_millis(300));
            assert!(read(&program, &told) > 0);
        });
        stillframe.dump(program.pid(), &["-R", "--timeout", "60"])
    });
    dumped.must();
    // Those that are dropped are the image's: who runs on has them.
    event("second");
    stillframe.clear();
    stillframe
        .dump(program.pid(), &["-R", "--drop-events"])
        .must();
    assert!(read(&program, &told) > 0);
    event("third");
    stillframe.clear();
    let dropped = stillframe.dump(program.pid(), &["--drop-events"]).must();
    assert!(
        dropped.told().contains("unread events"),
        "{}",
        dropped.told()
    );
    stillframe.restore(&[]).must();
    assert_eq!(read(&program, &told), 0);
    event("fourth");
    assert!(read(&program, &told) > 0);
}

/// Is told of all that is opened and closed on the mounts where a folder and the images are, and
/// reads that at once.
const READER: &str = "
import ctypes, os, select, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
NONBLOCK, ADD_MOUNT, ALL = 2, 0x11, ctypes.c_ulonglong(0x3b)
group = libc.fanotify_init(NONBLOCK, os.O_RDONLY)
if libc.fanotify_mark(group, ADD_MOUNT, ALL, -100, sys.argv[1].encode()):
    sys.exit(1)
open(sys.argv[2], 'w').close()
poll = select.poll()
poll.register(group, select.POLLIN)
while True:
    poll.poll()
    try:
        events, at = os.read(group, 65536), 0
    except BlockingIOError:
        continue
    while at < len(events):
        length, _, _, _, _, opened, _ = struct.unpack_from('<IBBHQii', events, at)
        at += length
        if opened >= 0:
            os.close(opened)
";

/// Runs a script in a mount namespace of its own, with stillframe and a folder as arguments, behind
/// which more follow. Gives what it said if it failed.
fn apart(script: &str, folder: &Path, more: &[&str]) {
    let stillframe = stillframe().command(&[]);
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(stillframe.get_program())
        .arg(folder)
        .args(more)
        .current_dir("/")
        .output()
        .expect("unshare is there");
    let told = String::from_utf8_lossy(&output.stderr);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}: {said}{told}", output.status);
}

#[test]
fn who_is_told_of_what_the_dump_itself_opens_is_dumped() {
    needs_root!();
    needs_program!("python3");
    needs_program!("unshare");
    if stillframe().is_peer() {
        skip!("the peer drops events");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let script = "
        mount -t tmpfs none \"$2\" || exit 99
        python3 -c \"$3\" \"$2\" /dev/shm/\"ready.$$\" </dev/null >/dev/null 2>&1 &
        pid=$!
        until [ -e /dev/shm/ready.$$ ] || ! kill -0 $pid; do sleep 0.05; done
        rm /dev/shm/ready.$$ || exit 98
        for round in 1 2 3; do
            \"$1\" dump --shell-job -R -t $pid -D \"$2/image\" -o log -v4 --timeout 60 || exit 1
            rm -r \"$2/image\"
        done
        \"$1\" dump --shell-job -t $pid -D \"$2/image\" --timeout 60 || exit 2
        wait $pid
        \"$1\" restore --shell-job -d -D \"$2/image\" || exit 3
        kill -9 $pid";
    apart(script, folder.path(), &[READER]);
}

/// Watches many files of an overlay, and tells how often it was told of one.
const WATCHER: &str = "
import ctypes, os, select, sys, time
libc = ctypes.CDLL(None, use_errno=True)
own = libc.inotify_init1(0)
MODIFIED, folder = 2, sys.argv[1]
paths = [f'{folder}/merged/{number % 7}/{number}' for number in range(200, 300)]
for path in paths:
    if libc.inotify_add_watch(own, path.encode(), MODIFIED) < 0:
        sys.exit(1)
count = 0
while True:
    with open(paths[count % 100], 'a') as file:
        file.write('x')
    if not select.select([own], [], [], 60)[0]:
        sys.exit(2)
    os.read(own, 4096)
    count += 1
    with open(f'{folder}/count.part', 'w') as file:
        file.write(str(count))
    os.rename(f'{folder}/count.part', f'{folder}/count')
    time.sleep(0.02)
";

#[test]
fn many_watches_of_an_overlay_survive_without_an_option() {
    needs_root!();
    needs_program!("python3");
    needs_program!("unshare");
    if stillframe().is_peer() {
        skip!("the peer needs to be told where they are");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let script = "
        cd \"$2\" || exit 99
        mount -t tmpfs none . && cd \"$2\" || exit 99
        mkdir lower upper work merged
        for number in $(seq 0 299); do
            mkdir -p lower/$((number % 7)); : >lower/$((number % 7))/$number
        done
        mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged || exit 77
        cd /
        python3 -c \"$3\" \"$2\" </dev/null >/dev/null 2>&1 &
        pid=$!
        told() {
            for moment in $(seq 600); do
                count=$(cat \"$1/count\" 2>/dev/null || echo 0)
                [ \"$count\" -gt \"$2\" ] && return
                sleep 0.05
            done
            exit 97
        }
        told \"$2\" 5
        \"$1\" dump --shell-job -t $pid -D \"$2/image\" || exit 1
        wait $pid
        rm -f \"$2/count\"
        \"$1\" restore --shell-job -d -D \"$2/image\" || exit 2
        told \"$2\" $((count + 150))
        kill -9 $pid";
    apart(script, folder.path(), &[WATCHER]);
}
