//! What is undone to System V semaphores when a process ends (`SEM_UNDO`, semop(2)).
//!
//! A program that takes a semaphore this way gives it back however it ends: also by a dump, which
//! kills it, or else nobody could go on before it is restored. The restored process takes back what
//! was undone, all of a set at once.
//!
//! The kernel tells nobody what it would undo: it is looked up in its memory, in processes that
//! have a list, and only where there are semaphores at all.
//!
//! - What: System V semaphores
//! - Kept: what is undone when the process ends (`SEM_UNDO`). The sets stay where they are, with
//!   their values; they belong to no process. Needs bpf(2), the kernel's description of its types
//!   and control groups of memory; without, what the dump undoes stays undone, with a warning.
//! - Refused: "semaphore … of set …, which it gave and others took (SEM_UNDO)": undoing that
//!   stops at 0, so that the value would be another one afterwards; "semaphore … of set …, which it
//!   took and others gave (SEM_UNDO)": undoing that stops at the highest value.
//! - At a restore: semop(2) fails with `EAGAIN` where another process has taken a semaphore
//!   meanwhile, with `EINVAL` where the set is gone.
//! - CRIU 4.2: sets of an IPC namespace of the tree's own; what is undone is lost.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::io::{Error as IoError, ErrorKind};

use rustix::io::Errno;
use rustix::thread::gettid;
use sys::kcmp::{self, Shared};
use sys::process::Process;
use sys::sem;
use syscalls::Sysno;

use super::{Asked, Facts, Part, PartState, Phase, Planned, Scope, ThreadPlan, decode, tags};
use crate::kernel::Kernel;
use crate::script::Answers;
use crate::{Error, Result};

/// The highest value of a semaphore (`SEMVMX`).
pub(crate) const VALUE_MAX: i64 = 32_767;

/// How many operations of one call are allowed at least; usually 500 (/proc/sys/kernel/sem).
const OPERATIONS: usize = 32;

/// What is undone to semaphores.
pub struct Semaphores;

/// What is undone to all of them.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// By set.
    #[prost(message, repeated, tag = "1")]
    sets: Vec<Set>,
}

/// What is undone to the semaphores of a set.
#[derive(Clone, PartialEq, prost::Message)]
struct Set {
    /// Its number (semid).
    #[prost(int32, tag = "1")]
    number: i32,
    /// By semaphore, in the order of their numbers.
    #[prost(message, repeated, tag = "2")]
    adjustments: Vec<Adjustment>,
}

/// What is undone to a semaphore.
#[derive(Clone, PartialEq, prost::Message)]
struct Adjustment {
    /// Its number in the set (sem_num).
    #[prost(uint32, tag = "1")]
    semaphore: u32,
    /// What is added to its value when the process ends; never 0.
    #[prost(sint32, tag = "2")]
    value: i32,
}

impl Part for Semaphores {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::SEMAPHORES
    }

    fn name(&self) -> &'static str {
        "System V semaphores"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let pid = facts.pid();
        let failed = |error| Error::kernel(format!("look for semaphores of pid {pid}"), error);
        if sem::sets().unwrap_or(0) == 0 || !has_list(facts.process()).map_err(failed)? {
            return Ok(None);
        }
        let sets = match look(facts.process()) {
            Ok(sets) => sets,
            Err(error) if error.kind() == ErrorKind::Unsupported => {
                log::warn!("pid {pid}: what it undoes to semaphores is not told: {error}");
                return Ok(None);
            }
            Err(error) => return Err(failed(error)),
        };
        let record = Record { sets };
        Ok((!record.sets.is_empty()).then_some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        let mut all = record.sets.iter().flat_map(|set| &set.adjustments);
        match all.find(|one| one.taken_back().is_none()) {
            Some(one) => Err(Error::corrupt(self.name(), format!("{one:?}"))),
            None => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        let sets = record.sets.iter().map(|set| {
            let all = set.adjustments.iter();
            let all = all.map(|one| format!("{}:{:+}", one.semaphore, one.value));
            format!("id={} {}", set.number, all.collect::<Vec<_>>().join(","))
        });
        sets.collect::<Vec<_>>().join(" ")
    }

    fn plan(&self, record: Option<&Record>, _: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        for set in &record.sets {
            for some in set.adjustments.chunks(OPERATIONS) {
                let operations = some.iter().map(Adjustment::taken_back);
                let operations = operations.flatten().collect::<Vec<_>>();
                let script = plan.at(Phase::Together);
                let at = script.bytes(&operations.concat());
                let args = [set.number.into(), at.into(), some.len().into()];
                script.call(Sysno::semop, args);
                script.note(self.name());
            }
        }
        Ok(())
    }
}

/// Tells whether a process has what is undone to semaphores, and the kernel does not tell what.
pub(crate) fn is_untold(pid: i32) -> bool {
    let process = Process::living(pid);
    has_list(&process).unwrap_or(true) && look(&process).is_err()
}

/// The adjustment of a semaphore's value that the kernel makes when a process ends (`semadj`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ValueAdjustment {
    /// The number of its set.
    pub set: i32,
    /// Its number there.
    pub semaphore: usize,
    /// What the kernel adds to its value.
    pub value: i64,
}

/// The adjustments for the processes that have `parts`.
pub(crate) fn adjustments_of(parts: &[&dyn PartState]) -> Vec<ValueAdjustment> {
    let records = parts.iter().filter_map(|part| part.record::<Semaphores>());
    let all = records.flat_map(Record::adjustments);
    let adjustment = |(set, one): (i32, &Adjustment)| ValueAdjustment {
        set,
        semaphore: one.semaphore as usize,
        value: one.value.into(),
    };
    all.map(adjustment).collect()
}

impl Record {
    /// All adjustments, with the numbers of their sets.
    fn adjustments(&self) -> impl Iterator<Item = (i32, &Adjustment)> {
        self.sets.iter().flat_map(|set| {
            let adjustments = set.adjustments.iter();
            adjustments.map(|one| (set.number, one))
        })
    }
}

impl Adjustment {
    /// The operation (`struct sembuf`) that lets a process undo this much, and does it; none where
    /// no process could.
    fn taken_back(&self) -> Option<[u8; 6]> {
        const IPC_NOWAIT: i16 = libc::IPC_NOWAIT as i16;
        const SEM_UNDO: i16 = libc::SEM_UNDO as i16;
        let number = u16::try_from(self.semaphore).ok()?;
        let operation = i16::try_from(self.value).ok()?.checked_neg()?;
        let mut bytes = [0; 6];
        bytes[..2].copy_from_slice(&number.to_le_bytes());
        bytes[2..4].copy_from_slice(&operation.to_le_bytes());
        bytes[4..].copy_from_slice(&(IPC_NOWAIT | SEM_UNDO).to_le_bytes());
        (operation != 0).then_some(bytes)
    }
}

/// Refuses what cannot be undone as a whole, given the payloads of processes: where a value would
/// be below 0 or above the highest one when a process ends, the kernel cuts it, and nobody knows
/// afterwards what it was to be.
///
/// # Errors
/// [`Error::Unsupported`], [`Error::Kernel`].
pub fn check<'a>(of_processes: impl Iterator<Item = (i32, &'a [u8])>) -> Result<()> {
    let (mut given, mut taken) = (HashMap::new(), HashMap::new());
    for (pid, payload) in of_processes {
        let record: Record = decode(Semaphores.name(), payload)?;
        for (set, one) in record.adjustments() {
            let semaphore = one.semaphore;
            let sums = if one.value < 0 {
                &mut given
            } else {
                &mut taken
            };
            let sum: &mut i64 = sums.entry((set, semaphore)).or_insert(0);
            *sum += i64::from(one.value);
            let value = sem::value(set, semaphore.cast_signed());
            let doing = || format!("ask for semaphore {semaphore} of set {set}");
            let value = value.map_err(|error| Error::kernel(doing(), error))?;
            let what = match i64::from(value) + *sum {
                ..0 => format!(
                    "semaphore {semaphore} of set {set}, which it gave and others took (SEM_UNDO),"
                ),
                0..=VALUE_MAX => continue,
                _ => format!(
                    "semaphore {semaphore} of set {set}, which it took and others gave (SEM_UNDO),"
                ),
            };
            return Err(Error::unsupported(pid, what));
        }
    }
    Ok(())
}

/// Whether a process has a list of what is undone.
fn has_list(process: &Process) -> std::io::Result<bool> {
    // All that have none are equal in it.
    kcmp::forget_semaphore_undo()?;
    let own = Process::new(gettid().as_raw_nonzero().get());
    Ok(kcmp::compare(&own, process, Shared::SemaphoreUndo)? != Ordering::Equal)
}

/// What is undone when a process ends that is stopped and has a list.
fn look(process: &Process) -> std::io::Result<Vec<Set>> {
    let why = |why: &str| IoError::new(ErrorKind::Unsupported, why.to_owned());
    let kernel = Kernel::get().map_err(why)?;
    let owner = kernel.owner(process)?;
    let list = match owner.word("sysvsem.undo_list")? {
        0 => return Err(why("the list is another task's")),
        list => kernel.read("sem_undo_list", list)?,
    };
    // A process has one for each set at most.
    const MOST: usize = 1 << 16;
    let mut sets = Vec::new();
    for one in list.listed("list_proc", ("sem_undo", "list_proc"), MOST)? {
        let number = one.half("semid")?.cast_signed();
        let count = match sem::count(number) {
            Ok(count) => count,
            // The set was removed: nothing is undone.
            Err(error) if is_gone(&error) => continue,
            Err(error) => return Err(error),
        };
        // At the structure's end since Linux 5.16, elsewhere before.
        let values = match one.address("semadj")? {
            pointer if pointer + 8 <= one.at + one.size() => one.word("semadj")?,
            end => end,
        };
        let adjustments = adjustments(&kernel.shorts(values, count)?);
        if !adjustments.is_empty() {
            sets.push(Set {
                number,
                adjustments,
            });
        }
    }
    // The newest stands first.
    sets.reverse();
    Ok(sets)
}

fn is_gone(error: &IoError) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::INVAL | Errno::IDRM)
    )
}

fn adjustments(values: &[i16]) -> Vec<Adjustment> {
    let all = (0..).zip(values).filter(|(_, value)| **value != 0);
    let all = all.map(|(semaphore, value)| Adjustment {
        semaphore,
        value: (*value).into(),
    });
    all.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    const SEM_UNDO: u64 = 0x1000 << 32;

    /// An operation as a word, of which semop(2) reads the first six bytes.
    fn operation(semaphore: u16, value: i16) -> u64 {
        u64::from(semaphore) | u64::from(value.cast_unsigned()) << 16 | SEM_UNDO
    }

    fn operate(stage: &mut Stage, set: &sem::Set, semaphore: u16, value: i16) {
        let number = u64::from(set.number().cast_unsigned());
        stage.call_with(Sysno::semop, &[operation(semaphore, value)], |at| {
            [number, at, 1]
        });
    }

    fn value(set: &sem::Set, semaphore: i32) -> std::io::Result<i32> {
        sem::value(set.number(), semaphore)
    }

    macro_rules! needs_kernel {
        () => {
            testkit::needs_root!();
            testkit::needs_kernel_memory!();
        };
    }

    #[test]
    fn what_is_undone_survives() {
        needs_kernel!();
        let set = sem::Set::new(600).expect("a set");
        let other = sem::Set::new(1).expect("a set");
        set.set(0, 5).expect("ours");
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&Semaphores).expect("it is supported"), None);
        operate(&mut stage, &set, 0, -2);
        operate(&mut stage, &set, 0, -1);
        for semaphore in 500..600 {
            operate(&mut stage, &set, semaphore, 4);
        }
        operate(&mut stage, &other, 0, 32767);
        let payload = stage.dump(&Semaphores).expect("it is supported");
        let payload = payload.expect("something is undone");
        let text = Stage::describe(&Semaphores, &payload).expect("sound");
        let of_set = format!("id={} 0:+3,500:-4,501:-4,", set.number());
        assert!(text.contains(&of_set), "{text}");
        let of_other = format!("id={} 0:-32767", other.number());
        assert!(text.contains(&of_other), "{text}");
        drop(stage);
        assert_eq!(
            (
                value(&set, 0).expect("ours"),
                value(&set, 599).expect("ours")
            ),
            (5, 0)
        );
        let mut fresh = Stage::new();
        fresh.restore(&Semaphores, Some(&payload));
        assert_eq!(
            (
                value(&set, 0).expect("ours"),
                value(&set, 599).expect("ours")
            ),
            (2, 4)
        );
        assert_eq!(value(&other, 0).expect("ours"), 32767);
        let restored = fresh.dump(&Semaphores).expect("it is supported");
        assert_eq!(restored, Some(payload));
        drop(fresh);
        assert_eq!(
            (
                value(&set, 0).expect("ours"),
                value(&other, 0).expect("ours")
            ),
            (5, 0)
        );
    }

    #[test]
    fn nothing_is_undone_to_what_is_gone_or_given_back() {
        needs_kernel!();
        let set = sem::Set::new(1).expect("a set");
        let gone = sem::Set::new(1).expect("a set");
        let mut stage = Stage::new();
        operate(&mut stage, &set, 0, 1);
        operate(&mut stage, &set, 0, -1);
        operate(&mut stage, &gone, 0, 1);
        drop(gone);
        assert_eq!(stage.dump(&Semaphores).expect("it is supported"), None);
    }

    #[test]
    fn what_two_give_must_all_be_there() {
        needs_kernel!();
        let set = sem::Set::new(1).expect("a set");
        let mut givers = [Stage::new(), Stage::new()];
        let mut payloads = Vec::new();
        for giver in &mut givers {
            operate(giver, &set, 0, 2);
            let payload = giver.dump(&Semaphores).expect("it is supported");
            payloads.push((giver.pid(), payload.expect("something is undone")));
        }
        let check = || check(payloads.iter().map(|(pid, payload)| (*pid, &**payload)));
        check().expect("all of it is there");
        let mut taker = Stage::new();
        operate(&mut taker, &set, 0, -1);
        let error = check().expect_err("one was taken").to_string();
        let what = format!("semaphore 0 of set {}, which it gave", set.number());
        assert!(error.contains(&what), "{error}");
    }

    #[test]
    fn what_others_gave_up_to_the_highest_value_is_refused() {
        needs_kernel!();
        let set = sem::Set::new(1).expect("a set");
        let mut taker = Stage::new();
        for (value, is_refused) in [(32_764, false), (32_765, true)] {
            set.set(0, 3).expect("a value");
            operate(&mut taker, &set, 0, -3);
            let payload = taker.dump(&Semaphores).expect("it is supported");
            let payload = payload.expect("something is undone");
            sem::set_values(set.number(), &[value]).expect("a value");
            let checked = check([(taker.pid(), &*payload)].into_iter());
            assert_eq!(checked.is_err(), is_refused, "{value}");
            // The kernel forgets all adjustments of a semaphore that is set.
            set.set(0, 0).expect("a value");
        }
    }

    #[test]
    fn what_no_process_has_is_corrupt() {
        for (semaphore, value) in [(0, 0), (0, 40_000), (0, -32_768), (1 << 16, 1)] {
            let adjustments = vec![Adjustment { semaphore, value }];
            let record = Record {
                sets: vec![Set {
                    number: 1,
                    adjustments,
                }],
            };
            let payload = prost::Message::encode_to_vec(&record);
            Stage::plan(&Semaphores, Some(&payload)).expect_err("nobody has it");
        }
    }

    #[test]
    fn a_set_is_taken_back_at_once() {
        let adjustments = vec![
            Adjustment {
                semaphore: 3,
                value: 1,
            },
            Adjustment {
                semaphore: 5,
                value: -2,
            },
        ];
        let record = Record {
            sets: vec![Set {
                number: 65_536,
                adjustments,
            }],
        };
        let payload = prost::Message::encode_to_vec(&record);
        let plan = Stage::plan(&Semaphores, Some(&payload)).expect("possible");
        let want = "[Together]\n\
            semop(id=65536, ops=[{num=3, op=-1, flags=0x1800}, {num=5, op=2, flags=0x1800}],\n    \
            count=2)  # System V semaphores\n";
        assert_eq!(plan, want);
    }
}
