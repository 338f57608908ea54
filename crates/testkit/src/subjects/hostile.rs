//! A monitor that hands over nonsense. Arguments: the server's socket, pages of 4 KiB of its image.
//!
//! `attack SEED` has a child connect and do what the seed says: lists that are no lists, mappings
//! with wrong numbers, too many of them or too many descriptors, or ones of other kinds, messages
//! in pieces, and an end at each step, by closing the connection or by being killed. It answers
//! "done", or what went wrong: that a page was not what it had to be, or that the child hangs.
use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, waitpid};
use sys::fork::{Fork, fork};
use sys::socket::{Along, send};
use sys::uffd::{Features, Modes, Uffd};

use super::{Control, Failure, not_understood, number};
use crate::calls::Mapping;
use crate::chance::Chance;
use crate::machine_memory::{PAGE_BYTES, word};
use crate::wait::{SOON, try_wait_for};

/// How a child ends that has seen a wrong page.
const WRONG: i32 = 3;

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let socket = arguments.first().cloned().unwrap_or_default();
    let pages = number(arguments, 1, 0)?;
    control.serve(|question| match question.verb.as_str() {
        "attack" => in_child(&socket, pages, number(&question.words, 0, 0)?),
        _ => not_understood(question),
    })
}

fn in_child(socket: &str, pages: u64, seed: u64) -> Result<String, Failure> {
    let child = match fork()? {
        Fork::Child => {
            // Whoever is refused cannot go on.
            let told = attack(socket, pages, &mut Chance::with(seed));
            std::process::exit(told.unwrap_or_default());
        }
        Fork::Parent(child) => child,
    };
    let ended = try_wait_for(SOON, || {
        waitpid(Some(child), WaitOptions::NOHANG).ok().flatten()
    });
    let Some((_, status)) = ended else {
        kill_process(child, Signal::KILL)?;
        waitpid(Some(child), WaitOptions::empty())?;
        return Ok("the child hangs".to_owned());
    };
    Ok(match status.exit_status() {
        Some(WRONG) => "a page was wrong".to_owned(),
        _ => "done".to_owned(),
    })
}

/// Ends here, once in a while.
fn may_end(chance: &mut Chance, server: Option<&UnixStream>) {
    match (chance.below(12), server) {
        (0, _) => {
            let _ = kill_process(getpid(), Signal::KILL);
        }
        (1, _) => std::process::exit(0),
        (2, Some(server)) => {
            let _ = server.shutdown(Shutdown::Both);
        }
        (3, Some(server)) => {
            let _ = server.shutdown(Shutdown::Write);
        }
        _ => {}
    }
}

fn attack(socket: &str, pages: u64, chance: &mut Chance) -> Result<i32, Failure> {
    let bytes = pages as usize * PAGE_BYTES;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let memory = Mapping::anonymous(bytes, both, MapFlags::PRIVATE)?;
    let uffd = Uffd::create()?;
    may_end(chance, None);
    let server = UnixStream::connect(socket)?;
    server.set_write_timeout(Some(Duration::from_millis(500)))?;
    may_end(chance, Some(&server));
    let right_list = chance.once_in(3);
    let list = match right_list {
        true => one(memory.address(), bytes as u64, 0, Some("4096")),
        false => list(memory.address(), bytes as u64, chance),
    };
    let right_uffd = chance.once_in(2);
    let (rights, whole) = descriptors(&uffd, &memory, right_uffd, chance)?;
    let rights = rights.iter().map(AsFd::as_fd).collect::<Vec<_>>();
    // In pieces, with the descriptors along with any of them.
    let pieces = 1 + chance.below(3) as usize;
    let size = (list.len() / pieces).max(1);
    let pieces = list.as_bytes().chunks(size).collect::<Vec<_>>();
    let with_rights = chance.below(pieces.len() as u64) as usize;
    for (number, piece) in pieces.into_iter().enumerate() {
        let along = Along {
            rights: match number == with_rights {
                true => &rights,
                false => &[],
            },
            ..Along::default()
        };
        send(&server, piece, along, 0)?;
        may_end(chance, Some(&server));
    }
    let right = right_list && whole;
    if right {
        // It is served; or its own end was shut before all was sent, and nobody ever answers.
        if !chance.once_in(4) {
            return Ok(look(&memory, pages, chance));
        }
        return Ok(0);
    }
    // Refused, killed, or left alone by a server that waits for more.
    let mut fds = [PollFd::new(&server, PollFlags::IN)];
    let soon = Timespec {
        tv_sec: 0,
        tv_nsec: 20_000_000,
    };
    poll(&mut fds, Some(&soon))?;
    Ok(0)
}

/// Looks at pages that are served.
fn look(memory: &Mapping, pages: u64, chance: &mut Chance) -> i32 {
    for _ in 0..20 {
        let page = chance.below(pages);
        let at = chance.below(PAGE_BYTES as u64 / 8) as usize * 8;
        if memory.load(page as usize * PAGE_BYTES + at) != word(page, at) {
            return WRONG;
        }
    }
    0
}

/// The descriptors, and whether they are what belongs there.
fn descriptors(
    uffd: &Uffd,
    memory: &Mapping,
    right: bool,
    chance: &mut Chance,
) -> Result<(Vec<OwnedFd>, bool), Failure> {
    let span = abi::Span::new(abi::Addr(memory.address()), memory.bytes() as u64);
    if right {
        uffd.api(Features::EVENT_REMOVE)?;
        uffd.register(span, Modes::MISSING)?;
        return Ok((vec![uffd.as_fd().try_clone_to_owned()?], true));
    }
    let count = [0, 1, 1, 1, 2, 3, 16, 200][chance.below(8) as usize];
    let mut all = Vec::new();
    for _ in 0..count {
        all.push(match chance.below(10) {
            0 => File::open("/dev/null")?.into(),
            1 => memfd_create("memory", MemfdFlags::CLOEXEC)?,
            2 => eventfd(0, EventfdFlags::CLOEXEC)?,
            3 => epoll::create(epoll::CreateFlags::CLOEXEC)?,
            4 => OwnedFd::from(UnixStream::pair()?.0),
            5 => pidfd_open(getpid(), PidfdFlags::empty())?,
            6 => rustix::pipe::pipe()?.0,
            7 => File::open("/")?.into(),
            // One that nobody has spoken to; one that has no memory.
            8 => Uffd::create()?.into(),
            _ => {
                let other = Uffd::create()?;
                other.api(Features::WP)?;
                other.into()
            }
        });
    }
    Ok((all, false))
}

fn one(at: u64, size: u64, offset: u64, page_size: Option<&str>) -> String {
    let page_size = page_size.map_or(String::new(), |size| format!(",\"page_size\":{size}"));
    format!("[{{\"base_host_virt_addr\":{at},\"size\":{size},\"offset\":{offset}{page_size}}}]")
}

/// A list that is wrong in one way or another.
fn list(at: u64, bytes: u64, chance: &mut Chance) -> String {
    let odd = chance.number();
    let edge = chance.pick(&[
        0,
        1,
        4095,
        4097,
        1 << 20,
        1 << 47,
        1 << 56,
        u64::MAX - 4095,
        odd,
    ]);
    let right = one(at, bytes, 0, Some("4096"));
    match chance.below(16) {
        0 => one(edge, bytes, 0, Some("4096")),
        1 => one(at, edge, 0, Some("4096")),
        2 => one(at, bytes, edge, Some("4096")),
        3 => one(at, bytes, 0, Some(&edge.to_string())),
        4 => one(at, bytes, 0, Some("2097152")),
        5 => one(
            at,
            bytes,
            0,
            Some(chance.pick(&["-1", "1e400", "null", "\"4096\"", "[]", "4096.5"])),
        ),
        // Twice the same; many; nothing; too deep; too long.
        6 => right
            .replace('}', &format!("}},{}", &right[1..right.len() - 1]))
            .replace("]]", "]"),
        7 => format!("[{}]", vec![&right[1..right.len() - 1]; 1100].join(",")),
        8 => "[]".to_owned(),
        9 => "[".repeat(chance.pick(&[1, 200, 100_000])),
        10 => format!("[{}", " ".repeat(chance.pick(&[10, 2 << 20]))),
        11 => right[..chance.below(right.len() as u64) as usize].to_owned(),
        12 => format!("{right}{right}"),
        13 => right.replace("size", chance.pick(&["sise", "offset", "\\u0000"])),
        14 => {
            let mut bytes = right.into_bytes();
            let at = chance.below(bytes.len() as u64) as usize;
            bytes[at] = (odd % 128) as u8;
            String::from_utf8(bytes).unwrap_or_default()
        }
        _ => (0..1 + odd % 300)
            .map(|_| (chance.below(127) as u8 + 1) as char)
            .collect(),
    }
}
