//! Where the return address of a function stands on the stack, at any of a vDSO's instructions.
//!
//! Read from the call frame information that the kernel's vDSO carries for debuggers (`.eh_frame`;
//! DWARF 5, 6.4; Linux Standard Base, "Exception Frames").

use super::elf::Elf;

/// The registers that frames are found by, by DWARF's numbers; `rbp` is 6 and `rsp` 7.
pub type Register<'a> = &'a dyn Fn(u64) -> Option<u64>;

const RETURN_ADDRESS: u64 = 16;
/// More instructions than any entry has.
const STEPS_MAX: usize = 4096;

/// How the frame's address and the return address's place are found at an instruction.
#[derive(Clone, Copy, Debug, Default)]
struct Rules {
    /// The canonical frame address: a register and an offset in bytes.
    frame: Option<(u64, i64)>,
    /// The return address: bytes from the frame's address.
    place: Option<i64>,
}

/// The address on the stack of the return address, for a thread that is about to execute the
/// instruction at `offset` bytes from the start of the vDSO.
#[must_use]
pub fn return_slot(elf: &Elf<'_>, offset: u64, register: Register<'_>) -> Option<u64> {
    let entry = entry(elf, offset)?;
    let rules = entry.rules(elf, offset)?;
    let (number, distance) = rules.frame?;
    let frame = register(number)?.checked_add_signed(distance)?;
    frame.checked_add_signed(rules.place?)
}

/// What describes one function: its instructions and those common to several.
struct Entry {
    start: u64,
    common: std::ops::Range<u64>,
    own: std::ops::Range<u64>,
    code_unit: u64,
    data_unit: i64,
}

/// Finds the entry by the table that is sorted by address.
fn entry(elf: &Elf<'_>, offset: u64) -> Option<Entry> {
    const FORM: [u64; 4] = [1, 0x1b, 0x03, 0x3b];
    let table = elf.unwind_table()?;
    let head = [0, 1, 2, 3].map(|at| elf.number(table + at, 1));
    if head != FORM.map(Some) {
        return None;
    }
    let count = elf.number(table.checked_add(8)?, 4)?;
    let word =
        |index: u64, half: u64| signed(elf, table.checked_add(12 + index * 8 + half)?, table);
    let (mut low, mut high) = (0, count.min(1 << 16));
    while low + 1 < high {
        let middle = low.midpoint(high);
        if word(middle, 0)? <= offset {
            low = middle;
        } else {
            high = middle;
        }
    }
    Entry::read(elf, word(low, 4)?).filter(|entry| entry.covers(elf, offset) == Some(true))
}

/// A signed number of 32 bits at `at`, counted from `base`.
fn signed(elf: &Elf<'_>, at: u64, base: u64) -> Option<u64> {
    let number = elf.number(at, 4)? as u32;
    base.checked_add_signed(number.cast_signed().into())
}

impl Entry {
    fn read(elf: &Elf<'_>, at: u64) -> Option<Self> {
        let (body, end) = body(elf, at)?;
        let common = body.checked_sub(elf.number(body, 4)?)?;
        let (common_body, common_end) = body_of_common(elf, common)?;
        let mut reader = Reader {
            elf,
            at: common_body.checked_add(1)?,
            end: common_end,
        };
        // Version 1, augmentation "zR": an encoding of addresses, which must be the usual one.
        let named = elf.slice(reader.at, 3)? == b"zR\0";
        reader.at += 3;
        let (code_unit, data_unit) = (reader.unsigned()?, reader.signed()?);
        let (column, extra, encoding) = (reader.unsigned()?, reader.unsigned()?, reader.byte()?);
        let usual = named && column == RETURN_ADDRESS && extra == 1 && encoding == 0x1b;
        if !usual || elf.number(common_body, 1)? != 1 {
            return None;
        }
        let common = reader.at..common_end;
        let start_at = body.checked_add(4)?;
        let mut reader = Reader {
            elf,
            at: start_at.checked_add(8)?,
            end,
        };
        let extra = reader.unsigned()?;
        let own = reader.at.checked_add(extra)?..end;
        Some(Self {
            start: signed(elf, start_at, start_at)?,
            common,
            own,
            code_unit,
            data_unit,
        })
    }

    fn covers(&self, elf: &Elf<'_>, offset: u64) -> Option<bool> {
        // The length of the function stands 8 bytes behind the beginning of the entry's body, and
        // one byte of length of extra data before the instructions.
        let length_at = self.own.start.checked_sub(5)?;
        let bytes = elf.number(length_at, 4)?;
        Some(self.start <= offset && offset - self.start < bytes)
    }

    /// The rules at an instruction.
    fn rules(&self, elf: &Elf<'_>, offset: u64) -> Option<Rules> {
        let mut machine = Machine {
            entry: self,
            at: self.start,
            rules: Rules::default(),
            initial: Rules::default(),
            kept: Vec::new(),
        };
        machine.run(elf, self.common.clone(), u64::MAX)?;
        machine.initial = machine.rules;
        machine.at = self.start;
        machine.run(elf, self.own.clone(), offset)?;
        Some(machine.rules)
    }
}

/// Where the body of the entry at `at` begins and ends.
fn body(elf: &Elf<'_>, at: u64) -> Option<(u64, u64)> {
    let len = elf.number(at, 4)?;
    let body = at.checked_add(4)?;
    // 0 ends the list, all ones say that the length is of 64 bits.
    (len != 0 && len < u64::from(u32::MAX)).then_some((body, body.checked_add(len)?))
}

fn body_of_common(elf: &Elf<'_>, at: u64) -> Option<(u64, u64)> {
    let (body, end) = body(elf, at)?;
    (elf.number(body, 4)? == 0).then_some((body.checked_add(4)?, end))
}

/// Executes call frame instructions.
struct Machine<'a> {
    entry: &'a Entry,
    at: u64,
    rules: Rules,
    initial: Rules,
    kept: Vec<Rules>,
}

impl Machine<'_> {
    /// Runs until an instruction is for addresses after `offset`.
    fn run(&mut self, elf: &Elf<'_>, code: std::ops::Range<u64>, offset: u64) -> Option<()> {
        let mut reader = Reader {
            elf,
            at: code.start,
            end: code.end,
        };
        for _ in 0..STEPS_MAX {
            if reader.at >= reader.end {
                return Some(());
            }
            if let Some(units) = self.step(&mut reader)? {
                let bytes = units.checked_mul(self.entry.code_unit)?;
                self.at = self.at.checked_add(bytes)?;
                if self.at > offset {
                    return Some(());
                }
            }
        }
        None
    }

    /// Executes one instruction; gives by how many units of code it goes on, if it does.
    #[allow(clippy::option_option)]
    fn step(&mut self, reader: &mut Reader<'_>) -> Option<Option<u64>> {
        let byte = reader.byte()?;
        let low = byte & 0x3f;
        match byte >> 6 {
            1 => return Some(Some(low)),
            2 => {
                let units = reader.unsigned()?;
                self.offset(low, units.cast_signed())?;
                return Some(None);
            }
            3 => {
                self.restore(low);
                return Some(None);
            }
            _ => {}
        }
        match low {
            0x00 => {}
            0x02 => return Some(Some(reader.number(1)?)),
            0x03 => return Some(Some(reader.number(2)?)),
            0x04 => return Some(Some(reader.number(4)?)),
            0x05 => {
                let (register, units) = (reader.unsigned()?, reader.unsigned()?);
                self.offset(register, units.cast_signed())?;
            }
            0x06 => {
                let register = reader.unsigned()?;
                self.restore(register);
            }
            // Undefined, same value: of the return address neither can be.
            0x07 | 0x08 => self.forget(reader.unsigned()?),
            0x09 => {
                let register = reader.unsigned()?;
                reader.unsigned()?;
                self.forget(register);
            }
            0x0a => self.kept.push(self.rules),
            0x0b => self.rules = self.kept.pop()?,
            0x0c => {
                let (register, distance) = (reader.unsigned()?, reader.unsigned()?);
                self.rules.frame = Some((register, i64::try_from(distance).ok()?));
            }
            0x0d => {
                let (_, distance) = self.rules.frame?;
                self.rules.frame = Some((reader.unsigned()?, distance));
            }
            0x0e => {
                let (register, _) = self.rules.frame?;
                let distance = i64::try_from(reader.unsigned()?).ok()?;
                self.rules.frame = Some((register, distance));
            }
            // The frame's address by an expression, which functions of C never need here.
            0x0f => {
                let len = reader.unsigned()?;
                reader.skip(len)?;
                self.rules.frame = None;
            }
            0x10 | 0x16 => {
                let (register, len) = (reader.unsigned()?, reader.unsigned()?);
                reader.skip(len)?;
                self.forget(register);
            }
            0x2e => {
                reader.unsigned()?;
            }
            _ => return None,
        }
        Some(None)
    }

    fn offset(&mut self, register: u64, units: i64) -> Option<()> {
        if register == RETURN_ADDRESS {
            self.rules.place = Some(units.checked_mul(self.entry.data_unit)?);
        }
        Some(())
    }

    fn restore(&mut self, register: u64) {
        if register == RETURN_ADDRESS {
            self.rules.place = self.initial.place;
        }
    }

    fn forget(&mut self, register: u64) {
        if register == RETURN_ADDRESS {
            self.rules.place = None;
        }
    }
}

/// Reads numbers one after the other.
struct Reader<'a> {
    elf: &'a Elf<'a>,
    at: u64,
    end: u64,
}

impl Reader<'_> {
    fn number(&mut self, len: usize) -> Option<u64> {
        let number = self.elf.number(self.at, len)?;
        self.skip(len as u64)?;
        Some(number)
    }

    fn byte(&mut self) -> Option<u64> {
        self.number(1)
    }

    fn skip(&mut self, bytes: u64) -> Option<()> {
        self.at = self.at.checked_add(bytes)?;
        (self.at <= self.end).then_some(())
    }

    /// A number in groups of seven bits (LEB128), and how many bits they were.
    fn groups(&mut self) -> Option<(u64, u32, bool)> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= (byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some((number, shift + 7, byte & 0x40 != 0));
            }
        }
        None
    }

    fn unsigned(&mut self) -> Option<u64> {
        Some(self.groups()?.0)
    }

    fn signed(&mut self) -> Option<i64> {
        let (number, bits, negative) = self.groups()?;
        let sign = if negative && bits < 64 {
            u64::MAX << bits
        } else {
            0
        };
        Some((number | sign).cast_signed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> (&'static [u8], Elf<'static>) {
        let own = sys::vdso::own().expect("a vDSO");
        (own, Elf::new(own).expect("an ELF file"))
    }

    #[test]
    fn at_the_first_instruction_it_is_on_top() {
        let (_, elf) = own();
        let register = |number| (number == 7).then_some(0x1000);
        for function in elf.functions().expect("functions") {
            let slot = return_slot(&elf, function.offset, &register);
            assert_eq!(slot, Some(0x1000), "{}", function.name);
        }
    }

    #[test]
    fn outside_of_functions_there_is_none() {
        let (own, elf) = own();
        let register = |_| Some(0x1000);
        for offset in [0, 64, own.len() as u64, u64::MAX] {
            assert_eq!(return_slot(&elf, offset, &register), None, "{offset:#x}");
        }
    }

    #[test]
    fn damaged_tables_lead_nowhere_else() {
        let (own, elf) = own();
        let table = elf.unwind_table().expect("a table") as usize;
        let offset = elf.functions().expect("functions")[0].offset;
        let mut bytes = own.to_vec();
        for at in table..bytes.len().min(table + 0x300) {
            for wrong in [0, 0xff, !own[at]] {
                bytes[at] = wrong;
                let elf = Elf::new(&bytes).expect("its headers are whole");
                // Any answer will do, as long as there is one.
                let _ = return_slot(&elf, offset, &|_| Some(0x1000));
            }
            bytes[at] = own[at];
        }
    }
}
