//! Requests that are under way and wait: what the kernel has of them.
//!
//! A poll, and a request that waits until its file is ready, stands in a table of the ring's; a
//! timeout in a list. Nothing of them has happened as long as nobody has begun to wake them. What
//! is in neither ends by itself.

use std::io::Result;

use super::header::Header;
use super::request::{Request, accept, entry, now_ns, operation, poll, receive, timeout};
use crate::kernel::{Kernel, Structure};

/// A request that waits.
#[derive(Clone, Debug, Default)]
pub(super) struct PendingRequest {
    /// Without its file.
    pub request: Request,
    /// The kernel's address of its file; 0 where it has none.
    pub file: u64,
    /// The header of the message that it receives, if it has one.
    pub header: Option<Header>,
}

/// Why requests are not made again.
pub(super) enum Refusal {
    /// Of one that stays.
    Lasting(String),
    /// They are another way soon.
    Passing,
}

/// What is told of requests, or why they are not made again.
pub(super) type Outcome<T> = std::result::Result<T, Refusal>;

/// The requests of a ring that wait, of `under_way` ones.
pub(super) fn look(
    kernel: &Kernel,
    ring: &Structure<'_>,
    under_way: u32,
) -> Result<Outcome<Vec<PendingRequest>>> {
    let waiting = Ring {
        kernel,
        ring,
        most: under_way as usize,
    };
    waiting.all()
}

/// A ring with requests under way.
struct Ring<'a> {
    kernel: &'a Kernel,
    ring: &'a Structure<'a>,
    most: usize,
}

impl Ring<'_> {
    fn all(&self) -> Result<Outcome<Vec<PendingRequest>>> {
        if let Some(what) = self.hindrance()? {
            return Ok(Err(Refusal::Lasting(what)));
        }
        let link = ("io_timeout", "list");
        let polled = self.polled()?;
        let Ok(timeouts) = self.ring.listed("timeout_list", link, self.most + 1) else {
            return Ok(Err(Refusal::Passing));
        };
        for at in &polled {
            // Somebody has begun to wake it.
            if self.kernel.half_of("io_kiocb", "poll_refs.counter", *at)? != 0 {
                return Ok(Err(Refusal::Passing));
            }
        }
        let mut all = Vec::new();
        // Those first that count others.
        for at in timeouts.iter().map(|one| one.at).chain(polled) {
            match self.read(at)? {
                Ok(requests) => all.extend(requests),
                Err(refusal) => return Ok(Err(refusal)),
            }
        }
        match all.len() == self.most {
            true => Ok(Ok(all)),
            false => Ok(Err(Refusal::Passing)),
        }
    }

    /// What waits that is not made again at all.
    fn hindrance(&self) -> Result<Option<String>> {
        if !self.ring.is_empty_list("defer_list")? {
            return Ok(Some("one that waits for others".to_owned()));
        }
        for (list, what) in [
            ("futex_list", "a wait for a futex"),
            ("waitid_list", "a wait for a process"),
            ("cancelable_uring_cmd", "a command of a device"),
        ] {
            if self.ring.word(list)? != 0 {
                return Ok(Some(what.to_owned()));
            }
        }
        Ok(None)
    }

    /// Polls, and requests that wait until their file is ready.
    fn polled(&self) -> Result<Vec<u64>> {
        let bits = self.ring.half("cancel_table.hash_bits")?;
        let mut at = self.ring.word("cancel_table.hbs")?;
        let mut polled = Vec::new();
        for _ in 0..1 << bits.min(16) {
            let bucket = self.kernel.read("io_hash_bucket", at)?;
            at += bucket.size();
            let mut node = bucket.word("list")?;
            while node != 0 && polled.len() <= self.most {
                polled.push(self.kernel.around("io_kiocb", "hash_node", node)?);
                node = self.kernel.word(node)?;
            }
        }
        Ok(polled)
    }

    /// A request, with its timeout where it has one.
    fn read(&self, at: u64) -> Result<Outcome<Vec<PendingRequest>>> {
        let request = self.kernel.read("io_kiocb", at)?;
        let mut first = match self.one(&request)? {
            Ok(first) => first,
            refused => return Ok(refused.map(|one| vec![one])),
        };
        let link = request.word("link")?;
        if link == 0 {
            return Ok(Ok(vec![first]));
        }
        let second = self.kernel.read("io_kiocb", link)?;
        let limit = self.kernel.read("io_timeout", link)?;
        if u32::from(second.byte("opcode")?) != operation::LINK_TIMEOUT
            || second.word("link")? != 0
            || first.request.is_timed()
        {
            let what = "one that others are linked to".to_owned();
            return Ok(Err(Refusal::Lasting(what)));
        }
        // One that has begun is in a list.
        let is_begun = limit.word("list")? != limit.address("list")?;
        if !is_begun || limit.word("head")? != at {
            return Ok(Err(Refusal::Passing));
        }
        first.request.flags |= entry::LINK;
        Ok(self.one(&second)?.map(|second| vec![first, second]))
    }

    fn one(&self, request: &Structure<'_>) -> Result<Outcome<PendingRequest>> {
        let opcode = u32::from(request.byte("opcode")?);
        let flags = request.word("flags")? as u32;
        if flags & entry::DRAIN != 0 {
            return Ok(Err(Refusal::Lasting(
                "one that waits for others".to_owned(),
            )));
        }
        let owner = self.kernel.read("io_uring_task", request.word("tctx")?)?;
        let Some(thread) = self.kernel.tid(owner.word("task")?)? else {
            return Ok(Err(Refusal::Passing));
        };
        let base = Request {
            thread,
            opcode,
            flags: flags & entry::KEPT,
            data: request.word("cqe.user_data")?,
            ..Request::default()
        };
        let made = match opcode {
            operation::POLL_ADD => self.poll(request, base)?,
            operation::TIMEOUT | operation::LINK_TIMEOUT => {
                let made = self.timeout(request, base)?;
                return Ok(made.map(|request| PendingRequest {
                    request,
                    ..PendingRequest::default()
                }));
            }
            operation::ACCEPT => self.accept(request, base)?,
            operation::RECV | operation::RECVMSG => self.receive(request, base)?,
            operation::READ | operation::READ_FIXED => self.read_file(request, base)?,
            _ => {
                let what = "one that waits until its file is ready";
                Err(Refusal::Lasting(format!("{what} (operation {opcode})")))
            }
        };
        let mut request_made = match made {
            Ok(made) => made,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let header = match opcode {
            operation::RECVMSG => {
                let kept = request.word("async_data")?;
                let kept = self.kernel.read("io_async_msghdr", kept)?;
                Header::of_kernel(&kept, |at, count| self.kernel.words(at, count))?
            }
            _ => None,
        };
        let file = request.word("file")?;
        if request_made.flags & entry::FIXED_FILE != 0 {
            match self.slot(request.word("file_node")?)? {
                Some(slot) => request_made.slot = slot,
                // Another one is there now, and this one has kept its file.
                None => request_made.flags &= !entry::FIXED_FILE,
            }
        }
        Ok(Ok(PendingRequest {
            request: request_made,
            file,
            header,
        }))
    }

    /// The place of a registered file.
    fn slot(&self, node: u64) -> Result<Option<u32>> {
        let count = self.ring.half("file_table.data.nr")? as usize;
        if count == 0 {
            return Ok(None);
        }
        let nodes = self.ring.word("file_table.data.nodes")?;
        let nodes = self.kernel.words(nodes, count)?;
        let place = nodes.iter().position(|one| *one == node);
        Ok(place.map(|place| place as u32))
    }

    fn poll(&self, request: &Structure<'_>, base: Request) -> Result<Outcome<Request>> {
        const ONESHOT: u32 = 1 << 30;
        const EDGE: u32 = 1 << 31;
        let events = self.kernel.read("io_poll", request.at)?.half("events")?;
        let multi = if events & ONESHOT == 0 {
            poll::MULTI
        } else {
            0
        };
        let level = if events & EDGE == 0 { poll::LEVEL } else { 0 };
        Ok(Ok(Request {
            len: multi | level,
            operation_flags: events & !(ONESHOT | EDGE),
            ..base
        }))
    }

    fn timeout(&self, request: &Structure<'_>, base: Request) -> Result<Outcome<Request>> {
        let timeout = self.kernel.read("io_timeout", request.at)?;
        let time = self
            .kernel
            .read("io_timeout_data", request.word("async_data")?)?;
        if time.word("req")? != request.at {
            return Ok(Err(Refusal::Passing));
        }
        let flags = time.half("flags")?;
        if flags & !timeout::KEPT != 0 {
            let what = match flags & timeout::MULTI != 0 {
                true => "a timeout that repeats".to_owned(),
                false => format!("a timeout with flags {flags:#x}"),
            };
            return Ok(Err(Refusal::Lasting(what)));
        }
        let mut count = timeout.half("off")?;
        if count != 0 {
            let posted = self.ring.half("cached_cq_tail")?;
            let posted = posted.wrapping_sub(self.ring.half("cq_timeouts.counter")?);
            count = timeout.half("target_seq")?.wrapping_sub(posted);
            if count.cast_signed() <= 0 {
                return Ok(Err(Refusal::Passing));
            }
        }
        let ends_ns = time.word("timer._softexpires")?;
        let is_of_day = flags & (timeout::ABSOLUTE | timeout::REALTIME);
        let is_of_day = is_of_day == timeout::ABSOLUTE | timeout::REALTIME;
        Ok(Ok(Request {
            offset: count.into(),
            operation_flags: flags,
            remaining_ns: ends_ns.saturating_sub(now_ns(timeout::clock(flags))),
            deadline_ns: is_of_day.then_some(ends_ns),
            ..base
        }))
    }

    fn accept(&self, request: &Structure<'_>, base: Request) -> Result<Outcome<Request>> {
        let accept = self.kernel.read("io_accept", request.at)?;
        let options = accept.half("iou_flags")?;
        if options & !accept::KEPT != 0 {
            let what = format!("an accept with flags {options:#x}");
            return Ok(Err(Refusal::Lasting(what)));
        }
        Ok(Ok(Request {
            options,
            address: accept.word("addr")?,
            offset: accept.word("addr_len")?,
            operation_flags: accept.half("flags")?,
            new_slot: accept.half("file_slot")?,
            ..base
        }))
    }

    fn receive(&self, request: &Structure<'_>, base: Request) -> Result<Outcome<Request>> {
        let receive = self.kernel.read("io_sr_msg", request.at)?;
        let options = u32::from(receive.short("flags")?.cast_unsigned());
        if options & !receive::KEPT != 0 {
            let what = format!("a receive with flags {options:#x}");
            return Ok(Err(Refusal::Lasting(what)));
        }
        if receive.half("done_io")? != 0 {
            return Ok(Err(Refusal::Lasting("a receive that has begun".to_owned())));
        }
        let selects = base.flags & entry::BUFFER_SELECT != 0;
        let has_own = self.kernel.has("io_sr_msg", "mshot_len");
        let len = match options & receive::MULTI != 0 && has_own {
            true => receive.half("mshot_len")?,
            false => receive.half("len")?,
        };
        Ok(Ok(Request {
            options,
            address: if selects { 0 } else { receive.word("buf")? },
            len,
            operation_flags: receive.half("msg_flags")?,
            buffer: if selects {
                receive.short("buf_group")?.cast_unsigned().into()
            } else {
                request.short("buf_index")?.cast_unsigned().into()
            },
            ..base
        }))
    }

    fn read_file(&self, request: &Structure<'_>, base: Request) -> Result<Outcome<Request>> {
        let read = self.kernel.read("io_rw", request.at)?;
        let more = request.word("async_data")?;
        if more != 0 && self.kernel.read("io_async_rw", more)?.word("bytes_done")? != 0 {
            return Ok(Err(Refusal::Lasting("a read that has begun".to_owned())));
        }
        let selects = base.flags & entry::BUFFER_SELECT != 0;
        Ok(Ok(Request {
            options: read.short("kiocb.ki_ioprio")?.cast_unsigned().into(),
            offset: read.word("kiocb.ki_pos")?,
            address: if selects { 0 } else { read.word("addr")? },
            len: read.half("len")?,
            operation_flags: read.half("flags")?,
            buffer: request.short("buf_index")?.cast_unsigned().into(),
            ..base
        }))
    }
}
