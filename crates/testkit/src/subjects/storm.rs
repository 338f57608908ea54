//! Makes steps that were made from a seed: [`crate::storm`].
use super::{Control, Failure};

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    crate::storm::serve(control, arguments)
}
