//! QEMU dies, or there is no room, while `vm save --with-disks` copies disks: the image is whole or
//! absent, and what QEMU does not need is gone.

use super::disks::{Idle, Small};
use super::*;

/// MiB of the disk that is copied, none of which are zeros.
const DISK_MIB: u64 = 96;

/// Makes the first disk of a machine full of bytes that are not zeros.
fn fill(folder: &Path) {
    let file = File::create(folder.join("one")).expect("a file");
    let mut piece = vec![0; 1 << 20];
    for mib in 0..DISK_MIB {
        for (page, bytes) in piece.chunks_mut(4096).enumerate() {
            bytes.fill((mib * 7 + page as u64 * 3) as u8 | 1);
        }
        file.write_all_at(&piece, mib << 20).expect("written");
    }
}

/// What a process has read by now, in bytes.
fn read_by(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("rchar: "))?;
    line.parse().ok()
}

/// The overlays in a folder.
fn overlays(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).expect("there").flatten();
    let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".qcow2")).collect()
}

/// Kills QEMU when a save in a way has read so much of the disk.
#[track_caller]
fn dies(folder: &Path, more: &[&str], at_mib: u64) {
    for overlay in overlays(folder) {
        fs::remove_file(folder.join(overlay)).expect("it is ours");
    }
    let _ = fs::remove_dir_all(folder.join("image"));
    let mut idle = Idle::start(folder, &[]);
    let save = [
        "vm",
        "save",
        "--no-sync",
        "--with-disks",
        "-D",
        "image",
        "--json",
    ];
    let words = [&save[..], &["--qmp", idle.socket()], more].concat();
    let mut command = stillframe(folder, &words);
    let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().expect("it starts");
    let pid = child.id();
    wait_until("so much to be read", SOON, || {
        // One that has ended has read all.
        read_by(pid).is_none_or(|bytes| bytes >= at_mib << 20) || !testkit::tree::is_alive(pid)
    });
    idle.kill();
    let output = child.wait_with_output().expect("it ends");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    let log = fs::read_to_string(folder.join("image/vm-save.log")).unwrap_or_default();
    // Whoever writes to one may have written before it died, so it is told, and stays.
    for name in overlays(folder) {
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains(&name) || log.contains(&name),
            "{more:?}: {name}: {told}{log}"
        );
    }
    let manifest = folder.join("image/manifest.img");
    match output.status.code() {
        Some(0) => {
            // It has all that the machine had at its instant.
            let own = folder.join(format!("own{at_mib}{}", more.len()));
            fs::create_dir(&own).expect("a folder");
            let own = own.to_str().expect("text");
            let restored = ["-D", "image", "--disk-dir", own, "--name", "again"];
            let machine = Machines::restored(folder, &restored);
            assert_eq!(qmp(machine.qmp(0), "query-status")["status"], "running");
            let base = fs::read_dir(own)
                .expect("there")
                .flatten()
                .map(|it| it.path());
            let mut base = base.filter(|path| path.extension().is_some_and(|it| it == "raw"));
            let is_it = |path: PathBuf| is_same(&path, &folder.join("one"));
            assert!(base.any(is_it), "{more:?}: the disk is another one");
            drop(machine);
            wait_unheard(&folder.join("again.qmp"));
            fs::remove_dir_all(own).expect("it is ours");
        }
        Some(4) => {
            assert!(!manifest.exists(), "{more:?}: {told}");
            assert!(told.contains("QEMU"), "{told}");
        }
        other => panic!("{more:?}: {other:?}: {told}"),
    }
}

fn is_same(one: &Path, other: &Path) -> bool {
    let read = |path| fs::read(path).expect("read");
    read(one) == read(other)
}

/// Has QEMU die at several moments of each way to save.
fn dies_in_each_way(moments: &[u64]) {
    let scratch = tempfile::tempdir().expect("a folder");
    fill(scratch.path());
    let ways: [&[&str]; 3] = [&[], &["-R"], &["-R", "--live"]];
    for more in ways {
        for at_mib in moments {
            dies(scratch.path(), more, *at_mib);
        }
    }
}

#[test]
fn a_qemu_that_dies_while_its_disk_is_copied_leaves_a_whole_image_or_none() {
    testkit::needs_root!();
    testkit::needs_linux!();
    dies_in_each_way(&[DISK_MIB / 3, DISK_MIB]);
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn a_qemu_that_dies_at_any_moment_of_a_copy_leaves_a_whole_image_or_none() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let moments = (0..DISK_MIB + 20).step_by(4).collect::<Vec<_>>();
    dies_in_each_way(&moments);
}

#[test]
fn a_disk_without_room_for_an_overlay_is_written_to_as_before() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let small = Small::mounted(&scratch.path().join("small"));
    let idle = Idle::start(&small.0, &[]);
    disks::write(idle.socket(), 0, (1, "0 1M"));
    let filler = File::create(small.0.join("filler")).expect("a file");
    let page = [1; 4096];
    let full = (0_u64..).find_map(|at| filler.write_all_at(&page, at << 12).err());
    assert_eq!(
        full.map(|error| error.kind()),
        Some(std::io::ErrorKind::StorageFull)
    );
    for more in [&["-R"][..], &["-R", "--live"]] {
        let image = scratch.path().join("image");
        let save = ["vm", "save", "--with-disks", "--qmp", idle.socket(), "-D"];
        let words = [&save[..], &[image.to_str().expect("text")], more].concat();
        let told = fail(scratch.path(), &words, 6);
        assert!(
            told.contains("No space left") && told.contains("overlay"),
            "{told}"
        );
        assert!(!image.join("manifest.img").exists());
        assert_eq!(overlays(&small.0), [] as [String; 0]);
        assert_eq!(qmp(idle.socket(), "query-status")["status"], "running");
        let drives = qmp(idle.socket(), "query-block");
        assert_eq!(drives[0]["inserted"]["file"], "one", "{drives}");
    }
    // Both its disks are its own, and can be written to.
    drop(filler);
    fs::remove_file(small.0.join("filler")).expect("there");
    disks::write(idle.socket(), 0, (2, "0 1M"));
    let mut start = [0; 4096];
    let disk = File::open(small.0.join("one")).expect("there");
    wait_until("what was written to be in the file", SOON, || {
        disk.read_exact_at(&mut start, 0).is_ok() && start == [2; 4096]
    });
}
