//! The open file descriptions of a tree, and indexes that find one without a look at all of them:
//! they are looked for while the tree stands.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::ops::{Deref, DerefMut};

use super::{Open, unix};

/// All descriptions of a tree that are known so far, in the order of their ids.
#[derive(Default)]
pub struct Opens<'a> {
    list: Vec<Open<'a>>,
    /// Positions in the list by inode number, in ascending order.
    inodes: OnceCell<HashMap<u64, Vec<usize>>>,
    /// What is asked about unix sockets for all of them at once.
    pub(super) unix: unix::Index,
}

impl<'a> Opens<'a> {
    /// Adds a description, whose id comes after those that are there.
    pub fn push(&mut self, open: Open<'a>) {
        self.list.push(open);
        self.inodes.take();
        self.unix = unix::Index::default();
    }

    /// The descriptions whose inode has this number, on whichever device, in ascending order.
    pub fn numbered(&self, inode: u64) -> impl Iterator<Item = &Open<'a>> {
        let inodes = self.inodes.get_or_init(|| {
            let mut inodes = HashMap::<_, Vec<_>>::new();
            for (position, open) in self.list.iter().enumerate() {
                inodes.entry(open.stat.st_ino).or_default().push(position);
            }
            inodes
        });
        let positions = inodes.get(&inode).map_or(&[][..], Vec::as_slice);
        positions.iter().map(|position| &self.list[*position])
    }

    /// The descriptions of the same inode as `open`, in ascending order.
    pub fn of_inode<'s>(
        &'s self,
        open: &Open<'_>,
    ) -> impl Iterator<Item = &'s Open<'a>> + use<'s, 'a> {
        let device = open.stat.st_dev;
        let all = self.numbered(open.stat.st_ino);
        all.filter(move |other| other.stat.st_dev == device)
    }
}

impl<'a> FromIterator<Open<'a>> for Opens<'a> {
    fn from_iter<I: IntoIterator<Item = Open<'a>>>(opens: I) -> Self {
        Self {
            list: opens.into_iter().collect(),
            ..Self::default()
        }
    }
}

impl<'a> Deref for Opens<'a> {
    type Target = [Open<'a>];

    fn deref(&self) -> &[Open<'a>] {
        &self.list
    }
}

impl<'a> DerefMut for Opens<'a> {
    fn deref_mut(&mut self) -> &mut [Open<'a>] {
        &mut self.list
    }
}
