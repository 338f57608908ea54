//! Contexts as the kernel has them.
//!
//! **Whether requests are under way** is told by the references that a context counts: one for each
//! request, from before it is submitted until nothing is left of it, its event posted and its
//! eventfd told, and one of its own. Each processor counts those that were taken and given back on
//! it. While nobody submits, requests are only given back, so that the sum, however long it takes
//! to look at one processor after the other, is never too low. The room that requests take in the
//! ring is counted as well; both must say that there are none.

use std::io::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;

use super::Context;
use crate::kernel::{Kernel, PerCpu};

/// A context of a process that is stopped.
#[derive(Clone, Debug)]
pub struct Looked {
    /// What an image has of it, but the contents of its ring.
    pub context: Context,
    /// How long its ring is, in bytes.
    pub bytes: u64,
    /// How many requests are under way.
    pub under_way: u64,
    /// Whether one of them waits for what may never come.
    pub waits: bool,
    /// Whether what is counted of it fits together.
    pub adds_up: bool,
}

/// Looks at the contexts of the process whose memory (/proc/PID/mem) this is.
///
/// # Errors
/// `Unsupported`, with the reason, where the kernel may not be looked into or calls something by
/// another name.
pub fn look(memory: BorrowedFd<'_>) -> Result<Vec<Looked>> {
    let why = |why: &str| Error::new(ErrorKind::Unsupported, why.to_owned());
    let kernel = Kernel::get().map_err(why)?;
    let mm = kernel.private(kernel.file(memory)?)?;
    let table = match kernel.read("mm_struct", mm)?.word("ioctx_table")? {
        0 => return Ok(Vec::new()),
        table => kernel.read("kioctx_table", table)?,
    };
    const MOST: u32 = 1 << 20;
    let count = table.half("nr")?.min(MOST) as usize;
    let contexts = kernel.words(table.address("table")?, count)?;
    let contexts = contexts.into_iter().filter(|context| *context != 0);
    let per_cpu = kernel.per_cpu()?;
    contexts.map(|at| look_at(kernel, per_cpu, at)).collect()
}

fn look_at(kernel: &Kernel, per_cpu: &PerCpu, at: u64) -> Result<Looked> {
    /// Marks in the address of counters by processor: there is one counter instead; it is ending.
    const MARKS: u64 = 3;
    /// The reference of a context's own.
    const OWN: u64 = 1;
    let context = kernel.read("kioctx", at)?;
    let references = context.word("reqs.percpu_count_ptr")?;
    if references & MARKS != 0 {
        let what = "a context is ending";
        return Err(Error::new(ErrorKind::Unsupported, what));
    }
    let mut taken = 0_u64;
    for at in per_cpu.all(references) {
        taken = taken.wrapping_add(kernel.word(at)?);
    }
    let events = context.half("nr_events")?;
    let mut room = context.half("reqs_available")?;
    let kept = context.word("cpu")?;
    for at in per_cpu.all(kept) {
        room = room.wrapping_add(kernel.read("kioctx_cpu", at)?.half("reqs_available")?);
    }
    let (tail, posted) = (context.half("tail")?, context.half("completed_events")?);
    let used = events
        .wrapping_sub(1)
        .wrapping_sub(room)
        .wrapping_sub(posted);
    let under_way = taken.wrapping_sub(OWN);
    Ok(Looked {
        context: Context {
            address: context.word("user_id")?,
            max_requests: context.half("max_reqs")?,
            tail,
            contents: Vec::new(),
        },
        bytes: context.word("mmap_size")?,
        under_way,
        waits: !context.is_empty_list("active_reqs")?,
        adds_up: u64::from(used) == under_way && tail < events,
    })
}
