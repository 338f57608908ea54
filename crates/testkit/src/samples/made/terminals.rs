//! Pseudo terminals: every flag of their modes, characters, speeds, sizes and switches.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, Winsize, tcgetattr, tcgetwinsize, tcsetattr, tcsetwinsize};
use sys::tty::{Attributes, Switch, attributes, is_on, set_attributes, switch};

use super::descriptor::Kind;
use crate::samples::sample::Values;

/// The kinds.
#[rustfmt::skip]
pub(super) const TERMINALS: &[Kind] = &[
    Kind::new("terminal", Values::Made(states), terminal, read)
        .about(&[
            "TCGETS", "TCSETS", "TCSETSW", "TCSETSF", "TCGETA", "TCSETA", "TCSETAW", "TCSETAF",
            "TCGETS2", "TCSETS2", "TCSETSW2", "TCSETSF2", "TIOCEXCL", "TIOCNXCL", "TIOCGEXCL",
            "TIOCGWINSZ", "TIOCSWINSZ", "TIOCGSOFTCAR", "TIOCSSOFTCAR", "TIOCPKT", "TIOCGPKT",
            "TIOCGPTN", "TIOCSPTLCK", "TIOCGPTLCK", "TIOCGDEV", "terminal: tty-index",
        ]),
];

/// The bits of the four words of modes that have a meaning, but for those that a pseudo terminal
/// has one value of: `CSIZE`, `CREAD`, `PARENB`.
const MODES: [u32; 4] = [0x7fff, 0xffff, 0xc000_0e4f, 0x1_ffff];
/// How many control characters there are.
const CHARACTERS: u64 = 19;
/// How many states follow on those of [`MODES`] and [`CHARACTERS`].
const OTHERS: u64 = 7;

/// Each bit of the modes changed by its number, then each character, then the others.
fn states() -> Vec<u64> {
    let bits = MODES.iter().zip(0..).flat_map(|(bits, word)| {
        let set = (0..32).filter(move |bit| bits >> bit & 1 == 1);
        set.map(move |bit| word << 8 | bit)
    });
    let characters = (0..CHARACTERS).map(|at| 4 << 8 | at);
    bits.chain(characters)
        .chain((0..OTHERS).map(|at| 5 << 8 | at))
        .collect()
}

/// A pair in raw mode, with one thing changed: its own end, and the other.
fn terminal(_: &Path, state: u64) -> io::Result<Vec<OwnedFd>> {
    const WORD_BYTES: usize = 4;
    const CHARACTERS_AT: usize = 17;
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let own = openpt(flags)?;
    unlockpt(&own)?;
    let other = ioctl_tiocgptpeer(&own, flags)?;
    let mut modes = tcgetattr(&other)?;
    modes.make_raw();
    tcsetattr(&other, OptionalActions::Now, &modes)?;
    let (word, at) = ((state >> 8) as usize, (state & 0xff) as usize);
    let mut modes: Attributes = attributes(&other)?;
    match word {
        0..4 => modes[word * WORD_BYTES + at / 8] ^= 1 << (at % 8),
        4 => modes[CHARACTERS_AT + at] ^= 0x15,
        _ => return change(state & 0xff, own, other),
    }
    set_attributes(&other, &modes)?;
    Ok(vec![own, other])
}

fn change(what: u64, own: OwnedFd, other: OwnedFd) -> io::Result<Vec<OwnedFd>> {
    match what {
        0 => switch(&own, Switch::Packet, true)?,
        1 => switch(&own, Switch::Locked, true)?,
        2 => switch(&other, Switch::Exclusive, true)?,
        3 => tcsetwinsize(&other, size(24, 80, 0, 0))?,
        4 => tcsetwinsize(&own, size(u16::MAX, 1, 3, 5))?,
        5 => speed(&other, 38_400, 1200)?,
        _ => speed(&other, 12_345, 12_345)?,
    }
    Ok(vec![own, other])
}

fn size(ws_row: u16, ws_col: u16, ws_xpixel: u16, ws_ypixel: u16) -> Winsize {
    Winsize {
        ws_row,
        ws_col,
        ws_xpixel,
        ws_ypixel,
    }
}

fn speed(other: &OwnedFd, input: u32, output: u32) -> io::Result<()> {
    let mut modes = tcgetattr(other)?;
    modes.set_input_speed(input)?;
    modes.set_output_speed(output)?;
    Ok(tcsetattr(other, OptionalActions::Now, &modes)?)
}

fn read(own: BorrowedFd<'_>) -> io::Result<String> {
    let modes = attributes(own)?;
    let size = tcgetwinsize(own)?;
    let all = [Switch::Packet, Switch::Locked, Switch::Exclusive];
    let switches = all.map(|what| is_on(own, what).ok());
    Ok(format!("{modes:02x?} {size:?} {switches:?}"))
}
