//! Writing a layer: an image that has pages of another.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use abi::spans::Ranges;
use store::Store;

use crate::ancestors::join;
use crate::chunk::Chunk;
use crate::manifest::{AncestorRecord, Parent};
use crate::parts::{self, ANCESTORS_MAX};
use crate::reader::locate_in;
use crate::run::Part;
use crate::table::{self, ChunkUsage, Table};
use crate::{Error, ImageId, Location, Reader, Result, Run, RunKind, SpaceId, raw};

/// The ways between the places of an image and its parent, as `store::way` tells them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// From the image to its parent.
    pub to_parent: String,
    /// From the parent to the image.
    pub to_child: String,
}

impl Link {
    /// The ways between an image in `own` and its parent in `parents`.
    ///
    /// # Errors
    /// Those of [`Store::way_to`].
    pub fn between(own: &dyn Store, parents: &dyn Store) -> store::Result<Self> {
        Ok(Self {
            to_parent: own.way_to(parents)?,
            to_child: parents.way_to(own)?,
        })
    }
}

/// The image that a new one is a difference from.
pub(crate) struct ParentImage {
    pub reader: Arc<Reader>,
    pub link: Link,
    /// Store of the parent.
    pub store: Arc<dyn Store>,
}

/// A manifest's list of the images that hold pages of this one.
#[derive(Default)]
pub(crate) struct Lineage {
    /// None where no page is inherited.
    pub parent: Option<Parent>,
    pub ancestors: Vec<AncestorRecord>,
    pub chunks: Vec<Chunk>,
}

impl ParentImage {
    /// Returns the runs of a layer that has from its parent those pages of `ranges` that the parent
    /// describes, and which those are. The ranges of pages of `space` are in ascending order.
    pub fn inherit(
        &self,
        table: &Mutex<Table>,
        space: SpaceId,
        ranges: &[Range<u64>],
    ) -> Result<(Vec<Run>, Ranges<u64>)> {
        self.reader.check_freed()?;
        let mut walk = self.reader.walk(space);
        let mut runs = Vec::with_capacity(ranges.len());
        let mut described = Ranges::new();
        let mut table = table.lock().expect("no holder panics");
        for range in ranges {
            let mut page = range.start;
            while page < range.end
                && let Some(theirs) = walk.find_from(page)
                && theirs.first_page < range.end
            {
                let part = theirs.first_page.max(page)..theirs.end_page().min(range.end);
                page = part.end;
                described.push(part.clone());
                self.add(&mut table, &theirs, part, &mut runs)?;
            }
        }
        Ok((runs, described))
    }

    /// Adds the runs of a layer for `pages` of one of the parent's runs.
    fn add(
        &self,
        table: &mut Table,
        theirs: &Run,
        pages: Range<u64>,
        runs: &mut Vec<Run>,
    ) -> Result<()> {
        let space = theirs.space;
        let (mut page, end) = (pages.start, pages.end);
        while page < end {
            let located = match locate_in(theirs, page, end - page) {
                Ok(located) => located,
                Err(other) => self.reader.locate(other, page, end - page)?,
            };
            let Location { part, pages } = located;
            let kind = match part {
                None => RunKind::Zero,
                Some(part) => {
                    let theirs = *self.reader.chunk(part.chunk);
                    let object = of_child(theirs.object as usize) as u32;
                    let chunk = table.add_inherited(Chunk { object, ..theirs })?;
                    RunKind::Part(Part { chunk, ..part })
                }
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
    pub fn check_same(&self) -> Result<()> {
        if raw::stamp(&*self.store) == Some(self.reader.stamp) {
            return Ok(());
        }
        Err(Error::Ancestor {
            id: self.reader.id(),
            path: self.link.to_parent.clone(),
            what: "was changed meanwhile".into(),
            source: None,
        })
    }

    /// Returns a chunk of the pages object `part` of image `id` as the new image has it; none where
    /// that is neither the parent nor one of its ancestors.
    pub fn chunk_of(&self, id: ImageId, part: usize, chunk: Chunk) -> Option<Chunk> {
        let number = if id == self.reader.id() {
            0
        } else {
            let mut older = self.reader.ancestors().iter();
            1 + older.position(|ancestor| ancestor.id == id)?
        };
        let object = parts::of_ancestor(number, part) as u32;
        Some(Chunk { object, ..chunk })
    }

    /// Describes ancestor number `ancestor` of the new image: the parent is number 0, and its own
    /// ancestors come behind it.
    fn ancestor_record(&self, ancestor: usize) -> AncestorRecord {
        let Some(older) = ancestor.checked_sub(1) else {
            return AncestorRecord {
                id: self.reader.id().0.to_vec(),
                path: self.link.to_parent.clone(),
                parts_bytes: self.reader.parts_bytes(),
            };
        };
        let older = &self.reader.ancestors()[older];
        AncestorRecord {
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

/// Sorts the chunks of `runs` and names the ancestors that hold them.
pub(crate) fn lineage(
    parent: Option<&ParentImage>,
    table: Table,
    uses: &ChunkUsage,
    runs: &mut [Run],
) -> Result<Lineage> {
    let ancestors = table::ancestors(&table.objects(uses));
    if ancestors.len() > ANCESTORS_MAX {
        return Err(Error::TooLarge {
            of: "ancestors",
            limit: ANCESTORS_MAX as u64,
        });
    }
    let renumber = |object| match parts::owner(object) {
        (None, part) => part,
        (Some(ancestor), part) => {
            let number = ancestors.binary_search(&ancestor);
            parts::of_ancestor(number.expect("it was listed above"), part)
        }
    };
    let chunks = table.sorted(uses, &renumber, runs);
    let Some(parent) = parent.filter(|_| !ancestors.is_empty()) else {
        return Ok(Lineage {
            chunks,
            ..Lineage::default()
        });
    };
    Ok(Lineage {
        parent: Some(Parent {
            id: parent.reader.id().0.to_vec(),
            path: parent.link.to_parent.clone(),
        }),
        ancestors: ancestors
            .into_iter()
            .map(|number| parent.ancestor_record(number))
            .collect(),
        chunks,
    })
}
