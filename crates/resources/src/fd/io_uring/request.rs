//! A request that waits, in an image: the entry that submits it again.
//!
//! Such a request has done nothing yet. A dump leaves it alone; a restore submits another one with
//! the same words. Times are those that remain.

use prost::Message;
use rustix::time::ClockId;

/// Operations, as entries name them.
pub(super) mod operation {
    pub const READ_FIXED: u32 = 4;
    pub const POLL_ADD: u32 = 6;
    pub const RECVMSG: u32 = 10;
    pub const TIMEOUT: u32 = 11;
    pub const ACCEPT: u32 = 13;
    pub const LINK_TIMEOUT: u32 = 15;
    pub const READ: u32 = 22;
    pub const RECV: u32 = 27;
}

/// Flags of entries (`IOSQE_*`).
pub(super) mod entry {
    pub const FIXED_FILE: u32 = 1 << 0;
    pub const DRAIN: u32 = 1 << 1;
    pub const LINK: u32 = 1 << 2;
    pub const BUFFER_SELECT: u32 = 1 << 5;
    pub const SKIP_SUCCESS: u32 = 1 << 6;
    /// Those that a request has as long as it waits. One that was handed to a worker at once
    /// (`IOSQE_ASYNC`) waits like any other.
    pub const KEPT: u32 = FIXED_FILE | BUFFER_SELECT | SKIP_SUCCESS;
}

/// Flags of polls.
pub(super) mod poll {
    pub const MULTI: u32 = 1 << 0;
    pub const LEVEL: u32 = 1 << 3;
}

/// Flags of timeouts.
pub(super) mod timeout {
    use rustix::time::ClockId;

    pub const ABSOLUTE: u32 = 1 << 0;
    pub const BOOTTIME: u32 = 1 << 2;
    pub const REALTIME: u32 = 1 << 3;
    pub const ETIME_SUCCESS: u32 = 1 << 5;
    pub const MULTI: u32 = 1 << 6;
    pub const KEPT: u32 = ABSOLUTE | BOOTTIME | REALTIME | ETIME_SUCCESS;

    /// The clock by which the kernel ends a timeout. One that was set to no time of day keeps the
    /// time that remains, whatever the day's time becomes.
    pub fn clock(flags: u32) -> ClockId {
        match flags {
            flags if flags & BOOTTIME != 0 => ClockId::Boottime,
            flags if flags & REALTIME != 0 && flags & ABSOLUTE != 0 => ClockId::Realtime,
            _ => ClockId::Monotonic,
        }
    }
}

/// Flags of requests to receive and to accept (`ioprio`).
pub(super) mod receive {
    /// It waits before its first try.
    pub const POLL_FIRST: u32 = 1 << 0;
    pub const MULTI: u32 = 1 << 1;
    pub const KEPT: u32 = 0b1_0111;
}

/// Flags of requests to accept.
pub(super) mod accept {
    pub const MULTISHOT: u32 = 1 << 0;
    pub const KEPT: u32 = 0b111;
}

/// A request that waits.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Request {
    /// The thread that made it.
    #[prost(int32, tag = "1")]
    pub thread: i32,
    /// The operation.
    #[prost(uint32, tag = "2")]
    pub opcode: u32,
    /// Flags of the entry.
    #[prost(uint32, tag = "3")]
    pub flags: u32,
    /// Flags of operations on sockets, the priority of others.
    #[prost(uint32, tag = "4")]
    pub options: u32,
    /// The description that it waits for; none of one that has a registered file, or no file.
    #[prost(uint32, optional, tag = "5")]
    pub file: Option<u32>,
    /// The place of its registered file.
    #[prost(uint32, tag = "6")]
    pub slot: u32,
    /// An offset, a second address, or how many completions a timeout waits for.
    #[prost(uint64, tag = "7")]
    pub offset: u64,
    /// An address of the task's.
    #[prost(uint64, tag = "8")]
    pub address: u64,
    /// A length, or flags of a poll.
    #[prost(uint32, tag = "9")]
    pub len: u32,
    /// Events, or flags of the operation.
    #[prost(uint32, tag = "10")]
    pub operation_flags: u32,
    /// The program's own word for it.
    #[prost(uint64, tag = "11")]
    pub data: u64,
    /// The number of its registered buffer, or of the group that its buffer is from.
    #[prost(uint32, tag = "12")]
    pub buffer: u32,
    /// The place of the registered file that it makes.
    #[prost(uint32, tag = "13")]
    pub new_slot: u32,
    /// The nanoseconds that remain of a timeout.
    #[prost(uint64, tag = "14")]
    pub remaining_ns: u64,
    /// When a timeout ends that was set to a time of day.
    #[prost(uint64, optional, tag = "15")]
    pub deadline_ns: Option<u64>,
}

impl Request {
    /// Whether it is a timeout of its own, or of the request before it.
    pub fn is_timed(&self) -> bool {
        matches!(self.opcode, operation::TIMEOUT | operation::LINK_TIMEOUT)
    }

    /// Tells whether it goes on accepting connections.
    pub fn accepts_more(&self) -> bool {
        self.opcode == operation::ACCEPT && self.options & accept::MULTISHOT != 0
    }

    /// Tells whether its end takes data or a connection from its file.
    pub fn takes(&self) -> bool {
        !self.is_timed() && self.opcode != operation::POLL_ADD
    }

    /// Whether it reads, as read(2) does.
    pub fn reads(&self) -> bool {
        matches!(self.opcode, operation::READ | operation::READ_FIXED)
    }

    /// Whether it is a poll that goes on after its file was ready.
    pub fn is_repeated_poll(&self) -> bool {
        self.opcode == operation::POLL_ADD && self.len & (poll::MULTI | poll::LEVEL) == poll::MULTI
    }

    /// What no request that waits has, if it claims such a thing.
    pub fn nonsense(&self) -> Option<&'static str> {
        use operation::{ACCEPT, LINK_TIMEOUT, POLL_ADD, READ, READ_FIXED, RECV, RECVMSG, TIMEOUT};
        let known = match self.opcode {
            POLL_ADD => self.len & !(poll::MULTI | poll::LEVEL) == 0,
            TIMEOUT | LINK_TIMEOUT => self.operation_flags & !timeout::KEPT == 0,
            ACCEPT => self.options & !accept::KEPT == 0,
            RECV | RECVMSG => self.options & !receive::KEPT == 0,
            READ | READ_FIXED => true,
            _ => return Some("an unknown operation"),
        };
        let has_file = self.file.is_some() || self.flags & entry::FIXED_FILE != 0;
        match () {
            () if !known => Some("unknown flags of its operation"),
            () if self.flags & !(entry::KEPT | entry::LINK) != 0 => Some("unknown flags"),
            () if has_file == self.is_timed() => Some("a file too many or too few"),
            () if self.options > u16::MAX.into() || self.buffer > u16::MAX.into() => {
                Some("numbers too large")
            }
            () => None,
        }
    }

    /// The entry that submits it (`struct io_uring_sqe`), whose file has number `fd`. The time of a
    /// timeout is at `time`.
    pub fn entry(&self, fd: i32, time: u64) -> [u32; 16] {
        let fd = match self.flags & entry::FIXED_FILE != 0 {
            true => self.slot,
            false => fd.cast_unsigned(),
        };
        let (address, len) = match self.is_timed() {
            true => (time, 1),
            false => (self.address, self.len),
        };
        // It may be that the socket cannot be read yet: it is not before somebody sends something.
        let options = match self.opcode {
            operation::RECV | operation::RECVMSG => self.options | receive::POLL_FIRST,
            _ => self.options,
        };
        let halves = |word: u64| [word as u32, (word >> 32) as u32];
        let ([offset, offset_high], [at, at_high]) = (halves(self.offset), halves(address));
        let [data, data_high] = halves(self.data);
        let mut words = [0; 16];
        words[0] = self.opcode | self.flags << 8 | options << 16;
        words[1..8].copy_from_slice(&[
            fd,
            offset,
            offset_high,
            at,
            at_high,
            len,
            self.operation_flags,
        ]);
        words[8..12].copy_from_slice(&[data, data_high, self.buffer, self.new_slot]);
        words
    }

    /// The time with which a timeout is submitted, in nanoseconds.
    pub fn time_ns(&self) -> u64 {
        let remaining_ns = self.remaining_ns.max(1);
        match self.deadline_ns {
            Some(deadline_ns) => deadline_ns,
            None if self.operation_flags & timeout::ABSOLUTE != 0 => {
                let clock = timeout::clock(self.operation_flags);
                now_ns(clock).saturating_add(remaining_ns)
            }
            None => remaining_ns,
        }
    }
}

/// The time of a clock.
pub(super) fn now_ns(clock: ClockId) -> u64 {
    const BILLION: u64 = 1_000_000_000;
    let now = rustix::time::clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * BILLION + u64::try_from(now.tv_nsec).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_has_the_words_of_its_request() {
        let request = Request {
            opcode: operation::RECV,
            flags: entry::SKIP_SUCCESS,
            options: receive::MULTI,
            file: Some(3),
            address: 0x1_2000_0000,
            len: 77,
            operation_flags: 5,
            data: 0xabc_0000_0001,
            buffer: 9,
            ..Request::default()
        };
        assert_eq!(request.nonsense(), None);
        let words = request.entry(42, 0);
        let want = [0x0003_401b, 42, 0, 0, 0x2000_0000, 1, 77, 5, 1, 0xabc, 9, 0];
        assert_eq!(words[..12], want);
    }

    #[test]
    fn timeout_is_submitted_with_the_time_that_remains() {
        let timeout = |operation_flags, deadline_ns| Request {
            opcode: operation::TIMEOUT,
            operation_flags,
            remaining_ns: 5_000,
            deadline_ns,
            ..Request::default()
        };
        assert_eq!(timeout(0, None).time_ns(), 5_000);
        assert_eq!(timeout(0, None).entry(-1, 4096)[4..7], [4096, 0, 1]);
        let absolute = timeout(timeout::ABSOLUTE, None).time_ns();
        assert!(absolute > 5_000 + now_ns(ClockId::Monotonic) - 1_000_000_000);
        let of_day = timeout::ABSOLUTE | timeout::REALTIME;
        assert_eq!(timeout(of_day, Some(99)).time_ns(), 99);
    }
}
