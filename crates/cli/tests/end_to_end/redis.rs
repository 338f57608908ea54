//! redis-server with 200,000 keys: a client of the test's over loopback TCP, and a client within
//! the tree over a unix socket, whose server end is in the tree too.
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

use testkit::program::{Program, Spawned, free_port};
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::{Facts, assert_restored, stillframe};

pub const KEYS: usize = 200_000;

/// A connection that speaks redis's protocol.
pub struct Client {
    stream: BufReader<TcpStream>,
}

impl Client {
    pub fn connect(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).expect("redis listens");
        stream
            .set_read_timeout(Some(SOON))
            .expect("a limit above zero");
        Self {
            stream: BufReader::new(stream),
        }
    }

    /// Sends a command and returns its answer, without the type's mark.
    #[track_caller]
    pub fn ask(&mut self, command: &[&str]) -> String {
        self.send(command);
        self.receive()
    }

    #[track_caller]
    pub fn send(&mut self, command: &[&str]) {
        let mut text = format!("*{}\r\n", command.len());
        for word in command {
            text += &format!("${}\r\n{word}\r\n", word.len());
        }
        self.stream
            .get_mut()
            .write_all(text.as_bytes())
            .expect("the connection lives");
    }

    #[track_caller]
    pub fn receive(&mut self) -> String {
        let mut line = String::new();
        self.stream
            .read_line(&mut line)
            .expect("the connection lives");
        let line = line.trim_end();
        assert!(!line.is_empty(), "the connection was closed");
        let (mark, rest) = line.split_at(1);
        if mark != "$" {
            return rest.to_owned();
        }
        let bytes: usize = rest.parse().expect("a bulk has a length");
        let mut bulk = vec![0; bytes + 2];
        std::io::Read::read_exact(&mut self.stream, &mut bulk).expect("the connection lives");
        bulk.truncate(bytes);
        String::from_utf8(bulk).expect("redis answers text here")
    }

    /// A number out of INFO.
    #[track_caller]
    pub fn info(&mut self, name: &str) -> u64 {
        let info = self.ask(&["INFO"]);
        let prefix = format!("{name}:");
        let line = info.lines().find_map(|line| line.strip_prefix(&prefix));
        line.unwrap_or_else(|| panic!("no {name} in {info}"))
            .parse()
            .expect("a number")
    }

    pub fn fill(&mut self) {
        // By a script of the server's own: one call instead of 200,000.
        let script = format!(
            "for i=1,{KEYS} do redis.call('SET', 'key:'..i, 'value '..i*7) end return 'OK'"
        );
        assert_eq!(self.ask(&["EVAL", &script, "0"]), "OK");
    }
}

/// A server in a folder of its own at a port of its own, and a client of it.
pub fn start() -> (tempfile::TempDir, u16, Spawned, Client) {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let port = free_port();
    let server = Program::new("redis-server")
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1"])
        .args(["--save", "", "--appendonly", "no", "--protected-mode", "no"])
        .arg("--unixsocket")
        .arg(folder.path().join("redis.sock"))
        .folder(folder.path())
        .output(&folder.path().join("log"))
        .spawn();
    server.wait_port(port);
    let client = Client::connect(port);
    (folder, port, server, client)
}

#[test]
fn a_filled_redis_keeps_its_client_and_goes_on() {
    needs_root!();
    needs_program!("redis-server");
    let stillframe = stillframe();
    let (_folder, port, server, mut client) = start();
    client.fill();
    let run_id = client.ask(&["INFO", "server"]);
    let run_id = run_id.lines().find(|line| line.starts_with("run_id:"));
    let run_id = run_id.expect("a server has a run id").to_owned();
    let own_name = client.ask(&["CLIENT", "ID"]);
    let commands = client.info("total_commands_processed");
    let facts = Facts::moving(server.pid());
    for round in 1..=2 {
        stillframe.clear();
        stillframe.dump(server.pid(), &["--tcp-established"]).must();
        // Asked while nobody is there: the answer comes from the restored server.
        client.send(&["GET", "key:77777"]);
        stillframe.restore(&["--tcp-established"]).must();
        assert_eq!(client.receive(), "value 544439");
        assert_eq!(client.ask(&["DBSIZE"]), (KEYS + round - 1).to_string());
        assert_eq!(client.ask(&["CLIENT", "ID"]), own_name);
        assert_eq!(client.ask(&["SET", &format!("new:{round}"), "x"]), "OK");
    }
    for number in (1..=KEYS).step_by(997) {
        let value = client.ask(&["GET", &format!("key:{number}")]);
        assert_eq!(value, format!("value {}", number * 7));
    }
    assert!(client.ask(&["INFO", "server"]).contains(&run_id));
    assert!(client.info("total_commands_processed") > commands);
    assert_eq!(client.info("process_id"), u64::from(server.pid()));
    assert_eq!(client.info("connected_clients"), 1);
    let mut second = Client::connect(port);
    assert_eq!(second.ask(&["GET", "new:2"]), "x");
    let after = Facts::moving(server.pid()).without(&["fd ", "map "]);
    let before = facts.without(&["fd ", "map "]);
    assert_restored(&stillframe, &before, &after, "redis");
}

#[test]
fn a_redis_left_running_keeps_its_client() {
    needs_root!();
    needs_program!("redis-server");
    let stillframe = stillframe();
    let (_folder, _port, server, mut client) = start();
    client.fill();
    for round in 0..3 {
        stillframe.clear();
        client.send(&["SET", "round", &round.to_string()]);
        let options = ["--tcp-established", "--leave-running"];
        stillframe.dump(server.pid(), &options).must();
        assert_eq!(client.receive(), "OK");
        assert_eq!(client.ask(&["GET", "round"]), round.to_string());
    }
    assert_eq!(client.ask(&["DBSIZE"]), (KEYS + 1).to_string());
}

/// Connects to the server at `path`, over a unix socket, and defines `ask`.
pub(crate) const CLIENT: &str = r#"
link = socket.socket(socket.AF_UNIX)
while True:
    try:
        link.connect(path)
        break
    except OSError:
        time.sleep(0.01)
stream = link.makefile("rwb")
def ask(*words):
    stream.write(b"*%d\r\n" % len(words))
    for word in words:
        stream.write(b"$%d\r\n%s\r\n" % (len(word), word))
    stream.flush()
    line = stream.readline().strip()
    if line[:1] == b"$":
        return stream.read(int(line[1:]) + 2)[:-2]
    return line[1:]
"#;

/// Starts a server and a client of it that counts by a key, over a unix socket, for ever; in one
/// tree.
const WITH_CLIENT: [&str; 3] = [SERVER, CLIENT, COUNTING];
const SERVER: &str = r#"
import socket, subprocess, sys, time, os
path = sys.argv[1]
server = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", path, "--save", "",
    "--appendonly", "no"], stdin=subprocess.DEVNULL)
"#;
const COUNTING: &str = r#"
ask(b"EVAL", b"for i=1,200000 do redis.call('SET', 'key:'..i, 'value '..i*7) end return 1", b"0")
identity = ask(b"CLIENT", b"ID")
count = 0
while True:
    count += 1
    assert int(ask(b"INCR", b"count")) == count, "a count was lost"
    assert ask(b"GET", b"key:%d" % (count % 200000 + 1)) == b"value %d" % ((count % 200000 + 1) * 7)
    assert ask(b"CLIENT", b"ID") == identity, "another connection"
    with open(path + ".draft", "w") as report:
        report.write(str(count))
    os.rename(path + ".draft", path + ".count")
    time.sleep(0.001)
"#;

#[test]
fn a_client_in_the_tree_keeps_its_unix_socket() {
    needs_root!();
    needs_program!("redis-server");
    needs_program!("python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let socket = folder.path().join("redis.sock");
    let report = folder.path().join("redis.sock.count");
    let tree = Program::new("/usr/bin/python3")
        .args(["-c", &WITH_CLIENT.concat()])
        .arg(&socket)
        .folder(folder.path())
        .output(&folder.path().join("log"))
        .spawn();
    tree.wait_file(&report);
    let count = || -> u64 {
        let text = std::fs::read_to_string(&report).expect("the report is always there");
        text.parse().expect("a number")
    };
    for _ in 0..3 {
        let before = count();
        stillframe.cycle(1, &tree, &[]);
        wait_until("the client to count", SOON, || {
            assert!(
                tree.is_alive(),
                "{:?}",
                std::fs::read_to_string(folder.path().join("log"))
            );
            count() > before + 20
        });
    }
    assert_eq!(tree.tree().len(), 2);
}

#[test]
fn a_client_outside_is_refused_or_cut_off_as_asked() {
    needs_root!();
    needs_program!("redis-server");
    let stillframe = stillframe();
    let (_folder, port, server, mut client) = start();
    assert_eq!(client.ask(&["SET", "a", "b"]), "OK");
    // Without an option the connection would be lost silently: refused, and nothing changed.
    stillframe.dump(server.pid(), &[]).must_fail();
    assert_eq!(client.ask(&["GET", "a"]), "b");
    // With this one it is closed at the restore.
    stillframe.clear();
    stillframe.dump(server.pid(), &["--tcp-close"]).must();
    stillframe.restore(&["--tcp-close"]).must();
    let mut second = Client::connect(port);
    assert_eq!(second.ask(&["GET", "a"]), "b");
    assert_eq!(second.ask(&["DBSIZE"]), "1");
}

#[test]
fn a_subject_is_no_client_of_redis() {
    // A tree without a TCP connection does not need the option, and may have it.
    needs_root!();
    let stillframe = stillframe();
    let subject = Subject::start("busy", &[]);
    stillframe.cycle(1, &subject, &["--tcp-established"]);
    assert_eq!(subject.ask("check"), "right");
}

/// Puts a load of eight connections on a server whose only client so far is `client`. They are all
/// accepted when this returns, and last: a connection that waits to be accepted cannot be saved.
#[track_caller]
pub fn load(port: u16, output: &std::path::Path, client: &mut Client) -> Spawned {
    let load = Program::new("redis-benchmark")
        .args(["-h", "127.0.0.1", "-p", &port.to_string(), "-q"])
        .args(["-n", "1000000000", "-c", "8", "-r", "5000", "-d", "512"])
        .args(["-t", "set"])
        .output(output)
        .spawn();
    wait_until("the load to be connected", SOON, || {
        client.info("connected_clients") == 9
    });
    load
}

/// Runs a command of `stillframe` on the server, with its image in `place`.
#[track_caller]
pub fn run(stillframe: &testkit::stillframe::Stillframe, words: &[&str], place: &std::path::Path) {
    let mut command = stillframe.command(words);
    command.arg("-D").arg(place);
    // To files: the tracker must not keep a pipe open.
    let output = tempfile::NamedTempFile::new().expect("a temporary file can be made");
    let handle = || output.reopen().expect("the file was just made");
    let status = command.stdout(handle()).stderr(handle()).status();
    let told = std::fs::read_to_string(output.path()).expect("it is text");
    assert!(status.expect("it starts").success(), "{words:?}: {told}");
}

#[test]
fn a_redis_under_load_is_saved_in_rounds() {
    needs_root!();
    needs_program!("redis-server");
    needs_program!("redis-benchmark");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer cannot track writes on every kernel");
    }
    let mut check = stillframe.command(&["check", "--feature", "uffd_wp_async"]);
    if !check.output().expect("it starts").status.success() {
        testkit::skip!("the kernel cannot track writes");
    }
    let (folder, port, server, mut client) = start();
    client.fill();
    let load = load(port, &folder.path().join("load"), &mut client);
    let images = tempfile::tempdir().expect("a scratch folder");
    let pid = server.pid().to_string();
    let commands = |client: &mut Client| client.info("total_commands_processed");
    let own_name = client.ask(&["CLIENT", "ID"]);
    for round in 1..=5 {
        // One key that every round finds changed, beside those of the load.
        assert_eq!(client.ask(&["INCR", "rounds"]), round.to_string());
        let before = commands(&mut client);
        wait_until("the load to go on", SOON, || {
            commands(&mut client) > before + 500
        });
        let place = images.path().join(round.to_string());
        let last = format!("../{}", round - 1);
        let over = if round == 1 {
            &[][..]
        } else {
            &["--prev-images-dir", &last]
        };
        let words = ["pre-dump", "--no-sync", "-t", &pid];
        run(&stillframe, &[&words, over].concat(), &place);
    }
    assert_eq!(client.ask(&["INCR", "rounds"]), "6");
    let before_all = commands(&mut client);
    let place = images.path().join("6");
    let words = ["dump", "--no-sync", "--tcp-established", "-t", &pid];
    let over = ["--prev-images-dir", "../5"];
    run(&stillframe, &[&words[..], &over].concat(), &place);
    testkit::tree::wait_gone(&[server.pid()]);
    run(&stillframe, &["restore", "-d", "--tcp-established"], &place);
    assert_eq!(client.ask(&["INCR", "rounds"]), "7");
    assert_eq!(client.ask(&["CLIENT", "ID"]), own_name);
    assert!(commands(&mut client) > before_all, "what was done is known");
    for number in (1..=KEYS).step_by(487) {
        let value = client.ask(&["GET", &format!("key:{number}")]);
        assert_eq!(value, format!("value {}", number * 7));
    }
    let before = commands(&mut client);
    wait_until("the load to go on", SOON, || {
        commands(&mut client) > before + 500
    });
    assert!(load.is_alive(), "the load has ended");
}
