//! The memory of one process while its pages come in.
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, RwLock};

use abi::{Addr, PAGE_BYTES, Span};
use image::SpaceId;
use rustix::io::Errno;
use sys::uffd::Uffd;

use super::missing::{MissingPages, Piece};
use crate::events::WaitingThread;
use crate::session::lock;
use crate::{Error, Result};

/// A process's memory, of which pages are still to come.
#[derive(Debug)]
pub(super) struct AddressSpace {
    /// Its number with the server.
    pub number: u64,
    /// Its owner, for the caller.
    pub owner: u64,
    /// Its process, or the one that forked it.
    pub pid: i32,
    /// Source of its events.
    pub uffd: Uffd,
    /// Space of the pages.
    pub space: SpaceId,
    /// Held by those who bring pages in, and alone by who reads events.
    pub order: RwLock<()>,
    /// Pages that are missing.
    pub owed: Mutex<MissingPages>,
    /// Threads that wait, and could not be answered yet.
    pub waiting: Mutex<Vec<WaitingThread>>,
    /// Addresses around which pages come first.
    pub first: Mutex<Vec<Addr>>,
    /// Prefetches under way.
    pub coming: Mutex<Vec<Span>>,
    /// How far those are.
    pub reached: AtomicU64,
}

/// Outcome of filling pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// They are there, or do not have to come any more.
    Done,
    /// The mappings are changing: events have to be read first.
    Again,
}

impl AddressSpace {
    /// Puts `bytes` to `piece`, as far as they are still to come there. Whoever waits for a page
    /// that is there already is woken.
    pub fn place(&self, piece: Piece, bytes: &[u8]) -> Result<Placement> {
        let _order = self.order.read();
        let parts = lock(&self.owed).parts(piece);
        for part in parts {
            let skip = (part.span.start.0 - piece.span.start.0) as usize;
            let bytes = &bytes[skip..skip + part.span.bytes() as usize];
            if self.place_part(part.span, bytes)? == Placement::Again {
                return Ok(Placement::Again);
            }
        }
        Ok(Placement::Done)
    }

    fn place_part(&self, span: Span, bytes: &[u8]) -> Result<Placement> {
        let mut done = 0;
        // Pages of several mappings are refused together.
        let mut most = bytes.len();
        let mut refused = None;
        while done < bytes.len() {
            let at = span.start.plus(done as u64);
            let part = &bytes[done..(done + most).min(bytes.len())];
            match self.uffd.copy(at, part, true) {
                Ok(0) => return Ok(Placement::Again),
                Ok(copied) => {
                    lock(&self.owed).take(Span::new(at, copied as u64));
                    done += copied;
                }
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::NOENT) if part.len() > PAGE_BYTES as usize => {
                        most = PAGE_BYTES as usize;
                    }
                    // What moves away at this very moment is not there either. Then there is an
                    // event that nobody has read, and the kernel says so from now on (EAGAIN).
                    Some(Errno::NOENT) if refused != Some(at) => refused = Some(at),
                    Some(Errno::EXIST | Errno::NOENT) => {
                        let page = Span::new(at, PAGE_BYTES);
                        lock(&self.owed).take(page);
                        self.wake(page)?;
                        done += PAGE_BYTES as usize;
                    }
                    Some(Errno::AGAIN) => return Ok(Placement::Again),
                    _ => return Err(Error::call("fill", span, self.pid, error)),
                },
            }
        }
        Ok(Placement::Done)
    }

    /// Tells whether somebody is about to bring that page in.
    pub fn is_coming(&self, addr: Addr) -> bool {
        lock(&self.coming).iter().any(|span| span.contains(addr))
    }

    /// The part of `span` around `addr` that nobody is about to bring in.
    pub fn free_around(&self, span: Span, addr: Addr) -> Span {
        let mut free = span;
        for taken in lock(&self.coming).iter() {
            if taken.end <= addr {
                free.start = free.start.max(taken.end);
            } else if taken.start > addr {
                free.end = free.end.min(taken.start);
            }
        }
        free
    }

    /// Has a page read as zeros that nothing is to come to.
    pub fn zero(&self, addr: Addr) -> Result<Placement> {
        let page = Span::new(addr, PAGE_BYTES);
        let _order = self.order.read();
        match self.uffd.zero(page, true) {
            Ok(_) => Ok(Placement::Done),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::EXIST | Errno::NOENT) => self.wake(page).map(|()| Placement::Done),
                Some(Errno::AGAIN) => Ok(Placement::Again),
                _ => Err(Error::call("fill", page, self.pid, error)),
            },
        }
    }

    fn wake(&self, span: Span) -> Result<()> {
        let woken = self.uffd.wake(span);
        woken.map_err(|error| Error::call("wake who waits for", span, self.pid, error))
    }

    /// Tells whether everything has come.
    pub fn is_whole(&self) -> bool {
        lock(&self.owed).is_empty()
    }
}
