//! Closing many descriptors with few calls.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::rc::Rc;

/// Descriptors that nobody reads any more, closed together: at the latest when this is dropped.
#[derive(Debug, Default)]
pub struct CloseQueue(RefCell<Vec<OwnedFd>>);

impl CloseQueue {
    /// How many are kept at most.
    const MOST: usize = 512;

    /// Takes a descriptor to be closed.
    pub fn push(&self, descriptor: OwnedFd) {
        self.0.borrow_mut().push(descriptor);
        if self.0.borrow().len() >= Self::MOST {
            self.close();
        }
    }

    /// Closes those taken so far.
    pub fn close(&self) {
        all(self.0.take());
    }
}

/// A descriptor that is closed with others once this is dropped.
#[derive(Debug)]
pub struct Deferred {
    own: Option<OwnedFd>,
    queue: Rc<CloseQueue>,
}

impl Deferred {
    /// Has `queue` close `own` some time after this is dropped.
    #[must_use]
    pub fn new(own: OwnedFd, queue: &Rc<CloseQueue>) -> Self {
        let queue = queue.clone();
        Self {
            own: Some(own),
            queue,
        }
    }
}

impl AsFd for Deferred {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.own.as_ref().expect("taken by drop alone").as_fd()
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        if let Some(own) = self.own.take() {
            self.queue.push(own);
        }
    }
}

impl Drop for CloseQueue {
    fn drop(&mut self) {
        self.close();
    }
}

/// Closes all of `descriptors`, those with consecutive numbers by one close_range(2).
pub fn all(descriptors: impl IntoIterator<Item = OwnedFd>) {
    let numbers = descriptors.into_iter().map(IntoRawFd::into_raw_fd);
    let mut numbers = numbers.collect::<Vec<_>>();
    numbers.sort_unstable();
    for stretch in numbers.chunk_by(|one, next| one + 1 == *next) {
        let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
        // SAFETY: the numbers were owned by this function, and nobody uses them any more.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::*;

    #[test]
    fn closed_pipes_end() {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let (other, last) = rustix::pipe::pipe().expect("a pipe");
        let number = writer.as_raw_fd();
        all([last, writer, other]);
        assert_eq!(
            rustix::io::read(&reader, &mut [0u8; 1]),
            Ok(0),
            "{number} is closed"
        );
    }

    #[test]
    fn what_is_left_for_later_is_closed_when_it_is_many_or_over() {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let queue = CloseQueue::default();
        for _ in 1..CloseQueue::MOST {
            queue.push(writer.try_clone().expect("a copy"));
        }
        queue.push(writer);
        // Processes that other tests are just making have copies for a moment.
        let patience = Timespec {
            tv_sec: 30,
            tv_nsec: 0,
        };
        let mut ready = [PollFd::new(&reader, PollFlags::IN)];
        let ended = rustix::event::poll(&mut ready, Some(&patience));
        assert_eq!(ended, Ok(1), "all are closed when there are many");
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        queue.push(writer);
        drop(queue);
        assert_eq!(rustix::io::read(&reader, &mut [0u8; 1]), Ok(0));
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let queue = Rc::new(CloseQueue::default());
        drop(Deferred::new(writer, &queue));
        drop(queue);
        assert_eq!(rustix::io::read(&reader, &mut [0u8; 1]), Ok(0));
    }
}
