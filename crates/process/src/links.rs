//! Hard links that a dump made for an image (`--link-remap`): they stay as long as it does.
//!
//! A file without the name by which it is open is found again by such a link. The restore removes
//! it; of an image that is replaced or removed, this does.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use image::{Reader, Record};
use prost::Message;
use resources::fd::place::is_link_name;
use store::Store;

use crate::records::tag;

/// The links of an image on disk.
#[derive(Clone, PartialEq, Message)]
struct Links {
    #[prost(message, repeated, tag = "1")]
    links: Vec<Link>,
}

/// One link.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Link {
    /// Its absolute path.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// The device of the file.
    #[prost(uint64, tag = "2")]
    pub dev: u64,
    /// The file's inode.
    #[prost(uint64, tag = "3")]
    pub ino: u64,
}

impl Link {
    /// Its path.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(OsStr::from_bytes(&self.path))
    }

    /// Removes it, if it still is a link to the file. An image may claim anything: only what is
    /// called as such links are is removed.
    fn remove(&self) {
        let path = self.path();
        let is_it = rustix::fs::lstat(&path)
            .is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (self.dev, self.ino));
        if path.is_absolute() && path.file_name().is_some_and(is_link_name) && is_it {
            match std::fs::remove_file(&path) {
                Ok(()) => log::info!("{} is removed: it was an older image's", path.display()),
                Err(error) => log::warn!("{} stays: {error}", path.display()),
            }
        }
    }
}

/// The record of an image's links; none where there are none.
pub(crate) fn record(links: &[Link]) -> Option<Record> {
    let payload = Links {
        links: links.to_vec(),
    };
    (!links.is_empty()).then(|| Record {
        tag: tag::LINKS,
        version: 1,
        id: 0,
        payload: payload.encode_to_vec(),
    })
}

/// The links of an image; none where it tells of none.
pub(crate) fn of(reader: &Reader) -> Vec<Link> {
    let mut records = reader.records().iter();
    let record = records.find(|record| record.tag == tag::LINKS);
    let links = record.and_then(|record| Links::decode(record.payload.as_slice()).ok());
    links.unwrap_or_default().links
}

/// The links of the image in `store`, if there is one.
pub(crate) fn of_store(store: &dyn Store) -> Vec<Link> {
    Reader::open(store).map_or_else(|_| Vec::new(), |reader| of(&reader))
}

/// Removes the links of an image that is gone.
pub(crate) fn remove(links: &[Link]) {
    links.iter().for_each(Link::remove);
}

/// A link that was just made.
pub(crate) fn made(path: &Path) -> Option<Link> {
    let stat = rustix::fs::lstat(path).ok()?;
    Some(Link {
        path: path.as_os_str().as_bytes().to_vec(),
        dev: stat.st_dev,
        ino: stat.st_ino,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_are_removed() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = folder.path().join("file");
        std::fs::write(&file, "x").expect("it is writable");
        let names = ["link_remap.1", "link_remap.2", "file"];
        let [one, other, plain] = names.map(|name| folder.path().join(name));
        std::fs::hard_link(&file, &one).expect("linked");
        std::fs::write(&other, "another").expect("it is writable");
        let mut links = [&one, &other, &plain].map(|path| made(path).expect("it is there"));
        // It is another file by now.
        links[1].ino = links[0].ino;
        remove(&links);
        assert!(!one.exists() && other.exists() && plain.exists());
    }
}
