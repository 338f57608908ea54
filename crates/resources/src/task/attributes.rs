//! Attributes that are one number each, mostly of prctl(2): a table of how to get and set them.
//!
//! - What: attributes of prctl(2)
//! - Kept: parent-death signal, child subreaper, `no_new_privs`, personality, transparent huge
//!   pages disabled, memory merging, machine-check policy, use of the time stamp counter and of the
//!   cpuid instruction, memory-deny-write-execute (what can be written and run from before it
//!   stays).
//! - At a restore: "set in this process, and cannot be unset".
//! - CRIU 4.2: parent-death signal, child subreaper, `no_new_privs`, transparent huge pages
//!   disabled; the others are not kept.

use linux_raw_sys::prctl::{
    PR_GET_CHILD_SUBREAPER, PR_GET_MDWE, PR_GET_MEMORY_MERGE, PR_GET_PDEATHSIG, PR_GET_THP_DISABLE,
    PR_GET_TSC, PR_MCE_KILL, PR_MCE_KILL_DEFAULT, PR_MCE_KILL_GET, PR_MCE_KILL_SET,
    PR_SET_CHILD_SUBREAPER, PR_SET_MDWE, PR_SET_MEMORY_MERGE, PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG, PR_SET_THP_DISABLE, PR_SET_TSC, PR_TSC_ENABLE,
};
use sys::proc::Status;
use syscalls::Sysno;

use super::{Asked, Facts, Holder, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::Result;
use crate::map::memory::Memory;
use crate::script::{Answers, Arg, Script};

const ARCH_GET_CPUID: u32 = 0x1011;
const ARCH_SET_CPUID: u32 = 0x1012;

/// One attribute.
pub struct Attribute {
    tag: u16,
    name: &'static str,
    scope: Scope,
    phase: Phase,
    get: Get,
    /// The value that a task has which never set it.
    plain: u64,
    /// The value that a thread starts with; `None` when it is not known.
    inherited: fn(&Planned<'_>) -> Option<u64>,
    /// The call that sets it, for a value.
    set: fn(u64) -> (Sysno, [u64; 3]),
    /// Whether a thread that starts with a greater value than it had is beyond help.
    one_way: bool,
}

/// Where the value comes from.
enum Get {
    /// The result of a call.
    Result(Sysno, u64),
    /// 32 bits that `prctl` with this option writes.
    Written(u32),
    /// The thread's status, as read already.
    Status(fn(&Status) -> u64),
}

/// An attribute's value.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The number, as the kernel gives and takes it.
    #[prost(uint64, tag = "1")]
    pub value: u64,
}

const fn prctl(option: u32, second: u64, third: u64) -> (Sysno, [u64; 3]) {
    (Sysno::prctl, [option as u64, second, third])
}

/// The signal that a thread gets when the thread that made it ends. Changing credentials clears
/// it, and until the tracer holds the task, it ties it to its parent.
pub static PARENT_DEATH: Attribute = Attribute {
    tag: tags::PARENT_DEATH,
    name: "parent-death signal",
    scope: Scope::Thread,
    phase: Phase::Final,
    get: Get::Written(PR_GET_PDEATHSIG),
    plain: 0,
    inherited: |who| (!who.is_leader()).then_some(0),
    set: |signal| prctl(PR_SET_PDEATHSIG, signal, 0),
    one_way: false,
};

/// Whether orphaned descendants become children of the process.
pub static SUBREAPER: Attribute = Attribute {
    tag: tags::SUBREAPER,
    name: "child subreaper",
    scope: Scope::Process,
    phase: Phase::Last,
    get: Get::Written(PR_GET_CHILD_SUBREAPER),
    plain: 0,
    inherited: |_| Some(0),
    set: |on| prctl(PR_SET_CHILD_SUBREAPER, on, 0),
    one_way: false,
};

/// Whether execve(2) cannot grant privileges.
pub static NO_NEW_PRIVS: Attribute = Attribute {
    tag: tags::NO_NEW_PRIVS,
    name: "no_new_privs",
    scope: Scope::Thread,
    phase: Phase::Last,
    get: Get::Status(|status| u64::from(status.no_new_privs)),
    plain: 0,
    inherited: |who| Some(u64::from(who.inherited.no_new_privs)),
    set: |_| prctl(PR_SET_NO_NEW_PRIVS, 1, 0),
    one_way: true,
};

/// The execution domain and its flags. They change how memory is mapped: not before it is there.
pub static PERSONALITY: Attribute = Attribute {
    tag: tags::PERSONALITY,
    name: "personality",
    scope: Scope::Thread,
    phase: Phase::Last,
    get: Get::Result(Sysno::personality, 0xffff_ffff),
    plain: 0,
    inherited: |who| Some(u64::from(who.inherited.personality)),
    set: |value| (Sysno::personality, [value, 0, 0]),
    one_way: false,
};

/// Whether the process gets no transparent huge pages: 0, 1, or 3 for "only where advised".
pub static HUGE_PAGES: Attribute = Attribute {
    tag: tags::HUGE_PAGES,
    name: "transparent huge pages disabled",
    scope: Scope::Process,
    phase: Phase::Alone,
    get: Get::Result(Sysno::prctl, PR_GET_THP_DISABLE as u64),
    plain: 0,
    inherited: |who| Some(who.inherited.thp_disable),
    set: |value| prctl(PR_SET_THP_DISABLE, value & 1, value & !1),
    one_way: false,
};

/// Whether memory that was writable cannot become executable.
pub static MDWE: Attribute = Attribute {
    tag: tags::MDWE,
    name: "memory-deny-write-execute",
    scope: Scope::Process,
    phase: Phase::Last,
    get: Get::Result(Sysno::prctl, PR_GET_MDWE as u64),
    plain: 0,
    inherited: |who| Some(who.inherited.mdwe),
    set: |bits| prctl(PR_SET_MDWE, bits, 0),
    one_way: true,
};

/// Whether equal pages of the process are merged.
pub static MEMORY_MERGE: Attribute = Attribute {
    tag: tags::MEMORY_MERGE,
    name: "memory merging",
    scope: Scope::Process,
    phase: Phase::Alone,
    get: Get::Result(Sysno::prctl, PR_GET_MEMORY_MERGE as u64),
    plain: 0,
    inherited: |who| Some(who.inherited.memory_merge),
    set: |on| prctl(PR_SET_MEMORY_MERGE, on, 0),
    one_way: false,
};

/// What becomes of a thread one of whose pages breaks: 0 late, 1 early, 2 the system's choice. A
/// new thread inherits it, and the two below, from its maker: they wait until all are made.
pub static MACHINE_CHECK: Attribute = Attribute {
    tag: tags::MACHINE_CHECK,
    name: "machine-check policy",
    scope: Scope::Thread,
    phase: Phase::Last,
    get: Get::Result(Sysno::prctl, PR_MCE_KILL_GET as u64),
    plain: PR_MCE_KILL_DEFAULT as u64,
    inherited: |who| Some(who.inherited.machine_check),
    set: |policy| prctl(PR_MCE_KILL, PR_MCE_KILL_SET as u64, policy),
    one_way: false,
};

/// Whether reading the time stamp counter is allowed (1) or a fault (2).
pub static TIME_STAMP: Attribute = Attribute {
    tag: tags::TIME_STAMP,
    name: "time stamp counter",
    scope: Scope::Thread,
    phase: Phase::Last,
    get: Get::Written(PR_GET_TSC),
    plain: PR_TSC_ENABLE as u64,
    inherited: |_| Some(PR_TSC_ENABLE.into()),
    set: |mode| prctl(PR_SET_TSC, mode, 0),
    one_way: false,
};

/// Whether the `cpuid` instruction is allowed (1) or a fault (0).
pub static CPUID: Attribute = Attribute {
    tag: tags::CPUID,
    name: "cpuid instruction",
    scope: Scope::Thread,
    phase: Phase::Last,
    get: Get::Result(Sysno::arch_prctl, ARCH_GET_CPUID as u64),
    plain: 1,
    inherited: |_| Some(1),
    set: |on| (Sysno::arch_prctl, [ARCH_SET_CPUID.into(), on, 0]),
    one_way: false,
};

impl Part for Attribute {
    type Record = Record;

    fn tag(&self) -> u16 {
        self.tag
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn scope(&self) -> Scope {
        self.scope
    }

    fn holder(&self) -> Holder {
        match self.tag {
            tags::HUGE_PAGES | tags::MEMORY_MERGE | tags::MDWE => Holder::Memory,
            _ => Holder::Task,
        }
    }

    // A kernel that does not know an attribute has tasks that never set it: attempts.
    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let mut asked = Asked::default();
        match self.get {
            Get::Result(call, first) => asked.steps.push(questions.attempt(call, [first.into()])),
            Get::Written(option) => {
                let buffer = questions.buffer(4);
                let step = questions.attempt(Sysno::prctl, [option.into(), buffer.into()]);
                asked.steps.push(step);
                asked.data.push(buffer);
            }
            Get::Status(_) => {}
        }
        Ok(asked)
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let result = asked.steps.first().map_or(0, |step| answers.result(*step));
        let value = match self.get {
            _ if result < 0 => self.plain,
            Get::Result(..) => result.cast_unsigned(),
            Get::Written(_) => answers.half(asked.data[0], 0).into(),
            Get::Status(of) => of(&*facts.status()?),
        };
        let record = Record { value };
        Ok((value != self.plain).then_some(record))
    }

    fn describe(&self, record: &Record) -> String {
        format!("{:#x}", record.value)
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let wanted = record.map_or(self.plain, |record| record.value);
        let inherited = (self.inherited)(&who);
        if self.one_way && inherited.is_some_and(|inherited| inherited & !wanted != 0) {
            return Err(who.mismatch(self, "set in this process, and cannot be unset"));
        }
        let script = plan.at(self.phase);
        if inherited != Some(wanted) {
            let (call, args) = (self.set)(wanted);
            script.call(call, args.map(Arg::Value));
            script.note(self.name);
        }
        if self.tag == tags::MEMORY_MERGE && wanted != 0 {
            except(who.memory, script);
        }
        Ok(())
    }
}

/// Takes out of memory merging which mappings the kernel or the program left out: the stack of a
/// program that was executed under it, and what has `MADV_UNMERGEABLE`.
fn except(memory: &Memory, script: &mut Script) {
    const MERGEABLE: u32 = linux_raw_sys::general::MADV_MERGEABLE;
    const UNMERGEABLE: u32 = linux_raw_sys::general::MADV_UNMERGEABLE;
    let private = memory.mappings.iter().filter(|map| map.is_private());
    let without = private.filter(|map| !map.advice.contains(&MERGEABLE));
    for map in without {
        let args = [map.start, map.end - map.start, UNMERGEABLE.into()];
        script.call(Sysno::madvise, args.map(Arg::Value));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::memory::Mapping;
    use crate::testing::Stage;

    /// Sets an attribute by a call and has it dumped and restored in a fresh process.
    fn survives(attribute: &'static Attribute, value: u64) {
        let mut stage = Stage::new();
        assert_eq!(
            stage.dump(attribute).expect("it is supported"),
            None,
            "{}",
            attribute.name
        );
        let (call, args) = (attribute.set)(value);
        stage.call(call, &args);
        let payload = stage
            .dump(attribute)
            .expect("it is supported")
            .expect("it is set");
        let record: Record = image::strict::decode(&payload).expect("sound");
        assert_eq!(record.value, value, "{}", attribute.name);
        let mut fresh = Stage::new();
        fresh.restore(attribute, Some(&payload));
        assert_eq!(
            fresh.dump(attribute).expect("it is supported"),
            Some(payload)
        );
    }

    #[test]
    fn parent_death_signal_survives() {
        survives(&PARENT_DEATH, 15);
    }

    #[test]
    fn subreaper_survives() {
        survives(&SUBREAPER, 1);
    }

    #[test]
    fn no_new_privs_survives() {
        survives(&NO_NEW_PRIVS, 1);
    }

    #[test]
    fn personality_survives() {
        survives(&PERSONALITY, 0x40_0000 | 0x4_0000 | 8);
    }

    #[test]
    fn disabled_huge_pages_survive() {
        survives(&HUGE_PAGES, 1);
    }

    #[test]
    fn huge_pages_only_where_advised_survive() {
        // Linux 6.18.
        if Stage::new().attempt(Sysno::prctl, &[PR_SET_THP_DISABLE.into(), 1, 2]) != 0 {
            testkit::skip!("the kernel does not know PR_THP_DISABLE_EXCEPT_ADVISED");
        }
        survives(&HUGE_PAGES, 3);
    }

    #[test]
    fn memory_deny_write_execute_survives() {
        survives(&MDWE, 1);
        survives(&MDWE, 3);
    }

    #[test]
    fn memory_merging_survives() {
        if Stage::new().attempt(Sysno::prctl, &[PR_SET_MEMORY_MERGE.into(), 1]) != 0 {
            testkit::skip!("the kernel has no KSM");
        }
        survives(&MEMORY_MERGE, 1);
    }

    #[test]
    fn what_memory_merging_left_out_stays_out() {
        const PAGE: u64 = 4096;
        let mapping = |number: u64, advice: &[u32], flags| Mapping {
            start: number * PAGE,
            end: (number + 1) * PAGE,
            flags,
            advice: advice.to_vec(),
            ..Mapping::default()
        };
        let (private, shared) = (2, 1);
        let mappings = vec![
            mapping(1, &[12], private),
            mapping(2, &[14], private),
            mapping(3, &[], shared),
        ];
        let memory = Memory {
            mappings,
            ..Memory::default()
        };
        let mut inherited = Stage::inherited();
        for merged_before in [0, 1] {
            inherited.memory_merge = merged_before;
            let who = Planned {
                pid: 1,
                tid: 1,
                inherited: &inherited,
                alone: false,
                memory: &memory,
            };
            let plan = |value| {
                let mut plan = ThreadPlan::default();
                let planned = MEMORY_MERGE.plan(Some(&Record { value }), who, &mut plan);
                planned.expect("sound");
                plan.at(Phase::Alone).to_string()
            };
            let on = plan(1);
            assert_eq!(
                on.matches("PR_SET_MEMORY_MERGE").count() == 0,
                merged_before == 1
            );
            assert_eq!(on.matches("madvise").count(), 1, "{on}");
            assert!(
                on.contains("madvise(addr=0x2000, len=4096, advice=13)"),
                "{on}"
            );
            assert!(!plan(0).contains("madvise"));
        }
    }

    #[test]
    fn machine_check_policy_survives() {
        if Stage::new().attempt(Sysno::prctl, &[PR_MCE_KILL.into(), 1, 1]) != 0 {
            testkit::skip!("the kernel has no memory failure handling");
        }
        survives(&MACHINE_CHECK, 0);
        survives(&MACHINE_CHECK, 1);
    }

    /// A leader makes its threads when its own script has come to the end of [`Phase::Alone`].
    #[test]
    fn attributes_of_threads_are_set_when_no_thread_can_inherit_them() {
        let all = [
            &PARENT_DEATH,
            &NO_NEW_PRIVS,
            &PERSONALITY,
            &MACHINE_CHECK,
            &TIME_STAMP,
            &CPUID,
        ];
        for attribute in all {
            assert_eq!(attribute.scope, Scope::Thread);
            assert!(attribute.phase > Phase::Alone, "{}", attribute.name);
        }
    }

    #[test]
    fn forbidden_time_stamps_survive() {
        survives(&TIME_STAMP, 2);
    }

    #[test]
    fn forbidden_cpuid_survives() {
        if Stage::new().attempt(Sysno::arch_prctl, &[ARCH_SET_CPUID.into(), 0]) != 0 {
            testkit::skip!("the processor cannot fault on cpuid");
        }
        survives(&CPUID, 0);
    }

    #[test]
    fn what_the_restorer_set_for_itself_goes_away_where_it_can() {
        let mut inherited = Stage::inherited();
        inherited.thp_disable = 1;
        inherited.personality = 8;
        let plan = Stage::plan_with(&HUGE_PAGES, None, &inherited).expect("sound");
        assert_eq!(
            plan,
            "[Alone]\nprctl(PR_SET_THP_DISABLE, on=0, flags=0)  # transparent huge pages disabled\n"
        );
        let plan = Stage::plan_with(&PERSONALITY, None, &inherited).expect("sound");
        assert_eq!(plan, "[Last]\npersonality(persona=0)  # personality\n");
        inherited.no_new_privs = true;
        let error = Stage::plan_with(&NO_NEW_PRIVS, None, &inherited).expect_err("it is for ever");
        let want = "task 1: no_new_privs: set in this process, and cannot be unset";
        assert_eq!(error.to_string(), want);
    }

    #[test]
    fn the_tie_to_the_parent_is_always_replaced() {
        let plan = Stage::plan(&PARENT_DEATH, None).expect("sound");
        assert_eq!(
            plan,
            "[Final]\nprctl(PR_SET_PDEATHSIG, signal=0)  # parent-death signal\n"
        );
        assert_eq!(Stage::plan_of_thread(&PARENT_DEATH, None), "");
    }
}
