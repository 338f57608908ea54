//! The runs of an index: in order, and joined where they need not be apart.

use crate::{Run, RunKind};

/// Sorts runs, and joins neighbours that need not be apart.
pub(crate) fn in_order(mut runs: Vec<Run>) -> Vec<Run> {
    runs.sort_by_key(|run| (run.space, run.first_page));
    runs.dedup_by(|run, last| {
        let joins = (run.space, run.first_page) == (last.space, last.end_page())
            && joins_kind(last, run.kind);
        match last.pages.checked_add(run.pages) {
            Some(pages) if joins => {
                last.pages = pages;
                true
            }
            _ => false,
        }
    });
    runs
}

/// Tells whether pages of this kind behind `last` are of the same run.
fn joins_kind(last: &Run, kind: RunKind) -> bool {
    match last.kind {
        RunKind::Zero | RunKind::Same { .. } => last.kind == kind,
        RunKind::Part(part) => kind == RunKind::Part(part.after(last.pages)),
    }
}
