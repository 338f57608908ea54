//! The control socket: HTTP/1.1 with JSON over a unix stream, as Firecracker's own API is, and the
//! signals that end the server.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::Builder;

use axum::extract::rejection::JsonRejection;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use axum::{Json, Router};
use image::Blame;
use prometheus_client::registry::Registry;
use rustix::io::Errno;
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::{Value, json};

use super::copying;
use super::live::LiveSession;
use super::{SharedState, lock};
use crate::Error;

/// State that every request uses.
#[derive(Clone)]
struct Server {
    shared: Arc<SharedState>,
    registry: Arc<Registry>,
}

/// Has the signals that end the server heard instead; from here on, and by all threads to come.
pub(crate) fn signals() -> io::Result<OwnedFd> {
    let mask = [Signal::TERM, Signal::INT].map(|signal| 1 << (signal.as_raw() - 1));
    sys::signalfd::instead_of_ending(mask[0] | mask[1])
}

/// Starts the threads that hear signals, and that answer on `control` where there is one.
pub(crate) fn start(
    shared: &Arc<SharedState>,
    signals: OwnedFd,
    control: Option<UnixListener>,
) -> io::Result<()> {
    let own = shared.clone();
    let heard = move || hear(&own, &signals);
    Builder::new().name("signals".to_owned()).spawn(heard)?;
    let Some(control) = control else {
        return Ok(());
    };
    let runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = { runtime }.enable_all().build()?;
    let inside = runtime.enter();
    control.set_nonblocking(true)?;
    let listener = tokio::net::UnixListener::from_std(control)?;
    drop(inside);
    let mut registry = Registry::default();
    shared.metrics.register(&mut registry);
    let server = Server {
        shared: shared.clone(),
        registry: Arc::new(registry),
    };
    let run = move || {
        runtime.block_on(async move {
            if let Err(error) = axum::serve(listener, routes(server)).await {
                log::error!("the control socket: {error}");
            }
        });
    };
    Builder::new().name("control".to_owned()).spawn(run)?;
    Ok(())
}

/// The first signal has the server drained, another one ends it at once; where sessions are kept,
/// each has it leave them.
fn hear(shared: &SharedState, signals: &OwnedFd) {
    loop {
        let _ = guard::wait([Some(signals.as_fd())], None);
        // One signal at a time.
        match rustix::io::read(signals, &mut [0; 128]) {
            Ok(_) if shared.keeps() => shared.leave(),
            Ok(_) if shared.draining.load(Relaxed) => shared.abort(),
            Ok(_) => shared.drain(),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return log::error!("signals are not heard any more: {errno}"),
        }
    }
}

fn routes(server: Server) -> Router {
    Router::new()
        .route("/sessions", get(sessions))
        .route("/sessions/{number}", get(session))
        .route("/sessions/{number}/diff", get(copy).put(diff))
        .route("/drain", put(drain))
        .route("/metrics", get(metrics))
        .fallback(|| async { failure(StatusCode::NOT_FOUND, "there is no such resource") })
        .with_state(server)
}

fn failure(status: StatusCode, what: impl std::fmt::Display) -> Response {
    (status, Json(json!({"error": what.to_string()}))).into_response()
}

fn find(server: &Server, number: u64) -> Option<Arc<LiveSession>> {
    lock(&server.shared.sessions).get(&number).cloned()
}

fn no_session(number: u64) -> Response {
    let what = format!("there is no session {number}");
    failure(StatusCode::NOT_FOUND, what)
}

fn describe(live: &LiveSession) -> Value {
    let progress = live.session.progress();
    let regions = live.session.regions().map(|region| {
        json!({
            "base_host_virt_addr": region.at.0,
            "size": region.bytes,
            "offset": region.first_page * abi::PAGE_BYTES,
            "page_size": region.granule_bytes(),
        })
    });
    json!({
        "number": live.number,
        "pid": live.pid,
        "ability": live.session.ability().to_string(),
        "regions": regions.collect::<Vec<_>>(),
        "resident_bytes": progress.resident_bytes,
        "remaining_bytes": progress.remaining_bytes,
        "native_bytes": progress.native_bytes,
        "latest": live.latest().to_string(),
    })
}

async fn sessions(State(server): State<Server>) -> Response {
    let all = lock(&server.shared.sessions)
        .values()
        .cloned()
        .collect::<Vec<_>>();
    let all = all.iter().map(|live| describe(live)).collect::<Vec<_>>();
    Json(json!({ "sessions": all })).into_response()
}

async fn session(State(server): State<Server>, Path(number): Path<u64>) -> Response {
    match find(&server, number) {
        Some(live) => Json(describe(&live)).into_response(),
        None => no_session(number),
    }
}

/// The request for a difference.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Diff {
    /// Directory of the new image.
    directory: PathBuf,
    /// The state file that the monitor wrote at the same moment.
    vmstate: Option<PathBuf>,
    /// True if the machine is to run on while it is copied.
    #[serde(default)]
    live: bool,
}

async fn diff(
    State(server): State<Server>,
    Path(number): Path<u64>,
    body: Result<Json<Diff>, JsonRejection>,
) -> Response {
    let Json(wanted) = match body {
        Ok(wanted) => wanted,
        Err(error) => return failure(StatusCode::BAD_REQUEST, error.body_text()),
    };
    let Some(live) = find(&server, number) else {
        return no_session(number);
    };
    let shared = server.shared;
    let work = move || {
        let (directory, vmstate) = (&wanted.directory, wanted.vmstate.as_deref());
        if wanted.live {
            copying::begin(&live, &shared, directory, vmstate)?;
            return Ok((StatusCode::ACCEPTED, Json(live.copying.describe())));
        }
        let difference = live.diff(&shared, directory, vmstate)?;
        Ok((StatusCode::OK, Json(Some(copying::describe(&difference)))))
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(Ok(told)) => told.into_response(),
        Ok(Err(error)) => failure(status_of(&error), sys::causes::line(&error)),
        Err(error) => failure(StatusCode::INTERNAL_SERVER_ERROR, error),
    }
}

/// How far the last live difference is.
async fn copy(State(server): State<Server>, Path(number): Path<u64>) -> Response {
    match find(&server, number).map(|live| live.copying.describe()) {
        Some(Some(told)) => Json(told).into_response(),
        Some(None) => failure(StatusCode::NOT_FOUND, "there was no live difference"),
        None => no_session(number),
    }
}

fn status_of(error: &Error) -> StatusCode {
    match error.blame() {
        Blame::Unsupported => StatusCode::CONFLICT,
        Blame::Gone => StatusCode::GONE,
        Blame::Kernel | Blame::Corrupt | Blame::Store => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

async fn drain(State(server): State<Server>) -> Response {
    server.shared.drain();
    StatusCode::NO_CONTENT.into_response()
}

async fn metrics(State(server): State<Server>) -> Response {
    const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    match server.shared.metrics_text(&server.registry) {
        Ok(text) => ([(header::CONTENT_TYPE, TYPE)], text).into_response(),
        Err(error) => failure(StatusCode::INTERNAL_SERVER_ERROR, error),
    }
}
