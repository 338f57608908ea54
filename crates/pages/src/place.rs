//! Which stored pages go where in a target.
use abi::Addr;
use image::{Reader, Run, RunKind, SpaceId};

use crate::{Error, Extent, Result};

/// Pages of one stored run and where they go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The data run, of whatever space.
    pub run: Run,
    /// How many of its pages come before those wanted.
    pub skip_pages: u32,
    /// How many are wanted; never 0.
    pub pages: u32,
    /// Where the first of them goes.
    pub at: Addr,
}

/// Finds the stored pages of `extents`, following copy-on-write sharing into other spaces. Pages
/// that are zero, or that the image does not know, are left out: fresh memory has them already.
///
/// # Errors
/// [`Error::Parent`], and [`Error::Image`] for sharing that leads nowhere.
pub fn place(reader: &Reader, extents: &[Extent]) -> Result<Vec<Placed>> {
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
            resolve(
                reader,
                run,
                extent.part(from - extent.first_page, pages),
                &mut placed,
            )?;
        }
    }
    Ok(placed)
}

/// Adds the pages of `part`, all of which belong to `run`.
fn resolve(reader: &Reader, run: &Run, part: Extent, placed: &mut Vec<Placed>) -> Result<()> {
    let Extent {
        space,
        first_page: page,
        at,
        ..
    } = part;
    match run.kind {
        RunKind::Zero => {}
        RunKind::Parent => return Err(Error::Parent { space, page }),
        RunKind::Data { .. } => placed.push(Placed {
            run: *run,
            skip_pages: (page - run.first_page) as u32,
            pages: part.pages as u32,
            at,
        }),
        RunKind::Same { .. } => {
            let mut done = 0;
            while done < part.pages {
                let rest = part.part(done, part.pages - done);
                let (real, pages) = reader
                    .locate(space, rest.first_page, rest.pages)
                    .map_err(Error::image("find"))?;
                resolve(reader, &real, rest.part(0, pages), placed)?;
                done += pages;
            }
        }
    }
    Ok(())
}
