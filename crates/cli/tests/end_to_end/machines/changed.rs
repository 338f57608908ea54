//! Machines that are not what their command line says, and QEMUs that are not root's: each comes
//! back as it was, or is refused while its guest runs.

use super::disks::{Idle, idle_words, write};
use super::*;

/// A port that devices can be plugged into.
const PORT: [&str; 2] = ["-device", "pcie-root-port,id=lane0,chassis=1"];

/// The message with which a save is refused, after which the guest runs.
#[track_caller]
fn refused(folder: &Path, socket: &str, more: &[&str]) -> String {
    let words = ["vm", "save", "--qmp", socket, "-D", "refused"];
    let told = fail(folder, &[&words[..], more].concat(), 3);
    assert_eq!(qmp(socket, "query-status")["status"], "running", "{told}");
    assert!(!folder.join("refused/manifest.img").exists());
    told
}

#[test]
fn devices_that_were_plugged_in_or_unplugged_are_refused_by_name() {
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let rng = ["-device", "virtio-rng-pci,id=rng,bus=lane0"];
    let idle = Idle::start(folder, &PORT);
    let socket = idle.socket();
    qmp_with(socket, "netdev_add", json!({"type": "user", "id": "net"}));
    let device = json!({"driver": "virtio-net-pci", "id": "late", "netdev": "net", "bus": "lane0"});
    qmp_with(socket, "device_add", device);
    for more in [&[][..], &["-R"], &["-R", "--live"]] {
        let told = refused(folder, socket, more);
        assert!(told.contains("in late (virtio-net-pci): "), "{told}");
    }
    // With --for-command the save succeeds, and each restore needs a command line with the device.
    let save = [
        "vm",
        "save",
        "--qmp",
        socket,
        "--for-command",
        "-D",
        "image",
    ];
    run(folder, &save);
    let told = fail(folder, &["vm", "restore", "-D", "image", "--name", "x"], 3);
    assert!(
        told.contains("differs from its command line in late"),
        "{told}"
    );
    let words = idle_words("one", "two");
    let late = [
        "-netdev",
        "user,id=net",
        "-device",
        "virtio-net-pci,id=late,netdev=net,bus=lane0",
    ];
    let words = words.iter().map(String::as_str).chain(PORT).chain(late);
    let restore = ["-D", "image", "--name", "x", "--"]
        .into_iter()
        .chain(words);
    let machine = Machines::restored(folder, &restore.collect::<Vec<_>>());
    let nets = qmp_with(
        machine.qmp(0),
        "qom-list",
        json!({"path": "/machine/peripheral"}),
    );
    assert!(nets.to_string().contains("virtio-net-pci"), "{nets}");
    drop((machine, idle));

    let idle = Idle::start(folder, &[&PORT[..], &rng].concat());
    let socket = idle.socket();
    run(
        folder,
        &["vm", "save", "--qmp", socket, "-R", "-D", "before"],
    );
    // A guest that does not answer holds on to it, unless the machine begins anew.
    qmp_with(socket, "device_del", json!({"id": "rng"}));
    qmp(socket, "system_reset");
    wait_until("the device is gone", SOON, || {
        let all = qmp_with(socket, "qom-list", json!({"path": "/machine/peripheral"}));
        !all.to_string().contains("virtio-rng-pci")
    });
    let told = refused(folder, socket, &[]);
    assert!(told.contains("in rng (unplugged): "), "{told}");
}

#[test]
fn temporary_disk_is_saved_with_disks_and_is_one_again() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let idle = Idle::start(folder, &["-snapshot"]);
    let socket = idle.socket();
    write(socket, 0, (7, "0 1M"));
    for (more, how) in [
        (&[][..], "save it with --with-disks"),
        (&["-R"], "save it with --with-disks"),
        (&["-R", "--with-disks"], "saved where QEMU ends"),
        (&["-R", "--live", "--with-disks"], "saved where QEMU ends"),
    ] {
        let told = refused(folder, socket, more);
        let named = "the disk one is temporary (snapshot=on, or its file was removed)";
        assert!(
            told.contains(named) && told.contains(how),
            "{more:?}: {told}"
        );
    }
    let save = ["vm", "save", "--qmp", socket, "--with-disks", "-D", "image"];
    run(folder, &save);
    let one = fs::read(folder.join("one")).expect("there");
    assert!(one.iter().all(|byte| *byte == 0), "it was not written to");
    let restore = ["-D", "image", "--disk-dir", "own", "--name", "again"];
    fs::create_dir(folder.join("own")).expect("a folder");
    let machine = Machines::restored(folder, &restore);
    assert!(has_written(&folder.join("own"), &[7]));
    // A write of the restored guest goes to the temporary disk, as before the save.
    write(machine.qmp(0), 0, (8, "2M 1M"));
    let told = refused(folder, machine.qmp(0), &[]);
    assert!(told.contains("is temporary"), "{told}");
    run(
        folder,
        &[
            "vm",
            "save",
            "--qmp",
            machine.qmp(0),
            "--with-disks",
            "-D",
            "next",
        ],
    );
    let machine = Machines::restored(
        folder,
        &["-D", "next", "--disk-dir", "own", "--name", "next"],
    );
    assert!(has_written(&folder.join("own"), &[7, 8]));
    drop(machine);
}

/// True if the disks in a folder have a MiB of each of these bytes. A temporary disk is an overlay:
/// QEMU does not copy it, but the saved contents are in the file below it.
fn has_written(disks: &Path, written: &[u8]) -> bool {
    let files = fs::read_dir(disks).expect("a folder");
    let files = files.map(|file| fs::read(file.expect("a file").path()).expect("a file"));
    let files = files.collect::<Vec<_>>();
    let blocks = |file: &Vec<u8>, byte: u8| {
        let blocks = file.chunks_exact(64 << 10);
        blocks
            .filter(|block| block.iter().all(|one| *one == byte))
            .count()
    };
    let has = |byte: &u8| files.iter().any(|file| blocks(file, *byte) == 16);
    written.iter().all(has)
}

#[test]
fn qemu_of_a_user_is_that_users_again() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o777)).expect("ours");
    let user = |more: &[&str]| {
        let drop = ["--reuid", "65533", "--regid", "65532", "--groups", "65531"];
        let words = [&drop[..], more].concat();
        words.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let status = |pid: i32| {
        let text = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
        let own = [
            "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNew",
        ];
        let lines = text
            .lines()
            .filter(|line| own.iter().any(|name| line.starts_with(name)));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    for (name, by) in [
        ("plain", user(&["--no-new-privs"])),
        ("bound", user(&["--bounding-set", "-all,+net_raw"])),
        (
            "able",
            user(&["--inh-caps", "+net_raw", "--ambient-caps", "+net_raw"]),
        ),
        (
            "root",
            vec!["--bounding-set".to_owned(), "-sys_module".to_owned()],
        ),
    ] {
        let mut idle = Idle::start_by(folder, &[&["setpriv".to_owned()][..], &by].concat());
        let was = status(idle.pid());
        let image = format!("image-{name}");
        let save = [
            "vm",
            "save",
            "--qmp",
            idle.socket(),
            "--with-disks",
            "-R",
            "-D",
            &image,
        ];
        run(folder, &save);
        idle.kill();
        let own = format!("own-{name}");
        fs::create_dir(folder.join(&own)).expect("a folder");
        let restore = ["-D", &image, "--disk-dir", &own, "--name", name];
        let machine = Machines::restored(folder, &restore);
        assert_eq!(status(machine.pid(0)), was, "{name}");
        // It can write to its disk.
        write(machine.qmp(0), 0, (3, "0 1M"));
        drop(machine);
        fs::remove_file(folder.join("one")).expect("there");
        fs::remove_file(folder.join("two")).expect("there");
    }
}
