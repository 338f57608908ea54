//! The program as scripts see it: exit statuses, words, files.

use std::path::Path;
use std::process::{Command, Output};

/// Runs the program in `dir`, which is its home, too.
fn stillframe(dir: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stillframe"))
        .args(arguments)
        .current_dir(dir)
        .env("HOME", dir)
        .env_remove("STILLFRAME_CONFIG_FILE")
        .output()
        .expect("the program was built for this test")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("the program writes text")
}

/// Returns the exit status and what was said on stderr.
fn outcome(dir: &Path, arguments: &[&str]) -> (i32, String) {
    let output = stillframe(dir, arguments);
    (
        output.status.code().expect("no signal"),
        text(&output.stderr),
    )
}

#[test]
fn the_version_is_told_wherever_it_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    for arguments in [&["--version"][..], &["-V"], &["dump", "--version"]] {
        let output = stillframe(dir.path(), arguments);
        assert!(output.status.success());
        assert!(
            text(&output.stdout).starts_with("stillframe "),
            "{arguments:?}"
        );
    }
}

#[test]
fn help_is_told_and_no_command_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for arguments in [
        &["--help"][..],
        &["-h"],
        &["dump", "--help"],
        &["-D", "x", "restore", "-h"],
    ] {
        let output = stillframe(dir.path(), arguments);
        assert!(output.status.success(), "{arguments:?}");
        assert!(
            text(&output.stdout).contains("Usage: stillframe"),
            "{arguments:?}"
        );
    }
    assert_eq!(outcome(dir.path(), &[]).0, 2);
}

#[test]
fn misuse_gives_2_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, words) in [
        (&["bogus"][..], "unrecognized subcommand 'bogus'"),
        (
            &["page-server"],
            "the command page-server of criu(8) is not supported yet",
        ),
        (&["dump"], "--tree <PID>"),
        (&["dump", "-t", "0"], "a pid is a number above 0"),
        (
            &["dump", "-t", "1", "--bogus"],
            "unexpected argument '--bogus'",
        ),
        (&["dump", "-t", "1", "extra"], "unexpected argument 'extra'"),
        (
            &["dump", "-t", "1", "--exec-cmd"],
            "unexpected argument '--exec-cmd'",
        ),
        (
            &["dump", "-t", "1", "--lazy-pages"],
            "--lazy-pages of criu(8) is not supported yet",
        ),
        (&["dump", "-t", "1", "--status-fd", "99"], "descriptor 99"),
        (
            &["dump", "-t", "1", "-xnone"],
            "it takes inodes, and \"none\" is none",
        ),
        (
            &["restore", "-S"],
            "--restore-sibling needs --restore-detached",
        ),
        (
            &["restore", "-d", "--exec-cmd", "true"],
            "exclude each other",
        ),
        (&["restore", "--exec-cmd"], "--exec-cmd needs a command"),
        (&["restore", "--inherit-fd", "3:x"], "fd[NUMBER]:RESOURCE"),
        (
            &["dump", "-t", "1", "--config", "missing"],
            "cannot read the configuration file missing",
        ),
    ] {
        let (status, stderr) = outcome(dir.path(), arguments);
        assert_eq!(status, 2, "{arguments:?}: {stderr}");
        assert!(stderr.contains(words), "{arguments:?}: {stderr}");
    }
    assert_eq!(
        std::fs::read_dir(dir.path()).unwrap().count(),
        0,
        "misuse leaves no file"
    );
}

#[test]
fn a_failed_dump_leaves_its_log_in_a_new_directory() {
    let dir = tempfile::tempdir().unwrap();
    // No task has this pid: the kernel's limit is 4,194,304.
    let dump = ["dump", "-t", "4194400", "-D", "new/image"];
    let (status, stderr) = outcome(dir.path(), &dump);
    assert_ne!(status, 0);
    assert!(stderr.starts_with("stillframe: dump failed: "), "{stderr}");
    let log = std::fs::read_to_string(dir.path().join("new/image/dump.log")).unwrap();
    assert!(log.contains("Error (stillframe): dump failed: "), "{log}");
}

#[test]
fn the_log_goes_where_the_options_say() {
    let dir = tempfile::tempdir().unwrap();
    let dump = [
        "dump", "-t", "4194400", "-D", "image", "-W", "work", "-o", "my.log", "-v4",
    ];
    assert_ne!(outcome(dir.path(), &dump).0, 0);
    let log = std::fs::read_to_string(dir.path().join("work/my.log")).unwrap();
    assert!(log.starts_with("(00.0"), "{log}");
    assert!(!dir.path().join("image/dump.log").exists());
    let quiet = ["dump", "-t", "4194400", "-D", "image", "-v0"];
    assert_ne!(outcome(dir.path(), &quiet).0, 0);
    assert_eq!(
        std::fs::read_to_string(dir.path().join("image/dump.log")).unwrap(),
        ""
    );
}

#[test]
fn json_tells_of_failures() {
    let dir = tempfile::tempdir().unwrap();
    let output = stillframe(dir.path(), &["restore", "-D", "missing", "--json"]);
    assert_eq!(output.status.code(), Some(6));
    let error: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(error["error"]["kind"], "store");
    assert_eq!(error["error"]["status"], 6);
    assert_eq!(
        error["error"]["message"],
        "cannot open the image directory missing"
    );
}

#[test]
fn configuration_files_give_options() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join(".stillframe")).unwrap();
    let conf = dir.path().join(".stillframe/default.conf");
    std::fs::write(&conf, "log-file \"from user.log\" # a remark\n").unwrap();
    std::fs::write(dir.path().join("named.conf"), "log-file named.log\n").unwrap();
    let dump = |more: &[&str]| {
        let mut arguments = vec!["dump", "-t", "4194400", "-D", "image"];
        arguments.extend(more);
        assert_ne!(outcome(dir.path(), &arguments).0, 0);
        let logs = std::fs::read_dir(dir.path().join("image")).unwrap();
        let logs = logs.map(|log| log.unwrap().file_name().into_string().unwrap());
        let logs: Vec<_> = logs.filter(|name| name.ends_with(".log")).collect();
        std::fs::remove_dir_all(dir.path().join("image")).unwrap();
        logs
    };
    assert_eq!(dump(&[]), ["from user.log"]);
    assert_eq!(dump(&["-o", "line.log"]), ["line.log"]);
    assert_eq!(dump(&["--no-default-config"]), ["dump.log"]);
    assert_eq!(dump(&["--config", "named.conf"]), ["named.log"]);
    std::fs::write(&conf, "tcp-established\n\nlazy-pages\n").unwrap();
    let (status, stderr) = outcome(dir.path(), &["dump", "-t", "4194400", "-D", "image"]);
    assert_eq!(status, 2);
    assert!(stderr.contains("default.conf, line 3)"), "{stderr}");
}

#[test]
fn check_tells_a_line_a_feature() {
    let dir = tempfile::tempdir().unwrap();
    let list = text(&stillframe(dir.path(), &["check", "--feature", "list"]).stdout);
    let output = stillframe(dir.path(), &["check"]);
    let lines = text(&output.stdout);
    // Behind them stand what is known of the host and the verdict.
    assert_eq!(lines.lines().count(), list.lines().count() + 2, "{lines}");
    let host = lines.lines().nth_back(1).unwrap();
    assert!(host.starts_with("vDSO "), "{lines}");
    let last = lines.lines().last().unwrap();
    assert_eq!(output.status.success(), last == "Looks good.", "{lines}");
    for (name, line) in list.lines().zip(lines.lines()) {
        let single = stillframe(dir.path(), &["check", "--feature", name]);
        let answer = line.split_whitespace().nth(1).unwrap();
        assert_eq!(single.status.success(), answer == "yes", "{line}");
        assert_eq!(single.status.code() == Some(1), answer != "yes", "{line}");
    }
    assert_eq!(outcome(dir.path(), &["check", "--feature", "nope"]).0, 1);
}

#[test]
fn every_feature_that_criu_can_check_is_known() {
    let dir = tempfile::tempdir().unwrap();
    let list = text(&stillframe(dir.path(), &["check", "--feature", "list"]).stdout);
    for name in include_str!("fixtures/criu-4.2-features.txt").lines() {
        assert!(
            name.starts_with('#') || list.lines().any(|known| known == name),
            "{name}"
        );
    }
}

#[test]
fn completions_and_the_manual_are_generated() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = stillframe(dir.path(), &["generate", "completions", shell]);
        assert!(output.status.success(), "{shell}");
        assert!(text(&output.stdout).contains("tcp-established"), "{shell}");
    }
    let manual = text(&stillframe(dir.path(), &["generate", "man"]).stdout);
    for words in [
        ".TH stillframe 8",
        ".SH DUMP",
        ".SH RESTORE",
        "\\-\\-leave\\-running",
        ".SH FILES",
    ] {
        assert!(manual.contains(words), "{words}");
    }
}

#[test]
fn a_closed_descriptor_is_closed() {
    use std::os::unix::fs::MetadataExt as _;
    let dir = tempfile::tempdir().unwrap();
    let program = env!("CARGO_BIN_EXE_stillframe");
    let script = format!(
        "exec 8>marker; {program} dump -t 4194400 -D image --close 8 \
        --action-script \"$PWD/look\""
    );
    let look =
        "#!/bin/sh\nif [ -e /proc/$PPID/fd/8 ]; then echo open; else echo closed; fi > seen\n";
    std::fs::write(dir.path().join("look"), look).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(dir.path().join("look"), mode).unwrap();
    let shell = Command::new("sh")
        .arg("-c")
        .arg(script)
        .current_dir(dir.path())
        .output()
        .unwrap();
    assert!(!shell.status.success());
    assert_eq!(
        std::fs::metadata(dir.path().join("marker")).unwrap().size(),
        0
    );
    let seen = std::fs::read_to_string(dir.path().join("image/seen"));
    assert_eq!(seen.unwrap_or_else(|_| text(&shell.stderr)), "closed\n");
}

#[test]
fn no_file_takes_the_place_of_a_closed_stream() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let output = Command::new("sh")
        .args(["-c", "\"$0\" restore -D \"$1\" <&- >&- 2>&-"])
        .arg(env!("CARGO_BIN_EXE_stillframe"))
        .arg(folder.path())
        .output()
        .expect("sh is there");
    assert!(!output.status.success());
    let log = std::fs::read_to_string(folder.path().join("restore.log")).expect("a log");
    assert!(log.contains("there is no image"), "{log}");
    let complaint = log.lines().find(|line| line.starts_with("stillframe:"));
    assert_eq!(complaint, None, "{log}");
}

#[test]
fn the_log_does_not_lead_to_another_file() {
    let dir = tempfile::tempdir().unwrap();
    let victim = dir.path().join("victim");
    std::fs::write(&victim, "dear").unwrap();
    std::os::unix::fs::symlink(&victim, dir.path().join("restore.log")).unwrap();
    let (status, stderr) = outcome(dir.path(), &["restore", "--plan"]);
    assert_eq!(status, 6, "{stderr}");
    assert!(stderr.contains("it is a symbolic link"), "{stderr}");
    assert_eq!(std::fs::read(&victim).unwrap(), b"dear");
}

#[test]
fn verbosity_is_read_as_criu_reads_it() {
    let dir = tempfile::tempdir().unwrap();
    for words in [["check", "-verbosity=0"], ["check", "--verbosity=2x"]] {
        let words = [words[0], words[1], "--feature", "list"];
        assert_eq!(outcome(dir.path(), &words), (0, String::new()));
    }
}

#[test]
fn a_line_that_is_no_option_is_not_repeated() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("secret"), "root:$6$salt:1\n").unwrap();
    let (status, stderr) = outcome(dir.path(), &["dump", "-t", "1", "--config", "secret"]);
    assert_eq!(status, 2, "{stderr}");
    assert!(
        stderr.contains("(secret, line 1)") && !stderr.contains("salt"),
        "{stderr}"
    );
}

#[test]
fn a_copy_with_privileges_of_its_own_does_not_run() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::process::CommandExt as _;
    testkit::needs_root!();
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("stillframe");
    std::fs::copy(env!("CARGO_BIN_EXE_stillframe"), &copy).unwrap();
    for (path, mode) in [(dir.path(), 0o755), (&copy, 0o4755)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let run = |uid| {
        let mut command = Command::new(&copy);
        command.args(["check", "--feature", "list"]).uid(uid);
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    assert_eq!(run(0).0, Some(0));
    let (status, stderr) = run(65534);
    assert_eq!(status, Some(1), "{stderr}");
    assert!(
        stderr.contains("a copy with privileges of its own"),
        "{stderr}"
    );
}

#[test]
fn commands_without_a_tree_take_what_criu_takes() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("conf"), "tcp-established\nverbosity=4\n").unwrap();
    for command in ["dedup", "lazy-pages", "cpuinfo check"] {
        for option in [
            "--no-default-config",
            "--config=conf",
            "--verbosity=4",
            "-verbosity=0",
            "-v",
            "--pidfile=x",
            "--address=1.2.3.4",
            "--port=5",
            "--tcp-established",
        ] {
            let words = command
                .split(' ')
                .chain(["-D", "nothing", option, "-W", "."]);
            let (status, said) = outcome(dir.path(), &words.collect::<Vec<_>>());
            assert_eq!(status, 6, "{command} {option}: {said}");
        }
        let words = command.split(' ').chain(["--feature-of-none"]);
        assert_eq!(outcome(dir.path(), &words.collect::<Vec<_>>()).0, 2);
    }
    for option in ["-d", "--daemon", "--page-server"] {
        let (status, said) = outcome(dir.path(), &["lazy-pages", "-D", "nothing", option]);
        assert_eq!(status, 2, "{option}: {said}");
        assert!(
            said.contains("of criu(8) is not supported yet"),
            "{option}: {said}"
        );
    }
}

#[test]
fn verbosity_may_stand_last_on_every_command() {
    let dir = tempfile::tempdir().unwrap();
    for line in [
        "serve -D none --socket s",
        "vm save --qmp none -D saved",
        "vm pre-save --qmp none -D saved",
        "vm restore -D none",
        "dedup none",
        "lazy-pages -D none",
        "restore -D none",
    ] {
        for option in ["-v", "-vv", "--verbosity", "-v3"] {
            let words = line.split(' ').chain([option]).collect::<Vec<_>>();
            let (status, said) = outcome(dir.path(), &words);
            assert_ne!(status, 2, "{line} {option}: {said}");
            assert!(
                !said.contains("a value is required"),
                "{line} {option}: {said}"
            );
        }
    }
}

#[test]
fn help_has_the_words_that_stand_for_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let output = stillframe(dir.path(), &["vm", "restore", "--help"]);
    let help = text(&output.stdout);
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("called; {n} is the number of each"), "{help}");
    assert!(help.contains("[default: vm-{n}]"), "{help}");
    assert!(help.contains("has; {n} and {name} are"), "{help}");
}
