//! Memory that machines have in common: the server's file of the image's pages, which monitors map
//! for themselves alone.

use std::os::fd::{AsFd, OwnedFd};

use abi::{PAGE_BYTES, Span};
use image::Granule;
use rustix::fs::fstat;
use serde_json::json;
use serve::{Region, Share};
use sys::socket::{Along, send};

use crate::mapping::Mapping;

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

/// Tells whether the memory that process `pid` handed over is the file that it was offered: all of
/// it, where the image has it, and mapped for itself alone, or nothing.
pub(crate) fn is_shared(share: &Share, pid: i32, regions: &[Region]) -> Result<bool, String> {
    let stat = fstat(share.file().as_fd()).map_err(|errno| errno.to_string())?;
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"));
    let maps = maps.map_err(|error| format!("its mappings cannot be read: {error}"))?;
    let maps = maps.lines().filter_map(Mapping::parse).collect::<Vec<_>>();
    check(
        &maps,
        |mapping| mapping.is_of(stat.st_dev, stat.st_ino),
        regions,
    )
}

fn check(
    maps: &[Mapping],
    is_file: impl Fn(&Mapping) -> bool,
    regions: &[Region],
) -> Result<bool, String> {
    let meets = |span: Span| {
        maps.iter()
            .filter(move |mapped| !mapped.span.intersect(span).is_empty())
    };
    let spans = regions.iter().map(Region::span);
    if !{ spans }.any(|span| meets(span).any(&is_file)) {
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
            let offset = mapped.offset_bytes + (part.start.0 - mapped.span.start.0);
            let wanted = region.first_page * PAGE_BYTES + (part.start.0 - span.start.0);
            if !is_file(mapped) || mapped.is_shared || offset != wanted {
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

#[cfg(test)]
mod tests {
    use abi::Addr;
    use image::SpaceId;

    use super::*;

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
        let maps = maps.lines().filter_map(Mapping::parse).collect::<Vec<_>>();
        check(&maps, |mapping| mapping.is_of(1, 77), regions)
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
