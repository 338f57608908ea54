//! What runs in the machine.

use std::fs::{self, File};
use std::io::{self, BufRead as _, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::devices;

/// How often the machine counts.
const TICK: Duration = Duration::from_millis(10);

/// What runs in the machine as process 1. It answers lines, each with a number in front that the
/// answer has, too:
/// - `count`: how far it has counted, once every 10 ms;
/// - `fill NAME SEED MIB`: makes a file of so many MiB out of a seed;
/// - `check NAME SEED MIB`: whether it is as it was made;
/// - `remove NAME`: removes it;
/// - `note TEXT` and `recall`: keeps a text, and says it;
/// - `write MIB`: writes to that much memory from then on, over and over;
/// - `written`: how often it has written all of that, and how many pages were not as left;
/// - `tick MS TIMES`: says `.` so often, on lines of their own, with so many ms between;
/// - `devices`: has the kernel find its devices: what follows needs them;
/// - `disk MIB`: writes to that much of its disk from then on, over and over, and reads it;
/// - `disk`: how often it has written all of that, and how many blocks were not as left;
/// - `address LAST`: has the address 10.0.0.LAST, and answers who connects there;
/// - `talk LAST`: connects to that address, and asks and is answered from then on;
/// - `talk`: how often it was answered, how often wrongly, and how often the connection ended.
///
/// # Panics
/// When the machine has no serial line.
pub fn inside() -> ! {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(TICK);
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
    });
    let console = io::stdin();
    let mut raw = rustix::termios::tcgetattr(&console).expect("a terminal");
    raw.make_raw();
    let now = rustix::termios::OptionalActions::Now;
    rustix::termios::tcsetattr(&console, now, &raw).expect("a terminal");
    let mut noted = String::new();
    for line in console.lock().split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        let words = line.split_whitespace().collect::<Vec<_>>();
        let Some((number, words)) = words.split_first() else {
            continue;
        };
        let answer = match words {
            ["count"] => COUNT.load(Ordering::Relaxed).to_string(),
            ["fill", name, rest @ ..] => said(fill(name, rest)),
            ["check", name, rest @ ..] => said(check(name, rest)),
            ["remove", name] => said(fs::remove_file(path(name)).map(|()| "removed".to_owned())),
            ["note", rest @ ..] => {
                noted = rest.join(" ");
                "noted".to_owned()
            }
            ["recall"] => noted.clone(),
            ["write", mib] => said(begin_writing(mib)),
            ["written"] => {
                let [passes, wrong] = [&PASSES, &WRONG].map(|it| it.load(Ordering::SeqCst));
                format!("{passes} {wrong}")
            }
            ["tick", pause, times] => said(tick(pause, times)),
            ["devices"] => said(devices::find()),
            ["disk", mib] => said(self::number(mib).and_then(devices::begin_disk)),
            ["disk"] => devices::DISK.told(),
            ["address", last] => said(self::number(last).and_then(devices::serve)),
            ["talk", last] => said(self::number(last).and_then(devices::begin_talk)),
            ["talk"] => devices::TALK.told(),
            _ => "what?".to_owned(),
        };
        // What a terminal echoes before it is made raw begins otherwise.
        println!("={number} {answer}");
    }
    panic!("the serial line has ended");
}

/// How often all of the memory was written, and how many pages were not as they were left.
static PASSES: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);

fn number(word: &str) -> io::Result<u64> {
    word.parse().map_err(io::Error::other)
}

/// Writes the number of the pass to each page of some memory, over and over. Each page must be as
/// the pass before has left it: at any instant, pages of two passes at most are there, in order.
fn begin_writing(mib: &str) -> io::Result<String> {
    const PAGE_WORDS: usize = 512;
    let mut words = vec![0_u64; number(mib)? as usize * (1 << 20) / 8];
    std::thread::spawn(move || {
        for pass in 1.. {
            for page in words.chunks_exact_mut(PAGE_WORDS) {
                let first = std::hint::black_box(page[0]);
                let last = std::hint::black_box(page[PAGE_WORDS - 1]);
                if (first, last) != (pass - 1, pass - 1) {
                    WRONG.fetch_add(1, Ordering::SeqCst);
                }
                page[0] = pass;
                page[PAGE_WORDS - 1] = pass;
                std::hint::black_box(&mut *page);
            }
            PASSES.fetch_add(1, Ordering::SeqCst);
        }
    });
    Ok("writing".to_owned())
}

fn tick(pause: &str, times: &str) -> io::Result<String> {
    let pause = Duration::from_millis(number(pause)?);
    for _ in 0..number(times)? {
        println!(".");
        std::thread::sleep(pause);
    }
    Ok("ticked".to_owned())
}

fn said(result: io::Result<String>) -> String {
    result.unwrap_or_else(|error| format!("failed: {error}"))
}

fn path(name: &str) -> PathBuf {
    Path::new("/tmp").join(name)
}

/// Bytes that are made, written and read at once.
const PIECE_BYTES: usize = 64 << 10;

/// All pieces of a file of so many MiB made out of a seed.
fn pieces(words: &[&str]) -> io::Result<impl Iterator<Item = Vec<u8>>> {
    let number = |at: usize| words.get(at)?.parse::<u64>().ok();
    let (Some(seed), Some(mib)) = (number(0), number(1)) else {
        return Err(io::Error::other("a seed and a number of MiB, please"));
    };
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let piece = move |_| (0..PIECE_BYTES / 8).flat_map(|_| word()).collect();
    Ok((0..mib * (1 << 20) / PIECE_BYTES as u64).map(piece))
}

fn fill(name: &str, words: &[&str]) -> io::Result<String> {
    let mut file = File::create(path(name))?;
    for piece in pieces(words)? {
        file.write_all(&piece)?;
    }
    Ok("filled".to_owned())
}

fn check(name: &str, words: &[&str]) -> io::Result<String> {
    let mut file = File::open(path(name))?;
    let mut read = vec![0; PIECE_BYTES];
    for piece in pieces(words)? {
        file.read_exact(&mut read)?;
        if read != piece {
            return Ok("wrong".to_owned());
        }
    }
    Ok("right".to_owned())
}
