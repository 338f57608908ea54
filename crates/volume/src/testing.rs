//! All that our reader shows of a file system, as the kernel shows it.

use testkit::volumes::{Facts, Tree, sum};

use crate::ext4::{FileSystem, Inode, Kind, ROOT};
use crate::{ReadAt, Result};

/// All that our reader shows of a file system.
pub fn seen_by_us<S: ReadAt>(fs: &FileSystem<S>) -> Result<Tree> {
    let mut tree = Tree::new();
    let mut seen = std::collections::HashSet::from([ROOT]);
    let mut folders = vec![(ROOT, Vec::new())];
    while let Some((folder, path)) = folders.pop() {
        let folder = fs.inode(folder, 0)?;
        let mut entries = Vec::new();
        fs.walk_entries(&folder, &mut |entry| {
            entries.push(entry);
            Ok(())
        })?;
        for entry in entries {
            let mut name: Vec<u8> = path.clone();
            if !name.is_empty() {
                name.push(b'/');
            }
            name.extend(&entry.name);
            if name == b"lost+found" {
                continue;
            }
            let inode = fs.inode(entry.inode, entry.block)?;
            if inode.kind() == Kind::Directory && seen.insert(entry.inode) {
                folders.push((entry.inode, name.clone()));
            }
            tree.insert(name, facts(fs, &inode)?);
        }
    }
    Ok(tree)
}

fn facts<S: ReadAt>(fs: &FileSystem<S>, inode: &Inode) -> Result<Facts> {
    let contents = match inode.kind() {
        Kind::Regular => {
            let mut pieces = Vec::new();
            if inode.is_inline() {
                pieces.push((0, fs.inline_data(inode)?));
            } else {
                fs.walk_blocks(inode, &mut |met| {
                    let crate::ext4::BlockItem::Blocks(mapped) = met else {
                        return Ok(());
                    };
                    let block = u64::from(fs.superblock().block_bytes);
                    for at in 0..if mapped.is_unwritten {
                        0
                    } else {
                        mapped.blocks
                    } {
                        let at_bytes = (mapped.logical + at) * block;
                        let mut bytes = fs.block(mapped.physical + at)?;
                        let len = inode.size_bytes().saturating_sub(at_bytes);
                        bytes.truncate(len.min(block) as usize);
                        pieces.push((at_bytes, bytes));
                    }
                    Ok(())
                })?;
            }
            sum(pieces.into_iter())
        }
        Kind::Link => sum(std::iter::once((0, fs.link_target(inode)?))),
        _ => 0,
    };
    let is_device = matches!(inode.kind(), Kind::Block | Kind::Character);
    let is_folder = inode.kind() == Kind::Directory;
    let all = fs.attributes(inode)?.into_iter();
    let mut attributes = all.map(|one| (one.name, one.value)).collect::<Vec<_>>();
    attributes.sort();
    Ok(Facts {
        mode: inode.mode().into(),
        uid: inode.uid(),
        gid: inode.gid(),
        size: if is_folder { 0 } else { inode.size_bytes() },
        modified_s: inode.modified().s,
        device: if is_device { inode.device() } else { (0, 0) },
        contents,
        attributes,
    })
}
