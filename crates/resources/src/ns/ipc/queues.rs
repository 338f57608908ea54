//! Message queues of System V.

use sys::msg;

use super::object::{File, Object, Row};
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

pub(super) fn read() -> Result<Vec<MessageQueue>> {
    let read = |row: Row| {
        let id = row.object.id;
        let doing = || format!("cannot read System V message queue {id}");
        let failed = |error| Error::kernel(doing(), error);
        let messages = msg::peek(id).map_err(failed)?.into_iter();
        let messages = messages.map(|message| Message {
            kind: message.kind,
            bytes: message.bytes,
        });
        Ok(MessageQueue {
            room_bytes: msg::room_bytes(id).map_err(failed)?,
            messages: messages.collect(),
            object: row.object,
        })
    };
    File::Queues.list()?.into_iter().map(read).collect()
}

impl MessageQueue {
    pub fn is_sound(&self) -> bool {
        self.object.is_sound() && self.messages.iter().all(|message| message.kind > 0)
    }

    pub fn restore(&self) -> Result<()> {
        let Object {
            id,
            key,
            mode,
            uid,
            gid,
            ..
        } = self.object;
        let made = File::Queues.create(&self.object, || msg::create(key, mode));
        let made = made.and_then(|()| {
            for Message { kind, bytes } in &self.messages {
                let (kind, bytes) = (*kind, bytes.clone());
                msg::send(id, &msg::Message { kind, bytes })?;
            }
            msg::give(id, uid, gid, mode, self.room_bytes)
        });
        let doing = || format!("cannot make System V message queue {id}");
        made.map_err(|error| Error::kernel(doing(), error))
    }
}
