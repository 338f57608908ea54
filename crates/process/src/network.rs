//! The rules that hold back the connections of trees that were dumped and not restored yet: a
//! table of nf_tables for each image, which says what it is for.

use std::net::SocketAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use image::ImageId;
use resources::fd::tcp::lock::{self, Label};
use store::{Images, Store};
use sys::nft;

use crate::text::date;
use crate::{DumpOptions, Error, Result};

/// A table that drops the packets of connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NetworkTable {
    /// Its name.
    pub name: String,
    /// The image that it waits for.
    pub image: Option<String>,
    /// The root task of the tree.
    pub root: Option<i32>,
    /// When it was made.
    pub since: Option<String>,
    /// The directory of the image at that time.
    pub images_dir: Option<PathBuf>,
    /// The connections: this end, the other end.
    pub connections: Vec<(SocketAddr, SocketAddr)>,
    /// Whether somebody waits for it.
    pub standing: Standing,
}

/// Whether a table is still needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Its image is there and can be restored.
    Waits,
    /// Its image is not there any more.
    ImageGone,
    /// Nobody knows: it does not say where its image is, or the file system is not there.
    Unknown,
    /// It belongs to a dump that is under way, and ends with it.
    DumpUnderWay,
}

/// Which tables are to be removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Clearing {
    /// Those whose image is gone.
    Gone,
    /// Those of the image in this directory, or of one that was there.
    Image(PathBuf),
    /// All but those of dumps under way.
    All,
}

/// Lists the tables that stand in this network namespace.
///
/// # Errors
/// [`Error::Kernel`]: listing takes `CAP_NET_ADMIN`.
pub fn network_tables() -> Result<Vec<NetworkTable>> {
    let tables = nft::tables(lock::PREFIX);
    let tables = tables.map_err(|e| Error::kernel("cannot list the tables of nf_tables", e))?;
    Ok(tables.into_iter().map(describe).collect())
}

/// Removes tables, after which the host answers the packets of their connections: that there is no
/// such connection. Returns those that were removed.
///
/// # Errors
/// Those of [`network_tables`].
pub fn clear_network(which: &Clearing) -> Result<Vec<NetworkTable>> {
    let dir = match which {
        Clearing::Image(dir) => {
            let absolute = std::fs::canonicalize(dir).or_else(|_| std::path::absolute(dir));
            Some((image_in(dir), absolute.ok()))
        }
        Clearing::Gone | Clearing::All => None,
    };
    let is_meant = |table: &NetworkTable| match &dir {
        _ if table.standing == Standing::DumpUnderWay => false,
        Some((image, dir)) => {
            let same = |image: &ImageId| table.image == Some(image.to_string());
            image.as_ref().is_some_and(same) || dir.is_some() && *dir == table.images_dir
        }
        None => *which == Clearing::All || table.standing == Standing::ImageGone,
    };
    let mut cleared = Vec::new();
    for table in network_tables()?.into_iter().filter(is_meant) {
        let removed = nft::unblock(&table.name);
        removed.map_err(|e| Error::kernel(format!("cannot remove the table {}", table.name), e))?;
        cleared.push(table);
    }
    Ok(cleared)
}

/// What the table of an image says of itself.
///
/// # Errors
/// [`Error::Kernel`] when the directory cannot be looked at.
pub(crate) fn label(image: ImageId, options: &DumpOptions) -> Result<Label> {
    let (path, device) = match options.images.directory() {
        Some(dir) => {
            let failed = |e| Error::kernel(format!("cannot look at {}", dir.display()), e);
            let path = std::fs::canonicalize(dir).map_err(failed)?;
            let device = std::fs::metadata(&path).map_err(failed)?.dev();
            (path, device)
        }
        // Whether the image is still there cannot be known then.
        None => (options.images.to_string().into(), 0),
    };
    let root = options.tree.as_raw_nonzero();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = date(now.unwrap_or_default().as_secs());
    let text = format!("image {image} of pid {root}, dumped {now}, device {device:#x}");
    Ok(Label { text, path })
}

/// What a label says: image, root task, time, device.
fn read(text: &str) -> Option<(String, i32, String, u64)> {
    let (image, rest) = text.strip_prefix("image ")?.split_once(" of pid ")?;
    let (root, rest) = rest.split_once(", dumped ")?;
    let (since, device) = rest.split_once(", device 0x")?;
    let device = u64::from_str_radix(device, 16).ok()?;
    Some((
        image.to_owned(),
        root.parse().ok()?,
        since.to_owned(),
        device,
    ))
}

fn describe(table: nft::Table) -> NetworkTable {
    let said = read(&table.label.text);
    let images_dir = table.is_path_whole.then_some(table.label.path);
    let standing = match (&said, &images_dir) {
        _ if table.is_owned => Standing::DumpUnderWay,
        (Some((image, _, _, device)), Some(dir)) => standing(image, dir, *device),
        _ => Standing::Unknown,
    };
    let connections = table.connections.iter();
    let (image, root, since) = match said {
        Some((image, root, since, _)) => (Some(image), Some(root), Some(since)),
        None => (None, None, None),
    };
    NetworkTable {
        name: table.name,
        image,
        root,
        since,
        images_dir,
        connections: connections.map(|one| (one.local, one.remote)).collect(),
        standing,
    }
}

fn standing(image: &str, dir: &Path, device: u64) -> Standing {
    if image_in(dir).is_some_and(|found| found.to_string() == image) {
        return Standing::Waits;
    }
    // It is gone only where it would be seen: its file system may not be mounted.
    let nearest = dir.ancestors().find_map(|dir| std::fs::metadata(dir).ok());
    match nearest {
        Some(found) if found.dev() == device => Standing::ImageGone,
        _ => Standing::Unknown,
    }
}

fn image_in(dir: &Path) -> Option<ImageId> {
    image::current(&*Images::from(dir).open().ok()?)
}

/// Whether the table of this name stands; `None` where that cannot be known.
pub(crate) fn stands(name: &str) -> Option<bool> {
    let tables = nft::tables(name).ok()?;
    Some(
        tables
            .iter()
            .any(|table| table.name == name && !table.is_owned),
    )
}

/// An image that another one takes the place of: nobody can restore it then.
pub(crate) struct Replaced(Option<ImageId>);

impl Replaced {
    /// The image that is in this store.
    pub fn of(store: &dyn Store) -> Self {
        Self(image::current(store))
    }

    /// Removes its table, if it has one.
    pub fn clear(self) {
        let Some(image) = self.0 else { return };
        let prefix = format!("image {image} ");
        // Without rules, or the right to see them, there is nothing to remove.
        let tables = nft::tables(lock::PREFIX).unwrap_or_default();
        let mine = tables
            .iter()
            .filter(|table| table.label.text.starts_with(&prefix));
        for table in mine.filter(|table| !table.is_owned) {
            if let Err(error) = nft::unblock(&table.name) {
                log::warn!("the table {} of image {image} stays: {error}", table.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_read_again() {
        let scratch = tempfile::tempdir().unwrap();
        let root = rustix::process::Pid::from_raw(4711).unwrap();
        let options = DumpOptions::new(root, scratch.path());
        let image = ImageId([7; 16]);
        let label = label(image, &options).unwrap();
        assert!(label.text.len() < 127, "{}", label.text);
        let (said, root, since, device) = read(&label.text).unwrap();
        assert_eq!((said, root), (image.to_string(), 4711));
        assert!(since.ends_with(" UTC"), "{since}");
        // Nothing is there: it is gone, unless the file system is another one.
        let of = |device| standing(&image.to_string(), scratch.path(), device);
        assert_eq!(of(device), Standing::ImageGone);
        assert_eq!(of(device + 1), Standing::Unknown);
        for text in [
            "",
            "image x of pid y, dumped z, device 0x1",
            "somebody's own",
        ] {
            assert_eq!(read(text), None);
        }
    }
}
