//! A page server and the guests that it serves, for `bench uffd`.
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::guest::{Ability, Contents, Size};

/// How long a server may take to listen.
const DEADLINE: Duration = Duration::from_secs(20);

/// `stillframe serve` over one image.
pub struct Server {
    child: Child,
    socket: PathBuf,
    control: PathBuf,
}

impl Server {
    /// Starts one of the image `image`; its sockets are `name` in `dir`.
    ///
    /// # Errors
    /// When it cannot be started, or does not listen.
    pub fn start(
        program: &Path,
        dir: &Path,
        image: &str,
        name: &str,
        options: &[&str],
    ) -> Result<Self> {
        let socket = dir.join(format!("{name}.sock"));
        let control = dir.join(format!("{name}.control"));
        let mut command = Command::new(program);
        command
            .args(["serve", "-D", image, "--socket"])
            .arg(&socket);
        command.arg("--control").arg(&control).args(options);
        command.args(["-W", ".", "-o", &format!("{name}.log")]);
        command
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let child = command.spawn().map_err(|source| Error::Start {
            program: crate::tool::name(&command),
            source,
        })?;
        let server = Self {
            child,
            socket,
            control,
        };
        let until = Instant::now() + DEADLINE;
        while UnixStream::connect(&server.control).is_err() {
            if Instant::now() > until {
                let what = format!("the page server {name} does not listen");
                return Err(Error::Nothing { what });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }

    /// Where monitors connect.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks over the control socket; the answer's body.
    ///
    /// # Errors
    /// When it does not answer, or refuses.
    pub fn ask(&self, method: &str, path: &str, body: &str) -> Result<String> {
        let asked = kernel_error::<std::io::Error>("ask the page server");
        let answered = kernel_error::<std::io::Error>("hear the page server");
        let mut stream = UnixStream::connect(&self.control).map_err(asked)?;
        let len = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
        );
        let mut answer = String::new();
        let sent = stream.write_all(head.as_bytes());
        let read = sent.and_then(|()| stream.read_to_string(&mut answer));
        read.map_err(answered)?;
        match answer.split_once("\r\n\r\n") {
            Some((head, body)) if head.starts_with("HTTP/1.1 20") => Ok(body.to_owned()),
            _ => Err(Error::Nothing {
                what: format!("{method} {path}: {answer}"),
            }),
        }
    }

    /// The number of its only session.
    ///
    /// # Errors
    /// When there is none, or several.
    pub fn session(&self) -> Result<u64> {
        let told = self.ask("GET", "/sessions", "")?;
        let told: Value = serde_json::from_str(&told).unwrap_or_default();
        match told["sessions"].as_array().map(Vec::as_slice) {
            Some([one]) => Ok(one["number"].as_u64().unwrap_or_default()),
            _ => Err(Error::Nothing {
                what: format!("one session is wanted: {told}"),
            }),
        }
    }

    /// The sum of all counters whose name and labels begin so.
    ///
    /// # Errors
    /// Those of [`Server::ask`].
    pub fn count(&self, name: &str) -> Result<f64> {
        let text = self.ask("GET", "/metrics", "")?;
        let lines = text.lines().filter(|line| line.starts_with(name));
        let numbers = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        Ok(numbers.sum())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A guest in a process of its own; killed when it goes.
pub struct Guest {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Guest {
    /// Starts one, which hands its memory over with its first touch where there is a server.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(
        server: Option<&Server>,
        size: Size,
        contents: Contents,
        mib: usize,
        ability: Ability,
    ) -> Result<Self> {
        let own = std::env::current_exe().map_err(kernel_error("find this program"))?;
        let mut command = Command::new(&own);
        command.args([
            "guest",
            "--size",
            size.name(),
            "--contents",
            contents.name(),
        ]);
        command.args(["--mib", &mib.to_string()]);
        command.args(["--ability", ability.name()]);
        if let Some(server) = server {
            command.arg("--socket").arg(server.socket());
        }
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.map_err(file_error("start", &own))?;
        let input = child.stdin.take().expect("it was piped");
        let output = child.stdout.take().expect("it was piped");
        Ok(Self {
            child,
            input,
            output: BufReader::new(output),
        })
    }

    /// Has it do something; what it answers.
    ///
    /// # Errors
    /// When it fails: it has said why.
    pub fn ask(&mut self, line: &str) -> Result<Value> {
        let mut answer = String::new();
        let asked = writeln!(self.input, "{line}");
        let heard = asked.and_then(|()| self.output.read_line(&mut answer));
        heard.map_err(kernel_error("ask a guest"))?;
        serde_json::from_str(&answer).map_err(|_| Error::Nothing {
            what: format!("a guest that was to {line} has ended"),
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
