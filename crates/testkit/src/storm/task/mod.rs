//! A task that makes its steps: what it has, and how it answers for it.
mod data;
mod descriptors;
mod memory;
mod numbered;
mod opened;
mod own;
mod program_32;
mod side_thread;
mod state;
mod threads;
mod told;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use crate::samples;
use rustix::process::{Pid, WaitOptions};
use sys::fork::{Fork, fork};

use crate::calls::attributes::swap_mask;
use crate::calls::clone::{DESCRIPTORS, IO_CONTEXT, SEMAPHORE_UNDO, clone};
use crate::calls::filters::{Answer, GONE, call_gone, install_filter};
use crate::calls::{Arena, block_signals, queue_signal};

pub(super) use self::program_32::NAME as PROGRAM_32;
use super::ledger::{Ledger, Order};
use super::memory::Memory;
use super::step::{self, ARENA_PAGES, Action, PAGE_BYTES, Step, TASKS};
use crate::subjects::{Control, Failure, not_understood};
use crate::{tree, wait};

/// What ended well or badly, for the outcome of a step.
type StepResult = Result<(), Failure>;

/// One task.
struct Task {
    number: u8,
    steps: Rc<[Step]>,
    ledger: Rc<Ledger>,
    folder: PathBuf,
    arena: Arena,
    memory: Memory,
    objects: BTreeMap<u8, Object>,
    held: BTreeMap<u16, descriptors::OpenDescriptor>,
    waits: Vec<threads::WaitingThread>,
    helpers: BTreeMap<u8, side_thread::Helper>,
    /// True if a filter ends it for calls of [`told::OF_DUMPS`].
    is_filtered: bool,
    numbered: numbered::IpcObjects,
    programs: Vec<program_32::Program32>,
}

/// Something that the task can map.
struct Object {
    file: File,
    pages: u32,
}

/// Makes the steps of the file that the argument names. `go` makes those up to the next pause and
/// answers "paused", or "ended" at the end; `check` answers "right", or what is wrong in which
/// task; `describe` what each task has; `clean` removes what would outlive all tasks.
///
/// # Errors
/// When a step cannot be made.
pub(crate) fn serve(control: Control, arguments: &[String]) -> StepResult {
    let path = arguments.first().ok_or("a file with steps is wanted")?;
    let mut root = Task {
        number: 0,
        steps: step::from_text(&fs::read_to_string(path)?)?.into(),
        ledger: Rc::new(Ledger::new()?),
        folder: control.folder().to_owned(),
        arena: Arena::claim(ARENA_PAGES as usize * PAGE_BYTES)?,
        memory: Memory::default(),
        objects: BTreeMap::new(),
        held: BTreeMap::new(),
        waits: Vec::new(),
        helpers: BTreeMap::new(),
        is_filtered: false,
        numbered: numbered::IpcObjects::default(),
        programs: Vec::new(),
    };
    root.ledger.set_pid(0, std::process::id());
    // All tasks have it of the root, and all their threads.
    let blocked = swap_mask(None)? | samples::ALWAYS_BLOCKED;
    swap_mask(Some(blocked))?;
    // Otherwise orphans would leave the tree.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let mut next = 0;
    control.serve(|question| match question.verb.as_str() {
        "go" => root.go(&mut next).map(str::to_owned),
        "check" => {
            let wrong = root.ask_all(Order::Check)?;
            Ok(if wrong.is_empty() {
                "right".into()
            } else {
                wrong
            })
        }
        "describe" => root.ask_all(Order::Describe),
        "clean" => root.clean().map(|()| "cleaned".into()).map_err(Into::into),
        _ => not_understood(question),
    })
}

impl Task {
    /// Has all steps up to the next pause made.
    fn go(&mut self, next: &mut usize) -> Result<&'static str, Failure> {
        while let Some(step) = self.steps.get(*next).cloned() {
            *next += 1;
            if step.action == Action::Pause {
                return Ok("paused");
            }
            let number = *next - 1;
            if step.task == 0 {
                self.make(number)
                    .map_err(|error| format!("step {number}, {step:?}: {error}"))?;
                continue;
            }
            let Some(pid) = (step.task < TASKS)
                .then(|| self.ledger.pid(step.task))
                .flatten()
            else {
                continue;
            };
            self.ledger.tell(step.task, Order::Step(number))?;
            if matches!(step.action, Action::Exit { .. }) {
                self.ledger.set_pid(step.task, 0);
                // A leader may end before its threads, which hold its descriptors.
                wait::wait_until("a task's end", wait::SOON, || {
                    !tree::is_alive(pid) && tree::threads(pid).len() <= 1
                });
            }
        }
        Ok("ended")
    }

    /// Asks every task that lives, and puts their answers together.
    fn ask_all(&mut self, order: Order) -> Result<String, Failure> {
        let mut told = self.answer(order)?;
        for task in (1..TASKS).filter(|&task| self.ledger.pid(task).is_some()) {
            self.ledger.tell(task, order)?;
            told += &fs::read_to_string(told_at(&self.folder, task))?;
        }
        Ok(told)
    }

    fn answer(&mut self, order: Order) -> Result<String, Failure> {
        let lines = match order {
            Order::Check => {
                let mut wrong = self.check_memory()?;
                wrong.extend(self.check_waits());
                wrong.extend(self.check_numbered()?);
                for program in &mut self.programs {
                    program.answer()?;
                }
                wrong
            }
            _ => self.describe()?,
        };
        let number = self.number;
        let line = |line: &String| format!("task {number}: {line}\n");
        Ok(lines.iter().map(line).collect())
    }

    /// Lives on as a task that is told what to do.
    fn live(mut self) -> ! {
        let ledger = Rc::clone(&self.ledger);
        ledger.obey(self.number, |order| {
            let done = match order {
                Order::Step(number) => self.make(number),
                _ => self
                    .answer(order)
                    .and_then(|answer| Ok(fs::write(told_at(&self.folder, self.number), answer)?)),
            };
            if let Err(error) = &done {
                eprintln!("task {} at {order:?}: {error}", self.number);
            }
            done.is_ok()
        })
    }

    fn make(&mut self, number: usize) -> StepResult {
        let steps = Rc::clone(&self.steps);
        match &steps[number].action {
            // The latter was seen to when the root was started.
            Action::Pause | Action::EndLeader => Ok(()),
            &Action::Fork { child, shares } => self.fork(child, shares),
            &Action::Exit { status } => self.exit(status),
            Action::Reap => {
                // Until there is none, or none that has ended.
                while let Ok(Some(_)) = rustix::process::wait(WaitOptions::NOHANG) {}
                Ok(())
            }
            Action::Session => {
                // A group's leader may not.
                let _ = rustix::process::setsid();
                Ok(())
            }
            &Action::Group { leader } => {
                self.join_group(leader);
                Ok(())
            }
            Action::Subreaper => {
                rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
                Ok(())
            }
            &Action::Filter { call, all } => {
                self.is_filtered = true;
                filter(call, all)
            }
            Action::Program => self.start_program(),
            Action::Change {
                what,
                first,
                helper,
            } => self.change(what, (*first).into(), *helper),
            &Action::Thread { wait, stack_pages } => self.start_thread(wait, stack_pages),
            &Action::Send { slot, bytes } => self.send(slot, bytes),
            &Action::Receive { slot } => self.receive(slot),
            &Action::Set { slot, what } => self.set(slot, what),
            &Action::LockFile {
                slot,
                holder,
                write,
                start,
                bytes,
            } => self.lock_file(slot, holder, write, (start, bytes)),
            &Action::Signal {
                signal,
                value,
                thread,
            } => {
                // Other threads may not have blocked it.
                send_signal(signal, value, thread || self.has_threads())
            }
            action => {
                self.change_memory(number, action)?;
                self.change_numbered(action)?;
                self.change_descriptors(action)
            }
        }
    }

    fn fork(&mut self, child: u8, shares: u8) -> StepResult {
        if child >= TASKS
            || self.ledger.pid(child).is_some()
            || self.has_threads()
            || self.numbered.forbids_forks()
        {
            return Ok(());
        }
        let flags = numbered::flags(shares);
        let shares_undo = flags & SEMAPHORE_UNDO != 0;
        if shares_undo && self.numbered.undo.is_none() {
            self.numbered.undo = self.ledger.new_undo();
        }
        if flags & IO_CONTEXT != 0 {
            self.numbered.have_io_context()?;
        }
        let undo = self.numbered.undo.filter(|_| shares_undo);
        if let Some(undo) = undo {
            self.ledger.share_undo(undo);
        }
        let made = match flags {
            0 => fork()?,
            _ => clone(flags, None)?,
        };
        if made == Fork::Child {
            self.become_child(child, flags, undo);
        }
        wait::wait_until("a child to live", wait::SOON, || {
            self.ledger.pid(child).is_some()
        });
        Ok(())
    }

    /// In a new task: takes what the parent has, and lives.
    fn become_child(&mut self, number: u8, flags: u64, undo: Option<u8>) -> ! {
        if flags & DESCRIPTORS != 0 {
            // Those stay its parent's, who closes them.
            std::mem::forget(std::mem::take(&mut self.objects));
            std::mem::forget(std::mem::take(&mut self.held));
        }
        let numbered = std::mem::take(&mut self.numbered);
        let own = Task {
            number,
            steps: Rc::clone(&self.steps),
            ledger: Rc::clone(&self.ledger),
            folder: self.folder.clone(),
            arena: self.arena.clone(),
            memory: self.memory.forked(),
            objects: std::mem::take(&mut self.objects),
            held: std::mem::take(&mut self.held),
            waits: Vec::new(),
            helpers: BTreeMap::new(),
            is_filtered: self.is_filtered,
            numbered: numbered.forked(undo, flags != 0),
            programs: Vec::new(),
        };
        let lived = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| own.live()));
        std::process::exit(if lived.is_err() { 101 } else { 0 })
    }

    fn exit(&mut self, status: u8) -> StepResult {
        if self.number == 0 {
            return Ok(());
        }
        // They would end at some moment after it.
        for program in self.programs.drain(..) {
            program.end()?;
        }
        if let Some(undo) = self.numbered.undo {
            self.ledger.leave_undo(undo);
        }
        self.ledger.done(self.number);
        std::process::exit(status.into())
    }

    fn join_group(&self, leader: u8) {
        let pid = if leader == self.number {
            None
        } else {
            let pid = (leader < TASKS).then(|| self.ledger.pid(leader)).flatten();
            let Some(pid) = pid.and_then(|pid| Pid::from_raw(pid.cast_signed())) else {
                return;
            };
            Some(pid)
        };
        // It may be in another session, or no leader.
        let _ = rustix::process::setpgid(None, pid);
    }

    /// What it has, a line each, in the same words while it stays the same.
    fn describe(&self) -> Result<Vec<String>, Failure> {
        let group = rustix::process::getpgid(None)?;
        let session = rustix::process::getsid(None)?;
        let reaps = rustix::process::child_subreaper()?;
        let ids = format!("group {group:?} session {session:?} reaps {reaps:?}");
        let mut told = self.describe_descriptors();
        told.extend(self.describe_numbered()?);
        told.extend(self.describe_own()?);
        told.push(ids);
        told.push(format!("calls {:?}", GONE.map(call_gone)));
        Ok(told)
    }
}

/// Blocks `signal` and has it wait, for the process or the thread.
fn send_signal(signal: u8, value: u64, thread: bool) -> StepResult {
    let signal = i32::from(signal);
    block_signals(&[signal]);
    let tid = rustix::thread::gettid().as_raw_pid().cast_unsigned();
    queue_signal(thread.then_some(tid), signal, value)?;
    Ok(())
}

/// Installs a filter for this thread, or for all where that can be.
fn filter(call: u8, all: bool) -> StepResult {
    let gone = GONE[usize::from(call) % GONE.len()];
    let kills = told::OF_DUMPS.map(|call| (call, Answer::Kill));
    let answers = [&kills[..], &[(gone, Answer::Errno(500 + u16::from(call)))]].concat();
    install_filter(&answers, all)?;
    Ok(())
}

fn told_at(folder: &Path, task: u8) -> PathBuf {
    folder.join(format!("told-{task}"))
}
