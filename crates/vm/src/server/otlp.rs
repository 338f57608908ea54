//! Metrics told to an OpenTelemetry collector, again and again.
//!
//! Not crate opentelemetry-otlp: its exporter takes only metrics that the meters of its SDK have
//! collected, as the fields of `ResourceMetrics` are private. The server would count everything
//! twice, for `GET /metrics` and for the exporter, and link five crates more. The messages are
//! those of opentelemetry-proto, and hyper is there for the control socket.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, SystemTime};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::client::conn::http1::handshake;
use hyper::{Request, Uri, header};
use hyper_util::rt::TokioIo;
use prometheus_client::registry::Registry;
use tokio::net::TcpStream;

use super::SharedState;
use super::otlp_message::{Origin, message};
use crate::{Error, Result};

/// How long a collector may take to answer.
const ANSWER: Duration = Duration::from_secs(2);
/// The same for the last time, for which the end of the server waits.
const LAST_ANSWER: Duration = Duration::from_secs(1);
/// Path of metrics unless the URL has one.
const PATH: &str = "/v1/metrics";

/// Collector of metrics, and interval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Otlp {
    uri: Uri,
    interval: Duration,
}

impl Otlp {
    /// `url` is `http://HOST[:PORT][/PATH]`; the port is 4318, and the path `/v1/metrics`, where it
    /// says nothing else.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(url: &str, interval: Duration) -> std::result::Result<Self, String> {
        let uri = url.parse::<Uri>().map_err(|error| error.to_string())?;
        match uri.scheme_str() {
            Some("http") => {}
            Some(other) => return Err(format!("{other}: only http is known")),
            None => return Err("it does not begin with http://".to_owned()),
        }
        if uri.host().is_none_or(str::is_empty) {
            return Err("it has no host".to_owned());
        }
        Ok(Self { uri, interval })
    }

    fn authority(&self) -> (String, u16) {
        let host = self.uri.host().unwrap_or_default();
        let host = host.trim_matches(['[', ']']).to_owned();
        (host, self.uri.port_u16().unwrap_or(4318))
    }

    fn path(&self) -> &str {
        match self.uri.path_and_query().map(|path| path.as_str()) {
            None | Some("/") => PATH,
            Some(path) => path,
        }
    }

    /// Sends a message; what is wrong otherwise.
    async fn post(&self, body: Vec<u8>) -> std::result::Result<(), String> {
        let told = |error: &dyn std::error::Error| sys::causes::line(error);
        let (host, port) = self.authority();
        let stream = TcpStream::connect((host.as_str(), port)).await;
        let stream = TokioIo::new(stream.map_err(|error| told(&error))?);
        let (mut sender, connection) = handshake(stream).await.map_err(|error| told(&error))?;
        let connection = tokio::spawn(connection);
        let request = Request::post(self.path())
            .header(header::HOST, format!("{host}:{port}"))
            .header(header::CONTENT_TYPE, "application/x-protobuf")
            .header(header::USER_AGENT, "stillframe")
            .body(Full::new(Bytes::from(body)))
            .map_err(|error| told(&error))?;
        let answer = sender.send_request(request).await;
        let answer = answer.map_err(|error| told(&error))?;
        let status = answer.status();
        // The rest may be long, and nothing is wanted of it.
        connection.abort();
        match status.is_success() {
            true => Ok(()),
            false => Err(format!("it answers {status}")),
        }
    }
}

/// Has a server's metrics told.
pub(crate) fn start(shared: &Arc<SharedState>, otlp: Otlp) -> Result<Exporter> {
    let socket = std::path::absolute(&shared.options.socket);
    let socket = socket.unwrap_or_else(|_| shared.options.socket.clone());
    let host = rustix::system::uname();
    let origin = Origin {
        attributes: vec![
            ("service.name", "stillframe".to_owned()),
            ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
            ("service.instance.id", socket.display().to_string()),
            ("host.name", host.nodename().to_string_lossy().into_owned()),
        ],
        since: SystemTime::now(),
    };
    let mut registry = Registry::default();
    shared.metrics.register(&mut registry);
    let shared = shared.clone();
    Exporter::start(otlp, origin, move || {
        shared.metrics_text(&registry).unwrap_or_default()
    })
}

/// A thread that tells metrics; dropping it tells them once more.
pub(crate) struct Exporter {
    end: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Exporter {
    /// Starts it; `text` gives the metrics as OpenMetrics text. A collector that cannot be reached
    /// keeps nobody else waiting.
    pub fn start(
        otlp: Otlp,
        origin: Origin,
        text: impl Fn() -> String + Send + 'static,
    ) -> Result<Self> {
        let doing = "cannot start a thread that tells metrics";
        let failed = |source: io::Error| Error::Kernel { doing, source };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(failed)?;
        let (end, ended) = channel();
        let run = move || {
            let mut told = Ok(());
            loop {
                let last = is_last(&ended, otlp.interval);
                let limit = if last { LAST_ANSWER } else { ANSWER };
                let body = message(&text(), &origin, SystemTime::now());
                let sent = runtime.block_on(async {
                    let sent = tokio::time::timeout(limit, otlp.post(body)).await;
                    sent.unwrap_or_else(|_| Err(format!("no answer for {limit:?}")))
                });
                note(&otlp, &told, &sent);
                told = sent;
                if last {
                    // A name that is being looked up is not waited for.
                    return runtime.shutdown_background();
                }
            }
        };
        let thread = Builder::new().name("otlp".to_owned()).spawn(run);
        Ok(Self {
            end: Some(end),
            thread: Some(thread.map_err(failed)?),
        })
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        self.end.take();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Waits until it is time; whether it is for the last time.
fn is_last(ended: &Receiver<()>, interval: Duration) -> bool {
    !matches!(ended.recv_timeout(interval), Err(RecvTimeoutError::Timeout))
}

/// Logs that it does not work, or works again, once.
fn note(
    otlp: &Otlp,
    before: &std::result::Result<(), String>,
    now: &std::result::Result<(), String>,
) {
    match (before, now) {
        (Ok(()), Err(error)) => log::warn!("metrics cannot be told to {}: {error}", otlp.uri),
        (Err(_), Ok(())) => log::info!("metrics are told to {} again", otlp.uri),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_url_leaves_open_is_usual() {
        let otlp = |url: &str| Otlp::new(url, Duration::from_secs(1));
        let parts = |url: &str| {
            let otlp = otlp(url).expect("right");
            let (host, port) = otlp.authority();
            format!("{host} {port} {}", otlp.path())
        };
        assert_eq!(parts("http://localhost"), "localhost 4318 /v1/metrics");
        assert_eq!(parts("http://[::1]:80/"), "::1 80 /v1/metrics");
        assert_eq!(parts("http://host:99/x/y?z=1"), "host 99 /x/y?z=1");
        for (url, what) in [
            ("https://localhost", "only http is known"),
            ("localhost:4318", "http"),
            ("/v1/metrics", "http://"),
            ("http://", ""),
            ("", ""),
        ] {
            let error = otlp(url).expect_err("refused");
            assert!(error.contains(what), "{url}: {error}");
        }
    }
}
