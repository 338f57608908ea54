//! A monitor of a microVM without the VM: it hands memory over to a page server, and does with it
//! what a guest would. Arguments: the server's socket, pages of 4 KiB, `small` or `huge`, what its
//! userfaultfd can do (`missing`, `told`, `found`), the number of mappings.
//!
//! `check` looks at all pages and answers "right", or which one is not; `write FIRST PAGES STEP
//! VALUE` writes a word to the beginning and the end of every STEPth page, `remove FIRST PAGES`
//! gives pages up, `dump PATH` writes all of the memory to a file.
use std::io::{BufWriter, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use rustix::mm::{MapFlags, ProtFlags};
use serde_json::json;
use sys::socket::{Along, send};
use sys::subject::Mapping;
use sys::uffd::{Features, Modes, Uffd};

use super::{Control, Failure, not_understood, number};
use crate::machine_memory::{PAGE_BYTES, word};

const MADV_DONTNEED: i32 = 4;
const LAST: usize = PAGE_BYTES - 8;

/// What a page holds at its beginning and at its end.
struct State {
    memory: Mapping,
    holds: Vec<(u64, u64)>,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let text = |index: usize| arguments.get(index).map_or("", String::as_str);
    let pages = number(arguments, 1, 0)? as usize;
    let (flags, page_size) = match text(2) {
        "huge" => (MapFlags::HUGETLB | MapFlags::HUGE_2MB, 2 << 20),
        _ => (MapFlags::empty(), PAGE_BYTES),
    };
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let memory = Mapping::anonymous(pages * PAGE_BYTES, both, MapFlags::PRIVATE | flags)?;
    let uffd = Uffd::create()?;
    let events = Features::EVENT_REMOVE | Features::MISSING_HUGETLBFS;
    let writes = Features::WP | Features::WP_HUGETLBFS_SHMEM;
    uffd.api(match text(3) {
        "missing" => events,
        "told" => events | writes,
        _ => events | writes | Features::WP_UNPOPULATED | Features::WP_ASYNC,
    })?;
    let span = abi::Span::new(abi::Addr(memory.address()), (pages * PAGE_BYTES) as u64);
    uffd.register(span, Modes::MISSING)?;
    let mappings = number(arguments, 4, 1)? as usize;
    let part = pages * PAGE_BYTES / mappings;
    let mappings = (0..mappings).map(|number| {
        json!({
            "base_host_virt_addr": memory.address() + (number * part) as u64,
            "size": part,
            "offset": number * part,
            "page_size": page_size,
            "page_size_kib": page_size,
        })
    });
    let list = json!(mappings.collect::<Vec<_>>()).to_string();
    let server = UnixStream::connect(text(0))?;
    let along = Along {
        rights: &[uffd.as_fd()],
        ..Along::default()
    };
    send(&server, list.as_bytes(), along, 0)?;
    // As the monitor itself does: both stay open as long as it lives.
    std::mem::forget((server, uffd));
    let holds = (0..pages as u64).map(|page| (word(page, 0), word(page, LAST)));
    let mut state = State {
        memory,
        holds: holds.collect(),
    };
    control.serve(|question| {
        let word = |index: usize| number(&question.words, index, 0);
        if question.verb == "dump" {
            state.dump(question.words.first().map_or("", String::as_str))?;
            return Ok(String::new());
        }
        let (first, count) = (word(0)? as usize, word(1)? as usize);
        match question.verb.as_str() {
            "check" => return Ok(state.check()),
            "write" => {
                for page in (first..first + count).step_by(word(2)?.max(1) as usize) {
                    state.write(page, (word(3)? << 32) | page as u64);
                }
            }
            "remove" => {
                let bytes = first * PAGE_BYTES..(first + count) * PAGE_BYTES;
                state.memory.advise(bytes, MADV_DONTNEED)?;
                state.holds[first..first + count].fill((0, 0));
            }
            _ => return not_understood(question),
        }
        Ok(String::new())
    })
}

impl State {
    fn check(&self) -> String {
        for (page, holds) in self.holds.iter().enumerate() {
            let at = page * PAGE_BYTES;
            let is = (self.memory.load(at), self.memory.load(at + LAST));
            if is != *holds {
                return format!("page {page} has {is:x?} and not {holds:x?}");
            }
        }
        "right".to_owned()
    }

    fn write(&mut self, page: usize, word: u64) {
        self.memory.store(page * PAGE_BYTES, word);
        self.memory.store(page * PAGE_BYTES + LAST, word);
        self.holds[page] = (word, word);
    }

    fn dump(&self, path: &str) -> Result<(), Failure> {
        let mut file = BufWriter::new(std::fs::File::create(path)?);
        for at in (0..self.memory.bytes()).step_by(8) {
            file.write_all(&self.memory.load(at).to_ne_bytes())?;
        }
        file.flush()?;
        Ok(())
    }
}
