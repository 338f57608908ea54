//! Where the return address of a function stands on the stack, at any of a vDSO's instructions.
//!
//! Read from the call frame information that the kernel's vDSO carries for debuggers (`.eh_frame`;
//! DWARF 5, 6.4; Linux Standard Base, "Exception Frames").

use gimli::{
    BaseAddresses, CfaRule, EhFrame, EhFrameHdr, LittleEndian, Pointer, Register, RegisterRule,
    UnwindContext, UnwindSection,
};
use sys::arch::RETURN_ADDRESS;

use super::elf::Elf;

/// The registers that frames are found by, by DWARF's numbers.
pub type Registers<'a> = &'a dyn Fn(u16) -> Option<u64>;

/// The address on the stack of the return address, for a thread that is about to execute the
/// instruction at `offset` bytes from the start of the vDSO.
#[must_use]
pub fn return_slot(elf: &Elf<'_>, offset: u64, registers: Registers<'_>) -> Option<u64> {
    const ADDRESS_BYTES: u8 = 8;
    let table_at = elf.unwind_table()?;
    let bases = BaseAddresses::default().set_eh_frame_hdr(table_at);
    let header = EhFrameHdr::new(elf.from(table_at)?, LittleEndian);
    let header = header.parse(&bases, ADDRESS_BYTES).ok()?;
    let Pointer::Direct(frames_at) = header.eh_frame_ptr() else {
        return None;
    };
    let bases = bases.set_eh_frame(frames_at);
    let mut frames = EhFrame::new(elf.from(frames_at)?, LittleEndian);
    frames.set_address_size(ADDRESS_BYTES);
    let mut context = UnwindContext::new();
    let common = EhFrame::cie_from_offset;
    let row = frames.unwind_info_for_address(&bases, &mut context, offset, common);
    let row = row.ok()?;
    // Functions of C never need it by expressions.
    let CfaRule::RegisterAndOffset { register, offset } = *row.cfa() else {
        return None;
    };
    let Some(RegisterRule::Offset(place)) = row.register(Register(RETURN_ADDRESS)) else {
        return None;
    };
    let frame = registers(register.0)?.checked_add_signed(offset)?;
    frame.checked_add_signed(place)
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
