//! `serve --otlp`: a collector is told what `GET /metrics` tells, and one that does not answer
//! disturbs nobody.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::metrics::v1::metric::Data;
use opentelemetry_proto::tonic::metrics::v1::number_data_point::Value;
use prost::Message as _;
use rustix::process::Signal;
use testkit::needs_root;
use testkit::page_server::PageServer;
use testkit::wait::{SOON, wait_for};

/// Pages of the memory: 4 MiB.
const PAGES: u64 = 1024;

fn server(options: &[&str]) -> PageServer {
    let mut server = PageServer::new(Path::new(env!("CARGO_BIN_EXE_stillframe")), PAGES);
    server.serve("0", options);
    server
}

/// Takes a request and answers it with `status`; its head, and its body. Those that the server has
/// given up are passed over.
fn receive(collector: &TcpListener, status: &str) -> (String, Vec<u8>) {
    collector.set_nonblocking(true).expect("set");
    loop {
        let accept = || collector.accept().ok();
        let (mut stream, _) = wait_for("the server to tell something", SOON, accept);
        stream.set_nonblocking(false).expect("set");
        stream.set_read_timeout(Some(SOON)).expect("set");
        let Some(request) = request(&mut stream) else {
            continue;
        };
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        // It may have been given up meanwhile.
        let _ = stream.write_all(answer.as_bytes());
        return request;
    }
}

/// A request; nothing where not all of it comes.
fn request(from: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    loop {
        let mut buffer = [0; 4096];
        let read = from.read(&mut buffer).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&buffer[..read]);
        let head_ends = bytes.windows(4).position(|four| four == b"\r\n\r\n");
        let Some(end) = head_ends else { continue };
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let length = length
            .expect("a length")
            .parse::<usize>()
            .expect("a number");
        if bytes.len() >= end + 4 + length {
            return Some((head, bytes[end + 4..].to_vec()));
        }
    }
}

fn metrics(body: &[u8]) -> Vec<Metric> {
    let request = ExportMetricsServiceRequest::decode(body).expect("a message");
    let [resource] = &request.resource_metrics[..] else {
        panic!("one server");
    };
    resource.scope_metrics[0].metrics.clone()
}

/// The sum of a counter's or gauge's points.
fn sum(metrics: &[Metric], name: &str) -> i64 {
    let metric = metrics.iter().find(|metric| metric.name == name);
    let points = match &metric.expect("it is told").data {
        Some(Data::Sum(sum)) => &sum.data_points,
        Some(Data::Gauge(gauge)) => &gauge.data_points,
        other => panic!("{other:?}"),
    };
    let values = points.iter().map(|point| match point.value {
        Some(Value::AsInt(value)) => value,
        other => panic!("{other:?}"),
    });
    values.sum()
}

#[test]
fn a_collector_is_told_what_the_control_socket_tells() {
    needs_root!();
    let collector = TcpListener::bind("127.0.0.1:0").expect("bound");
    let url = format!("http://{}", collector.local_addr().expect("an address"));
    let mut server = server(&["--otlp", &url, "--otlp-interval", "1"]);
    let monitor = server.monitor("told");
    server.session(monitor.pid());
    assert_eq!(monitor.ask("check"), "right");
    // A refusal is nobody's business but the collector's.
    let (head, _) = receive(&collector, "503 Service Unavailable");
    assert!(head.starts_with("post /v1/metrics http/1.1"), "{head}");
    assert!(
        head.contains("content-type: application/x-protobuf"),
        "{head}"
    );
    let (_, text) = server.ask("GET", "/metrics", None);
    let all = |name: &str| {
        let lines = text
            .lines()
            .filter(|line| line.starts_with(&format!("{name}_total")));
        let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<i64>().ok());
        values.sum::<i64>()
    };
    let counters = ["stillframe_uffd_faults", "stillframe_uffd_installed_bytes"];
    assert!(counters.iter().all(|name| all(name) > 0), "{text}");
    // What was sent before the machine was there is not all of it.
    let metrics = wait_for("what the control socket tells", SOON, || {
        let metrics = metrics(&receive(&collector, "200 OK").1);
        let same = |name: &&str| sum(&metrics, name) == all(name);
        counters.iter().all(same).then_some(metrics)
    });
    assert_eq!(sum(&metrics, "stillframe_uffd_sessions"), 1);
    let names = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let names = names.filter_map(|line| line.split(' ').next());
    let told = metrics.iter().map(|metric| &*metric.name);
    assert_eq!(told.collect::<Vec<_>>(), names.collect::<Vec<_>>());
    drop(monitor);
    // The last word: no session any more.
    server.signal(Signal::TERM);
    let last = wait_for("its last word", SOON, || {
        let metrics = self::metrics(&receive(&collector, "200 OK").1);
        (sum(&metrics, "stillframe_uffd_sessions") == 0).then_some(metrics)
    });
    assert!(sum(&last, "stillframe_uffd_faults") > 0);
    drop(collector);
    assert_eq!(server.wait(), Some(0), "{}", server.log());
}

#[test]
fn a_collector_that_is_not_there_or_silent_disturbs_nobody() {
    needs_root!();
    let silent = TcpListener::bind("127.0.0.1:0").expect("bound");
    let silent_url = format!("http://{}/x", silent.local_addr().expect("an address"));
    // Nobody listens at port 1; names below `invalid` are nobody's.
    for url in [&silent_url, "http://127.0.0.1:1", "http://nowhere.invalid"] {
        let mut server = server(&["--otlp", url, "--otlp-interval", "1"]);
        let monitor = server.monitor("told");
        let number = server.session(monitor.pid());
        assert_eq!(monitor.ask("fire 1 200"), "right", "{url}");
        server.diff(number, "1");
        server.compare("1", &monitor, url);
        server.signal(Signal::TERM);
        let ended = Instant::now();
        assert_eq!(server.wait(), Some(0), "{url}: {}", server.log());
        assert!(ended.elapsed() < Duration::from_secs(20), "{url}");
        assert_eq!(monitor.ask("check"), "right", "{url}");
    }
    let wrong = PageServer::new(Path::new(env!("CARGO_BIN_EXE_stillframe")), PAGES);
    let words = [
        "serve",
        "-D",
        "0",
        "--socket",
        "s",
        "--otlp",
        "https://localhost",
    ];
    let told = wrong.command(&words).output().expect("it starts");
    assert!(!told.status.success());
    let said = String::from_utf8_lossy(&told.stderr);
    assert!(said.contains("only http is known"), "{said}");
}
