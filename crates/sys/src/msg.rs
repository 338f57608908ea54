//! System V message queues: msgctl(2), msgop(2).

use std::io::{self, Error};

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Its type, above 0.
    pub kind: i64,
    /// Its text.
    pub bytes: Vec<u8>,
}

/// Where a message's text begins: behind its type.
const HEAD_BYTES: usize = size_of::<libc::c_long>();

fn done(result: libc::c_int) -> io::Result<libc::c_int> {
    match result {
        ..0 => Err(Error::last_os_error()),
        result => Ok(result),
    }
}

fn stat(queue: i32) -> io::Result<libc::msqid_ds> {
    // SAFETY: the structure is plain numbers, for which zeros are valid.
    let mut told: libc::msqid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the structure, which lives through the call.
    done(unsafe { libc::msgctl(queue, libc::IPC_STAT, &raw mut told) })?;
    Ok(told)
}

/// How many bytes of text fit into a queue.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is no such queue, `EACCES`.
pub fn room_bytes(queue: i32) -> io::Result<u64> {
    Ok(stat(queue)?.msg_qbytes)
}

/// The messages of a queue, which stay there.
///
/// # Errors
/// As msgrcv(2): `ENOSYS` where the kernel cannot copy messages (`MSG_COPY`), `EINVAL` for one that
/// is longer than kernel.msgmax.
pub fn peek(queue: i32) -> io::Result<Vec<Message>> {
    const MSG_COPY: libc::c_int = 0o40000;
    let told = stat(queue)?;
    let text_bytes = usize::try_from(told.__msg_cbytes).unwrap_or(usize::MAX);
    let mut room = vec![0_u8; HEAD_BYTES.saturating_add(text_bytes)];
    let mut all = Vec::new();
    for index in 0..told.msg_qnum {
        let at = room.as_mut_ptr().cast();
        let flags = libc::IPC_NOWAIT | MSG_COPY;
        // SAFETY: there is room for a type and as much text as all messages have together.
        let got = unsafe { libc::msgrcv(queue, at, text_bytes, index.cast_signed(), flags) };
        let Ok(got) = usize::try_from(got) else {
            return Err(Error::last_os_error());
        };
        let (head, text) = room.split_at(HEAD_BYTES);
        all.push(Message {
            kind: i64::from_ne_bytes(head.try_into().expect("eight bytes")),
            bytes: text[..got].to_vec(),
        });
    }
    Ok(all)
}

/// Makes a queue and gives its number. `key`: 0 (`IPC_PRIVATE`) for none.
///
/// # Errors
/// As msgget(2): `EEXIST` when the key is taken, `ENOSPC`.
pub fn create(key: i32, mode: u32) -> io::Result<i32> {
    let flags = libc::IPC_CREAT | libc::IPC_EXCL | mode.cast_signed();
    // SAFETY: the call takes two numbers.
    done(unsafe { libc::msgget(key, flags) })
}

/// Adds a message, without waiting for room.
///
/// # Errors
/// As msgsnd(2): `EAGAIN` without room, `EINVAL` for a type that none has.
pub fn send(queue: i32, message: &Message) -> io::Result<()> {
    let head = message.kind.to_ne_bytes();
    let whole = [&head[..], &message.bytes].concat();
    let (at, bytes) = (whole.as_ptr().cast(), message.bytes.len());
    // SAFETY: the type and the text stand one behind the other, and live through the call.
    done(unsafe { libc::msgsnd(queue, at, bytes, libc::IPC_NOWAIT) }).map(drop)
}

/// Gives a queue its owner, permissions and room.
///
/// # Errors
/// As msgctl(2): `EPERM` without `CAP_SYS_RESOURCE` for more room than a new queue gets.
pub fn give(queue: i32, uid: u32, gid: u32, mode: u32, room_bytes: u64) -> io::Result<()> {
    let mut told = stat(queue)?;
    (told.msg_perm.uid, told.msg_perm.gid) = (uid, gid);
    told.msg_perm.mode = mode as _;
    told.msg_qbytes = room_bytes;
    // SAFETY: the kernel reads the structure, which lives through the call.
    done(unsafe { libc::msgctl(queue, libc::IPC_SET, &raw mut told) }).map(drop)
}

/// Removes a queue.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is none, `EPERM`.
pub fn remove(queue: i32) -> io::Result<()> {
    // SAFETY: the command takes nothing.
    done(unsafe { libc::msgctl(queue, libc::IPC_RMID, std::ptr::null_mut()) }).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_seen_and_stay() {
        let queue = create(0, 0o640).expect("a queue");
        let message = |kind, text: &str| Message {
            kind,
            bytes: text.into(),
        };
        let all = [message(3, "three"), message(1, ""), message(7, "seven")];
        all.iter().for_each(|one| send(queue, one).expect("room"));
        let seen = [(); 2].map(|()| peek(queue));
        let room = room_bytes(queue).expect("it is there");
        give(queue, 12, 34, 0o600, room / 2).expect("less room");
        let told = stat(queue).expect("it is there");
        remove(queue).expect("it is ours");
        for seen in seen {
            match seen {
                Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => {}
                seen => assert_eq!(seen.expect("copies"), all),
            }
        }
        assert_eq!((told.msg_perm.uid, told.msg_perm.gid), (12, 34));
        assert_eq!((told.msg_perm.mode, told.msg_qbytes), (0o600, room / 2));
    }
}
