//! A command that is given another kind of image says what the image is of and which command takes
//! it.

use std::path::Path;

use process::ImageKind;

use crate::exit::{Failure, Status};

/// The kind of an image, as commands tell images apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A kind that the engine of process trees knows.
    Of(ImageKind),
    /// A machine that QEMU ran.
    Qemu,
}

/// The kind of image that a command takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpectedKind {
    /// A tree that can be restored.
    Tree,
    /// Such a tree, or a processor alone.
    Processor,
    /// A tree or a pre-dump: a dump of the tree can be a layer over it.
    TreeParent,
    /// A machine under QEMU.
    Qemu,
    /// The memory of a machine.
    Machine,
    /// A volume, also one beside a tree or a machine.
    Volume,
}

/// An image in a directory, as far as it tells what it is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ImageInfo {
    kind: Kind,
    has_volume: bool,
}

impl ImageInfo {
    /// None where there is no image or it is damaged: who needed it says so.
    fn look(dir: &Path) -> Option<Self> {
        let images = dir.into();
        let kind = match ImageKind::find(&images).ok()? {
            ImageKind::Machine if vm::qemu::is_of_qemu(&images).ok()? => Kind::Qemu,
            kind => Kind::Of(kind),
        };
        let has_volume = volume::has_volume(&images).ok()?;
        Some(Self { kind, has_volume })
    }
}

impl ExpectedKind {
    /// Why `failure` came, if it is that the image in `dir` is of another kind.
    pub fn explain(self, dir: &Path, failure: Failure) -> Failure {
        let is_about_images = matches!(failure.status(), Status::Unsupported | Status::Corrupt);
        match ImageInfo::look(dir) {
            Some(found) if is_about_images && !self.takes(found) => Failure::OtherKind {
                dir: dir.to_owned(),
                kind: found.kind,
            },
            _ => failure,
        }
    }

    fn takes(self, found: ImageInfo) -> bool {
        let of = |kinds: &[ImageKind]| kinds.iter().any(|kind| found.kind == Kind::Of(*kind));
        match self {
            Self::Tree => of(&[ImageKind::Tree]),
            Self::Processor => of(&[ImageKind::Tree, ImageKind::Processor]),
            Self::TreeParent => of(&[ImageKind::Tree, ImageKind::PreDump]),
            Self::Qemu => found.kind == Kind::Qemu,
            Self::Machine => found.kind == Kind::Qemu || of(&[ImageKind::Machine]),
            Self::Volume => found.has_volume,
        }
    }
}

impl Kind {
    /// The words for the kind in a message: they follow "the image is of".
    pub const fn words(self) -> &'static str {
        match self {
            Self::Of(ImageKind::Tree) => "a process tree",
            Self::Of(ImageKind::PreDump) => "a pre-dump of a process tree, which is memory alone",
            Self::Of(ImageKind::Processor) => "a processor alone",
            Self::Of(ImageKind::Machine) => "the memory of a virtual machine",
            Self::Of(ImageKind::Volume) => "an ext4 volume",
            Self::Qemu => "a machine under QEMU",
        }
    }

    /// Which commands take it.
    pub const fn taken_by(self) -> &'static str {
        match self {
            Self::Of(ImageKind::Tree) => "`stillframe restore` brings it back",
            Self::Of(ImageKind::PreDump) => {
                "`stillframe dump --prev-images-dir` saves the tree over it"
            }
            Self::Of(ImageKind::Processor) => "`stillframe cpuinfo check` takes it",
            Self::Of(ImageKind::Machine) => "`stillframe serve` and `stillframe export` take it",
            Self::Of(ImageKind::Volume) => {
                "`stillframe volume restore`, `ls`, `cat`, `extract`, `mount` and `export` take it"
            }
            Self::Qemu => "`stillframe vm restore` starts it",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [Kind; 6] = [
        Kind::Of(ImageKind::Tree),
        Kind::Of(ImageKind::PreDump),
        Kind::Of(ImageKind::Processor),
        Kind::Of(ImageKind::Machine),
        Kind::Of(ImageKind::Volume),
        Kind::Qemu,
    ];

    fn taken(wanted: ExpectedKind, has_volume: bool) -> Vec<Kind> {
        let kinds = KINDS.into_iter();
        let takes = |kind: &Kind| {
            let kind = *kind;
            wanted.takes(ImageInfo { kind, has_volume })
        };
        kinds.filter(takes).collect()
    }

    #[test]
    fn each_command_takes_its_kinds() {
        let [tree, predump, processor, machine, _, qemu] = KINDS;
        assert_eq!(taken(ExpectedKind::Tree, true), [tree]);
        assert_eq!(taken(ExpectedKind::Processor, true), [tree, processor]);
        assert_eq!(taken(ExpectedKind::TreeParent, true), [tree, predump]);
        assert_eq!(taken(ExpectedKind::Qemu, true), [qemu]);
        assert_eq!(taken(ExpectedKind::Machine, true), [machine, qemu]);
        assert_eq!(taken(ExpectedKind::Volume, true), KINDS);
        assert_eq!(taken(ExpectedKind::Volume, false), []);
    }

    #[test]
    fn failure_about_no_image_stays() {
        let usage = Failure::Usage("x".to_owned());
        let explained = ExpectedKind::Tree.explain(Path::new("/nonexistent"), usage);
        assert!(matches!(explained, Failure::Usage(_)));
        let missing = Failure::machine("export")(vm::Error::Unfit("y".to_owned()));
        let explained = ExpectedKind::Machine.explain(Path::new("/nonexistent"), missing);
        assert!(matches!(explained, Failure::Machine { .. }));
    }
}
