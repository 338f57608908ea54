//! The vDSO of this process: the kernel's own, as a new task gets it.

/// The build id of the vDSO's ELF notes, if there is a vDSO and it has one.
#[must_use]
pub fn own_build_id() -> Option<Vec<u8>> {
    // SAFETY: getauxval reads the process's own auxiliary vector.
    let base = unsafe { libc::getauxval(libc::AT_SYSINFO_EHDR) };
    if base == 0 {
        return None;
    }
    // SAFETY: the kernel maps at least one readable page there for as long as the process lives.
    let page = unsafe { std::slice::from_raw_parts(base as *const u8, 4096) };
    build_id(page)
}

/// The build id (`NT_GNU_BUILD_ID`) in an ELF image that begins with `bytes`; elf(5).
#[must_use]
pub fn build_id(bytes: &[u8]) -> Option<Vec<u8>> {
    const PT_NOTE: u64 = 4;
    const NT_GNU_BUILD_ID: u64 = 3;
    let number = |at: usize, len: usize| -> Option<u64> {
        let mut word = [0; 8];
        word[..len].copy_from_slice(bytes.get(at..at.checked_add(len)?)?);
        Some(u64::from_le_bytes(word))
    };
    let (headers, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        let header = usize::try_from(headers.checked_add(index * size)?).ok()?;
        if number(header, 4)? != PT_NOTE {
            continue;
        }
        let mut at = usize::try_from(number(header.checked_add(8)?, 8)?).ok()?;
        let len = usize::try_from(number(header.checked_add(32)?, 8)?).ok()?;
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
    fn damaged_headers_have_none() {
        assert_eq!(build_id(&[0xff; 200]), None);
        assert_eq!(build_id(b"\x7fELF"), None);
    }
}
