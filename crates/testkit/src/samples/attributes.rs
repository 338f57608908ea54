//! Attributes that prctl(2) and files in /proc set.

use std::fs;
use std::io;

use crate::calls::attributes::{
    MARKS, allow_cpuid, another_robust_list, clear_another_word, dispatch_calls, may_use_cpuid,
    membarrier, robust_list, set_auxiliary_vector, set_mark, set_number, set_personality, written,
};
use sys::own::personality;

use super::sample::{Sample, Values};

/// The attributes.
#[rustfmt::skip]
pub(super) const ATTRIBUTES: &[Sample] = &[
    Sample::new("name", Values::These(&[0, 1, 2, 3, 4]), set_name, name)
        .about(&["PR_SET_NAME", "PR_GET_NAME", "comm", "Name"]),
    Sample::new("parent-death", Values::These(&[10, 12, 40, 0]), pdeath, read_pdeath)
        .about(&["PR_SET_PDEATHSIG", "PR_GET_PDEATHSIG"])
        .in_children(),
    Sample::new("dumpable", Values::These(&[0, 1]), |on| call(4, on), || get(3))
        .about(&["PR_SET_DUMPABLE", "PR_GET_DUMPABLE"])
        .of_process(),
    Sample::new("no-new-privileges", Values::These(&[1]), |on| call(38, on), || get(39))
        .about(&["PR_SET_NO_NEW_PRIVS", "PR_GET_NO_NEW_PRIVS", "NoNewPrivs"]),
    Sample::new("timer-slack", Values::These(&[1, 777, 50_000_000]), |ns| call(29, ns), slack)
        .about(&["PR_SET_TIMERSLACK", "PR_GET_TIMERSLACK", "timerslack_ns"]),
    Sample::new("machine-check", Values::These(&[0, 1, 2]), machine_check, || get(34))
        .about(&["PR_MCE_KILL", "PR_MCE_KILL_GET"]),
    Sample::new("huge-pages", Values::These(&[1, 0, ADVISED]), huge_pages, || get(42))
        .about(&["PR_SET_THP_DISABLE", "PR_GET_THP_DISABLE", "THP_enabled"])
        .of_process(),
    Sample::new("speculation", Values::Made(speculations), speculation, read_speculation)
        .about(&[
            "PR_GET_SPECULATION_CTRL",
            "PR_SET_SPECULATION_CTRL",
            "Speculation_Store_Bypass",
            "SpeculationIndirectBranch",
        ]),
    Sample::new("io-flusher", Values::These(&[1, 0]), |on| call(57, on), || get(58))
        .about(&["PR_SET_IO_FLUSHER", "PR_GET_IO_FLUSHER"]),
    Sample::new("deny-write-exec", Values::These(&[1, 3]), |bits| call(65, bits), || get(66))
        .about(&["PR_SET_MDWE", "PR_GET_MDWE"])
        .of_process(),
    Sample::new("memory-merge", Values::These(&[1, 0]), |on| call(67, on), || get(68))
        .about(&["PR_SET_MEMORY_MERGE", "PR_GET_MEMORY_MERGE", "mg"])
        .of_process(),
    Sample::new("futex-slots", Values::These(&[64, 2, 0, 16]), futex_slots, read_futex_slots)
        .about(&["PR_FUTEX_HASH"])
        .of_process(),
    Sample::new("time-stamps", Values::These(&[2, 1]), |mode| call(26, mode), read_time_stamps)
        .about(&["PR_GET_TSC", "PR_SET_TSC"])
        .in_helpers(),
    Sample::new("cpuid", Values::These(&[0, 1]), |may| allow_cpuid(may != 0), read_cpuid)
        .in_helpers(),
    Sample::new("call-dispatch", Values::These(&[0, 1, 2]), dispatch, || Ok(String::new()))
        .about(&["PR_SET_SYSCALL_USER_DISPATCH", "PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG"])
        .read_by_tracers()
        .lost_by_kills(),
    Sample::new("cleared-word", Values::These(&[0]), clear_word, read_cleared_word)
        .about(&["PR_GET_TID_ADDRESS", "CLONE_CHILD_CLEARTID"]),
    Sample::new("robust-futexes", Values::These(&[0]), robust, read_robust),
    Sample::new("membarrier", Values::These(&[2, 4, 6, 7]), register, read_membarrier)
        .by_call(324)
        .adding()
        .of_process(),
    Sample::new("marks", Values::Made(|| (0..MARKS.len() as u64).collect()), mark, marks)
        .about(&["PR_SET_MM", "stat"])
        .adding()
        .of_process(),
    Sample::new("auxiliary-vector", Values::These(&[0]), auxiliary_vector, read_auxiliary_vector)
        .about(&["auxv"])
        .of_process(),
    Sample::new("personality", Values::These(&[0x4_0000, 0x400_0000, 0x20_0000, 0]), persona, || {
        Ok(format!("{:x}", personality()))
    })
    .about(&["personality"])
    .by_call(135),
    Sample::new("personality-of-code", Values::These(&[0x40_0000, 0]), persona, || {
        Ok(format!("{:x}", personality()))
    })
    .by_call(135)
    .in_helpers(),
    Sample::new("core-filter", Values::These(&[0x5f, 0, 0x1ff]), core_filter, read_core_filter)
        .about(&["coredump_filter"])
        .of_process(),
    Sample::new("badness", Values::These(&[123, 1000, 7]), badness, read_badness)
        .about(&["oom_score_adj"])
        .of_process(),
    Sample::new("login", Values::These(&[4711, 0]), login, read_login)
        .about(&["loginuid"])
        .of_process(),
];

/// `PR_THP_DISABLE_EXCEPT_ADVISED` besides what turns them off.
const ADVISED: u64 = 1 << 32 | 2 << 33;

fn call(option: i32, value: u64) -> io::Result<()> {
    set_number(option, [value, 0, 0, 0]).map(drop)
}

fn get(option: i32) -> io::Result<String> {
    set_number(option, [0; 4]).map(|value| value.to_string())
}

/// The timer slack; none, which cannot be set, as the least (docs/limits.md).
fn slack() -> io::Result<String> {
    let none_as_least = |value: u64| value.max(1).to_string();
    set_number(30, [0; 4]).map(none_as_least)
}

/// Names with what lists in /proc have between their words, and of the longest kind.
fn set_name(number: u64) -> io::Result<()> {
    const NAMES: [&[u8]; 5] = [
        b") R 1 (",
        b"fifteen letters",
        b"\0",
        b"two\nlines",
        b"\xff\xfe\\n",
    ];
    fs::write("/proc/thread-self/comm", NAMES[number as usize % 5])
}

fn name() -> io::Result<String> {
    let name = fs::read("/proc/thread-self/comm")?;
    Ok(name.escape_ascii().to_string())
}

fn pdeath(signal: u64) -> io::Result<()> {
    call(1, signal)
}

fn read_pdeath() -> io::Result<String> {
    written(2).map(|signal| signal.to_string())
}

fn machine_check(policy: u64) -> io::Result<()> {
    const SET: u64 = 1;
    set_number(33, [SET, policy, 0, 0]).map(drop)
}

fn huge_pages(value: u64) -> io::Result<()> {
    let off = u64::from(value != 0);
    let flags = if value == ADVISED { 2 } else { 0 };
    set_number(41, [off, flags, 0, 0]).map(drop)
}

/// Each of the controls off, on, for good, and until a program is executed.
fn speculations() -> Vec<u64> {
    let controls = 0..3;
    let ways = |control: u64| [4, 2, 16, 8].map(|way| control << 8 | way);
    controls.flat_map(ways).collect()
}

fn speculation(value: u64) -> io::Result<()> {
    set_number(53, [value >> 8, value & 0xff, 0, 0]).map(drop)
}

fn read_speculation() -> io::Result<String> {
    let controls = (0..3).map(|control| set_number(52, [control, 0, 0, 0]).ok());
    Ok(format!("{:?}", controls.collect::<Vec<_>>()))
}

fn futex_slots(slots: u64) -> io::Result<()> {
    const SET: u64 = 1;
    set_number(78, [SET, slots, 0, 0]).map(drop)
}

fn read_futex_slots() -> io::Result<String> {
    const GET: u64 = 2;
    set_number(78, [GET, 0, 0, 0]).map(|slots| slots.to_string())
}

fn read_time_stamps() -> io::Result<String> {
    written(25).map(|mode| mode.to_string())
}

fn read_cpuid() -> io::Result<String> {
    may_use_cpuid().map(|may| may.to_string())
}

/// Of no code, of all but some that makes no calls, of some that makes none.
fn dispatch(value: u64) -> io::Result<()> {
    const CODE: (u64, u64) = (0x1_0000, 0x2_0000);
    match value {
        0 => dispatch_calls(false, 0, 0),
        1 => dispatch_calls(false, CODE.0, CODE.1),
        _ => dispatch_calls(true, CODE.0, CODE.1),
    }
}

fn clear_word(_: u64) -> io::Result<()> {
    clear_another_word();
    Ok(())
}

fn read_cleared_word() -> io::Result<String> {
    written(40).map(|address| format!("{address:x}"))
}

fn robust(_: u64) -> io::Result<()> {
    another_robust_list().map(drop)
}

fn read_robust() -> io::Result<String> {
    robust_list().map(|list| format!("{list:x?}"))
}

fn register(bit: u64) -> io::Result<()> {
    membarrier(1 << bit).map(drop)
}

fn read_membarrier() -> io::Result<String> {
    /// `MEMBARRIER_CMD_GET_REGISTRATIONS`
    const REGISTRATIONS: i32 = 1 << 9;
    membarrier(REGISTRATIONS).map(|bits| format!("{bits:x}"))
}

/// Moves a mark by a few bytes.
fn mark(number: u64) -> io::Result<()> {
    let (mark, field) = MARKS[number as usize % MARKS.len()];
    let now = stat_field(field)?;
    set_mark(mark, now ^ 8)
}

fn marks() -> io::Result<String> {
    let marks = MARKS.map(|(_, field)| stat_field(field));
    let marks: io::Result<Vec<u64>> = marks.into_iter().collect();
    marks.map(|marks| format!("{marks:x?}"))
}

fn stat_field(number: usize) -> io::Result<u64> {
    let stat = fs::read("/proc/self/stat")?;
    let stat = String::from_utf8_lossy(&stat).into_owned();
    let rest = stat.rsplit_once(") ").ok_or(io::ErrorKind::InvalidData)?.1;
    // The state is the third.
    let field = rest.split_ascii_whitespace().nth(number - 3);
    let number = field.and_then(|field| field.parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Adds an entry that means nothing.
fn auxiliary_vector(_: u64) -> io::Result<()> {
    const PAIR_BYTES: usize = 16;
    let bytes = fs::read("/proc/self/auxv")?;
    let pairs = bytes.chunks_exact(PAIR_BYTES);
    let words = |pair: &[u8]| {
        let word = |at: usize| u64::from_le_bytes(pair[at..at + 8].try_into().expect("8 bytes"));
        [word(0), word(8)]
    };
    let mut pairs: Vec<[u64; 2]> = pairs.map(words).take_while(|pair| pair[0] != 0).collect();
    let last = pairs.len() as u64;
    pairs.extend([[1 << 20, last], [0, 0]]);
    set_auxiliary_vector(pairs.as_flattened())
}

fn read_auxiliary_vector() -> io::Result<String> {
    let bytes = fs::read("/proc/self/auxv")?;
    Ok(format!("{:x?}", bytes.chunks(8).collect::<Vec<_>>()))
}

fn persona(flags: u64) -> io::Result<()> {
    set_personality(flags as u32)
}

fn core_filter(bits: u64) -> io::Result<()> {
    fs::write("/proc/self/coredump_filter", format!("{bits:#x}"))
}

fn read_core_filter() -> io::Result<String> {
    fs::read_to_string("/proc/self/coredump_filter")
}

fn badness(value: u64) -> io::Result<()> {
    fs::write("/proc/self/oom_score_adj", value.to_string())
}

fn read_badness() -> io::Result<String> {
    fs::read_to_string("/proc/self/oom_score_adj")
}

fn login(uid: u64) -> io::Result<()> {
    fs::write("/proc/self/loginuid", uid.to_string())
}

fn read_login() -> io::Result<String> {
    fs::read_to_string("/proc/self/loginuid")
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_thread_reads_back_what_it_sets() {
        let thread = std::thread::spawn(|| {
            let named = super::super::find("name").expect("it is there");
            assert!(named.change(1));
            assert_eq!(named.told().as_deref(), Some("fifteen letters\\n"));
            assert_eq!(
                super::super::sample::status("Name").expect("a line"),
                "fifteen letters"
            );
            assert!(named.change(1), "another name");
            assert_eq!(named.told().as_deref(), Some("\\n"));
        });
        thread.join().expect("no panic");
    }
}
