//! Servers, whose clients here stay connected over all dumps and get the right answers.
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use testkit::program::{Program, Spawned, free_port};
use testkit::wait;

use crate::error::{Error, Result, failure, file_error, start_error};
use crate::{Work, clients};

/// How long a server may take to accept connections.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long an answer may take, over a dump and a restore.
const ANSWER: Duration = Duration::from_secs(240);
/// How many clients a server has.
const CLIENTS: usize = 3;

/// What a client does once, and checks: exchange `number` of client `client`.
pub type Exchange = fn(&mut Line, client: usize, number: u64) -> Result<()>;

/// How a server is started, and what its clients do.
pub struct Recipe<'a> {
    /// The files that it finds in its folder; `{port}` and `{folder}` are filled in.
    pub files: &'a [(&'static str, &'static str)],
    /// The command line, filled in as well.
    pub command: &'a [&'a str],
    /// How a client connects, if not by TCP.
    pub connect: Option<fn(u16) -> Result<Line>>,
    /// What a client does first.
    pub greet: Exchange,
    /// What it does over and over, with numbers from 1 on.
    pub exchange: Exchange,
}

/// A server and its clients.
struct ServerProgram {
    spawned: Spawned,
    stop: Arc<AtomicBool>,
    done: Arc<[AtomicU64]>,
    clients: Vec<JoinHandle<Result<()>>>,
    lines: Vec<Cutter>,
}

impl<'a> Recipe<'a> {
    /// A server whose clients say and do nothing yet.
    pub const fn new(files: &'a [(&'static str, &'static str)], command: &'a [&'a str]) -> Self {
        Self {
            files,
            command,
            connect: None,
            greet: clients::silent,
            exchange: clients::silent,
        }
    }

    /// Starts the server, and its clients.
    ///
    /// # Errors
    /// When its files cannot be written, or it does not answer.
    pub fn start(&self, folder: &Path) -> Result<Box<dyn Work>> {
        let port = free_port();
        let fill = |text: &str| {
            text.replace("{port}", &port.to_string())
                .replace("{folder}", &folder.display().to_string())
        };
        for (name, text) in self.files {
            let path = folder.join(name);
            std::fs::write(&path, fill(text)).map_err(file_error("write", &path))?;
        }
        let spawned = Program::new(self.command[0])
            .args(self.command[1..].iter().map(|word| fill(word)))
            .env("HOME", folder)
            .folder(folder)
            .output(&folder.join("log"))
            .spawn();
        let mut served = ServerProgram {
            spawned,
            stop: Arc::default(),
            done: (0..CLIENTS).map(|_| AtomicU64::new(0)).collect(),
            clients: Vec::new(),
            lines: Vec::new(),
        };
        for client in 0..CLIENTS {
            let mut line = connect(&served.spawned, port)?;
            if let Some(connect) = self.connect {
                line = connect(port)?;
            }
            (self.greet)(&mut line, client, 0)?;
            served.lines.push(line.cutter()?);
            let (stop, done) = (served.stop.clone(), served.done.clone());
            let exchange = self.exchange;
            served.clients.push(std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let number = done[client].load(Ordering::Relaxed) + 1;
                    exchange(&mut line, client, number)?;
                    done[client].store(number, Ordering::Relaxed);
                }
                Ok(())
            }));
        }
        Ok(Box::new(served))
    }
}

/// Connects as soon as the server listens.
fn connect(server: &Spawned, port: u16) -> Result<Line> {
    let stream = wait::try_wait_for(PATIENCE, || {
        assert!(
            server.is_alive(),
            "{} ended before it listened",
            server.name()
        );
        TcpStream::connect(("127.0.0.1", port)).ok()
    });
    let stream = stream.ok_or_else(|| failure("it does not listen"))?;
    Line::new(stream)
}

impl Work for ServerProgram {
    fn spawned(&self) -> &Spawned {
        &self.spawned
    }

    /// What the slowest client has done: all of them go on.
    fn progress(&mut self) -> Result<u64> {
        if let Some(ended) = self.clients.iter().position(JoinHandle::is_finished) {
            join(self.clients.remove(ended))?;
            return Err(failure("a client has ended"));
        }
        let done = self.done.iter().map(|done| done.load(Ordering::Relaxed));
        Ok(done.min().unwrap_or(0))
    }

    fn finish(&mut self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.clients.drain(..).try_for_each(join)?;
        self.spawned.kill();
        Ok(())
    }
}

impl Drop for ServerProgram {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.spawned.kill();
        // Of a server that could not be restored, nobody tells the clients that it is gone.
        self.lines.iter().for_each(Cutter::cut);
        for client in self.clients.drain(..) {
            let _ = client.join();
        }
    }
}

fn join(client: JoinHandle<Result<()>>) -> Result<()> {
    client
        .join()
        .unwrap_or_else(|_| Err(failure("a client panics")))
}

/// A client's connection, by itself or through a program.
pub struct Line {
    input: BufReader<Box<dyn Read + Send>>,
    output: Box<dyn Write + Send>,
    other_end: Peer,
}

/// What a client talks to.
enum Peer {
    Server(TcpStream),
    Program(Child),
}

/// Ends a client's connection from outside, while the client waits for an answer.
enum Cutter {
    Stream(TcpStream),
    Program(OwnedFd),
}

impl Cutter {
    fn cut(&self) {
        // The connection, or the program, may have ended by itself.
        let _ = match self {
            Self::Stream(stream) => stream.shutdown(Shutdown::Both),
            Self::Program(pidfd) => {
                pidfd_send_signal(pidfd, Signal::KILL).map_err(std::io::Error::from)
            }
        };
    }
}

impl Line {
    fn new(stream: TcpStream) -> Result<Self> {
        let limited = stream.set_read_timeout(Some(ANSWER));
        limited.map_err(lost("limit"))?;
        stream.set_nodelay(true).map_err(lost("set"))?;
        let duplicate = || stream.try_clone().map_err(lost("duplicate"));
        Ok(Self {
            input: BufReader::new(Box::new(duplicate()?)),
            output: Box::new(duplicate()?),
            other_end: Peer::Server(stream),
        })
    }

    /// Talks to a program by its standard input and output.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn to_program(mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn();
        let mut child = child.map_err(|source| start_error(&command, source))?;
        let input = child.stdout.take().expect("it was made a pipe above");
        let output = child.stdin.take().expect("it was made a pipe above");
        Ok(Self {
            input: BufReader::new(Box::new(input)),
            output: Box::new(output),
            other_end: Peer::Program(child),
        })
    }

    fn cutter(&self) -> Result<Cutter> {
        match &self.other_end {
            Peer::Server(stream) => {
                let stream = stream.try_clone().map_err(lost("duplicate"))?;
                Ok(Cutter::Stream(stream))
            }
            Peer::Program(child) => {
                let pidfd = pidfd_open(Pid::from_child(child), PidfdFlags::empty());
                let pidfd = pidfd.map_err(|error| lost("watch the program of")(error.into()))?;
                Ok(Cutter::Program(pidfd))
            }
        }
    }

    /// Sends bytes.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) -> Result<()> {
        let sent = self.output.write_all(bytes.as_ref());
        sent.map_err(lost("write to"))
    }

    /// Receives a line, without its end.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn line(&mut self) -> Result<String> {
        let mut text = String::new();
        let read = self.input.read_line(&mut text).map_err(lost("read from"))?;
        if read == 0 {
            return Err(failure("a connection was closed"));
        }
        Ok(text.trim_end_matches(['\r', '\n']).to_owned())
    }

    /// Receives `count` bytes.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn bytes(&mut self, count: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; count];
        let read = self.input.read_exact(&mut bytes);
        read.map_err(lost("read from"))?;
        Ok(bytes)
    }

    /// Receives bytes up to and with `end`.
    ///
    /// # Errors
    /// When the connection is lost.
    pub fn until(&mut self, end: u8) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let read = self.input.read_until(end, &mut bytes);
        read.map_err(lost("read from"))?;
        if bytes.last() == Some(&end) {
            return Ok(bytes);
        }
        Err(failure("a connection was closed"))
    }

    /// Sends text and insists on a line as the answer.
    ///
    /// # Errors
    /// When there is another answer, or none.
    pub fn ask(&mut self, text: &str, wanted: &str) -> Result<()> {
        self.send(text)?;
        expect(&self.line()?, wanted)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if let Peer::Program(program) = &mut self.other_end {
            // It may have ended by itself.
            let _ = program.kill();
            let _ = program.wait();
        }
    }
}

/// Insists on an answer.
///
/// # Errors
/// When it is another one.
pub fn expect(answer: &str, wanted: &str) -> Result<()> {
    if answer == wanted {
        return Ok(());
    }
    Err(failure(format!(
        "the answer is {answer:?} instead of {wanted:?}"
    )))
}

fn lost(doing: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Connection { doing, source }
}
