//! Commands that are given an image of another kind say what it is of and which command takes it.

use std::fs::File;
use std::path::Path;
use std::process::Command;

use testkit::program::Program;
use testkit::{needs_program, needs_root};

use crate::stillframe;

/// A folder with an image of each kind that can be made without a machine.
struct Images(tempfile::TempDir);

impl Images {
    fn make() -> Self {
        let images = Self(tempfile::tempdir().expect("a scratch folder"));
        let file = |name: &str, bytes| {
            let file = File::create(images.0.path().join(name)).expect("a file");
            file.set_len(bytes).expect("a length");
        };
        file("memory.bin", 64 << 12);
        images.must("import --firecracker --memory memory.bin -D memory");
        images.must("cpuinfo dump -D processor");
        file("ext4", 8 << 20);
        let mut mkfs = Command::new("mkfs.ext4");
        let made = mkfs.args(["-q", "-F", "ext4"]).current_dir(images.0.path());
        assert!(made.status().expect("mkfs.ext4").success());
        images.must("volume dump -D volume ext4");
        let program = Program::new("sleep").arg("1000").spawn();
        let pid = program.pid();
        images.must(&format!("pre-dump -t {pid} -D predump"));
        images.must(&format!("dump -R -t {pid} -D tree"));
        images
    }

    /// Runs the line; its exit status and all that it says.
    fn run(&self, line: &str) -> (Option<i32>, String) {
        let mut command = Command::new(stillframe().binary());
        let output = command
            .args(line.split(' '))
            .current_dir(self.0.path())
            .output();
        let output = output.expect("it starts");
        let said = [output.stdout, output.stderr].concat();
        (
            output.status.code(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    }

    #[track_caller]
    fn must(&self, line: &str) -> String {
        let (status, said) = self.run(line);
        assert_eq!(status, Some(0), "{line}: {said}");
        said
    }

    /// Each kind: its image, the words for it in a message, and a command that takes it.
    const KINDS: [(&str, &str, &str); 5] = [
        ("tree", "a process tree", "`stillframe restore`"),
        ("predump", "a pre-dump", "--prev-images-dir"),
        (
            "processor",
            "a processor alone",
            "`stillframe cpuinfo check`",
        ),
        (
            "memory",
            "the memory of a virtual machine",
            "`stillframe serve`",
        ),
        ("volume", "an ext4 volume", "`stillframe volume restore`"),
    ];

    /// Insists that `line`, in which `IMAGE` stands for it, is refused for all kinds but `taken`.
    #[track_caller]
    fn refuses_all_but(&self, line: &str, taken: &[&str]) {
        let others = Self::KINDS
            .iter()
            .filter(|(name, ..)| !taken.contains(name));
        for (name, kind, command) in others {
            let line = line.replace("IMAGE", name);
            let (status, said) = self.run(&line);
            assert_eq!(status, Some(3), "{line}: {said}");
            let words = format!("{name} is of {kind}");
            assert!(
                said.contains(&words) && said.contains(command),
                "{line}: {said}"
            );
        }
    }
}

#[test]
fn image_of_another_kind_is_named() {
    needs_root!();
    needs_program!("mkfs.ext4");
    if stillframe().is_peer() {
        testkit::skip!("the peer knows one kind");
    }
    let images = Images::make();
    for line in [
        "restore -d -D IMAGE",
        "check --image IMAGE",
        "lazy-pages -D IMAGE",
    ] {
        images.refuses_all_but(line, &["tree"]);
    }
    images.refuses_all_but("cpuinfo check -D IMAGE", &["tree", "processor"]);
    images.refuses_all_but("vm restore -D IMAGE", &[]);
    images.refuses_all_but("serve -D IMAGE --socket s", &["memory"]);
    images.refuses_all_but("export -D IMAGE --memory out", &["memory"]);
    let over_memory = "import --firecracker --memory memory.bin -D x --parent IMAGE";
    images.refuses_all_but(over_memory, &["memory"]);
    for line in [
        "volume restore -D IMAGE out",
        "volume ls -D IMAGE",
        "volume cat -D IMAGE /x",
        "volume extract -D IMAGE --into out",
        "volume export -D IMAGE --format dump --file out",
        "volume diff -D volume --prev-images-dir ../IMAGE",
        "volume mount -D IMAGE .",
        "volume dump -D x --prev-images-dir ../IMAGE ext4",
    ] {
        images.refuses_all_but(line, &["volume"]);
    }
    assert!(!Path::new(&images.0.path().join("out")).exists());
}

#[test]
fn image_of_another_kind_is_no_parent_and_the_tree_runs_on() {
    needs_root!();
    needs_program!("mkfs.ext4");
    if stillframe().is_peer() {
        testkit::skip!("the peer knows one kind");
    }
    let images = Images::make();
    let program = Program::new("sleep").arg("1000").spawn();
    let pid = program.pid();
    for command in ["dump", "pre-dump"] {
        let line = format!("{command} -t {pid} -D new --prev-images-dir ../IMAGE");
        images.refuses_all_but(&line, &["tree", "predump"]);
    }
    assert!(program.is_alive());
}

#[test]
fn every_kind_is_shown() {
    needs_root!();
    needs_program!("mkfs.ext4");
    if stillframe().is_peer() {
        testkit::skip!("the peer knows one kind");
    }
    let images = Images::make();
    for (name, words) in [
        ("tree", "sleep"),
        ("predump", "a pre-dump of 1 tasks"),
        ("processor", "instructions"),
        ("memory", "memory of a virtual machine"),
        ("volume", "volume"),
    ] {
        let said = images.must(&format!("show -D {name}"));
        assert!(said.contains(words), "{name}: {said}");
        images.must(&format!("show --json -D {name}"));
    }
}
