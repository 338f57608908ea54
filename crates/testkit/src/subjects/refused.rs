//! A task that holds what cannot be saved. Argument: `io_uring`, one with credentials of its own.
//!
//! `fd` answers its descriptor, `count` how often it was asked.
use std::os::fd::{AsFd, AsRawFd};

use crate::calls::io_uring;

use super::{Control, Failure, not_understood};

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let held = match arguments.first().map(String::as_str) {
        Some("io_uring") => {
            let ring = io_uring()?;
            crate::calls::register_personality(ring.as_fd())?;
            ring
        }
        other => return Err(format!("{other:?} is nothing to hold").into()),
    };
    let mut count = 0;
    control.serve(|question| match question.verb.as_str() {
        "fd" => Ok(held.as_raw_fd().to_string()),
        "count" => {
            count += 1;
            Ok(count.to_string())
        }
        _ => not_understood(question),
    })
}
