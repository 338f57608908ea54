//! How the script of a thread ends: what it may only do when it has everything else.

use resources::script::Script;
use resources::task::{Phase, ThreadPlan};

use super::scripts::word;

/// Adds the rest of a thread's script. It waits for its tracer before the end, or, where there are
/// filters, before them: from then on the tracer keeps them from judging it. `tie` ties it to its
/// parent again, which a change of identity undoes.
pub(super) fn close(script: &mut Script, phases: &mut ThreadPlan, tie: impl FnOnce(&mut Script)) {
    let filters = phases.take(Phase::Filters);
    let is_filtered = !filters.steps.is_empty();
    if is_filtered {
        await_tracer(script);
        script.append(filters);
    }
    let privileges = phases.take(Phase::Privileges);
    if !privileges.steps.is_empty() {
        script.append(privileges);
        tie(script);
    }
    script.append(phases.take(Phase::Last));
    if !is_filtered {
        await_tracer(script);
    }
    script.append(phases.take(Phase::Final));
}

fn await_tracer(script: &mut Script) {
    script.post(word::READY);
    script.wait(word::GO, 1);
}
