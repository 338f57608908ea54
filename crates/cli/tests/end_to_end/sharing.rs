//! Processes that share descriptor tables, directories and undo lists: one sees what another does.
use rustix::process::Signal;
use sys::sem::{self, Set};
use testkit::program::Program;
use testkit::subject::Subject;
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

const SHAPES: [&str; 6] = ["child", "line", "siblings", "grandchild", "pairs", "mixed"];
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
                let lazy: &[&str] = if cycle == 1 { &["--lazy-pages"] } else { &[] };
                stillframe.restore(lazy).must();
                assert_eq!(subject.ask("check"), "right", "{shape} {how} {cycle}");
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
