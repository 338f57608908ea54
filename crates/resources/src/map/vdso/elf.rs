//! What a vDSO's own ELF headers say: its functions and where its unwind tables are; elf(5).
//!
//! The bytes may be an image's: every offset is a claim until it was looked up.

use crate::arch::{ELF_MACHINE, ELF_MACHINE_32};

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
    /// How large words are, and where they stand.
    form: &'static Form,
    /// The address that its headers were made for.
    base: u64,
}

/// How the headers of a class of files are laid out: offsets and sizes in bytes.
#[derive(Debug)]
struct Form {
    word: usize,
    /// In the file's header: the program headers, the size of one and how many there are.
    headers: [u64; 3],
    /// In a program header.
    flags: u64,
    offset: u64,
    address: u64,
    file_bytes: u64,
    memory_bytes: u64,
    /// In a symbol: its kind, its section and its value; and the size of one.
    symbol: [u64; 3],
    symbol_bytes: u64,
}

static FORM_64: Form = Form {
    word: 8,
    headers: [32, 54, 56],
    flags: 4,
    offset: 8,
    address: 16,
    file_bytes: 32,
    memory_bytes: 40,
    symbol: [4, 6, 8],
    symbol_bytes: 24,
};

static FORM_32: Form = Form {
    word: 4,
    headers: [28, 42, 44],
    flags: 24,
    offset: 4,
    address: 8,
    file_bytes: 16,
    memory_bytes: 20,
    symbol: [12, 14, 4],
    symbol_bytes: 16,
};

/// A part of the file as its program headers list it.
struct Segment {
    kind: u64,
    address: u64,
    bytes: u64,
}

impl<'a> Elf<'a> {
    /// Looks at a vDSO, or the first page of another program's file, for this processor; also of
    /// 32 bits.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        const ET_EXEC: u64 = 2;
        const ET_DYN: u64 = 3;
        let is_32_bit = bytes.starts_with(b"\x7fELF\x01\x01");
        let (form, machine) = match is_32_bit {
            false => (&FORM_64, ELF_MACHINE),
            true => (&FORM_32, ELF_MACHINE_32),
        };
        let mut elf = Self {
            bytes,
            form,
            base: 0,
        };
        let is_ours = (is_32_bit || bytes.starts_with(b"\x7fELF\x02\x01"))
            && (ET_EXEC..=ET_DYN).contains(&elf.number(16, 2)?)
            && elf.number(18, 2)? == machine;
        let load = elf.segment(PT_LOAD)?;
        elf.base = load.address;
        is_ours.then_some(elf)
    }

    /// Whether it is of 32 bits.
    #[must_use]
    pub fn is_32_bit(&self) -> bool {
        self.form.word == 4
    }

    /// The word at `at`.
    fn word(&self, at: u64) -> Option<u64> {
        self.number(at, self.form.word)
    }

    /// Where each program header stands.
    fn program_headers(&self) -> Option<impl Iterator<Item = u64> + use<>> {
        let [headers, size, count] = self.form.headers;
        let (headers, size) = (self.word(headers)?, self.number(size, 2)?);
        let count = self.number(count, 2)?.min(ENTRIES_MAX);
        Some((0..count).map_while(move |index| headers.checked_add(index * size)))
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
        let mut end = None;
        for at in self.program_headers()? {
            let flags = self.number(at.checked_add(self.form.flags)?, 4)?;
            if self.number(at, 4)? == PT_LOAD && flags & EXECUTABLE != 0 {
                let offset = self.word(at.checked_add(self.form.offset)?)?;
                let bytes = self.word(at.checked_add(self.form.file_bytes)?)?;
                end = end.max(offset.checked_add(bytes));
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
        for at in self.program_headers()? {
            if self.number(at, 4)? == kind {
                return Some(Segment {
                    kind,
                    address: self.word(at.checked_add(self.form.address)?)?,
                    bytes: self.word(at.checked_add(self.form.memory_bytes)?)?,
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
        let dynamic = self.segment(PT_DYNAMIC)?;
        debug_assert_eq!(dynamic.kind, PT_DYNAMIC);
        let start = dynamic.address.checked_sub(self.base)?;
        let word = self.form.word as u64;
        let entry = |wanted: u64| {
            (0..(dynamic.bytes / (2 * word)).min(ENTRIES_MAX)).find_map(|index| {
                let at = start.checked_add(index * 2 * word)?;
                let value = self.word(at.checked_add(word)?)?;
                (self.word(at)? == wanted).then_some(value)
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
            None => names.checked_sub(symbols)? / self.form.symbol_bytes,
        };
        let mut functions = Vec::new();
        for index in 1..count.min(ENTRIES_MAX) {
            let at = symbols.checked_add(index * self.form.symbol_bytes)?;
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
        let [kind, section, value] = self.form.symbol;
        let (name, kind) = (
            self.number(at, 4)?,
            self.number(at.checked_add(kind)?, 1)? & 0xf,
        );
        let section = self.number(at.checked_add(section)?, 2)?;
        if kind != STT_FUNC || section == SHN_UNDEF || section == SHN_ABS {
            return Some(None);
        }
        let offset = self.offset(self.word(at.checked_add(value)?)?)?;
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
