//! What the plan has to know of tasks' vDSOs.

use resources::map::memory::Memory;
use resources::map::vdso::lay::Old;
use resources::map::vdso::{self, proxy::Proxy};
use sys::arch::Registers;

use super::setting::OwnVdso;
use crate::records::{Saved, SavedTask};
use crate::{Error, Result};

/// What is known of a task's vDSO and of this host's.
pub(super) fn old<'a>(saved: &'a Saved<'_>, task: &SavedTask<'_>, own: &'a OwnVdso) -> Old<'a> {
    Old {
        way: own.way(&task.memory),
        host: own.of(&task.memory),
        code: saved.vdso_code(&task.memory.vdso_build_id),
        pid: task.node.pid,
    }
}

/// No thread may go on in the middle of what was written over in a proxy. A dump leads threads out
/// of the vDSO, so this is one that could not be.
pub(super) fn check_entries(
    task: &SavedTask<'_>,
    (memory, proxy): (&Memory, &Proxy),
) -> Result<()> {
    let Some(code) = vdso::code_of(memory) else {
        return Ok(());
    };
    for thread in task.living() {
        let words = thread.state.registers.as_slice().try_into();
        let at = Registers::from_words(words.expect("checked when read"))
            .at()
            .0;
        if proxy.splits(at.wrapping_sub(code.start)) {
            let tid = thread.tid;
            let what =
                format!("thread {tid} has just entered its vDSO, which is not this kernel's");
            return Err(Error::Unfit(what));
        }
    }
    Ok(())
}
