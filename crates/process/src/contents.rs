//! The contents of memory and objects on their way into an image.

use std::os::fd::AsFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use abi::Addr;
use abi::spans::Spans;
use image::{Companion, CompanionError, PAGE_BYTES};
use memory::TaskMemory;
use pages::{Extent, Source, source};
use rustix::process::Pid;

use crate::collect::{Contents, Inventory, Object};
use crate::{Error, Observer, Result, Stage};

/// What the observer of a dump is told: how far it is, from whichever thread.
pub(crate) struct Progress<'a> {
    observer: Mutex<&'a mut dyn Observer>,
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl<'a> Progress<'a> {
    /// Nothing is done, and nothing is known of what there is to do.
    pub fn new(observer: &'a mut dyn Observer) -> Self {
        Self {
            observer: Mutex::new(observer),
            done_bytes: 0.into(),
            total_bytes: 0.into(),
        }
    }

    /// Tells that a stage is reached.
    ///
    /// # Errors
    /// [`Error::Vetoed`].
    pub fn stage(&mut self, stage: Stage, root: Pid) -> Result<()> {
        let told = self.observer().stage(stage, Some(root));
        told.map_err(Error::Vetoed)
    }

    /// Who is told.
    pub fn observer(&mut self) -> &mut dyn Observer {
        let observer = self.observer.get_mut();
        *observer.unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Has the companion of the tree, if there is one, do something.
    ///
    /// # Errors
    /// [`Error::Companion`].
    pub fn companion(
        &mut self,
        work: impl FnOnce(&mut dyn Companion) -> std::result::Result<(), CompanionError>,
    ) -> Result<()> {
        match self.observer().companion() {
            None => Ok(()),
            Some(companion) => work(companion)
                .map_err(|CompanionError { blame, source }| Error::Companion { blame, source }),
        }
    }

    /// Notes that all there was to do is done, and that so much follows.
    pub fn expect(&self, bytes: u64) {
        let done_bytes = self.total_bytes.fetch_add(bytes, Relaxed);
        self.done_bytes.store(done_bytes, Relaxed);
    }

    /// Tells that so much more is done.
    pub fn add(&self, bytes: u64) {
        self.tell(self.done_bytes.fetch_add(bytes, Relaxed) + bytes);
    }

    /// Tells how much is done.
    pub fn tell(&self, done_bytes: u64) {
        let total_bytes = self.total_bytes.load(Relaxed);
        // Nobody panics while holding it; a bar that misses a step is none to stop for.
        if let Ok(mut observer) = self.observer.try_lock() {
            observer.progress(done_bytes.min(total_bytes), total_bytes);
        }
    }
}

/// What is to be read, and where from.
#[derive(Default)]
pub(crate) struct Sources(Vec<(Box<dyn Source>, Vec<Extent>)>);

impl Sources {
    /// What was found of a stopped tree; the inventory has it no more.
    pub fn of(inventory: &mut Inventory) -> Self {
        let mut sources = Self::default();
        for memory in inventory.memory.drain(..) {
            let task = match memory.quiet {
                true => TaskMemory::quiet(&memory.process),
                false => TaskMemory::new(&memory.process),
            };
            sources.add(task, memory.extents);
        }
        sources.0.extend(inventory.objects.drain(..).map(of_object));
        sources
    }

    /// Adds what is to be read of a source.
    pub fn add(&mut self, source: impl Source + 'static, extents: Vec<Extent>) {
        self.0.push((Box::new(source), extents));
    }

    /// Each with its extents.
    pub fn each(&self) -> Vec<(&dyn Source, &[Extent])> {
        let each = self.0.iter();
        each.map(|(source, extents)| (&**source, extents.as_slice()))
            .collect()
    }

    /// All that is to be read.
    pub fn extents(&self) -> impl Iterator<Item = &Extent> {
        self.0.iter().flat_map(|(_, extents)| extents)
    }

    /// How much that is.
    pub fn bytes(&self) -> u64 {
        self.extents().map(Extent::bytes).sum()
    }
}

/// The pages of an object, holes left out.
fn of_object(object: Object) -> (Box<dyn Source>, Vec<Extent>) {
    let whole = abi::Span::new(
        Addr(0),
        object.len_bytes.next_multiple_of(PAGE_BYTES as u64),
    );
    let allocated = match &object.contents {
        Contents::File(file) => source::allocated(file.as_fd()).ok(),
        Contents::Bytes(_) => None,
    };
    let spans = allocated.unwrap_or_else(|| Spans::of([whole]));
    let spans = spans
        .iter()
        .map(|span| span.intersect(whole))
        .filter(|span| !span.is_empty());
    let extents = spans.map(|span| Extent::of(object.space, span));
    let extents = extents.collect();
    match object.contents {
        Contents::File(file) => (Box::new(source::Object::new(file)), extents),
        Contents::Bytes(bytes) => (Box::new(source::Bytes(bytes)), extents),
    }
}
