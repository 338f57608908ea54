//! Where the members of the running kernel's structures are: its own description of its types
//! (BTF, Documentation/bpf/btf.rst), in /sys/kernel/btf/vmlinux.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read as _};
use std::ops::Deref;
use std::ptr;

use rustix::mm::{MapFlags, ProtFlags};

const HEADER_BYTES: usize = 24;
const MAGIC: u32 = 0xeb9f;

/// Kinds of types that matter here.
mod kind {
    pub const STRUCT: u32 = 4;
    pub const UNION: u32 = 5;
    pub const TYPEDEF: u32 = 8;
    pub const VOLATILE: u32 = 9;
    pub const CONST: u32 = 10;
    pub const RESTRICT: u32 = 11;
    pub const TYPE_TAG: u32 = 18;
}

/// The types of a kernel.
pub struct Types {
    bytes: Bytes,
    /// Where each type's description begins, by its number; type 0 is `void`.
    at: Vec<usize>,
    /// Where structures are described, by name: the first one of each that has members.
    structures: HashMap<Box<[u8]>, usize>,
    strings: usize,
}

/// A description of types: sysfs gives 4 KiB a read, so it is mapped where the kernel does that.
enum Bytes {
    Read(Vec<u8>),
    Mapped(Mapped),
}

/// A mapped file of the kernel's, which never changes.
struct Mapped {
    at: ptr::NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is only read, and unmapped by its only owner.
unsafe impl Send for Mapped {}
// SAFETY: as above.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(file: &File, bytes: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ, MapFlags::PRIVATE);
        // SAFETY: without a fixed address nothing that is mapped is touched.
        let at = unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, prot, flags, file, 0) }?;
        let at = ptr::NonNull::new(at.cast()).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { at, bytes })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: it was mapped with this size, and nothing borrows it any more.
        let _ = unsafe { rustix::mm::munmap(self.at.as_ptr().cast(), self.bytes) };
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Read(bytes) => bytes,
            // SAFETY: that much is mapped for as long as `self`, and the kernel's description of
            // its types does not change as long as it runs.
            Self::Mapped(mapped) => unsafe {
                std::slice::from_raw_parts(mapped.at.as_ptr(), mapped.bytes)
            },
        }
    }
}

impl Bytes {
    fn of_kernel() -> io::Result<Self> {
        let mut file = File::open(crate::host::path("/sys/kernel/btf/vmlinux"))?;
        let bytes = usize::try_from(file.metadata()?.len()).unwrap_or(0);
        // Since Linux 6.16.
        if let Ok(mapped) = Mapped::new(&file, bytes) {
            return Ok(Self::Mapped(mapped));
        }
        let mut read = Vec::with_capacity(bytes);
        file.read_to_end(&mut read)?;
        Ok(Self::Read(read))
    }
}

/// Where a member of a structure is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// From the structure's first bit.
    pub bit: usize,
    /// How many bits a bit field has; 0 for none.
    pub bits: u32,
}

impl Types {
    /// Reads those of the running kernel.
    ///
    /// # Errors
    /// `NotFound` on a kernel without them; `InvalidData`.
    pub fn of_kernel() -> io::Result<Self> {
        Self::parse(Bytes::of_kernel()?)
    }

    fn parse(bytes: Bytes) -> io::Result<Self> {
        Self::index(bytes).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
    }

    fn index(bytes: Bytes) -> Option<Self> {
        let header = |at: usize| word(&bytes, at).map(|word| word as usize);
        if word(&bytes, 0)? & 0xffff != MAGIC || bytes.len() < HEADER_BYTES {
            return None;
        }
        let head = header(4)?;
        let first = head.checked_add(header(8)?)?;
        let end = first.checked_add(header(12)?)?;
        let strings = head.checked_add(header(16)?)?;
        let mut at = vec![0];
        let mut structures = HashMap::new();
        let mut next = first;
        while next < end {
            at.push(next);
            let info = word(&bytes, next + 4)?;
            if kind_of(info) == kind::STRUCT && count_of(info) > 0 {
                let name = name_at(&bytes, strings.checked_add(word(&bytes, next)? as usize)?)?;
                structures.entry(name.into()).or_insert(next);
            }
            next += 12 + rest_bytes(info)?;
        }
        Some(Self {
            bytes,
            at,
            structures,
            strings,
        })
    }

    /// The size of a structure in bytes.
    #[must_use]
    pub fn size(&self, structure: &str) -> Option<usize> {
        let at = self.find(structure)?;
        word(&self.bytes, at + 8).map(|size| size as usize)
    }

    /// Where a member of a structure is, by its path: "pos", "file_table.data.nr". Members of
    /// unnamed structures count as the outer one's.
    #[must_use]
    pub fn member(&self, structure: &str, path: &str) -> Option<Member> {
        let mut at = self.find(structure)?;
        let mut found = Member { bit: 0, bits: 0 };
        let mut names = path.split('.').peekable();
        while let Some(name) = names.next() {
            let (member, of_type) = self.look(at, name)?;
            found = Member {
                bit: found.bit + member.bit,
                bits: member.bits,
            };
            if names.peek().is_some() {
                at = self.structure(of_type)?;
            }
        }
        Some(found)
    }

    fn find(&self, structure: &str) -> Option<usize> {
        self.structures.get(structure.as_bytes()).copied()
    }

    /// A member of the structure at `at`, and the number of its type.
    fn look(&self, at: usize, name: &str) -> Option<(Member, u32)> {
        const MEMBER_BYTES: usize = 12;
        let info = word(&self.bytes, at + 4)?;
        let has_bit_fields = info >> 31 != 0;
        for index in 0..count_of(info) as usize {
            let at = at + 12 + index * MEMBER_BYTES;
            let (of_type, place) = (word(&self.bytes, at + 4)?, word(&self.bytes, at + 8)?);
            let member = match has_bit_fields {
                true => Member {
                    bit: (place & 0xff_ffff) as usize,
                    bits: place >> 24,
                },
                false => Member {
                    bit: place as usize,
                    bits: 0,
                },
            };
            if self.is_named(at, name) {
                return Some((member, of_type));
            }
            let unnamed = word(&self.bytes, at)? == 0;
            let inner = self.structure(of_type).filter(|_| unnamed);
            if let Some((inside, of_type)) = inner.and_then(|inner| self.look(inner, name)) {
                let bit = member.bit + inside.bit;
                return Some((Member { bit, ..inside }, of_type));
            }
        }
        None
    }

    /// The structure or union that a type is, whatever names and qualifiers it has.
    fn structure(&self, mut of_type: u32) -> Option<usize> {
        const SOON: usize = 16;
        for _ in 0..SOON {
            let at = *self.at.get(of_type as usize).filter(|at| **at != 0)?;
            match kind_of(word(&self.bytes, at + 4)?) {
                kind::STRUCT | kind::UNION => return Some(at),
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    of_type = word(&self.bytes, at + 8)?;
                }
                _ => return None,
            }
        }
        None
    }

    /// Whether the name of what is described at `at` is this one.
    fn is_named(&self, at: usize, name: &str) -> bool {
        let named = || {
            let start = self.strings + word(&self.bytes, at)? as usize;
            let text = self.bytes.get(start..start + name.len() + 1)?;
            Some(text.starts_with(name.as_bytes()) && text[name.len()] == 0)
        };
        named().unwrap_or(false)
    }
}

/// The name that begins there.
fn name_at(bytes: &[u8], at: usize) -> Option<&[u8]> {
    let rest = bytes.get(at..)?;
    rest.get(..rest.iter().position(|byte| *byte == 0)?)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
}

fn kind_of(info: u32) -> u32 {
    info >> 24 & 0x1f
}

fn count_of(info: u32) -> u32 {
    info & 0xffff
}

/// How many bytes follow the three words that every type has.
fn rest_bytes(info: u32) -> Option<usize> {
    let count = count_of(info) as usize;
    Some(match kind_of(info) {
        // Pointers, forward declarations, other names, qualifiers, functions, floats, tags.
        2 | 7..=12 | 16 | 18 => 0,
        // Integers, variables, tags of declarations.
        1 | 14 | 17 => 4,
        // Arrays.
        3 => 12,
        // Structures, unions, sections, 64-bit enumerations.
        4 | 5 | 15 | 19 => 12 * count,
        // Enumerations, function prototypes.
        6 | 13 => 8 * count,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_found_in_and_behind_unnamed_ones() {
        let Ok(types) = Types::of_kernel() else {
            eprintln!("skipped: this kernel does not describe its types");
            return;
        };
        let at = |path| types.member("list_head", path).expect("a member");
        assert_eq!([at("next").bit, at("prev").bit], [0, 64]);
        assert_eq!(types.size("list_head"), Some(16));
        // A member of a member, and one of an unnamed structure.
        let tasks = types.member("task_struct", "tasks").expect("a list");
        let prev = types.member("task_struct", "tasks.prev").expect("its end");
        assert_eq!(prev.bit, tasks.bit + 64);
        assert!(types.member("task_struct", "tasks.third").is_none());
        assert!(types.member("no_such_structure", "x").is_none());
    }

    #[test]
    fn what_is_mapped_is_what_is_read() {
        let Ok(read) = std::fs::read("/sys/kernel/btf/vmlinux") else {
            eprintln!("skipped: this kernel does not describe its types");
            return;
        };
        let bytes = Bytes::of_kernel().unwrap();
        assert!(*bytes == *read);
        let types = Types::parse(Bytes::Read(read)).unwrap();
        assert_eq!(types.size("list_head"), Some(16));
    }

    #[test]
    fn nonsense_is_refused() {
        for bytes in [&b""[..], &[0; 24], &[0x9f, 0xeb, 1, 0, 24, 0, 0, 0, 0]] {
            assert!(Types::parse(Bytes::Read(bytes.to_vec())).is_err());
        }
    }
}
