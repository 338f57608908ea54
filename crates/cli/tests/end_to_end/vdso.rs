//! The vDSO: another kernel's, moved, unmapped, with a thread inside.
use std::fs;
use std::path::Path;
use std::time::Instant;

use resources::map::memory::Special;
use resources::map::vdso::{self, Host, elf::Elf, found};
use sys::ptrace::{self, Event};
use testkit::needs_root;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};

use crate::stillframe;

/// Where `cargo xtask test` puts the vDSOs of other kernels.
const FOREIGN: &str = "/var/cache/stillframe/vdso";

/// The offsets of the functions that the subject asks, as its arguments.
fn offsets(code: &[u8]) -> Vec<String> {
    let functions = Elf::new(code).and_then(|elf| elf.functions());
    let functions = functions.expect("a vDSO");
    let offset = |name: &str| {
        let mut all = functions.iter();
        let function = all.find(|function| function.name == name);
        function.expect(name).offset.to_string()
    };
    ["clock_gettime", "gettimeofday", "time", "getcpu"]
        .map(|name| offset(&format!("__vdso_{name}")))
        .to_vec()
}

/// Starts the subject `clock` with a vDSO of `code`.
fn clock(which: &str, code: &[u8], more: &[&str]) -> Subject {
    let offsets = offsets(code);
    let mut arguments = vec![which];
    arguments.extend(offsets.iter().map(String::as_str));
    arguments.extend(more);
    Subject::start("clock", &arguments)
}

/// A subject that asks this kernel's vDSO for the time without pause.
pub fn asking() -> Subject {
    clock("own", own(), &[])
}

fn own() -> &'static [u8] {
    sys::vdso::own().expect("this kernel has a vDSO")
}

/// The mappings of a task: first address, protection, name.
fn mappings(pid: u32) -> Vec<(u64, u64, String, String)> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    let line = |line: &str| {
        let mut words = line.split_ascii_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).expect("hexadecimal");
        let prot = words.next()?.to_owned();
        let name = words.nth(3).unwrap_or_default().to_owned();
        Some((number(start), number(end), prot, name))
    };
    maps.lines().filter_map(line).collect()
}

fn named(pid: u32, name: &str) -> Vec<(u64, u64)> {
    let all = mappings(pid).into_iter();
    let named = all.filter(|mapping| mapping.3.starts_with(name));
    named.map(|(start, end, _, _)| (start, end)).collect()
}

/// Insists that there is one vDSO, with its data directly before it, and that the code at
/// `address` is memory of the task's own if `is_proxy`.
#[track_caller]
fn assert_one(pid: u32, address: u64, is_proxy: bool) {
    let maps = mappings(pid);
    let code = named(pid, "[vdso]");
    assert_eq!(code.len(), 1, "{maps:x?}");
    let data = named(pid, "[vvar");
    let data = data.iter().rev();
    let start = data.fold(code[0].0, |at, data| {
        assert_eq!(data.1, at, "data is left behind: {maps:x?}");
        data.0
    });
    assert!(start < code[0].0, "no data: {maps:x?}");
    let at = maps.iter().find(|one| one.0 <= address && address < one.1);
    let (_, _, prot, name) = at.expect("what the program calls is mapped");
    let proxies = maps
        .iter()
        .filter(|one| one.2 == "r-xp" && one.3.is_empty())
        .count();
    assert_eq!(proxies, usize::from(is_proxy), "{maps:x?}");
    let expected = if is_proxy { "" } else { "[vdso]" };
    assert_eq!(
        (prot.as_str(), name.as_str()),
        ("r-xp", expected),
        "{maps:x?}"
    );
}

#[track_caller]
fn advances(subject: &Subject) {
    let now = subject.ask_number("rounds");
    wait_until("the subject to go on", SOON, || {
        subject.ask_number("rounds") > now
    });
}

/// A subject with the vDSO of Debian's kernel package of `suite`, through ten cycles.
fn foreign(suite: &str) -> bool {
    let file = format!("{FOREIGN}/{suite}.so");
    let Ok(code) = fs::read(&file) else {
        return false;
    };
    let stillframe = stillframe();
    let subject = clock("foreign", &code, &[&file]);
    let address = subject.ask_number("address");
    assert_eq!(subject.ask("check"), "right", "before the first dump");
    let mut count = None;
    for cycle in 0..10 {
        stillframe.cycle(1, &subject, &[]);
        assert_eq!(subject.ask("check all"), "right", "cycle {cycle}");
        assert_eq!(subject.ask_number("address"), address);
        assert_one(subject.pid(), address, true);
        let maps = mappings(subject.pid()).len();
        assert_eq!(
            *count.get_or_insert(maps),
            maps,
            "cycle {cycle} left something"
        );
        advances(&subject);
    }
    true
}

#[test]
fn the_vdso_of_linux_6_1_is_replaced_ten_times() {
    needs_root!();
    if stillframe().is_peer() || !foreign("bookworm") {
        testkit::skip!("no vDSO of Debian bookworm in {FOREIGN}");
    }
}

#[test]
fn the_vdso_of_linux_6_12_is_replaced_ten_times() {
    needs_root!();
    if stillframe().is_peer() || !foreign("trixie") {
        testkit::skip!("no vDSO of Debian trixie in {FOREIGN}");
    }
}

#[test]
fn a_proxy_of_this_kernels_vdso_becomes_the_vdso_again() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        return;
    }
    let host = Host::probe().expect("a vDSO");
    let bytes = |special: Special| {
        let parts = host.parts.iter().filter(|part| part.special == special);
        parts.map(|part| part.bytes).sum::<u64>()
    };
    let data_bytes = bytes(Special::Vvar);
    let mut code = own().to_vec();
    // Some kernels (6.1) map a page more than the ELF headers tell of.
    code.resize(bytes(Special::Vdso) as usize, 0);
    found::mark(
        &mut code,
        u8::try_from(data_bytes / 4096).expect("few pages"),
    );
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("vdso.so");
    fs::write(&file, &code).expect("written");
    let file = file.to_str().expect("a plain name");
    let subject = clock("copy", &code, &[file, &data_bytes.to_string()]);
    let address = subject.ask_number("address");
    assert_eq!(subject.ask("check"), "right");
    for _ in 0..2 {
        stillframe.cycle(1, &subject, &[]);
        assert_eq!(subject.ask("check all"), "right");
        assert_one(subject.pid(), address, false);
    }
}

/// Dumps a subject twice, the second image a layer over the first: it has none of the vDSO's code
/// itself, brings the subject back, and has all of it when the two are merged.
#[track_caller]
fn layered(subject: &Subject, is_proxy: bool) {
    let stillframe = stillframe();
    let top = stillframe.images().to_owned();
    let base = top.with_file_name("base");
    let first = crate::stillframe().images_at(&base);
    let address = subject.ask_number("address");
    first.dump(subject.pid(), &["--leave-running"]).must();
    let over = ["--prev-images-dir", "../base"];
    stillframe.dump(subject.pid(), &over).must();
    let code = |inherited: bool| {
        let store = store::Directory::open(&top).expect("there is an image");
        let reader = image::Reader::open(&store).expect("it is whole");
        let records = reader.records().iter();
        let mut vdsos = records.filter(|record| record.tag == vdso::TAG);
        let vdso = vdso::read(&vdsos.next().expect("one").payload).expect("sound");
        assert_eq!((vdsos.next(), vdso.code.len()), (None, 0));
        let space = image::SpaceId(vdso.space.expect("its code is pages"));
        let runs = reader.runs(space).collect::<Vec<_>>();
        let pages = runs.iter().map(|run| u64::from(run.pages)).sum::<u64>();
        assert_eq!(pages, u64::from(vdso.len_bytes).div_ceil(4096));
        let older = |run: &image::Run| reader.ancestor_of(run).is_some();
        assert!(runs.iter().all(|run| older(run) == inherited), "{runs:?}");
    };
    code(true);
    let back = || {
        stillframe.restore(&[]).must();
        assert_eq!(subject.ask("check all"), "right");
        assert_one(subject.pid(), address, is_proxy);
    };
    if is_proxy {
        let away = base.with_file_name("away");
        fs::rename(&base, &away).expect("it can be moved");
        let _ = stillframe.restore(&[]).must_fail().names(&["../base"]);
        fs::rename(&away, &base).expect("it can be moved");
    }
    back();
    let other = crate::stillframe();
    other.dump(subject.pid(), &[]).must();
    let mut merge = stillframe.command(&["merge"]);
    let merged = merge.arg(&top).output().expect("it is started");
    let told = String::from_utf8_lossy(&merged.stderr);
    assert!(merged.status.success(), "{told}");
    fs::remove_dir_all(&base).expect("it is there");
    code(false);
    back();
}

#[test]
fn a_layer_has_its_parents_vdso() {
    needs_root!();
    if stillframe().is_peer() {
        return;
    }
    layered(&clock("moved", own(), &[]), false);
    for suite in ["bookworm", "trixie"] {
        let file = format!("{FOREIGN}/{suite}.so");
        if let Ok(code) = fs::read(&file) {
            layered(&clock("foreign", &code, &[&file]), true);
        }
    }
}

#[test]
fn a_moved_vdso_stays_where_it_was_moved_to() {
    needs_root!();
    let stillframe = stillframe();
    let subject = clock("moved", own(), &[]);
    let address = subject.ask_number("address");
    for _ in 0..2 {
        stillframe.cycle(1, &subject, &[]);
        assert_eq!(subject.ask("check all"), "right");
        assert_one(subject.pid(), address, false);
    }
}

#[test]
fn who_has_no_vdso_gets_none() {
    needs_root!();
    let stillframe = stillframe();
    let subject = clock("unmapped", own(), &[]);
    for _ in 0..2 {
        stillframe.cycle(1, &subject, &[]);
        assert_eq!(subject.ask("check"), "right");
        assert_eq!(named(subject.pid(), "[vdso]"), []);
        assert_eq!(named(subject.pid(), "[vvar"), []);
    }
}

/// Catches the subject inside the vDSO and leaves it there, stopped.
fn catch_inside(pid: u32, address: u64, instructions: usize) {
    let tid = pid.cast_signed();
    ptrace::seize(tid, false).expect("it may be traced");
    ptrace::interrupt(tid).expect("it lives");
    let (_, event) = ptrace::wait(tid).expect("it stops");
    assert!(matches!(event, Event::Stop(_)), "{event:?}");
    let mut is_at = false;
    for _ in 0..1_000_000 {
        is_at = ptrace::registers(tid).expect("registers").rip == address;
        if is_at {
            break;
        }
        ptrace::step(tid).expect("a step");
        ptrace::wait(tid).expect("it stops");
    }
    assert!(is_at, "it never asks for the time");
    for _ in 0..instructions {
        ptrace::step(tid).expect("a step");
        ptrace::wait(tid).expect("it stops");
    }
    let rip = ptrace::registers(tid).expect("registers").rip;
    assert!(
        named(pid, "[vdso]")
            .iter()
            .any(|code| code.0 <= rip && rip < code.1)
    );
    let process = rustix::process::Pid::from_raw(tid).expect("a pid");
    rustix::process::kill_process(process, rustix::process::Signal::STOP).expect("it lives");
    ptrace::detach(tid, 0).expect("it is traced");
    wait_until("it to stop", SOON, || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
        stat.rsplit(") ")
            .next()
            .is_some_and(|rest| rest.starts_with('T'))
    });
}

/// Where a stopped task is in its program.
fn place(pid: u32) -> u64 {
    testkit::wait::wait_for("it to be stopped", SOON, || {
        let text = fs::read_to_string(format!("/proc/{pid}/syscall")).expect("it lives");
        let last = text.split_ascii_whitespace().last().expect("a word");
        // Until then it says "running".
        u64::from_str_radix(last.strip_prefix("0x")?, 16).ok()
    })
}

#[test]
fn a_thread_inside_the_vdso_leaves_it_first() {
    needs_root!();
    let stillframe = stillframe();
    let subject = clock("own", own(), &[]);
    let pid = subject.pid();
    let address = subject.ask_number("address");
    let go_on = || {
        let process = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a pid");
        rustix::process::kill_process(process, rustix::process::Signal::CONT).expect("it lives");
    };
    for instructions in [0, 1, 2, 3, 5, 8, 13] {
        catch_inside(pid, address, instructions);
        let code = named(pid, "[vdso]")[0];
        stillframe.clear();
        stillframe.dump(pid, &[]).must();
        stillframe.restore(&[]).must();
        if !stillframe.is_peer() {
            let place = place(pid);
            assert!(
                place < code.0 || place >= code.1,
                "{place:#x} is in the vDSO"
            );
        }
        go_on();
        assert_eq!(subject.ask("check all"), "right", "after {instructions}");
        advances(&subject);
    }
}

#[test]
fn a_thread_inside_another_kernels_vdso_leaves_it_first() {
    needs_root!();
    let file = format!("{FOREIGN}/bookworm.so");
    if stillframe().is_peer() || !Path::new(&file).exists() {
        testkit::skip!("no vDSO of Debian bookworm in {FOREIGN}");
    }
    let stillframe = stillframe();
    let code = fs::read(&file).expect("it is there");
    let subject = clock("foreign", &code, &[&file]);
    let pid = subject.pid();
    let address = subject.ask_number("address");
    for instructions in [1, 4, 9] {
        // Once a proxy is there, the kernel's own code is what it is caught in.
        let inside = match named(pid, "[vdso]")[0] {
            (start, end) if (start..end).contains(&address) => address,
            (start, _) => {
                let host = Host::probe().expect("a vDSO");
                start + host.function("__vdso_clock_gettime").expect("there")
            }
        };
        catch_inside(pid, inside, instructions);
        stillframe.clear();
        stillframe.dump(pid, &[]).must();
        stillframe.restore(&[]).must();
        let process = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a pid");
        rustix::process::kill_process(process, rustix::process::Signal::CONT).expect("it lives");
        assert_eq!(subject.ask("check all"), "right", "after {instructions}");
        assert_one(pid, address, true);
        advances(&subject);
    }
}

#[test]
fn clocks_never_step_back_in_a_task_left_running() {
    needs_root!();
    let stillframe = stillframe();
    let subject = clock("own", own(), &[]);
    let begun = Instant::now();
    for _ in 0..20 {
        stillframe.clear();
        stillframe.dump(subject.pid(), &["-R"]).must();
        assert_eq!(subject.ask("check all"), "right");
        if begun.elapsed() > SOON / 8 {
            break;
        }
    }
}
