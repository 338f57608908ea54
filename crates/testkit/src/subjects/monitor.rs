//! A monitor of a microVM without the VM: it hands memory over to a page server, and does with it
//! what a guest would. Arguments: the server's socket, pages of 4 KiB, `small` or `huge` (of its
//! own, or with `-shared` behind it of a memfd; `small-cached` is a mapping of what the server
//! offers to share), what its userfaultfd can do (`missing`, `told`,
//! `found`), the number of mappings.
//!
//! `check` looks at all of the memory and answers "right", or which page is not; `write FIRST
//! PAGES STEP VALUE` writes a word to the beginning and the end of every STEPth page, `remove FIRST
//! PAGES` gives pages up, `fire SEED STEPS` has four threads do all of that at random and answers
//! as `check`, `dump PATH` writes all of the memory to a file, `expect PATH` what it should be,
//! without touching it.
//!
//! `guest fill FIRST PAGES SEED` has a virtual machine with this memory write to it; `guest verify
//! FIRST PAGES SEED`, and `guest zero FIRST PAGES`, have it look itself, and answer "right", where
//! it is not so, or "no KVM".
//!
//! With `watch` as the last argument, or `watch-alone`, which closes its own userfaultfd first, it
//! reads its memory over and over, in any order, until it is killed, and leaves a file `wrong`
//! where a page is not what the image has.
use std::io::{BufWriter, ErrorKind, Write};
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};
use serde_json::json;
use sys::socket::{Along, receive, send};
use sys::uffd::{Features, Modes, Uffd};

use super::{Control, Failure, not_understood, number};
use crate::calls::Mapping;
use crate::chance::Chance;
use crate::guest::{self, Guest, Work};
use crate::machine_memory::{PAGE_BYTES, word};

const MADV_DONTNEED: i32 = 4;
const MADV_REMOVE: i32 = 9;
const LAST: usize = PAGE_BYTES - 8;
const HUGE_BYTES: usize = 2 << 20;
/// Threads of `fire`.
const THREADS: usize = 4;

/// What a page holds.
#[derive(Clone, Copy, Default)]
struct PageContents {
    /// It was given up: zeros, not what the image has.
    zero: bool,
    /// Written to its beginning and its end.
    word: Option<u64>,
    /// What a guest has filled it from.
    seed: Option<u64>,
}

impl PageContents {
    const ZERO: Self = Self {
        zero: true,
        word: None,
        seed: None,
    };

    fn word(self, page: usize, at: usize) -> u64 {
        match (self.word, self.seed, self.zero) {
            (Some(word), ..) if at == 0 || at == LAST => word,
            (_, Some(seed), _) => guest::word((page * PAGE_BYTES + at) as u64, seed),
            (.., true) => 0,
            _ => word(page as u64, at),
        }
    }
}

struct State<'m> {
    memory: &'m Memory,
    holds: Vec<PageContents>,
    guest: Option<Guest<'m>>,
}

/// Memory and how it is given up.
struct Memory {
    mapping: Mapping,
    huge: bool,
    shared: bool,
}

impl Memory {
    /// What the server offers to share, mapped for oneself alone.
    fn offered(server: &UnixStream, bytes: usize) -> Result<Self, Failure> {
        let offer = receive(server, &mut [0; 256], 0)?;
        let file = offer.rights.first().ok_or("the server offers nothing")?;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        Ok(Self {
            mapping: Mapping::of_file(file, 0, bytes, both, flags)?,
            huge: false,
            shared: false,
        })
    }

    fn new(kind: &str, bytes: usize) -> Result<Self, Failure> {
        let (size, shared) = match kind.split_once('-') {
            Some((size, "shared")) => (size, true),
            _ => (kind, false),
        };
        let huge = size == "huge";
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let mapping = if shared {
            let flags = match huge {
                true => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
                false => MemfdFlags::empty(),
            };
            let file = memfd_create("memory", flags | MemfdFlags::CLOEXEC)?;
            ftruncate(&file, bytes as u64)?;
            Mapping::of_file(&file, 0, bytes, both, MapFlags::SHARED)?
        } else {
            let flags = match huge {
                true => MapFlags::HUGETLB | MapFlags::HUGE_2MB,
                false => MapFlags::empty(),
            };
            Mapping::anonymous(bytes, both, MapFlags::PRIVATE | flags)?
        };
        Ok(Self {
            mapping,
            huge,
            shared,
        })
    }

    fn page_bytes(&self) -> usize {
        match self.huge {
            true => HUGE_BYTES,
            false => PAGE_BYTES,
        }
    }

    /// Gives pages up, as far as the kernel does that; those that were.
    fn remove(&self, pages: Range<usize>) -> Result<Range<usize>, Failure> {
        // Of a huge page that is one's own there are no parts.
        let whole = match self.huge && !self.shared {
            true => HUGE_BYTES / PAGE_BYTES,
            false => 1,
        };
        let pages = pages.start.div_ceil(whole) * whole..pages.end / whole * whole;
        if pages.is_empty() {
            return Ok(0..0);
        }
        let advice = match self.shared {
            true => MADV_REMOVE,
            false => MADV_DONTNEED,
        };
        let bytes = pages.start * PAGE_BYTES..pages.end * PAGE_BYTES;
        self.mapping.advise(bytes, advice)?;
        Ok(pages)
    }

    fn write(&self, page: usize, word: u64) {
        self.mapping.store(page * PAGE_BYTES, word);
        self.mapping.store(page * PAGE_BYTES + LAST, word);
    }

    /// What is wrong with a page.
    fn wrong(&self, page: usize, holds: PageContents) -> Option<String> {
        (0..PAGE_BYTES).step_by(8).find_map(|at| {
            let (is, was) = (
                self.mapping.load(page * PAGE_BYTES + at),
                holds.word(page, at),
            );
            (is != was).then(|| format!("page {page} has {is:x} at {at}, and not {was:x}"))
        })
    }

    /// Does something to the pages from `first` on, which are one's own, over and over; what is
    /// wrong.
    fn fire(
        &self,
        first: usize,
        holds: &mut [PageContents],
        seed: u64,
        steps: u64,
    ) -> Option<String> {
        let mut chance = Chance::with(seed);
        for step in 0..steps {
            let own = chance.below(holds.len() as u64) as usize;
            let wrong = match chance.below(10) {
                0 => {
                    let pages = 1 + chance.below(if self.huge { 1200 } else { 64 }) as usize;
                    let end = (own + pages).min(holds.len());
                    match self.remove(first + own..first + end) {
                        Err(error) => Some(error.to_string()),
                        Ok(pages) => {
                            let gone = pages.start.max(first) - first..pages.end.max(first) - first;
                            holds[gone].fill(PageContents::ZERO);
                            None
                        }
                    }
                }
                1..5 => {
                    let word = (seed << 32) | step;
                    self.write(first + own, word);
                    holds[own].word = Some(word);
                    None
                }
                _ => self.wrong(first + own, holds[own]),
            };
            if wrong.is_some() {
                return wrong;
            }
        }
        None
    }
}

/// Hands the memory over, as Firecracker does; what has to stay open.
fn hand_over(memory: &Memory, arguments: &[String], server: &UnixStream) -> Result<Uffd, Failure> {
    let text = |index: usize| arguments.get(index).map_or("", String::as_str);
    let (at, bytes) = (memory.mapping.address(), memory.mapping.bytes());
    let uffd = Uffd::create()?;
    let events = Features::EVENT_REMOVE
        | Features::MISSING_HUGETLBFS
        | Features::MISSING_SHMEM
        | Features::MINOR_SHMEM;
    let writes = Features::WP | Features::WP_HUGETLBFS_SHMEM;
    uffd.api(match text(3) {
        "missing" => events,
        "told" => events | writes,
        _ => events | writes | Features::WP_UNPOPULATED | Features::WP_ASYNC,
    })?;
    uffd.register(abi::Span::new(abi::Addr(at), bytes as u64), Modes::MISSING)?;
    let mappings = number(arguments, 4, 1)? as usize;
    let part = bytes / mappings;
    let page_size = memory.page_bytes();
    let mappings = (0..mappings).map(|number| {
        json!({
            "base_host_virt_addr": at + (number * part) as u64,
            "size": part,
            "offset": number * part,
            "page_size": page_size,
            "page_size_kib": page_size,
        })
    });
    let list = json!(mappings.collect::<Vec<_>>()).to_string();
    let along = Along {
        rights: &[uffd.as_fd()],
        ..Along::default()
    };
    send(server, list.as_bytes(), along, 0)?;
    Ok(uffd)
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let text = |index: usize| arguments.get(index).map_or("", String::as_str);
    let pages = number(arguments, 1, 0)? as usize;
    let server = UnixStream::connect(text(0))?;
    let memory = match text(2) {
        "small-cached" => Memory::offered(&server, pages * PAGE_BYTES)?,
        kind => Memory::new(kind, pages * PAGE_BYTES)?,
    };
    let uffd = hand_over(&memory, arguments, &server)?;
    // As the monitor itself does: both stay open as long as it lives.
    std::mem::forget(server);
    match text(5) {
        "watch-alone" => drop(uffd),
        _ => std::mem::forget(uffd),
    }
    if text(5).starts_with("watch") {
        return watch(&control, &memory, pages as u64);
    }
    let mut state = State {
        memory: &memory,
        holds: vec![PageContents::default(); pages],
        guest: None,
    };
    control.serve(|question| {
        let word = |index: usize| number(&question.words, index, 0);
        if question.verb == "dump" {
            state.dump(question.words.first().map_or("", String::as_str))?;
            return Ok(String::new());
        }
        if question.verb == "expect" {
            state.expect(question.words.first().map_or("", String::as_str))?;
            return Ok(String::new());
        }
        if question.verb == "guest" {
            return state.guest(&question.words);
        }
        let (first, count) = (word(0)? as usize, word(1)? as usize);
        match question.verb.as_str() {
            "check" => return Ok(state.check()),
            "fire" => return Ok(state.fire(word(0)?, word(1)?)),
            "write" => {
                for page in (first..first + count).step_by(word(2)?.max(1) as usize) {
                    state.write(page, (word(3)? << 32) | page as u64);
                }
            }
            "remove" => {
                let gone = state.memory.remove(first..first + count)?;
                state.holds[gone].fill(PageContents::ZERO);
            }
            _ => return not_understood(question),
        }
        Ok(String::new())
    })
}

/// Reads pages until it is killed.
fn watch(control: &Control, memory: &Memory, pages: u64) -> Result<(), Failure> {
    control.ready()?;
    let mut chance = Chance::with(u64::from(std::process::id()));
    loop {
        let page = chance.below(pages) as usize;
        if let Some(wrong) = memory.wrong(page, PageContents::default()) {
            std::fs::write(control.folder().join("wrong"), &wrong)?;
            return Err(wrong.into());
        }
    }
}

impl State<'_> {
    fn guest(&mut self, words: &[String]) -> Result<String, Failure> {
        let (first, pages, seed) = (
            number(words, 1, 0)?,
            number(words, 2, 0)?,
            number(words, 3, 0)?,
        );
        let guest = match self.guest.take() {
            Some(guest) => guest,
            None => match Guest::new(&self.memory.mapping) {
                Ok(guest) => guest,
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok("no KVM".to_owned()),
                Err(error) => return Err(error.into()),
            },
        };
        let guest = self.guest.insert(guest);
        let work = match words.first().map(String::as_str) {
            Some("fill") => Work::Fill(seed),
            Some("verify") => Work::Verify(seed),
            _ => Work::VerifyZero,
        };
        let bytes = |page: u64| page * PAGE_BYTES as u64;
        if let Some(wrong) = guest.run(work, bytes(first), bytes(first + pages))? {
            return Ok(format!("the guest stopped at {wrong:#x}"));
        }
        if let Work::Fill(seed) = work {
            let filled = PageContents {
                seed: Some(seed),
                ..PageContents::default()
            };
            self.holds[first as usize..(first + pages) as usize].fill(filled);
        }
        Ok("right".to_owned())
    }

    fn check(&self) -> String {
        let holds = self.holds.iter().enumerate();
        let mut wrong = holds.filter_map(|(page, holds)| self.memory.wrong(page, *holds));
        wrong.next().unwrap_or_else(|| "right".to_owned())
    }

    fn fire(&mut self, seed: u64, steps: u64) -> String {
        let slice = self.holds.len() / THREADS;
        let memory = &self.memory;
        let wrong = std::thread::scope(|scope| {
            let parts = self.holds.chunks_mut(slice).enumerate();
            let threads = parts.map(|(part, holds)| {
                let seed = seed * 1000 + part as u64;
                scope.spawn(move || memory.fire(part * slice, holds, seed, steps))
            });
            let threads = threads.collect::<Vec<_>>().into_iter();
            let told = threads.map(|thread| {
                let panicked = |_| Some("a thread panicked".to_owned());
                thread.join().unwrap_or_else(panicked)
            });
            told.collect::<Vec<_>>().into_iter().flatten().next()
        });
        wrong.unwrap_or_else(|| "right".to_owned())
    }

    fn write(&mut self, page: usize, word: u64) {
        self.memory.write(page, word);
        self.holds[page].word = Some(word);
    }

    fn dump(&self, path: &str) -> Result<(), Failure> {
        self.store(path, |at| self.memory.mapping.load(at))
    }

    fn expect(&self, path: &str) -> Result<(), Failure> {
        self.store(path, |at| {
            let page = at / PAGE_BYTES;
            self.holds[page].word(page, at % PAGE_BYTES)
        })
    }

    /// Writes a file of words as long as the memory.
    fn store(&self, path: &str, word: impl Fn(usize) -> u64) -> Result<(), Failure> {
        let mut file = BufWriter::new(std::fs::File::create(path)?);
        for at in (0..self.memory.mapping.bytes()).step_by(8) {
            file.write_all(&word(at).to_ne_bytes())?;
        }
        file.flush()?;
        Ok(())
    }
}
