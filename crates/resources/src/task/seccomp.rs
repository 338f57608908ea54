//! Which system calls a thread may make (seccomp(2)): filters, or the strict mode.
//!
//! Filters are the last thing that is put back before a thread gives up its privileges, which are
//! needed for them where it can gain some (`no_new_privs` is not set). What it calls after that
//! must not be judged by them, so its tracer suspends them until it lets the thread go.
//!
//! A process can only give all its threads a filter (`SECCOMP_FILTER_FLAG_TSYNC`) if theirs are
//! the oldest of its own: the very same ones, not equal ones. So those that all threads have in
//! common are put back in that way as well, by the leader.
//!
//! - Kept: filters with their flags and their order, which threads have the very same ones, and the
//!   strict mode.
//! - Refused: "a seccomp filter that asks a supervisor (SECCOMP_RET_USER_NOTIF)", as "who answers
//!   is not known"; "reading seccomp filters", as "that takes CAP_SYS_ADMIN, and no seccomp filter
//!   of stillframe's own"; "a seccomp filter that is no classic BPF program"; "seccomp mode …".
//! - CRIU 4.2: kept; filters that are equal in all threads are taken for the same. Does not look
//!   for supervisors.

use prost::Message;
use sys::ptrace::Filter;
use syscalls::Sysno;

use super::{Asked, Facts, Part, PartState, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script, Width, WordId};
use crate::{Error, Result};

const PR_SET_SECCOMP: u32 = linux_raw_sys::prctl::PR_SET_SECCOMP;
const SECCOMP_MODE_STRICT: u32 = libc::SECCOMP_MODE_STRICT;
const SECCOMP_MODE_FILTER: u32 = libc::SECCOMP_MODE_FILTER;
const SECCOMP_SET_MODE_FILTER: u32 = libc::SECCOMP_SET_MODE_FILTER;
const FLAG_TSYNC: u64 = 1;
const FLAG_LOG: u64 = 1 << 1;
/// A filter does not change what the thread's speculation may do: that has a record of its own.
const FLAG_SPEC_ALLOW: u64 = 1 << 2;
/// The size of `struct sock_filter`, in bytes.
const INSTRUCTION_BYTES: usize = 8;

/// A thread's filters, or its strict mode.
pub struct Seccomp;

/// What a thread has.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// `SECCOMP_MODE_STRICT` 1 or `SECCOMP_MODE_FILTER` 2.
    #[prost(uint32, tag = "1")]
    pub mode: u32,
    /// How many of the oldest filters of its process's leader are its own oldest ones.
    #[prost(uint32, tag = "2")]
    pub shared: u32,
    /// Those that were installed after them, oldest first.
    #[prost(message, repeated, tag = "3")]
    pub own: Vec<Program>,
}

/// A filter.
#[derive(Clone, PartialEq, Message)]
pub struct Program {
    /// Instructions of 8 bytes (`struct sock_filter`), at most 4,096.
    #[prost(bytes = "vec", tag = "1")]
    pub instructions: Vec<u8>,
    /// `SECCOMP_FILTER_FLAG_LOG` 2, or 0.
    #[prost(uint64, tag = "2")]
    pub flags: u64,
}

impl From<Filter> for Program {
    fn from(filter: Filter) -> Self {
        Self {
            instructions: filter.program,
            flags: filter.flags,
        }
    }
}

impl Record {
    /// What is wrong with it as data, if anything; `leaders` is how many filters the leader has.
    fn flaw(&self, leaders: usize) -> Option<String> {
        let sound = |one: &Program| {
            let len = one.instructions.len();
            len > 0
                && len.is_multiple_of(INSTRUCTION_BYTES)
                && u16::try_from(len / INSTRUCTION_BYTES).is_ok()
                && one.flags & !FLAG_LOG == 0
        };
        let filters = self.shared as usize + self.own.len();
        let fits = match self.mode {
            0 | SECCOMP_MODE_STRICT => filters == 0,
            SECCOMP_MODE_FILTER => filters > 0,
            mode => return Some(format!("mode {mode}")),
        };
        if !fits || self.shared as usize > leaders {
            let (mode, shared) = (self.mode, self.shared);
            return Some(format!(
                "{filters} filters, {shared} shared, in mode {mode}"
            ));
        }
        let unsound = self.own.iter().position(|one| !sound(one));
        unsound.map(|at| format!("filter {at} is none"))
    }

    fn shown(&self) -> String {
        match self.mode {
            SECCOMP_MODE_STRICT => "strict".to_owned(),
            _ => {
                let own = self.own.iter();
                let own = own.map(|one| one.instructions.len() / INSTRUCTION_BYTES);
                let own = own.map(|len| len.to_string()).collect::<Vec<_>>();
                format!("shared={} instructions=[{}]", self.shared, own.join(", "))
            }
        }
    }
}

impl Part for Seccomp {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::SECCOMP
    }

    fn name(&self) -> &'static str {
        "seccomp"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let mode = facts.status()?.seccomp;
        if mode == 0 {
            return Ok(None);
        }
        let mut own = filters(facts, facts.tid())?;
        let mut shared = 0;
        if facts.tid() != facts.pid() && mode == SECCOMP_MODE_FILTER {
            let leaders = filters(facts, facts.pid())?;
            let pairs = own.iter().zip(&leaders);
            shared = pairs.take_while(|(own, leaders)| own == leaders).count();
        }
        let own = own.drain(shared..).map(Program::from);
        let record = Record {
            mode,
            shared: u32::try_from(shared).expect("the kernel takes fewer"),
            own: own.collect(),
        };
        Ok(Some(record))
    }

    fn describe(&self, record: &Record) -> String {
        record.shown()
    }

    /// Nothing: [`plan`] does, for all threads of a process together.
    fn plan(&self, _: Option<&Record>, _: Planned<'_>, _: &mut ThreadPlan) -> Result<()> {
        Ok(())
    }
}

/// What a leader gets that has ended, so that its other threads get it of the leader: all that the
/// thread has that is asked in its place.
pub(super) fn of_leader(asked: &dyn Facts) -> Result<Option<Record>> {
    let mode = asked.status()?.seccomp;
    if mode == 0 {
        return Ok(None);
    }
    let own = filters(asked, asked.tid())?.into_iter();
    let own = own.map(Program::from).collect();
    let shared = 0;
    Ok(Some(Record { mode, shared, own }))
}

/// Checks that what the thread has can be put back.
///
/// # Errors
/// [`Error::Unsupported`], and those of [`Facts::filters`].
pub(super) fn check(facts: &dyn Facts) -> Result<()> {
    let tid = facts.tid();
    match facts.status()?.seccomp {
        0 | SECCOMP_MODE_STRICT => Ok(()),
        SECCOMP_MODE_FILTER if filters(facts, tid)?.iter().any(asks_supervisor) => {
            let why = "who answers is not known";
            let what = "a seccomp filter that asks a supervisor (SECCOMP_RET_USER_NOTIF)";
            Err(Error::unsupported(tid, what).because(why))
        }
        SECCOMP_MODE_FILTER => Ok(()),
        mode => Err(Error::unsupported(tid, format!("seccomp mode {mode}"))),
    }
}

/// The filters of a thread of the process.
fn filters(facts: &dyn Facts, tid: i32) -> Result<Vec<Filter>> {
    use rustix::io::Errno;
    facts.filters(tid).map_err(|error| match &error {
        Error::Kernel { source, .. } => match Errno::from_io_error(source) {
            Some(Errno::ACCESS) => {
                let why = "that takes CAP_SYS_ADMIN, and no seccomp filter of stillframe's own";
                Error::unsupported(tid, "reading seccomp filters").because(why)
            }
            Some(Errno::MEDIUMTYPE) => {
                Error::unsupported(tid, "a seccomp filter that is no classic BPF program")
            }
            _ => error,
        },
        _ => error,
    })
}

/// Whether it has an instruction that returns `SECCOMP_RET_USER_NOTIF`.
fn asks_supervisor(filter: &Filter) -> bool {
    /// `BPF_RET | BPF_K`.
    const RETURN: [u8; 2] = [0x06, 0];
    const ACTION: u32 = 0xffff_0000;
    const USER_NOTIF: u32 = 0x7fc0_0000;
    let mut instructions = filter.program.chunks_exact(INSTRUCTION_BYTES);
    instructions.any(|one| {
        let value = u32::from_le_bytes(one[4..].try_into().expect("four bytes"));
        one[..2] == RETURN && value & ACTION == USER_NOTIF
    })
}

/// Plans what the threads of a process have, its leader first. `word` makes a word for them to wait
/// on, if they need one.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn plan(
    (pid, states): (i32, &[Option<&dyn PartState>]),
    plans: &mut [ThreadPlan],
    word: impl FnOnce() -> WordId,
) -> Result<()> {
    if states.iter().all(Option::is_none) {
        return Ok(());
    }
    let records = states.iter().map(|state| {
        let record = state.and_then(|state| state.record::<Seccomp>());
        record.cloned().unwrap_or_default()
    });
    let records = records.collect::<Vec<_>>();
    let (leader, others) = records.split_first().expect("a process has a leader");
    let leaders = |record: &Record| match std::ptr::eq(record, leader) {
        true => 0,
        false => leader.own.len(),
    };
    if let Some(flaw) = records.iter().find_map(|one| one.flaw(leaders(one))) {
        return Err(Error::corrupt(format!("task {pid} seccomp"), flaw));
    }
    let common = others.iter().map(|one| one.shared as usize).min();
    let common = common.unwrap_or(0);
    let (of_all, of_leader) = leader.own.split_at(common);
    let word = (common > 0).then(word);
    for (record, plan) in records.iter().zip(plans) {
        let script = plan.at(Phase::Filters);
        match (record.mode, word) {
            (SECCOMP_MODE_STRICT, _) => {
                let strict = [PR_SET_SECCOMP.into(), SECCOMP_MODE_STRICT.into()];
                script.call(Sysno::prctl, strict);
                continue;
            }
            (_, Some(word)) if std::ptr::eq(record, leader) => {
                install(script, of_all, FLAG_TSYNC);
                script.post(word);
            }
            (_, Some(word)) => {
                script.wait(word, 1);
            }
            (_, None) => {}
        }
        if std::ptr::eq(record, leader) {
            install(script, of_leader, 0);
        } else {
            install(script, &leader.own[common..record.shared as usize], 0);
            install(script, &record.own, 0);
        }
    }
    Ok(())
}

fn install(script: &mut Script, programs: &[Program], flags: u64) {
    for program in programs {
        let count = program.instructions.len() / INSTRUCTION_BYTES;
        let instructions = script.bytes(&program.instructions);
        // struct sock_fprog: how many there are, and where.
        let whole = script.bytes(&[&count.to_le_bytes()[..], &[0; 8]].concat());
        script.fix(whole, 8, instructions, Width::Eight);
        let flags = program.flags | flags | FLAG_SPEC_ALLOW;
        let args = [SECCOMP_SET_MODE_FILTER.into(), flags.into(), whole.into()];
        // With FLAG_TSYNC a result above 0 is a thread that has other filters.
        script.expect(Sysno::seccomp, args, 0u32);
        script.note(format!("{count} instructions"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::ErasedPart;
    use crate::testing::Stage;

    /// `BPF_RET | BPF_K`, with this action.
    fn returning(action: u32) -> Vec<u8> {
        [&[0x06, 0, 0, 0][..], &action.to_le_bytes()].concat()
    }

    const ALLOW: u32 = 0x7fff_0000;

    fn program(action: u32) -> Program {
        Program {
            instructions: returning(action),
            flags: 0,
        }
    }

    fn filtered(stage: &mut Stage, action: u32) {
        let at = stage.data() + 64;
        let instruction = u64::from_le_bytes(returning(action).try_into().expect("one"));
        let words = [1, at, 0, 0, 0, 0, 0, 0, instruction];
        stage.call_with(Sysno::seccomp, &words, |at| [1, FLAG_LOG, at]);
    }

    #[test]
    fn filters_are_read_in_the_order_of_their_installation() {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&Seccomp).expect("an ordinary thread"), None);
        filtered(&mut stage, ALLOW);
        filtered(&mut stage, ALLOW | 7);
        let payload = stage.dump(&Seccomp).expect("filters").expect("some");
        let record: Record = image::strict::decode(&payload).expect("sound");
        let logged = |action| Program {
            flags: FLAG_LOG,
            ..program(action)
        };
        let want = Record {
            mode: SECCOMP_MODE_FILTER,
            shared: 0,
            own: vec![logged(ALLOW), logged(ALLOW | 7)],
        };
        assert_eq!(record, want);
        let shown = Stage::describe(&Seccomp, &payload).expect("sound");
        assert_eq!(shown, "shared=0 instructions=[1, 1]");
    }

    #[test]
    fn a_filter_that_asks_a_supervisor_is_refused_by_name() {
        let mut stage = Stage::new();
        filtered(&mut stage, 0x7fc0_0000);
        let error = check(&stage).expect_err("who is it");
        let told = error.to_string();
        assert!(told.contains("SECCOMP_RET_USER_NOTIF"), "{told}");
    }

    fn planned(records: &[Record]) -> Result<Vec<String>> {
        let given = records.iter().map(|record| {
            let payload = record.encode_to_vec();
            let state = ErasedPart::decode(&Seccomp, 7, &payload).expect("a message");
            Some(state).filter(|_| !payload.is_empty())
        });
        let given = given.collect::<Vec<_>>();
        let given = given.iter().map(Option::as_deref);
        let mut plans = vec![ThreadPlan::default(); records.len()];
        plan((7, &given.collect::<Vec<_>>()), &mut plans, || WordId(9))?;
        let texts = plans.iter_mut();
        let texts = texts.map(|plan| plan.take(Phase::Filters).to_string());
        Ok(texts.collect())
    }

    #[test]
    fn what_all_threads_have_comes_from_the_leader() {
        let record = |shared, own: &[u32]| Record {
            mode: SECCOMP_MODE_FILTER,
            shared,
            own: own.iter().map(|action| program(ALLOW | action)).collect(),
        };
        let all = [record(0, &[1, 2, 3]), record(2, &[]), record(1, &[4])];
        let texts = planned(&all).expect("sound");
        let calls = |text: &str, call: &str| text.lines().filter(|l| l.contains(call)).count();
        let installed = texts.iter().map(|text| calls(text, "seccomp("));
        assert_eq!(installed.collect::<Vec<_>>(), [3, 1, 1], "{texts:#?}");
        let first = texts[0].lines().next().expect("a line");
        assert!(first.contains("flags=0x5,"), "{first}");
        assert!(texts[1].starts_with("await("), "{}", texts[1]);
        // One thread without filters: nobody is given any.
        let texts = planned(&[record(0, &[1]), Record::default()]).expect("sound");
        assert!(
            !texts[0].contains("flags=0x5,") && texts[1].is_empty(),
            "{texts:?}"
        );
    }

    #[test]
    fn records_that_make_no_sense_are_corrupt() {
        let filters = |shared, own| Record {
            mode: SECCOMP_MODE_FILTER,
            shared,
            own,
        };
        let torn = Program {
            instructions: vec![6; 7],
            flags: 0,
        };
        let wrong = [
            filters(0, vec![]),
            filters(1, vec![]),
            filters(0, vec![torn]),
            filters(0, vec![Program::default()]),
            Record {
                mode: SECCOMP_MODE_STRICT,
                ..filters(0, vec![program(ALLOW)])
            },
            Record {
                mode: 3,
                ..Record::default()
            },
        ];
        for record in wrong {
            let error = planned(std::slice::from_ref(&record)).expect_err("it is wrong");
            assert!(
                matches!(error, Error::Corrupt { .. }),
                "{record:?}: {error}"
            );
        }
    }
}
