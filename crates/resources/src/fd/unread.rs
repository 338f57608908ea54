//! Unread events, messages and packets, which cannot be put back: events of inotify and fanotify,
//! messages of netlink, packets of raw sockets.
//!
//! A program that runs reads it soon, so the dump tries again. Events are looked at as soon as the
//! tree is stopped: what the dump itself does later is told to whoever watches those files as well,
//! as what others do from then on until the restore.
//!
//! - What: unread events (inotify, fanotify), messages (netlink) and packets (raw, packet sockets)
//! - Refused: "…: unread …, which cannot be put back", for all of `--timeout` (`--drop-events`); at
//!   once where a signal has stopped all of the tree.
//! - CRIU 4.2: events are dropped with a warning, packets without one; netlink sockets with unread
//!   messages are refused.

use std::os::fd::OwnedFd;

use sys::process::Process;

use super::socket::peek;
use super::table::Link;
use super::{Open, fanotify, inotify};
use crate::{Allow, Error, Result};

/// The option that allows a dump all the same.
pub(super) const OPTION: &str = "--drop-events";

/// Refuses the descriptor of a stopped process for now if events wait to be read from it. With
/// `fetch` a copy of it is got.
///
/// # Errors
/// [`Error::Passing`], and those of `fetch`.
pub fn check(
    process: &Process,
    link: &Link,
    allow: &Allow,
    fetch: impl FnOnce(&Process, i32) -> Result<OwnedFd>,
) -> Result<()> {
    // A descriptor that the parent has, too, was looked at there.
    if link.same.is_some() || !has_events(&link.target) {
        return Ok(());
    }
    let pid = process.pid();
    let own = fetch(process, link.fd)?;
    let target = String::from_utf8_lossy(&link.target);
    let place = format!("fd {} ({target})", link.fd);
    let bytes = rustix::io::ioctl_fionread(&own);
    let bytes = bytes.map_err(|error| {
        Error::kernel(format!("ask {place} of pid {pid} for its events"), error)
    })?;
    match bytes {
        0 => Ok(()),
        bytes => put_off((pid, &place), allow, ("events", Some(bytes)), true),
    }
}

/// True if this is the link of an inotify or fanotify instance.
fn has_events(link: &[u8]) -> bool {
    [inotify::LINK, fanotify::LINK].contains(&link)
}

/// Refuses a description from which this many bytes of `what` can be read, or drops those where
/// that is allowed.
///
/// # Errors
/// [`Error::Passing`].
pub(super) fn check_open(open: &Open<'_>, allow: &Allow, what: &str, bytes: u64) -> Result<()> {
    match bytes {
        0 => Ok(()),
        bytes => put_off(
            (open.process.pid(), &open.place()),
            allow,
            (what, Some(bytes)),
            false,
        ),
    }
}

/// Refuses a socket from which something of `what` can be read, or drops that where it is allowed.
///
/// # Errors
/// [`Error::Passing`], or when a system call fails.
pub(super) fn check_socket(open: &Open<'_>, allow: &Allow, what: &str) -> Result<()> {
    let own = open.own()?;
    let is_readable = peek::is_readable(own);
    if !is_readable.map_err(|errno| Error::kernel(format!("read {}", open.place()), errno))? {
        return Ok(());
    }
    put_off(
        (open.process.pid(), &open.place()),
        allow,
        (what, None),
        false,
    )
}

fn put_off(
    (pid, place): (i32, &str),
    allow: &Allow,
    (what, bytes): (&str, Option<u64>),
    early: bool,
) -> Result<()> {
    if allow.drop_events {
        let count = bytes.map_or_else(String::new, |bytes| format!(" ({bytes} bytes)"));
        log::warn!("pid {pid}: {place}: unread {what}{count} are not in the image");
        return Ok(());
    }
    Err(Error::Passing {
        pid,
        what: format!("{place}: unread {what}, which cannot be put back"),
        allow: Some(OPTION),
        early,
        by_tree: true,
    })
}
