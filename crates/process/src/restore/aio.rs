//! Contexts of asynchronous I/O: whether there is room for them.

use resources::map::aio;

use crate::records::Saved;
use crate::{Error, Result};

/// Refuses contexts for which this host has no room, before anything is made.
///
/// # Errors
/// [`Error::Unfit`].
pub(super) fn check(saved: &Saved<'_>) -> Result<()> {
    let mut wanted = 0;
    for task in saved.tasks.iter().filter(|task| !task.contexts.is_empty()) {
        let mappings = &task.memory.mappings;
        if let Some(pages) = aio::without_size(&task.contexts, mappings)? {
            return Err(Error::Unfit(format!(
                "a ring of {pages} pages cannot be made with as many processors as this host can \
                 have"
            )));
        }
        wanted += aio::wanted(&task.contexts, mappings)?;
    }
    if wanted == 0 {
        return Ok(());
    }
    let more = aio::allowed()?;
    match wanted <= more {
        true => Ok(()),
        false => Err(Error::Unfit(format!(
            "the image needs {wanted} requests of asynchronous I/O, and this host allows {more} \
             more (fs.aio-max-nr)"
        ))),
    }
}
