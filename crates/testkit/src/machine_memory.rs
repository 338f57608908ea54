//! The memory of a microVM as tests make it: what its pages hold, and the file of it.
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// The size of a page.
pub const PAGE_BYTES: usize = 4096;
/// Pages of a huge page.
const HUGE_PAGES: u64 = 512;

/// Tells whether a page is zero: whole huge pages, the end of each, single pages.
pub fn is_zero(page: u64) -> bool {
    let (huge, inside) = (page / HUGE_PAGES, page % HUGE_PAGES);
    huge % 3 == 1 || inside >= 400 || page % 7 == 3
}

/// The word at `at` bytes of a page.
pub fn word(page: u64, at: usize) -> u64 {
    match is_zero(page) {
        true => 0,
        false => ((page << 16) + at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

/// Writes the memory file of a machine that has `pages` pages.
///
/// # Errors
/// Those of writing.
pub fn write(path: &Path, pages: u64) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    for page in 0..pages {
        for at in (0..PAGE_BYTES).step_by(8) {
            file.write_all(&word(page, at).to_ne_bytes())?;
        }
    }
    file.flush()
}
