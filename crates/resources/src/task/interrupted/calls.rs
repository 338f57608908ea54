//! Which call that waits a number means, in 64-bit and in 32-bit code, and how its times are laid
//! out.

use std::time::Duration;

/// A call of which it matters what it is when a stop has ended its wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// close(2).
    Close,
    /// poll(2).
    Poll,
    /// nanosleep(2).
    Nanosleep,
    /// futex(2).
    Futex,
    /// restart_syscall(2).
    Restart,
    /// clock_nanosleep(2).
    ClockNanosleep,
    /// epoll_wait(2).
    EpollWait,
    /// epoll_pwait(2).
    EpollPwait,
    /// epoll_pwait2(2).
    EpollPwait2,
}

/// How the times of a call are laid out: seconds and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Times {
    /// Two words of 64 bits.
    Long,
    /// Two words of 32 bits, in 32-bit code.
    Short,
    /// One or the other: the kernel goes on with the call, and what it was is not told.
    Unknown,
}

/// A call by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    pub kind: Kind,
    pub times: Times,
    /// Whether 32-bit code makes it.
    pub is_32_bit: bool,
}

const CALLS_64: [(u64, Kind, Times); 9] = [
    (3, Kind::Close, Times::Long),
    (7, Kind::Poll, Times::Long),
    (35, Kind::Nanosleep, Times::Long),
    (202, Kind::Futex, Times::Long),
    (219, Kind::Restart, Times::Long),
    (230, Kind::ClockNanosleep, Times::Long),
    (232, Kind::EpollWait, Times::Long),
    (281, Kind::EpollPwait, Times::Long),
    (441, Kind::EpollPwait2, Times::Long),
];

const CALLS_32: [(u64, Kind, Times); 11] = [
    (0, Kind::Restart, Times::Long),
    (6, Kind::Close, Times::Long),
    (162, Kind::Nanosleep, Times::Short),
    (168, Kind::Poll, Times::Long),
    (240, Kind::Futex, Times::Short),
    (256, Kind::EpollWait, Times::Long),
    (267, Kind::ClockNanosleep, Times::Short),
    (319, Kind::EpollPwait, Times::Long),
    (407, Kind::ClockNanosleep, Times::Long),
    (422, Kind::Futex, Times::Long),
    (441, Kind::EpollPwait2, Times::Long),
];

fn table(is_32_bit: bool) -> &'static [(u64, Kind, Times)] {
    match is_32_bit {
        false => &CALLS_64,
        true => &CALLS_32,
    }
}

impl Call {
    /// The call with this number.
    pub fn of(is_32_bit: bool, number: u64) -> Option<Self> {
        let found = table(is_32_bit).iter().find(|known| known.0 == number);
        found.map(|&(_, kind, times)| Self {
            kind,
            times,
            is_32_bit,
        })
    }

    /// The call that the kernel goes on with for this one, which is restart_syscall(2).
    pub fn gone_on_with(self, kind: Kind) -> Self {
        let mut all = table(self.is_32_bit).iter();
        let times = match (self.is_32_bit, kind) {
            (true, Kind::ClockNanosleep | Kind::Futex) => Times::Unknown,
            _ => all
                .find(|known| known.1 == kind)
                .map_or(Times::Long, |it| it.2),
        };
        Self {
            kind,
            times,
            ..self
        }
    }

    /// Its number.
    pub fn number(self) -> u64 {
        let times = match self.times {
            Times::Unknown => Times::Long,
            known => known,
        };
        let mut all = table(self.is_32_bit).iter();
        let found = all.find(|known| known.1 == self.kind && known.2 == times);
        found.expect("every call is in both tables").0
    }

    /// Another one of the same kind of code.
    pub fn instead(self, kind: Kind) -> Self {
        Self {
            kind,
            times: Times::Long,
            ..self
        }
    }
}

/// Where 32-bit code has its stack; programs of 64 bits have none there but of their own making.
pub(super) fn may_be_32_bit(stack: u64) -> bool {
    stack <= u32::MAX.into()
}

/// Reads a time, and tells how it is laid out; `None` for what is none.
///
/// Of a layout that is not known, seconds are the same in both, but for a time of whole seconds in
/// short words, behind which something stands that looks like nanoseconds: less than a second.
pub(super) fn read_time(bytes: &[u8; 16], times: Times) -> Option<(Duration, Times)> {
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    let whole = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let time = |seconds: u64, nanos: u64| {
        let nanos = u32::try_from(nanos).ok().filter(|ns| *ns < 1_000_000_000)?;
        (seconds < 1 << 40).then(|| Duration::new(seconds, nanos))
    };
    let long = || Some((time(whole(0), whole(8))?, Times::Long));
    let short = || {
        let is_positive = half(0).cast_signed() >= 0;
        let read = time(half(0).into(), half(4).into()).filter(|_| is_positive);
        Some((read?, Times::Short))
    };
    match times {
        Times::Long => long(),
        Times::Short => short(),
        Times::Unknown if half(4) != 0 => short(),
        Times::Unknown => long().or_else(short),
    }
}

/// The bytes of a time.
pub(super) fn write_time(time: Duration, times: Times) -> [u8; 16] {
    let mut bytes = [0; 16];
    if times == Times::Short {
        let seconds = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
        let seconds = seconds.min(i32::MAX.unsigned_abs());
        bytes[..4].copy_from_slice(&seconds.to_le_bytes());
        bytes[4..8].copy_from_slice(&time.subsec_nanos().to_le_bytes());
    } else {
        bytes[..8].copy_from_slice(&time.as_secs().to_le_bytes());
        bytes[8..].copy_from_slice(&u64::from(time.subsec_nanos()).to_le_bytes());
    }
    bytes
}

#[cfg(test)]
mod tests {
    use syscalls::Sysno;

    use super::*;

    #[test]
    fn numbers_are_the_kernels() {
        let known = [
            (Kind::Close, Sysno::close),
            (Kind::Poll, Sysno::poll),
            (Kind::Nanosleep, Sysno::nanosleep),
            (Kind::Futex, Sysno::futex),
            (Kind::Restart, Sysno::restart_syscall),
            (Kind::ClockNanosleep, Sysno::clock_nanosleep),
            (Kind::EpollWait, Sysno::epoll_wait),
            (Kind::EpollPwait, Sysno::epoll_pwait),
            (Kind::EpollPwait2, Sysno::epoll_pwait2),
        ];
        for (wait, number) in known {
            let call = Call::of(false, number as u64).expect("known");
            assert_eq!((call.kind, call.number()), (wait, number as u64));
        }
        for (number, ..) in CALLS_32 {
            assert_eq!(Call::of(true, number).expect("known").number(), number);
        }
    }

    #[test]
    fn times_of_either_layout_are_read() {
        let time = Duration::new(77, 5_000_000);
        for times in [Times::Long, Times::Short] {
            let bytes = write_time(time, times);
            assert_eq!(read_time(&bytes, times), Some((time, times)));
            assert_eq!(read_time(&bytes, Times::Unknown), Some((time, times)));
        }
        let whole = Duration::from_secs(77);
        let mut short = write_time(whole, Times::Short);
        short[8..].fill(0xff);
        let read = read_time(&short, Times::Unknown);
        assert_eq!(read, Some((whole, Times::Short)));
        assert_eq!(read_time(&[0xff; 16], Times::Unknown), None);
    }
}
