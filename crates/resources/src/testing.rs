//! A stage for tests of task parts: a process that is put into a state, dumped and restored for
//! real, without the rest of Stillframe.

use std::rc::Rc;
use std::time::{Duration, Instant};

use abi::{Addr, Kind, Op, Span};
use sys::arch::Registers;
use sys::process::Process;
use sys::ptrace::{self, RseqArea};
use syscalls::Sysno;
use testkit::calls::puppet::Puppet;

use crate::map::memory::Memory;
use crate::script::{Answers, Layout, Script};
use crate::task::{ErasedPart, Facts, Phase, Planned, ThreadPlan};
use crate::{Allow, Error, Inherited, Result};

const PHASES: [Phase; 8] = [
    Phase::Fork,
    Phase::Unplaced,
    Phase::Alone,
    Phase::Together,
    Phase::Filters,
    Phase::Privileges,
    Phase::Last,
    Phase::Final,
];
/// Where the test's own data begins in the puppet's memory; scripts have what is before.
const OWN_AT: usize = 0x8_0000;

/// Runs a test where nobody holds its descriptors open, has its names or sees its connections:
/// tests beside it make processes, which have copies of all descriptors for a moment.
macro_rules! alone {
    ($body:block) => {
        testkit::needs_root!();
        testkit::calls::isolated::run(|| $body).unwrap();
    };
}
pub(crate) use alone;

/// A process on which parts are tried out.
pub struct Stage {
    puppet: Puppet,
    process: Process,
    allow: Allow,
}

impl Stage {
    /// A fresh process, as the restorer makes them.
    pub fn new() -> Self {
        // The puppet inherits ignored signals: from here on this process ignores none.
        testkit::skip::note_end_to_end();
        let puppet = Puppet::start().expect("a puppet");
        let process = Process::new(puppet.pid());
        let allow = Allow::default();
        Self {
            puppet,
            process,
            allow,
        }
    }

    /// The same, without the rseq area that the C library of this program has registered.
    pub fn without_rseq() -> Self {
        let mut stage = Self::new();
        let area = stage.rseq().expect("it lives");
        if area.addr != 0 {
            let (len, signature) = (area.len_bytes.into(), area.signature.into());
            stage.call(Sysno::rseq, &[area.addr, len, 1, signature]);
        }
        stage
    }

    /// What a puppet of the calling thread starts with.
    pub fn inherited() -> Inherited {
        Inherited::read().expect("/proc is there")
    }

    pub fn pid(&self) -> i32 {
        self.puppet.pid()
    }

    /// The address of memory in the process that is the test's.
    pub fn data(&self) -> u64 {
        self.puppet.data() + OWN_AT as u64
    }

    /// Has the process make a call, which must succeed.
    pub fn call(&mut self, call: Sysno, args: &[u64]) -> i64 {
        let result = self.puppet.call(call as i64, args);
        assert!(result >= 0, "{}{args:?} = {result}", call.name());
        result
    }

    /// Has the process make a call that may fail.
    pub fn attempt(&mut self, call: Sysno, args: &[u64]) -> i64 {
        self.puppet.call(call as i64, args)
    }

    /// The same, with words in its memory whose address goes into the arguments.
    pub fn call_with<const N: usize>(
        &mut self,
        call: Sysno,
        words: &[u64],
        args: impl FnOnce(u64) -> [u64; N],
    ) -> i64 {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.puppet.write(OWN_AT, &bytes);
        let args = args(self.data());
        self.call(call, &args)
    }

    /// Has the process begin a call that waits.
    pub fn begin(&mut self, call: Sysno, args: &[u64]) {
        self.puppet.begin(call as i64, args);
    }

    /// Waits for the call that was begun and gives its result.
    pub fn finish(&mut self) -> i64 {
        self.puppet.finish()
    }

    /// Adds 1 to an eventfd of the process.
    pub fn add_to_eventfd(&self, fd: u64) {
        let pid = rustix::process::Pid::from_raw(self.pid()).expect("a pid");
        let flags = rustix::process::PidfdFlags::empty();
        let pidfd = rustix::process::pidfd_open(pid, flags).expect("it lives");
        let fd = i32::try_from(fd).expect("a descriptor");
        let flags = rustix::process::PidfdGetfdFlags::empty();
        let event = rustix::process::pidfd_getfd(pidfd, fd, flags).expect("it is open");
        rustix::io::write(event, &1u64.to_ne_bytes()).expect("the counter has room");
    }

    /// Writes into the test's own memory.
    pub fn put(&mut self, offset: u64, bytes: &[u8]) {
        let offset = usize::try_from(offset).expect("small");
        self.puppet.write(OWN_AT + offset, bytes);
    }

    /// Reads a word of the test's own memory.
    pub fn word(&self, offset: usize) -> u64 {
        let bytes = self.puppet.read(OWN_AT + offset, 8);
        u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
    }

    /// Dumps one part of the process's state.
    pub fn dump(&mut self, part: &'static dyn ErasedPart) -> Result<Option<Vec<u8>>> {
        let mut questions = Script::default();
        let asked = part.ask(self, &mut questions)?;
        let answers = self.run(&questions);
        part.dump(self, &asked, &answers)
    }

    /// One line about what was dumped of a part.
    pub fn describe(part: &'static dyn ErasedPart, payload: &[u8]) -> Result<String> {
        Ok(part.decode(1, payload)?.describe())
    }

    /// Makes the process be as dumped.
    pub fn restore(&mut self, part: &'static dyn ErasedPart, payload: Option<&[u8]>) {
        self.restore_all(&[(part, payload)]);
    }

    /// The same, for several parts at once.
    pub fn restore_all(&mut self, parts: &[(&'static dyn ErasedPart, Option<&[u8]>)]) {
        self.restore_with(parts, &Self::inherited());
    }

    /// The same, for a process that is taken to start with `inherited`.
    pub fn restore_with(
        &mut self,
        parts: &[(&'static dyn ErasedPart, Option<&[u8]>)],
        inherited: &Inherited,
    ) {
        let pid = self.pid();
        let who = Planned {
            pid,
            tid: pid,
            inherited,
            alone: false,
            memory: &Memory::default(),
        };
        let mut plan = ThreadPlan::default();
        for (part, payload) in parts {
            let state = payload.map(|payload| part.decode(pid, payload).expect("sound"));
            part.plan(state.as_deref(), who, &mut plan)
                .expect("the plan is possible");
        }
        self.run_plan(plan);
    }

    /// Has the process make the calls of a script.
    pub fn answers(&mut self, script: &Script) -> Answers {
        self.run(script)
    }

    /// Has the process make all that is planned.
    pub fn run_plan(&mut self, mut plan: ThreadPlan) {
        let pid = self.pid();
        for phase in PHASES {
            self.run(&plan.take(phase));
        }
        for write in plan.outside {
            let path = format!("/proc/{pid}/{}", write.file);
            std::fs::write(&path, write.text).expect(&path);
        }
    }

    fn run(&mut self, script: &Script) -> Answers {
        let layout = Layout {
            ops: Addr(0),
            data: Addr(self.puppet.data()),
            words: Addr(0),
            pool: &[],
            scripts: &[],
            area: Span::default(),
            top: Addr(0),
        };
        let (ops, data) = script.compile(&layout);
        self.puppet.write(0, &data);
        let mut results = Vec::new();
        for (step, op) in script.steps.iter().zip(ops.chunks(Op::BYTES)) {
            let word = |at: usize| {
                let bytes = &op[8 * at..8 * at + 8];
                u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
            };
            let args: Vec<u64> = (2..8).map(word).collect();
            let result = self.puppet.call(word(1).cast_signed(), &args);
            match step.kind {
                Kind::Try => {}
                Kind::Call => assert!(result >= 0, "{step} failed: {result}"),
                Kind::Expect => assert_eq!(result, word(9).cast_signed(), "{step}"),
                _ => panic!("parts need no {step}"),
            }
            results.push(result);
        }
        let data = self.puppet.read(0, data.len());
        Answers { results, data }
    }

    /// The plan of a part for the first thread of task 1, as text.
    pub fn plan(part: &'static dyn ErasedPart, payload: Option<&[u8]>) -> Result<String> {
        Self::plan_with(part, payload, &Self::inherited())
    }

    /// The same, for a task that starts with `inherited`.
    pub fn plan_with(
        part: &'static dyn ErasedPart,
        payload: Option<&[u8]>,
        inherited: &Inherited,
    ) -> Result<String> {
        plan_text(
            part,
            payload,
            Planned {
                pid: 1,
                tid: 1,
                inherited,
                alone: false,
                memory: &Memory::default(),
            },
        )
    }

    /// The same, for another thread.
    pub fn plan_of_thread(part: &'static dyn ErasedPart, payload: Option<&[u8]>) -> String {
        let inherited = &Self::inherited();
        plan_text(
            part,
            payload,
            Planned {
                pid: 1,
                tid: 2,
                inherited,
                alone: false,
                memory: &Memory::default(),
            },
        )
        .expect("the plan is possible")
    }

    /// Stops the process, has `look` look at it and lets it go on.
    pub fn stopped<T>(&self, look: impl FnOnce(i32) -> std::io::Result<T>) -> Result<T> {
        let pid = self.pid();
        let kernel = |e| Error::kernel(format!("tracing {pid}"), e);
        ptrace::seize(pid, true).map_err(kernel)?;
        ptrace::interrupt(pid).map_err(kernel)?;
        ptrace::wait(pid).map_err(kernel)?;
        let seen = look(pid);
        ptrace::detach(pid, 0).map_err(kernel)?;
        seen.map_err(kernel)
    }

    /// Waits until /proc/PID/`name` satisfies `wanted`.
    pub fn wait_for(&self, name: &str, wanted: impl Fn(&[u8]) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !wanted(&self.proc(name).expect("it lives")) {
            assert!(
                Instant::now() < deadline,
                "{name} does not become what it should"
            );
            std::thread::yield_now();
        }
    }
}

fn plan_text(
    part: &'static dyn ErasedPart,
    payload: Option<&[u8]>,
    who: Planned<'_>,
) -> Result<String> {
    let mut plan = ThreadPlan::default();
    let state = payload.map(|payload| part.decode(who.tid, payload));
    part.plan(state.transpose()?.as_deref(), who, &mut plan)?;
    let mut text = String::new();
    for phase in PHASES {
        let script = plan.take(phase);
        if !script.steps.is_empty() {
            text.push_str(&format!("[{phase:?}]\n"));
            let script = script.to_string();
            script.lines().for_each(|line| wrap(line, &mut text));
        }
    }
    for write in plan.outside {
        text.push_str(&format!("{} > {}\n", write.text, write.file));
    }
    Ok(text)
}

/// Adds a line, in pieces of less than 88 columns.
fn wrap(line: &str, text: &mut String) {
    let mut column = 0;
    for word in line.split_inclusive(' ') {
        if column > 0 && column + word.trim_end().len() >= 88 {
            text.truncate(text.trim_end().len());
            text.push_str("\n    ");
            column = 4;
        }
        text.push_str(word);
        column += word.len();
    }
    text.push('\n');
}

impl Facts for Stage {
    fn allow(&self) -> &Allow {
        &self.allow
    }

    fn process(&self) -> &Process {
        &self.process
    }

    fn tid(&self) -> i32 {
        self.puppet.pid()
    }

    fn proc(&self, name: &str) -> Result<Rc<[u8]>> {
        let path = format!("/proc/{}/{name}", self.pid());
        let text = std::fs::read(&path).map_err(|e| Error::kernel(path, e))?;
        Ok(text.into())
    }

    fn pending(&self, shared: bool) -> Result<Vec<[u8; 128]>> {
        self.stopped(|pid| ptrace::peek_siginfo(pid, shared))
    }

    fn rseq(&self) -> Result<RseqArea> {
        self.stopped(ptrace::rseq)
    }

    fn registers(&self) -> Registers {
        self.stopped(ptrace::registers).expect("it is stopped")
    }

    fn breakpoints(&self) -> Result<u64> {
        self.stopped(ptrace::breakpoints)
    }

    fn filters(&self, _tid: i32) -> Result<Vec<ptrace::Filter>> {
        self.stopped(ptrace::filters)
    }
}
