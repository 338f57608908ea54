//! Files in criu(8)'s format that clients look for beside an image: `inventory.img`, by which they
//! know one, and `stats-dump` and `stats-restore`.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use prost::Message;

use crate::rpc::notes::DumpFacts;

/// The name of the file that tells that there is an image.
pub const INVENTORY: &str = "inventory.img";
/// The name of the file with the facts of a dump.
pub const DUMP_FACTS: &str = "stats-dump";
/// The name of the file with the facts of a restore.
pub const RESTORE_FACTS: &str = "stats-restore";

/// The numbers that such files begin with.
const INVENTORY_MAGIC: [u32; 1] = [0x5831_3116];
const FACTS_MAGIC: [u32; 2] = [0x5510_5940, 0x5709_3306];

/// Begin of an image (`inventory_entry`): nothing more of it is in this format.
#[derive(Clone, PartialEq, Message)]
struct Inventory {
    #[prost(uint32, required, tag = "1")]
    version: u32,
}

/// What was done (`stats_entry`).
#[derive(Clone, PartialEq, Message)]
struct Facts {
    #[prost(message, optional, tag = "1")]
    dump: Option<DumpFacts>,
    #[prost(message, optional, tag = "2")]
    restore: Option<RestoreFacts>,
}

/// Facts of a restore (`restore_stats_entry`): times in microseconds.
#[derive(Clone, PartialEq, Message)]
pub struct RestoreFacts {
    #[prost(uint64, required, tag = "1")]
    pub pages_compared: u64,
    #[prost(uint64, required, tag = "2")]
    pub pages_skipped_cow: u64,
    #[prost(uint32, required, tag = "3")]
    pub forking_time: u32,
    #[prost(uint32, required, tag = "4")]
    pub restore_time: u32,
}

/// Writes the file that tells that there is an image in the directory.
///
/// # Errors
/// Those of open(2) and write(2).
pub fn write_inventory(images_dir: &Path) -> io::Result<()> {
    let path = images_dir.join(INVENTORY);
    write(&path, &INVENTORY_MAGIC, &Inventory { version: 1 })
}

/// Writes the facts of a dump.
///
/// # Errors
/// Those of open(2) and write(2).
pub fn write_dump_facts(work_dir: &Path, facts: DumpFacts) -> io::Result<()> {
    let facts = Facts {
        dump: Some(facts),
        restore: None,
    };
    write(&work_dir.join(DUMP_FACTS), &FACTS_MAGIC, &facts)
}

/// Writes the facts of a restore.
///
/// # Errors
/// Those of open(2) and write(2).
pub fn write_restore_facts(work_dir: &Path, facts: RestoreFacts) -> io::Result<()> {
    let facts = Facts {
        dump: None,
        restore: Some(facts),
    };
    write(&work_dir.join(RESTORE_FACTS), &FACTS_MAGIC, &facts)
}

/// Writes a file of one message. It is a new one: a name that leads elsewhere is replaced.
fn write(path: &Path, magic: &[u32], message: &impl Message) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut bytes = Vec::new();
    for number in magic {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    let message = message.encode_to_vec();
    let length = u32::try_from(message.len()).expect("a few numbers");
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&message);
    let mut options = File::options();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_criu_s_form() {
        let folder = tempfile::tempdir().unwrap();
        write_inventory(folder.path()).unwrap();
        let bytes = std::fs::read(folder.path().join(INVENTORY)).unwrap();
        assert_eq!(bytes, *b"\x16\x311X\x02\0\0\0\x08\x01");
        let facts = RestoreFacts {
            restore_time: 300,
            ..Default::default()
        };
        write_restore_facts(folder.path(), facts).unwrap();
        let bytes = std::fs::read(folder.path().join(RESTORE_FACTS)).unwrap();
        let head = b"\x40\x59\x10\x55\x06\x33\x09\x57\x0b\0\0\0";
        let message = b"\x12\x09\x08\0\x10\0\x18\0\x20\xac\x02";
        assert_eq!(bytes, [&head[..], message].concat());
    }

    #[test]
    fn a_link_is_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "dear").unwrap();
        std::os::unix::fs::symlink(&victim, folder.path().join(INVENTORY)).unwrap();
        write_inventory(folder.path()).unwrap();
        assert_eq!(std::fs::read(victim).unwrap(), b"dear");
    }
}
