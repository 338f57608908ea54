//! tor, which confines itself by a seccomp filter.
use std::io::{Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::stillframe;

const SETTINGS: &str = "SocksPort 0\nDisableNetwork 1\nSandbox 1\nCookieAuthentication 0\n";

fn start(folder: &Path) -> Spawned {
    // It listens where nobody else could look.
    let own = folder.join("own");
    let mut builder = std::fs::DirBuilder::new();
    builder.mode(0o700).create(&own).expect("it is new");
    let control = own.join("control");
    let settings = format!(
        "{SETTINGS}DataDirectory {}\nControlPort unix:{}\n",
        folder.join("data").display(),
        control.display()
    );
    std::fs::write(folder.join("torrc"), settings).expect("the folder can be written");
    let tor = Program::new("tor")
        .arg("-f")
        .arg(folder.join("torrc"))
        .output(&folder.join("log"))
        .spawn();
    tor.wait_ready("its filter", || {
        control.exists() && filters(tor.pid()) > 0 && ask(folder).is_some()
    });
    tor
}

/// How many filters its first thread has.
fn filters(pid: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let mut lines = status.lines();
    let count = lines.find_map(|line| line.strip_prefix("Seccomp_filters:"));
    count.map_or(0, |count| count.trim().parse().expect("a number"))
}

/// What it says of itself.
fn ask(folder: &Path) -> Option<String> {
    let mut stream = UnixStream::connect(folder.join("own/control")).ok()?;
    let questions = b"AUTHENTICATE\r\nGETINFO process/pid\r\nQUIT\r\n";
    stream.write_all(questions).ok()?;
    let mut told = String::new();
    stream.read_to_string(&mut told).ok()?;
    Some(told)
}

#[test]
fn a_program_under_its_own_filter_goes_on_under_it() {
    needs_root!();
    needs_program!("tor");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        return;
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let folder = folder.path();
    let tor = start(folder);
    let before = filters(tor.pid());
    let pid = tor.pid().to_string();
    for options in [&["--file-locks"][..], &["--file-locks", "--live"]] {
        for _ in 0..2 {
            stillframe.clear();
            stillframe.dump(tor.pid(), options).must();
            tor.kill();
            wait_until("its end", SOON, || !tor.is_alive());
            stillframe.restore(&["--file-locks"]).must();
            assert_eq!(filters(tor.pid()), before, "{options:?}");
            let told = ask(folder).expect("it answers");
            assert!(told.contains(&pid), "{told}");
        }
    }
}
