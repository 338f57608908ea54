//! A stopped process: its registers, its memory, batches of calls made inside it.
//!
//! - [`Thread`]: a traced and stopped thread with the registers that it goes on with;
//! - [`Call`]: one system call made in such a thread;
//! - [`Injection`]: a stopped process into which the blob was mapped; runs a [`Batch`] in each
//!   thread.
//!
//! Whatever happens, a target goes on as it was: dropping an [`Injection`] takes the blob out
//! again, dropping a [`Thread`] lets it run, and when this process is killed in the middle of an
//! injection the target's own threads find the way back (module [`arch::self_restore`]). As long as
//! it lives, a thread is its own however slow it is.
#![forbid(unsafe_code)]

pub mod arch;
mod call;
mod end;
mod error;
mod handed;
mod injection;
mod limit;
mod stop;
mod submitting;
#[cfg(test)]
mod testing;
mod thread;
mod uffd;
mod vdso_call;

pub use arch::STUB_BYTES;
pub use call::Call;
pub use end::end;
pub use error::{Error, Result};
pub use injection::{
    Batch, Injection, Left, Outcome, PADDING_BYTES, is_injected, left_areas, padding_in,
};
pub use stop::stop;
pub use submitting::Submitting;
pub use thread::{Saved, Seized, Thread, has_ended};
pub use uffd::{userfaultfd, userfaultfd_of_device};
pub use vdso_call::{VdsoCall, finish_vdso_call};
