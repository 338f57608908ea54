//! The requests of one connection, one after the other.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use process::{Afterwards, CpuCap};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, waitpid};
use sys::features::{self, Need};

use crate::command_line::{self, Command, Origin, Words};
use crate::exit::{Failure, Status};
use crate::options::Options;
use crate::rpc::client::Client;
use crate::rpc::connection::{Connection, Packet};
use crate::rpc::files::{self, RestoreFacts};
use crate::rpc::messages::{
    DumpResponse, Features, Request, RequestKind, RequestOptions, Response, RestoreResponse,
    Version,
};
use crate::rpc::options::{self, Places};
use crate::rpc::refusal::Refusal;
use crate::rpc::{fields, notes};
use crate::work::carry_out;
use crate::{config, logfile, parse, values};

/// The version of criu(8) whose protocol this is.
pub const VERSION: Version = Version { major: 4, minor: 2 };

/// End of the work on a request.
enum Outcome {
    /// It has succeeded.
    Done(Response),
    /// It has failed.
    Refused(Refusal),
    /// This is a copy of the process that has the client, and ends with this status.
    Copy(Status),
}

/// Directories of a request.
struct Directories {
    images: PathBuf,
    work: PathBuf,
}

/// Serves the client at the other side of a socket.
///
/// # Errors
/// The socket is none of such a client, which `failed` tells.
pub fn serve(socket: OwnedFd, failed: impl Fn(io::Error) -> Failure) -> Result<Status, Failure> {
    let connection = Connection::new(socket).map_err(&failed)?;
    let client = Client::new(connection).map_err(&failed)?;
    Ok(serve_all(&Arc::new(client)))
}

/// Serves the requests of a client until it has no more, or one has failed.
///
/// Returns the status of the last one.
fn serve_all(client: &Arc<Client>) -> Status {
    let mut status = Status::Failed;
    loop {
        let bytes = match client.receive() {
            Ok(Packet::Message(bytes)) => bytes,
            Ok(Packet::End) => return status,
            Ok(Packet::TooLong(length)) => {
                let refusal = Refusal::request(format!("a message of {length} bytes is too long"));
                return refuse(client, RequestKind::Empty, refusal);
            }
            Err(error) => {
                log::error!("cannot hear the client: {error}");
                return Status::Failed;
            }
        };
        let request = match fields::decode(&bytes) {
            Ok(request) => request,
            Err(text) => return refuse(client, RequestKind::Empty, Refusal::request(text)),
        };
        let Ok(kind) = RequestKind::try_from(request.kind) else {
            let text = format!("request {} is not known", request.kind);
            return refuse(client, RequestKind::Empty, Refusal::request(text));
        };
        let response = match answer(client, kind, &request) {
            Outcome::Done(response) => response,
            Outcome::Refused(refusal) => return refuse(client, kind, refusal),
            Outcome::Copy(status) => return status,
        };
        if let Err(error) = client.send(&response) {
            log::error!("cannot answer the client: {error}");
            return Status::Failed;
        }
        status = Status::Done;
        if request.keep_open != Some(true) && kind != RequestKind::PreDump {
            return status;
        }
    }
}

/// Tells the client that a request has failed.
fn refuse(client: &Client, kind: RequestKind, refusal: Refusal) -> Status {
    let is_dump = kind == RequestKind::Dump;
    let response = Response {
        kind: kind as i32,
        success: false,
        dump: is_dump.then_some(DumpResponse {
            restored: Some(false),
        }),
        errno: refusal.errno,
        error: Some(refusal.text),
        ..Response::default()
    };
    if let Err(error) = client.send(&response) {
        log::error!("cannot answer the client: {error}");
    }
    refusal.status
}

/// Carries out a request.
fn answer(client: &Arc<Client>, kind: RequestKind, request: &Request) -> Outcome {
    let unset = RequestOptions::default();
    let options = request.options.as_ref().unwrap_or(&unset);
    let success = Response {
        kind: kind as i32,
        success: true,
        ..Response::default()
    };
    let answered = match kind {
        RequestKind::Empty | RequestKind::Notify => {
            Err(Refusal::request(format!("{} is no request", name(kind))))
        }
        RequestKind::PageServer | RequestKind::PageServerChild => {
            Err(Refusal::request(format!("{} is not supported", name(kind))))
        }
        RequestKind::Version => Ok(Response {
            version: Some(VERSION),
            ..success
        }),
        RequestKind::FeatureCheck => check_features(request).map(|features| Response {
            features: Some(features),
            ..success
        }),
        RequestKind::Check => check_host().map(|()| success),
        RequestKind::CpuinfoDump | RequestKind::CpuinfoCheck => {
            judge_processor(client, kind, options).map(|()| success)
        }
        RequestKind::WaitPid => wait_for(request.pid).map(|status| Response {
            status: Some(status),
            ..success
        }),
        RequestKind::Dump
        | RequestKind::PreDump
        | RequestKind::SinglePreDump
        | RequestKind::Restore => return work(client, kind, options, success),
    };
    answered.map_or_else(Outcome::Refused, Outcome::Done)
}

/// The protocol's name of a kind of request.
fn name(kind: RequestKind) -> &'static str {
    match kind {
        RequestKind::Empty => "EMPTY",
        RequestKind::Notify => "NOTIFY",
        RequestKind::PageServer => "PAGE_SERVER",
        RequestKind::PageServerChild => "PAGE_SERVER_CHLD",
        RequestKind::Dump => "DUMP",
        RequestKind::Restore => "RESTORE",
        RequestKind::Check => "CHECK",
        RequestKind::PreDump => "PRE_DUMP",
        RequestKind::CpuinfoDump => "CPUINFO_DUMP",
        RequestKind::CpuinfoCheck => "CPUINFO_CHECK",
        RequestKind::FeatureCheck => "FEATURE_CHECK",
        RequestKind::Version => "VERSION",
        RequestKind::WaitPid => "WAIT_PID",
        RequestKind::SinglePreDump => "SINGLE_PRE_DUMP",
    }
}

/// Tries the features that the client asks about.
fn check_features(request: &Request) -> Result<Features, Refusal> {
    let asked = request.features.as_ref();
    let asked = asked.ok_or_else(|| Refusal::request("FEATURE_CHECK: no features"))?;
    let probe = |asked: Option<bool>, name: &str| {
        let feature = features::named(name).expect("it is one of the table");
        Some(asked == Some(true) && feature.probe().is_ok())
    };
    Ok(Features {
        mem_track: probe(asked.mem_track, "mem_dirty_track"),
        lazy_pages: probe(asked.lazy_pages, "uffd-noncoop"),
        pidfd_store: probe(asked.pidfd_store, "pidfd_store"),
    })
}

/// Tries what every dump and restore needs.
fn check_host() -> Result<(), Refusal> {
    let needed = features::all().filter(|feature| feature.need == Need::Always);
    let missing = needed.filter_map(|feature| Some((feature.name, feature.probe().err()?)));
    let missing = missing.map(|(name, why)| format!("{name}: {why}"));
    let missing = missing.collect::<Vec<_>>();
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Refusal {
            errno: None,
            text: format!("missing: {}", missing.join("; ")),
            status: Status::Failed,
        }),
    }
}

/// Saves what the processor has, or checks it.
fn judge_processor(
    client: &Client,
    kind: RequestKind,
    options: &RequestOptions,
) -> Result<(), Refusal> {
    let directories = directories(client, options)?;
    let images = directories.images.as_path().into();
    let cap = options.cpu_cap.map(options::cpu_cap).transpose();
    let cap = cap.map_err(Refusal::request)?;
    let cap = cap.map(|names| values::cpu_cap(Some(names.as_ref())));
    let cap: Option<CpuCap> = cap.transpose().map_err(Refusal::request)?;
    let done = match kind {
        RequestKind::CpuinfoDump => process::dump_cpuinfo(&images).map(drop),
        _ => process::check_cpuinfo(&images, cap),
    };
    done.map_err(|error| Refusal::of(&Failure::engine("cpuinfo")(error)))
}

/// Waits for the end of a child of this process, and gives its status as wait(2) does.
fn wait_for(pid: Option<u32>) -> Result<i32, Refusal> {
    let pid = pid.and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?));
    let pid = pid.ok_or_else(|| Refusal::request("WAIT_PID: no pid above 0"))?;
    let ended = rustix::io::retry_on_intr(|| waitpid(Some(pid), WaitOptions::empty()));
    let failed = |errno: Errno| Refusal {
        errno: Some(errno.raw_os_error()),
        text: format!("cannot wait for pid {}: {errno}", pid.as_raw_nonzero()),
        status: Status::Failed,
    };
    let (_, status) = ended.map_err(failed)?.expect("it waits");
    Ok(status.as_raw())
}

/// The directories that a request names.
fn directories(client: &Client, options: &RequestOptions) -> Result<Directories, Refusal> {
    let open = |field: &str, number: i32| {
        client.directory(number).map_err(|error| Refusal {
            errno: error.raw_os_error(),
            text: format!("{field}: descriptor {number} of the client: {error}"),
            status: Status::Store,
        })
    };
    let images = match (&options.images_dir, options.images_dir_fd) {
        (Some(path), _) => std::path::absolute(path)
            .map_err(|error| Refusal::request(format!("images_dir: {path:?}: {error}")))?,
        (None, Some(number)) if number >= 0 => open("images_dir_fd", number)?,
        _ => return Err(Refusal::request("neither images_dir_fd nor images_dir")),
    };
    let work = options.work_dir_fd.filter(|number| *number >= 0);
    let work = work.map(|number| open("work_dir_fd", number));
    let work = work.transpose()?.unwrap_or_else(|| images.clone());
    Ok(Directories { images, work })
}

/// Dumps or restores.
fn work(
    client: &Arc<Client>,
    kind: RequestKind,
    options: &RequestOptions,
    success: Response,
) -> Outcome {
    let started = Instant::now();
    let command = match kind {
        RequestKind::Dump => Command::Dump,
        RequestKind::Restore => Command::Restore,
        _ => Command::PreDump,
    };
    let places = match directories(client, options) {
        Ok(places) => places,
        Err(refusal) => return Outcome::Refused(refusal),
    };
    let understood = understand(command, options, &places);
    let (mut wanted, idle) = match understood {
        Ok(understood) => understood,
        Err(refusal) => {
            tell_log(options, &places.work, &refusal, started);
            return Outcome::Refused(refusal);
        }
    };
    let runs_on = command == Command::Dump && wanted.dump.afterwards == Afterwards::Run;
    let notifies = options.notify_scripts == Some(true);
    if let Err(error) = client.begin(notifies, runs_on) {
        return Outcome::Refused(Refusal {
            errno: error.raw_os_error(),
            text: format!("cannot keep notes: {error}"),
            status: Status::Failed,
        });
    }
    wanted.listener = Some(client.clone());
    let images = wanted.images_dir.clone();
    let places = Directories {
        work: wanted.work_dir.clone().unwrap_or_else(|| images.clone()),
        images,
    };
    let done = carry_out(command, wanted, &idle, started);
    let status = done.unwrap_or_else(|failure| {
        log::error!("{}", failure.line());
        // A single one is in the line.
        let obstacles = failure.obstacles();
        for obstacle in obstacles.iter().filter(|_| obstacles.len() > 1) {
            log::error!("{obstacle}");
        }
        client.note_failure(&failure);
        failure.status()
    });
    logfile::flush();
    if client.is_copy() {
        return Outcome::Copy(status);
    }
    if status != Status::Done {
        client.unlock();
        return Outcome::Refused(Refusal::noted(&client.notes(), status));
    }
    let response = complete(client, command, success, started, &places);
    logfile::flush();
    Outcome::Done(response)
}

/// Understands the options of a request, with those of the configuration files.
fn understand(
    command: Command,
    options: &RequestOptions,
    places: &Directories,
) -> Result<(Options, Vec<&'static str>), Refusal> {
    let places = Places {
        images_dir: &places.images,
        work_dir: &places.work,
    };
    let words = options::words(command, options, &places).map_err(Refusal::request)?;
    let failed = |failure: Failure| Refusal::of(&failure);
    let unreadable = |error| failed(Failure::Configuration(error));
    let defaults = config::Places::of_environment(true, None);
    let mut sources = defaults.read().map_err(unreadable)?;
    sources.push(Words {
        origin: Origin::CommandLine,
        words,
    });
    if let Some(file) = &options.config_file {
        let last = config::Places {
            optional: vec![file.into()],
            named: Vec::new(),
        };
        sources.extend(last.read().map_err(unreadable)?);
    }
    let reading = command_line::read(&sources);
    let reading = reading.map_err(|error| failed(Failure::Reading(error)))?;
    let idle = reading.idle.clone();
    match parse::options(command, reading) {
        Ok(options) => Ok((options, idle)),
        Err(error) => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            Err(Refusal::request(
                line.strip_prefix("error: ").unwrap_or(line),
            ))
        }
    }
}

/// Tells the log why a request is refused, before the work has opened it.
fn tell_log(options: &RequestOptions, work_dir: &Path, refusal: &Refusal, started: Instant) {
    let Ok(name) = options::log_name(options) else {
        return;
    };
    let level = options.log_level.map(u32::try_from);
    let level = level.and_then(Result::ok);
    let level = level.unwrap_or(logfile::DEFAULT_VERBOSITY);
    if logfile::open(&work_dir.join(name), level, started).is_ok() {
        log::error!("{}", refusal.text);
        logfile::flush();
    }
}

/// Writes the files that clients look for, and makes the answer.
fn complete(
    client: &Client,
    command: Command,
    success: Response,
    started: Instant,
    places: &Directories,
) -> Response {
    let micros = |time: std::time::Duration| {
        notes::time(u64::try_from(time.as_micros()).unwrap_or(u64::MAX))
    };
    let written = match command {
        Command::Restore => {
            let facts = RestoreFacts {
                forking_time: micros(client.forking()),
                restore_time: micros(started.elapsed()),
                ..RestoreFacts::default()
            };
            files::write_restore_facts(&places.work, facts)
        }
        _ => {
            let facts = client.notes().dump.unwrap_or_default();
            let inventory = files::write_inventory(&places.images);
            inventory.and_then(|()| files::write_dump_facts(&places.work, facts))
        }
    };
    if let Err(error) = written {
        log::warn!("cannot write a file that clients look for: {error}");
    }
    match command {
        Command::Dump => Response {
            dump: Some(DumpResponse {
                restored: Some(false),
            }),
            ..success
        },
        Command::Restore => Response {
            restore: client.root().map(|root| RestoreResponse {
                pid: root.as_raw_nonzero().get(),
            }),
            ..success
        },
        _ => success,
    }
}
