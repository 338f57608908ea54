//! `cargo xtask demo`: a real redis-server with data and a connected client is dumped and restored.
mod resp;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions};

use self::resp::{Client, Value, value_of};
use crate::error::{Error, Result};
use crate::{packages, repo};

/// How long anything may take before the demonstration gives up.
const DEADLINE: Duration = Duration::from_secs(30);
/// A pause between two looks at what has not happened yet.
const PAUSE: Duration = Duration::from_millis(5);

/// What is shown.
#[derive(clap::Args)]
pub struct Arguments {
    /// The number of keys that the server holds.
    #[arg(long, default_value_t = 200_000)]
    keys: usize,
    /// Another program with the same commands; without this, stillframe is built.
    #[arg(long, value_name = "PATH")]
    program: Option<PathBuf>,
    /// Keep the image's folder.
    #[arg(long)]
    keep: bool,
}

/// What has to be the same before and after, as the server tells it.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    pid: i64,
    run_id: String,
    connection: Value,
    client: SocketAddr,
    keys: Value,
}

/// The server: our child until it is dumped, afterwards an orphan that comes back to us.
struct Server {
    pid: Pid,
    child: Option<Child>,
}

/// Shows it all, and cleans up.
///
/// # Errors
/// When something does not go on as it was.
pub fn run(arguments: &Arguments) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Root {
            task: "cargo xtask demo",
        });
    }
    packages::install(packages::FOR_DEMO)?;
    let program = match &arguments.program {
        Some(program) => program.clone(),
        None => repo::build_stillframe()?,
    };
    let mut scratch = tempfile::Builder::new()
        .prefix("stillframe-demo-")
        .tempdir_in("/var/tmp")
        .map_err(repo::file_error(
            "make a scratch folder in",
            Path::new("/var/tmp"),
        ))?;
    scratch.disable_cleanup(arguments.keep);
    // The restored server's starter is gone: this makes it our child, so that we can reap it.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).map_err(|error| {
        Error::Connection {
            doing: "become a subreaper".into(),
            source: error.into(),
        }
    })?;
    show(arguments, &program, scratch.path())?;
    if arguments.keep {
        say(&format!(
            "the image stays in {}",
            scratch.path().join("image").display()
        ));
    }
    Ok(())
}

fn show(arguments: &Arguments, program: &Path, scratch: &Path) -> Result<()> {
    let images = scratch.join("image");
    std::fs::create_dir(&images).map_err(repo::file_error("make", &images))?;
    let images = images.to_string_lossy();

    let (mut server, address) = Server::start(scratch)?;
    let mut client = server.connect(address)?;
    say(&format!(
        "redis-server runs as pid {}, on {address}",
        server.pid
    ));
    client.fill("key", arguments.keys)?;
    expect(
        &client.ask(&["SET", "visits", "41"])?,
        &Value::Text("OK".into()),
        "a counter is set",
    )?;
    let before = identity(&mut client)?;
    say(&format!(
        "it holds {} keys; this client stays connected from {}",
        arguments.keys, before.client
    ));

    let pid = server.pid.to_string();
    let dump = timed(
        program,
        &["dump", "-t", &pid, "-D", &images, "--tcp-established"],
    )?;
    server.reap()?;
    say(&format!(
        "dumped in {dump:.1?}; no process {pid} runs any more"
    ));
    client.send(&["INCR", "visits"])?;
    say("the client sends `INCR visits` over its connection, while nobody is there to read it");

    say("what the image holds:");
    repo::run(Command::new(program).args(["show", &images]))?;

    let restore = timed(
        program,
        &["restore", "-d", "-D", &images, "--tcp-established"],
    )?;
    say(&format!("restored in {restore:.1?}"));
    prove(arguments, &mut client, &before)?;
    server.check_runs()?;
    server.stop()?;
    say("the server is stopped and everything is cleaned up");
    Ok(())
}

/// Proves that the server, its data and the connection are those of before the dump.
fn prove(arguments: &Arguments, client: &mut Client, before: &Identity) -> Result<()> {
    let answer = client.receive()?;
    expect(
        &answer,
        &Value::Number(42),
        "the waiting command is answered on the same connection",
    )?;
    let after = identity(client)?;
    if after != *before {
        let what = format!("the server is another one: {before:?} before, {after:?} after");
        return Err(Error::Demo { what });
    }
    let Identity {
        pid,
        connection,
        client: end,
        ..
    } = after;
    proven(&format!(
        "pid {pid}, its run id and its number of keys are the same"
    ));
    proven(&format!("connection {connection:?} from {end} is the same"));
    for number in [0, arguments.keys / 2, arguments.keys.saturating_sub(1)] {
        if number < arguments.keys {
            let key = format!("key:{number}");
            expect(
                &client.ask(&["GET", &key])?,
                &Value::Text(value_of(number)),
                &key,
            )?;
        }
    }
    expect(
        &client.ask(&["INCR", "visits"])?,
        &Value::Number(43),
        "it goes on counting",
    )
}

/// Asks the server who it is.
fn identity(client: &mut Client) -> Result<Identity> {
    let Value::Text(info) = client.ask(&["INFO", "server"])? else {
        return Err(Error::Demo {
            what: "redis does not tell about itself".into(),
        });
    };
    let field = |name: &str| {
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_default().to_string()
    };
    Ok(Identity {
        pid: field("process_id").parse().unwrap_or(-1),
        run_id: field("run_id"),
        connection: client.ask(&["CLIENT", "ID"])?,
        client: client.address()?,
        keys: client.ask(&["DBSIZE"])?,
    })
}

impl Server {
    /// Starts redis-server in its own session, on a free port, with its files in `scratch`.
    fn start(scratch: &Path) -> Result<(Self, SocketAddr)> {
        let probe = TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
        let address = probe
            .and_then(|listener| listener.local_addr())
            .map_err(|source| Error::Connection {
                doing: "find a free port".into(),
                source,
            })?;
        let port = address.port().to_string();
        let log = scratch.join("redis.log");
        // setsid(1) runs the server in its own place: the child's pid is the server's.
        let mut command = Command::new("setsid");
        command
            .args([
                "redis-server",
                "--port",
                &port,
                "--bind",
                "127.0.0.1",
                "--save",
                "",
            ])
            .args(["--appendonly", "no", "--daemonize", "no", "--dir"])
            .arg(scratch)
            .arg("--logfile")
            .arg(&log)
            .current_dir(scratch)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = command
            .spawn()
            .map_err(|source| repo::start_error(&command, source))?;
        let pid = Pid::from_child(&child);
        Ok((
            Self {
                pid,
                child: Some(child),
            },
            address,
        ))
    }

    /// Connects as soon as the server listens.
    fn connect(&self, address: SocketAddr) -> Result<Client> {
        let start = Instant::now();
        loop {
            match Client::connect(address, DEADLINE) {
                Ok(client) => return Ok(client),
                Err(error) if start.elapsed() > DEADLINE => return Err(error),
                Err(_) => self.check_runs()?,
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Waits for the dumped server's end, so that its pid is free.
    fn reap(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            let wait = child.wait();
            wait.map_err(|source| Error::Connection {
                doing: "wait for redis".into(),
                source,
            })?;
        }
        Ok(())
    }

    fn check_runs(&self) -> Result<()> {
        let stat = format!("/proc/{}/stat", self.pid);
        let text = std::fs::read_to_string(&stat).map_err(|_| Error::Demo {
            what: format!("no process {} runs", self.pid),
        })?;
        let state = text
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.chars().next());
        match state {
            Some('R' | 'S' | 'D') => Ok(()),
            _ => Err(Error::Demo {
                what: format!("process {} does not run: {text}", self.pid),
            }),
        }
    }

    fn stop(mut self) -> Result<()> {
        self.kill();
        Ok(())
    }

    /// Ends the server, dumped or not, and reaps it.
    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Runs a command of the program and returns how long it took.
fn timed(program: &Path, arguments: &[&str]) -> Result<Duration> {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    println!("  $ {name} {}", arguments.join(" "));
    let start = Instant::now();
    repo::run(Command::new(program).args(arguments).stdin(Stdio::null()))?;
    Ok(start.elapsed())
}

fn expect(answer: &Value, wanted: &Value, what: &str) -> Result<()> {
    if answer != wanted {
        return Err(Error::Demo {
            what: format!("{what}: {answer:?} instead of {wanted:?}"),
        });
    }
    proven(what);
    Ok(())
}

fn say(what: &str) {
    println!("• {what}");
}

fn proven(what: &str) {
    println!("  ✓ {what}");
}
