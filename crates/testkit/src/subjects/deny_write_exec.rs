//! A process that has denied itself memory which it may both write and run (`PR_SET_MDWE`), but has
//! some from before; with a second thread, and a child, made afterwards. Argument `alone`: the
//! child is not denied it.
//!
//! `check` answers "right" if both have their flags and all may run what they have from before and
//! are refused new memory of the kind, and otherwise what is wrong.
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use rustix::io::Errno;
use sys::fork::{Fork, fork};
use sys::own::{Attribute, attribute};

use super::{Control, Failure, not_understood};
use crate::calls::{WrittenCode, deny_write_exec};

const REFUSE_EXEC_GAIN: u64 = 1;
const NO_INHERIT: u64 = 2;

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let alone = arguments.first().is_some_and(|word| word == "alone");
    let code = WrittenCode::map()?;
    deny_write_exec(!alone)?;
    let (mut asked, mut ask) = pipe()?;
    let (mut told, mut tell) = pipe()?;
    let of_child = if alone { 0 } else { REFUSE_EXEC_GAIN };
    if fork()? == Fork::Child {
        drop((ask, told));
        return answer(&code, of_child, &mut asked, &mut tell);
    }
    drop((asked, tell));
    let own = REFUSE_EXEC_GAIN | if alone { NO_INHERIT } else { 0 };
    let (wakes, woken) = channel();
    let (answers, answered) = channel();
    thread::spawn(move || of_thread(&woken, &answers));
    let mut value = 0;
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            value += 1;
            wakes.send(())?;
            ask.write_all(&[0])?;
            let mut length = [0];
            told.read_exact(&mut length)?;
            let mut child = vec![0; length[0].into()];
            told.read_exact(&mut child)?;
            let all = [
                wrong(&code, value, own),
                answered.recv()?,
                String::from_utf8(child)?,
            ];
            let wrong = all.concat();
            Ok(if wrong.is_empty() {
                "right".to_owned()
            } else {
                wrong
            })
        }
        _ => not_understood(question),
    })
}

/// What is wrong for a process that is to have these flags.
fn wrong(code: &WrittenCode, value: u32, flags: u64) -> String {
    let mut wrong = String::new();
    match attribute(Attribute::Mdwe) {
        Ok(now) if now == flags => {}
        now => wrong += &format!("flags {now:?}, not {flags}; "),
    }
    if code.returned(value) != value {
        wrong += "what is written is not what is run; ";
    }
    let denied = match WrittenCode::map() {
        Ok(_) => false,
        Err(error) => error.raw_os_error() == Some(Errno::ACCESS.raw_os_error()),
    };
    if denied != (flags != 0) {
        wrong += &format!("denied: {denied}; ");
    }
    wrong
}

fn of_thread(woken: &Receiver<()>, answers: &Sender<String>) {
    while woken.recv().is_ok() {
        let denied = WrittenCode::map().is_err();
        let wrong = if denied {
            ""
        } else {
            "the thread is not denied; "
        };
        if answers.send(wrong.to_owned()).is_err() {
            return;
        }
    }
}

/// The child: what is wrong, each time that it is asked.
fn answer(
    code: &WrittenCode,
    flags: u64,
    asked: &mut PipeReader,
    tell: &mut PipeWriter,
) -> Result<(), Failure> {
    let mut value = 1000;
    // Until its parent is gone.
    while asked.read(&mut [0])? != 0 {
        value += 1;
        let wrong = wrong(code, value, flags);
        let length = u8::try_from(wrong.len())?;
        tell.write_all(&[&[length], wrong.as_bytes()].concat())?;
    }
    Ok(())
}
