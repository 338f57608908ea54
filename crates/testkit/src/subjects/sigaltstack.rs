//! Alternate signal stacks: one of the first thread, another of a second one.
//!
//! `raise` raises a signal in the first thread and answers whether its handler ran on the
//! alternate stack; `raise-second` the same in the second; `stacks` answers address, length and
//! flags of the first.
use std::sync::mpsc::channel;
use std::thread;

use rustix::thread::gettid;

use super::{Control, Failure, not_understood};
use crate::calls::{
    alternate_stack, alternate_stack_now, count_signal, last_handler_stack, queue_signal,
};

const SIGNAL: i32 = 41;
const SA_ONSTACK: i32 = 0x0800_0000;
const BYTES: usize = 64 << 10;

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    count_signal(SIGNAL, SA_ONSTACK)?;
    alternate_stack(BYTES)?;
    let (asks, questions) = channel::<()>();
    let (answers, answered) = channel();
    thread::Builder::new()
        .name("second".into())
        .spawn(move || {
            let ready = alternate_stack(2 * BYTES).map(|_| String::new());
            answers.send(ready).expect("the first thread listens");
            for () in questions {
                answers.send(raise()).expect("the first thread listens");
            }
        })?;
    answered.recv()??;
    control.serve(|question| match question.verb.as_str() {
        "raise" => Ok(raise()?),
        "raise-second" => {
            asks.send(())?;
            Ok(answered.recv()??)
        }
        "stacks" => Ok(format!("{:x?}", alternate_stack_now()?)),
        _ => not_understood(question),
    })
}

fn raise() -> std::io::Result<String> {
    let tid = gettid().as_raw_pid().cast_unsigned();
    queue_signal(Some(tid), SIGNAL, 0)?;
    let (start, bytes, _) = alternate_stack_now()?;
    let on_it = (start..start + bytes as u64).contains(&last_handler_stack());
    Ok(if on_it {
        "on the alternate stack".into()
    } else {
        "elsewhere".into()
    })
}
