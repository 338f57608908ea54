//! The rights that a restore needs, before a dump kills for it.
//!
//! The dump takes the dumper for the restorer: a right that the dumper lacks now keeps it from
//! killing. `--unprivileged` says that somebody else restores.

use resources::Inherited;
use sys::features;

use crate::{Afterwards, DumpKind, DumpOptions, Error, Result};

/// True if a dump kills for an image that its maker is to restore.
fn is_for_oneself(options: &DumpOptions) -> bool {
    let kills = options.kind == DumpKind::Dump && options.afterwards == Afterwards::Kill;
    kills && !options.unprivileged
}

/// Refuses a dump that kills by who may not choose pids, and tells what the tasks of a restore
/// start with.
///
/// # Errors
/// [`Error::Forbidden`]; [`Error::Resource`] when /proc cannot be read.
pub(crate) fn check(options: &DumpOptions) -> Result<Inherited> {
    if !is_for_oneself(options) {
        return Ok(Inherited::of_kernel());
    }
    let choosing = features::named("clone3_set_tid").expect("it is on the list");
    choosing.probe().map_err(Error::Forbidden)?;
    Ok(Inherited::read()?)
}

#[cfg(test)]
mod tests {
    use rustix::process::Pid;
    use rustix::thread::CapabilitySet;

    use super::*;

    fn options(afterwards: Afterwards, unprivileged: bool) -> DumpOptions {
        DumpOptions {
            afterwards,
            unprivileged,
            ..DumpOptions::new(Pid::INIT, std::path::Path::new("/nowhere"))
        }
    }

    #[test]
    fn kill_by_who_may_not_choose_pids_is_refused() {
        // Capabilities are a thread's own, so other tests keep theirs.
        let thread = std::thread::spawn(|| {
            let mut own = rustix::thread::capabilities(None).expect("the own capabilities");
            own.effective -= CapabilitySet::SYS_ADMIN | CapabilitySet::CHECKPOINT_RESTORE;
            rustix::thread::set_capabilities(None, own).expect("fewer capabilities");
            for (afterwards, unprivileged) in [
                (Afterwards::Kill, true),
                (Afterwards::Run, false),
                (Afterwards::Stop, false),
            ] {
                check(&options(afterwards, unprivileged)).expect("nothing is lost");
            }
            let refused = check(&options(Afterwards::Kill, false)).expect_err("it would be lost");
            let told = refused.to_string();
            assert!(
                told.starts_with("a dump that kills needs what its restore needs"),
                "{told}"
            );
        });
        thread.join().expect("no panic");
    }
}
