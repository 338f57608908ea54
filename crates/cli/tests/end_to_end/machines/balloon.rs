//! Memory that a guest gives up, before a save and meanwhile.

use std::sync::atomic::{AtomicBool, Ordering};

use super::live::{number, passes, saved};
use super::*;

/// The memory that a guest is left, in bytes.
const LEFT: u64 = 120 << 20;

/// Tells a machine how much memory it may have, and waits until that is so.
fn set_balloon(socket: &str, bytes: u64) {
    qmp_with(socket, "balloon", json!({ "value": bytes }));
    wait_until("the balloon", SOON, || {
        qmp(socket, "query-balloon")["actual"] == bytes
    });
}

#[test]
fn what_a_balloon_has_is_zero() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    linux::pack(&folder.join("archive")).expect("packed");
    let mut words = words(&folder.join("archive"));
    let second = "unix:second.qmp,server=on,wait=off";
    let more = ["-device", "virtio-balloon-pci", "-qmp", second];
    words.extend(more.map(str::to_owned));
    let mut guest = Linux::boot(folder, "ballooned", &words, &[]);
    let mut line = Line::to(&guest.serial);
    assert_eq!(line.ask("devices"), "found");
    assert_eq!(line.ask(&format!("fill {FILE}")), "filled");
    // What was written and is not used any more is still there.
    assert_eq!(line.ask("fill big 1 70"), "filled");
    assert_eq!(line.ask("remove big"), "removed");
    assert_eq!(line.ask("write 20"), "writing");
    let socket = guest.qmp.to_str().expect("text").to_owned();
    let second = folder.join("second.qmp");
    let second = second.to_str().expect("text");
    let before = saved(folder, &socket, &["save", "-R", "-D", "before"]);
    assert!(number(&before, "stored_pages") > 150 << 8, "{before}");
    set_balloon(second, LEFT);
    let after = saved(folder, &socket, &["save", "-R", "-D", "after"]);
    assert!(number(&after, "stored_pages") <= LEFT / 4096, "{after}");
    let live = saved(folder, &socket, &["save", "--live", "-R", "-D", "live"]);
    assert!(number(&live, "stored_pages") <= LEFT / 4096, "{live}");

    // It gives memory up, and takes it back, all the time.
    let over = AtomicBool::new(false);
    let images = ["0", "1", "2"];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                set_balloon(second, u64::from(MIB) << 20);
                set_balloon(second, LEFT);
            }
        });
        for image in images {
            saved(folder, &socket, &["save", "--live", "-R", "-D", image]);
        }
        over.store(true, Ordering::SeqCst);
    });
    passes(&mut line);
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
    drop(line);
    saved(folder, &socket, &["save", "-D", "last"]);
    wait_until("QEMU's end", SOON, || guest.has_ended());
    for image in ["before", "after", "live", "0", "1", "2", "last"] {
        let name = format!("again-{image}");
        let machine = Machines::restored(folder, &["-D", image, "--name", &name]);
        let mut line = Line::to(&folder.join("ballooned.serial"));
        assert_eq!(line.ask(&format!("check {FILE}")), "right", "{image}");
        passes(&mut line);
        drop((machine, line));
        wait_unheard(&folder.join("ballooned.serial"));
    }
}
