//! The archive that a kernel unpacks into its first file system
//! (Documentation/driver-api/early-userspace/buffer-format.rst, format "newc").
use std::io::{self, Write};

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const LINK: u32 = 0o120_777;
const TERMINAL: u32 = 0o020_600;
/// The major and minor number of /dev/console.
const CONSOLE: (u32, u32) = (5, 1);

/// An archive under construction: folders come before what is in them.
pub struct Archive<W: Write> {
    out: W,
    entries: u32,
}

impl<W: Write> Archive<W> {
    /// Begins one with the folders that every system has, and the console's device.
    ///
    /// # Errors
    /// Those of writing.
    pub fn new(out: W) -> io::Result<Self> {
        let mut archive = Self { out, entries: 0 };
        for folder in ["dev", "etc", "proc", "root", "run", "sys", "tmp", "var"] {
            archive.folder(folder)?;
        }
        archive.entry("dev/console", TERMINAL, CONSOLE, &[])?;
        Ok(archive)
    }

    /// Adds a folder.
    ///
    /// # Errors
    /// Those of writing.
    pub fn folder(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, FOLDER, (0, 0), &[])
    }

    /// Adds a file that may be executed.
    ///
    /// # Errors
    /// Those of writing.
    pub fn file(&mut self, path: &str, bytes: &[u8]) -> io::Result<()> {
        self.entry(path, PROGRAM, (0, 0), bytes)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// Those of writing.
    pub fn link(&mut self, path: &str, to: &str) -> io::Result<()> {
        self.entry(path, LINK, (0, 0), to.as_bytes())
    }

    /// Ends it.
    ///
    /// # Errors
    /// Those of writing.
    pub fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, (0, 0), &[])?;
        self.out.flush()?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), data: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let size = u32::try_from(data.len()).map_err(io::Error::other)?;
        let name = u32::try_from(path.len() + 1).map_err(io::Error::other)?;
        let (links, root, time, no_checksum) = (1, 0, 0, 0);
        let fields = [
            self.entries,
            mode,
            root,
            root,
            links,
            time,
            size,
            0,
            0,
            device.0,
            device.1,
            name,
            no_checksum,
        ];
        let mut head = b"070701".to_vec();
        for field in fields {
            write!(head, "{field:08X}")?;
        }
        head.extend(path.as_bytes());
        head.push(0);
        self.padded(&head)?;
        self.padded(data)
    }

    fn padded(&mut self, bytes: &[u8]) -> io::Result<()> {
        let padding = bytes.len().next_multiple_of(4) - bytes.len();
        self.out.write_all(bytes)?;
        self.out.write_all(&[0; 3][..padding])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_head_name_and_data_each_padded() {
        let mut archive = Archive {
            out: Vec::new(),
            entries: 6,
        };
        archive.file("bin/x", b"12345").unwrap();
        let bytes = archive.out;
        let head = b"070701000000070000\
            81ED000000000000000000000001000000000000000500000000000000000000000000000000\
            0000000600000000";
        assert_eq!(&bytes[..110], head);
        assert_eq!(&bytes[110..], b"bin/x\x0012345\0\0\0");
    }

    #[test]
    fn all_of_an_archive_is_padded_to_words() {
        let mut archive = Archive::new(Vec::new()).unwrap();
        archive.link("bin", "usr/bin").unwrap();
        let bytes = archive.finish().unwrap();
        assert!(bytes.ends_with(b"TRAILER!!!\0\0\0\0"));
        assert_eq!(bytes.len() % 4, 0);
    }
}
