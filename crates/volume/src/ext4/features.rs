//! The features of ext4 by name: those that change where things are and what they mean.

use crate::{Error, Result};

/// Features of one kind: bits and names.
type Names = &'static [(u32, &'static str)];

/// Bits of the feature words.
pub mod compat {
    /// There is a journal.
    pub const HAS_JOURNAL: u32 = 0x4;
    /// At most two backups of the superblock.
    pub const SPARSE_SUPER2: u32 = 0x200;
}

/// Features without which a reader cannot read.
pub mod incompat {
    /// Directory entries have a type.
    pub const FILETYPE: u32 = 0x2;
    /// The journal is to be replayed.
    pub const RECOVER: u32 = 0x4;
    /// Group descriptors are spread over the device.
    pub const META_BG: u32 = 0x10;
    /// Block numbers have 64 bits.
    pub const WIDE: u32 = 0x80;
    /// A block tells who has it mounted.
    pub const MMP: u32 = 0x100;
    /// The seed of checksums is stored.
    pub const CSUM_SEED: u32 = 0x2000;
}

/// Features without which a writer cannot write.
pub mod ro_compat {
    /// Backups of the superblock in some groups only.
    pub const SPARSE_SUPER: u32 = 0x1;
    /// Files' numbers of blocks may have 48 bits.
    pub const HUGE_FILE: u32 = 0x8;
    /// Group descriptors have a CRC-16.
    pub const GDT_CSUM: u32 = 0x10;
    /// Space is given out in clusters of blocks.
    pub const BIGALLOC: u32 = 0x200;
    /// All metadata has a CRC-32C.
    pub const METADATA_CSUM: u32 = 0x400;
}

/// Features that a reader must know, and this one does.
const INCOMPAT: Names = &[
    (incompat::FILETYPE, "filetype"),
    (incompat::RECOVER, "needs_recovery"),
    (incompat::META_BG, "meta_bg"),
    (0x40, "extents"),
    (incompat::WIDE, "64bit"),
    (incompat::MMP, "mmp"),
    (0x200, "flex_bg"),
    (0x400, "ea_inode"),
    (incompat::CSUM_SEED, "metadata_csum_seed"),
    (0x4000, "large_dir"),
    (0x8000, "inline_data"),
    (0x1_0000, "encrypt"),
    (0x2_0000, "casefold"),
];

/// Known features that change how space is allocated.
const RO_COMPAT: Names = &[
    (ro_compat::SPARSE_SUPER, "sparse_super"),
    (0x2, "large_file"),
    (0x4, "btree_dir"),
    (ro_compat::HUGE_FILE, "huge_file"),
    (ro_compat::GDT_CSUM, "uninit_bg"),
    (0x20, "dir_nlink"),
    (0x40, "extra_isize"),
    (0x100, "quota"),
    (ro_compat::BIGALLOC, "bigalloc"),
    (ro_compat::METADATA_CSUM, "metadata_csum"),
    (0x1000, "read-only"),
    (0x2000, "project"),
    (0x4000, "shared_blocks"),
    (0x8000, "verity"),
    (0x1_0000, "orphan_present"),
];

/// Names of features that are refused.
const REFUSED_INCOMPAT: Names = &[
    (0x1, "compression"),
    (0x8, "journal_dev"),
    (0x1000, "dirdata"),
];
const REFUSED_RO_COMPAT: Names = &[(0x80, "has_snapshot"), (0x800, "replica")];

/// Refuses features that are not known, by name.
///
/// # Errors
/// [`Error::Unfit`].
pub fn check(incompat: u32, ro_compat: u32) -> Result<()> {
    let sets = [
        ("incompatible", incompat, INCOMPAT, REFUSED_INCOMPAT),
        (
            "read-only compatible",
            ro_compat,
            RO_COMPAT,
            REFUSED_RO_COMPAT,
        ),
    ];
    for (kind, set, known, refused) in sets {
        let unknown = known.iter().fold(set, |rest, (bit, _)| rest & !bit);
        if unknown == 0 {
            continue;
        }
        let bit = 1 << unknown.trailing_zeros();
        let name = refused.iter().find(|one| one.0 == bit);
        let name = name.map_or(format!("{bit:#x}"), |one| one.1.to_owned());
        return Err(Error::Unfit(format!(
            "the file system has the {kind} feature {name}, which is not known here"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_features_are_refused_by_name() {
        assert!(check(0x2c2, 0x46b).is_ok());
        let error = |incompat, ro_compat| check(incompat, ro_compat).unwrap_err().to_string();
        assert!(error(0x1002, 0).contains("dirdata"));
        assert!(error(0x8000_0000, 0).contains("0x80000000"));
        assert!(error(0x2, 0x80).contains("read-only compatible feature has_snapshot"));
    }
}
