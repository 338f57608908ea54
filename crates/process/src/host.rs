//! What a restore has to know of this host.

use resources::map::vdso::{self, Host};

use crate::Result;
use crate::plan::OwnVdso;
use crate::records::Saved;

/// What is needed to know of this host's vDSO to restore `saved`; for most images only its build
/// id, which is at hand.
pub(crate) fn vdso_for(saved: &Saved<'_>) -> Result<OwnVdso> {
    let build_id = sys::vdso::own_build_id();
    let ways = saved.tasks.iter();
    let mut ways = ways.map(|task| vdso::way(&task.memory, build_id.as_deref()));
    let host = ways.any(vdso::Way::needs_host).then(Host::probe);
    Ok(OwnVdso {
        build_id,
        host: host.transpose()?,
    })
}
