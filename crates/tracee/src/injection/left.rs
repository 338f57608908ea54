//! Remains, in a process, of a tracer that was killed while threads were in the blob.

use std::fs::File;

use abi::{Addr, PAGE_BYTES, Span};
use sys::process::Process;

use super::{CODE_BYTES, Injection};
use crate::arch::{self, Ground, STUB_BYTES};
use crate::{Error, Result, Thread};

/// How far behind the blob's start a thread is looked for that is on its way back.
const AREA_BYTES: u64 = 1 << 20;

/// Where behind the blob's code an area says what it is.
pub(super) const TRAILER_AT: usize = CODE_BYTES - Trailer::BYTES;

/// The description of an area, which stands in the area itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Trailer {
    /// How many threads it is for.
    threads: u32,
    /// How much of it is code, in bytes.
    code_bytes: u32,
    /// Its size in bytes.
    area_bytes: u64,
}

impl Trailer {
    /// Its size in bytes.
    pub const BYTES: usize = 16;

    pub fn new(threads: usize, ground: &Ground) -> Self {
        let fits = |bytes: u64| u32::try_from(bytes).expect("less than the area, which fits");
        Self {
            threads: fits(threads as u64),
            code_bytes: fits(ground.code_bytes),
            area_bytes: ground.area.bytes(),
        }
    }

    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        out[..4].copy_from_slice(&self.threads.to_le_bytes());
        out[4..8].copy_from_slice(&self.code_bytes.to_le_bytes());
        out[8..].copy_from_slice(&self.area_bytes.to_le_bytes());
        out
    }

    /// Reads what `bytes`, the first of a mapping, say; nothing where they are no area's.
    fn parse(bytes: &[u8; CODE_BYTES]) -> Option<Self> {
        if !bytes.starts_with(blob::code()) {
            return None;
        }
        let (words, area_bytes) = bytes[TRAILER_AT..].split_at(8);
        let half = |at: usize| words[at..at + 4].try_into().expect("four bytes");
        let trailer = Self {
            threads: u32::from_le_bytes(half(0)),
            code_bytes: u32::from_le_bytes(half(4)),
            area_bytes: u64::from_le_bytes(area_bytes.try_into().expect("eight bytes")),
        };
        let Self {
            threads,
            code_bytes,
            area_bytes,
        } = trailer;
        let flags_end = u64::from(code_bytes) + u64::from(threads);
        let is_one = area_bytes % PAGE_BYTES == 0 && area_bytes <= 1 << 32;
        (is_one && flags_end <= area_bytes).then_some(trailer)
    }
}

/// An area that was left in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    /// Where it is.
    pub area: Span,
    /// True if a thread is on its way out of it, or was led away from there by a signal.
    pub is_busy: bool,
}

/// The areas of killed tracers that begin where one of `mappings` does, mappings of a stopped
/// process that may be executed; none of the process's threads may be in one.
///
/// # Errors
/// [`Error::Gone`], [`Error::Kernel`].
pub fn left_areas(process: &Process, mappings: &[Span]) -> Result<Vec<Left>> {
    const BEGINNING: usize = 64;
    let failed = |e| Error::of(process.pid(), "cannot read the code that it may run", e);
    // Nearly all are a program's own, which one look tells.
    let pieces = mappings.iter().map(|mapping| (mapping.start, BEGINNING));
    let mut beginnings = vec![0; mappings.len() * BEGINNING];
    let got = match mappings.is_empty() {
        true => 0,
        false => {
            let got = sys::vm::read_pieces(process, &pieces.collect::<Vec<_>>(), &mut beginnings);
            or_nothing(got).map_err(failed)?
        }
    };
    let ours = beginnings
        .chunks(BEGINNING)
        .enumerate()
        .filter(|(at, beginning)| {
            // A beginning that cannot be read with the others is looked at by itself.
            (at + 1) * BEGINNING > got || blob::code().starts_with(beginning)
        });
    let mut left = Vec::new();
    for (at, _) in ours {
        left.extend(left_area(process, mappings[at]).map_err(failed)?);
    }
    Ok(left)
}

fn left_area(process: &Process, mapping: Span) -> std::io::Result<Option<Left>> {
    let mut first = [0; CODE_BYTES];
    let got = read_some(process, mapping.start, &mut first)?;
    let trailer = got.then(|| Trailer::parse(&first)).flatten();
    let Some(trailer) = trailer else {
        return Ok(None);
    };
    let mut flags = vec![
        0;
        if trailer.threads > 1 {
            trailer.threads as usize
        } else {
            0
        }
    ];
    let at = mapping.start.plus(trailer.code_bytes.into());
    let is_whole = read_some(process, at, &mut flags)?;
    Ok(is_whole.then(|| Left {
        area: Span::new(mapping.start, trailer.area_bytes),
        is_busy: flags.iter().any(|flag| *flag != 0),
    }))
}

/// Reads memory of a process; tells whether all of it is there and may be read.
fn read_some(process: &Process, at: Addr, bytes: &mut [u8]) -> std::io::Result<bool> {
    if bytes.is_empty() {
        return Ok(true);
    }
    Ok(or_nothing(sys::vm::read(process, at, bytes))? == bytes.len())
}

/// How much was read, which is nothing where nothing may be read.
fn or_nothing(got: std::io::Result<usize>) -> std::io::Result<usize> {
    const EFAULT: i32 = libc::EFAULT;
    match got {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
        Err(error) if error.raw_os_error() == Some(EFAULT) => Ok(0),
        got => got,
    }
}

impl Injection {
    /// Removes an area that a killed tracer left, with no thread in it or on its way out
    /// ([`left_areas`]). The other arguments are those of [`Injection::new`].
    ///
    /// # Errors
    /// As [`Injection::new`] and [`Injection::cure`].
    ///
    /// # Panics
    /// Without threads.
    pub fn remove(
        threads: Vec<Thread>,
        memory: File,
        executable: &[Span],
        area: Span,
    ) -> Result<Vec<Thread>> {
        let mut injection = Self::new(threads, memory, executable)?;
        injection.put_stub(area.bytes())?;
        injection.area = Some(area);
        injection.cure()
    }
}

/// True if the code at `at` of a stopped process, in its mapping `span`, is a stub or belongs to
/// the blob: an injection was cut short, and the thread is still on its way back.
///
/// # Errors
/// [`Error::Gone`], [`Error::Kernel`].
pub fn is_injected(process: &Process, span: Span, at: Addr) -> Result<bool> {
    // The blob stands at the start of its area, a stub at the end of its page.
    let page = at.page_start();
    let start = span.start.max(Addr(page.0.saturating_sub(AREA_BYTES)));
    let mut code = vec![0; (page.0 + PAGE_BYTES - start.0) as usize];
    let failed = |e| Error::of(process.pid(), "cannot read the code that it runs", e);
    if !read_some(process, start, &mut code).map_err(failed)? {
        return Ok(false);
    }
    let stub = &code[code.len() - STUB_BYTES..];
    let in_stub = at.0 >= page.0 + PAGE_BYTES - STUB_BYTES as u64 && arch::is_stub(stub);
    let mut pages = code.chunks(PAGE_BYTES as usize);
    Ok(in_stub || pages.any(|page| page.starts_with(blob::code())))
}
