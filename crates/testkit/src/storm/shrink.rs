//! From a failing list of steps to a short one that fails in the same way.
use super::step::{Action, Step};

/// Drops steps as long as `fails` holds for what is left, `tries` times at the most: first large
/// pieces, then smaller ones, then single steps until none can be spared.
pub fn shrink(steps: &[Step], tries: usize, mut fails: impl FnMut(&[Step]) -> bool) -> Vec<Step> {
    let mut kept = steps.to_vec();
    let mut left = tries;
    let mut piece = kept.len().div_ceil(2).max(1);
    loop {
        let mut at = 0;
        let mut dropped = false;
        while at < kept.len() {
            if left == 0 {
                return kept;
            }
            let end = (at + piece).min(kept.len());
            let mut shorter = kept.clone();
            shorter.drain(at..end);
            // Without a pause nothing is tried.
            let is_whole = shorter.iter().any(|step| step.action == Action::Pause);
            left -= usize::from(is_whole);
            if is_whole && fails(&shorter) {
                kept = shorter;
                dropped = true;
            } else {
                at = end;
            }
        }
        match (piece, dropped) {
            (1, false) => return kept,
            (1, true) => {}
            _ => piece = piece.div_ceil(2),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storm::generate;

    #[test]
    fn what_matters_is_left() {
        let steps = generate::steps(7);
        let wanted = [steps[3].clone(), steps[11].clone()];
        let fails = |steps: &[Step]| wanted.iter().all(|step| steps.contains(step));
        let short = shrink(&steps, 10_000, fails);
        assert_eq!(short.len(), 3, "{short:?}");
        assert!(short.iter().any(|step| step.action == Action::Pause));
    }
}
