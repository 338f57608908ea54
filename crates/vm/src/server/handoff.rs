//! How a monitor hands its memory over: one message with a list of mappings and a userfaultfd, as
//! Firecracker's documentation of "handling page faults on snapshot resume" has it.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use abi::{Addr, PAGE_BYTES, Span};
use image::{Granule, SpaceId};
use rustix::net::{RecvFlags, ReturnFlags, Shutdown, shutdown};
use serde::Deserialize;
use serve::Region;
use sys::socket::{Received, receive as receive_message};

/// The longest list, in bytes.
const LIST_MAX_BYTES: usize = 1 << 20;
/// In how many pieces that may come: each is parsed with what came before.
const PIECES_MAX: usize = 1024;
/// The most mappings of a machine.
const MAPPINGS_MAX: usize = 1024;
/// The most descriptors: a userfaultfd, and the memory itself.
const DESCRIPTORS_MAX: usize = 2;
/// Upper limit of user memory (x86-64 with five levels of page tables).
const ADDRESS_MAX: u64 = 1 << 56;

/// The message of a monitor.
#[derive(Debug)]
pub(crate) struct Handoff {
    pub mappings: Vec<Mapping>,
    /// Its userfaultfd.
    pub uffd: OwnedFd,
}

/// A mapping as it was sent: a claim.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Address of the region in the monitor.
    base_host_virt_addr: u64,
    /// How long it is in bytes.
    size: u64,
    /// Its offset in the snapshot's memory file.
    offset: u64,
    /// How large its pages are, in bytes.
    page_size: Option<u64>,
    /// The old name of the same, in bytes, too.
    page_size_kib: Option<u64>,
}

/// Why a hand-off is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("the connection was closed before all was handed over")]
    Closed,
    #[error("the server stops")]
    Stopped,
    #[error("it is left to another server")]
    Left,
    #[error("cannot read from the connection: {0}")]
    System(std::io::Error),
    /// A message that does not belong there.
    #[error("{0}")]
    Wrong(String),
}

/// Condition that ends the wait for hand-offs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StopCondition<'a> {
    /// Can be read then.
    pub told: BorrowedFd<'a>,
    /// True if another server goes on from there, and nothing may change.
    pub leaving: &'a AtomicBool,
}

/// Receives a hand-off; the descriptor may come later than the list. When `stopping` is told,
/// nothing more can be sent, and what was sent before is taken. `depends` is called before anything
/// is taken off the connection, with the descriptors that are. The last piece stays on it, so that
/// a hand-off that came in one can be received again: [`discard`].
///
/// # Errors
/// Why it is refused.
pub(crate) fn receive(
    from: &OwnedFd,
    stopping: StopCondition<'_>,
    mut depends: impl FnMut(&[OwnedFd]),
) -> Result<Handoff, Refusal> {
    let mut bytes = Vec::new();
    let mut rights = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    let mut stopped = false;
    for _ in 0..PIECES_MAX {
        wait(from, stopping, &mut stopped)?;
        let Some(peeked) = take(from, &mut buffer, RecvFlags::PEEK)? else {
            continue;
        };
        if peeked.len == 0 && peeked.rights.is_empty() {
            return Err(match stopped {
                true => Refusal::Stopped,
                false => Refusal::Closed,
            });
        }
        let before = bytes.len();
        bytes.extend_from_slice(&buffer[..peeked.len]);
        let count = rights.len() + peeked.rights.len();
        if let Some(mappings) = understand(&bytes, count)? {
            rights.extend(peeked.rights);
            let uffd = rights.swap_remove(0);
            return Ok(Handoff { mappings, uffd });
        }
        depends(&peeked.rights);
        bytes.truncate(before);
        let Some(received) = take(from, &mut buffer[..peeked.len], RecvFlags::empty())? else {
            continue;
        };
        bytes.extend_from_slice(&buffer[..received.len]);
        rights.extend(received.rights);
    }
    Err(Refusal::Wrong(format!(
        "it comes in more than {PIECES_MAX} pieces"
    )))
}

/// Returns the message, if it is whole.
fn understand(bytes: &[u8], rights: usize) -> Result<Option<Vec<Mapping>>, Refusal> {
    if bytes.len() > LIST_MAX_BYTES {
        return Err(wrong("the list of mappings is longer than 1 MiB"));
    }
    if rights > DESCRIPTORS_MAX {
        return Err(Refusal::Wrong(format!(
            "{rights} descriptors came, and {DESCRIPTORS_MAX} are known"
        )));
    }
    match serde_json::from_slice::<Vec<Mapping>>(bytes) {
        Ok(mappings) => Ok((rights > 0).then_some(mappings)),
        Err(error) if error.is_eof() => Ok(None),
        Err(error) => Err(Refusal::Wrong(format!("no list of mappings: {error}"))),
    }
}

/// Takes off the connection what was received.
pub(crate) fn discard(from: &OwnedFd) {
    let _ = take(from, &mut vec![0; 1 << 16], RecvFlags::empty());
}

fn wrong(what: &str) -> Refusal {
    Refusal::Wrong(what.to_owned())
}

/// Waits until something can be read; when `stopping` can be, ends what comes.
fn wait(from: &OwnedFd, stopping: StopCondition<'_>, stopped: &mut bool) -> Result<(), Refusal> {
    loop {
        if stopping.leaving.load(Relaxed) {
            return Err(Refusal::Left);
        }
        let told = (!*stopped).then_some(stopping.told);
        let ready = guard::wait([Some(from.as_fd()), told], None);
        let [sent, told] = ready.map_err(Refusal::System)?;
        if told {
            if stopping.leaving.load(Relaxed) {
                return Err(Refusal::Left);
            }
            let _ = shutdown(from, Shutdown::Read);
            *stopped = true;
        } else if sent {
            return Ok(());
        }
    }
}

/// Takes what there is; nothing where that was interrupted.
fn take(from: &OwnedFd, buffer: &mut [u8], flags: RecvFlags) -> Result<Option<Received>, Refusal> {
    let flags = (flags | RecvFlags::DONTWAIT).bits().cast_signed();
    match receive_message(from, buffer, flags) {
        Ok(received) => {
            let lost = received.flags.cast_unsigned() & ReturnFlags::CTRUNC.bits() != 0;
            match lost {
                true => Err(wrong("its descriptors cannot be taken")),
                false => Ok(Some(received)),
            }
        }
        Err(error) => match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted => Ok(None),
            _ => Err(Refusal::System(error)),
        },
    }
}

/// Checks what a monitor claims: the regions of `space`, which has `pages` pages, that are meant.
pub(crate) fn regions(
    mappings: &[Mapping],
    space: SpaceId,
    pages: u64,
) -> Result<Vec<Region>, String> {
    if mappings.is_empty() || mappings.len() > MAPPINGS_MAX {
        return Err(format!("{} mappings", mappings.len()));
    }
    let regions = (0..).zip(mappings).map(|(number, mapping)| {
        let region = region(mapping, space, pages);
        region.map_err(|what| format!("mapping {number}: {what}"))
    });
    let regions = regions.collect::<Result<Vec<_>, _>>()?;
    let spans = regions.iter().map(Region::span);
    if overlap(spans.collect()) {
        return Err("mappings overlap in the monitor".to_owned());
    }
    let parts = regions.iter().map(|region| {
        let start = Addr::of_page(region.first_page);
        Span::new(start, region.bytes)
    });
    if overlap(parts.collect()) {
        return Err("mappings overlap in the image".to_owned());
    }
    Ok(regions)
}

fn region(mapping: &Mapping, space: SpaceId, pages: u64) -> Result<Region, String> {
    let Mapping {
        base_host_virt_addr: at,
        size,
        offset,
        ..
    } = *mapping;
    let page_size = match (mapping.page_size, mapping.page_size_kib) {
        (Some(one), Some(other)) if one != other => {
            return Err(format!("pages of {one} bytes, or of {other}"));
        }
        (one, other) => one.or(other).unwrap_or(PAGE_BYTES),
    };
    let granule = match page_size {
        PAGE_BYTES => Granule::Small,
        0x20_0000 => Granule::Large,
        other => return Err(format!("pages of {other} bytes are not known")),
    };
    if size == 0 {
        return Err("it is empty".to_owned());
    }
    for (what, number) in [("address", at), ("size", size), ("offset", offset)] {
        if !number.is_multiple_of(page_size) {
            return Err(format!(
                "the {what} {number:#x} is no multiple of the pages' size {page_size:#x}"
            ));
        }
    }
    if at.checked_add(size).is_none_or(|end| end > ADDRESS_MAX) {
        return Err(format!(
            "{size:#x} bytes at {at:#x} leave the address space"
        ));
    }
    let end = offset.checked_add(size);
    if end.is_none_or(|end| end > pages.saturating_mul(PAGE_BYTES)) {
        let bytes = pages.saturating_mul(PAGE_BYTES);
        return Err(format!(
            "{size:#x} bytes at offset {offset:#x} leave the image, which has {bytes:#x}"
        ));
    }
    Ok(Region {
        at: Addr(at),
        bytes: size,
        space,
        first_page: offset / PAGE_BYTES,
        granule,
    })
}

fn overlap(mut spans: Vec<Span>) -> bool {
    spans.sort();
    spans.windows(2).any(|pair| pair[0].end > pair[1].start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> Result<Vec<Region>, String> {
        let mappings: Vec<Mapping> = serde_json::from_str(text).map_err(|e| e.to_string())?;
        regions(&mappings, SpaceId(1), 1 << 18)
    }

    #[test]
    fn what_firecracker_sends_is_understood() {
        let old = r#"[{"base_host_virt_addr": 139637976727552, "size": 805306368, "offset": 0,
            "page_size_kib": 4096}, {"base_host_virt_addr": 140000000000000, "size": 268435456,
            "offset": 805306368, "page_size": 4096, "page_size_kib": 4096}]"#;
        let regions = parse(old).expect("right");
        assert_eq!(regions[0].granule, Granule::Small);
        assert_eq!(regions[1].first_page, 805_306_368 / 4096);
        let huge = r#"[{"base_host_virt_addr": 70368744177664, "size": 1073741824, "offset": 0,
            "page_size": 2097152, "is_new": true}]"#;
        assert_eq!(parse(huge).expect("right")[0].granule, Granule::Large);
    }

    #[test]
    fn wrong_claims_are_refused_by_name() {
        let one = |at: u64, size: u64, offset: u64, page_size: u64| {
            format!(
                "{{\"base_host_virt_addr\":{at},\"size\":{size},\"offset\":{offset},\
                 \"page_size\":{page_size}}}"
            )
        };
        let mib = 1 << 20;
        for (text, what) in [
            ("[]".to_owned(), "0 mappings"),
            (format!("[{}]", one(4096, 0, 0, 4096)), "it is empty"),
            (format!("[{}]", one(5, 4096, 0, 4096)), "the address 0x5"),
            (format!("[{}]", one(4096, 5, 0, 4096)), "the size 0x5"),
            (format!("[{}]", one(4096, 4096, 5, 4096)), "the offset 0x5"),
            (
                format!("[{}]", one(mib, 2 * mib, 0, 2 * mib)),
                "the address 0x100000",
            ),
            (
                format!("[{}]", one(0, 4096, 0, 8192)),
                "pages of 8192 bytes",
            ),
            (format!("[{}]", one(0, 4096, 0, 0)), "pages of 0 bytes"),
            (
                format!("[{}]", one(u64::MAX - 4095, 8192, 0, 4096)),
                "leave the address space",
            ),
            (
                format!("[{}]", one(0, 4096, u64::MAX - 4095, 4096)),
                "leave the image",
            ),
            (
                format!("[{}]", one(0, 1025 * mib, 0, 4096)),
                "leave the image",
            ),
            (
                format!(
                    "[{},{}]",
                    one(0, 8192, 0, 4096),
                    one(4096, 4096, 8192, 4096)
                ),
                "overlap in the monitor",
            ),
            (
                format!(
                    "[{},{}]",
                    one(0, 8192, 0, 4096),
                    one(8192, 4096, 4096, 4096)
                ),
                "overlap in the image",
            ),
        ] {
            let error = parse(&text).expect_err("refused");
            assert!(error.contains(what), "{text}: {error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_accepted_lies_in_the_image(
            claims in prop::collection::vec(any::<(u64, u64, u64, u8)>(), 0..4)
        ) {
            let mappings = claims.into_iter().map(|(at, size, offset, kind)| {
                let page_size = [Some(4096), Some(2 << 20), None, Some(at)][kind as usize % 4];
                // Often aligned, often small.
                let size = if at & 1 == 0 { (size % (1 << 31)) & !4095 } else { size };
                Mapping {
                    base_host_virt_addr: at & !4095,
                    size,
                    offset: if at & 2 == 0 { (offset % (1 << 31)) & !4095 } else { offset },
                    page_size,
                    page_size_kib: None,
                }
            });
            let mappings = mappings.collect::<Vec<_>>();
            if let Ok(regions) = regions(&mappings, SpaceId(1), 1 << 18) {
                for region in regions {
                    prop_assert!(region.first_page + region.bytes / 4096 <= 1 << 18);
                    prop_assert!(region.bytes > 0);
                }
            }
        }
    }
}
