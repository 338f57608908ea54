//! POSIX message queues: one with messages of several priorities, which parent and child read, one
//! on which a thread waits for a message, one that is full and on which a thread waits for room.
//!
//! `check` answers "right" if the messages are there in order, `take` what the thread gets that
//! waits for a message, `give` what comes out of the full one when there is room; `remove` takes
//! the names away.
use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use rustix::fs::OFlags;
use sys::mqueue::{self, Attributes, Message};

use super::{Control, Failure, not_understood};

const MESSAGES: [(u32, &str); 4] = [(9, "first"), (5, "second"), (5, ""), (0, "last")];
const MESSAGE_BYTES: usize = 100;

/// Makes a queue for so many messages.
fn make(name: &str, max_messages: u64) -> Result<(CString, OwnedFd), Failure> {
    let name = CString::new(format!("stillframe-{name}-{}", std::process::id()))?;
    let room = Attributes {
        max_messages,
        message_bytes: MESSAGE_BYTES as u64,
        messages: 0,
    };
    let queue = mqueue::create(&name, room)?;
    Ok((name, queue))
}

fn send(queue: &OwnedFd, priority: u32, text: &str) -> std::io::Result<()> {
    let bytes = text.as_bytes().to_vec();
    mqueue::send(queue, &Message { priority, bytes })
}

fn receive(queue: &OwnedFd) -> Result<String, Failure> {
    let message = mqueue::receive(queue, &mut [0; MESSAGE_BYTES])?;
    let message = message.ok_or("there is no message")?;
    Ok(format!(
        "{} {}",
        message.priority,
        String::from_utf8(message.bytes)?
    ))
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let (ordered_name, ordered) = make("ordered", 4)?;
    for (priority, text) in MESSAGES {
        send(&ordered, priority, text)?;
    }
    let _reader = mqueue::open(&ordered_name, OFlags::RDONLY)?;
    let (empty_name, empty) = make("empty", 1)?;
    let (full_name, full) = make("full", 1)?;
    send(&full, 1, "before")?;
    let (tells, told) = channel();
    let waiting = mqueue::open(&empty_name, OFlags::RDONLY)?;
    let waits = Arc::new(waiting);
    thread::spawn(move || {
        while tells
            .send(receive(&waits).map_err(|error| error.to_string()))
            .is_ok()
        {}
    });
    let sending = mqueue::open(&full_name, OFlags::WRONLY)?;
    thread::spawn(move || send(&sending, 2, "after").expect("there is room at some time"));
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            let all = MESSAGES.iter().map(|_| receive(&ordered));
            let all = all.collect::<Result<Vec<_>, _>>()?;
            for (priority, text) in MESSAGES {
                send(&ordered, priority, text)?;
            }
            let wanted = MESSAGES.map(|(priority, text)| format!("{priority} {text}"));
            Ok(if all == wanted {
                "right".to_owned()
            } else {
                all.join(", ")
            })
        }
        "take" => {
            send(&empty, 3, "taken")?;
            Ok(told.recv()??)
        }
        "give" => Ok(receive(&full).unwrap_or_else(|error| error.to_string())),
        "remove" => {
            let names = [&ordered_name, &empty_name, &full_name];
            names.iter().try_for_each(|name| mqueue::unlink(name))?;
            Ok("removed".to_owned())
        }
        _ => not_understood(question),
    })
}
