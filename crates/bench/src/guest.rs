//! `bench guest`: the memory of a microVM without the VM, as `bench uffd` has it touched.
//!
//! It hands its memory over as a monitor does, does what lines on its input say, and answers each
//! with a line of JSON.
use std::io::{BufRead as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use abi::{Addr, Span};
use image::PAGE_BYTES;
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use serde_json::json;
use sys::socket::{Along, send};
use sys::uffd::{Features, Modes, Uffd};
use testkit::calls::Mapping;

use crate::error::{Error, Result, kernel_error};

/// Pages of 4 KiB that are data one after the other, and then zero, where half of them is data.
const HALF_PAGES: usize = 1024;
const MADV_DONTNEED: i32 = 4;
const MADV_NOHUGEPAGE: i32 = 15;

/// What the memory holds in the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Contents {
    /// Nothing but zeros.
    Empty,
    /// Data in every other block of 4 MiB.
    Half,
    /// Data everywhere.
    Data,
}

impl Contents {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Empty, Self::Half, Self::Data];

    /// The word at `at` bytes of a page.
    pub const fn word(self, page: usize, at: usize) -> u64 {
        let is_data = match self {
            Self::Empty => false,
            Self::Half => (page / HALF_PAGES).is_multiple_of(2),
            Self::Data => true,
        };
        match is_data {
            true => ((page << 16) as u64 + at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            false => 0,
        }
    }

    /// The name of it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Empty => "empty",
            Self::Half => "half",
            Self::Data => "data",
        }
    }
}

/// The size of the target's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Size {
    /// 4 KiB.
    Small,
    /// 2 MiB, of hugetlbfs.
    Huge,
}

impl Size {
    /// In bytes.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Small => PAGE_BYTES,
            Self::Huge => 2 << 20,
        }
    }

    /// For people.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Small => "4 KiB",
            Self::Huge => "2 MiB",
        }
    }

    /// As an argument.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Huge => "huge",
        }
    }
}

/// What its userfaultfd can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ability {
    /// Tell missing pages only, as stock Firecracker's does.
    Missing,
    /// Tell writes, which wait for the server.
    WpSync,
    /// Have written pages found.
    WpAsync,
}

impl Ability {
    /// As an argument.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::WpSync => "wp-sync",
            Self::WpAsync => "wp-async",
        }
    }
}

/// What the guest is.
#[derive(clap::Args)]
pub struct Arguments {
    /// The page server's socket; without it, the bare kernel is touched.
    #[arg(long)]
    socket: Option<PathBuf>,
    #[arg(long)]
    size: Size,
    #[arg(long)]
    contents: Contents,
    #[arg(long)]
    mib: usize,
    #[arg(long)]
    ability: Ability,
}

/// What touching pages took.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct TouchTiming {
    /// All of it, the hand-off included where it was not done yet.
    pub ns: u64,
    /// A touch that half of all took less than.
    pub p50_ns: u64,
    /// The same of 99 in 100.
    pub p99_ns: u64,
    /// The longest.
    pub max_ns: u64,
}

/// Memory that is touched.
struct Guest<'a> {
    arguments: &'a Arguments,
    memory: Mapping,
    handed_over: bool,
}

/// Does what its input says until that ends.
///
/// # Errors
/// When a call fails, or a page is not what it should be.
pub fn run(arguments: &Arguments) -> Result<()> {
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let flags = match arguments.size {
        Size::Small => MapFlags::PRIVATE,
        Size::Huge => MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB,
    };
    let bytes = arguments.mib << 20;
    let memory = Mapping::anonymous(bytes, both, flags).map_err(kernel_error("map memory"))?;
    if arguments.size == Size::Small {
        let advised = memory.advise(0..bytes, MADV_NOHUGEPAGE);
        advised.map_err(kernel_error("want small pages"))?;
    }
    let mut guest = Guest {
        arguments,
        memory,
        handed_over: false,
    };
    let mut output = std::io::stdout();
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(kernel_error("read a line"))?;
        let answer = guest.obey(&line)?;
        writeln!(output, "{answer}").map_err(kernel_error("answer"))?;
    }
    Ok(())
}

impl Guest<'_> {
    fn obey(&mut self, line: &str) -> Result<serde_json::Value> {
        let (verb, number) = line.split_once(' ').unwrap_or((line, "1"));
        let number = number.parse::<usize>().unwrap_or(1).max(1);
        let pages = self.memory.bytes() / self.arguments.size.bytes();
        match verb {
            "touch" => self.touch(0..pages, false),
            // Also what has data is written, as that is zero now.
            "touch-removed" => self.touch(0..pages, true),
            "random" => {
                let mut order = (0..pages).collect::<Vec<_>>();
                let mut state = 0x9e37_79b9_7f4a_7c15_u64;
                for last in (1..pages).rev() {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    order.swap(last, state as usize % (last + 1));
                }
                self.touch(order.into_iter().take(number), false)
            }
            "remove" => {
                let advised = self.memory.advise(0..self.memory.bytes(), MADV_DONTNEED);
                advised.map_err(kernel_error("give memory up"))?;
                Ok(json!(null))
            }
            "write" => {
                for page in (0..pages).step_by(number) {
                    self.memory.store(page * self.arguments.size.bytes() + 8, 7);
                }
                Ok(json!(null))
            }
            "check" => self.check().map(|()| json!(null)),
            _ => Err(Error::Nothing {
                what: format!("a guest does not {line}"),
            }),
        }
    }

    /// Touches pages: reads those that have data, and writes others.
    fn touch(
        &mut self,
        pages: impl Iterator<Item = usize>,
        write: bool,
    ) -> Result<serde_json::Value> {
        let size = self.arguments.size.bytes();
        let bare = self.arguments.socket.is_none();
        let contents = self.arguments.contents;
        let mut took = Vec::with_capacity(self.memory.bytes() / size);
        let begun = Instant::now();
        if let Some(socket) = self
            .arguments
            .socket
            .as_deref()
            .filter(|_| !self.handed_over)
        {
            self.hand_over(socket)?;
            self.handed_over = true;
        }
        let mut before = Instant::now();
        for page in pages {
            let is_zero = contents.word(page * size / PAGE_BYTES, 0) == 0;
            match write || bare || is_zero {
                true => self.memory.store(page * size, 0),
                false => drop(std::hint::black_box(self.memory.load(page * size))),
            }
            let now = Instant::now();
            took.push((now - before).as_nanos() as u64);
            before = now;
        }
        let ns = begun.elapsed().as_nanos() as u64;
        took.sort_unstable();
        let share = |share: usize| took[(took.len() - 1) * share / 100];
        Ok(json!(TouchTiming {
            ns,
            p50_ns: share(50),
            p99_ns: share(99),
            max_ns: share(100),
        }))
    }

    fn hand_over(&self, socket: &Path) -> Result<()> {
        let uffd = Uffd::create().map_err(kernel_error("make a userfaultfd"))?;
        let missing = Features::EVENT_REMOVE | Features::MISSING_HUGETLBFS;
        let told = Features::WP | Features::WP_HUGETLBFS_SHMEM;
        let found = told | Features::WP_UNPOPULATED | Features::WP_ASYNC;
        let features = match self.arguments.ability {
            Ability::Missing => missing,
            Ability::WpSync => missing | told,
            Ability::WpAsync => missing | found,
        };
        uffd.api(features)
            .map_err(kernel_error("open a userfaultfd"))?;
        let bytes = self.memory.bytes() as u64;
        let span = Span::new(Addr(self.memory.address()), bytes);
        let registered = uffd.register(span, Modes::MISSING);
        registered.map_err(kernel_error("register memory"))?;
        let list = json!([{
            "base_host_virt_addr": self.memory.address(),
            "size": bytes,
            "offset": 0,
            "page_size": self.arguments.size.bytes(),
        }]);
        let server = UnixStream::connect(socket).map_err(kernel_error("reach the server"))?;
        let along = Along {
            rights: &[uffd.as_fd()],
            ..Along::default()
        };
        let sent = send(&server, list.to_string().as_bytes(), along, 0);
        sent.map_err(kernel_error("hand memory over"))?;
        // As a monitor does: both stay open as long as it lives.
        std::mem::forget((server, uffd));
        Ok(())
    }

    /// Insists that every page has its contents, apart from what was touched or written.
    fn check(&self) -> Result<()> {
        for page in 0..self.memory.bytes() / PAGE_BYTES {
            for at in [16, PAGE_BYTES / 2, PAGE_BYTES - 8] {
                let is = self.memory.load(page * PAGE_BYTES + at);
                let expected = self.arguments.contents.word(page, at);
                if is != expected {
                    let what = format!("page {page} has {is:#x} at {at}, not {expected:#x}");
                    return Err(Error::Nothing { what });
                }
            }
        }
        Ok(())
    }
}
