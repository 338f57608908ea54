//! Processes that share descriptor tables, directories, undo lists and I/O contexts: one sees what
//! another does.
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use sys::kcmp::{self, Shared};
use sys::process::Process;
use sys::sem::{self, Set};
use testkit::chance::Chance;
use testkit::program::{Program, Spawned};
use testkit::subject::Subject;
use testkit::volumes::Loop;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{lazy, stillframe};

const SHAPES: [&str; 7] = [
    "child",
    "line",
    "siblings",
    "grandchild",
    "pairs",
    "mixed",
    "io",
];
const CYCLES: usize = 3;

#[test]
fn what_one_opens_and_where_it_goes_is_seen_by_the_other() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("it does not keep what these processes share");
    }
    for shape in SHAPES {
        let subject = Subject::start("sharing", &[shape]);
        assert_eq!(subject.ask("check"), "right", "{shape} at first");
        for cycle in 0..CYCLES {
            stillframe.dump(subject.pid(), &[]).must();
            stillframe.restore(&[]).must();
            assert_eq!(subject.ask("check"), "right", "{shape} {cycle}");
            stillframe.clear();
        }
    }
}

#[test]
fn a_tree_that_shares_goes_on_beside_its_images() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("it does not keep what these processes share");
    }
    for shape in SHAPES {
        for how in ["-R", "--live"] {
            let subject = Subject::start("sharing", &[shape]);
            for cycle in 0..CYCLES {
                stillframe.dump(subject.pid(), &[how]).must();
                assert_eq!(subject.ask("check"), "right", "{shape} {how} {cycle}");
                subject.kill();
                let lazily: &[&str] = if cycle == 1 { &["--lazy-pages"] } else { &[] };
                stillframe.restore(lazily).must();
                assert_eq!(subject.ask("check"), "right", "{shape} {how} {cycle}");
                lazy::wait_all_has_come(&stillframe, &subject.tree());
                stillframe.clear();
            }
        }
    }
}

/// Takes a semaphore for as long as it lives, or its child, with which it shares that.
const HOLDER: &str = r#"
my ($set, $ready) = @ARGV;
my ($clone, $sharing_undo) = (56, 0x40000 | 17);
my $child = syscall($clone, $sharing_undo, 0, 0, 0, 0);
if ($child) {
    semop($set, pack("s!3", 0, -1, 010000)) or die "semop: $!";
    open(my $file, ">", $ready) or die "$ready: $!";
}
sleep(1) while 1;
"#;

#[test]
fn a_semaphore_is_given_back_when_the_last_ends_that_shares_it() {
    needs_root!();
    needs_program!("/usr/bin/perl");
    testkit::needs_kernel_memory!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("it does not keep what these processes share");
    }
    let set = Set::new(1).expect("a set");
    let value = || sem::value(set.number(), 0).expect("ours");
    set.set(0, 1).expect("ours");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let ready = folder.path().join("ready");
    let mut holder = Program::new("/usr/bin/perl")
        .args(["-e", HOLDER, &set.number().to_string()])
        .arg(&ready)
        .folder(folder.path())
        .spawn();
    holder.wait_file(&ready);
    for cycle in 0..CYCLES {
        stillframe.clear();
        stillframe.dump(holder.pid(), &[]).must();
        tree::reap_orphans();
        assert_eq!(value(), 1, "{cycle}: nobody has it");
        stillframe.restore(&[]).must();
        assert_eq!(value(), 0, "{cycle}: it is taken once");
    }
    let child = holder.tree()[1];
    holder.adopt(&[child]);
    assert!(tree::signal(holder.pid(), Signal::KILL));
    tree::wait_gone(&[holder.pid()]);
    assert_eq!(value(), 0, "the child has it still");
    assert!(tree::kill(&[child]));
    assert_eq!(value(), 1);
}

/// Has dump(8) save the file system on device `$1`, and what it says come slowly to the file `$2`;
/// a priority gives its processes the I/O context that they share.
const SLOW_DUMP: &str = r#"
ionice -c 2 -n 4 dump -0 -b 32 -f - "$1" 2> "$2.said" | while :; do
    dd bs=64k count=4 iflag=fullblock status=none >> "$2" || break
    size=$(stat -c %s "$2")
    [ "$size" = "$before" ] && break
    before=$size
    sleep 0.02
done
mv "$2" "$2.done"
sleep 1000
"#;

/// Runs a program in a folder to its end.
#[track_caller]
fn run(folder: &Path, program: &str, words: &[&str]) {
    let output = Command::new(program)
        .args(words)
        .current_dir(folder)
        .output();
    let output = output.expect("it runs");
    assert!(output.status.success(), "{program}: {output:?}");
}

/// Makes `contents` in a folder, and `volume` with an ext4 file system that has the same.
fn make_volume(folder: &Path) {
    let contents = folder.join("contents");
    fs::create_dir(&contents).expect("a folder");
    let mut chance = Chance::with(7);
    for number in 0..24 {
        let words = (0..1 << 17).flat_map(|_| chance.number().to_le_bytes());
        let file = contents.join(format!("file {number}"));
        fs::write(file, words.collect::<Vec<u8>>()).expect("room");
    }
    let volume = File::create(folder.join("volume")).expect("a file");
    volume.set_len(96 << 20).expect("a size");
    run(folder, "mkfs.ext4", &["-q", "-d", "contents", "volume"]);
}

/// The processes of a tree that are dump(8), those who make others first.
fn dumping(program: &Spawned) -> Vec<i32> {
    let comm = |pid: &u32| fs::read_to_string(format!("/proc/{pid}/comm"));
    let all = program.tree().into_iter();
    let dumping = all.filter(|pid| comm(pid).is_ok_and(|comm| comm == "dump\n"));
    dumping.map(u32::cast_signed).collect()
}

#[test]
fn a_dump_of_a_file_system_goes_on_with_one_io_context() {
    needs_root!();
    for program in ["dump", "restore", "mkfs.ext4", "ionice"] {
        needs_program!(program);
    }
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("it does not keep what these processes share");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let folder = folder.path();
    make_volume(folder);
    let device = Loop::attach(&folder.join("volume"));
    let (out, done) = (folder.join("out"), folder.join("out.done"));
    let program = Program::new("/bin/sh")
        .args(["-c", SLOW_DUMP, "sh"])
        .arg(&device.device)
        .arg(&out)
        .spawn();
    let written = || fs::metadata(&out).map_or(0, |file| file.len());
    for cycle in 0..CYCLES {
        let before = written();
        wait_until("more of the dump", SOON, || {
            written() > before && dumping(&program).len() > 3
        });
        stillframe.clear();
        stillframe.dump(program.pid(), &[]).must();
        stillframe.restore(&[]).must();
        // The first one waits for the second, who has made the others.
        let pids = dumping(&program);
        assert!(pids.len() > 3, "{cycle}: {pids:?}");
        for pid in &pids[2..] {
            let [one, other] = [pids[1], *pid].map(Process::new);
            let shares = kcmp::compare(&one, &other, Shared::Io).expect("they live");
            assert!(shares.is_eq(), "{cycle}: {pid} of {pids:?}");
        }
    }
    wait_until("the end of the dump", SOON, || done.exists());
    fs::create_dir(folder.join("restored")).expect("a folder");
    let script = "cd restored && exec restore -rf ../out.done";
    run(folder, "/bin/sh", &["-c", script]);
    let words = "-r -x lost+found -x restoresymtable contents restored";
    run(folder, "diff", &words.split(' ').collect::<Vec<_>>());
}
