//! The vDSO of this process: the kernel's own, as a new task gets it.

const PAGE_BYTES: usize = 4096;

/// The vDSO as it is mapped, in whole pages; no system call is made.
#[must_use]
pub fn own() -> Option<&'static [u8]> {
    const PT_LOAD: u64 = libc::PT_LOAD as u64;
    let (base, page) = first_page()?;
    let number = |at: usize, len: usize| number(page, at, len);
    let (headers, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    let headers = (0..count).map(|index| headers.saturating_add(index * size));
    let load = headers
        .filter_map(|at| usize::try_from(at).ok())
        .find(|at| number(*at, 4) == Some(PT_LOAD))?;
    let bytes = usize::try_from(number(load + 40, 8)?).ok()?;
    let len = bytes.checked_next_multiple_of(PAGE_BYTES)?;
    // SAFETY: the kernel maps all of the segment that its own header describes, readable, for as
    // long as the process lives.
    Some(unsafe { std::slice::from_raw_parts(base, len) })
}

/// The build id of the vDSO's ELF notes, if there is a vDSO and it has one.
#[must_use]
pub fn own_build_id() -> Option<Vec<u8>> {
    build_id(first_page()?.1)
}

fn first_page() -> Option<(*const u8, &'static [u8])> {
    // SAFETY: getauxval reads the process's own auxiliary vector.
    let base = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    if base == 0 {
        return None;
    }
    let base = base as *const u8;
    // SAFETY: the kernel maps at least one readable page there for as long as the process lives.
    Some((base, unsafe {
        std::slice::from_raw_parts(base, PAGE_BYTES)
    }))
}

/// The little-endian number of `len` bytes at `at`.
fn number(bytes: &[u8], at: usize, len: usize) -> Option<u64> {
    let mut word = [0; 8];
    word[..len].copy_from_slice(bytes.get(at..at.checked_add(len)?)?);
    Some(u64::from_le_bytes(word))
}

/// The build id (`NT_GNU_BUILD_ID`) in an ELF image that begins with `bytes`; elf(5).
#[must_use]
pub fn build_id(bytes: &[u8]) -> Option<Vec<u8>> {
    const PT_NOTE: u64 = libc::PT_NOTE as u64;
    const NT_GNU_BUILD_ID: u64 = 3;
    let number = |at: usize, len: usize| number(bytes, at, len);
    // Where a file for 32 or 64 bits has its program headers, and they their place and size.
    let is_32_bit = number(4, 1)? == 1;
    let (headers, size, count) = match is_32_bit {
        true => (number(28, 4)?, number(42, 2)?, number(44, 2)?),
        false => (number(32, 8)?, number(54, 2)?, number(56, 2)?),
    };
    let (place, bytes_at, word) = match is_32_bit {
        true => (4, 16, 4),
        false => (8, 32, 8),
    };
    for index in 0..count {
        let header = usize::try_from(headers.checked_add(index * size)?).ok()?;
        if number(header, 4)? != PT_NOTE {
            continue;
        }
        let mut at = usize::try_from(number(header.checked_add(place)?, word)?).ok()?;
        let len = usize::try_from(number(header.checked_add(bytes_at)?, word)?).ok()?;
        let end = at.checked_add(len)?.min(bytes.len());
        while at + 12 <= end {
            let name_len = usize::try_from(number(at, 4)?).ok()?;
            let desc_len = usize::try_from(number(at + 4, 4)?).ok()?;
            let desc = at
                .checked_add(12)?
                .checked_add(name_len.checked_next_multiple_of(4)?)?;
            if number(at + 8, 4)? == NT_GNU_BUILD_ID
                && bytes.get(at + 12..at + 16) == Some(b"GNU\0")
            {
                return Some(bytes.get(desc..desc.checked_add(desc_len)?)?.to_vec());
            }
            at = desc.checked_add(desc_len.checked_next_multiple_of(4)?)?;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_vdso_has_a_build_id() {
        assert_eq!(own_build_id().expect("a build id").len(), 20);
    }

    #[test]
    fn own_vdso_is_an_elf_file_of_whole_pages() {
        let own = own().expect("a vDSO");
        assert!(own.starts_with(b"\x7fELF") && own.len().is_multiple_of(PAGE_BYTES));
        assert_eq!(build_id(own), own_build_id());
    }

    #[test]
    fn damaged_headers_have_none() {
        assert_eq!(build_id(&[0xff; 200]), None);
        assert_eq!(build_id(b"\x7fELF"), None);
    }
}
