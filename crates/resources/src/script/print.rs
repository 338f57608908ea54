//! Scripts as text: a line a step, the call with its arguments by name.

use std::fmt;

use abi::Kind;
use rustix::fs::OFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::Signal;
use syscalls::Sysno;

use super::calls::{CALLS, CALLS_32, STRUCTURES, VERBS, Verb};
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
const LIST_MAX: u32 = 4;
const TEXT_MAX: usize = 128;
/// The form of an argument that says what follows.
const VERB: &str = "verb";

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

    /// The arguments that the call has by name, and further ones that are not 0.
    fn arguments(&self) -> Vec<String> {
        let args = &self.step.args;
        let named = self.named();
        let used = args.iter().rposition(|arg| *arg != Arg::Value(0));
        let count = used.map_or(0, |last| last + 1).max(named.len());
        let text = |(index, arg): (usize, &Arg)| match named.get(index) {
            None => plain(*arg),
            Some((_, VERB)) => {
                let verb = self.verb(*arg);
                verb.map_or_else(|| plain(*arg), |verb| verb.name.to_owned())
            }
            Some((name, form)) => format!("{name}={}", self.argument(form, *arg)),
        };
        args.iter().enumerate().take(count).map(text).collect()
    }

    /// The names and forms of the call's arguments, as far as they are known.
    fn named(&self) -> Vec<(&'static str, &'static str)> {
        let call = self.step.call;
        let known = match self.step.kind {
            Kind::Compat => CALLS_32.iter().find(|known| known.0 == call).map(|it| it.2),
            _ => CALLS.iter().find(|known| known.0 == call).map(|it| it.1),
        };
        let mut named = words(known.unwrap_or_default()).collect::<Vec<_>>();
        let place = named.iter().position(|(_, form)| *form == VERB);
        if let Some(verb) = place.and_then(|place| self.verb(self.step.args[place])) {
            named.extend(words(verb.rest));
        }
        named
    }

    /// The part of the call that an argument asks for.
    fn verb(&self, arg: Arg) -> Option<&'static Verb> {
        let (_, verbs) = VERBS.iter().find(|verbs| verbs.0 == self.step.call)?;
        verbs.iter().find(|verb| arg == Arg::Value(verb.number))
    }

    fn argument(&self, form: &str, arg: Arg) -> String {
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

    fn pointed_at(&self, form: &str, at: DataAt) -> String {
        let data = self.data.get(at.0 as usize..).unwrap_or_default();
        let (name, count) = match form.strip_suffix(']').and_then(|form| form.split_once('[')) {
            Some((name, index)) => (name, index.parse().ok().map(|index| self.count(index))),
            None => (form, None),
        };
        match (name, count) {
            _ if data.is_empty() => plain(Arg::Data(at)),
            ("text", _) => text(data),
            ("set", _) => signals(word(data, 0, 8)),
            ("bits", Some(bytes)) => bits(data, bytes),
            _ => match (structure(name), count) {
                (None, _) => plain(Arg::Data(at)),
                (Some(fields), None) => self.structure(at, fields),
                (Some(fields), Some(count)) => self.list(at, fields, count),
            },
        }
    }

    /// The value of the argument with this index, which counts something.
    fn count(&self, index: usize) -> u64 {
        match self.step.args.get(index) {
            Some(Arg::Value(count)) => *count,
            _ => 0,
        }
    }

    fn list(&self, at: DataAt, fields: &str, count: u64) -> String {
        let bytes = Field::all(fields).map(|field| field.bytes).sum::<usize>();
        let bytes = u32::try_from(bytes).expect("structures are small");
        let entries = (0..bytes.saturating_mul(LIST_MAX)).step_by(bytes as usize);
        let entries = entries.zip(0..count);
        let entry = |(offset, _)| self.structure(DataAt(at.0.saturating_add(offset)), fields);
        let all = entries.map(entry).collect::<Vec<_>>().join(", ");
        let more = if count > LIST_MAX.into() { ", ..." } else { "" };
        format!("[{all}{more}]")
    }

    /// The fields of a structure by name; without it if there is only one.
    fn structure(&self, at: DataAt, fields: &str) -> String {
        let mut place = at.0 as usize;
        let mut texts = Vec::new();
        for field in Field::all(fields) {
            if !field.name.is_empty() {
                texts.push((field.name, self.field(place, &field)));
            }
            place = place.saturating_add(field.bytes);
        }
        if let [(_, only)] = &texts[..] {
            return only.clone();
        }
        let texts = texts.iter().map(|(name, text)| format!("{name}={text}"));
        format!("{{{}}}", texts.collect::<Vec<_>>().join(", "))
    }

    fn field(&self, place: usize, field: &Field<'_>) -> String {
        let fixed = self.fixes.iter().find(|(at, _, width)| {
            let bytes = if *width == Width::Four { 4 } else { 8 };
            at.0 as usize == place && bytes == field.bytes
        });
        if let Some((_, arg, _)) = fixed {
            return self.argument(field.form, *arg);
        }
        let value = word(self.data, place, field.bytes);
        match field.form {
            "set" => signals(value),
            "" if field.bytes < 8 => {
                let unused = 64 - 8 * field.bytes;
                ((value << unused).cast_signed() >> unused).to_string()
            }
            form => number(form, value),
        }
    }

    fn result(&self) -> String {
        match (self.step.call, self.step.extra) {
            (Sysno::mmap | Sysno::mremap | Sysno::shmat, Arg::Value(value)) => number("hex", value),
            (_, Arg::Value(value)) => number("", value),
            (_, other) => self.reference(other),
        }
    }
}

/// A field of a structure.
struct Field<'a> {
    name: &'a str,
    bytes: usize,
    form: &'a str,
}

impl<'a> Field<'a> {
    /// The fields that a line of [`STRUCTURES`] tells.
    fn all(fields: &'a str) -> impl Iterator<Item = Self> {
        words(fields).filter_map(|(field, form)| {
            let (name, bytes) = field.split_once('/')?;
            let bytes = bytes.parse().ok()?;
            Some(Self { name, bytes, form })
        })
    }
}

/// The words of a line of a table: names and forms.
fn words(line: &str) -> impl Iterator<Item = (&str, &str)> {
    let words = line.split_ascii_whitespace();
    words.map(|word| word.split_once(':').unwrap_or((word, "")))
}

/// The fields of a structure.
fn structure(name: &str) -> Option<&'static str> {
    let known = STRUCTURES.iter().find(|known| known.0 == name);
    known.map(|known| known.1)
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

fn number(form: &str, value: u64) -> String {
    let bits = value as u32;
    match form {
        "" => value.cast_signed().to_string(),
        "octal" if value > 0 => format!("0{value:o}"),
        "prot" => shown(&ProtFlags::from_bits_retain(bits)),
        "map" => shown(&MapFlags::from_bits_retain(bits)),
        "open" => shown(&OFlags::from_bits_retain(bits)),
        "signal" => signal(value),
        _ if value == 0 => "0".to_owned(),
        // Also pointers that lead to nothing of the script's.
        _ => format!("{value:#x}"),
    }
}

/// The names of flags, as their type's `Debug` has them, and those without a name as a number.
fn shown(flags: &impl fmt::Debug) -> String {
    let text = format!("{flags:?}");
    let names = text
        .split_once('(')
        .and_then(|(_, names)| names.strip_suffix(')'));
    match names.unwrap_or(&text) {
        "0x0" => "0".to_owned(),
        names => names.replace(" | ", "|"),
    }
}

/// The name of a signal without its prefix; the number of a real-time signal.
fn signal(number: u64) -> String {
    let named = i32::try_from(number).ok().and_then(Signal::from_named_raw);
    let Some(named) = named else {
        return number.to_string();
    };
    let text = format!("{named:?}");
    text.trim_matches('"').replace("Signal::", "")
}

/// A set of signals; one with most of them by those that it has not.
fn signals(set: u64) -> String {
    let mostly = set.count_ones() > 32;
    let listed = if mostly { !set } else { set };
    let numbers = (0..64).filter(|bit| listed & 1 << bit != 0);
    let names = numbers.map(|bit| signal(bit + 1)).collect::<Vec<_>>();
    format!("{}[{}]", if mostly { "~" } else { "" }, names.join(" "))
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
    fn arguments_have_names() {
        let args: [Arg; 6] = [
            0x7000_0000u64.into(),
            8192u64.into(),
            3u32.into(),
            0x8032u32.into(),
            (-1i32).into(),
            0x2000u32.into(),
        ];
        let flags = "PRIVATE|FIXED|POPULATE|0x20";
        let want = format!(
            "mmap(addr=0x70000000, len=8192, prot=READ|WRITE, flags={flags}, fd=-1, \
             offset=0x2000)"
        );
        prints(&call(Sysno::mmap, args), &want);
        let args: [Arg; 3] = [0u32.into(), 4096u32.into(), 0u32.into()];
        prints(
            &call(Sysno::mprotect, args),
            "mprotect(addr=0, len=4096, prot=0)",
        );
        let args: [Arg; 2] = [7u32.into(), 34u32.into()];
        prints(&call(Sysno::kill, args), "kill(pid=7, signal=34)");
        prints(&call(Sysno::umask, [0o22u32.into()]), "umask(mask=022)");
    }

    #[test]
    fn verbs_say_what_follows() {
        let args: [Arg; 2] = [1u32.into(), 9u32.into()];
        prints(
            &call(Sysno::prctl, args),
            "prctl(PR_SET_PDEATHSIG, signal=KILL)",
        );
        let args: [Arg; 3] = [7777u32.into(), 0u32.into(), 5u32.into()];
        prints(&call(Sysno::prctl, args), "prctl(0x1e61, 0, 5)");
        let args: [Arg; 3] = [3u32.into(), 10u32.into(), 29u32.into()];
        prints(
            &call(Sysno::fcntl, args),
            "fcntl(fd=3, F_SETSIG, signal=IO)",
        );
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
        prints(&script, r#"chdir(path="a \"b\"\n")"#);

        let mut script = Script::default();
        let mut action = [0; 32];
        action[..8].copy_from_slice(&0x40_1000u64.to_le_bytes());
        action[8..12].copy_from_slice(&0x1400_0004u32.to_le_bytes());
        action[24] = 0b11;
        let action = script.bytes(&action);
        let args = [15u32.into(), action.into(), 0u32.into(), 8u32.into()];
        script.call(Sysno::rt_sigaction, args);
        prints(
            &script,
            "rt_sigaction(signal=TERM, new={handler=0x401000, flags=0x14000004, restorer=0, \
             mask=[HUP INT]}, old=0, set_size=8)",
        );

        let mut script = Script::default();
        let limit = script.bytes(&[100u64.to_le_bytes(), u64::MAX.to_le_bytes()].concat());
        let args = [0u32.into(), 7u32.into(), limit.into()];
        script.call(Sysno::prlimit64, args);
        prints(
            &script,
            "prlimit64(pid=0, resource=7, new={cur=100, max=-1}, old=0)",
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
        let args = "{flags=0x8000, exit_signal=CHILD, set_tid=123}";
        prints(
            &script,
            &format!("clone3(args={args}, size=88) -> script[4]"),
        );
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
            "setgroups(count=2, groups=[1, 2])\nsetgroups(count=6, groups=[1, 2, 3, 4, ...])",
        );
        let mut script = Script::default();
        let cpus = script.bytes(&0b1101u64.to_le_bytes());
        let args = [0u32.into(), 8u32.into(), cpus.into()];
        script.call(Sysno::sched_setaffinity, args);
        prints(&script, "sched_setaffinity(tid=0, len=8, cpus=[0 2 3])");
    }

    #[test]
    fn sets_of_signals_are_short() {
        assert_eq!(signals(0), "[]");
        assert_eq!(signals(1 << 1 | 1 << 33), "[INT 34]");
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
            "fchdir(fd=pool[1]</srv>)",
            "await(&FORKED >= 3)",
            "futex(addr=&word[7], FUTEX_WAKE_OP, count=2147483647, count2=0, addr2=&word[7], \
             op=0x10001000)",
        ];
        assert_eq!(lines.collect::<Vec<_>>(), want);
        assert_eq!(script.line(0).to_string(), "fchdir(fd=pool[1])");
    }

    #[test]
    fn data_outside_of_the_script_is_no_panic() {
        for (name, _) in CALLS {
            for at in [0, 5, u32::MAX - 200] {
                let args = [Arg::Data(DataAt(at)); 6];
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
        assert_eq!(script.steps[0].to_string(), "chdir(path=&data[0])");
    }

    #[test]
    fn every_form_is_known() {
        const FORMS: [&str; 11] = [
            "", "hex", "octal", "prot", "map", "open", "signal", "text", "set", "bits[1]", VERB,
        ];
        let calls = CALLS.iter().map(|call| call.1);
        let calls = calls.chain(CALLS_32.iter().map(|call| call.2));
        let verbs = VERBS.iter().flat_map(|(_, verbs)| verbs.iter());
        let fields = STRUCTURES.iter().map(|structure| structure.1);
        let lines = calls
            .chain(verbs.map(|verb| verb.rest))
            .chain(fields.clone());
        for (name, form) in lines.flat_map(words) {
            let known = form.split('[').next().and_then(structure);
            assert!(known.is_some() || FORMS.contains(&form), "{name}:{form}");
        }
        for line in fields {
            assert_eq!(words(line).count(), Field::all(line).count(), "{line}");
        }
    }
}
