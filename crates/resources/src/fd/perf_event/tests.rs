//! Events of this process that are dumped, and planned to be opened again.

use std::io;
use std::os::fd::AsFd as _;
use std::process::{Child, Command};

use rustix::mm::{MapFlags, ProtFlags};
use sys::perf_event::{DISABLED, Watched, enable, open, refresh, software};
use testkit::calls::{Mapping, set_filter};

use super::super::testing::{At, World};
use super::*;

const CPU_CLOCK: u64 = 0;
const TASK_CLOCK: u64 = 1;
const PAGE_FAULTS: u64 = 2;

fn pid() -> i32 {
    std::process::id().cast_signed()
}

fn of_process(attr: &[u8]) -> io::Result<OwnedFd> {
    open(
        attr,
        Watched {
            tid: pid(),
            cpu: -1,
        },
        None,
    )
}

/// A world in which events are allowed.
fn world() -> World {
    let mut world = World::default();
    world.allow.perf_events = true;
    world
}

/// The record of an event that was dumped.
fn recorded(world: &World, at: At) -> &Record {
    let record = world.description(at).record::<PerfEvent>();
    record.expect("an event")
}

/// Dumps an event; what it is, or why it is refused.
fn dumped(event: OwnedFd) -> std::result::Result<(Record, String), String> {
    let mut world = world();
    let at = world.add(event);
    world.dump().map_err(|error| error.to_string())?;
    let record = recorded(&world, at).clone();
    Ok((record, world.describe(at)))
}

/// Skips a test where events cannot be opened and looked up.
macro_rules! needs_events {
    () => {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        if of_process(&software(PAGE_FAULTS)).is_err() {
            testkit::skip!("no performance events");
        }
    };
}

fn script(record: &Record, needed: Option<i32>) -> String {
    let mut script = Script::default();
    PerfEvent::open_in_task(record, 5, needed, &mut script);
    script.to_string()
}

#[test]
fn without_the_option_it_is_refused_by_name() {
    needs_events!();
    let mut world = World::default();
    world.add(of_process(&software(PAGE_FAULTS)).expect("an event"));
    let error = world.dump().expect_err("it is not allowed").to_string();
    let why = "its count would begin at 0 again (use --perf-events to allow it)";
    assert!(error.ends_with(why), "{error}");
    world.allow.perf_events = true;
    world.dump().expect("it is allowed");
    world.restore().expect("it is allowed");
    world.allow.perf_events = false;
    let error = world.restore().expect_err("it is not allowed").to_string();
    assert!(
        error.contains("(use --perf-events to restore it)"),
        "{error}"
    );
}

#[test]
fn it_is_opened_as_it_was_and_counts_nothing_yet() {
    needs_events!();
    for (number, counts) in [
        (PAGE_FAULTS, false),
        (PAGE_FAULTS, true),
        (CPU_CLOCK, true),
        (TASK_CLOCK, false),
    ] {
        let event = of_process(&software(number)).expect("an event");
        if counts {
            enable(&event).expect("it can count");
        }
        let (record, told) = dumped(event).expect("it is kept");
        let (pid, on) = (pid(), if counts { "on" } else { "off" });
        let want = format!("performance event software {number:#x} of thread {pid} {on}");
        assert_eq!(told, want);
        let text = script(&record, None);
        let call = format!(", flags=0x1}}, pid={pid}, cpu=-1, group=-1, flags=0) = 5");
        let kind = format!("perf_event_open(attr={{type=1, size=112, config={number}, ");
        let text = text.replace("config=0x", "config=");
        assert!(text.contains(&call) && text.contains(&kind), "{text}");
    }
}

#[test]
fn flags_and_limits_are_told() {
    needs_events!();
    let mut attr = software(PAGE_FAULTS);
    attr[16..24].copy_from_slice(&1000_u64.to_ne_bytes());
    let event = of_process(&attr).expect("an event");
    rustix::fs::fcntl_setfl(&event, OFlags::NONBLOCK).expect("it can");
    refresh(&event, 3).expect("it samples");
    let (record, _) = dumped(event).expect("it is kept");
    assert_eq!((record.limit, record.counts), (3, true));
    let text = script(&record, None);
    assert!(text.contains("sample_period=1000"), "{text}");
    assert!(
        text.contains("fcntl(fd=5, F_SETFL, flags=NONBLOCK)"),
        "{text}"
    );
}

#[test]
fn members_need_the_first_of_their_group() {
    needs_events!();
    let mut world = world();
    let leader = of_process(&software(PAGE_FAULTS)).expect("an event");
    let watched = Watched {
        tid: pid(),
        cpu: -1,
    };
    let member = open(&software(TASK_CLOCK), watched, Some(leader.as_fd()));
    let member = world.add(member.expect("another"));
    let leader = world.add(leader);
    world.dump().expect("they are kept");
    let needs = |at: At| world.description(at).needs();
    assert_eq!(
        (needs(leader), needs(member)),
        (None, Some(DescriptionId(1)))
    );
    let text = script(recorded(&world, member), Some(9));
    assert!(text.contains(", cpu=-1, group=9, flags=0) = 5"), "{text}");
    drop(world.take(leader));
}

#[test]
fn a_member_alone_is_refused_by_name() {
    needs_events!();
    let leader = of_process(&software(PAGE_FAULTS)).expect("an event");
    let watched = Watched {
        tid: pid(),
        cpu: -1,
    };
    let member = open(&software(TASK_CLOCK), watched, Some(leader.as_fd())).expect("another");
    let error = dumped(member).expect_err("its leader is not there");
    assert!(error.contains("is open nowhere in the tree"), "{error}");
    drop(leader);
}

/// A process outside of the tree; dropping this ends it.
struct Outside(Child);

impl Outside {
    fn begin() -> Self {
        let sleep = Command::new("sleep").arg("1000").spawn();
        Self(sleep.expect("it starts"))
    }

    fn event(&self) -> OwnedFd {
        let tid = self.0.id().cast_signed();
        open(&software(PAGE_FAULTS), Watched { tid, cpu: -1 }, None).expect("an event")
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_others_do_is_refused_by_name() {
    needs_events!();
    let outside = Outside::begin();
    let error = dumped(outside.event()).expect_err("it is not in the tree");
    let why = format!("it is about {}, which is not in the tree", outside.0.id());
    assert!(error.contains(&why), "{error}");
    let event = outside.event();
    drop(outside);
    let error = dumped(event).expect_err("it has ended");
    assert!(error.contains("its task has ended"), "{error}");
}

#[test]
fn what_a_processor_runs_is_kept() {
    needs_events!();
    let watched = Watched { tid: -1, cpu: 0 };
    let event = open(&software(PAGE_FAULTS), watched, None).expect("an event");
    let (record, told) = dumped(event).expect("it is kept");
    assert!(told.ends_with("of processor 0 off"), "{told}");
    let text = script(&record, None);
    assert!(
        text.contains("}, pid=-1, cpu=0, group=-1, flags=0) = 5"),
        "{text}"
    );
}

#[test]
fn numbers_and_rings_are_refused_by_name() {
    needs_events!();
    let mut attr = software(PAGE_FAULTS);
    attr[32..40].copy_from_slice(&(1_u64 << 2).to_ne_bytes());
    let error = dumped(of_process(&attr).expect("an event")).expect_err("it tells its number");
    assert!(error.contains("(PERF_FORMAT_ID)"), "{error}");
    let event = of_process(&software(PAGE_FAULTS)).expect("an event");
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let ring = Mapping::of_file(&event, 0, 3 * 4096, both, MapFlags::SHARED);
    let ring = ring.expect("it has a ring");
    let error = dumped(event).expect_err("it has a ring");
    assert!(
        error.contains("its records go to a ring in memory"),
        "{error}"
    );
    drop(ring);
}

#[test]
fn breakpoints_are_kept_but_in_the_kernel() {
    needs_events!();
    let at = |address: u64, excluded: u64| {
        let mut attr = software(0);
        attr[0..4].copy_from_slice(&kind::BREAKPOINT.to_ne_bytes());
        attr[40..48].copy_from_slice(&(DISABLED | excluded).to_ne_bytes());
        attr[52..56].copy_from_slice(&2_u32.to_ne_bytes());
        attr[56..64].copy_from_slice(&address.to_ne_bytes());
        attr[64..72].copy_from_slice(&8_u64.to_ne_bytes());
        of_process(&attr)
    };
    let Ok(event) = at(0x1_0000, 1 << 5 | 1 << 6) else {
        testkit::skip!("no breakpoints");
    };
    let (_, told) = dumped(event).expect("it is kept");
    assert!(told.contains("breakpoint 0x10000 of thread"), "{told}");
    let kernel = Kernel::get().expect("it was asked");
    let own = of_process(&software(PAGE_FAULTS)).expect("an event");
    let address = seen::address(kernel, own.as_fd()).expect("it is there");
    let event = at(address & !7, 0).expect("root may");
    let error = dumped(event).expect_err("it is the kernel's");
    assert!(error.contains("the kernel's own code or data"), "{error}");
}

/// An event whose number this host gives.
fn tracepoint(name: &str) -> Option<OwnedFd> {
    let number = Tracepoints::open().ok()?.number(name).ok()??;
    let mut attr = software(number);
    attr[0..4].copy_from_slice(&kind::TRACEPOINT.to_ne_bytes());
    of_process(&attr).ok()
}

#[test]
fn tracepoints_are_known_by_their_names() {
    needs_events!();
    let Some(event) = tracepoint("sched/sched_switch") else {
        testkit::skip!("no tracepoints");
    };
    let mut world = world();
    let at = world.add(event);
    world.dump().expect("it is kept");
    let told = world.describe(at);
    assert!(
        told.contains("event sched/sched_switch of thread"),
        "{told}"
    );
    world.restore().expect("the number is the same");
    let mut record = recorded(&world, at).clone();
    record.check_numbers().expect("it is the same host");
    for name in ["sched/sched_wakeup", "sched/there_is_none", "none/none"] {
        record.tracepoint = name.to_owned();
        let error = record
            .check_numbers()
            .expect_err("it is another")
            .to_string();
        let want = format!("tracepoint {name} has another number here, or is not there");
        assert_eq!(error, want);
    }
}

#[test]
fn a_filter_is_refused_by_name() {
    needs_events!();
    let Some(event) = tracepoint("sched/sched_switch") else {
        testkit::skip!("no tracepoints");
    };
    set_filter(&event, c"prev_prio < 7").expect("it has such a field");
    let error = dumped(event).expect_err("nobody tells it");
    let why = "it has a filter, of which the kernel does not tell";
    assert!(error.contains(why), "{error}");
}

#[test]
fn drivers_are_known_by_their_names() {
    needs_events!();
    let Some(number) = named::driver("msr") else {
        testkit::skip!("no driver of events whose number is given");
    };
    let mut attr = software(0);
    attr[0..4].copy_from_slice(&number.to_ne_bytes());
    let Ok(event) = of_process(&attr) else {
        testkit::skip!("the driver has no such event");
    };
    let (mut record, told) = dumped(event).expect("it is kept");
    assert!(told.contains("event msr 0x0 of thread"), "{told}");
    record.check_numbers().expect("it is the same host");
    for change in [
        |record: &mut Record| record.attr[0] += 1,
        |record: &mut Record| record.driver = "there_is_none".to_owned(),
    ] {
        change(&mut record);
        let error = record
            .check_numbers()
            .expect_err("it is another")
            .to_string();
        assert!(
            error.ends_with("have another number here, or none"),
            "{error}"
        );
    }
}

#[test]
fn it_counts_from_nothing_on_if_it_did() {
    needs_events!();
    let count = |event: &OwnedFd| {
        let mut word = [0; 8];
        rustix::io::read(event, &mut word).expect("a count");
        u64::from_ne_bytes(word)
    };
    for counts in [true, false] {
        let watched = Watched { tid: 0, cpu: -1 };
        let event = open(&software(PAGE_FAULTS), watched, None).expect("an event");
        let record = Record {
            attr: software(PAGE_FAULTS),
            tid: Some(7),
            cpu: -1,
            opener: 7,
            counts,
            ..Record::default()
        };
        begin(&record, event.as_fd()).expect("it begins");
        let before = count(&event);
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let memory = Mapping::anonymous(4096, both, MapFlags::PRIVATE).expect("memory");
        memory.store(0, 1);
        assert_eq!(count(&event) > before, counts);
    }
}

#[test]
fn what_no_event_has_is_corrupt() {
    let sound = Record {
        attr: software(PAGE_FAULTS),
        tid: Some(7),
        cpu: -1,
        opener: 7,
        ..Record::default()
    };
    PerfEvent::check(&sound).expect("it is sound");
    let changes: [fn(&mut Record); 7] = [
        |record| record.attr.truncate(40),
        |record| record.attr[4] = 64,
        |record| record.tid = Some(0),
        |record| record.tid = None,
        |record| record.opener = 0,
        |record| record.limit = u32::MAX,
        |record| record.driver = "../../cpu".to_owned(),
    ];
    for change in changes {
        let mut record = sound.clone();
        change(&mut record);
        let error = PerfEvent::check(&record).expect_err("wrong");
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}
