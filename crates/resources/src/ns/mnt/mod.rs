//! Mounts: mount_namespaces(7).
//!
//! A dump sees the mounts from inside. Those of file systems that the host has mounted, too, are
//! copied from the host's at a restore; those that belong to the namespace alone are made again,
//! and what a tmpfs holds is in the image.
//!
//! - What: mount namespaces
//! - Kept: one of the whole tree, with its mounts as they are stacked, their attributes and
//!   propagation; the files of each tmpfs; proc, sysfs, devpts, mqueue, and what the host has
//!   mounted as well. `--root` names the root directory at a restore, `--external mnt[…]:…` what is
//!   mounted from elsewhere.
//! - Refused: "the mount at …, which is on none of the tree's"; "option … of the mount at …"; "a
//!   mount of … at …"; "the mount at …, which is hidden by others"; "the mount at …, of
//!   a deleted file"; "the mount at …, which shares its mounts with the host"; "the mount at …,
//!   whose master is not known"; "option … of the … at …"; "a tmpfs at … with more than … bytes".
//! - At a restore: "the mount at … is external (…): --external"; "the root directory of the tree
//!   is not known: --root".
//! - CRIU 4.2: kept, with overlay and others; what the host has mounted, by `--external` alone.

mod build;
mod contents;
mod file_system;
mod list;
mod record;

use self::file_system::FileSystem;
use self::record::{Mount, Record};
use super::kind::{Construction, FIRST_TAG, Kind, Tree, record_name};
use crate::{Error, Result};

/// See the file.
pub struct Mnt;

impl Kind for Mnt {
    type Record = Record;
    const TAG: u16 = FIRST_TAG + 3;
    const NAME: &'static str = "mnt";
    const FLAG: libc::c_int = libc::CLONE_NEWNS;

    fn dump(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Record> {
        list::read(tree, refused)
    }

    fn check(record: &Record) -> Result<()> {
        let corrupt = |what| Err(Error::corrupt(record_name(Self::NAME), what));
        let Some(root) = record.mounts.first() else {
            return corrupt("has no mounts");
        };
        let is_known = |mount: &Mount| (mount.file_system as usize) < record.file_systems.len();
        let is_placed = |(at, mount): (usize, &Mount)| {
            let parent = record.mounts[..at].get(mount.parent as usize);
            parent.is_some_and(|parent| mount.is_on(parent))
        };
        let is_root = root.parent == 0 && root.point == b"/";
        let mut others = record.mounts.iter().enumerate().skip(1);
        let are_sound = record
            .mounts
            .iter()
            .all(|one| is_known(one) && one.is_sound());
        if !is_root || !are_sound || !others.all(is_placed) {
            return corrupt("has no such mount");
        }
        match record.file_systems.iter().all(FileSystem::is_sound) {
            true => Ok(()),
            false => corrupt("has no such file system"),
        }
    }

    fn restore(record: &Record, construction: &Construction<'_>) -> Result<()> {
        build::build(record, construction)
    }

    fn describe(record: &Record) -> String {
        let (mounts, files) = (record.mounts.len(), record.file_systems.iter());
        let files = files.map(|one| one.contents.len()).sum::<usize>();
        format!("{mounts} mounts, {files} files of tmpfs")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::NamespaceOptions;

    #[test]
    fn mounts_of_this_process_are_read_and_sound() {
        let tree = Tree {
            root: 1,
            tasks: &[],
            options: &NamespaceOptions::default(),
        };
        let mut refused = Vec::new();
        let record = Mnt::dump(&tree, &mut refused).expect("it is read");
        Mnt::check(&record).expect("it is sound");
        let root = &record.mounts[0];
        assert_eq!((&root.point[..], root.parent), (&b"/"[..], 0));
        // The host has mounted what it has mounted.
        let mut mounts = record.mounts.iter();
        assert!(mounts.any(|mount| mount.host.as_deref() == Some(b"/proc")));
    }

    #[test]
    fn mounts_that_no_kernel_has_are_corrupt() {
        let mount = |parent, point: &str| Mount {
            parent,
            point: point.into(),
            root: b"/".to_vec(),
            ..Mount::default()
        };
        let sound = Record {
            file_systems: vec![FileSystem::default()],
            mounts: vec![mount(0, "/"), mount(0, "/a"), mount(1, "/a/b")],
        };
        Mnt::check(&sound).expect("it is sound");
        let forged = |change: &dyn Fn(&mut Record)| {
            let mut record = sound.clone();
            change(&mut record);
            Mnt::check(&record).expect_err("it is forged");
        };
        forged(&|record| record.mounts.clear());
        forged(&|record| record.mounts[0].parent = 1);
        forged(&|record| record.mounts[1].parent = 1);
        forged(&|record| record.mounts[2].parent = 7);
        forged(&|record| record.mounts[0].point = b"/a".to_vec());
        forged(&|record| record.mounts[2].point = b"/b".to_vec());
        forged(&|record| record.mounts[1].file_system = 1);
        forged(&|record| record.mounts[1].point = b"a".to_vec());
        forged(&|record| record.mounts[1].point = b"/../a".to_vec());
        forged(&|record| record.mounts[1].root = b"/a\0".to_vec());
        forged(&|record| record.mounts[1].host = Some(b"/x/..".to_vec()));
        forged(&|record| record.mounts[1].attributes = libc::MOUNT_ATTR_IDMAP);
    }
}
