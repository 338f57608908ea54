//! A target that writes pages of its memory at a steady pace and watches the clock meanwhile.
//!
//! It can be asked from outside, by reading its memory. It writes other pages until all had their
//! turn. A page that is due while it cannot run is written afterwards.
use std::fs::File;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Pid;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::subject::{PAGE_BYTES, fill_page, keep_stdout, now_ns};

/// How long writing may take longer than its pace says.
const PATIENCE: Duration = Duration::from_secs(60);

/// What it is.
#[derive(clap::Args)]
pub struct Arguments {
    /// Memory in MiB, every page with other contents.
    mib: u64,
    /// Pages that it writes in a second.
    pages_per_s: u64,
}

/// What the target tells: how often it looked at the clock, the longest time between two looks in
/// nanoseconds, and how many pages it has written.
static TOLD: [AtomicU64; 3] = [AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0)];

/// Becomes the target: writes the address of what it tells on stdout when its memory is there, and
/// never returns.
///
/// # Errors
/// When stdout cannot be written.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut ready = keep_stdout()?;
    let bytes = usize::try_from(arguments.mib << 20).expect("64-bit addresses");
    let mut memory = vec![0u8; bytes];
    let mut word = 0x9e37_79b9_7f4a_7c15;
    for page in memory.chunks_exact_mut(PAGE_BYTES) {
        fill_page(page, &mut word);
    }
    let told = writeln!(ready, "{}", TOLD.as_ptr().addr());
    told.map_err(kernel_error("tell that the target is ready"))?;
    drop(ready);
    write(&mut memory, arguments.pages_per_s)
}

/// Writes for ever.
fn write(memory: &mut [u8], pages_per_s: u64) -> ! {
    // Prime, and larger than the number of pages ever is: all have their turn.
    const STRIDE: u128 = 2_654_435_761;
    let [looks, longest_ns, written] = &TOLD;
    let pages = (memory.len() / PAGE_BYTES) as u128;
    let began_ns = now_ns();
    let (mut last_ns, mut count) = (began_ns, 0u64);
    loop {
        let now_ns = now_ns();
        let gap_ns = now_ns.saturating_sub(last_ns);
        if gap_ns > longest_ns.load(Ordering::Relaxed) {
            longest_ns.store(gap_ns, Ordering::Relaxed);
        }
        last_ns = now_ns;
        looks.fetch_add(1, Ordering::Relaxed);
        let passed_ns = u128::from(now_ns.saturating_sub(began_ns));
        if u128::from(count) < passed_ns * u128::from(pages_per_s) / 1_000_000_000 {
            let page = (u128::from(count) * STRIDE % pages) as usize;
            let byte = black_box(&mut memory[page * PAGE_BYTES]);
            *byte = byte.wrapping_add(1);
            count += 1;
            written.store(count, Ordering::Relaxed);
        }
    }
}

/// What the target tells.
#[derive(Debug, Clone, Copy)]
pub struct WriterReport {
    /// Looks at the clock.
    pub looks: u64,
    /// The longest time between two of them, in nanoseconds.
    pub longest_ns: u64,
    /// Pages written.
    pub written_pages: u64,
}

/// The running target, seen from outside; it is killed when this is dropped.
pub struct Writer {
    child: Child,
    told_at: u64,
}

impl Writer {
    /// Starts it and waits until its memory is there.
    ///
    /// # Errors
    /// When it cannot be started or ends early.
    pub fn start(mib: u64, pages_per_s: u64) -> Result<Self> {
        let program = PathBuf::from("/proc/self/exe");
        let program = std::fs::read_link(&program).map_err(file_error("read", &program))?;
        let mut command = Command::new(&program);
        command
            .args(["writer", &mib.to_string(), &pages_per_s.to_string()])
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let child = command.spawn().map_err(|source| Error::Start {
            program: program.display().to_string(),
            source,
        })?;
        let mut writer = Self { child, told_at: 0 };
        let stdout = writer.child.stdout.take().expect("stdout was made a pipe");
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        read.map_err(kernel_error("wait for a target"))?;
        let Ok(told_at) = line.trim().parse() else {
            return Err(writer.lost("it ended before it was ready"));
        };
        writer.told_at = told_at;
        Ok(writer)
    }

    /// Returns its pid.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Reads what it tells.
    ///
    /// # Errors
    /// When it is gone.
    pub fn look(&self) -> Result<WriterReport> {
        let mut bytes = [0; 24];
        let path = self.memory_path();
        File::open(&path)
            .and_then(|memory| memory.read_exact_at(&mut bytes, self.told_at))
            .map_err(file_error("read", &path))?;
        let word =
            |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Ok(WriterReport {
            looks: word(0),
            longest_ns: word(8),
            written_pages: word(16),
        })
    }

    /// Forgets the longest time between two looks at the clock.
    ///
    /// # Errors
    /// When it is gone.
    pub fn forget_longest(&self) -> Result<()> {
        let path = self.memory_path();
        File::options()
            .write(true)
            .open(&path)
            .and_then(|memory| memory.write_all_at(&[0; 8], self.told_at + 8))
            .map_err(file_error("write", &path))
    }

    /// Waits until it has written `pages` more.
    ///
    /// # Errors
    /// When it does not.
    pub fn wait_written(&self, pages: u64) -> Result<()> {
        let until = self.look()?.written_pages + pages;
        let begun = Instant::now();
        while self.look()?.written_pages < until {
            if begun.elapsed() > PATIENCE {
                return Err(self.lost("it does not write as fast as it should"));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Waits until it has looked at the clock again.
    ///
    /// # Errors
    /// When it does not.
    pub fn wait_looks(&self) -> Result<()> {
        let until = self.look()?.looks + 2;
        let begun = Instant::now();
        while self.look()?.looks < until {
            if begun.elapsed() > PATIENCE {
                return Err(self.lost("it does not run"));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    fn lost(&self, what: &str) -> Error {
        Error::Lost {
            tool: "writer".into(),
            pid: self.pid().as_raw_nonzero().get(),
            what: what.into(),
        }
    }

    fn memory_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/mem", self.child.id()))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // One that has ended already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
