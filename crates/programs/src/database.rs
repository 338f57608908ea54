//! Data base servers under transactions of clients that stay connected.
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use testkit::program::{Program, Spawned, free_port};
use testkit::wait::{self, SOON};

use crate::Work;
use crate::error::{Result, failure, file_error, run, start_error};
use crate::serve::{Line, Recipe, expect};

/// Where Debian has PostgreSQL's programs, each version in a folder of its own.
const VERSIONS: &str = "/usr/lib/postgresql";
/// The user that runs it: it refuses to be root.
const USER: &str = "postgres";

/// PostgreSQL, and pgbench with four connections to it.
struct Postgres {
    server: Spawned,
    bench: Child,
    folder: PathBuf,
    programs: PathBuf,
    port: u16,
}

/// Starts PostgreSQL with a fresh cluster, and pgbench.
///
/// # Errors
/// When one of them cannot be started.
pub fn postgres(folder: &Path) -> Result<Box<dyn Work>> {
    let programs = newest_programs()?;
    // Its user must be able to get at the folder.
    let own = folder.join("data");
    fs::create_dir(&own).map_err(file_error("make", &own))?;
    run_quietly(Command::new("chown").arg(USER).arg(&own))?;
    for above in folder.ancestors().take(3) {
        run_quietly(Command::new("chmod").arg("a+x").arg(above))?;
    }
    run_quietly(
        as_user(programs.join("initdb"))
            .args(["--no-sync", "--auth=trust", "--no-instructions", "-D"])
            .arg(&own),
    )?;
    let port = free_port();
    let mut server = Program::new("setpriv").args(user_switch());
    server = server.arg(programs.join("postgres")).arg("-D").arg(&own);
    for setting in [
        format!("port={port}"),
        "listen_addresses=127.0.0.1".into(),
        "unix_socket_directories=".into(),
        "shared_buffers=32MB".into(),
        "max_wal_size=64MB".into(),
        "checkpoint_timeout=30s".into(),
    ] {
        server = server.arg("-c").arg(setting);
    }
    let server = server
        .env("HOME", folder)
        .folder(&own)
        .output(&folder.join("log"))
        .spawn();
    server.wait_port(port);
    let client = |program: &str| client(&programs.join(program), port);
    let ready = wait::try_wait_for(SOON, || {
        let mut asked = client("psql");
        asked.args(["-Atqc", "select 1", "postgres"]);
        asked.stdout(Stdio::null()).stderr(Stdio::null());
        asked.status().ok().filter(|status| status.success())
    });
    ready.ok_or_else(|| failure("it takes no clients"))?;
    run_quietly(client("pgbench").args(["-i", "-q", "-s", "2", "postgres"]))?;
    let log = folder.join("bench");
    let file = File::create(&log).map_err(file_error("make", &log))?;
    let mut bench = client("pgbench");
    bench
        .args(["-c", "4", "-j", "2", "-T", "100000", "-P", "1", "postgres"])
        .env("HOME", folder)
        .stdout(Stdio::null())
        .stderr(file);
    let bench = bench
        .spawn()
        .map_err(|source| start_error(&bench, source))?;
    Ok(Box::new(Postgres {
        server,
        bench,
        folder: folder.to_owned(),
        programs,
        port,
    }))
}

impl Postgres {
    /// What psql says to a query.
    fn ask(&self, query: &str) -> Result<String> {
        let mut psql = client(&self.programs.join("psql"), self.port);
        psql.args(["-Atqc", query, "postgres"]);
        let told = psql.output().map_err(|source| start_error(&psql, source))?;
        Ok(String::from_utf8_lossy(&told.stdout).trim().to_owned())
    }

    /// The transactions that pgbench told of, and that it runs on without an error.
    fn transactions(&mut self) -> Result<u64> {
        let log = fs::read_to_string(self.folder.join("bench")).unwrap_or_default();
        let ended = self.bench.try_wait().is_ok_and(|ended| ended.is_some());
        if ended || log.contains("abort") || log.contains("error") {
            return Err(failure(format!("pgbench: {log}")));
        }
        // progress: 1.0 s, 512.3 tps, lat 1.9 ms stddev 0.7, 0 failed
        let rates = log.lines().filter_map(|line| {
            let (rate, _) = line.split_once(" tps")?;
            let (_, rate) = rate.rsplit_once(' ')?;
            rate.parse::<f64>().ok()
        });
        Ok(rates.map(|rate| rate as u64).sum())
    }
}

impl Work for Postgres {
    fn spawned(&self) -> &Spawned {
        &self.server
    }

    fn progress(&mut self) -> Result<u64> {
        self.transactions()
    }

    /// Every transaction adds the same amount to an account, a teller, a branch and the history.
    fn finish(&mut self) -> Result<()> {
        let told = self.transactions()?;
        let _ = self.bench.kill();
        let _ = self.bench.wait();
        let same = "select (select sum(abalance) from pgbench_accounts) = sum(delta) \
            and (select sum(bbalance) from pgbench_branches) = sum(delta) \
            and (select sum(tbalance) from pgbench_tellers) = sum(delta) from pgbench_history";
        expect(&self.ask(same)?, "t")?;
        let rows = self.ask("select count(*) from pgbench_history")?;
        // A rate is the mean of a second that may have been longer.
        if rows.parse::<u64>().is_ok_and(|rows| rows >= told / 2) {
            let log = fs::read_to_string(self.folder.join("log")).unwrap_or_default();
            let bad = ["PANIC", "terminated by signal", "corrupt"];
            return match bad.iter().find(|bad| log.contains(*bad)) {
                Some(_) => Err(failure(log)),
                None => Ok(()),
            };
        }
        Err(failure(format!("{rows} rows of {told} transactions")))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let _ = self.bench.kill();
        let _ = self.bench.wait();
    }
}

fn newest_programs() -> Result<PathBuf> {
    let versions = fs::read_dir(VERSIONS).into_iter().flatten().flatten();
    let newest = versions
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .max();
    let newest = newest.ok_or_else(|| failure(format!("nothing in {VERSIONS}")))?;
    Ok(Path::new(VERSIONS).join(newest.to_string()).join("bin"))
}

/// setpriv(1)'s arguments.
fn user_switch() -> [String; 3] {
    [
        format!("--reuid={USER}"),
        format!("--regid={USER}"),
        "--clear-groups".into(),
    ]
}

fn as_user(program: PathBuf) -> Command {
    let mut command = Command::new("setpriv");
    command.args(user_switch()).arg(program);
    command.current_dir("/");
    command
}

/// A client of the server at `port`, with everything else as it is by default.
fn client(program: &Path, port: u16) -> Command {
    let mut command = Command::new(program);
    command
        .args(["-h", "127.0.0.1", "-U", USER, "-p", &port.to_string()])
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end, without its output.
fn run_quietly(command: &mut Command) -> Result<()> {
    run(command.stdout(Stdio::null()).stderr(Stdio::null()))
}

/// MariaDB, with or without asynchronous input and output by the kernel.
///
/// # Errors
/// When it cannot be started.
pub fn mariadb(folder: &Path, native: &str) -> Result<Box<dyn Work>> {
    let data = folder.join("data");
    run_quietly(
        Command::new("mariadb-install-db")
            .args(["--no-defaults", "--user=root", "--skip-test-db"])
            .arg("--auth-root-authentication-method=normal")
            .arg(format!("--datadir={}", data.display())),
    )?;
    let command = [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        "--datadir={folder}/data",
        "--socket={folder}/socket",
        "--pid-file={folder}/pid",
        "--bind-address=127.0.0.1",
        "--port={port}",
        "--innodb-buffer-pool-size=32M",
        native,
    ];
    Recipe {
        files: &[],
        command: &command,
        connect: Some(mariadb_client),
        greet: mariadb_greet,
        exchange: mariadb_exchange,
    }
    .start(folder)
}

/// mariadb(1), which is asked by its standard input.
fn mariadb_client(port: u16) -> Result<Line> {
    let mut command = Command::new("mariadb");
    command
        .args([
            "--no-defaults",
            "--batch",
            "--skip-column-names",
            "--unbuffered",
        ])
        .args(["--host=127.0.0.1", "--user=root", "--protocol=tcp"])
        .arg(format!("--port={port}"));
    Line::to_program(command)
}

fn mariadb_greet(line: &mut Line, client: usize, _: u64) -> Result<()> {
    line.send(format!(
        "create database d{client}; use d{client};\n\
         create table counts(id int primary key, n bigint) engine=innodb;\n\
         create table words(n bigint primary key, word varchar(100), key(word)) engine=innodb;\n\
         insert into counts values(1, 0);\n"
    ))?;
    line.ask("select n from counts;\n", "0")
}

/// A transaction that counts and adds a row, and what stands there afterwards.
fn mariadb_exchange(line: &mut Line, _: usize, number: u64) -> Result<()> {
    line.send(format!(
        "begin; update counts set n = n + 1; \
         insert into words values({number}, repeat('word {number} ', 5)); commit;\n"
    ))?;
    let wanted = format!("{number}\t{number}");
    line.ask(
        "select n, (select max(words.n) from words) from counts;\n",
        &wanted,
    )
}
