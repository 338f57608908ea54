//! Memory that the kernel is to find in its place before a task runs: registered buffers of rings.
//!
//! - What: registered buffers of rings of io_uring
//! - Kept: memory that can be written, also where it comes later (`restore --lazy-pages`).
//! - Refused: "fd …, an io_uring: its buffer …", as "its memory cannot be written".
//! - CRIU 4.2: refuses rings altogether.

use abi::spans::subtract;
use resources::fd::{Description, io_uring};
use resources::map::memory::Mapping;

use crate::Result;
use crate::records::{Saved, SavedTask};

/// Whether a task has such memory, or some that another userfaultfd than ours gets.
pub(super) fn is_needed(saved: &Saved<'_>, task: &SavedTask<'_>) -> bool {
    !task.registered.is_empty()
        || task.descriptors.iter().any(|descriptor| {
            io_uring::pins_memory(&*saved.descriptions[descriptor.description as usize])
        })
}

/// Refuses a description, of which a task has descriptor `fd`, that needs what cannot be
/// registered.
pub(super) fn check(task: &SavedTask<'_>, fd: i32, description: &dyn Description) -> Result<()> {
    const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
    let mut buffers = io_uring::buffers(description).peekable();
    if buffers.peek().is_none() {
        return Ok(());
    }
    let written = task.memory.mappings.iter();
    let written = written.filter(|map| map.prot & PROT_WRITE != 0);
    let written = written.map(Mapping::span).collect::<Vec<_>>();
    for buffer in buffers {
        if !subtract(&[buffer], &written).is_empty() {
            let pid = task.node.pid;
            let what = format!("fd {fd}, an io_uring: its buffer {buffer}");
            let refused = resources::Error::unsupported(pid, what);
            return Err(refused.because("its memory cannot be written").into());
        }
    }
    Ok(())
}
