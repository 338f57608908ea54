//! Many reads of one file under way at a time, from one thread and so in its I/O context:
//! io_uring(7).
//!
//! Whoever reads a disk with several threads has an I/O context for each of them, and a scheduler
//! that shares the disk out among contexts (bfq) waits for each in turn. One thread that keeps many
//! reads under way has one context, and its reads reach the disk in its order.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{IoUring, opcode, types};

/// The file's number in the ring.
const FILE: types::Fixed = types::Fixed(0);

/// Where bytes are, and where they go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The offset in the file.
    pub at_bytes: u64,
    /// The bytes of the memory that are filled.
    pub to: Range<usize>,
}

/// What was read.
#[derive(Debug)]
pub struct Done {
    /// What it was started under.
    pub number: usize,
    /// The memory, filled where the read succeeded.
    pub memory: Vec<u8>,
    /// Fails with the first failure; with [`io::ErrorKind::UnexpectedEof`] where a piece was not
    /// filled.
    pub result: io::Result<()>,
}

/// Reads of a file that are under way.
pub struct Queue {
    ring: IoUring,
    /// Those under way, at their places; the memory belongs to the kernel until all pieces came.
    reads: Vec<Option<Read>>,
    /// Pieces that were started and have not come yet.
    pieces: usize,
}

/// One of them.
struct Read {
    number: usize,
    memory: Vec<u8>,
    pieces: Vec<Piece>,
    left: usize,
    result: io::Result<()>,
}

impl Queue {
    /// A queue for `file`, with as many `reads` under way at a time.
    ///
    /// # Errors
    /// The call's errno: `ENOSYS`, `EPERM` where the system allows no io_uring.
    pub fn new(file: OwnedFd, reads: usize) -> io::Result<Self> {
        let ring = IoUring::builder().setup_cqsize(4096).build(128)?;
        // The ring has the file from here on.
        ring.submitter().register_files(&[file.as_raw_fd()])?;
        Ok(Self {
            ring,
            reads: (0..reads).map(|_| None).collect(),
            pieces: 0,
        })
    }

    /// Whether another read can be started.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.reads.iter().any(Option::is_none)
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.reads.iter().all(Option::is_none)
    }

    /// Starts a read of at most 1,024 pieces, which [`Queue::wait`] gives back under its number.
    ///
    /// # Errors
    /// The call's errno.
    ///
    /// # Panics
    /// Where there is no room, or a piece is not in `memory`.
    pub fn start(&mut self, number: usize, memory: Vec<u8>, pieces: &[Piece]) -> io::Result<()> {
        let free = self.reads.iter().position(Option::is_none);
        let place = free.expect("the caller has looked");
        let within = |piece: &Piece| piece.to.start <= piece.to.end && piece.to.end <= memory.len();
        assert!(pieces.iter().all(within), "pieces are in the memory");
        let read = self.reads[place].insert(Read {
            number,
            memory,
            pieces: pieces.to_vec(),
            left: 0,
            result: Ok(()),
        });
        let start = read.memory.as_mut_ptr();
        for (part, piece) in pieces.iter().enumerate() {
            // SAFETY: the piece ends in the memory, as was looked.
            let to = unsafe { start.add(piece.to.start) };
            let len = u32::try_from(piece.to.len()).unwrap_or(u32::MAX);
            let entry = opcode::Read::new(FILE, to, len).offset(piece.at_bytes);
            let entry = entry.build().user_data((place << 32 | part) as u64);
            loop {
                // SAFETY: the memory stays where it is until the read came: nothing touches it
                // while it is among the reads, from which it is taken when all pieces came, and a
                // queue that is dropped waits for them.
                let pushed = unsafe { self.ring.submission().push(&entry) };
                if pushed.is_ok() {
                    break;
                }
                submit(&self.ring, 0)?;
                self.collect();
            }
            let read = self.reads[place].as_mut().expect("it was put there");
            read.left += 1;
            self.pieces += 1;
        }
        submit(&self.ring, 0)
    }

    /// Waits until a read is done, and gives it.
    ///
    /// # Errors
    /// The call's errno.
    ///
    /// # Panics
    /// Where nothing is under way.
    pub fn wait(&mut self) -> io::Result<Done> {
        assert!(!self.is_empty(), "something is under way");
        loop {
            let done = |read: &Option<Read>| read.as_ref().is_some_and(|read| read.left == 0);
            if let Some(place) = self.reads.iter().position(done) {
                let read = self.reads[place].take().expect("it was looked at");
                return Ok(Done {
                    number: read.number,
                    memory: read.memory,
                    result: read.result,
                });
            }
            submit(&self.ring, 1)?;
            self.collect();
        }
    }

    /// Notes what came.
    fn collect(&mut self) {
        while let Some(entry) = self.ring.completion().next() {
            let place = (entry.user_data() >> 32) as usize;
            let part = entry.user_data() as u32 as usize;
            let read = self.reads[place].as_mut().expect("it is under way");
            read.left -= 1;
            self.pieces -= 1;
            let result = match usize::try_from(entry.result()) {
                Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
                Ok(got) if got < read.pieces[part].to.len() => {
                    Err(io::ErrorKind::UnexpectedEof.into())
                }
                Ok(_) => Ok(()),
            };
            if read.result.is_ok() {
                read.result = result;
            }
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        while self.pieces > 0 {
            if submit(&self.ring, 1).is_err() {
                // Rather than give memory back that the kernel may still write to.
                self.reads.drain(..).for_each(std::mem::forget);
                return;
            }
            self.collect();
        }
    }
}

/// Hands over what was put into the ring, and waits for so many.
fn submit(ring: &IoUring, wait_for: usize) -> io::Result<()> {
    loop {
        match ring.submit_and_wait(wait_for) {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // More has come than there is room for: the caller collects it.
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Ok(()),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file() -> std::fs::File {
        let mut file = tempfile::tempfile().unwrap();
        let bytes = (0..100_000_u32).flat_map(u32::to_le_bytes);
        file.write_all(&bytes.collect::<Vec<_>>()).unwrap();
        file
    }

    /// The number that stands first in memory.
    fn word(memory: &[u8]) -> u32 {
        u32::from_le_bytes(memory[..4].try_into().unwrap())
    }

    #[test]
    fn reads_come_with_their_numbers() {
        let Ok(mut queue) = Queue::new(file().into(), 3) else {
            eprintln!("skipped: this system allows no io_uring");
            return;
        };
        let piece = |word: u64, to: Range<usize>| Piece {
            at_bytes: word * 4,
            to,
        };
        let mut came = Vec::new();
        let mut take = |queue: &mut Queue| {
            let done = queue.wait().unwrap();
            done.result.unwrap();
            assert_eq!(word(&done.memory) as usize, done.number * 1000);
            assert_eq!(word(&done.memory[4000..]) as usize, 5 * done.number);
            came.push(done.number);
        };
        for number in 0..50 {
            if !queue.has_room() {
                take(&mut queue);
            }
            let place = number as u64;
            let pieces = [piece(place * 1000, 0..4000), piece(place * 5, 4000..4004)];
            queue.start(number, vec![0; 4004], &pieces).unwrap();
        }
        while !queue.is_empty() {
            take(&mut queue);
        }
        came.sort_unstable();
        assert_eq!(came, (0..50).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_not_filled_is_told_and_what_is_dropped_is_waited_for() {
        let Ok(mut queue) = Queue::new(file().into(), 2) else {
            eprintln!("skipped: this system allows no io_uring");
            return;
        };
        let behind = [Piece {
            at_bytes: 399_990,
            to: 0..100,
        }];
        queue.start(7, vec![0; 100], &behind).unwrap();
        let done = queue.wait().unwrap();
        let kind = done.result.unwrap_err().kind();
        assert_eq!((done.number, kind), (7, io::ErrorKind::UnexpectedEof));
        let all = [Piece {
            at_bytes: 0,
            to: 0..400_000,
        }];
        queue.start(8, vec![0; 400_000], &all).unwrap();
        drop(queue);
    }
}
