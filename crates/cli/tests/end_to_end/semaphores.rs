//! System V semaphores that are given back by whoever ends with them (`SEM_UNDO`).
use std::fs;
use std::path::Path;

use rustix::process::Signal;
use sys::sem::{self, Set};
use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

/// Takes a semaphore for as long as it lives, as its child wants to; both say when they have it.
const HOLDER: &str = r#"
my ($set, $report) = @ARGV;
sub take {
    semop($set, pack("s!3", 0, -1, 010000)) or die "semop: $!";
    open(my $file, ">>", $report) or die "$report: $!";
    syswrite($file, shift);
}
my $child = fork();
take("parent\n") if $child;
if (!$child) {
    select(undef, undef, undef, 0.001) until -s $report;
    take("child\n");
}
sleep(1) while 1;
"#;

struct Holder {
    program: Spawned,
    folder: tempfile::TempDir,
}

impl Holder {
    fn start(set: &Set) -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = Program::new("/usr/bin/perl")
            .args(["-e", HOLDER, &set.number().to_string()])
            .arg(Self::report_at(folder.path()))
            .folder(folder.path())
            .spawn();
        let holder = Self { program, folder };
        let child = || match holder.program.tree()[..] {
            [_, child] => fs::read_to_string(format!("/proc/{child}/syscall")).ok(),
            _ => None,
        };
        // semtimedop(2), which the C library calls, or semop(2).
        let waits =
            || child().is_some_and(|call| call.starts_with("220 ") || call.starts_with("65 "));
        holder.program.wait_ready("the child to wait", waits);
        holder
    }

    fn report_at(folder: &Path) -> std::path::PathBuf {
        folder.join("report")
    }

    fn report(&self) -> String {
        fs::read_to_string(Self::report_at(self.folder.path())).unwrap_or_default()
    }
}

#[test]
fn a_semaphore_is_held_again_and_given_back_in_the_end() {
    needs_root!();
    needs_program!("/usr/bin/perl");
    testkit::needs_kernel_memory!();
    let stillframe = stillframe();
    let set = Set::new(1).expect("a set");
    let value = || sem::value(set.number(), 0).expect("ours");
    set.set(0, 1).expect("ours");
    let mut holder = Holder::start(&set);
    for cycle in 0..3 {
        stillframe.clear();
        stillframe.dump(holder.program.pid(), &[]).must();
        tree::reap_orphans();
        assert_eq!(value(), 1, "{cycle}: nobody has it");
        // Who has taken it meanwhile keeps it.
        set.set(0, 0).expect("ours");
        let refused = stillframe.restore(&[]).must_fail();
        refused.names(&["System V semaphores"]);
        set.set(0, 1).expect("ours");
        stillframe.restore(&[]).must();
        assert_eq!((value(), &*holder.report()), (0, "parent\n"), "{cycle}");
    }
    // The parent ends, and its child goes on with the call that waits.
    let child = holder.program.tree()[1];
    holder.program.adopt(&[child]);
    assert!(tree::signal(holder.program.pid(), Signal::KILL));
    let has = || holder.report() == "parent\nchild\n";
    wait_until("the child to have it", SOON, has);
    assert_eq!(value(), 0);
    assert!(tree::kill(&[child]));
    assert_eq!(value(), 1);
}

/// Takes a semaphore that its parent has given, both for as long as they live.
const GIVER: &str = r#"
my ($set, $ready) = @ARGV;
my $child = fork();
semop($set, pack("s!3", 0, $child ? 1 : -1, 010000)) or die "semop: $!";
if (!$child) {
    open(my $file, ">", $ready) or die "$ready: $!";
}
sleep(1) while 1;
"#;

#[test]
fn what_was_given_and_taken_is_refused_by_name() {
    needs_root!();
    needs_program!("/usr/bin/perl");
    testkit::needs_kernel_memory!();
    let stillframe = stillframe();
    let set = Set::new(1).expect("a set");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let ready = folder.path().join("ready");
    let program = Program::new("/usr/bin/perl")
        .args(["-e", GIVER, &set.number().to_string()])
        .arg(&ready)
        .folder(folder.path())
        .spawn();
    program.wait_file(&ready);
    let refused = stillframe.dump(program.pid(), &[]).must_fail();
    refused.names(&["semaphore 0 of set", "SEM_UNDO"]);
    assert!(program.is_alive());
    assert_eq!(sem::value(set.number(), 0).expect("ours"), 0);
}
