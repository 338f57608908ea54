//! A ring as the kernel has it.
//!
//! **Whether requests are under way** is told by two numbers of the kernel's own: how many requests
//! a ring has allocated, and how many of those stand in the list of free ones. A request leaves
//! that list when it is submitted and comes back when nothing of it is left: its completion is
//! posted, its file and buffers are given up, no worker has it, no timer and no wait queue. What is
//! not free is under way, whatever it is waiting for. Counting entries and completions would not
//! tell: one request may have many completions (multishot, zero copy), or none.

use std::io::Result;
use std::os::fd::BorrowedFd;

use super::pending::{self, PendingRequest, Refusal};
use crate::kernel::{Kernel, Structure};

/// Flags of io_uring_setup(2).
pub(super) mod flag {
    pub const IOPOLL: u32 = 1 << 0;
    pub const SQPOLL: u32 = 1 << 1;
    pub const CQSIZE: u32 = 1 << 3;
    pub const CLAMP: u32 = 1 << 4;
    pub const ATTACH_WQ: u32 = 1 << 5;
    pub const R_DISABLED: u32 = 1 << 6;
    pub const SUBMIT_ALL: u32 = 1 << 7;
    pub const COOP_TASKRUN: u32 = 1 << 8;
    pub const TASKRUN_FLAG: u32 = 1 << 9;
    pub const SQE128: u32 = 1 << 10;
    pub const CQE32: u32 = 1 << 11;
    pub const SINGLE_ISSUER: u32 = 1 << 12;
    pub const DEFER_TASKRUN: u32 = 1 << 13;
    pub const NO_MMAP: u32 = 1 << 14;
    pub const NO_SQARRAY: u32 = 1 << 16;
    pub const HYBRID_IOPOLL: u32 = 1 << 17;
    /// Those with which rings are made again.
    pub const KEPT: u32 = IOPOLL
        | R_DISABLED
        | SUBMIT_ALL
        | COOP_TASKRUN
        | TASKRUN_FLAG
        | SQE128
        | CQE32
        | SINGLE_ISSUER
        | DEFER_TASKRUN
        | NO_SQARRAY
        | HYBRID_IOPOLL;
    /// Those that say no more than what is known otherwise.
    pub const SAID: u32 = CQSIZE | CLAMP | ATTACH_WQ;
}

/// What the kernel has of a ring.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub flags: u32,
    pub sq_entries: u32,
    pub cq_entries: u32,
    /// How many entries the kernel has taken, and how many completions it has posted.
    pub sq_head: u32,
    pub cq_tail: u32,
    /// Whether entries that post no completion have been used.
    pub has_skipped: bool,
    pub submitter: Submitter,
    /// Registered files and the range of slots given to those that choose none.
    pub files: Vec<Option<Registered<u64>>>,
    pub slots: (u32, u32),
    pub buffers: Vec<Option<Registered<Buffer>>>,
    /// The kernel's address of an eventfd's counter, and whether it is told of completions by
    /// others than the submitter alone.
    pub eventfd: Option<(u64, bool)>,
    pub worker_limits: Option<[u32; 2]>,
    /// The sizes of the ring's memory: queues and entries.
    pub pages: [usize; 2],
    /// The kernel's address of the description of its first page.
    pub first_page: u64,
    /// Under which numbers threads have registered it.
    pub numbers: Vec<(i32, u32)>,
    /// The requests that wait.
    pub waiting: Vec<PendingRequest>,
}

/// Who alone may submit, of a ring that has such a one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Submitter {
    /// Anybody.
    #[default]
    Any,
    /// Nobody any more: the thread has ended.
    Gone,
    /// A thread.
    Thread(i32),
}

/// Something registered, and its tag.
#[derive(Clone, Debug)]
pub(super) struct Registered<T> {
    pub what: T,
    pub tag: u64,
}

/// A registered buffer.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub address: u64,
    pub len_bytes: u32,
    /// The pages that the kernel keeps for it.
    pub segments: Vec<Segment>,
}

/// Part of a buffer, in consecutive pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    /// The kernel's address of the first page's description.
    pub page: u64,
    /// Where it begins there, in bytes, and how long it is.
    pub offset: u64,
    pub len_bytes: u64,
}

/// Why a ring is not saved, and whether that passes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Hindrance {
    /// It stays so.
    Lasting(String),
    /// It is another way soon.
    Passing(String),
}

/// Looks at a ring; gives why it cannot be saved where it cannot.
pub(super) fn look(
    kernel: &Kernel,
    own: BorrowedFd<'_>,
) -> Result<std::result::Result<Seen, Hindrance>> {
    let file = kernel.file(own)?;
    let ring = kernel.read("io_ring_ctx", kernel.private(file)?)?;
    if let Some(why) = hindrance(&ring)? {
        return Ok(Err(Hindrance::Lasting(why)));
    }
    let under_way = under_way(kernel, &ring)?;
    let waiting = match under_way {
        0 => Vec::new(),
        _ => match pending::look(kernel, &ring, under_way)? {
            Ok(waiting) => waiting,
            Err(Refusal::Lasting(what)) => {
                let why = format!("a request is under way that may never end: {what}");
                return Ok(Err(Hindrance::Lasting(why)));
            }
            Err(Refusal::Passing) => {
                let why = format!("{under_way} requests are under way");
                return Ok(Err(Hindrance::Passing(why)));
            }
        },
    };
    if !ring.is_empty_list("cq_overflow_list")? {
        let why = "its completion queue has overflowed".to_owned();
        return Ok(Err(Hindrance::Passing(why)));
    }
    let mut seen = read(kernel, &ring)?;
    let buffers = buffers(kernel, &ring)?;
    let Ok(buffers) = buffers else {
        let why = "a registered buffer is the kernel's".to_owned();
        return Ok(Err(Hindrance::Lasting(why)));
    };
    (seen.buffers, seen.numbers) = (buffers, numbers(kernel, &ring, file)?);
    seen.waiting = waiting;
    Ok(Ok(seen))
}

/// What of a ring is not made again.
fn hindrance(ring: &Structure<'_>) -> Result<Option<String>> {
    let flags = ring.half("flags")?;
    let named = [
        (
            flag::SQPOLL,
            "the kernel polls it for entries (IORING_SETUP_SQPOLL)",
        ),
        (
            flag::NO_MMAP,
            "it is in the program's own memory (IORING_SETUP_NO_MMAP)",
        ),
    ];
    if let Some((_, why)) = named.iter().find(|(flag, _)| flags & flag != 0) {
        return Ok(Some((*why).to_owned()));
    }
    let unknown = flags & !(flag::KEPT | flag::SAID);
    if unknown != 0 {
        return Ok(Some(format!("it has flags {unknown:#x}")));
    }
    const CLOCK_MONOTONIC: u32 = linux_raw_sys::general::CLOCK_MONOTONIC;
    const NAPI_INACTIVE: u8 = 255;
    let states = [
        (
            ring.byte("restrictions.registered")? != 0,
            "it has restrictions",
        ),
        (
            ring.word("personalities.xa_head")? != 0,
            "it has registered personalities",
        ),
        (
            ring.word("io_bl_xa.xa_head")? != 0,
            "it has groups of provided buffers",
        ),
        (
            ring.word("zcrx_ctxs.xa_head")? != 0,
            "it receives without copies",
        ),
        (
            ring.half("param_region.nr_pages")? != 0,
            "it has a registered region",
        ),
        (ring.word("cq_wait_size")? != 0, "it has registered waits"),
        (
            ring.half("clockid")? != CLOCK_MONOTONIC,
            "it waits by another clock",
        ),
        (
            ring.byte("napi_track_mode")? != NAPI_INACTIVE,
            "it polls network devices",
        ),
        (ring.bit("compat")?, "it was made by 32-bit code"),
    ];
    let state = states.into_iter().find(|(is_so, _)| *is_so);
    Ok(state.map(|(_, why)| why.to_owned()))
}

/// Counts the requests that are not free.
fn under_way(kernel: &Kernel, ring: &Structure<'_>) -> Result<u32> {
    let allocated = ring.half("nr_req_allocated")?;
    let mut free = 0;
    let mut next = ring.word("submit_state.free_list")?;
    while next != 0 && free < allocated {
        free += 1;
        next = kernel.word(next)?;
    }
    Ok(allocated - free)
}

/// What there is of a ring besides its requests.
fn read(kernel: &Kernel, ring: &Structure<'_>) -> Result<Seen> {
    let submitter = match ring.word("submitter_task")? {
        0 => Submitter::Any,
        task => kernel.tid(task)?.map_or(Submitter::Gone, Submitter::Thread),
    };
    let eventfd = match ring.word("io_ev_fd")? {
        0 => None,
        at => {
            let eventfd = kernel.read("io_ev_fd", at)?;
            Some((
                eventfd.word("cq_ev_fd")?,
                eventfd.half("eventfd_async")? != 0,
            ))
        }
    };
    let limits = ring.word("iowq_limits")?;
    let limits = [limits as u32, (limits >> 32) as u32];
    let slots = (ring.half("file_alloc_start")?, ring.half("file_alloc_end")?);
    Ok(Seen {
        flags: ring.half("flags")? & flag::KEPT,
        sq_entries: ring.half("sq_entries")?,
        cq_entries: ring.half("cq_entries")?,
        sq_head: ring.half("cached_sq_head")?,
        cq_tail: ring.half("cached_cq_tail")?,
        has_skipped: ring.bit("drain_disabled")?,
        submitter,
        files: files(kernel, ring)?,
        slots,
        eventfd,
        worker_limits: ring.bit("iowq_limits_set")?.then_some(limits),
        pages: [
            ring.half("ring_region.nr_pages")? as usize,
            ring.half("sq_region.nr_pages")? as usize,
        ],
        first_page: kernel.word(ring.word("ring_region.pages")?)?,
        ..Seen::default()
    })
}

/// The nodes of a table of what is registered.
fn nodes<'a>(
    kernel: &'a Kernel,
    ring: &Structure<'_>,
    [count, table]: [&str; 2],
) -> Result<Vec<Option<Structure<'a>>>> {
    let count = ring.half(count)? as usize;
    if count == 0 {
        return Ok(Vec::new());
    }
    let nodes = kernel.words(ring.word(table)?, count)?.into_iter();
    let node = |at| {
        (at != 0)
            .then(|| kernel.read("io_rsrc_node", at))
            .transpose()
    };
    nodes.map(node).collect()
}

fn files(kernel: &Kernel, ring: &Structure<'_>) -> Result<Vec<Option<Registered<u64>>>> {
    /// Marks in the address of a file: it may be asked not to wait, and is a regular one.
    const MARKS: u64 = 3;
    let nodes = nodes(
        kernel,
        ring,
        ["file_table.data.nr", "file_table.data.nodes"],
    )?;
    let file = |node: Structure<'_>| {
        Ok(Registered {
            what: node.word("file_ptr")? & !MARKS,
            tag: node.word("tag")?,
        })
    };
    nodes
        .into_iter()
        .map(|node| node.map(file).transpose())
        .collect()
}

/// The registered buffers; nothing where one is not a program's.
#[allow(clippy::type_complexity)]
fn buffers(
    kernel: &Kernel,
    ring: &Structure<'_>,
) -> Result<std::result::Result<Vec<Option<Registered<Buffer>>>, ()>> {
    let mut buffers = Vec::new();
    for node in nodes(kernel, ring, ["buf_table.nr", "buf_table.nodes"])? {
        let Some(node) = node else {
            buffers.push(None);
            continue;
        };
        let buffer = match node.word("buf")? {
            0 => {
                buffers.push(None);
                continue;
            }
            at => kernel.read("io_mapped_ubuf", at)?,
        };
        if buffer.byte("is_kbuf")? != 0 {
            return Ok(Err(()));
        }
        let what = Buffer {
            address: buffer.word("ubuf")?,
            len_bytes: buffer.half("len")?,
            segments: segments(kernel, &buffer)?,
        };
        let tag = node.word("tag")?;
        buffers.push(Some(Registered { what, tag }));
    }
    Ok(Ok(buffers))
}

/// The pages that the kernel keeps for a buffer.
fn segments(kernel: &Kernel, buffer: &Structure<'_>) -> Result<Vec<Segment>> {
    let (count, mut at) = (buffer.half("nr_bvecs")?, buffer.address("bvec")?);
    let mut segments = Vec::new();
    for _ in 0..count {
        let segment = kernel.read("bio_vec", at)?;
        at += segment.size();
        segments.push(Segment {
            page: segment.word("bv_page")?,
            offset: segment.half("bv_offset")?.into(),
            len_bytes: segment.half("bv_len")?.into(),
        });
    }
    Ok(segments)
}

/// Under which numbers threads have registered the ring.
fn numbers(kernel: &Kernel, ring: &Structure<'_>, file: u64) -> Result<Vec<(i32, u32)>> {
    const RING_NUMBERS: usize = 16;
    const MANY: usize = 1 << 20;
    let mut numbers = Vec::new();
    let mut next = ring.word("tctx_list")?;
    for _ in 0..MANY {
        if next == ring.address("tctx_list")? {
            break;
        }
        // It begins with its place in the list.
        let node = kernel.read("io_tctx_node", next)?;
        next = node.word("ctx_node")?;
        let task = kernel.read("task_struct", node.word("task")?)?;
        let own = task.word("io_uring")?;
        if own == 0 {
            continue;
        }
        let own = kernel.read("io_uring_task", own)?;
        let rings = kernel.words(own.address("registered_rings")?, RING_NUMBERS)?;
        let mine = (0..).zip(rings).filter(|(_, ring)| *ring == file);
        let mine = mine.map(|(number, _)| number).collect::<Vec<_>>();
        if let Some(tid) = kernel.tid(task.at)?.filter(|_| !mine.is_empty()) {
            numbers.extend(mine.into_iter().map(|number| (tid, number)));
        }
    }
    Ok(numbers)
}
