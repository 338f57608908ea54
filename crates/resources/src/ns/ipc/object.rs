//! The attributes that all objects of System V have: number, key, owners and permissions
//! (sysvipc(7)).

use std::io::{self, ErrorKind};

use sys::identity::as_user;

use crate::{Error, Result};

/// An object.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Object {
    /// Its number.
    #[prost(int32, tag = "1")]
    pub id: i32,
    /// Its key; 0 for none.
    #[prost(int32, tag = "2")]
    pub key: i32,
    /// Its permissions.
    #[prost(uint32, tag = "3")]
    pub mode: u32,
    /// Its owner.
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    /// Its owner's group.
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    /// The user that made it.
    #[prost(uint32, tag = "6")]
    pub maker_uid: u32,
    /// The group that made it.
    #[prost(uint32, tag = "7")]
    pub maker_gid: u32,
}

/// A row of a file in /proc/sysvipc.
pub(super) struct Row {
    pub object: Object,
    /// The first number that is not the same of all kinds: the size of a segment, in bytes, how
    /// many semaphores a set has, how many bytes are in a queue.
    pub size: u64,
    /// How many have a segment attached.
    pub attached: u64,
}

/// A kind of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ObjectKind {
    Segment,
    SemaphoreSet,
    MessageQueue,
}

impl ObjectKind {
    /// Its file in /proc/sysvipc.
    fn file(self) -> &'static str {
        match self {
            Self::Segment => "shm",
            Self::SemaphoreSet => "sem",
            Self::MessageQueue => "msg",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Segment => "shared memory",
            Self::SemaphoreSet => "semaphores",
            Self::MessageQueue => "message queue",
        }
    }

    /// The column of the owner, whose group and makers follow.
    fn owner(self) -> usize {
        match self {
            Self::Segment | Self::MessageQueue => 7,
            Self::SemaphoreSet => 4,
        }
    }

    fn row(self, line: &str) -> Option<Row> {
        const SIZE: usize = 3;
        const ATTACHED: usize = 6;
        let words = line.split_whitespace().collect::<Vec<_>>();
        let word = |at: usize| words.get(at)?.parse().ok();
        let owner = |at: usize| word(self.owner() + at);
        let object = Object {
            key: words.first()?.parse().ok()?,
            id: words.get(1)?.parse().ok()?,
            mode: u32::from_str_radix(words.get(2)?, 8).ok()? & 0o777,
            uid: owner(0)?,
            gid: owner(1)?,
            maker_uid: owner(2)?,
            maker_gid: owner(3)?,
        };
        Some(Row {
            object,
            size: words.get(SIZE)?.parse().ok()?,
            attached: words.get(ATTACHED)?.parse().ok()?,
        })
    }

    /// The objects of this process's namespace.
    pub fn list(self) -> Result<Vec<Row>> {
        let path = sys::procfs::path(format_args!("sysvipc/{}", self.file()));
        let failed = |error: io::Error| Error::kernel(format!("cannot read {path}"), error);
        let text = std::fs::read_to_string(&path).map_err(failed)?;
        let rows = text.lines().skip(1).map(|line| self.row(line));
        let rows = rows.collect::<Option<Vec<_>>>();
        rows.ok_or_else(|| failed(ErrorKind::InvalidData.into()))
    }

    /// Makes an object again by `make`, as the user that made it before and with its number, and
    /// fills it by `fill`.
    ///
    /// # Errors
    /// [`Error::Kernel`], which names it.
    pub fn restore(
        self,
        object: &Object,
        make: impl FnOnce() -> io::Result<i32> + Send,
        fill: impl FnOnce() -> io::Result<()>,
    ) -> Result<()> {
        let file = format!("sys/kernel/{}_next_id", self.file());
        let made = sys::procfs::write(&file, object.id.to_string());
        let made = made.and_then(|()| as_user(object.maker_uid, object.maker_gid, make));
        let filled = made.and_then(|id| match id == object.id {
            true => fill(),
            false => Err(io::Error::other(format!("it got the number {id}"))),
        });
        filled.map_err(|error| {
            let doing = format!("cannot make System V {} {}", self.name(), object.id);
            Error::kernel(doing, error)
        })
    }
}

impl Object {
    /// Tells whether a dump could have written it.
    pub fn is_sound(&self) -> bool {
        let ids = [self.uid, self.gid, self.maker_uid, self.maker_gid];
        self.id >= 0 && self.mode <= 0o777 && !ids.contains(&u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_by_their_kinds() {
        let segment = " 1311  7  1640  8192  40 41  2  1 2 3 4  5 6 7  8192 0";
        let set = "   -5  0   600     3     1     2     3     4  10  20";
        let queue = "    0 32768   644  12   2   30   31   1   2   3   4   5   6   7";
        for (file, line, id, size) in [
            (ObjectKind::Segment, segment, 7, 8192),
            (ObjectKind::SemaphoreSet, set, 0, 3),
            (ObjectKind::MessageQueue, queue, 32768, 12),
        ] {
            let row = file.row(line).expect("a row");
            assert_eq!((row.object.id, row.size), (id, size));
            let Object {
                uid,
                gid,
                maker_uid,
                maker_gid,
                ..
            } = row.object;
            assert_eq!([uid, gid, maker_uid, maker_gid], [1, 2, 3, 4]);
        }
        assert_eq!(ObjectKind::Segment.row(segment).expect("a row").attached, 2);
        assert_eq!(
            ObjectKind::Segment.row(segment).expect("a row").object.mode,
            0o640
        );
        assert_eq!(
            ObjectKind::SemaphoreSet.row(set).expect("a row").object.key,
            -5
        );
        assert!(ObjectKind::MessageQueue.row("1 2").is_none());
    }
}
