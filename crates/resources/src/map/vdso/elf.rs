//! What a vDSO's own ELF headers say: its functions and where its unwind tables are; elf(5).
//!
//! The bytes may be an image's: every offset is a claim until it was looked up.

use object::LittleEndian;
use object::elf::{
    DT_HASH, DT_STRTAB, DT_SYMTAB, DynamicTag, ET_DYN, ET_EXEC, FileHeader32, FileHeader64,
    HashHeader, Machine, PF_X, PT_DYNAMIC, PT_GNU_EH_FRAME, PT_LOAD, ProgramType, SHN_ABS,
    SHN_UNDEF, STT_FUNC,
};
use object::pod::{Pod, from_bytes, slice_from_bytes};
use object::read::elf::{Dyn, FileHeader, ProgramHeader, Sym};

use crate::arch::{ELF_MACHINE, ELF_MACHINE_32};

/// More symbols or headers than any vDSO has.
const ENTRIES_MAX: u64 = 512;
/// Longer than any name in a vDSO.
const NAME_BYTES_MAX: usize = 128;
/// The byte order of this processor.
const ORDER: LittleEndian = LittleEndian;

/// A function that a vDSO offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its first instruction, in bytes from the start of the vDSO.
    pub offset: u64,
}

/// The bytes of a vDSO, as they stand in memory.
#[derive(Clone, Debug)]
pub struct Elf<'a> {
    bytes: &'a [u8],
    is_32_bit: bool,
    segments: Vec<Segment>,
    /// The address that its headers were made for.
    base: u64,
}

/// A part of the file as its program headers list it.
#[derive(Clone, Copy, Debug)]
struct Segment {
    kind: ProgramType,
    is_code: bool,
    /// Where it ends in the file.
    file_end: Option<u64>,
    address: u64,
    memory_bytes: u64,
}

impl<'a> Elf<'a> {
    /// Looks at a vDSO, or the first page of another program's file, for this processor; also of
    /// 32 bits.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let is_32_bit = bytes.starts_with(b"\x7fELF\x01");
        let segments = match is_32_bit {
            false => segments::<FileHeader64<LittleEndian>>(bytes, ELF_MACHINE),
            true => segments::<FileHeader32<LittleEndian>>(bytes, ELF_MACHINE_32),
        };
        let mut elf = Self {
            bytes,
            is_32_bit,
            segments: segments?,
            base: 0,
        };
        elf.base = elf.segment(PT_LOAD)?.address;
        Some(elf)
    }

    /// Whether it is of 32 bits.
    #[must_use]
    pub fn is_32_bit(&self) -> bool {
        self.is_32_bit
    }

    /// How many bytes of it are code and data, from its start.
    #[must_use]
    pub fn load_bytes(&self) -> Option<u64> {
        Some(self.segment(PT_LOAD)?.memory_bytes)
    }

    /// All bytes from `at` on.
    #[must_use]
    pub fn from(&self, at: u64) -> Option<&'a [u8]> {
        self.bytes.get(usize::try_from(at).ok()?..)
    }

    /// Where in the file the last byte of code ends that is loaded.
    #[must_use]
    pub fn code_end(&self) -> Option<u64> {
        let is_code = |segment: &&Segment| segment.kind == PT_LOAD && segment.is_code;
        let code = self.segments.iter().filter(is_code);
        code.filter_map(|segment| segment.file_end).max()
    }

    /// Where the table of unwind information begins, which debuggers use as well.
    #[must_use]
    pub fn unwind_table(&self) -> Option<u64> {
        self.offset(self.segment(PT_GNU_EH_FRAME)?.address)
    }

    fn segment(&self, kind: ProgramType) -> Option<&Segment> {
        self.segments.iter().find(|segment| segment.kind == kind)
    }

    /// The functions by which programs use it, each name of each.
    #[must_use]
    pub fn functions(&self) -> Option<Vec<Function>> {
        match self.is_32_bit {
            false => self.functions_of::<FileHeader64<LittleEndian>>(),
            true => self.functions_of::<FileHeader32<LittleEndian>>(),
        }
    }

    fn functions_of<File: FileHeader<Endian = LittleEndian>>(&self) -> Option<Vec<Function>> {
        let dynamic = self.segment(PT_DYNAMIC)?;
        let count = dynamic.memory_bytes / size_of::<File::Dyn>() as u64;
        let entries = self.list::<File::Dyn>(self.offset(dynamic.address)?, count)?;
        let entry = |tag: DynamicTag| {
            let found = entries.iter().find(|entry| entry.d_tag(ORDER) == tag);
            self.offset(found?.d_val(ORDER).into())
        };
        let (symbols, names) = (entry(DT_SYMTAB)?, entry(DT_STRTAB)?);
        // A hash table has as many chains as there are symbols. Without one, as some linkers
        // leave it out, the symbols end where the names begin, as linkers lay them out.
        let count = match entry(DT_HASH) {
            Some(hash) => {
                let (table, _) = from_bytes::<HashHeader<LittleEndian>>(self.from(hash)?).ok()?;
                table.chain_count.get(ORDER).into()
            }
            None => names.checked_sub(symbols)? / size_of::<File::Sym>() as u64,
        };
        let mut functions = Vec::new();
        for symbol in self.list::<File::Sym>(symbols, count)?.iter().skip(1) {
            let section = symbol.st_shndx(ORDER);
            if symbol.st_type() == STT_FUNC && ![SHN_UNDEF, SHN_ABS].contains(&section) {
                let offset = self.offset(symbol.st_value(ORDER).into())?;
                let name = self.text(names.checked_add(symbol.st_name(ORDER).into())?)?;
                // It must have an instruction.
                self.from(offset)?.first()?;
                functions.push(Function { name, offset });
            }
        }
        Some(functions)
    }

    /// `count` entries of a table at `at`, no more than [`ENTRIES_MAX`].
    fn list<Entry: Pod>(&self, at: u64, count: u64) -> Option<&'a [Entry]> {
        let count = usize::try_from(count.min(ENTRIES_MAX)).ok()?;
        let (entries, _) = slice_from_bytes(self.from(at)?, count).ok()?;
        Some(entries)
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

/// The segments of a program or library for `machine`.
fn segments<File: FileHeader<Endian = LittleEndian>>(
    bytes: &[u8],
    machine: Machine,
) -> Option<Vec<Segment>> {
    let file = File::parse(bytes).ok()?;
    let order = file.endian().ok()?;
    let is_ours =
        [ET_EXEC, ET_DYN].contains(&file.e_type(order)) && file.e_machine(order) == machine;
    let headers = file.program_headers(order, bytes).ok()?;
    let segment = |header: &File::ProgramHeader| {
        let (offset, bytes) = (header.p_offset(order).into(), header.p_filesz(order).into());
        Segment {
            kind: header.p_type(order),
            is_code: header.p_flags(order).contains(PF_X),
            file_end: u64::checked_add(offset, bytes),
            address: header.p_vaddr(order).into(),
            memory_bytes: header.p_memsz(order).into(),
        }
    };
    is_ours.then(|| headers.iter().map(segment).collect())
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
