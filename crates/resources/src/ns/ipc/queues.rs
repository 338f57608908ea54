//! Message queues of System V.

use rustix::io::Errno;
use sys::msg;

use super::object::{Object, ObjectKind};
use crate::ns::kind::Tree;
use crate::{Error, Result};

/// A queue.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct MessageQueue {
    #[prost(message, required, tag = "1")]
    object: Object,
    /// How much text fits, in bytes.
    #[prost(uint64, tag = "2")]
    room_bytes: u64,
    /// Its messages.
    #[prost(message, repeated, tag = "3")]
    messages: Vec<Message>,
}

/// A message.
#[derive(Clone, PartialEq, prost::Message)]
struct Message {
    /// Its type.
    #[prost(int64, tag = "1")]
    kind: i64,
    /// Its text.
    #[prost(bytes = "vec", tag = "2")]
    bytes: Vec<u8>,
}

/// Reads the queues of the namespace. The kernel copies no message that is longer than
/// kernel.msgmax is now.
pub(super) fn read(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Vec<MessageQueue>> {
    let mut all = Vec::new();
    for row in ObjectKind::MessageQueue.list()? {
        let id = row.object.id;
        let doing = || format!("cannot read System V message queue {id}");
        let failed = |error| Error::kernel(doing(), error);
        let messages = match msg::peek(id) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {
                let what = format!(
                    "System V message queue {id}, with a message longer than kernel.msgmax is now,"
                );
                refused.push(tree.unsupported(what));
                continue;
            }
            messages => messages.map_err(failed)?.into_iter(),
        };
        let messages = messages.map(|message| Message {
            kind: message.kind,
            bytes: message.bytes,
        });
        all.push(MessageQueue {
            room_bytes: msg::room_bytes(id).map_err(failed)?,
            messages: messages.collect(),
            object: row.object,
        });
    }
    Ok(all)
}

impl MessageQueue {
    pub fn is_sound(&self) -> bool {
        self.object.is_sound() && self.messages.iter().all(|message| message.kind > 0)
    }

    pub fn restore(&self) -> Result<()> {
        let object = &self.object;
        let fill = || {
            for Message { kind, bytes } in &self.messages {
                let (kind, bytes) = (*kind, bytes.clone());
                msg::send(object.id, &msg::Message { kind, bytes })?;
            }
            let room_bytes = self.room_bytes;
            msg::give(object.id, object.uid, object.gid, object.mode, room_bytes)
        };
        let make = || msg::create(object.key, object.mode);
        ObjectKind::MessageQueue.restore(object, make, fill)
    }
}
