//! A proxy in a running task, as a restore has made it: known again and told from other memory.
//!
//! Nothing but the code itself says that it is a proxy: bytes of its ELF header that have no
//! meaning hold a mark. Only mappings with an unusual advice are looked at, which the restore gives
//! to them so that they never become one with their neighbours.

use abi::{Addr, Span};

use super::super::listing::{Backing, Listed};

/// The bytes of an ELF header that the mark lies in: `EI_PAD` and the following.
const AT: std::ops::Range<usize> = 9..16;
/// What begins it.
const MAGIC: &[u8; 4] = b"SFPX";
/// The form of what follows.
const FORM: u8 = 1;

/// Marks code as a proxy with `data_pages` pages of data before it.
///
/// # Panics
/// When the code is shorter than an ELF header.
pub fn mark(code: &mut [u8], data_pages: u8) {
    let [a, b, c, d] = *MAGIC;
    let sum = FORM ^ data_pages ^ 0xff;
    code[AT].copy_from_slice(&[a, b, c, d, FORM, data_pages, sum]);
}

/// Takes the mark away.
pub fn unmark(code: &mut [u8]) {
    if let Some(mark) = code.get_mut(AT) {
        mark.fill(0);
    }
}

/// How many pages of data are before code that begins with `head`, if it is marked.
#[must_use]
pub fn marked(head: &[u8]) -> Option<u8> {
    let mark = head.get(AT)?;
    let (form, data_pages, sum) = (mark[4], mark[5], mark[6]);
    let is_ours = head.starts_with(b"\x7fELF") && mark.starts_with(MAGIC) && form == FORM;
    (is_ours && sum == form ^ data_pages ^ 0xff).then_some(data_pages)
}

/// The advice of a proxy's mappings, as `VmFlags` shows it.
const ADVICE: &[u8; 2] = b"rr";

/// Makes the listing of a task with a proxy what it was on the kernel where the code is from: the
/// proxy is the vDSO and the kernel's own is not there. Gives the kernel's code. `head` reads the
/// first bytes at an address.
pub fn lift(
    listed: &mut Vec<Listed>,
    head: &mut dyn FnMut(Addr) -> Option<[u8; 16]>,
) -> Option<Span> {
    let kernel = listed.iter().find(|one| one.backing() == Backing::Vdso)?;
    let kernel = kernel.span;
    let candidate = |one: &Listed| is_ours(one, 5);
    let (at, data_pages) = listed.iter().enumerate().find_map(|(at, one)| {
        let pages = candidate(one).then(|| marked(&head(one.span.start)?))?;
        Some((at, pages?))
    })?;
    let start = listed[at].span.start;
    let data = |one: &Listed| {
        let pages = one.span.pages() == u64::from(data_pages);
        is_ours(one, 1) && pages && one.span.end == start
    };
    if let Some(before) = at.checked_sub(1).filter(|before| data(&listed[*before])) {
        listed[before].name = b"[vvar]".to_vec();
    }
    listed[at].name = b"[vdso]".to_vec();
    let special = |one: &Listed| matches!(one.backing(), Backing::Vdso | Backing::Vvar);
    listed.retain(|one| one.has(ADVICE) || !special(one));
    Some(kernel)
}

fn is_ours(listed: &Listed, prot: u32) -> bool {
    listed.backing() == Backing::Anonymous
        && !listed.shared
        && listed.prot == prot
        && listed.has(ADVICE)
}

#[cfg(test)]
mod tests {
    use super::super::super::listing::parse;
    use super::*;

    const SMAPS: &str = "\
        10000-14000 r--p 00000000 00:00 0 \nVmFlags: rd mr mw me rr \n\
        14000-16000 r-xp 00000000 00:00 0 \nVmFlags: rd ex mr mw me rr \n\
        20000-21000 r-xp 00000000 00:00 0 \nVmFlags: rd ex mr mw me \n\
        30000-34000 r--p 00000000 00:00 0 [vvar]\nVmFlags: rd mr de dd \n\
        34000-36000 r-xp 00000000 00:00 0 [vdso]\nVmFlags: rd ex mr de dd \n";

    fn head(data_pages: u8) -> [u8; 16] {
        let mut head = *b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0";
        mark(&mut head, data_pages);
        head
    }

    #[test]
    fn marks_are_known_again() {
        let mut bytes = head(6);
        assert_eq!(marked(&bytes), Some(6));
        for at in 0..16 {
            if (4..9).contains(&at) {
                continue;
            }
            bytes[at] ^= 1;
            assert_eq!(marked(&bytes), None, "byte {at}");
            bytes[at] ^= 1;
        }
        unmark(&mut bytes);
        assert_eq!(marked(&bytes), None);
        assert_eq!(marked(&bytes[..10]), None);
    }

    #[test]
    fn a_proxy_is_listed_as_what_it_stands_for() {
        let mut listed = parse(SMAPS.as_bytes()).expect("understood");
        let mut asked = Vec::new();
        let kernel = lift(&mut listed, &mut |at| {
            asked.push(at.0);
            Some(head(4))
        });
        assert_eq!(kernel.map(|span| span.start.0), Some(0x34000));
        assert_eq!(asked, [0x14000], "other memory was read");
        let names = listed.iter().map(|one| (one.span.start.0, one.backing()));
        let want = [
            (0x10000, Backing::Vvar),
            (0x14000, Backing::Vdso),
            (0x20000, Backing::Anonymous),
        ];
        assert_eq!(names.collect::<Vec<_>>(), want);
    }

    #[test]
    fn other_data_before_a_proxy_stays_what_it_is() {
        let mut listed = parse(SMAPS.as_bytes()).expect("understood");
        assert!(lift(&mut listed, &mut |_| Some(head(2))).is_some());
        assert_eq!(listed[0].backing(), Backing::Anonymous);
    }

    #[test]
    fn code_without_a_mark_is_no_proxy() {
        let mut listed = parse(SMAPS.as_bytes()).expect("understood");
        let before = listed.clone();
        assert_eq!(lift(&mut listed, &mut |_| Some([0; 16])), None);
        assert_eq!(listed, before);
    }
}
