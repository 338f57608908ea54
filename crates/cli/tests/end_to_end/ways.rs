//! Ways to dump a program beside dump and restore, each followed by a check, which is told what was
//! done.
use std::fs;

use testkit::program::Spawned;
use testkit::stillframe::Stillframe;
use testkit::tree;

/// Dumps it in the ways that let it run on, of which nobody there is to notice anything.
pub(crate) fn left_running(stillframe: &Stillframe, program: &Spawned, check: impl Fn(&str)) {
    for how in ["--leave-running", "--live"] {
        stillframe.clear();
        stillframe.dump(program.pid(), &[how]).must();
        check(how);
    }
}

/// Kills it and brings it back from the image that is there, after which it has run on.
pub(crate) fn killed(stillframe: &Stillframe, program: &Spawned, check: impl Fn(&str)) {
    let pids = program.tree();
    program.kill();
    tree::wait_free(&pids);
    stillframe.restore(&[]).must();
    check("of a live image");
}

/// Brings it back from a dump over a pre-dump.
pub(crate) fn over_pre_dump(stillframe: &Stillframe, program: &Spawned, check: impl Fn(&str)) {
    stillframe.clear();
    stillframe.pre_dump(program.pid(), &[]).must();
    check("after a pre-dump");
    let first = stillframe.images().with_file_name("first");
    fs::rename(stillframe.images(), &first).expect("they are on one file system");
    let over = ["--prev-images-dir", "../first"];
    stillframe.dump(program.pid(), &over).must();
    stillframe.restore(&[]).must();
    check("over a pre-dump");
    fs::remove_dir_all(first).expect("it was made just now");
}
