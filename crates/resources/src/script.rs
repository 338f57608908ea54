//! Scripts: lists of system calls that a task makes, built as plain data before anything runs.
//!
//! A [`Script`] knows neither addresses of the restore area nor numbers of descriptors: they stand
//! in it as [`Arg`]s and are filled in by [`Script::compile`]. So planning is pure, and a script
//! can be printed and compared in a test.

mod calls;
mod print;

pub use print::{Legend, Line};

use abi::{Addr, Kind, Op};
use syscalls::Sysno;

/// A descriptor that the restorer holds open and the task inherits: an index into its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolId(pub u32);

/// One 32-bit word of the restore area's data that all tasks of a restore share; it starts at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WordId(pub u32);

/// Another script of the same restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ScriptId(pub u32);

/// A place in a script's data: its offset in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DataAt(pub u32);

/// A step of a script: its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepAt(pub u32);

/// One argument of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arg {
    /// A number, or an address in the task's own memory.
    Value(u64),
    /// The address of bytes of this script's data.
    Data(DataAt),
    /// The number of an inherited descriptor.
    Pool(PoolId),
    /// The address of a shared word.
    Word(WordId),
    /// The address of another script's first op.
    Script(ScriptId),
    /// The first address of the restore area (blob, ops and data).
    AreaStart,
    /// The address after the restore area.
    AreaEnd,
    /// How many bytes lie between the restore area's end and the end of the address space.
    AboveArea,
}

macro_rules! arg_from {
    ($($int:ty => $via:ty),*) => {$(
        impl From<$int> for Arg {
            #[allow(clippy::cast_sign_loss, clippy::cast_lossless, trivial_numeric_casts)]
            fn from(value: $int) -> Self {
                Self::Value(value as $via as u64)
            }
        }
    )*};
}
// Negative numbers are passed sign-extended, as a C caller would.
arg_from!(u64 => u64, u32 => u64, i64 => i64, i32 => i64, usize => u64);

impl From<Addr> for Arg {
    fn from(addr: Addr) -> Self {
        Self::Value(addr.0)
    }
}

impl From<DataAt> for Arg {
    fn from(at: DataAt) -> Self {
        Self::Data(at)
    }
}

impl From<PoolId> for Arg {
    fn from(id: PoolId) -> Self {
        Self::Pool(id)
    }
}

/// One step: a system call or a wait, and how its result is judged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// How the blob treats it.
    pub kind: Kind,
    /// The system call; `futex` for [`Kind::Await`].
    pub call: Sysno,
    /// Its arguments; missing ones are 0.
    pub args: [Arg; 6],
    /// The child's script or the expected result.
    pub extra: Arg,
    /// What the step is for, as printed in plans and failures ("fd 3", "heap"); may be empty.
    pub note: String,
}

impl Step {
    /// The call's number.
    fn number(&self) -> u32 {
        let known = calls::CALLS_32.iter();
        let mut known = known.filter(|known| known.0 == self.call);
        match self.kind {
            Kind::Compat => known.next().expect("one of those that are known").1,
            _ => self.call as u32,
        }
    }
}

/// A list of steps and the bytes that their arguments point at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// The steps in order; the blob's end is added by [`Script::compile`].
    pub steps: Vec<Step>,
    pub(crate) data: Vec<u8>,
    fixes: Vec<(DataAt, Arg, Width)>,
}

/// The width of an [`Arg`] written into a script's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 32 bits: a descriptor in a structure.
    Four,
    /// 64 bits: an address in a structure.
    Eight,
}

/// Where everything that a script refers to is.
#[derive(Clone, Copy, Debug)]
pub struct Layout<'a> {
    /// The address of the compiled script's first op.
    pub ops: Addr,
    /// The address of its data, 64-byte aligned.
    pub data: Addr,
    /// The address of the first shared word.
    pub words: Addr,
    /// The number of each inherited descriptor.
    pub pool: &'a [i32],
    /// The address of each script's first op.
    pub scripts: &'a [Addr],
    /// The whole restore area.
    pub area: abi::Span,
    /// The address after the last one a task may map.
    pub top: Addr,
}

impl Script {
    /// Adds a system call that must succeed.
    pub fn call(&mut self, call: Sysno, args: impl AsRef<[Arg]>) -> StepAt {
        self.step(Kind::Call, call, args.as_ref(), Arg::Value(0))
    }

    /// Adds a system call that may fail.
    pub fn attempt(&mut self, call: Sysno, args: impl AsRef<[Arg]>) -> StepAt {
        self.step(Kind::Try, call, args.as_ref(), Arg::Value(0))
    }

    /// Adds a system call that must return `want`.
    pub fn expect(&mut self, call: Sysno, args: impl AsRef<[Arg]>, want: impl Into<Arg>) -> StepAt {
        self.step(Kind::Expect, call, args.as_ref(), want.into())
    }

    /// Adds a system call that must succeed, made as 32-bit code makes it: one of those whose
    /// numbers are known there, with up to five arguments. What it points at must be below 4 GiB.
    pub fn call_32(&mut self, call: Sysno, args: impl AsRef<[Arg]>) -> StepAt {
        self.step(Kind::Compat, call, args.as_ref(), Arg::Value(0))
    }

    /// Adds a `clone3` whose child goes on with script `child`.
    pub fn spawn(&mut self, args: impl AsRef<[Arg]>, child: ScriptId) -> StepAt {
        self.step(
            Kind::Spawn,
            Sysno::clone3,
            args.as_ref(),
            Arg::Script(child),
        )
    }

    /// Adds a wait until `word` is at least `value`.
    pub fn wait(&mut self, word: WordId, value: u32) -> StepAt {
        self.step(
            Kind::Await,
            Sysno::futex,
            &[Arg::Word(word), value.into()],
            Arg::Value(0),
        )
    }

    /// Adds 1 to `word` and wakes everyone who waits for it.
    pub fn post(&mut self, word: WordId) -> StepAt {
        const FUTEX_WAKE_OP: u32 = linux_raw_sys::general::FUTEX_WAKE_OP;
        const ADD_ONE: u32 = (1 << 28) | (1 << 12); // FUTEX_OP(FUTEX_OP_ADD, 1, FUTEX_OP_CMP_EQ, 0)
        let all = i32::MAX.cast_unsigned();
        self.call(
            Sysno::futex,
            [
                Arg::Word(word),
                FUTEX_WAKE_OP.into(),
                all.into(),
                0u32.into(),
                Arg::Word(word),
                ADD_ONE.into(),
            ],
        )
    }

    fn step(&mut self, kind: Kind, call: Sysno, args: &[Arg], extra: Arg) -> StepAt {
        let mut all = [Arg::Value(0); 6];
        all[..args.len()].copy_from_slice(args);
        self.steps.push(Step {
            kind,
            call,
            args: all,
            extra,
            note: String::new(),
        });
        StepAt(u32::try_from(self.steps.len() - 1).expect("a script has fewer than 2^32 steps"))
    }

    /// Notes what the last step is for.
    pub fn note(&mut self, note: impl Into<String>) {
        if let Some(step) = self.steps.last_mut() {
            step.note = note.into();
        }
    }

    /// Adds bytes, aligned to 16.
    pub fn bytes(&mut self, bytes: &[u8]) -> DataAt {
        let at = self.data.len().next_multiple_of(16);
        self.data.resize(at, 0);
        self.data.extend_from_slice(bytes);
        DataAt(u32::try_from(at).expect("a script's data stays below 4 GiB"))
    }

    /// Adds a string and its terminating NUL.
    pub fn string(&mut self, text: &[u8]) -> DataAt {
        let at = self.bytes(text);
        self.data.push(0);
        at
    }

    /// Adds `len` zero bytes for a call to write into.
    pub fn buffer(&mut self, len: usize) -> DataAt {
        self.bytes(&vec![0; len])
    }

    /// Has `arg` written at `offset` bytes after `at` when the script is compiled.
    pub fn fix(&mut self, at: DataAt, offset: u32, arg: impl Into<Arg>, width: Width) {
        self.fixes.push((DataAt(at.0 + offset), arg.into(), width));
    }

    /// Moves all steps of `other` behind those of this script.
    pub fn append(&mut self, other: Self) {
        let base = self.bytes(&other.data).0;
        let moved = |arg: Arg| match arg {
            Arg::Data(at) => Arg::Data(DataAt(at.0 + base)),
            same => same,
        };
        self.steps.extend(other.steps.into_iter().map(|mut step| {
            step.args = step.args.map(moved);
            step.extra = moved(step.extra);
            step
        }));
        let fixes = other.fixes.into_iter();
        self.fixes
            .extend(fixes.map(|(at, arg, width)| (DataAt(at.0 + base), moved(arg), width)));
    }

    /// The pool descriptors whose numbers the script uses in its own table: all but those that it
    /// fetches from the table of another process (pidfd_getfd(2)).
    pub fn inherited(&self) -> impl Iterator<Item = PoolId> {
        let of_steps = self.steps.iter().flat_map(|step| {
            let fetches = step.call == Sysno::pidfd_getfd;
            let args = step.args.iter().enumerate();
            let args = args.filter(move |(at, _)| !fetches || *at != 1);
            args.map(|(_, arg)| *arg).chain([step.extra])
        });
        let args = of_steps.chain(self.fixes.iter().map(|(_, arg, _)| *arg));
        args.filter_map(|arg| match arg {
            Arg::Pool(id) => Some(id),
            _ => None,
        })
    }

    /// The size of the compiled ops in bytes, with the end.
    #[must_use]
    pub fn ops_bytes(&self) -> usize {
        (self.steps.len() + 1) * Op::BYTES
    }

    /// The size of the data in bytes.
    #[must_use]
    pub fn data_bytes(&self) -> usize {
        self.data.len()
    }

    /// The ops and the data as they must stand at the addresses of `layout`.
    #[must_use]
    pub fn compile(&self, layout: &Layout<'_>) -> (Vec<u8>, Vec<u8>) {
        let mut ops = Vec::with_capacity(self.ops_bytes());
        for step in &self.steps {
            let args = step.args.map(|arg| layout.resolve(arg));
            let op = Op::call(u64::from(step.number()), args);
            ops.extend(op.with(step.kind, layout.resolve(step.extra)).to_bytes());
        }
        ops.extend(Op::end().to_bytes());
        let mut data = self.data.clone();
        for (at, arg, width) in &self.fixes {
            let value = layout.resolve(*arg).to_le_bytes();
            let len = if *width == Width::Four { 4 } else { 8 };
            data[at.0 as usize..at.0 as usize + len].copy_from_slice(&value[..len]);
        }
        (ops, data)
    }
}

impl Layout<'_> {
    fn resolve(&self, arg: Arg) -> u64 {
        match arg {
            Arg::Value(value) => value,
            Arg::Data(at) => self.data.0 + u64::from(at.0),
            Arg::Pool(id) => i64::from(self.pool[id.0 as usize]).cast_unsigned(),
            Arg::Word(id) => self.words.0 + 4 * u64::from(id.0),
            Arg::Script(id) => self.scripts[id.0 as usize].0,
            Arg::AreaStart => self.area.start.0,
            Arg::AreaEnd => self.area.end.0,
            Arg::AboveArea => self.top.0 - self.area.end.0,
        }
    }
}

/// What a script's calls returned and wrote, read back after it ran.
#[derive(Clone, Debug)]
pub struct Answers {
    /// The result of each step (negative errno on failure).
    pub results: Vec<i64>,
    /// The script's data after the run.
    pub data: Vec<u8>,
}

impl Answers {
    /// The result of a step.
    #[must_use]
    pub fn result(&self, at: StepAt) -> i64 {
        self.results[at.0 as usize]
    }

    /// `len` bytes of the data.
    #[must_use]
    pub fn bytes(&self, at: DataAt, len: usize) -> &[u8] {
        &self.data[at.0 as usize..at.0 as usize + len]
    }

    /// The 64-bit word at `offset` bytes after `at`.
    #[must_use]
    pub fn word(&self, at: DataAt, offset: usize) -> u64 {
        let at = at.0 as usize + offset;
        u64::from_le_bytes(self.data[at..at + 8].try_into().expect("eight bytes"))
    }

    /// The 32-bit word at `offset` bytes after `at`.
    #[must_use]
    pub fn half(&self, at: DataAt, offset: usize) -> u32 {
        let at = at.0 as usize + offset;
        u32::from_le_bytes(self.data[at..at + 4].try_into().expect("four bytes"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout<'a>(pool: &'a [i32], scripts: &'a [Addr]) -> Layout<'a> {
        Layout {
            ops: Addr(0x1000),
            data: Addr(0x2000),
            words: Addr(0x3000),
            pool,
            scripts,
            area: abi::Span::new(Addr(0), 0x4000),
            top: Addr(0x10_0000),
        }
    }

    #[test]
    fn calls_of_32_bits_have_their_own_numbers() {
        let mut script = Script::default();
        script.call_32(Sysno::set_robust_list, [0x1000u32.into(), 12u32.into()]);
        let (ops, _) = script.compile(&layout(&[], &[]));
        assert_eq!(
            (ops[0], ops[8..10].to_vec()),
            (Kind::Compat as u8, vec![0x37, 1])
        );
        assert_eq!(
            script.to_string(),
            "32-bit set_robust_list(head=0x1000, len=12)\n"
        );
    }

    #[test]
    fn appended_scripts_keep_their_data() {
        let mut first = Script::default();
        first.string(b"one");
        let mut second = Script::default();
        let name = second.string(b"two");
        second.fix(name, 8, PoolId(0), Width::Four);
        second.buffer(8);
        second.call(Sysno::chdir, [name.into()]);
        first.append(second);
        let (ops, data) = first.compile(&layout(&[77], &[]));
        let path = u64::from_le_bytes(ops[16..24].try_into().expect("eight bytes")) - 0x2000;
        let path = usize::try_from(path).expect("small");
        assert_eq!(&data[path..path + 4], b"two\0");
        assert_eq!(data[path + 8], 77);
    }
}
