//! The vDSO of a stopped task: whose it is, its code for the image, and no thread inside of it.
//!
//! - What: vDSO of no known size
//! - Refused: "a vDSO of … bytes".
//! - CRIU 4.2: not known.

use std::fs::File;
use std::os::unix::fs::FileExt;

use abi::{Addr, Span};
use freeze::uffd;
use freeze::{Body, Task};
use image::{Record, SpaceId};
use prost::Message;
use resources::map::listing::{Backing, Listed};
use resources::map::vdso::elf::Elf;
use resources::map::vdso::{self, Vdso, found, unwind};
use sys::arch::Registers;
use sys::process::Process;
use tracee::{Thread, VdsoCall};

use super::files::{Contents, Object};
use crate::records::record;
use crate::{Error, Result};

/// The vDSO of one task.
#[derive(Default)]
pub(super) struct Seen {
    /// Whether there is one.
    pub is_there: bool,
    /// The build id of the code that the program knows; empty if it has none.
    pub build_id: Vec<u8>,
    /// Whether it is that of 32-bit programs.
    pub is_32_bit: bool,
    /// Where the kernel's own is, if what the program knows is a proxy of another.
    pub behind_proxy: Option<Span>,
    /// Where an injection's stub fits into it, as far as that was seen on the way.
    pub padding: Option<Addr>,
}

/// The vDSOs of a tree.
#[derive(Default)]
pub(super) struct Vdsos {
    all: Vec<Vdso>,
}

impl Vdsos {
    /// Looks at the vDSO of a stopped task. In `listed` a proxy becomes what it stands for.
    pub fn inspect(&mut self, task: &Task, listed: &mut Vec<Listed>) -> Result<Seen> {
        let mut memory = None;
        let mut head = |at: Addr| {
            let memory = memory.get_or_insert_with(|| uffd::open_memory(task).ok());
            let mut bytes = [0; 16];
            let read = memory.as_ref()?.read_exact_at(&mut bytes, at.0);
            read.ok().map(|()| bytes)
        };
        let mut seen = Seen {
            behind_proxy: found::lift(listed, &mut head),
            ..Seen::default()
        };
        let Some(code) = code(listed) else {
            return Ok(seen);
        };
        seen.is_there = true;
        let mut page = [0; abi::PAGE_BYTES as usize];
        let read = match &memory {
            Some(Some(memory)) => memory.read_exact_at(&mut page, code.start.0),
            _ => read_ends(&task.process, code, &mut page).map(|padding| seen.padding = padding),
        };
        read.map_err(|e| Error::kernel(format!("cannot read the vDSO of pid {}", task.pid()), e))?;
        const ELF_CLASS_32: &[u8] = b"\x7fELF\x01";
        seen.is_32_bit = page.starts_with(ELF_CLASS_32);
        seen.build_id = sys::vdso::build_id(&page).unwrap_or_default();
        self.add(task, code, &seen.build_id)?;
        Ok(seen)
    }

    /// Takes the code along, once for each build id. That of this host is at hand.
    fn add(&mut self, task: &Task, span: Span, build_id: &[u8]) -> Result<()> {
        if self.all.iter().any(|vdso| vdso.build_id == build_id) {
            return Ok(());
        }
        let own = sys::vdso::own().filter(|own| {
            let id = sys::vdso::build_id(own);
            id.is_some_and(|id| id == build_id)
        });
        let mut code = match own {
            Some(own) => own.to_vec(),
            None => read_code(task.pid(), &uffd::open_memory(task)?, span)?,
        };
        found::unmark(&mut code);
        if let Some(bytes) = Elf::new(&code).and_then(|elf| elf.load_bytes()) {
            code.truncate(usize::try_from(bytes).unwrap_or(usize::MAX));
        }
        self.all.push(Vdso {
            build_id: build_id.to_vec(),
            code,
            ..Vdso::default()
        });
        Ok(())
    }

    /// Those that are not this host's.
    pub fn foreign(&self) -> Vec<Vdso> {
        let own = sys::vdso::own_build_id();
        let is_foreign = |vdso: &&Vdso| Some(&vdso.build_id) != own.as_ref();
        self.all.iter().filter(is_foreign).cloned().collect()
    }

    /// Adds the records of the image and the objects that the code is stored as; gives the spaces
    /// of what the parent image, which has those `before`, has already, and their pages.
    pub fn store(
        self,
        before: &[Vdso],
        records: &mut Vec<Record>,
        objects: &mut Vec<Object>,
    ) -> Vec<(SpaceId, u64)> {
        let used = before.iter().filter_map(|vdso| vdso.space);
        let mut free = used
            .max()
            .map_or(vdso::FIRST_SPACE, |last| last.saturating_add(1));
        let mut kept = Vec::new();
        for (id, vdso) in (0..).zip(self.all) {
            let len_bytes = u32::try_from(vdso.code.len()).expect("at most BYTES_MAX");
            let same = |one: &&Vdso| {
                !vdso.build_id.is_empty()
                    && (&one.build_id, one.len_bytes) == (&vdso.build_id, len_bytes)
            };
            let known = before.iter().find(same).and_then(|one| one.space);
            let space = known.unwrap_or(free);
            if known.is_some() {
                let pages = u64::from(len_bytes).div_ceil(abi::PAGE_BYTES);
                kept.push((SpaceId(space), pages));
            } else {
                free += 1;
                objects.push(Object {
                    space: SpaceId(space),
                    contents: Contents::Bytes(vdso.code),
                    len_bytes: len_bytes.into(),
                });
            }
            let stored = Vdso {
                build_id: vdso.build_id,
                code: Vec::new(),
                space: Some(space),
                len_bytes,
            };
            records.push(record(vdso::TAG, id, stored.encode_to_vec()));
        }
        kept
    }
}

/// Reads the first page of a vDSO's code, and sees whether there is room at its end.
fn read_ends(process: &Process, code: Span, page: &mut [u8]) -> std::io::Result<Option<Addr>> {
    let tail = Addr(code.end.0 - tracee::PADDING_BYTES as u64);
    let pieces = [(code.start, page.len()), (tail, tracee::PADDING_BYTES)];
    let mut bytes = vec![0; page.len() + tracee::PADDING_BYTES];
    if sys::vm::read_pieces(process, &pieces, &mut bytes)? < bytes.len() {
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    let (first, tail) = bytes.split_at(page.len());
    page.copy_from_slice(first);
    let tail = tail.try_into().expect("as long as asked for");
    Ok(tracee::padding_in(tail, code.end))
}

fn code(listed: &[Listed]) -> Option<Span> {
    let mut all = listed.iter();
    let code = all.find(|listed| listed.backing() == Backing::Vdso);
    code.map(|listed| listed.span)
}

fn read_code(pid: i32, memory: &File, span: Span) -> Result<Vec<u8>> {
    if span.bytes() > vdso::BYTES_MAX {
        let what = format!("a vDSO of {} bytes", span.bytes());
        return Err(resources::Error::unsupported(pid, what).into());
    }
    let mut code = vec![0; span.bytes() as usize];
    let read = memory.read_exact_at(&mut code, span.start.0);
    read.map_err(|e| Error::kernel(format!("cannot read the vDSO of pid {pid}"), e))?;
    Ok(code)
}

/// Sees to a thread that was stopped inside the `kernel`'s vDSO of 32-bit programs. Nearly all are
/// there, as their calls are made there. Where the program knows another one (`own`), the thread
/// goes on there, which has the same instructions behind a call.
///
/// # Errors
/// [`freeze::Error::Returning`] for one in another function: it soon is in none.
fn finish_call_32(
    thread: &mut Thread,
    (kernel, code): (Span, &[u8]),
    own: Option<&(Span, Vec<u8>)>,
) -> Result<()> {
    let pid = thread.process.pid();
    let mut registers = thread.saved.registers;
    let at = registers.at().0 - kernel.start.0;
    let calling = vdso::calling_32(code).filter(|calling| calling.contains(&at));
    let Some(calling) = calling else {
        let returns = vdso::returns_32(code, at);
        return match returns && own.is_none() {
            true => Ok(()),
            false => Err(freeze::Error::Returning { pid }.into()),
        };
    };
    if let Some((span, bytes)) = own {
        let theirs = vdso::calling_32(bytes).ok_or(freeze::Error::Returning { pid })?;
        registers.go_to(span.start.plus(theirs.start + (at - calling.start)));
        thread.redirect(registers);
    }
    Ok(())
}

/// Has threads that were stopped inside the kernel's vDSO leave it, so that what they have read of
/// the kernel's data is not carried away. Gives the task's memory where it had to be opened.
///
/// # Errors
/// [`freeze::Error::Returning`] when one cannot leave now and would be nowhere after a restore.
pub(super) fn finish_vdso_calls(
    task: &mut Task,
    (seen, listed): (&Seen, &[Listed]),
    is_filtered: impl Fn(i32) -> bool,
) -> Result<Option<File>> {
    let Some(kernel) = seen.behind_proxy.or_else(|| code(listed)) else {
        return Ok(None);
    };
    let inside = |thread: &Thread| kernel.contains(thread.saved.registers.at());
    if !task.threads().iter().any(inside) {
        return Ok(None);
    }
    let memory = uffd::open_memory(task)?;
    let code = read_code(task.pid(), &memory, kernel)?;
    let pid = task.pid();
    let Body::Stopped(threads) = &mut task.body else {
        return Ok(None);
    };
    if seen.is_32_bit {
        let own = self::code(listed).filter(|_| seen.behind_proxy.is_some());
        let own = own.map(|own| Ok::<_, Error>((own, read_code(pid, &memory, own)?)));
        let own = own.transpose()?;
        for thread in threads.iter_mut().filter(|thread| inside(thread)) {
            finish_call_32(thread, (kernel, &code), own.as_ref())?;
        }
        return Ok(Some(memory));
    }
    for thread in threads.iter_mut().filter(|thread| inside(thread)) {
        let registers = thread.saved.registers;
        let slot = slot(&code, kernel, &registers);
        let call = match slot {
            Some(slot) => {
                let slot = (slot, is_filtered(thread.tid));
                tracee::finish_vdso_call(thread, &memory, (kernel, &code), slot)?
            }
            None => VdsoCall::Unfinished,
        };
        let tid = thread.tid;
        log::debug!("thread {tid} in the vDSO at {}: {call:?}", registers.at());
        let is_foreign = seen.behind_proxy.is_some();
        if call == VdsoCall::Protected || call == VdsoCall::Unfinished && is_foreign {
            return Err(freeze::Error::Returning { pid }.into());
        }
    }
    Ok(Some(memory))
}

/// Where the return address of the function stands that a thread is in.
fn slot(code: &[u8], span: Span, registers: &Registers) -> Option<Addr> {
    let elf = Elf::new(code)?;
    let (at, kept) = (registers.at().0 - span.start.0, |number| {
        registers.kept(number)
    });
    unwind::return_slot(&elf, at, &kept).map(Addr)
}
