//! The disks of a machine that is saved: what is told of them, and their files where they are saved
//! with it.
//!
//! Each file of a disk is a space of the image, also those that it is over, so what a disk has is
//! checked, layered and compressed as memory is. A guest that goes on must not change what is still
//! being read: where the file system can, each file that it writes to is cloned while it is
//! stopped; elsewhere it goes on with an overlay of QEMU's over that file.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, Permissions};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use abi::PAGE_BYTES;
use image::{Granule, ImageId, NewSpace, SpaceId, SpaceKind, Writer};
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;
use serde_json::{Value, json};
use sys::new_file::NewFile;

use super::guest::Guest;
use super::qcow2::{self, BackingFile};
use super::qmp::Qmp;
use super::record::{QemuDisk, QemuDiskFile, QemuDiskOverlay};
use super::restore::reopened;
use crate::sparse::{self, Holes, Memory};
use crate::{Error, Result};

/// The most disks of a machine, and the most files that one is over.
const DISKS_MAX: usize = 4096;
const LAYERS_MAX: usize = 256;

/// The formats whose files are saved.
pub(crate) const FORMATS: [&str; 2] = ["raw", "qcow2"];

/// A drive, as QEMU describes it (`query-block`).
#[derive(Deserialize)]
struct Drive {
    #[serde(default)]
    device: String,
    inserted: Option<InsertedMedium>,
}

#[derive(Deserialize)]
struct InsertedMedium {
    file: String,
    #[serde(rename = "node-name", default)]
    node: String,
    ro: bool,
    #[serde(default)]
    encrypted: bool,
    image: Content,
}

/// One file, and those that it is over.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Content {
    filename: String,
    format: String,
    virtual_size: u64,
    backing_filename: Option<String>,
    backing_image: Option<Box<Content>>,
    #[serde(default)]
    format_specific: Value,
}

impl Drive {
    fn name(&self, inserted: &InsertedMedium) -> String {
        match self.device.is_empty() {
            true => inserted.node.clone(),
            false => self.device.clone(),
        }
    }
}

/// A disk in use whose files are at hand.
#[derive(Debug)]
struct Disk {
    name: String,
    /// The node of QEMU's that the machine has it by.
    node: String,
    is_written: bool,
    virtual_bytes: u64,
    /// The file that is written to, what that is over, and so on.
    layers: Vec<Layer>,
}

#[derive(Debug)]
struct Layer {
    path: PathBuf,
    format: String,
    file: File,
}

/// A disk that goes on in another file.
#[derive(Clone, Debug)]
pub struct Overlay {
    /// The disk's name in QEMU.
    pub disk: String,
    /// The file that it had, which is not written to any more.
    pub former: PathBuf,
    /// The file that it has now, over the former.
    pub file: PathBuf,
    /// Its name in QEMU.
    pub node: String,
}

/// The disks of a machine that are saved with it.
#[derive(Debug)]
pub(crate) struct Disks {
    all: Vec<Disk>,
    /// Overlays that the disks continue in.
    pub overlays: Vec<Overlay>,
}

fn drives(qmp: &mut Qmp) -> Result<Vec<Drive>> {
    let mut drives: Vec<Drive> = qmp.call("query-block", json!({}))?;
    drives.truncate(DISKS_MAX);
    Ok(drives)
}

/// Records a stopped machine's disks that are not saved. `folder`: QEMU's working directory.
pub(crate) fn told(qmp: &mut Qmp, folder: &str) -> Result<Vec<QemuDisk>> {
    let folder = Path::new(folder);
    let disk = |drive: &Drive| {
        let inserted = drive.inserted.as_ref()?;
        let path = folder.join(&inserted.file);
        let facts = file_facts(&path)?;
        Some(QemuDisk {
            name: drive.name(inserted),
            path: path.to_str()?.to_owned(),
            bytes: facts.len(),
            written_ns: written_ns(&facts),
            virtual_bytes: inserted.image.virtual_size,
            format: inserted.image.format.clone(),
            over: over(&inserted.image, folder),
            ..QemuDisk::default()
        })
    };
    Ok(drives(qmp)?.iter().filter_map(disk).collect())
}

/// Records the files that one is over.
fn over(content: &Content, folder: &Path) -> Vec<QemuDiskOverlay> {
    let below = content.backing_image.as_deref();
    let all = std::iter::successors(below, |content| content.backing_image.as_deref());
    let file = |content: &Content| {
        let path = folder.join(file_of(&content.filename).ok()?);
        let facts = file_facts(&path)?;
        Some(QemuDiskOverlay {
            path: path.to_str()?.to_owned(),
            format: content.format.clone(),
            bytes: facts.len(),
            written_ns: written_ns(&facts),
        })
    };
    all.take(LAYERS_MAX).filter_map(file).collect()
}

/// The facts of a file; what is none (a server's, a pseudo-protocol, a device) has no time.
fn file_facts(path: &Path) -> Option<fs::Metadata> {
    fs::metadata(path).ok().filter(fs::Metadata::is_file)
}

/// When a file was last written to, in ns since 1970.
pub(crate) fn written_ns(facts: &fs::Metadata) -> i64 {
    facts
        .mtime()
        .saturating_mul(1_000_000_000)
        .saturating_add(facts.mtime_nsec())
}

/// The disks whose files have no name any more: what is written to them is gone with their QEMU.
pub(crate) fn temporary(qmp: &mut Qmp, pid: i32, folder: &str) -> Result<Vec<String>> {
    let opened = OpenFiles::of(pid)?;
    let is_temporary = |inserted: &InsertedMedium| {
        let all = std::iter::successors(Some(&inserted.image), |content| {
            content.backing_image.as_deref()
        });
        let mut files = all.filter_map(|content| file_of(&content.filename).ok());
        files.any(|file| opened.deleted(&Path::new(folder).join(file)).is_some())
    };
    let drives = drives(qmp)?.into_iter().filter_map(|drive| {
        let inserted = drive.inserted.as_ref()?;
        is_temporary(inserted).then(|| drive.name(inserted))
    });
    Ok(drives.collect())
}

impl Disks {
    /// The disks that a machine has in use. Nothing is changed. `folder`: where QEMU runs.
    ///
    /// # Errors
    /// [`Error::Unfit`] for one that cannot be saved; those of [`Qmp::call`].
    pub fn find(qmp: &mut Qmp, pid: i32, folder: &str) -> Result<Self> {
        let opened = OpenFiles::of(pid)?;
        let mut all = Vec::new();
        for drive in drives(qmp)? {
            let Some(inserted) = &drive.inserted else {
                continue;
            };
            let name = drive.name(inserted);
            let refuse = |what: String| Error::Unfit(format!("the disk {name}: {what}"));
            if inserted.encrypted {
                return Err(refuse("encrypted disks are not saved".to_owned()));
            }
            let layers = layers(inserted, Path::new(folder), &opened).map_err(refuse)?;
            all.push(Disk {
                name: name.clone(),
                node: inserted.node.clone(),
                is_written: !inserted.ro,
                virtual_bytes: inserted.image.virtual_size,
                layers,
            });
        }
        match all.is_empty() {
            true => Err(Error::Unfit(
                "the machine has no disks: save it without --with-disks".to_owned(),
            )),
            false => Ok(Self {
                all,
                overlays: Vec::new(),
            }),
        }
    }

    /// Has the files of a stopped machine stay as they are when its guest goes on. `id` names what
    /// is made for that.
    ///
    /// # Errors
    /// [`Error::File`] for an overlay that cannot be made; those of [`Qmp::call`]. No disk has an
    /// overlay then.
    pub fn hold(&mut self, guest: &mut Guest<'_>, id: ImageId) -> Result<()> {
        let mut overlays = Vec::new();
        for (number, disk) in self.all.iter_mut().enumerate().filter(|it| it.1.is_written) {
            let top = &mut disk.layers[0];
            match cloned(top) {
                Ok(file) => top.file = file,
                Err(errno) => {
                    log::debug!("{} is not cloned: {errno}", top.path.display());
                    overlays.push(overlay(disk, number, id, guest)?);
                }
            }
        }
        if overlays.is_empty() {
            return Ok(());
        }
        let nodes = self.all.iter().map(|disk| (&disk.name, &disk.node));
        let nodes = nodes.collect::<BTreeMap<_, _>>();
        let action = |made: &NewOverlay| {
            json!({"type": "blockdev-snapshot-sync", "data": {
                "node-name": nodes[&made.0.disk],
                "snapshot-file": made.0.file,
                "snapshot-node-name": made.0.node,
                "format": "qcow2",
                "mode": "existing",
            }})
        };
        let actions = overlays.iter().map(action).collect::<Vec<_>>();
        let done = guest
            .qmp
            .call::<Value>("transaction", json!({ "actions": actions }));
        if let Err(error) = &done
            && !may_write_to(&overlays, error, guest.qmp)
        {
            return done.map(drop);
        }
        self.overlays = overlays.into_iter().map(NewOverlay::keep).collect();
        for overlay in &self.overlays {
            let (disk, file) = (&overlay.disk, overlay.file.display());
            log::warn!("the disk {disk} goes on in {file}");
        }
        done.map(drop)
    }

    /// Stores the files in the image; gives what is recorded of them, and how many bytes of pages
    /// are stored. `beside`: whether the guest runs meanwhile.
    ///
    /// # Errors
    /// Those of [`sparse::store`]; [`Error::File`].
    pub fn store(
        &self,
        writer: &Writer,
        beside: bool,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<(Vec<QemuDisk>, u64)> {
        let mut spaces = Spaces::of(writer);
        let mut memories = Vec::new();
        let mut known = BTreeMap::new();
        let mut disks = Vec::new();
        for disk in &self.all {
            let mut files = Vec::new();
            for layer in &disk.layers {
                let facts = layer.file.metadata();
                let facts = facts.map_err(Error::file("look at the disk", &layer.path))?;
                // One file may be below several.
                let file = known.entry((facts.dev(), facts.ino()));
                let space = match file {
                    std::collections::btree_map::Entry::Occupied(space) => *space.get(),
                    std::collections::btree_map::Entry::Vacant(entry) => {
                        let pages = facts.len().div_ceil(PAGE_BYTES);
                        let space = spaces.space(writer, &layer.path, pages);
                        let own = reopened(&layer.file)?;
                        memories.push(Memory::new(own, space, pages, 0));
                        *entry.insert(space)
                    }
                };
                files.push(QemuDiskFile {
                    space: space.0,
                    path: layer.path.to_string_lossy().into_owned(),
                    format: layer.format.clone(),
                    bytes: facts.len(),
                    written_ns: written_ns(&facts),
                });
            }
            disks.push(QemuDisk {
                name: disk.name.clone(),
                path: files[0].path.clone(),
                bytes: files[0].bytes,
                written_ns: files[0].written_ns,
                virtual_bytes: disk.virtual_bytes,
                is_written: disk.is_written,
                format: files[0].format.clone(),
                over: Vec::new(),
                files,
            });
        }
        let fates = sparse::store(&memories, writer, Holes::Zero, beside, progress)?;
        Ok((disks, fates.stored_pages * PAGE_BYTES))
    }
}

/// Tells whether QEMU may have disks go on in overlays, after the command that has them do so
/// failed: it has, unless it said that it does not, or says now that it does not know them, over
/// another connection where the first one is lost.
fn may_write_to(overlays: &[NewOverlay], error: &Error, qmp: &mut Qmp) -> bool {
    let (question, with) = ("query-named-block-nodes", json!({"flat": true}));
    let told = match error {
        Error::Refused { .. } => return false,
        Error::Gone(_) => match qmp.again() {
            Ok(again) => {
                *qmp = again;
                qmp.insist(question, &with)
            }
            Err(error) => Err(error),
        },
        _ => qmp.insist(question, &with),
    };
    let Ok(Value::Array(nodes)) = told else {
        return true;
    };
    let is_known = |made: &NewOverlay| nodes.iter().any(|node| node["node-name"] == made.0.node);
    overlays.iter().any(is_known)
}

/// The numbers of spaces of an image: a file that the parent has, too, has the same.
struct Spaces {
    next: u32,
}

impl Spaces {
    fn of(writer: &Writer) -> Self {
        let parents = writer.parent().map_or(&[][..], |parent| parent.spaces());
        let parents = parents.iter().map(|space| space.id.0);
        // Those of memory are numbered first.
        let own = super::block::BLOCKS_MAX as u32;
        let next = parents.max().unwrap_or(0).max(own) + 1;
        Self { next }
    }

    /// Says what the space of a file is; gives its number.
    fn space(&mut self, writer: &Writer, path: &Path, pages: u64) -> SpaceId {
        let name = path.to_string_lossy().into_owned();
        let parents = writer.parent().map_or(&[][..], |parent| parent.spaces());
        let is_it = |space: &&image::Space| {
            (space.kind, space.len_pages, &space.name) == (SpaceKind::Volume, pages, &name)
        };
        let id = match parents.iter().find(is_it) {
            Some(space) => space.id,
            None => {
                self.next += 1;
                SpaceId(self.next - 1)
            }
        };
        writer.space(NewSpace {
            id,
            kind: SpaceKind::Volume,
            name,
            len_pages: pages,
            granule: Granule::Small,
        });
        id
    }
}

/// The files of a disk, or why it cannot be saved.
fn layers(
    inserted: &InsertedMedium,
    folder: &Path,
    opened: &OpenFiles,
) -> std::result::Result<Vec<Layer>, String> {
    let mut layers = Vec::new();
    let mut content = &inserted.image;
    loop {
        let Content {
            filename, format, ..
        } = content;
        if !FORMATS.contains(&format.as_str()) {
            return Err(format!(
                "{filename} has the format {format}: only raw and qcow2 are saved"
            ));
        }
        if !content.format_specific["data"]["data-file"].is_null() {
            return Err(format!("{filename} has its data in another file"));
        }
        let path = folder.join(file_of(filename)?);
        let is_temporary = opened.deleted(&path).is_some();
        let file = opened.file(&path, filename)?;
        layers.push(Layer {
            path,
            format: format.clone(),
            file,
        });
        match (&content.backing_filename, &content.backing_image) {
            (Some(_), Some(below)) if layers.len() < LAYERS_MAX => content = below,
            // QEMU keeps to itself what a temporary one is over.
            (None, Some(below)) if is_temporary && layers.len() < LAYERS_MAX => content = below,
            (None, None) => return Ok(layers),
            _ if layers.len() >= LAYERS_MAX => {
                return Err(format!("it is over {LAYERS_MAX} files"));
            }
            _ => {
                return Err(format!(
                    "{filename} does not say itself which file it is over"
                ));
            }
        }
    }
}

/// The file of a name of QEMU's, which is JSON where options were given that the file does not tell
/// itself: as the file that it is over, after an overlay was made.
fn file_of(name: &str) -> std::result::Result<String, String> {
    let Some(json) = name.strip_prefix("json:") else {
        return Ok(name.to_owned());
    };
    let refuse = || format!("{name} is more than a file");
    let json = serde_json::from_str::<Value>(json).map_err(|_| refuse())?;
    let is_part = ["offset", "size"].iter().any(|key| !json[key].is_null());
    let file = match &json["file"] {
        file if file["driver"] == "file" && !is_part => file["filename"].as_str(),
        _ => None,
    };
    file.map(str::to_owned).ok_or_else(refuse)
}

/// The files that a process has open.
struct OpenFiles {
    pid: i32,
    all: BTreeMap<(u64, u64), String>,
    /// Those without a name any more, by the one that they had.
    deleted: BTreeMap<PathBuf, String>,
}

impl OpenFiles {
    fn of(pid: i32) -> Result<Self> {
        let folder = PathBuf::from(format!("/proc/{pid}/fd"));
        let entries = fs::read_dir(&folder).map_err(Error::file("read", &folder))?;
        let (mut all, mut deleted) = (BTreeMap::new(), BTreeMap::new());
        for entry in entries.flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let (Ok(facts), Some(number)) = (fs::metadata(&path), name.to_str()) else {
                continue;
            };
            all.insert((facts.dev(), facts.ino()), number.to_owned());
            let link = fs::read_link(&path).unwrap_or_default();
            let former = link.as_os_str().as_bytes().strip_suffix(b" (deleted)");
            // A file with another hard link is not deleted.
            if let Some(former) = former.filter(|_| facts.is_file() && facts.nlink() == 0) {
                let former = PathBuf::from(OsStr::from_bytes(former));
                deleted.insert(former, number.to_owned());
            }
        }
        Ok(Self { pid, all, deleted })
    }

    /// The number of the descriptor of a file that had this name and has none any more.
    fn deleted(&self, path: &Path) -> Option<&String> {
        let is_open = |facts: fs::Metadata| self.all.contains_key(&(facts.dev(), facts.ino()));
        let number = self.deleted.get(path);
        number.filter(|_| !fs::metadata(path).is_ok_and(is_open))
    }

    /// The file of a name that QEMU has it by, opened anew.
    fn file(&self, path: &Path, name: &str) -> std::result::Result<File, String> {
        if let Some(number) = self.deleted(path) {
            return self.open(number, name);
        }
        let facts = fs::metadata(path);
        let facts = facts.map_err(|_| {
            format!("{name} is no file here: disks of a server and the like are not saved")
        })?;
        if !facts.is_file() {
            return Err(format!("{name} is a device: only files are saved"));
        }
        if facts.len() == 0 {
            return Err(format!("{name} is empty"));
        }
        let number = self.all.get(&(facts.dev(), facts.ino()));
        let number = number.ok_or(format!("{name} is not the file that QEMU has open"))?;
        self.open(number, name)
    }

    fn open(&self, number: &str, name: &str) -> std::result::Result<File, String> {
        let open = File::open(format!("/proc/{}/fd/{number}", self.pid));
        open.map_err(|error| format!("{name} cannot be opened: {error}"))
    }
}

/// A file without a name that has what a disk's file has, by the file system's own means.
fn cloned(top: &Layer) -> rustix::io::Result<File> {
    let folder = top.path.parent().unwrap_or(Path::new("/"));
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)?;
    rustix::fs::ioctl_ficlone(&file, &top.file)?;
    Ok(file.into())
}

/// The file of an overlay that no machine has yet; dropped, it is removed.
struct NewOverlay(Overlay);

impl NewOverlay {
    fn keep(self) -> Overlay {
        let overlay = self.0.clone();
        std::mem::forget(self);
        overlay
    }
}

impl Drop for NewOverlay {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0.file);
    }
}

/// Makes an overlay for a disk, beside its file.
fn overlay(disk: &Disk, number: usize, id: ImageId, guest: &Guest<'_>) -> Result<NewOverlay> {
    let top = &disk.layers[0];
    let id = id.to_string();
    let id = &id[..8.min(id.len())];
    let former = top.path.file_name().unwrap_or_default();
    let mut name = OsStr::from_bytes(without_mark(former.as_bytes())).to_owned();
    name.push(format!(".{id}.qcow2"));
    let path = top.path.with_file_name(name);
    let failed = || Error::file("make the overlay", &path);
    let facts = top.file.metadata().map_err(failed())?;
    let mut new = NewFile::create(&path, facts.mode() & 0o777).map_err(failed())?;
    // QEMU, which opens it anew, may be somebody else, whom our mask of permissions is not for.
    let mode = Permissions::from_mode(facts.mode() & 0o777);
    new.file.set_permissions(mode).map_err(failed())?;
    fchown(&new.file, Some(facts.uid()), Some(facts.gid())).map_err(failed())?;
    let backing = BackingFile {
        path: &top.path,
        format: &top.format,
    };
    qcow2::write_overlay(&new.file, disk.virtual_bytes, backing).map_err(failed())?;
    guest.making(&new.file, &path)?;
    new.name().map_err(failed())?;
    Ok(NewOverlay(Overlay {
        disk: disk.name.clone(),
        former: top.path.clone(),
        file: path,
        node: format!("stillframe-{id}-{number}"),
    }))
}

/// The name of a disk's file without the end that an earlier save gave its overlay: names do not
/// grow with each save.
fn without_mark(name: &[u8]) -> &[u8] {
    let marked = name.strip_suffix(b".qcow2").and_then(|rest| {
        let (first, mark) = rest.split_at_checked(rest.len().checked_sub(8)?)?;
        let is_mark = mark
            .iter()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        first
            .strip_suffix(b".")
            .filter(|first| is_mark && !first.is_empty())
    });
    marked.unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_loses_the_mark_of_an_earlier_overlay() {
        let without = |name: &'static str| std::str::from_utf8(without_mark(name.as_bytes()));
        assert_eq!(without("one.qcow2.0123abcd.qcow2"), Ok("one.qcow2"));
        for name in [
            "one.qcow2",
            "0123abcd.qcow2",
            ".0123abcd.qcow2",
            "a.0123abcg.qcow2",
            "",
        ] {
            assert_eq!(without(name), Ok(name));
        }
    }

    #[test]
    fn files_are_found_in_json_too() {
        let over = r#"json:{"backing": {"driver": "raw", "file": {"filename": "a"}},
            "driver": "qcow2", "file": {"driver": "file", "filename": "/b"}}"#;
        assert_eq!(file_of(over).as_deref(), Ok("/b"));
        assert_eq!(file_of("one").as_deref(), Ok("one"));
        let part = r#"json:{"driver":"raw","offset":512,"file":{"driver":"file","filename":"a"}}"#;
        let server = r#"json:{"driver":"raw","file":{"driver":"nbd","path":"a"}}"#;
        for name in [part, server, "json:{", "json:1"] {
            assert!(file_of(name).is_err(), "{name}");
        }
    }
}
