//! Small subjects: each has one resource, or one edge, in a state made at random.
//!
//! Where seeds mix everything, each of these shows one thing, so that none is forgotten and a
//! failure tells what it is about. All go on after each pause: what was restored has to work.
use super::state::{State, add, fork};
use super::{Generator, own, sockets};
use crate::storm::step::{
    ALL_SHARES, Action, Advice, Backing, Contents, FileKind, LockHolder, MappingKind, Span,
    TaskFile, Wait,
};

/// How many states there are of each kind of descriptor.
const OF_EACH: u64 = 5;
/// Kinds that are opened in other ways: by connecting to one, of tasks, by socket(2), by samples.
const NOT_BY_ITSELF: [FileKind; 5] = [
    FileKind::Connection,
    FileKind::Sender,
    FileKind::OfTask,
    FileKind::Socket,
    FileKind::Made,
];
/// All of them, always the same ones.
pub fn states() -> Vec<State> {
    let mut all = Vec::new();
    descriptors(&mut all);
    options(&mut all);
    own::states(&mut all);
    own::made_states(&mut all);
    locks(&mut all);
    files_of_tasks(&mut all);
    waits(&mut all);
    families(&mut all);
    signals(&mut all);
    memory(&mut all);
    backings(&mut all);
    changes_of_memory(&mut all);
    sharing(&mut all);
    without_leaders(&mut all);
    numbered(&mut all);
    told_queues(&mut all);
    programs(&mut all);
    all
}

/// A word as it stands in the steps.
fn word(value: impl serde::Serialize) -> String {
    let text = serde_json::to_string(&value).expect("plain data");
    let kept = |c: char| c.is_ascii_alphanumeric() || c == '-';
    text.replace(|c| !kept(c), "")
}

fn descriptors(all: &mut Vec<State>) {
    let kinds = FileKind::ALL.iter();
    for kind in kinds.filter(|kind| !NOT_BY_ITSELF.contains(kind)) {
        for number in 0..OF_EACH {
            let open = |generator: &mut Generator| {
                if *kind == FileKind::Namespace {
                    // From network to time: the name says which.
                    generator.next_slot = 3 + number as u16;
                }
                generator.open_kind(0, *kind);
                // What one has and passes on, another one has as well.
                if *kind == FileKind::Mailbox || number == 3 {
                    generator.open_kind(0, FileKind::Mailbox);
                    generator.open_kind(0, FileKind::Event);
                }
                if number == 4 {
                    generator.open_kind(0, FileKind::Epoll);
                }
                (0..number * 4).for_each(|_| generator.use_descriptor(0));
                // Whose memory is registered must have it alone.
                if number % 2 == 1 && *kind != FileKind::FullRing {
                    generator.tasks_wanted = 2;
                    generator.fork(0);
                }
            };
            let go_on = |generator: &mut Generator| {
                (0..4).for_each(|_| {
                    let task = generator.any_task();
                    generator.use_descriptor(task);
                });
            };
            add(all, format!("open-{}-{number}", word(kind)), open, go_on);
        }
    }
}

fn options(all: &mut Vec<State>) {
    for mixture in sockets::mixtures() {
        let change = |generator: &mut Generator| generator.change_all(&mixture);
        let go_on = |generator: &mut Generator| {
            (0..6).for_each(|_| generator.use_descriptor(0));
        };
        add(all, mixture.name.clone(), change, go_on);
    }
}

fn locks(all: &mut Vec<State>) {
    for holder in [
        LockHolder::Whole,
        LockHolder::Process,
        LockHolder::Description,
    ] {
        for write in [false, true] {
            let lock = |start: u16| Action::LockFile {
                slot: 0,
                holder,
                write,
                start,
                bytes: 10,
            };
            let name = format!("lock-{}-{write}", word(holder));
            let first = |generator: &mut Generator| {
                generator.open_kind(0, FileKind::File);
                generator.step(0, lock(5));
            };
            add(all, name, first, |generator| generator.step(0, lock(90)));
            let name = format!("lock-pidfd-{}-{write}", word(holder));
            let first = |generator: &mut Generator| {
                generator.tasks_wanted = 1;
                fork(generator, 0);
                generator.open_task_file(0, 1, TaskFile::Process);
                generator.step(0, lock(5));
            };
            add(all, name, first, |generator| generator.step(0, lock(90)));
        }
    }
}

fn files_of_tasks(all: &mut Vec<State>) {
    for what in [
        TaskFile::Process,
        TaskFile::Status,
        TaskFile::Threads,
        TaskFile::Place,
    ] {
        let open = |generator: &mut Generator| {
            generator.tasks_wanted = 1;
            fork(generator, 0);
            for (task, of) in [(0, 1), (1, 0), (1, 1)] {
                generator.open_task_file(task, of, what);
            }
        };
        add(all, format!("of-task-{}", word(what)), open, |_| {});
        let open = |generator: &mut Generator| {
            open(generator);
            generator.open_kind(0, FileKind::Epoll);
            (0..8).for_each(|_| generator.use_descriptor(0));
        };
        let go_on = |generator: &mut Generator| generator.use_descriptor(1);
        add(all, format!("of-task-{}-used", word(what)), open, go_on);
    }
}

fn waits(all: &mut Vec<State>) {
    for wait in [
        Wait::Futex,
        Wait::FutexTimed,
        Wait::SleepUntil,
        Wait::EpollTimed,
        Wait::Poll,
        Wait::Read,
    ] {
        for stack_pages in [8, 2049] {
            let start = |generator: &mut Generator| {
                generator.step(0, Action::Thread { wait, stack_pages });
            };
            add(all, format!("{}-{stack_pages}", word(wait)), start, start);
        }
    }
}

fn families(all: &mut Vec<State>) {
    for (name, actions) in [
        ("session", vec![Action::Session]),
        ("group", vec![Action::Group { leader: 1 }]),
        ("subreaper", vec![Action::Subreaper]),
        ("ended", vec![Action::Exit { status: 7 }]),
    ] {
        for depth in 1..=3 {
            let begin = |generator: &mut Generator| {
                generator.tasks_wanted = 1;
                (0..depth).for_each(|parent| fork(generator, parent));
                for action in &actions {
                    generator.step(1, action.clone());
                }
            };
            // An orphan's end is heard by whoever has it now.
            let go_on = |generator: &mut Generator| generator.step(0, Action::Reap);
            add(all, format!("{name}-{depth}"), begin, go_on);
        }
    }
}

fn signals(all: &mut Vec<State>) {
    for signal in [10, 35] {
        for thread in [false, true] {
            let send = |value: u64| Action::Signal {
                signal,
                value,
                thread,
            };
            let name = format!("signal-{signal}-{thread}");
            let first = |generator: &mut Generator| generator.step(0, send(1));
            add(all, name, first, |generator| generator.step(0, send(2)));
        }
    }
    for is_of_all in [false, true] {
        let filter = |call: u8| Action::Filter {
            call,
            all: is_of_all,
        };
        let first = |generator: &mut Generator| {
            generator.step(0, filter(0));
            generator.tasks_wanted = 1;
            fork(generator, 0);
            generator.step(1, filter(1));
        };
        add(all, format!("filter-{is_of_all}"), first, |generator| {
            generator.step(0, filter(2));
        });
    }
}

fn map(generator: &mut Generator, span: Span, protection: u8, what: MappingKind) {
    let map = Action::Map {
        span,
        protection,
        what,
        noreserve: false,
    };
    generator.known(0).memory.map(span, protection, what);
    generator.step(0, map);
}

/// What is mapped, and written to.
const SPAN: Span = Span {
    at: 512,
    pages: PAGES,
};
const PAGES: u32 = 40;

fn fill(generator: &mut Generator, every: u32, contents: Contents) {
    let (span, run) = (SPAN, 1);
    let fill = Action::Fill {
        span,
        every,
        run,
        contents,
    };
    generator.step(0, fill);
}

fn begin(generator: &mut Generator, what: MappingKind, contents: Contents) {
    map(generator, SPAN, 3, what);
    fill(generator, 2, contents);
}

fn go_on(generator: &mut Generator) {
    fill(generator, 3, Contents::Different);
}

fn memory(all: &mut Vec<State>) {
    for advice in [
        Advice::DontNeed,
        Advice::DontFork,
        Advice::WipeOnFork,
        Advice::Mergeable,
        Advice::HugePage,
        Advice::NoHugePage,
        Advice::Collapse,
        Advice::DontDump,
        Advice::Random,
        Advice::Sequential,
        Advice::GuardInstall,
    ] {
        let first = |generator: &mut Generator| {
            begin(generator, MappingKind::Private, Contents::Different);
            let span = Span { at: 520, pages: 9 };
            generator.step(0, Action::Advise { span, advice });
            generator.tasks_wanted = 2;
            generator.fork(0);
        };
        add(all, format!("advice-{}", word(advice)), first, go_on);
    }
    for protection in [0, 1, 4, 5, 7] {
        let first = |generator: &mut Generator| {
            begin(generator, MappingKind::Private, Contents::Different);
            let span = Span { at: 525, pages: 5 };
            generator.step(0, Action::Protect { span, protection });
        };
        add(all, format!("protection-{protection}"), first, go_on);
    }
    for contents in [Contents::Different, Contents::Equal, Contents::Zero] {
        for what in [MappingKind::Private, MappingKind::Shared { object: 0 }] {
            let first = |generator: &mut Generator| {
                begin(generator, what, contents);
                generator.tasks_wanted = 2;
                generator.fork(0);
            };
            add(
                all,
                format!("{}-{}", word(what), word(contents)),
                first,
                go_on,
            );
        }
    }
}

fn backings(all: &mut Vec<State>) {
    for kind in [
        Backing::File,
        Backing::Deleted,
        Backing::Unnamed,
        Backing::Memfd,
    ] {
        for shared in [false, true] {
            let first = |generator: &mut Generator| {
                let (id, pages) = (0, PAGES + 7);
                generator.step(0, Action::Object { id, kind, pages });
                let (object, first) = (0, 3);
                let what = MappingKind::Object {
                    object,
                    first,
                    shared,
                };
                begin(generator, what, Contents::Different);
                generator.step(0, Action::Forget { id });
            };
            let name = format!("{}-shared-{shared}", word(kind));
            add(all, name, first, go_on);
        }
    }
}

fn changes_of_memory(all: &mut Vec<State>) {
    let span = SPAN;
    let lock = |on_fault| Action::Lock { span, on_fault };
    let end = |end| Action::Resize { span, end };
    let half = Span {
        at: span.at,
        pages: PAGES / 2,
    };
    for (name, action) in [
        ("locked", lock(false)),
        ("locked-on-fault", lock(true)),
        ("longer", end(span.end() + 9)),
        ("shorter", end(span.end() - 9)),
        (
            "moved",
            Action::Move {
                span: half,
                to: 900,
            },
        ),
        ("unmapped", Action::Unmap(half)),
    ] {
        let first = |generator: &mut Generator| {
            begin(generator, MappingKind::Private, Contents::Different);
            generator.step(0, action.clone());
        };
        add(all, name.to_owned(), first, go_on);
    }
}

fn sharing(all: &mut Vec<State>) {
    for shares in 1..=ALL_SHARES {
        for leaves in [false, true] {
            let first = |generator: &mut Generator| {
                generator.tasks_wanted = 4;
                generator.step(0, Action::Semaphores { set: 0 });
                generator.known(0).sets.push(0);
                generator.share(0, shares);
                generator.share(1, shares);
                for task in 0..3 {
                    let (set, count, folder, mask) = (0, task + 1, task, 7 * task);
                    generator.step(task, Action::Borrow { set, count });
                    generator.step(task, Action::Settle { folder, mask });
                    generator.open_kind(task, FileKind::Pipe);
                }
                if leaves {
                    generator.step(1, Action::Unshare { shares });
                }
            };
            let go_on = |generator: &mut Generator| {
                for task in 0..3 {
                    generator.use_descriptor(task);
                    generator.step(task, Action::Borrow { set: 0, count: 1 });
                }
                // Whose undo list it is decides what is given back.
                generator.step(2, Action::Exit { status: 0 });
                generator.known(2).is_alive = false;
            };
            add(
                all,
                format!("shares-{shares}-leaves-{leaves}"),
                first,
                go_on,
            );
        }
    }
}

/// Roots whose first thread has ended, with what belongs to threads or is asked of one.
fn without_leaders(all: &mut Vec<State>) {
    let end_leader = |generator: &mut Generator| generator.step(0, Action::EndLeader);
    for kind in [
        FileKind::Event,
        FileKind::Epoll,
        FileKind::Signals,
        FileKind::Terminal,
        FileKind::File,
        FileKind::Ring,
        FileKind::Queue,
        FileKind::Namespace,
    ] {
        let open = |generator: &mut Generator| {
            end_leader(generator);
            generator.open_kind(0, kind);
            (0..8).for_each(|_| generator.use_descriptor(0));
        };
        let go_on = |generator: &mut Generator| generator.use_descriptor(0);
        add(all, format!("leaderless-{}", word(kind)), open, go_on);
    }
    for (name, action) in [
        ("session", Action::Session),
        ("subreaper", Action::Subreaper),
        (
            "fork",
            Action::Fork {
                child: 2,
                shares: 0,
            },
        ),
    ] {
        let first = |generator: &mut Generator| {
            end_leader(generator);
            generator.tasks_wanted = 1;
            fork(generator, 0);
            generator.open_task_file(1, 0, TaskFile::Process);
            generator.step(0, action.clone());
        };
        let go_on = |generator: &mut Generator| generator.step(0, Action::Reap);
        add(all, format!("leaderless-{name}"), first, go_on);
    }
    for thread in [false, true] {
        let send = |value: u64| Action::Signal {
            signal: 35,
            value,
            thread,
        };
        let first = |generator: &mut Generator| {
            end_leader(generator);
            generator.step(0, send(1));
            generator.requests(0);
        };
        let name = format!("leaderless-signal-{thread}");
        add(all, name, first, |generator| generator.step(0, send(2)));
    }
}

fn numbered(all: &mut Vec<State>) {
    for number in 0..4 {
        let some = |generator: &mut Generator| {
            (0..=number).for_each(|_| generator.semaphores(0));
        };
        add(all, format!("semaphores-{number}"), some, some);
        let some = |generator: &mut Generator| {
            (0..=number).for_each(|_| generator.requests(0));
        };
        add(all, format!("requests-{number}"), some, some);
    }
    for doomed in [false, true] {
        for pages in [1, 17, 70] {
            let attach = |generator: &mut Generator| {
                generator.segment(0, pages, doomed, false);
                generator.tasks_wanted += 1;
                generator.fork(0);
            };
            let first = |generator: &mut Generator| generator.tasks_wanted = 1;
            let name = format!("segment-{pages}-doomed-{doomed}");
            add(all, name, first, attach);
        }
    }
    parts_of_segments(all);
    for folder in 0..3 {
        let mask = 9 * folder;
        let settle = Action::Settle { folder, mask };
        let first = |generator: &mut Generator| {
            generator.step(0, settle.clone());
            generator.tasks_wanted = 2;
            generator.fork(0);
        };
        add(all, format!("folder-{folder}"), first, |generator| {
            generator.step(1, Action::Settle { folder: 1, mask: 2 });
        });
    }
}

fn parts_of_segments(all: &mut Vec<State>) {
    for (name, pages, huge) in [("pages", 9, false), ("huge", 2, true)] {
        for number in 0..4 {
            let doomed = number % 2 == 1;
            let first = |generator: &mut Generator| {
                generator.segment(0, pages, doomed, huge);
                (0..number).for_each(|_| generator.carve(0));
                generator.tasks_wanted = 2;
                generator.fork(0);
            };
            let go_on = |generator: &mut Generator| {
                generator.carve(0);
                generator.carve(1);
            };
            add(all, format!("segment-{name}-parts-{number}"), first, go_on);
        }
    }
}

/// Queues whose next message somebody is told of: a task or its child, by a signal or a socket.
fn told_queues(all: &mut Vec<State>) {
    for through in [None, Some(2)] {
        for teller in [0, 1] {
            let notify = Action::Notify { slot: 0, through };
            let first = |generator: &mut Generator| {
                generator.open_kind(0, FileKind::Queue);
                generator.step(0, Action::Receive { slot: 0 });
                generator.open_kind(0, FileKind::Netlink);
                generator.tasks_wanted = 2;
                generator.fork(0);
                generator.step(teller, notify.clone());
            };
            let go_on = |generator: &mut Generator| {
                let (slot, bytes) = (0, 100);
                generator.step(1 - teller, Action::Send { slot, bytes });
                generator.step(teller, Action::Receive { slot: 2 });
                generator.step(0, Action::Receive { slot });
                generator.step(teller, notify.clone());
            };
            let how = if through.is_some() {
                "socket"
            } else {
                "signal"
            };
            add(all, format!("told-by-{how}-{teller}"), first, go_on);
        }
    }
}

/// Programs of 32 bits among tasks of 64.
fn programs(all: &mut Vec<State>) {
    for number in 1..=3 {
        let first = |generator: &mut Generator| {
            generator.tasks_wanted = number;
            for task in 0..number as u8 {
                generator.step(task, Action::Program);
                if task + 1 < number as u8 {
                    generator.fork(task);
                }
            }
        };
        let go_on = |generator: &mut Generator| {
            let last = number as u8 - 1;
            generator.step(last, Action::Exit { status: 3 });
            generator.step(0, Action::Program);
        };
        add(all, format!("programs-{number}"), first, go_on);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::PAUSES;
    use super::*;
    use crate::storm::step::Step;

    #[test]
    fn there_are_many_and_each_is_another() {
        let all = states();
        let names = all.iter().map(|state| &state.name).collect::<BTreeSet<_>>();
        assert_eq!(names.len(), all.len(), "a name each");
        assert!(all.len() >= 200, "{}", all.len());
        for state in &all {
            let pauses = state.steps.iter();
            let pauses = pauses.filter(|step| step.action == Action::Pause);
            assert_eq!(pauses.count(), PAUSES, "{}", state.name);
        }
    }

    #[test]
    fn each_kind_of_descriptor_is_there() {
        let all = states();
        for kind in FileKind::ALL
            .iter()
            .filter(|kind| !NOT_BY_ITSELF.contains(kind))
        {
            let opens = |step: &Step| {
                let opened =
                    matches!(step.action, Action::Open { kind: found, .. } if found == *kind);
                opened && step.task == 0
            };
            let of_it = all.iter().filter(|state| state.steps.iter().any(opens));
            assert!(of_it.count() as u64 >= OF_EACH, "{kind:?}");
        }
    }
}
