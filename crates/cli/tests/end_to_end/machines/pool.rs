//! Machines that wait for the next restore, and clones that are made different.

use std::os::unix::fs::PermissionsExt as _;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::*;

/// How many machines wait for an image.
fn waiting(folder: &Path, image: &str) -> Option<u64> {
    template(folder, image).map(|it| it.2)
}

/// An image of a machine that has a generation id, booted in `folder`; its id, and the words of its
/// line.
fn image(folder: &Path) -> (String, Vec<String>) {
    let guid = "vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87";
    let mut line = words(&base().folder.join("archive"));
    line.extend(["-device", guid].map(str::to_owned));
    let guest = Linux::boot(folder, "first", &line, &[]);
    let mut serial = Line::to(&guest.serial);
    assert_eq!(serial.ask("note of the pool"), "noted");
    let told = run(folder, &["vm", "save", "--qmp", "first.qmp", "-D", "image"]);
    let id = told["vm_save"]["image"].as_str().expect("text").to_owned();
    let serial = "unix:{name}.serial,server=on,wait=off";
    line.extend(["-serial", serial].map(str::to_owned));
    (id, line)
}

/// Drops the template of an image at the end.
struct Template<'a>(&'a Path, &'a str);

impl Drop for Template<'_> {
    fn drop(&mut self) {
        let mut command = stillframe(self.0, &["vm", "templates", "--drop", self.1]);
        let _ = command.stdout(Stdio::null()).status();
    }
}

#[test]
fn a_pool_has_machines_wait_and_is_filled_again() {
    // Their keeper listens in /run.
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let (id, line) = image(folder);
    let line = line.iter().map(String::as_str).collect::<Vec<_>>();
    let start = |count: &str, more: &[&str]| {
        let words = ["-D", "image", "-o", "/dev/null", "--name", "pooled-{n}"];
        let count = ["-n", count, "--pool", "2"];
        Machines::restored(folder, &[&words[..], &count, more, &["--"], &line].concat())
    };
    let template = Template(folder, &id);
    assert_eq!(start("0", &["--keep", "1000"]).0.len(), 0);
    assert_eq!(waiting(folder, &id), Some(2));
    let pids = [1, 2].map(|number| pids_of(&format!("pooled-{number}")));
    // One more than wait.
    let three = start("3", &[]);
    let names = (0..3).map(|at| three.0[at]["name"].as_str().expect("text"));
    assert!(names.eq(["pooled-1", "pooled-2", "pooled-3"]));
    assert_eq!([vec![three.pid(0)], vec![three.pid(1)]], pids);
    let mut ids = Vec::new();
    for at in 0..3 {
        let mut serial = Line::to(&folder.join(format!("pooled-{}.serial", at + 1)));
        assert_eq!(serial.ask("recall"), "of the pool");
        assert_eq!(qmp(three.qmp(at), "query-status")["status"], "running");
        ids.push(qmp(three.qmp(at), "query-vm-generation-id")["guid"].clone());
    }
    ids.dedup();
    assert_eq!(ids.len(), 3, "each is another machine");
    wait_until("the pool to be full", SOON, || {
        waiting(folder, &id) == Some(2)
    });

    // One that has died while it waited is passed over.
    for pid in pids_of("pooled-4") {
        let pid = Pid::from_raw(pid).expect("a pid");
        let process = pidfd_open(pid, PidfdFlags::empty()).expect("it lives");
        kill(pid.as_raw_nonzero().get());
        // Its first thread may have ended before the others.
        poll(&mut [PollFd::new(&process, PollFlags::IN)], None).expect("it ends");
    }
    let next = start("1", &[]);
    assert_eq!(next.0[0]["name"], "pooled-5");
    // They end with the template.
    wait_until("the pool to be full", SOON, || {
        waiting(folder, &id) >= Some(2)
    });
    drop(template);
    wait_until("the end of those that wait", SOON, || {
        (6..9).all(|number| pids_of(&format!("pooled-{number}")).is_empty())
    });
    assert_eq!(qmp(next.qmp(0), "query-status")["status"], "running");
}

#[test]
fn a_script_is_told_of_each_clone_and_can_forbid_it() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let script = folder.join("script");
    let told = folder.join("told");
    let text = format!(
        "#!/bin/sh
echo $CRTOOLS_SCRIPT_ACTION $STILLFRAME_VM_NUMBER $STILLFRAME_VM_NAME $CRTOOLS_INIT_PID >> {}
test \"$CRTOOLS_SCRIPT_ACTION $STILLFRAME_VM_NUMBER\" != \"pre-resume 3\"
",
        told.display()
    );
    fs::write(&script, text).expect("written");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it is ours");
    let script = script.to_str().expect("text");
    let image = base().folder.join("image");
    let mut line = words(&base().folder.join("archive"));
    line.extend(["-serial", "null"].map(str::to_owned));
    let line = line.iter().map(String::as_str).collect::<Vec<_>>();
    let image = image.to_str().expect("text");
    let words = |count| {
        let words = [
            "-D",
            image,
            "-o",
            "/dev/null",
            "--name",
            "scripted-{n}",
            "-n",
        ];
        let more = [count, "--action-script", script, "--"];
        [&words[..], &more, &line].concat()
    };
    let two = Machines::restored(folder, &words("2"));
    let expected = ["pre-resume", "post-resume"].map(|action| {
        let lines = (0..2).map(|at| {
            let number = at + 1;
            format!("{action} {number} scripted-{number} {}\n", two.pid(at))
        });
        lines.collect::<String>()
    });
    assert_eq!(fs::read_to_string(&told).expect("told"), expected.concat());
    drop(two);
    for number in 1..3 {
        wait_unheard(&folder.join(format!("scripted-{number}.qmp")));
    }
    let refused = [&["vm", "restore"], &words("3")[..]].concat();
    let told = fail(folder, &refused, 3);
    assert!(
        told.contains("action script") && told.contains("pre-resume"),
        "{told}"
    );
    wait_until("their end", SOON, || {
        (1..4).all(|number| pids_of(&format!("scripted-{number}")).is_empty())
    });
}
