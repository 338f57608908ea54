//! redis-server under redis-benchmark: what its clients notice of being saved.
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::rounds::Bench;

/// Connections of the load.
const CLIENTS: usize = 20;
/// How long anything here may take.
const DEADLINE: Duration = Duration::from_secs(60);

/// What is done to the server while it is under load, over and over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activity {
    /// Nothing.
    Nothing,
    /// Rounds of a pre-dump.
    Rounds,
    /// Live dumps.
    Live,
    /// redis' own: it forks, and the child writes a file.
    Save,
}

impl Activity {
    fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Rounds => "rounds of pre-dump",
            Self::Live => "live dumps",
            Self::Save => "redis' BGSAVE",
        }
    }
}

/// Measures the latencies of a load while each of `all` is done, and returns a table of them.
///
/// # Errors
/// When redis is missing or anything fails.
pub fn latencies(bench: &Bench, all: &[Activity]) -> Result<String> {
    // Half a gigabyte, or a sixth of that in a quick measurement.
    let quick = bench.rounds < 5;
    let keys = if quick { 150_000 } else { 450_000 };
    let requests = if quick { 200_000 } else { 1_000_000 };
    let mut out = format!(
        "\nredis-server with {keys} keys of 1 KiB and {CLIENTS} clients that write and read them \
         ({requests} requests of each) while it is saved, over and over:\n\n\
         | meanwhile | times | requests/s | p50, ms | p95, ms | p99, ms | longest, ms |\n\
         | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    );
    for doing in all {
        let folder = bench.folder("redis")?;
        let mut server = Server::start(&folder)?;
        server.fill(keys)?;
        let mut load = server.load(keys, requests, &folder)?;
        server.wait_clients(CLIENTS + 1)?;
        let mut times = 0;
        while load
            .try_wait()
            .map_err(kernel_error("wait for a load"))?
            .is_none()
        {
            if *doing == Activity::Nothing {
                std::thread::sleep(Duration::from_millis(20));
                continue;
            }
            match server.save(*doing, bench, times) {
                Ok(()) => times += 1,
                // At its end the load closes its connections in the middle of it.
                Err(_) if ended(&mut load)? => break,
                Err(error) => return Err(error),
            }
        }
        let csv = folder.join("load");
        let csv = std::fs::read_to_string(&csv).map_err(file_error("read", &csv))?;
        write_row(&mut out, *doing, times, &csv)?;
        bench.clear();
    }
    Ok(out)
}

/// Tells whether a load ends within a second.
fn ended(load: &mut Child) -> Result<bool> {
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        if load
            .try_wait()
            .map_err(kernel_error("wait for a load"))?
            .is_some()
        {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(false)
}

/// Adds what redis-benchmark says of its writes and reads: of each number the worse one.
fn write_row(out: &mut String, doing: Activity, times: usize, csv: &str) -> Result<()> {
    let row = |name: &str| -> Option<Vec<f64>> {
        let prefix = format!("\"{name}\",");
        let line = csv.lines().find_map(|line| line.strip_prefix(&prefix))?;
        let numbers = line.split(',').map(|word| word.trim_matches('"').parse());
        numbers.collect::<std::result::Result<_, _>>().ok()
    };
    // rps, then average, least, p50, p95, p99 and longest latency.
    let both = row("SET").zip(row("GET"));
    let both = both.filter(|(set, get)| set.len() == 7 && get.len() == 7);
    let Some((set, get)) = both else {
        let what = format!("redis-benchmark said something else: {csv}");
        return Err(Error::Nothing { what });
    };
    let worse = |column: usize| set[column].max(get[column]);
    let _ = writeln!(
        out,
        "| {} | {times} | {:.0} | {:.2} | {:.2} | {:.2} | {:.1} |",
        doing.name(),
        set[0].min(get[0]),
        worse(3),
        worse(4),
        worse(5),
        worse(6),
    );
    Ok(())
}

/// A server of our own; it is killed when this is dropped.
struct Server {
    child: Child,
    port: u16,
    client: BufReader<TcpStream>,
}

impl Server {
    fn start(folder: &Path) -> Result<Self> {
        let port = free_port()?;
        // A session of its own: otherwise it would belong to that of a terminal.
        let mut command = Command::new("setsid");
        command
            .args(["redis-server", "--bind", "127.0.0.1", "--save", ""])
            .args(["--port", &port.to_string(), "--dir"])
            .arg(folder)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = spawn(&mut command)?;
        let begun = Instant::now();
        loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => {
                    let limit = stream.set_read_timeout(Some(DEADLINE));
                    limit.map_err(kernel_error("set a limit"))?;
                    let client = BufReader::new(stream);
                    return Ok(Self {
                        child,
                        port,
                        client,
                    });
                }
                Err(error) if begun.elapsed() > DEADLINE => {
                    return Err(kernel_error("connect to redis")(error));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Sends a command and returns its answer, without the type's mark.
    fn ask(&mut self, command: &[&str]) -> Result<String> {
        let mut text = format!("*{}\r\n", command.len());
        for word in command {
            let _ = write!(text, "${}\r\n{word}\r\n", word.len());
        }
        let failed = kernel_error("talk to redis");
        let mut answer = || {
            self.client.get_mut().write_all(text.as_bytes())?;
            let mut line = String::new();
            self.client.read_line(&mut line)?;
            let line = line.trim_end();
            let Some(bytes) = line.strip_prefix('$') else {
                return Ok(line.get(1..).unwrap_or_default().to_owned());
            };
            let bytes: usize = bytes.parse().map_err(std::io::Error::other)?;
            let mut bulk = vec![0; bytes + 2];
            self.client.read_exact(&mut bulk)?;
            bulk.truncate(bytes);
            String::from_utf8(bulk).map_err(std::io::Error::other)
        };
        answer().map_err(failed)
    }

    /// A number out of INFO.
    fn info(&mut self, name: &str) -> Result<usize> {
        let info = self.ask(&["INFO"])?;
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|value| value.parse().ok())
            .ok_or_else(|| Error::Nothing {
                what: format!("redis does not tell {name}"),
            })
    }

    /// Makes the keys that the load writes: redis-benchmark's, with twelve digits.
    fn fill(&mut self, keys: usize) -> Result<()> {
        let script = format!(
            "local value = string.rep('x', 1024) for i = 0, {} do \
             redis.call('SET', string.format('key:%012d', i), value) end return 1",
            keys - 1
        );
        self.ask(&["EVAL", &script, "0"]).map(drop)
    }

    fn load(&self, keys: usize, requests: usize, folder: &Path) -> Result<Child> {
        let csv = folder.join("load");
        let csv = std::fs::File::create(&csv).map_err(file_error("create", &csv))?;
        let mut command = Command::new("redis-benchmark");
        command
            .args(["-p", &self.port.to_string(), "-t", "set,get", "--csv"])
            .args(["-c", &CLIENTS.to_string(), "-d", "1024"])
            .args(["-n", &requests.to_string(), "-r", &keys.to_string()])
            .stdin(Stdio::null())
            .stdout(csv)
            .stderr(Stdio::null());
        spawn(&mut command)
    }

    fn wait_clients(&mut self, count: usize) -> Result<()> {
        self.wait("clients", |server| {
            Ok(server.info("connected_clients")? >= count)
        })
    }

    fn wait(&mut self, what: &str, done: impl Fn(&mut Self) -> Result<bool>) -> Result<()> {
        let begun = Instant::now();
        while !done(self)? {
            if begun.elapsed() > DEADLINE {
                let what = format!("redis waits for {what} for too long");
                return Err(Error::Nothing { what });
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Does it once; `times` tells how often it was done before.
    fn save(&mut self, doing: Activity, bench: &Bench, times: usize) -> Result<()> {
        let pid = Pid::from_child(&self.child);
        let said = |images: &Path| images.join("said.log");
        match doing {
            Activity::Nothing => Ok(()),
            Activity::Save => {
                self.ask(&["BGSAVE"])?;
                self.wait("its child", |server| {
                    Ok(server.info("rdb_bgsave_in_progress")? == 0)
                })
            }
            Activity::Live => {
                let images = bench.folder("images")?;
                let mut command = bench.stillframe.dump(pid, &images, true, false);
                command.args(["--live", "--tcp-established"]);
                crate::tool::timed(&mut command, &said(&images)).map(drop)
            }
            Activity::Rounds => {
                let images = bench.folder(&times.to_string())?;
                let mut command = bench.stillframe.pre_dump(pid, &images);
                if let Some(last) = times.checked_sub(1) {
                    command.args(["--prev-images-dir", &format!("../{last}")]);
                }
                crate::tool::timed(&mut command, &said(&images)).map(drop)
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(command: &mut Command) -> Result<Child> {
    command.spawn().map_err(|source| Error::Start {
        program: crate::tool::name(command),
        source,
    })
}

/// A port that nobody listens at.
fn free_port() -> Result<u16> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).map_err(kernel_error("find a port"))?;
    let place = listener.local_addr().map_err(kernel_error("find a port"))?;
    Ok(place.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_both_requests_the_worse_one_counts() {
        let csv = "\"test\",\"rps\"\n\
            \"SET\",\"50000.5\",\"0.1\",\"0.02\",\"0.3\",\"0.5\",\"0.9\",\"12.0\"\n\
            \"GET\",\"60000.0\",\"0.1\",\"0.02\",\"0.2\",\"0.6\",\"0.8\",\"3.0\"\n";
        let mut out = String::new();
        write_row(&mut out, Activity::Live, 4, csv).expect("it is understood");
        assert_eq!(
            out,
            "| live dumps | 4 | 50000 | 0.30 | 0.60 | 0.90 | 12.0 |\n"
        );
        assert!(write_row(&mut out, Activity::Live, 4, "nothing").is_err());
    }
}
