//! Signals that are blocked and pending: for the process, for its thread, and for a second thread;
//! several of one real-time number, with values. One that is ignored, one with a handler.
//!
//! `drain` takes what is pending of the first thread off the queue: "number code value" each;
//! `drain-second` the same of the second; `unblock` lets a handled one through and answers its
//! count and last value.
use std::sync::mpsc::channel;
use std::thread;

use rustix::thread::gettid;

use super::{Control, Failure, not_understood};
use crate::calls::{
    block_signals, count_signal, counted, ignore_signal, queue_signal, take_signal, unblock_signals,
};

const USR1: i32 = 10;
const USR2: i32 = 12;
const WINCH: i32 = 28;
const REAL_TIME: [i32; 2] = [40, 50];

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let blocked = [USR1, USR2, REAL_TIME[0], REAL_TIME[1]];
    block_signals(&blocked);
    ignore_signal(WINCH)?;
    count_signal(USR2, 0)?;
    let (asks, questions) = channel::<()>();
    let (answers, answered) = channel();
    let second = thread::Builder::new().name("second".into()).spawn(move || {
        let tid = gettid().as_raw_pid().cast_unsigned();
        let queued = queue_signal(Some(tid), REAL_TIME[1], 500);
        answers
            .send(queued.is_ok().to_string())
            .expect("the first thread listens");
        for () in questions {
            answers
                .send(drain(&[REAL_TIME[1]]))
                .expect("the first thread listens");
        }
    });
    second?;
    assert_eq!(answered.recv()?, "true");
    let own = gettid().as_raw_pid().cast_unsigned();
    for value in [1, 2, 3] {
        queue_signal(None, REAL_TIME[0], value)?;
    }
    queue_signal(None, USR1, 77)?;
    queue_signal(None, USR2, 88)?;
    queue_signal(Some(own), REAL_TIME[0], 9)?;
    control.serve(|question| match question.verb.as_str() {
        "drain" => Ok(drain(&[USR1, REAL_TIME[0]])),
        "drain-second" => {
            asks.send(())?;
            Ok(answered.recv()?)
        }
        "unblock" => {
            unblock_signals(&[USR2]);
            let counted = counted(USR2);
            Ok(format!("{} {}", counted.count, counted.last_value))
        }
        _ => not_understood(question),
    })
}

fn drain(signals: &[i32]) -> String {
    let taken = std::iter::from_fn(|| take_signal(signals));
    let shown: Vec<String> = taken
        .map(|(signal, code, value)| format!("{signal} {code} {value}"))
        .collect();
    shown.join(", ")
}
