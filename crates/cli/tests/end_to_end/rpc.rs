//! criu's RPC protocol, spoken by a client that knows nothing of the program's own messages.
use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::io::Errno;
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with, socketpair,
};
use rustix::process::Signal;
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

const DUMP: u64 = 1;
const RESTORE: u64 = 2;
const CHECK: u64 = 3;
const PRE_DUMP: u64 = 4;
const PAGE_SERVER: u64 = 5;
const NOTIFY: u64 = 6;
const CPUINFO_DUMP: u64 = 7;
const CPUINFO_CHECK: u64 = 8;
const FEATURE_CHECK: u64 = 9;
const VERSION: u64 = 10;
const WAIT_PID: u64 = 11;
const SINGLE_PRE_DUMP: u64 = 13;

/// A message that is being written.
#[derive(Clone, Default)]
struct Writer(Vec<u8>);

impl Writer {
    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number.to_le_bytes()[0] | 0x80);
            number >>= 7;
        }
        self.0.push(number.to_le_bytes()[0]);
    }

    fn number(mut self, field: u64, number: u64) -> Self {
        self.varint(field << 3);
        self.varint(number);
        self
    }

    fn bytes(mut self, field: u64, bytes: impl AsRef<[u8]>) -> Self {
        self.varint(field << 3 | 2);
        self.varint(bytes.as_ref().len() as u64);
        self.0.extend_from_slice(bytes.as_ref());
        self
    }
}

/// The fields of a message that was received.
#[derive(Clone, Debug, Default, PartialEq)]
struct Message {
    numbers: Vec<(u64, u64)>,
    texts: Vec<(u64, Vec<u8>)>,
}

impl Message {
    fn read(mut bytes: &[u8]) -> Self {
        fn varint(bytes: &mut &[u8]) -> u64 {
            let mut number = 0;
            for shift in (0..).step_by(7) {
                let byte = bytes[0];
                *bytes = &bytes[1..];
                number |= u64::from(byte & 0x7f) << shift;
                if byte < 0x80 {
                    break;
                }
            }
            number
        }
        let mut message = Self::default();
        while !bytes.is_empty() {
            let key = varint(&mut bytes);
            let number = varint(&mut bytes);
            match key & 7 {
                0 => message.numbers.push((key >> 3, number)),
                2 => {
                    let (text, rest) = bytes.split_at(usize::try_from(number).expect("a length"));
                    message.texts.push((key >> 3, text.to_vec()));
                    bytes = rest;
                }
                other => panic!("wire type {other}"),
            }
        }
        message
    }

    fn number(&self, field: u64) -> Option<u64> {
        let mut all = self.numbers.iter();
        all.find(|(number, _)| *number == field)
            .map(|found| found.1)
    }

    fn inner(&self, field: u64) -> Option<Self> {
        let mut all = self.texts.iter();
        let found = all.find(|(number, _)| *number == field);
        found.map(|found| Self::read(&found.1))
    }

    fn text(&self, field: u64) -> String {
        let mut all = self.texts.iter();
        let found = all.find(|(number, _)| *number == field);
        let bytes = found.map(|found| found.1.clone()).unwrap_or_default();
        String::from_utf8(bytes).expect("text")
    }

    /// Insists on success, about which no error is told.
    #[track_caller]
    fn must(self, kind: u64) -> Self {
        assert_eq!(self.number(1), Some(kind), "{self:?}");
        assert_eq!(self.number(2), Some(1), "{}", self.text(9));
        assert_eq!((self.number(7), self.text(9)), (None, String::new()));
        self
    }

    /// Insists on a failure that is told with all of `words`.
    #[track_caller]
    fn must_fail(self, kind: u64, words: &[&str]) -> Self {
        assert_eq!(self.number(1), Some(kind), "{self:?}");
        assert_eq!(self.number(2), Some(0), "{self:?}");
        let text = self.text(9);
        for word in words {
            assert!(text.contains(word), "{word:?} is not in {text:?}");
        }
        self
    }
}

/// A client, and the process that serves it.
struct Client {
    socket: OwnedFd,
    server: Child,
    /// The stages that it was told of, with the pids.
    told: Vec<(String, Option<u64>)>,
}

impl Client {
    fn new(stillframe: &Stillframe) -> Self {
        Self::with_messages(stillframe, &[])
    }

    /// Starts the server when these messages wait for it already.
    fn with_messages(stillframe: &Stillframe, messages: &[&[u8]]) -> Self {
        let (socket, server) = pair();
        for message in messages {
            send(&socket, message, SendFlags::empty()).expect("it is sent");
        }
        let server = start(stillframe, server);
        Self {
            socket,
            server,
            told: Vec::new(),
        }
    }

    fn send(&self, message: &[u8]) {
        send(&self.socket, message, SendFlags::NOSIGNAL).expect("it is sent");
    }

    /// The next message; none at the end.
    fn receive(&self) -> Option<Message> {
        let mut bytes = vec![0; 1 << 20];
        let received = recv(&self.socket, &mut *bytes, RecvFlags::empty());
        let (_, length) = received.expect("a packet");
        (length > 0).then(|| Message::read(&bytes[..length]))
    }

    /// Asks, and agrees to all stages but the one that is refused; the answer.
    #[track_caller]
    fn ask_but(&mut self, request: &Writer, refused: &str) -> Message {
        self.send(&request.0);
        loop {
            let message = self.receive().expect("an answer");
            let Some(stage) = message.inner(5) else {
                return message;
            };
            assert_eq!(message.number(1), Some(NOTIFY));
            let name = stage.text(1);
            let agrees = Writer::default().number(1, NOTIFY);
            self.send(&agrees.number(3, u64::from(name != refused)).0);
            self.told.push((name, stage.number(2)));
        }
    }

    #[track_caller]
    fn ask(&mut self, request: &Writer) -> Message {
        self.ask_but(request, "")
    }

    fn told(&self) -> Vec<&str> {
        self.told.iter().map(|(name, _)| &**name).collect()
    }

    /// Hangs up and waits for the server's end.
    fn end(mut self) -> ExitStatus {
        drop(self.socket);
        self.server.wait().expect("it ends")
    }
}

fn pair() -> (OwnedFd, OwnedFd) {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    socketpair(family, kind, SocketFlags::CLOEXEC, None).expect("a pair of sockets")
}

/// Starts a server whose descriptor 9 is the socket. It stays in this session: other tests reap
/// those of others.
fn start(stillframe: &Stillframe, socket: OwnedFd) -> Child {
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" swrk 9 9<&0 </dev/null"]);
    shell.arg(stillframe.binary()).stdin(Stdio::from(socket));
    shell.spawn().expect("a shell starts")
}

fn request(kind: u64, options: &Writer) -> Writer {
    Writer::default().number(1, kind).bytes(2, &options.0)
}

/// A directory that the client has open.
struct Folder {
    path: PathBuf,
    open: File,
}

impl Folder {
    fn new(parent: &Path, name: &str) -> Self {
        let path = parent.join(name);
        fs::create_dir(&path).expect("a folder");
        let open = File::open(&path).expect("it is there");
        Self { path, open }
    }

    fn number(&self) -> u64 {
        u64::try_from(self.open.as_raw_fd()).expect("it is open")
    }

    fn has(&self, name: &str) -> bool {
        self.path.join(name).exists()
    }

    fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path.join(name)).expect("it is there")
    }
}

/// A client's directories, with a subject that counts.
struct Scene {
    stillframe: Stillframe,
    images: Folder,
    work: Folder,
    _folder: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self {
            stillframe: stillframe(),
            images: Folder::new(folder.path(), "images"),
            work: Folder::new(folder.path(), "work"),
            _folder: folder,
        }
    }

    /// The options of a request with notifications.
    fn options(&self, log: &str) -> Writer {
        let options = Writer::default().number(1, self.images.number());
        let options = options.number(17, self.work.number()).number(9, 4);
        options.bytes(10, log).number(12, 1)
    }

    fn dump(&self, pid: u32) -> Writer {
        let options = self.options("dump.log").number(2, pid.into());
        options.bytes(51, "/nowhere/runc.conf")
    }

    fn client(&self) -> Client {
        Client::new(&self.stillframe)
    }
}

const KILLS: [&str; 4] = ["pre-dump", "network-lock", "query-ext-files", "post-dump"];

#[track_caller]
fn assert_counts(subject: &Subject) {
    let before = subject.ask_number("count");
    let counts = || subject.ask_number("count") > before;
    wait_until("the subject to count", SOON, counts);
}

#[test]
fn versions_and_features_are_told() {
    let stillframe = stillframe();
    // As go-criu asks, and as libcriu does.
    let minus_one = Writer::default().number(1, u64::MAX);
    for asked in [
        Writer::default().number(1, VERSION),
        request(VERSION, &minus_one),
    ] {
        let mut client = Client::new(&stillframe);
        let version = client
            .ask(&asked)
            .must(VERSION)
            .inner(10)
            .expect("a version");
        assert_eq!(version.numbers, [(1, 4), (2, 2)]);
        assert!(client.end().success());
    }
    let mut client = Client::new(&stillframe);
    let asked = Writer::default().number(1, FEATURE_CHECK).number(4, 1);
    let features = Writer::default().number(1, 1).number(2, 0);
    let told = client.ask(&asked.clone().bytes(5, &features.0));
    let told = told.must(FEATURE_CHECK).inner(8).expect("features");
    let has = |name: &str| {
        let mut command = stillframe.command(&["check", "--feature", name]);
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        u64::from(command.status().expect("it runs").success())
    };
    assert_eq!(told.numbers, [(1, has("mem_dirty_track")), (2, 0), (3, 0)]);
    // The connection was to be kept.
    client
        .ask(&asked)
        .must_fail(FEATURE_CHECK, &["no features"]);
    assert!(!client.end().success());
}

#[test]
fn the_host_is_checked() {
    needs_root!();
    let scene = Scene::new();
    let mut client = scene.client();
    let kept = Writer::default().number(1, CHECK).number(4, 1);
    client.ask(&kept).must(CHECK);
    let cpuinfo = |kind| request(kind, &scene.options("cpu.log")).number(4, 1);
    let missing = client.ask(&cpuinfo(CPUINFO_DUMP)).must(CPUINFO_DUMP);
    assert_eq!(missing.texts, []);
    client.ask(&cpuinfo(CPUINFO_CHECK)).must(CPUINFO_CHECK);
    assert!(client.end().success());
}

#[test]
fn a_program_is_dumped_and_brought_back() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let pid = subject.pid();
    let before = subject.ask_number("count");
    // runc leaves a file there, and podman makes the log.
    fs::write(scene.images.path.join("descriptors.json"), "[]").expect("written");
    fs::write(scene.work.path.join("dump.log"), "old").expect("written");
    let mut client = scene.client();
    let answer = client.ask(&request(DUMP, &scene.dump(pid))).must(DUMP);
    assert_eq!(answer.inner(3).expect("of a dump").numbers, [(1, 0)]);
    assert_eq!(client.told(), KILLS);
    assert!(client.end().success());
    tree::wait_free(&[pid]);
    assert_eq!(scene.images.read("descriptors.json"), "[]");
    let inventory = fs::read(scene.images.path.join("inventory.img")).expect("it is there");
    assert_eq!(inventory[..4], 0x5831_3116_u32.to_le_bytes());
    let facts = fs::read(scene.work.path.join("stats-dump")).expect("it is there");
    assert_eq!(facts[..4], 0x5510_5940_u32.to_le_bytes());
    let facts = Message::read(&facts[12..]).inner(1).expect("of a dump");
    let written = facts.number(7).expect("pages");
    assert!(facts.number(2) > Some(0) && written > 0, "{facts:?}");
    assert!(scene.work.read("dump.log").contains("is whole"));

    let mut client = scene.client();
    let options = scene.options("restore.log");
    let answer = client.ask(&request(RESTORE, &options)).must(RESTORE);
    let root = Some(u64::from(pid));
    assert_eq!(answer.inner(4).expect("of a restore").number(1), root);
    let stages = [
        ("pre-restore", None),
        ("setup-namespaces", root),
        ("post-setup-namespaces", None),
        ("post-restore", root),
        ("network-unlock", None),
        ("pre-resume", None),
        ("post-resume", None),
    ];
    let stages = stages.map(|(name, pid)| (name.to_owned(), pid));
    assert_eq!(client.told, stages);
    assert!(client.end().success());
    assert!(subject.ask_number("count") >= before);
    assert_counts(&subject);
    let facts = fs::read(scene.work.path.join("stats-restore")).expect("it is there");
    let facts = Message::read(&facts[12..]).inner(2).expect("of a restore");
    assert!(facts.number(4) >= facts.number(3) && facts.number(3) > Some(0));
}

#[test]
fn a_program_runs_on_and_its_pid_is_taken() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let mut client = scene.client();
    let options = scene.dump(subject.pid()).number(3, 1);
    client.ask(&request(DUMP, &options)).must(DUMP);
    assert_eq!(client.told(), [&KILLS[..], &["network-unlock"]].concat());
    assert!(client.end().success());
    assert_counts(&subject);
    let mut client = scene.client();
    let answer = client.ask(&request(RESTORE, &scene.options("restore.log")));
    let answer = answer.must_fail(RESTORE, &[&subject.pid().to_string(), "is taken"]);
    assert_eq!(answer.number(7), Some(17), "EEXIST");
    assert!(scene.work.read("restore.log").contains("Error ("));
    assert!(!client.end().success());
    assert_counts(&subject);
}

#[test]
fn a_refused_stage_stops_the_work() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    for (refused, told) in [
        (KILLS[0], &KILLS[..1]),
        (KILLS[1], &["pre-dump", "network-lock", "network-unlock"]),
        (KILLS[3], &[&KILLS[..], &["network-unlock"]].concat()),
    ] {
        let mut client = scene.client();
        let asked = request(DUMP, &scene.dump(subject.pid()));
        let answer = client.ask_but(&asked, refused);
        answer.must_fail(DUMP, &[refused, "the client refuses"]);
        assert_eq!(client.told(), told);
        assert!(!client.end().success());
        assert!(!scene.images.has("inventory.img"), "{refused}");
        assert_counts(&subject);
    }
    let pid = subject.pid();
    let mut client = scene.client();
    client.ask(&request(DUMP, &scene.dump(pid))).must(DUMP);
    tree::wait_free(&[pid]);
    let restore = request(RESTORE, &scene.options("restore.log"));
    for refused in ["pre-restore", "post-restore", "pre-resume"] {
        let mut client = scene.client();
        let answer = client.ask_but(&restore, refused);
        answer.must_fail(RESTORE, &[refused, "the client refuses"]);
        assert!(!client.end().success());
        tree::wait_free(&[pid]);
    }
    let mut client = scene.client();
    client.ask(&restore).must(RESTORE);
    assert_counts(&subject);
}

#[test]
fn a_client_that_hangs_up_stops_a_dump() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let request = request(DUMP, &scene.dump(subject.pid()));
    for stages in 0..KILLS.len() {
        let client = scene.client();
        client.send(&request.0);
        for stage in KILLS.iter().take(stages) {
            let told = client.receive().expect("a stage");
            assert_eq!(told.inner(5).expect("a stage").text(1), *stage);
            client.send(&Writer::default().number(1, NOTIFY).number(3, 1).0);
        }
        client.receive().expect("another stage");
        assert!(!client.end().success(), "after {stages} stages");
        assert!(!scene.images.has("inventory.img"));
        assert!(scene.work.read("dump.log").contains("Error ("));
        assert_counts(&subject);
    }
    // It has gone before the work begins, and wants to hear nothing.
    let quiet = Writer::default().number(1, scene.images.number());
    let quiet = quiet.number(2, subject.pid().into()).bytes(10, "quiet.log");
    let quiet = Writer::default().number(1, DUMP).bytes(2, &quiet.0);
    let client = Client::with_messages(&scene.stillframe, &[&quiet.0]);
    assert!(!client.end().success());
    let log = scene.images.read("quiet.log");
    assert!(
        log.contains("Error (") && log.contains("the client is gone"),
        "{log}"
    );
    assert!(!scene.images.has("inventory.img"));
    assert_counts(&subject);
}

#[test]
fn other_answers_stop_a_dump() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let agrees = Writer::default().number(1, NOTIFY);
    for (answer, words) in [
        (agrees.clone(), "the client refuses"),
        (agrees.number(3, 1).number(99, 1), "field 99 is not known"),
        (
            Writer::default().number(1, VERSION).number(3, 1),
            "another request",
        ),
        (Writer(b"\xff\xff".to_vec()), "malformed"),
    ] {
        let mut client = scene.client();
        client.send(&request(DUMP, &scene.dump(subject.pid())).0);
        for stage in &KILLS[..2] {
            let told = client.receive().expect("a stage");
            assert_eq!(told.inner(5).expect("a stage").text(1), *stage);
            let agrees = Writer::default().number(1, NOTIFY).number(3, 1);
            let answer = if *stage == KILLS[1] { &answer } else { &agrees };
            client.send(&answer.0);
        }
        let unlock = client.receive().expect("a stage");
        assert_eq!(unlock.inner(5).expect("a stage").text(1), "network-unlock");
        let agrees = Writer::default().number(1, NOTIFY).number(3, 1);
        let refused = client.ask(&agrees);
        refused.must_fail(DUMP, &[KILLS[1], words]);
        assert!(!client.end().success());
        assert_counts(&subject);
    }
}

#[test]
fn a_tree_goes_on_when_the_server_is_killed() {
    needs_root!();
    needs_program!("unshare");
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let (_program, inside) = start_in_namespaces(&scene.work.path);
    for pid in [subject.pid(), inside] {
        let mut client = scene.client();
        client.send(&request(DUMP, &scene.dump(pid)).0);
        for stage in &KILLS[..2] {
            let told = client.receive().expect("a stage");
            assert_eq!(told.inner(5).expect("a stage").text(1), *stage);
            if *stage == KILLS[0] {
                client.send(&Writer::default().number(1, NOTIFY).number(3, 1).0);
            }
        }
        let status = || fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
        assert!(!status().contains("TracerPid:\t0\n"), "it is stopped");
        client.server.kill().expect("it runs");
        let is_free = || status().contains("TracerPid:\t0\n");
        wait_until("the tracer to be gone", SOON, is_free);
        assert!(tree::is_alive(pid) && !scene.images.has("inventory.img"));
        assert!(!client.end().success());
        // The copy of the server keeps its namespace from ending until it is reaped.
        tree::reap_orphans();
    }
    assert_counts(&subject);
    wait_until("the shell to wait", SOON, || tree::is_waiting(inside));
}

#[test]
fn nonsense_is_refused() {
    let stillframe = stillframe();
    let long = vec![0x0a; (1 << 20) + 1];
    for (message, words) in [
        (&b"\xff\xff\xff\xff"[..], "malformed"),
        (b"GET / HTTP/1.1\r\n\r\n", "malformed"),
        (&[8, 99], "request 99 is not known"),
        (&[8, 0], "EMPTY is no request"),
        (&[0x18, 1], "EMPTY is no request"),
        (&[8, 10, 0xa0, 6, 1], "criu_req: field 100 is not known"),
        (&long, "is too long"),
    ] {
        let (socket, server) = pair();
        if message.len() == long.len() {
            needs_root!();
            set_socket_send_buffer_size_force(&socket, 8 << 20).expect("root may");
        }
        send(&socket, message, SendFlags::empty()).expect("it is sent");
        let client = Client {
            server: start(&stillframe, server),
            socket,
            told: Vec::new(),
        };
        let answer = client.receive().expect("an answer").must_fail(0, &[words]);
        assert_eq!(answer.number(7), Some(56), "EBADRQC");
        assert!(!client.end().success());
    }
    // Nothing at all, and an answer to nothing.
    assert!(!Client::new(&stillframe).end().success());
    let mut client = Client::new(&stillframe);
    let answer = Writer::default().number(1, NOTIFY).number(3, 1);
    client
        .ask(&answer)
        .must_fail(NOTIFY, &["NOTIFY is no request"]);
}

#[test]
fn what_is_not_supported_is_refused_by_name() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let dump = || scene.dump(subject.pid());
    let port = Writer::default().number(2, 1234);
    for (options, words) in [
        (dump().bytes(11, &port.0), "--page-server"),
        (dump().number(48, 1), "--lazy-pages"),
        (dump().bytes(31, "/x"), "--skip-mnt"),
        (dump().number(49, 5), "status_fd: 5"),
        (dump().bytes(22, "sh"), "exec_cmd: \"sh\""),
        (dump().number(38, 0x2000_0000), "empty_ns: 0x20000000"),
        (dump().number(34, 7), "manage_cgroups_mode: 7"),
        (dump().bytes(10, "../x"), "log_file"),
        (dump().bytes(37, "net[4:x"), "--external"),
        (dump().number(99, 1), "criu_opts: field 99"),
        (scene.options("dump.log"), "pid"),
        (Writer::default().number(2, 5), "images_dir_fd"),
        (
            dump().number(1, 1_000_000),
            "images_dir_fd: descriptor 1000000",
        ),
    ] {
        let mut client = scene.client();
        let answer = client.ask(&request(DUMP, &options));
        let kind = if words.contains("field") { 0 } else { DUMP };
        answer.must_fail(kind, &[words]);
        assert_eq!(client.told(), Vec::<&str>::new(), "{words}");
        assert!(!client.end().success());
    }
    for kind in [PAGE_SERVER, 12] {
        let mut client = scene.client();
        let answer = client.ask(&request(kind, &dump()));
        answer.must_fail(kind, &["PAGE_SERVER", "is not supported"]);
    }
    assert_counts(&subject);
    let gone = {
        let program = Program::new("true").spawn();
        program.pid()
    };
    let mut client = scene.client();
    let answer = client.ask(&request(DUMP, &scene.dump(gone)));
    let answer = answer.must_fail(DUMP, &[&gone.to_string()]);
    assert_eq!(answer.number(7), Some(3), "ESRCH");
    assert!(scene.work.read("dump.log").contains("Error ("));
}

#[test]
fn a_frozen_group_is_refused_by_name() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let group = scene.work.path.join("group");
    fs::create_dir(&group).expect("a folder");
    let options = scene.dump(subject.pid());
    let options = options.bytes(44, group.to_str().expect("a plain path"));
    let options = options.number(3, 1);
    for (file, text) in [
        ("cgroup.events", "populated 1\nfrozen 1\n"),
        ("freezer.state", "FROZEN\n"),
    ] {
        let path = group.join(file);
        fs::write(&path, text).expect("written");
        let mut client = scene.client();
        let answer = client.ask(&request(DUMP, &options));
        answer.must_fail(DUMP, &["the control group", "is frozen"]);
        assert_eq!(client.told(), Vec::<&str>::new());
        assert!(scene.work.read("dump.log").contains("is frozen"));
        fs::remove_file(path).expect("it is there");
    }
    fs::write(group.join("cgroup.events"), "populated 1\nfrozen 0\n").expect("written");
    let mut client = scene.client();
    client.ask(&request(DUMP, &options)).must(DUMP);
    assert_counts(&subject);
}

#[test]
fn rounds_of_memory_and_a_dump_go_over_one_connection() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let pid = subject.pid();
    let folder = scene.work.path.clone();
    let rounds = ["first", "second", "last"].map(|name| Folder::new(&folder, name));
    let mut client = scene.client();
    let mut parent = Writer::default();
    for (index, round) in rounds.iter().enumerate() {
        let options = parent.clone().number(1, round.number());
        let options = options.number(2, pid.into()).bytes(10, "dump.log");
        let kind = if index < 2 { PRE_DUMP } else { DUMP };
        client.ask(&request(kind, &options)).must(kind);
        assert!(round.has("inventory.img") && round.has("dump.log"));
        let facts = fs::read(round.path.join("stats-dump")).expect("it is there");
        let facts = Message::read(&facts[12..]).inner(1).expect("of a dump");
        assert!(facts.number(5) > Some(0), "{facts:?}");
        let name = round.path.file_name().expect("a name").to_str();
        let path = format!("../{}", name.expect("a plain name"));
        parent = Writer::default().bytes(14, path);
    }
    assert!(rounds[2].path.join("parent").is_dir());
    assert!(client.end().success());
    tree::wait_free(&[pid]);
    let mut client = scene.client();
    let options = Writer::default().number(1, rounds[2].number());
    client.ask(&request(RESTORE, &options)).must(RESTORE);
    assert_counts(&subject);
    let mut client = scene.client();
    let options = scene.dump(pid);
    let answer = client.ask(&request(SINGLE_PRE_DUMP, &options));
    answer.must(SINGLE_PRE_DUMP);
    assert_eq!(client.receive(), None, "the connection is not kept");
}

#[test]
fn a_restored_root_is_waited_for() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let pid = subject.pid();
    let mut client = scene.client();
    client.ask(&request(DUMP, &scene.dump(pid))).must(DUMP);
    tree::wait_free(&[pid]);
    let mut client = scene.client();
    let restore = request(RESTORE, &scene.options("restore.log"));
    client.ask(&restore.number(4, 1)).must(RESTORE);
    assert!(tree::signal(pid, Signal::KILL));
    let wait = Writer::default().number(1, WAIT_PID).number(6, pid.into());
    let answer = client.ask(&wait.number(4, 1)).must(WAIT_PID);
    assert_eq!(answer.number(11), Some(9));
    let wait = Writer::default().number(1, WAIT_PID).number(6, pid.into());
    let answer = client.ask(&wait);
    let answer = answer.must_fail(WAIT_PID, &["cannot wait for pid"]);
    assert_eq!(answer.number(7), Some(10), "ECHILD");
}

#[test]
fn a_restored_root_becomes_a_child_of_the_client() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let pid = subject.pid();
    let mut client = scene.client();
    client.ask(&request(DUMP, &scene.dump(pid))).must(DUMP);
    tree::wait_free(&[pid]);
    let mut client = scene.client();
    let options = scene.options("restore.log").number(26, 1);
    client.ask(&request(RESTORE, &options)).must(RESTORE);
    // The server may live yet, and would be its parent otherwise.
    assert_eq!(tree::parent(pid), Some(std::process::id()));
    assert!(client.end().success());
    assert_counts(&subject);
}

#[test]
fn a_pipe_of_the_client_is_handed_back() {
    needs_root!();
    let scene = Scene::new();
    let text = "while :; do echo tick; sleep 0.02; done";
    let mut ticker = Command::new("setsid");
    ticker.args(["sh", "-c", text]);
    ticker.stdin(Stdio::null()).stderr(Stdio::null());
    let mut ticker = ticker
        .stdout(Stdio::piped())
        .spawn()
        .expect("a shell starts");
    let pid = ticker.id();
    let mut read = ticker.stdout.take().expect("a pipe");
    let mut tick = [0; 5];
    read.read_exact(&mut tick).expect("it runs");
    let inode = fs::metadata(format!("/proc/self/fd/{}", read.as_raw_fd()));
    let inode = inode.expect("it is open").ino();
    let mut client = scene.client();
    client.ask(&request(DUMP, &scene.dump(pid))).must(DUMP);
    tree::wait_free(&[pid]);
    // It is reaped by that.
    assert!(ticker.wait().is_err());
    read.read_to_end(&mut Vec::new()).expect("the end");
    let mut client = scene.client();
    let answer = client.ask(&request(RESTORE, &scene.options("restore.log")));
    answer.must_fail(RESTORE, &[&inode.to_string()]);
    // The number is the server's: its socket is 9.
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let (socket, server) = pair();
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$0\" swrk 9 9<&0 8>&1 </dev/null >/dev/null"]);
    shell.arg(scene.stillframe.binary());
    shell.stdin(Stdio::from(server)).stdout(Stdio::from(writer));
    let server = shell.spawn().expect("a shell starts");
    drop(shell);
    let mut client = Client {
        socket,
        server,
        told: Vec::new(),
    };
    let inherited = Writer::default().bytes(1, format!("pipe:[{inode}]"));
    let options = scene
        .options("restore.log")
        .bytes(27, inherited.number(2, 8).0);
    client.ask(&request(RESTORE, &options)).must(RESTORE);
    assert!(client.end().success());
    let mut reader = reader;
    reader.read_exact(&mut tick).expect("it runs");
    assert_eq!(&tick, b"tick\n");
    tree::kill(&tree::members(pid));
    reader
        .read_to_end(&mut Vec::new())
        .expect("nobody else has it");
}

#[test]
fn a_configuration_file_overrides_the_request() {
    needs_root!();
    let scene = Scene::new();
    let subject = Subject::start("busy", &[]);
    let file = scene.work.path.join("runc.conf");
    fs::write(&file, "leave-running\nlog-file other.log\n").expect("written");
    let options = scene.options("dump.log").number(2, subject.pid().into());
    let options = options.bytes(51, file.to_str().expect("a plain path"));
    let mut client = scene.client();
    client.ask(&request(DUMP, &options)).must(DUMP);
    assert!(client.told().contains(&"network-unlock"));
    assert!(scene.work.has("other.log") && !scene.work.has("dump.log"));
    assert_counts(&subject);
    fs::write(&file, "skip-mnt /x\n").expect("written");
    let mut client = scene.client();
    let answer = client.ask(&request(DUMP, &options));
    answer.must_fail(DUMP, &["--skip-mnt", "runc.conf, line 1"]);
}

/// A shell in pid and uts namespaces of its own; its number outside.
fn start_in_namespaces(folder: &Path) -> (Spawned, u32) {
    let ready = folder.join("ready");
    let text = "hostname resident; echo > \"$0\"; while :; do sleep 1000; done";
    let program = Program::new("unshare")
        .args(["--pid", "--uts", "--fork", "--mount-proc", "setsid", "sh"])
        .args(["-c", text])
        .arg(&ready)
        .spawn();
    program.wait_file(&ready);
    let child = || tree::children(program.pid()).first().copied();
    let root = wait_for("the first process", SOON, child);
    (program, root)
}

#[test]
fn a_tree_in_namespaces_is_dumped_and_brought_back() {
    needs_root!();
    needs_program!("unshare");
    let scene = Scene::new();
    let (program, root) = start_in_namespaces(&scene.work.path);
    // What the copy in the namespaces says is told outside.
    let mut client = scene.client();
    let asked = request(DUMP, &scene.dump(root));
    let answer = client.ask_but(&asked, "post-dump");
    answer.must_fail(DUMP, &["post-dump: the client refuses"]);
    assert!(tree::is_alive(root) && !scene.images.has("inventory.img"));
    let mut client = scene.client();
    client.ask(&asked).must(DUMP);
    assert_eq!(client.told(), KILLS);
    assert!(client.end().success());
    wait_until("the root to end", SOON, || !tree::is_alive(root));
    drop(program);
    let facts = fs::read(scene.work.path.join("stats-dump")).expect("it is there");
    let facts = Message::read(&facts[12..]).inner(1).expect("of a dump");
    assert!(facts.number(7) > Some(0), "{facts:?}");
    let mut client = scene.client();
    let answer = client.ask(&request(RESTORE, &scene.options("restore.log")));
    let answer = answer.must(RESTORE).inner(4).expect("of a restore");
    let restored = u32::try_from(answer.number(1).expect("a pid")).expect("a pid");
    // The first one is a process that is in the namespaces before the root is there.
    let told = client.told.iter().filter_map(|(_, pid)| *pid);
    let told = told.collect::<Vec<_>>();
    assert_eq!((told.len(), told[1]), (2, u64::from(restored)));
    // Nothing that stays has the connection.
    assert_eq!(client.receive(), None);
    let name = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/uts")).expect("a namespace");
    assert_ne!(name(restored), name(std::process::id()));
    tree::kill(&[restored]);
    assert!(client.end().success());
}

#[test]
fn a_service_serves_clients_that_connect() {
    needs_root!();
    let scene = Scene::new();
    let folder = &scene.work.path;
    let command = |words: &[&str]| {
        let mut command = scene.stillframe.command(&["service", "-W"]);
        command
            .arg(folder)
            .args(["--address", "socket"])
            .args(words);
        command
    };
    let words = ["--daemon", "--pidfile", "pid", "-o", "service.log", "-v4"];
    let started = command(&words).status().expect("it runs");
    assert!(started.success(), "{started}");
    let read = || {
        let text = fs::read_to_string(folder.join("pid")).ok()?;
        text.parse::<u32>().ok()
    };
    let service = wait_for("the pidfile", SOON, read);
    let second = command(&[])
        .stderr(Stdio::piped())
        .spawn()
        .expect("it runs");
    let second = second.wait_with_output().expect("it ends");
    assert!(!second.status.success());
    let said = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(said.contains("Address already in use"), "{said}");

    let subject = Subject::start("busy", &[]);
    let address = SocketAddrUnix::new(folder.join("socket")).expect("a short path");
    let connected = || {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        connect(&socket, &address).expect("somebody listens");
        Client {
            socket,
            server: Command::new("true").spawn().expect("it runs"),
            told: Vec::new(),
        }
    };
    let mut idle = connected();
    let mut client = connected();
    client
        .ask(&request(DUMP, &scene.dump(subject.pid()).number(3, 1)))
        .must(DUMP);
    assert_eq!(client.receive(), None, "its process has ended");
    idle.ask(&Writer::default().number(1, VERSION))
        .must(VERSION);
    assert_counts(&subject);
    tree::signal(service, Signal::KILL);
    wait_until("the service to end", SOON, || !tree::is_alive(service));
    let mut log = String::new();
    let opened = File::open(folder.join("service.log"));
    opened
        .expect("its log")
        .read_to_string(&mut log)
        .expect("text");
    assert!(log.contains("serves a client"), "{log}");
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
    assert_eq!(connect(&socket, &address), Err(Errno::CONNREFUSED));
}
