//! The vDSO out of a kernel's file.
use std::io::Write;
use std::process::{Command, Stdio};

use crate::error::Result;
use crate::repo;

/// The kernel's program, which its file holds compressed
/// (Documentation/arch/x86/boot.rst, payload_offset).
pub fn decompress(kernel: &[u8]) -> Result<Vec<u8>> {
    const PROGRAMS: [(&[u8], &str); 3] = [
        (&[0x02, 0x21, 0x4c, 0x18], "lz4"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
        (b"\xfd7zXZ", "xz"),
    ];
    let payload = payload(kernel).unwrap_or_default();
    let known = PROGRAMS
        .iter()
        .find(|(magic, _)| payload.starts_with(magic));
    let Some((_, program)) = known else {
        return Ok(Vec::new());
    };
    let mut command = Command::new(program);
    command
        .arg("-dc")
        .stdin(Stdio::piped())
        .stderr(Stdio::null());
    let mut running = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|source| repo::start_error(&command, source))?;
    let mut input = running.stdin.take().expect("stdin was made a pipe above");
    let payload = payload.to_vec();
    // A length follows the compressed bytes, so the end is an error.
    let writer = std::thread::spawn(move || drop(input.write_all(&payload)));
    let output = running
        .wait_with_output()
        .map_err(|source| repo::start_error(&command, source))?;
    let _ = writer.join();
    Ok(output.stdout)
}

fn payload(kernel: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = kernel.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let sectors = usize::from(*kernel.get(0x1f1)?).max(4);
    let start = ((sectors + 1) * 512).checked_add(word(0x248)?)?;
    kernel.get(start..start.checked_add(word(0x24c)?)?)
}

/// The vDSO for 64-bit programs in a kernel's program, with its pages filled up.
pub fn find(kernel: &[u8]) -> Option<&[u8]> {
    const PAGE_BYTES: usize = 4096;
    // 64 bits, little-endian, a shared object for x86-64.
    let is_it = |page: &[u8]| {
        page.starts_with(b"\x7fELF\x02\x01\x01") && page.get(16..20) == Some(&[3, 0, 62, 0])
    };
    let starts = (0..kernel.len()).step_by(PAGE_BYTES);
    starts.filter(|at| is_it(&kernel[*at..])).find_map(|at| {
        // The first program header is that of all that is loaded.
        let size = kernel.get(at + 64 + 40..at + 64 + 48)?.try_into().ok()?;
        let bytes = usize::try_from(u64::from_le_bytes(size)).ok()?;
        let end = at.checked_add(bytes.checked_next_multiple_of(PAGE_BYTES)?)?;
        let found = kernel.get(at..end)?;
        let name = b"linux-vdso.so.1";
        found
            .windows(name.len())
            .any(|part| part == name)
            .then_some(found)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vdso_is_found_in_a_kernel() {
        let mut kernel = vec![0xcc; 5 * 4096];
        let head = b"\x7fELF\x02\x01\x01";
        kernel[4096..4103].copy_from_slice(head);
        kernel[8192..8199].copy_from_slice(head);
        kernel[8208..8212].copy_from_slice(&[3, 0, 62, 0]);
        kernel[8192 + 104..8192 + 112].copy_from_slice(&0x1100_u64.to_le_bytes());
        assert_eq!(find(&kernel), None);
        kernel[9000..9015].copy_from_slice(b"linux-vdso.so.1");
        let found = find(&kernel).expect("there it is");
        assert_eq!(found.len(), 8192);
        assert_eq!(find(&kernel[..3 * 4096]), None, "it is cut off");
    }

    #[test]
    fn a_payload_is_where_the_header_says() {
        let mut kernel = vec![0; 4096];
        kernel[0x1f1] = 1;
        kernel[0x248..0x24c].copy_from_slice(&8_u32.to_le_bytes());
        kernel[0x24c..0x250].copy_from_slice(&4_u32.to_le_bytes());
        kernel[5 * 512 + 8..][..4].copy_from_slice(b"load");
        assert_eq!(payload(&kernel), Some(b"load".as_slice()));
        assert_eq!(payload(&kernel[..2000]), None);
    }
}
