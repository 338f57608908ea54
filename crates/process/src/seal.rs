//! What an image must be before it gets its name: its restore can be planned.

use std::time::SystemTime;

use image::{Facts, Reader};
use resources::Inherited;
use resources::map::vdso::Vdso;
use resources::task::keyrings;

use crate::plan::{self, Setting};
use crate::records::Saved;
use crate::{Error, Result, host, huge_pages, overcommit};

/// What an image that is made now says of its creation.
#[must_use]
pub fn facts() -> Facts {
    let host = crate::host::kernel();
    let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let since_1970 = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    Facts {
        kernel_release: text(host.release()),
        stillframe_version: env!("CARGO_PKG_VERSION").to_owned(),
        created_ns: u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX),
        arch: text(host.machine()),
    }
}

/// Plans the restore of an image, on this host, of which the tasks start with what is `inherited`.
///
/// # Errors
/// [`Error::Unrestorable`].
pub(crate) fn check(draft: &Reader, foreign: &[Vdso], inherited: &Inherited) -> Result<()> {
    let planned = planned(draft, foreign, inherited).map_err(|error| Error::Unrestorable {
        source: Box::new(error),
    })?;
    log::info!("a restore would run {planned} scripts");
    Ok(())
}

fn planned(draft: &Reader, foreign: &[Vdso], inherited: &Inherited) -> Result<usize> {
    let mut saved = Saved::read(draft)?;
    for vdso in &mut saved.vdsos {
        if let Some(known) = foreign.iter().find(|one| one.build_id == vdso.build_id) {
            vdso.code.clone_from(&known.code);
        }
    }
    let mut inherited = inherited.clone();
    // The restorer may be in the same session.
    let root = saved.tasks.first().and_then(|root| root.threads.first());
    let parts = root.map_or(&[][..], |root| &root.parts);
    inherited.set_session(keyrings::recorded(parts));
    let setting = Setting {
        inherited,
        vdso: host::vdso_for(&saved)?,
        at_once_bytes: overcommit::at_once_bytes(&saved)?,
        open_files: crate::alone::open_files_at_most(),
        ..Setting::default()
    };
    overcommit::check(&saved, draft, true)?;
    huge_pages::check_in_all(&saved, draft)?;
    Ok(plan::plan(draft, &saved, &setting)?.scripts.len())
}
