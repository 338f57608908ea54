//! Which stored pages go where in a target.
use abi::Addr;
use image::{Part, Reader, Run, RunKind, SpaceId};

use crate::{Error, Extent, Result};

/// Pages of one chunk and where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The chunk, of whatever space and image, and how many of its pages come before those wanted.
    pub part: Part,
    /// How many are wanted; never 0.
    pub pages: u32,
    /// Address of the first of them.
    pub at: Addr,
}

/// Finds the stored pages of `extents`, following copy-on-write sharing into other spaces and
/// layers into older images. Pages that are zero, or that the image does not know, are left out:
/// fresh memory has them already.
///
/// # Errors
/// [`Error::Image`] for sharing that leads nowhere.
pub fn place(reader: &Reader, extents: &[Extent]) -> Result<Vec<Placement>> {
    let mut placed = Vec::new();
    let mut known: Option<(SpaceId, Vec<Run>)> = None;
    for extent in extents {
        let runs = match &mut known {
            Some((space, runs)) if *space == extent.space => runs,
            other => {
                &mut other
                    .insert((extent.space, reader.runs(extent.space).collect()))
                    .1
            }
        };
        let end = extent.first_page + extent.pages;
        let first = runs.partition_point(|run| run.end_page() <= extent.first_page);
        for run in runs[first..].iter().take_while(|run| run.first_page < end) {
            let from = run.first_page.max(extent.first_page);
            let pages = run.end_page().min(end) - from;
            let part = extent.part(from - extent.first_page, pages);
            match run.kind {
                RunKind::Zero => {}
                RunKind::Part(whole) => placed.push(Placement {
                    part: whole.after((part.first_page - run.first_page) as u32),
                    pages: part.pages as u32,
                    at: part.at,
                }),
                RunKind::Same { .. } => resolve(reader, part, &mut placed)?,
            }
        }
    }
    Ok(placed)
}

/// Adds the pages of `part`, all of which the image describes.
fn resolve(reader: &Reader, part: Extent, placed: &mut Vec<Placement>) -> Result<()> {
    let mut done = 0;
    while done < part.pages {
        let rest = part.part(done, part.pages - done);
        let located = reader
            .locate(rest.space, rest.first_page, rest.pages)
            .map_err(Error::image("find"))?;
        if let Some(part) = located.part {
            placed.push(Placement {
                part,
                pages: located.pages,
                at: rest.at,
            });
        }
        done += u64::from(located.pages);
    }
    Ok(())
}
