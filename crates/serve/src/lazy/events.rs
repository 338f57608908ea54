//! What the userfaultfds tell: faults, and how memory moves.
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use rustix::fs::OFlags;
use sys::uffd::{Event, Uffd};

use super::Server;
use super::space::AddressSpace;
use crate::events::WaitingThread;
use crate::session::lock;
use crate::{Error, Result};

/// Has reading from a userfaultfd return at once where there is nothing to read.
pub(super) fn unblock(uffd: &Uffd) -> Result<()> {
    let failed = |errno: rustix::io::Errno| Error::Descriptor(errno.into());
    let flags = rustix::fs::fcntl_getfl(uffd).map_err(failed)?;
    rustix::fs::fcntl_setfl(uffd, flags | OFlags::NONBLOCK).map_err(failed)
}

impl Server {
    /// Reads all events of a process. How its memory has changed is noted first, in the order in
    /// which it did; then come the faults, which were perhaps before it.
    pub(super) fn read_events(&self, space: &Arc<AddressSpace>) -> Result<()> {
        let _alone = space.order.write();
        let mut events = Vec::new();
        while space.uffd.events(&mut events).map_err(Error::Descriptor)? {}
        let since = Instant::now();
        let mut waiting = lock(&space.waiting);
        for event in events {
            let mut owed = lock(&space.owed);
            match event {
                Event::Fault { addr, .. } => {
                    waiting.push(WaitingThread::new(addr.page_start(), since));
                }
                Event::Remove(span) | Event::Unmap(span) => {
                    owed.take(span);
                }
                Event::Remap { from, to, bytes } => owed.shift(abi::Span::new(from, bytes), to),
                Event::Fork(uffd) => {
                    let owed = owed.clone();
                    self.adopt(space, uffd, owed)?;
                }
                Event::Unknown(number) => log::warn!("a userfaultfd told {number}"),
            }
        }
        Ok(())
    }

    /// Takes on what a process has forked, which lacks what that lacks.
    fn adopt(
        &self,
        parent: &AddressSpace,
        uffd: Uffd,
        owed: super::missing::MissingPages,
    ) -> Result<()> {
        let number = self.next.fetch_add(1, Relaxed);
        log::debug!(
            "process {} has forked: its child is served, too",
            parent.pid
        );
        unblock(&uffd)?;
        (self.hooks.held)(number, parent.owner, &uffd);
        let child = AddressSpace {
            number,
            owner: parent.owner,
            pid: parent.pid,
            uffd,
            space: parent.space,
            order: RwLock::default(),
            owed: Mutex::new(owed),
            waiting: Mutex::default(),
            coming: Mutex::default(),
            first: Mutex::default(),
            reached: 0.into(),
        };
        self.take_on(child);
        Ok(())
    }
}
