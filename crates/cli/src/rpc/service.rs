//! `stillframe service`: serves clients of criu(8)'s RPC protocol that connect to a socket.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use rustix::fs::{Mode, OFlags};
use rustix::net::SocketType;
use rustix::process::{WaitOptions, setsid, wait};
use sys::fork::{Fork, fork};
use sys::listener::{self, listen_at};

use crate::exit::{Failure, Status};
use crate::logfile;
use crate::rpc::session;
use crate::session::{LogArgs, absolute};

/// How many clients may wait until they are served.
const BACKLOG: i32 = 16;

/// Serve requests of criu's RPC protocol on a socket of its own, a process a client
#[derive(Debug, Args)]
pub struct Service {
    /// The path of the socket, relative to the work directory; only this user can connect
    #[arg(long, value_name = "FILE", default_value = "criu_service.socket")]
    address: PathBuf,

    /// Write the pid of the service into this new file, relative to the work directory
    #[arg(long, value_name = "FILE")]
    pidfile: Option<PathBuf>,

    /// Go to the background when clients can connect
    #[arg(short = 'd', long)]
    daemon: bool,

    /// A log of the service alone: each request has one of its own
    #[command(flatten)]
    log: LogArgs,
}

impl Service {
    /// Serves clients until this process is killed. In the process of a client it returns the
    /// status of its last request.
    ///
    /// # Errors
    /// The socket or the pidfile cannot be made.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        let here = Path::new(".");
        let work_dir = absolute(self.log.work_dir(here))?;
        self.log.open_named(here, started)?;
        let path = work_dir.join(&self.address);
        let listener = listen_at(&path, SocketType::SEQPACKET, BACKLOG);
        let listener = listener.map_err(|failure| unable_to_listen(&path, failure))?;
        let pidfile = self.pidfile.map(|name| make_pidfile(work_dir.join(name)));
        let pidfile = pidfile.transpose()?;
        if self.daemon {
            match unable("fork for", &path, fork())? {
                Fork::Parent(_) => return Ok(Status::Done),
                Fork::Child => unable("leave the terminal of", &path, leave_terminal())?,
            }
        }
        if let Some(mut pidfile) = pidfile {
            let written = write!(pidfile, "{}", std::process::id());
            unable("write the pidfile of", &path, written)?;
        }
        log::info!("clients can connect to {}", path.display());
        logfile::flush();
        serve(listener, &path)
    }
}

/// Takes clients in; returns in the process of each.
fn serve(listener: OwnedFd, path: &Path) -> Result<Status, Failure> {
    loop {
        let accepted = sys::socket::accept(&listener);
        // Whoever has ended meanwhile, whether the process of a client or a tree.
        while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
        let socket = match accepted {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            accepted => unable("accept clients on", path, accepted)?,
        };
        logfile::flush();
        match fork() {
            Ok(Fork::Child) => {
                drop(listener);
                return session::serve(socket, |source| Failure::File {
                    action: "serve a client of",
                    path: path.to_owned(),
                    source,
                });
            }
            Ok(Fork::Parent(pid)) => log::debug!("process {pid} serves a client"),
            Err(error) => log::error!("a client cannot be served: {error}"),
        }
    }
}

fn unable<T, E: Into<std::io::Error>>(
    action: &'static str,
    path: &Path,
    result: Result<T, E>,
) -> Result<T, Failure> {
    result.map_err(|source| Failure::File {
        action,
        path: path.to_owned(),
        source: source.into(),
    })
}

fn unable_to_listen(path: &Path, failure: listener::Failure) -> Failure {
    let (action, source) = match failure {
        listener::Failure::Taken => ("listen on", rustix::io::Errno::ADDRINUSE),
        listener::Failure::Call(action, errno) => (action, errno),
    };
    Failure::File {
        action,
        path: path.to_owned(),
        source: source.into(),
    }
}

fn make_pidfile(path: PathBuf) -> Result<File, Failure> {
    let mut options = File::options();
    let file = options.write(true).create_new(true).mode(0o600).open(&path);
    unable("create the pidfile", &path, file)
}

/// Becomes independent of whoever has started it.
fn leave_terminal() -> rustix::io::Result<()> {
    setsid()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)
}
