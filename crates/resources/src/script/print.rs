//! Scripts as text: a line a step, as strace would print the call.

use std::fmt::{self, Write as _};

use abi::Kind;
use syscalls::Sysno;

use super::calls::{CALLS, CALLS_32, COUNT_OF_ONE, Field, Form};
use super::names::{self, Names};
use super::{Arg, DataAt, PoolId, Script, Step, Width, WordId};

/// What a restore calls the things that scripts know by number.
#[derive(Clone, Copy, Debug, Default)]
pub struct Legend<'a> {
    /// What is behind each pool descriptor: a path, a kind.
    pub pool: &'a [String],
    /// The names of the first shared words.
    pub words: &'a [&'a str],
}

/// A step as text, by [`Script::line`]: arguments by name, and what pointers point at.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    step: &'a Step,
    data: &'a [u8],
    fixes: &'a [(DataAt, Arg, Width)],
    legend: Legend<'a>,
}

/// The most entries of a list, and bytes of a string, that are printed.
const LIST_MAX: u64 = 4;
const TEXT_MAX: usize = 128;

impl Script {
    /// The step with this index as text, without the names of a restore.
    #[must_use]
    pub fn line(&self, index: usize) -> Line<'_> {
        Line::new(&self.steps[index], self, Legend::default())
    }

    /// All steps as text.
    pub fn lines<'a>(&'a self, legend: Legend<'a>) -> impl Iterator<Item = Line<'a>> {
        let line = move |step| Line::new(step, self, legend);
        self.steps.iter().map(line)
    }
}

impl fmt::Display for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = self.lines(Legend::default());
        lines.try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// Without the script, so that what pointers lead to is not shown.
impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = Line {
            step: self,
            data: &[],
            fixes: &[],
            legend: Legend::default(),
        };
        line.fmt(f)
    }
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.step;
        if step.kind == Kind::Await {
            let word = self.reference(step.args[0]);
            write!(f, "await({word} >= {})", plain(step.args[1]))?;
        } else {
            let args = self.arguments().join(", ");
            let compat = if step.kind == Kind::Compat {
                "32-bit "
            } else {
                ""
            };
            write!(f, "{compat}{}({args})", step.call.name())?;
        }
        match step.kind {
            Kind::Spawn => write!(f, " -> {}", self.reference(step.extra))?,
            Kind::Expect => write!(f, " = {}", self.result())?,
            Kind::Try => f.write_str(" = ?")?,
            Kind::Call | Kind::Compat | Kind::Await | Kind::End => {}
        }
        if !step.note.is_empty() {
            write!(f, "  # {}", step.note)?;
        }
        Ok(())
    }
}

impl<'a> Line<'a> {
    fn new(step: &'a Step, script: &'a Script, legend: Legend<'a>) -> Self {
        Self {
            step,
            data: &script.data,
            fixes: &script.fixes,
            legend,
        }
    }

    /// The arguments that the call has, and further ones that are not 0.
    fn arguments(&self) -> Vec<String> {
        let args = &self.step.args;
        let mut texts = Vec::with_capacity(6);
        let mut forms = self.forms().iter();
        for arg in args {
            match forms.next() {
                None => texts.push(plain(*arg)),
                Some(Form::Verb(meanings)) => {
                    let same = |number| *arg == Arg::Value(number);
                    let meaning = meanings.iter().find(|meaning| same(meaning.number));
                    texts.push(meaning.map_or_else(|| plain(*arg), |it| it.name.to_owned()));
                    forms = meaning.map_or(&[][..], |meaning| meaning.rest).iter();
                }
                Some(form) => texts.push(self.argument(form, *arg)),
            }
        }
        let used = args.iter().rposition(|arg| *arg != Arg::Value(0));
        texts.truncate(used.map_or(0, |last| last + 1).max(self.arity()));
        texts
    }

    /// What the call's arguments are, as far as that is known.
    fn forms(&self) -> &'static [Form] {
        let call = self.step.call;
        let known = match self.step.kind {
            Kind::Compat => CALLS_32.iter().find(|known| known.0 == call).map(|it| it.2),
            _ => CALLS.iter().find(|known| known.0 == call).map(|it| it.1),
        };
        known.unwrap_or_default()
    }

    /// How many arguments the call has, as far as that is known.
    fn arity(&self) -> usize {
        let forms = self.forms();
        let mut count = forms.len();
        for (form, arg) in forms.iter().zip(self.step.args) {
            if let (Form::Verb(meanings), Arg::Value(number)) = (form, arg) {
                let meaning = meanings.iter().find(|meaning| meaning.number == number);
                count += meaning.map_or(0, |meaning| meaning.rest.len());
            }
        }
        count
    }

    fn argument(&self, form: &Form, arg: Arg) -> String {
        match arg {
            Arg::Value(value) => number(form, value),
            Arg::Data(at) => self.pointed_at(form, at),
            other => self.reference(other),
        }
    }

    /// What is known of an argument when its form is not.
    fn reference(&self, arg: Arg) -> String {
        match arg {
            Arg::Pool(PoolId(id)) => match self.legend.pool.get(id as usize) {
                Some(name) => format!("pool[{id}]<{name}>"),
                None => plain(arg),
            },
            Arg::Word(WordId(id)) => match self.legend.words.get(id as usize) {
                Some(name) => format!("&{name}"),
                None => plain(arg),
            },
            other => plain(other),
        }
    }

    fn pointed_at(&self, form: &Form, at: DataAt) -> String {
        let data = self.data.get(at.0 as usize..).unwrap_or_default();
        match form {
            _ if data.is_empty() => plain(Arg::Data(at)),
            Form::Text => text(data),
            Form::Signals => signals(word(data, 0, 8)),
            Form::Bits(bytes) => bits(data, self.count(*bytes)),
            Form::Struct(fields) => match fields {
                [only] => format!("[{}]", self.field(at, only)),
                fields => self.structure(at, fields),
            },
            Form::List(count, form, bytes) => self.list(at, self.count(*count), (form, *bytes)),
            _ => plain(Arg::Data(at)),
        }
    }

    /// The value of the argument with this index, which counts something.
    fn count(&self, index: usize) -> u64 {
        match self.step.args.get(index) {
            Some(Arg::Value(count)) => *count,
            _ if index == COUNT_OF_ONE => 1,
            _ => 0,
        }
    }

    fn list(&self, at: DataAt, count: u64, (form, bytes): (&Form, usize)) -> String {
        let bytes = u32::try_from(bytes).expect("structures are small");
        let mut entries = (0..count.min(LIST_MAX)).map(|index| {
            let index = u32::try_from(index).expect("few are printed");
            let at = DataAt(at.0.saturating_add(bytes * index));
            match form {
                Form::Struct([only]) => self.field(at, only),
                form => self.pointed_at(form, at),
            }
        });
        let more = if count > LIST_MAX { ", ..." } else { "" };
        let all = entries.by_ref().collect::<Vec<_>>().join(", ");
        format!("[{all}{more}]")
    }

    fn structure(&self, at: DataAt, fields: &[Field]) -> String {
        let fields = fields
            .iter()
            .map(|field| format!("{}={}", field.name, self.field(at, field)));
        format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
    }

    fn field(&self, at: DataAt, field: &Field) -> String {
        let place = at.0 as usize + field.offset_bytes;
        let fixed = self.fixes.iter().find(|(at, _, width)| {
            let bytes = if *width == Width::Four { 4 } else { 8 };
            at.0 as usize == place && bytes == field.bytes
        });
        if let Some((_, arg, _)) = fixed {
            return self.argument(&field.form, *arg);
        }
        let value = word(self.data, place, field.bytes);
        if matches!(field.form, Form::Signals) {
            return signals(value);
        }
        number(&field.form, value)
    }

    fn result(&self) -> String {
        match (self.step.call, self.step.extra) {
            (Sysno::mmap | Sysno::mremap | Sysno::shmat, Arg::Value(value)) => {
                number(&Form::Address, value)
            }
            (_, Arg::Value(value)) => number(&Form::Number, value),
            (_, other) => self.reference(other),
        }
    }
}

/// `bytes` bytes at `at` as a number; 0 where there are none.
fn word(data: &[u8], at: usize, bytes: usize) -> u64 {
    let mut word = [0; 8];
    if let Some(found) = data.get(at..at + bytes) {
        word[..bytes].copy_from_slice(found);
    }
    u64::from_le_bytes(word)
}

/// An argument that nothing is known of.
pub(super) fn plain(arg: Arg) -> String {
    match arg {
        Arg::Value(value) if value.cast_signed() < 0 => value.cast_signed().to_string(),
        Arg::Value(value) if value < 4096 => value.to_string(),
        Arg::Value(value) => format!("{value:#x}"),
        Arg::Data(at) => format!("&data[{}]", at.0),
        Arg::Pool(id) => format!("pool[{}]", id.0),
        Arg::Word(id) => format!("&word[{}]", id.0),
        Arg::Script(id) => format!("script[{}]", id.0),
        Arg::AreaStart => "AREA".to_owned(),
        Arg::AreaEnd => "AREA_END".to_owned(),
        Arg::AboveArea => "ABOVE_AREA".to_owned(),
    }
}

fn number(form: &Form, value: u64) -> String {
    match form {
        Form::Int => (value as i32).to_string(),
        Form::Short => (value as i16).to_string(),
        Form::Octal if value > 0 => format!("0{value:o}"),
        Form::Hex if value > 0 => format!("{value:#x}"),
        Form::Or(names, _) if names.iter().any(|name| name.0 == value) => flags(names, value),
        Form::Or(_, other) => number(other, value),
        Form::Number | Form::Octal | Form::Hex => value.cast_signed().to_string(),
        Form::Fd => one(names::AT, (value as i32).into()),
        Form::Signal => signal(value),
        Form::Flags(names) => flags(names, value),
        Form::One(names) => one(names, value.cast_signed()),
        // Pointers that lead to nothing of the script's.
        _ if value == 0 => "NULL".to_owned(),
        _ => format!("{value:#x}"),
    }
}

/// Bits by name; what has none as a number.
fn flags(names: Names, value: u64) -> String {
    if let Some((_, name)) = names.iter().find(|(bits, _)| *bits == value) {
        return (*name).to_owned();
    }
    let mut rest = value;
    let mut text = String::new();
    for (bits, name) in names {
        if *bits != 0 && rest & bits == *bits {
            rest &= !bits;
            let _ = write!(text, "|{name}");
        }
    }
    match rest {
        0 if text.is_empty() => return "0".to_owned(),
        0 => {}
        rest => {
            let _ = write!(text, "|{rest:#x}");
        }
    }
    text.split_off(1)
}

fn one(names: Names, value: i64) -> String {
    // A field of 32 bits is read without its sign.
    let narrow = i64::from(value as i32);
    let named = |value: i64| names.iter().find(|name| name.0 == value.cast_unsigned());
    match named(value).or_else(|| named(narrow)) {
        Some((_, name)) => (*name).to_owned(),
        None => value.to_string(),
    }
}

fn signal(value: u64) -> String {
    const FIRST_REALTIME: u64 = 32;
    match value {
        33..=64 => format!("SIGRT_{}", value - FIRST_REALTIME),
        value => one(names::SIGNALS, value.cast_signed()),
    }
}

/// A set of signals; one with most of them by those that it has not.
fn signals(set: u64) -> String {
    let mostly = set.count_ones() > 32;
    let listed = if mostly { !set } else { set };
    let numbers = (0..64).filter(|bit| listed & 1 << bit != 0);
    let names = numbers.map(|bit| {
        let name = signal(bit + 1);
        name.strip_prefix("SIG").map_or(name.clone(), str::to_owned)
    });
    let names = names.collect::<Vec<_>>().join(" ");
    format!("{}[{names}]", if mostly { "~" } else { "" })
}

/// The numbers of the bits that are set.
fn bits(data: &[u8], bytes: u64) -> String {
    let len = usize::try_from(bytes).map_or(0, |bytes| bytes.min(data.len()));
    let set = (0..len * 8).filter(|bit| data[bit / 8] & 1 << (bit % 8) != 0);
    let set = set.map(|bit| bit.to_string()).collect::<Vec<_>>();
    format!("[{}]", set.join(" "))
}

fn text(data: &[u8]) -> String {
    let end = data.iter().position(|byte| *byte == 0);
    let text = &data[..end.unwrap_or(data.len())];
    let more = if text.len() > TEXT_MAX { "..." } else { "" };
    let shown = &text[..text.len().min(TEXT_MAX)];
    format!("\"{}\"{more}", shown.escape_ascii())
}

#[cfg(test)]
mod tests {

    use super::super::{PoolId, ScriptId, Width, WordId};
    use super::*;

    #[track_caller]
    fn prints(script: &Script, want: &str) {
        assert_eq!(script.to_string(), format!("{want}\n"));
    }

    fn call(call: Sysno, args: impl AsRef<[Arg]>) -> Script {
        let mut script = Script::default();
        script.call(call, args);
        script
    }

    #[test]
    fn flags_and_choices_have_names() {
        let args: [Arg; 6] = [
            0x7000_0000u64.into(),
            8192u64.into(),
            3u32.into(),
            0x8032u32.into(),
            (-1i32).into(),
            0x2000u32.into(),
        ];
        let map = "MAP_PRIVATE|MAP_FIXED|MAP_ANONYMOUS|MAP_POPULATE";
        let want = format!("mmap(0x70000000, 8192, PROT_READ|PROT_WRITE, {map}, -1, 0x2000)");
        prints(&call(Sysno::mmap, args), &want);
        let args: [Arg; 3] = [0u32.into(), 4096u32.into(), 0u32.into()];
        prints(
            &call(Sysno::mprotect, args),
            "mprotect(NULL, 4096, PROT_NONE)",
        );
        let args: [Arg; 3] = [0x1000u32.into(), 1u32.into(), 99u32.into()];
        prints(&call(Sysno::madvise, args), "madvise(0x1000, 1, 99)");
        let args: [Arg; 2] = [7u32.into(), 34u32.into()];
        prints(&call(Sysno::kill, args), "kill(7, SIGRT_2)");
        prints(
            &call(Sysno::userfaultfd, [(0o2_000_000u32 | 1).into()]),
            "userfaultfd(O_CLOEXEC|0x1)",
        );
        prints(&call(Sysno::umask, [0o22u32.into()]), "umask(022)");
    }

    #[test]
    fn options_say_what_follows() {
        let args: [Arg; 2] = [1u32.into(), 9u32.into()];
        prints(
            &call(Sysno::prctl, args),
            "prctl(PR_SET_PDEATHSIG, SIGKILL)",
        );
        let args: [Arg; 2] = [24u32.into(), 21u32.into()];
        prints(
            &call(Sysno::prctl, args),
            "prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN)",
        );
        let args: [Arg; 3] = [7777u32.into(), 0u32.into(), 5u32.into()];
        prints(&call(Sysno::prctl, args), "prctl(0x1e61, 0, 5)");
        let args: [Arg; 3] = [3u32.into(), 10u32.into(), 29u32.into()];
        prints(&call(Sysno::fcntl, args), "fcntl(3, F_SETSIG, SIGIO)");
    }

    #[test]
    fn unknown_calls_print_as_numbers() {
        let args: [Arg; 3] = [5u32.into(), 0x12345u32.into(), 0u32.into()];
        prints(&call(Sysno::bpf, args), "bpf(5, 0x12345)");
    }

    #[test]
    fn strings_and_structures_are_shown() {
        let mut script = Script::default();
        let name = script.string(b"a \"b\"\n");
        script.call(Sysno::chdir, [name.into()]);
        prints(&script, r#"chdir("a \"b\"\n")"#);

        let mut script = Script::default();
        let mut action = [0; 32];
        action[..8].copy_from_slice(&0x40_1000u64.to_le_bytes());
        action[8..12].copy_from_slice(&0x1400_0004u32.to_le_bytes());
        action[24] = 0b11;
        let action = script.bytes(&action);
        let args = [15u32.into(), action.into(), 0u32.into(), 8u32.into()];
        script.call(Sysno::rt_sigaction, args);
        let flags = "SA_SIGINFO|SA_RESTORER|SA_RESTART";
        prints(
            &script,
            &format!(
                "rt_sigaction(SIGTERM, {{sa_handler=0x401000, sa_mask=[HUP INT], \
                 sa_flags={flags}, sa_restorer=NULL}}, NULL, 8)"
            ),
        );

        let mut script = Script::default();
        let limit = script.bytes(&[100u64.to_le_bytes(), u64::MAX.to_le_bytes()].concat());
        let args = [0u32.into(), 7u32.into(), limit.into()];
        script.call(Sysno::prlimit64, args);
        let limit = "{rlim_cur=100, rlim_max=RLIM64_INFINITY}";
        prints(
            &script,
            &format!("prlimit64(0, RLIMIT_NOFILE, {limit}, NULL)"),
        );
    }

    #[test]
    fn fixed_fields_are_followed() {
        let mut script = Script::default();
        let tid = script.bytes(&123i32.to_le_bytes());
        let mut bytes = [0; 88];
        bytes[..8].copy_from_slice(&0x8000u64.to_le_bytes());
        bytes[32] = 17;
        let args = script.bytes(&bytes);
        script.fix(args, 64, tid, Width::Eight);
        script.spawn([args.into(), 88u32.into()], ScriptId(4));
        let args = "{flags=CLONE_PARENT, exit_signal=SIGCHLD, set_tid=[123]}";
        prints(&script, &format!("clone3({args}, 88) -> script[4]"));
    }

    #[test]
    fn lists_are_cut() {
        let mut script = Script::default();
        let groups = (1..=6u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>();
        let groups = script.bytes(&groups);
        script.call(Sysno::setgroups, [2u32.into(), groups.into()]);
        script.call(Sysno::setgroups, [6u32.into(), groups.into()]);
        prints(
            &script,
            "setgroups(2, [1, 2])\nsetgroups(6, [1, 2, 3, 4, ...])",
        );
        let mut script = Script::default();
        let cpus = script.bytes(&0b1101u64.to_le_bytes());
        let args = [0u32.into(), 8u32.into(), cpus.into()];
        script.call(Sysno::sched_setaffinity, args);
        prints(&script, "sched_setaffinity(0, 8, [0 2 3])");
    }

    #[test]
    fn sets_of_signals_are_short() {
        assert_eq!(signals(0), "[]");
        assert_eq!(signals(1 << 1 | 1 << 33), "[INT RT_2]");
        assert_eq!(signals(!(1 << 8)), "~[KILL]");
    }

    #[test]
    fn a_legend_names_what_has_a_number() {
        let mut script = Script::default();
        script.call(Sysno::fchdir, [PoolId(1).into()]);
        script.wait(WordId(0), 3);
        script.post(WordId(7));
        let pool = ["a".to_owned(), "/srv".to_owned()];
        let legend = Legend {
            pool: &pool,
            words: &["FORKED"],
        };
        let lines = script.lines(legend).map(|line| line.to_string());
        let want = [
            "fchdir(pool[1]</srv>)",
            "await(&FORKED >= 3)",
            "futex(&word[7], FUTEX_WAKE_OP, INT_MAX, 0, &word[7], FUTEX_OP_ADD<<28|1<<12)",
        ];
        assert_eq!(lines.collect::<Vec<_>>(), want);
        assert_eq!(script.line(0).to_string(), "fchdir(pool[1])");
    }

    #[test]
    fn data_outside_of_the_script_is_no_panic() {
        for (name, forms) in CALLS {
            for at in [0, 5, u32::MAX - 200] {
                let args = vec![Arg::Data(DataAt(at)); forms.len().min(6)];
                let mut script = call(*name, args);
                script.bytes(b"1234567");
                assert!(script.to_string().starts_with(name.name()));
            }
        }
    }

    #[test]
    fn a_step_alone_shows_its_numbers() {
        let mut script = Script::default();
        let name = script.string(b"x");
        script.call(Sysno::chdir, [name.into()]);
        assert_eq!(script.steps[0].to_string(), "chdir(&data[0])");
    }
}
