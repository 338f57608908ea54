//! A process for the tests of this crate.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use abi::{Addr, Span};
use sys::process::Process;

use crate::Thread;

pub fn cat() -> (Child, i32) {
    let mut command = Command::new("cat");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("cat starts");
    echo(&mut child);
    let pid = i32::try_from(child.id()).expect("a pid");
    (child, pid)
}

pub fn echo(child: &mut Child) {
    child
        .stdin
        .as_mut()
        .expect("piped")
        .write_all(b"x")
        .expect("cat reads");
    child
        .stdout
        .as_mut()
        .expect("piped")
        .read_exact(&mut [0])
        .expect("cat echoes");
}

/// The numbers of its descriptors, in ascending order.
pub fn descriptors(pid: i32) -> Vec<i32> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
    let number = |name: std::ffi::OsString| name.to_string_lossy().parse::<i32>();
    let mut numbers = entries
        .map(|entry| number(name(entry)).expect("a number"))
        .collect::<Vec<_>>();
    numbers.sort_unstable();
    numbers
}

pub fn vdso(pid: i32) -> Span {
    span_of(pid, "[vdso]")
}

/// The addresses of the mapping that /proc/PID/maps calls `name`.
pub fn span_of(pid: i32, name: &str) -> Span {
    span(pid, |line| line.ends_with(name))
}

/// The addresses of the mapping that begins at `start`.
pub fn span_at(pid: i32, start: Addr) -> Span {
    span(pid, |line| line.starts_with(&format!("{:x}-", start.0)))
}

fn span(pid: i32, is_it: impl Fn(&str) -> bool) -> Span {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
    let line = maps.lines().find(|line| is_it(line)).expect("a mapping");
    let range = line.split(' ').next().expect("a range");
    let (start, end) = range.split_once('-').expect("two ends");
    let addr = |text| Addr(u64::from_str_radix(text, 16).expect("hexadecimal"));
    Span {
        start: addr(start),
        end: addr(end),
    }
}

pub fn stop(pid: i32) -> Vec<Thread> {
    let seized = Thread::seize(pid).expect("seize");
    vec![seized.stopped(&Process::new(pid), None).expect("stopped")]
}

pub fn memory(pid: i32) -> File {
    let path = format!("/proc/{pid}/mem");
    File::options()
        .read(true)
        .write(true)
        .open(path)
        .expect("memory")
}
