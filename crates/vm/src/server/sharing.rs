//! Memory that machines have in common: the server's file of the image's pages, which monitors map
//! for themselves alone.

use std::os::fd::{AsFd, OwnedFd};

use abi::{Addr, PAGE_BYTES, Span};
use image::Granule;
use rustix::fs::fstat;
use serde_json::json;
use serve::{Region, Share};
use sys::socket::{Along, send};

/// Sends a monitor that has connected the file, read by who wants to.
pub(crate) fn offer(share: &Share, pages: u64, connection: &OwnedFd) {
    let text = json!({"size": pages * PAGE_BYTES, "page_size": PAGE_BYTES}).to_string();
    let along = Along {
        rights: &[share.file()],
        ..Along::default()
    };
    if let Err(error) = send(connection, text.as_bytes(), along, 0) {
        log::warn!("a monitor cannot be offered the pages to share: {error}");
    }
}

/// A mapping of a process.
#[derive(Debug, PartialEq, Eq)]
struct ProcessMapping {
    span: Span,
    own: bool,
    offset: u64,
    device: (u64, u64),
    inode: u64,
}

/// Whether the memory that process `pid` handed over is the file that it was offered: all of it,
/// where the image has it, and mapped for itself alone, or nothing.
pub(crate) fn is_shared(share: &Share, pid: i32, regions: &[Region]) -> Result<bool, String> {
    let stat = fstat(share.file().as_fd()).map_err(|errno| errno.to_string())?;
    let device = (
        rustix::fs::major(stat.st_dev),
        rustix::fs::minor(stat.st_dev),
    );
    let file = ((device.0.into(), device.1.into()), stat.st_ino);
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
    let maps = maps.map_err(|error| format!("its mappings cannot be read: {error}"))?;
    let maps = maps.lines().filter_map(parse).collect::<Vec<_>>();
    check(&maps, file, regions)
}

fn check(
    maps: &[ProcessMapping],
    file: ((u64, u64), u64),
    regions: &[Region],
) -> Result<bool, String> {
    let is_file = |mapped: &&ProcessMapping| (mapped.device, mapped.inode) == file;
    let meets = |span: Span| {
        maps.iter()
            .filter(move |mapped| !mapped.span.intersect(span).is_empty())
    };
    let spans = regions.iter().map(Region::span);
    if !{ spans }.any(|span| meets(span).any(|mapped| is_file(&mapped))) {
        return Ok(false);
    }
    for region in regions {
        let span = region.span();
        if region.granule != Granule::Small {
            return Err(format!("{span} is to be shared, and has no pages of 4 KiB"));
        }
        let mut covered_bytes = 0;
        for mapped in meets(span) {
            let part = mapped.span.intersect(span);
            let offset = mapped.offset + (part.start.0 - mapped.span.start.0);
            let wanted = region.first_page * PAGE_BYTES + (part.start.0 - span.start.0);
            if !is_file(&mapped) || !mapped.own || offset != wanted {
                return Err(format!(
                    "{part} is not what was offered to share, at its offset, as MAP_PRIVATE"
                ));
            }
            covered_bytes += part.bytes();
        }
        if covered_bytes != span.bytes() {
            return Err(format!("{span} is not mapped as a whole"));
        }
    }
    Ok(true)
}

/// Understands a line of /proc/PID/maps.
fn parse(line: &str) -> Option<ProcessMapping> {
    let mut words = line.split_ascii_whitespace();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = words.next()?.split_once('-')?;
    let own = words.next()?.ends_with('p');
    let offset = hex(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    Some(ProcessMapping {
        span: Span {
            start: Addr(hex(start)?),
            end: Addr(hex(end)?),
        },
        own,
        offset,
        device: (hex(major)?, hex(minor)?),
        inode: words.next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use image::SpaceId;

    use super::*;

    const FILE: ((u64, u64), u64) = ((0, 1), 77);

    fn region(at: u64, pages: u64, first_page: u64) -> Region {
        Region {
            at: Addr(at),
            bytes: pages * PAGE_BYTES,
            space: SpaceId(1),
            first_page,
            granule: Granule::Small,
        }
    }

    fn told(maps: &str, regions: &[Region]) -> Result<bool, String> {
        let maps = maps.lines().filter_map(parse).collect::<Vec<_>>();
        check(&maps, FILE, regions)
    }

    #[test]
    fn what_is_mapped_as_it_was_offered_is_shared() {
        let maps = "10000-14000 rw-p 00000000 00:01 77 /memfd:stillframe-pages (deleted)\n\
                    14000-18000 r--p 00004000 00:01 77 /memfd:stillframe-pages (deleted)\n\
                    20000-24000 rw-p 00000000 00:00 0\n";
        assert_eq!(told(maps, &[region(0x10000, 8, 0)]), Ok(true));
        assert_eq!(told(maps, &[region(0x12000, 4, 2)]), Ok(true));
        assert_eq!(told(maps, &[region(0x20000, 4, 0)]), Ok(false));
        let large = Region {
            granule: Granule::Large,
            ..region(0x10000, 512, 0)
        };
        for (regions, what) in [
            (vec![region(0x12000, 4, 3)], "at its offset"),
            (vec![region(0x10000, 9, 0)], "not mapped as a whole"),
            (
                vec![region(0x10000, 8, 0), region(0x20000, 4, 8)],
                "not what was offered",
            ),
            (vec![large], "no pages of 4 KiB"),
        ] {
            let error = told(maps, &regions).expect_err("refused");
            assert!(error.contains(what), "{error}");
        }
        let shared = maps.replace("rw-p 00000000 00:01", "rw-s 00000000 00:01");
        assert!(told(&shared, &[region(0x10000, 8, 0)]).is_err());
    }
}
