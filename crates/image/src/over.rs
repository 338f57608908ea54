//! Writing a layer: an image that has pages of another.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use store::Store;

use crate::ancestors::join;
use crate::manifest::{Listed, Parent};
use crate::origins::{self, Collected, ORIGINS_MAX};
use crate::parts::{self, ANCESTORS_MAX};
use crate::run::Part;
use crate::{Error, ImageId, Located, Reader, Result, Run, RunKind, SpaceId, raw};

/// The ways between the places of an image and its parent, as `store::way` tells them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// From the image to its parent.
    pub to_parent: String,
    /// From the parent to the image.
    pub to_child: String,
}

/// The image that a new one is a difference from.
pub(crate) struct Over {
    pub parent: Arc<Reader>,
    pub link: Link,
    /// Where the parent is.
    pub store: Arc<dyn Store>,
}

/// What a manifest says of the images that hold pages of this one.
#[derive(Default)]
pub(crate) struct Lineage {
    /// None where no page is inherited.
    pub parent: Option<Parent>,
    pub ancestors: Vec<Listed>,
    pub origins: Vec<Run>,
}

impl Over {
    /// Returns the runs of a layer that has from its parent those pages of `ranges` that the parent
    /// describes, and which those are. The ranges of pages of `space` are in ascending order.
    ///
    /// # Errors
    /// [`Error::Freed`], [`Error::TooLarge`].
    pub fn inherit(
        &self,
        origins: &Mutex<Collected>,
        space: SpaceId,
        ranges: &[Range<u64>],
    ) -> Result<(Vec<Run>, Vec<Range<u64>>)> {
        self.parent.check_freed()?;
        let mut walk = self.parent.walk(space);
        let mut runs = Vec::with_capacity(ranges.len());
        let mut described: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
        let mut origins = origins.lock().expect("no holder panics");
        for range in ranges {
            let mut page = range.start;
            while page < range.end
                && let Some(theirs) = walk.find_from(page)
                && theirs.first_page < range.end
            {
                let part = theirs.first_page.max(page)..theirs.end_page().min(range.end);
                page = part.end;
                match described.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => described.push(part.clone()),
                }
                self.add(&mut origins, &theirs, part, &mut runs)?;
            }
        }
        Ok((runs, described))
    }

    /// Adds the runs of a layer for `pages` of one of the parent's runs.
    fn add(
        &self,
        origins: &mut Collected,
        theirs: &Run,
        pages: Range<u64>,
        runs: &mut Vec<Run>,
    ) -> Result<()> {
        let space = theirs.space;
        let (mut page, end) = (pages.start, pages.end);
        while page < end {
            let located = match self.parent.locate_in(theirs, page, end - page) {
                Ok(located) => located,
                Err(other) => self.parent.locate(other, page, end - page)?,
            };
            let Located {
                run,
                skip_pages,
                pages,
            } = located;
            let kind = match run.kind {
                RunKind::Data {
                    offset_bytes,
                    checksum,
                } => {
                    let (object, offset_bytes) = parts::split(offset_bytes);
                    let object = of_child(object);
                    let origin = origins.number(object, offset_bytes, checksum, run);
                    RunKind::Parent(Part {
                        origin: origin.ok_or(Error::TooLarge {
                            of: "origins",
                            limit: ORIGINS_MAX as u64,
                        })?,
                        skip_pages,
                    })
                }
                kind => kind,
            };
            runs.push(Run {
                space,
                first_page: page,
                pages,
                kind,
            });
            page += u64::from(pages);
        }
        Ok(())
    }

    /// Refuses a parent that was changed since it was opened.
    ///
    /// # Errors
    /// [`Error::Ancestor`].
    pub fn check_same(&self) -> Result<()> {
        if raw::stamp(&*self.store) == Some(self.parent.stamp) {
            return Ok(());
        }
        Err(Error::Ancestor {
            id: self.parent.id(),
            path: self.link.to_parent.clone(),
            what: "was changed meanwhile".into(),
            source: None,
        })
    }

    /// Returns the number that the new image gives to the pages object of image `id` in which
    /// `origin` lies; none where that is neither the parent nor one of its ancestors.
    pub fn object_of(&self, id: ImageId, origin: &Run) -> Option<usize> {
        let RunKind::Data { offset_bytes, .. } = origin.kind else {
            return None;
        };
        let (_, part) = parts::owner(parts::split(offset_bytes).0);
        if id == self.parent.id() {
            return Some(parts::of_ancestor(0, part));
        }
        let mut older = self.parent.ancestors().iter();
        let number = older.position(|ancestor| ancestor.id == id)?;
        Some(parts::of_ancestor(number + 1, part))
    }

    /// Describes ancestor number `ancestor` of the new image: the parent is number 0, and its own
    /// ancestors come behind it.
    fn listed(&self, ancestor: usize) -> Listed {
        let Some(older) = ancestor.checked_sub(1) else {
            return Listed {
                id: self.parent.id().0.to_vec(),
                path: self.link.to_parent.clone(),
                parts_bytes: self.parent.parts_bytes(),
            };
        };
        let older = &self.parent.ancestors()[older];
        Listed {
            id: older.id.0.to_vec(),
            path: join(&self.link.to_parent, &older.path),
            parts_bytes: older.parts_bytes.clone(),
        }
    }
}

/// The number that a child gives to a pages object of its parent.
fn of_child(object: usize) -> usize {
    let (ancestor, part) = parts::owner(object);
    parts::of_ancestor(ancestor.map_or(0, |ancestor| ancestor + 1), part)
}

/// Sorts the origins of `runs` and names the ancestors that hold them.
///
/// # Errors
/// [`Error::TooLarge`].
pub(crate) fn lineage(
    over: Option<&Over>,
    collected: Collected,
    runs: &mut [Run],
) -> Result<Lineage> {
    let mut ancestors: Vec<usize> = collected
        .objects()
        .into_iter()
        .filter_map(|object| parts::owner(object).0)
        .collect();
    ancestors.dedup();
    if ancestors.len() > ANCESTORS_MAX {
        return Err(Error::TooLarge {
            of: "ancestors",
            limit: ANCESTORS_MAX as u64,
        });
    }
    let (origins, new) = collected.sorted(&|object| match parts::owner(object) {
        (None, part) => part,
        (Some(ancestor), part) => {
            let number = ancestors.binary_search(&ancestor);
            parts::of_ancestor(number.expect("it was listed above"), part)
        }
    });
    runs.iter_mut().for_each(|run| origins::renumber(run, &new));
    let Some(over) = over.filter(|_| !ancestors.is_empty()) else {
        return Ok(Lineage {
            origins,
            ..Lineage::default()
        });
    };
    Ok(Lineage {
        parent: Some(Parent {
            id: over.parent.id().0.to_vec(),
            path: over.link.to_parent.clone(),
        }),
        ancestors: ancestors
            .into_iter()
            .map(|number| over.listed(number))
            .collect(),
        origins,
    })
}
