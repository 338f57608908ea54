//! Reader → plan: what a restore will do, as data, without touching the kernel.

mod closing;
mod early;
mod ended;
#[cfg(test)]
mod forged;
pub(crate) mod forks;
pub(crate) mod groups;
mod late;
mod lifecycle;
mod memories;
#[cfg(test)]
mod model;
mod pinned;
mod pooled;
mod portions;
mod print;
mod scripts;
mod sessions;
mod setting;
pub(crate) mod sharing;
mod sources;
mod task;
mod terminal;
mod turns;
mod vdso;

use image::Reader;

use crate::Result;
use crate::records::Saved;
pub use groups::Placing;
pub(crate) use portions::order;
pub(crate) use print::print;
pub use scripts::{Outside, Plan, Portions, Staying, word};
pub use setting::{OwnVdso, Setting};

/// Plans the restore of an image.
///
/// # Errors
/// [`crate::Error::Resource`] for records that do not make sense or cannot be restored.
pub(crate) fn plan(reader: &Reader, saved: &Saved<'_>, setting: &Setting) -> Result<Plan> {
    let (forks, sharing) = sharing::plan(&saved.tree)?;
    let limit = setting.open_files;
    portions::check_tasks(saved, limit)?;
    let fetches = portions::overlaps(saved, reader, limit);
    let with = |fetches, portions| {
        let mut plan = Plan {
            words: word::FREE,
            descriptions: u32::try_from(saved.descriptions.len()).expect("checked when read"),
            fetches,
            portions,
            ..Plan::default()
        };
        task::Tasks::new(reader, saved, (&forks, &sharing), setting)?.plan(&mut plan)?;
        Ok(plan)
    };
    let plan = with(fetches, Portions::default())?;
    match portions::divide(saved, reader, limit, &plan)? {
        None => Ok(plan),
        Some(portions) => with(true, portions),
    }
}
