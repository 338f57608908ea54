//! A dump over an earlier image: what a dump does differently when the tree's memory is tracked.

use std::collections::HashMap;

use abi::Span;
use abi::spans::{Spans, intersect, subtract};
use freeze::{Frozen, Task};
use image::{Base, ImageId, SpaceKind, Writer};
use memory::PageMaps;
use memory::scan::{Area, ScanResult};
use memory::track;
use resources::map::listing::Listed;
use resources::map::vdso::Vdso;
use sys::process::Process;
use sys::uffd::Uffd;

use crate::collect::Inventory;
use crate::collect::memory_view::{Fresh, MemoryView, Prepared};
use crate::numbering::Numbering;
use crate::track::{Cleared, Inheritance, Tracking, Way, all_of, are_watched, is_ours};
use crate::{Afterwards, DumpOptions, Result, parent};

/// Lists of a stopped tree: what they take of memory, and what they take more for each run of the
/// image that the dump is over.
const LISTS_BYTES: usize = 8 << 20;
const RUN_BYTES: usize = 400;

/// What a dump is over, and what is tracked from it on.
pub(crate) struct Layer {
    parent: Option<Base>,
    tracking: Option<Tracking>,
    /// Whether the tree's memory is tracked from this dump on.
    goes_on: bool,
    view: Box<dyn LayerView>,
}

/// A view that knows what was not written.
trait LayerView: MemoryView {
    fn unwritten(&self) -> Option<&HashMap<i32, Spans>> {
        None
    }
    fn as_view(&mut self) -> &mut dyn MemoryView;
}

impl LayerView for Fresh {
    fn as_view(&mut self) -> &mut dyn MemoryView {
        self
    }
}

impl Layer {
    /// Gets ready while the tree runs.
    ///
    /// # Errors
    /// Those of opening the parent and of reaching the tracker.
    pub fn prepare(options: &DumpOptions) -> Result<Self> {
        let root = options.tree.as_raw_nonzero().get();
        let parent = options.parent.as_ref().map(parent::open).transpose()?;
        let goes_on = options.track.is_some() && options.afterwards != Afterwards::Kill;
        let tracking = match (goes_on, &parent) {
            (true, _) => Some(Tracking::start(root)?),
            (false, Some(_)) => Tracking::find(root)?,
            (false, None) => None,
        };
        let view: Box<dyn LayerView> = if let Some(Base { reader, .. }) = &parent {
            let spaces = reader.spaces().iter();
            let runs = spaces.map(|space| reader.runs(space.id).len());
            crate::alone::prepare_lists(LISTS_BYTES + runs.sum::<usize>() * RUN_BYTES);
            let owners = tracking.as_ref().map(Tracking::owners).transpose()?;
            let cleared = tracking.as_ref().map(Cleared::of);
            Box::new(Tracked {
                vdsos: parent::vdsos(reader)?,
                owners: owners.unwrap_or_default(),
                cleared: cleared.unwrap_or_default(),
                prepared: Prepared::of(root)?,
                unwritten: HashMap::new(),
                numbering: Numbering::over(Some(reader))?,
            })
        } else {
            let numbering = match goes_on {
                true => Numbering::over(None)?,
                false => Numbering::default(),
            };
            Box::new(Fresh(numbering))
        };
        Ok(Self {
            parent,
            tracking,
            goes_on,
            view,
        })
    }

    /// What the image is over.
    pub fn parent(&self) -> Option<&Base> {
        self.parent.as_ref()
    }

    /// How the memory of the stopped tree is looked at.
    pub fn view(&mut self) -> &mut dyn MemoryView {
        self.view.as_view()
    }

    /// Leaves what was not written to the parent; gives how many pages those are.
    ///
    /// # Errors
    /// [`crate::Error::Image`].
    pub fn inherit(&self, inventory: &mut Inventory, writer: &Writer) -> Result<u64> {
        for (space, pages) in inventory.kept.drain(..) {
            writer.inherit(space, 0, pages)?;
            writer.space(parent::named(space, SpaceKind::Vdso, pages));
        }
        let Some(unwritten) = self.view.unwritten() else {
            return Ok(0);
        };
        let parent = self.parent.as_ref().map(|parent| &*parent.reader);
        let known = self.tracking.as_ref().and_then(Tracking::image);
        let inheritance = Inheritance::new(parent, known);
        if !inheritance.is_possible() {
            return Ok(0);
        }
        let mut pages = 0;
        for memory in &mut inventory.memory {
            let space = memory.space;
            let Some(unwritten) = unwritten.get(&memory.process.pid()) else {
                continue;
            };
            let all = memory.extents.iter().map(pages::Extent::span);
            let all = all.collect::<Vec<_>>();
            let described =
                inheritance.inherit_unwritten(writer, space, &intersect(&all, unwritten))?;
            pages += described.pages();
            let rest = subtract(&all, &described);
            let extent = |span: Span| pages::Extent::of(space, span);
            memory.extents = rest.into_iter().map(extent).collect();
        }
        inventory.memory.retain(|memory| !memory.extents.is_empty());
        Ok(pages)
    }

    /// Has the kernel track what is written from now on, if it is wanted: before what is to be read
    /// is read.
    ///
    /// # Errors
    /// Those of [`Tracking::enroll`]; the tracker is gone.
    pub fn track(&mut self, frozen: &mut Frozen, inventory: &Inventory) -> Result<()> {
        let Some(tracking) = self.tracking.as_mut().filter(|_| self.goes_on) else {
            return Ok(());
        };
        let mapped = tracking.enroll(frozen)?;
        tracking.begin()?;
        if Way::here() == Way::Bits {
            // Enrolling has cleared them.
            return Ok(());
        }
        for mapped in &mapped {
            tracking.lift_marks(mapped)?;
            let own = inventory
                .memory
                .iter()
                .filter(|own| own.process == mapped.process);
            let spans = own.flat_map(|own| own.extents.iter().map(pages::Extent::span));
            let mut theirs = inventory.registered.iter();
            let theirs = theirs.find(|(pid, _)| *pid == mapped.pid());
            let theirs = theirs.map_or(&[][..], |(_, spans)| spans);
            // Marks in what is registered with a userfaultfd of the tree are the program's.
            let spans = spans.flat_map(|span| subtract(&[span], theirs));
            track::protect(&mapped.process, &spans.collect::<Vec<_>>())?;
        }
        Ok(())
    }

    /// Tells the tracker what became of the tree.
    pub fn done(self, options: &DumpOptions, image: ImageId) {
        let Some(client) = self.tracking.map(Tracking::client) else {
            return;
        };
        match options.track {
            _ if options.afterwards == Afterwards::Kill => client.quit(),
            Some(time) => {
                if let Err(error) = client.end(image, time) {
                    log::warn!("{error}");
                }
            }
            // Nothing was forgotten: the next round goes on from the one before.
            None => {}
        }
    }
}

/// Looks at a tree that was prepared and whose memory is tracked.
struct Tracked {
    prepared: Prepared,
    /// What the parent image has.
    vdsos: Vec<Vdso>,
    /// By which the tasks' memory is tracked.
    owners: HashMap<i32, Uffd>,
    /// Whose soft-dirty bits tell, on kernels where those are used.
    cleared: Cleared,
    /// Pages that were not written since the last round, by task.
    unwritten: HashMap<i32, Spans>,
    numbering: Numbering,
}

impl MemoryView for Tracked {
    fn mappings(&mut self, task: &Task) -> Result<Vec<Listed>> {
        if Way::here() == Way::Bits {
            return Ok(task.smaps()?);
        }
        let listed = self.prepared.mappings(task)?;
        // A mapping that was replaced by one of the same kind in the same place looks as before,
        // but is not tracked any more.
        if are_watched(&task.process, &listed)? {
            return Ok(listed);
        }
        Ok(task.smaps()?)
    }

    fn vdsos(&self) -> &[Vdso] {
        &self.vdsos
    }

    fn numbering(&mut self) -> &mut Numbering {
        &mut self.numbering
    }

    fn pages(
        &mut self,
        process: &Process,
        areas: &[Area],
        _: &mut PageMaps,
    ) -> Result<Vec<ScanResult>> {
        let pid = process.pid();
        let unwritten = self.unwritten.entry(pid).or_default();
        *unwritten = Spans::new();
        if let Some(found) = self.cleared.find(process, areas, unwritten)? {
            return Ok(found);
        }
        let found = track::tracked(process, areas, false)?;
        let owner = self.owners.get(&pid);
        let found = found.into_iter().zip(areas).map(|(found, area)| {
            // What somebody else tracks may have been written before they looked.
            if found.is_tracked && owner.is_some_and(|owner| is_ours(owner, area.span)) {
                unwritten.extend(found.unwritten.iter().copied());
            }
            all_of(found)
        });
        Ok(found.collect())
    }
}

impl LayerView for Tracked {
    fn unwritten(&self) -> Option<&HashMap<i32, Spans>> {
        Some(&self.unwritten)
    }

    fn as_view(&mut self) -> &mut dyn MemoryView {
        self
    }
}
