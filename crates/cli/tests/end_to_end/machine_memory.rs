//! `import` and `export`: a monitor's memory file becomes an image, a chain of them, and a file.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

const PAGE: u64 = 4096;
/// Pages of the memory.
const PAGES: u64 = 5000;

/// A scratch folder with snapshots and images.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a scratch folder"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
        command.args(words).current_dir(self.0.path());
        command
    }

    /// Runs a command that succeeds; what it says as JSON.
    #[track_caller]
    fn run(&self, words: &[&str]) -> Value {
        let output = self
            .command(words)
            .arg("--json")
            .output()
            .expect("it starts");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {told}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Runs one that fails with `status`; what it says on stderr.
    #[track_caller]
    fn fail(&self, words: &[&str], status: i32) -> String {
        let output = self.command(words).output().expect("it starts");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(status), "{words:?}: {told}");
        told
    }

    /// A sparse file of `pages` pages, of which some are written.
    fn memory(&self, name: &str, pages: u64, written: impl Iterator<Item = (u64, Vec<u8>)>) {
        let file = File::create(self.path(name)).expect("a file");
        file.set_len(pages * PAGE).expect("a length");
        for (page, bytes) in written {
            file.write_all_at(&bytes, page * PAGE).expect("written");
        }
    }
}

/// A page with contents of its own.
fn page(seed: u64) -> Vec<u8> {
    let word = |at: u64| (seed << 20 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..PAGE / 8)
        .flat_map(|at| word(at).to_le_bytes())
        .collect()
}

fn contents(path: &Path) -> Vec<u8> {
    std::fs::read(path).expect("the file is there")
}

#[test]
fn a_chain_of_snapshots_comes_back_byte_for_byte() {
    let folder = Folder::new();
    // Data, zeros that are written, and holes.
    let full = (0..PAGES).filter(|page| page % 7 < 4);
    let full = full.map(|at| (at, if at % 7 == 3 { vec![0; 4096] } else { page(at) }));
    folder.memory("full", PAGES, full);
    std::fs::write(folder.path("state"), b"processors and devices").expect("written");
    let words = ["import", "--firecracker", "-D", "one", "--memory", "full"];
    let told = folder.run(&[&words[..], &["--vmstate", "state"]].concat());
    let count = |told: &Value, name: &str| told["import"][name].as_u64().expect("a number");
    let data = (0..PAGES).filter(|at| at % 7 < 3).count() as u64;
    assert_eq!(count(&told, "stored_pages"), data, "{told}");
    assert_eq!(count(&told, "zero_pages"), PAGES - data, "{told}");

    // A difference: holes are what has not changed. One page is as before, one became zero.
    let changed = [
        (0, page(90_000)),
        (1, page(1)),
        (2, vec![0; 4096]),
        (PAGES - 1, page(90_001)),
    ];
    folder.memory("diff", PAGES, changed.into_iter());
    let words = [
        "import",
        "--firecracker",
        "-D",
        "two",
        "--memory",
        "diff",
        "--parent",
        "one",
    ];
    let told = folder.run(&words);
    assert_eq!(count(&told, "stored_pages"), 2, "{told}");
    assert_eq!(count(&told, "zero_pages"), 1, "{told}");
    assert_eq!(count(&told, "parent_pages"), PAGES - 3, "{told}");

    folder.run(&[
        "export",
        "-D",
        "one",
        "--memory",
        "full.out",
        "--vmstate",
        "state.out",
    ]);
    let (was, is) = (folder.path("full"), folder.path("full.out"));
    assert!(contents(&was) == contents(&is));
    assert_eq!(
        contents(&folder.path("state.out")),
        b"processors and devices"
    );
    let facts = std::fs::metadata(&is).expect("facts");
    assert_eq!(facts.mode() & 0o777, 0o600);
    assert!(
        facts.blocks() * 512 < (data + PAGES / 5) * PAGE,
        "it is sparse"
    );

    let mut expected = contents(&folder.path("full"));
    for (at, bytes) in [
        (0, page(90_000)),
        (2, vec![0; 4096]),
        (PAGES - 1, page(90_001)),
    ] {
        let at = (at * PAGE) as usize;
        expected[at..at + 4096].copy_from_slice(&bytes);
    }
    folder.run(&["export", "-D", "two", "--memory", "two.out"]);
    assert!(contents(&folder.path("two.out")) == expected);

    // As any image: shown, merged, and the older one then is not needed.
    let shown = folder.run(&["show", "two"]);
    assert_eq!(shown["blocks"][0]["bytes"], PAGES * PAGE, "{shown}");
    assert_eq!(shown["layers"].as_array().map(Vec::len), Some(2), "{shown}");
    folder.run(&["merge", "two", "--compress"]);
    std::fs::remove_dir_all(folder.path("one")).expect("removed");
    folder.run(&["export", "-D", "two", "--memory", "two.again"]);
    assert!(contents(&folder.path("two.again")) == expected);
    let told = folder.fail(&["restore", "-D", "two"], 3);
    assert!(
        told.contains("of the memory of a virtual machine"),
        "{told}"
    );
}

#[test]
fn what_is_no_memory_is_refused_by_name() {
    let folder = Folder::new();
    let import = |images: &'static str, memory: &'static str| {
        ["import", "--firecracker", "-D", images, "--memory", memory]
    };
    std::fs::write(folder.path("odd"), b"not whole pages").expect("written");
    let told = folder.fail(&import("image", "odd"), 3);
    assert!(
        told.contains("odd is no machine's memory: it has 15 bytes"),
        "{told}"
    );
    let told = folder.fail(&import("image", "missing"), 6);
    assert!(told.contains("cannot open missing"), "{told}");
    let told = folder.fail(&import("image", "/dev/zero"), 3);
    assert!(told.contains("/dev/zero is not a regular file"), "{told}");
    assert!(!folder.path("image").join("manifest.img").exists());

    folder.memory("small", 8, std::iter::once((3, page(3))));
    folder.memory("large", 9, std::iter::once((3, page(3))));
    folder.run(&import("image", "small"));
    let over = [&import("other", "large")[..], &["--parent", "image"]].concat();
    let told = folder.fail(&over, 3);
    assert!(
        told.contains("a memory of 9 pages cannot be a difference from one of 8"),
        "{told}"
    );
    let told = folder.fail(
        &["export", "-D", "image", "--memory", "x", "--vmstate", "y"],
        3,
    );
    assert!(
        told.contains("the image in image has no state file"),
        "{told}"
    );
    assert!(!folder.path("x").exists());
    // Its parent is gone, or damaged.
    let over = [&import("layer", "small")[..], &["--parent", "image"]].concat();
    folder.run(&over);
    let files = std::fs::read_dir(folder.path("image")).expect("an image");
    let pages = files.map(|file| file.expect("a file").path());
    let pages = pages.filter(|path| path.to_string_lossy().contains("pages-"));
    for path in pages {
        let mut bytes = contents(&path);
        bytes[100] ^= 1;
        std::fs::write(&path, bytes).expect("written");
    }
    let told = folder.fail(&["export", "-D", "layer", "--memory", "small"], 5);
    assert!(told.contains("the checksum of"), "{told}");
    let kept = contents(&folder.path("small"));
    assert!(
        kept[3 * 4096..4 * 4096] == page(3),
        "the file that was there is as it was"
    );
}

#[test]
fn a_file_that_is_there_is_replaced_whole_and_nothing_is_left_beside_it() {
    let folder = Folder::new();
    folder.memory("memory", 64, (0..64).map(|at| (at, page(at))));
    folder.run(&[
        "import",
        "--firecracker",
        "-D",
        "image",
        "--memory",
        "memory",
    ]);
    std::fs::write(folder.path("out"), b"old").expect("written");
    folder.run(&["export", "-D", "image", "--memory", "out"]);
    assert!(contents(&folder.path("out")) == contents(&folder.path("memory")));
    std::fs::create_dir(folder.path("taken")).expect("a folder");
    let told = folder.fail(&["export", "-D", "image", "--memory", "taken"], 3);
    assert!(
        told.contains("taken is there and no regular file"),
        "{told}"
    );
    let names = std::fs::read_dir(folder.0.path()).expect("the folder");
    let names = names.map(|entry| entry.expect("an entry").file_name());
    let mut names = names.collect::<Vec<_>>();
    names.sort();
    assert_eq!(names, ["image", "memory", "out", "taken"]);
}
