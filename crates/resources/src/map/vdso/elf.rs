//! What a vDSO's own ELF headers say: its functions and where its unwind tables are; elf(5).
//!
//! The bytes may be an image's: every offset is a claim until it was looked up.

use crate::arch::ELF_MACHINE;

/// More symbols or headers than any vDSO has.
const ENTRIES_MAX: u64 = 512;
/// Longer than any name in a vDSO.
const NAME_BYTES_MAX: usize = 128;
const PT_LOAD: u64 = 1;
const PT_DYNAMIC: u64 = 2;
const PT_GNU_EH_FRAME: u64 = 0x6474_e550;

/// A function that a vDSO offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its first instruction, in bytes from the start of the vDSO.
    pub offset: u64,
}

/// The bytes of a vDSO, as they stand in memory.
#[derive(Clone, Copy, Debug)]
pub struct Elf<'a> {
    bytes: &'a [u8],
    /// The address that its headers were made for.
    base: u64,
}

/// A part of the file as its program headers list it.
struct Segment {
    kind: u64,
    address: u64,
    bytes: u64,
}

impl<'a> Elf<'a> {
    /// Looks at a vDSO, or the first page of another program's file, for this processor.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        const ET_EXEC: u64 = 2;
        const ET_DYN: u64 = 3;
        let mut elf = Self { bytes, base: 0 };
        let is_ours = bytes.starts_with(b"\x7fELF\x02\x01")
            && (ET_EXEC..=ET_DYN).contains(&elf.number(16, 2)?)
            && elf.number(18, 2)? == ELF_MACHINE;
        let load = elf.segment(PT_LOAD)?;
        elf.base = load.address;
        is_ours.then_some(elf)
    }

    /// How many bytes of it are code and data, from its start.
    #[must_use]
    pub fn load_bytes(&self) -> Option<u64> {
        Some(self.segment(PT_LOAD)?.bytes)
    }

    /// The little-endian number of `len` bytes at `at`.
    #[must_use]
    pub fn number(&self, at: u64, len: usize) -> Option<u64> {
        let mut word = [0; 8];
        word[..len].copy_from_slice(self.slice(at, len)?);
        Some(u64::from_le_bytes(word))
    }

    /// `len` bytes at `at`.
    #[must_use]
    pub fn slice(&self, at: u64, len: usize) -> Option<&'a [u8]> {
        let at = usize::try_from(at).ok()?;
        self.bytes.get(at..at.checked_add(len)?)
    }

    /// All bytes from `at` on.
    #[must_use]
    pub fn from(&self, at: u64) -> Option<&'a [u8]> {
        self.bytes.get(usize::try_from(at).ok()?..)
    }

    /// Where in the file the last byte of code ends that is loaded.
    #[must_use]
    pub fn code_end(&self) -> Option<u64> {
        const EXECUTABLE: u64 = 1;
        let (headers, size) = (self.number(32, 8)?, self.number(54, 2)?);
        let mut end = None;
        for index in 0..self.number(56, 2)?.min(ENTRIES_MAX) {
            let at = headers.checked_add(index * size)?;
            let flags = self.number(at.checked_add(4)?, 4)?;
            if self.number(at, 4)? == PT_LOAD && flags & EXECUTABLE != 0 {
                let offset = self.number(at.checked_add(8)?, 8)?;
                end = end.max(offset.checked_add(self.number(at.checked_add(32)?, 8)?));
            }
        }
        end
    }

    /// Where the table of unwind information begins, which debuggers use as well.
    #[must_use]
    pub fn unwind_table(&self) -> Option<u64> {
        let segment = self.segment(PT_GNU_EH_FRAME)?;
        segment.address.checked_sub(self.base)
    }

    fn segment(&self, kind: u64) -> Option<Segment> {
        let (headers, size) = (self.number(32, 8)?, self.number(54, 2)?);
        let count = self.number(56, 2)?.min(ENTRIES_MAX);
        for index in 0..count {
            let at = headers.checked_add(index * size)?;
            if self.number(at, 4)? == kind {
                return Some(Segment {
                    kind,
                    address: self.number(at.checked_add(16)?, 8)?,
                    bytes: self.number(at.checked_add(40)?, 8)?,
                });
            }
        }
        None
    }

    /// The functions by which programs use it, each name of each.
    #[must_use]
    pub fn functions(&self) -> Option<Vec<Function>> {
        const DT_HASH: u64 = 4;
        const DT_STRTAB: u64 = 5;
        const DT_SYMTAB: u64 = 6;
        const SYMBOL_BYTES: u64 = 24;
        let dynamic = self.segment(PT_DYNAMIC)?;
        debug_assert_eq!(dynamic.kind, PT_DYNAMIC);
        let start = dynamic.address.checked_sub(self.base)?;
        let entry = |wanted: u64| {
            (0..(dynamic.bytes / 16).min(ENTRIES_MAX)).find_map(|index| {
                let at = start.checked_add(index * 16)?;
                let value = self.number(at.checked_add(8)?, 8)?;
                (self.number(at, 8)? == wanted).then_some(value)
            })
        };
        let (symbols, names) = (
            self.offset(entry(DT_SYMTAB)?),
            self.offset(entry(DT_STRTAB)?),
        );
        let (symbols, names) = (symbols?, names?);
        // A hash table has as many chains as there are symbols. Without one, as some linkers
        // leave it out, the symbols end where the names begin, as linkers lay them out.
        let count = match entry(DT_HASH) {
            Some(hash) => self.number(self.offset(hash)?.checked_add(4)?, 4)?,
            None => names.checked_sub(symbols)? / SYMBOL_BYTES,
        };
        let mut functions = Vec::new();
        for index in 1..count.min(ENTRIES_MAX) {
            let at = symbols.checked_add(index * SYMBOL_BYTES)?;
            functions.extend(self.function(at, names)?);
        }
        Some(functions)
    }

    /// The function that the symbol at `at` names, if it names one.
    #[allow(clippy::option_option)]
    fn function(&self, at: u64, names: u64) -> Option<Option<Function>> {
        const STT_FUNC: u64 = 2;
        const SHN_UNDEF: u64 = 0;
        const SHN_ABS: u64 = 0xfff1;
        let (name, kind) = (
            self.number(at, 4)?,
            self.number(at.checked_add(4)?, 1)? & 0xf,
        );
        let section = self.number(at.checked_add(6)?, 2)?;
        if kind != STT_FUNC || section == SHN_UNDEF || section == SHN_ABS {
            return Some(None);
        }
        let offset = self.offset(self.number(at.checked_add(8)?, 8)?)?;
        let text = self.text(names.checked_add(name)?)?;
        // It must have an instruction.
        self.number(offset, 1)?;
        Some(Some(Function { name: text, offset }))
    }

    /// A string that ends with a NUL.
    fn text(&self, at: u64) -> Option<String> {
        let rest = self.from(at)?;
        let len = rest
            .iter()
            .take(NAME_BYTES_MAX)
            .position(|byte| *byte == 0)?;
        let text = std::str::from_utf8(&rest[..len]).ok()?;
        let plain = text.bytes().all(|byte| byte.is_ascii_graphic());
        plain.then(|| text.to_owned())
    }

    fn offset(&self, address: u64) -> Option<u64> {
        address.checked_sub(self.base)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_functions_are_found() {
        let own = sys::vdso::own().expect("a vDSO");
        let elf = Elf::new(own).expect("an ELF file");
        let functions = elf.functions().expect("functions");
        let found = |name: &str| functions.iter().find(|function| function.name == name);
        for name in [
            "__vdso_clock_gettime",
            "__vdso_gettimeofday",
            "__vdso_getcpu",
        ] {
            let offset = found(name).expect(name).offset;
            assert!(
                offset > 64 && offset < own.len() as u64,
                "{name} at {offset:#x}"
            );
        }
        let alias = found("clock_gettime").expect("another name");
        assert_eq!(
            Some(alias.offset),
            found("__vdso_clock_gettime").map(|one| one.offset)
        );
    }

    #[test]
    fn no_damage_leads_outside() {
        let own = sys::vdso::own().expect("a vDSO");
        for len in [0, 5, 63, 64, 200, 1000] {
            let cut = &own[..len];
            assert!(
                Elf::new(cut).and_then(|elf| elf.functions()).is_none(),
                "{len}"
            );
        }
        // Every byte of the tables once with all bits set and once inverted.
        let tables = Elf::new(own).and_then(|elf| elf.unwind_table());
        let tables = usize::try_from(tables.expect("a table")).expect("small");
        let mut bytes = own.to_vec();
        for at in 16..tables {
            for wrong in [0xff, !own[at], 0] {
                bytes[at] = wrong;
                if let Some(functions) = Elf::new(&bytes).and_then(|elf| elf.functions()) {
                    assert!(functions.iter().all(|one| one.offset < bytes.len() as u64));
                }
            }
            bytes[at] = own[at];
        }
    }
}
