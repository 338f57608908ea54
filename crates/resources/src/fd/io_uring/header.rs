//! Headers of messages that requests receive: what the kernel took of one, and what the program has
//! there now.
//!
//! The kernel copies a header when it takes the request, and writes to the program's at the end.
//! One that says something else now would make another request.

use std::io::Result;
use std::os::unix::fs::FileExt;

use sys::process::Process;

use crate::kernel::Structure;

/// A header (`struct user_msghdr`), without what is only written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Where the sender's address goes.
    name: u64,
    /// Where control messages go, and how much room they have.
    control: [u64; 2],
    /// The buffers: addresses and sizes.
    buffers: Vec<[u64; 2]>,
}

/// The most buffers that a message may have (`UIO_MAXIOV`).
const MOST_BUFFERS: u64 = 1024;

impl Header {
    /// The kernel's copy (`struct io_async_msghdr`); nothing where the buffers are of another form.
    pub fn of_kernel(
        kept: &Structure<'_>,
        words: impl Fn(u64, usize) -> Result<Vec<u64>>,
    ) -> Result<Option<Self>> {
        const ONE: u8 = 0;
        const SEVERAL: u8 = 1;
        let buffers = match kept.byte("msg.msg_iter.iter_type")? {
            ONE => vec![[
                kept.word("msg.msg_iter.ubuf")?,
                kept.word("msg.msg_iter.count")?,
            ]],
            SEVERAL => {
                let count = kept.word("msg.msg_iter.nr_segs")?.min(MOST_BUFFERS) as usize;
                let words = words(kept.word("msg.msg_iter.__iov")?, 2 * count)?;
                words.as_chunks().0.to_vec()
            }
            _ => return Ok(None),
        };
        Ok(Some(Self {
            name: kept.word("uaddr")?,
            control: [
                kept.word("msg.msg_control_user")?,
                kept.word("msg.msg_controllen")?,
            ],
            buffers,
        }))
    }

    /// That of the program, at an address; nothing where it makes no sense.
    pub fn of_program(process: &Process, address: u64) -> Result<Option<Self>> {
        let memory = process.open("mem")?;
        let words = |at: u64, count: usize| -> Result<Vec<u64>> {
            let mut bytes = vec![0; 8 * count];
            memory.read_exact_at(&mut bytes, at)?;
            let words = bytes.as_chunks::<8>().0.iter();
            Ok(words.map(|word| u64::from_ne_bytes(*word)).collect())
        };
        let header = words(address, 6)?;
        let [name, _, buffers, count, control, control_bytes] = header[..] else {
            return Ok(None);
        };
        if count > MOST_BUFFERS {
            return Ok(None);
        }
        let buffers = words(buffers, 2 * count as usize)?;
        Ok(Some(Self {
            name,
            control: [control, control_bytes],
            buffers: buffers.as_chunks().0.to_vec(),
        }))
    }
}
