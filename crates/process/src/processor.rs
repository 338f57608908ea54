//! Threads that go on with another processor than they were dumped on: what they need of it, and
//! what is laid out differently there.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};

use abi::{Addr, PAGE_BYTES};
use image::{Reader, RunKind};
use resources::arch::frames;
use resources::arch::xstate::{self, Host, Layout, Reframed};

use crate::records::{Saved, SavedTask};
use crate::{Error, Result};

/// How much of a stack is searched for what handlers have interrupted.
const STACK_BYTES: u64 = 64 << 20;

/// How an image's threads come to this processor.
pub(crate) struct Processor {
    from: Layout,
    host: Host,
    rewrites: Vec<Rewrite>,
}

/// What is written over a signal frame's area.
pub(crate) struct Rewrite {
    pub pid: i32,
    pub at: Addr,
    pub bytes: Vec<u8>,
}

/// What the processor lacks, and a thread that needs it.
#[derive(Default)]
struct Lacks(BTreeMap<String, String>);

impl Lacks {
    fn add(&mut self, names: Vec<String>, who: impl Fn() -> String) {
        for name in names {
            self.0.entry(name).or_insert_with(&who);
        }
    }

    fn check(&self) -> Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let each = self.0.iter().map(|(name, who)| format!("{name} ({who})"));
        let each = each.collect::<Vec<_>>().join(", ");
        Err(Error::Unfit(format!(
            "this processor lacks what the image has in use: {each}"
        )))
    }
}

impl Processor {
    /// Checks what the threads of an image need of the processor; `None` where the image does not
    /// tell.
    ///
    /// # Errors
    /// [`Error::Unfit`] with all that is in use and that this processor lacks;
    /// [`resources::Error::Corrupt`] for what no kernel has made.
    pub fn check(saved: &Saved<'_>, reader: &Reader) -> Result<Option<Self>> {
        let Some(from) = saved.processor.clone() else {
            return Ok(None);
        };
        let mut processor = Self {
            from,
            host: Host::here(),
            rewrites: Vec::new(),
        };
        let mut lacks = Lacks::default();
        for task in &saved.tasks {
            for thread in task.living() {
                let area = &thread.state.xstate;
                let missing = xstate::missing(&processor.from, area, &processor.host)?;
                lacks.add(missing, || format!("thread {}", thread.tid));
            }
            if processor.differs() {
                let whose = (task, saved.with_memory_of(task));
                processor.find_frames(whose, reader, &mut lacks)?;
            }
        }
        lacks.check()?;
        Ok(Some(processor))
    }

    /// Whether anything is laid out differently here.
    fn differs(&self) -> bool {
        self.from != self.host.layout
    }

    /// The extended state of a thread as the kernel takes it here, for thread `tid`, which is
    /// traced and stopped.
    ///
    /// # Errors
    /// [`Error::Kernel`] when the kernel does not tell its layout.
    pub fn xstate<'a>(&self, tid: i32, area: &'a [u8]) -> Result<Cow<'a, [u8]>> {
        if !self.differs() {
            return Ok(Cow::Borrowed(area));
        }
        let fresh = sys::ptrace::xstate(tid);
        let fresh = fresh.map_err(|e| Error::kernel(format!("cannot read xstate of {tid}"), e))?;
        let built = xstate::rebuild(&self.from, area, &self.host.layout, &fresh)?;
        Ok(Cow::Owned(built))
    }

    /// How it differs from the processor of the dump, in words.
    pub fn remark(&self) -> String {
        match (self.differs(), self.rewrites.len()) {
            (false, _) => String::new(),
            (true, 0) => "laid out differently".to_owned(),
            (true, frames) => format!("laid out differently, also in {frames} signal frames"),
        }
    }

    /// What is written over the memory of the restored tasks.
    pub fn rewrites(&self) -> &[Rewrite] {
        &self.rewrites
    }

    /// Finds the signal frames of a task's threads.
    fn find_frames(
        &mut self,
        (task, with_memory): (&SavedTask<'_>, &SavedTask<'_>),
        reader: &Reader,
        lacks: &mut Lacks,
    ) -> Result<()> {
        let mut known = HashSet::new();
        for thread in task.living() {
            let mut stacks = vec![thread.registers().stack().0];
            while let Some(top) = stacks.pop() {
                let Some((start, bytes)) = stack(with_memory, reader, top)? else {
                    continue;
                };
                for frame in frames::find(&bytes, start) {
                    if !known.insert(start + frame.area_at as u64) {
                        continue;
                    }
                    stacks.push(frame.interrupted);
                    let area = &bytes[frame.area_at..frame.area_at + frame.area_bytes];
                    match xstate::reframe(&self.from, area, &self.host)? {
                        Reframed::As(bytes) => self.rewrites.push(Rewrite {
                            pid: task.node.pid,
                            at: Addr(start + frame.area_at as u64),
                            bytes,
                        }),
                        Reframed::Lacks(names) => lacks.add(names, || {
                            format!("what a signal handler of thread {} returns to", thread.tid)
                        }),
                    }
                }
            }
        }
        Ok(())
    }
}

/// The part of the stack at `top` that is in use: its address, and the bytes. A frame may begin 8
/// bytes below.
fn stack(task: &SavedTask<'_>, reader: &Reader, top: u64) -> Result<Option<(u64, Vec<u8>)>> {
    let lowest = Addr(top.saturating_sub(8));
    let mut mappings = task.memory.mappings.iter();
    let Some(mapping) = mappings.find(|map| map.span().contains(lowest)) else {
        return Ok(None);
    };
    let start = lowest.page_start();
    let end = mapping.span().end.min(start.plus(STACK_BYTES));
    let (first, last) = (start.page(), end.page());
    let mut bytes = vec![0; ((last - first) * PAGE_BYTES) as usize];
    let space = task.node.space();
    for run in reader.runs(space).filter(|run| run.kind != RunKind::Zero) {
        let (from, to) = (run.first_page.max(first), run.end_page().min(last));
        if from < to {
            let at = |page: u64| ((page - first) * PAGE_BYTES) as usize;
            reader.read_pages(space, from, &mut bytes[at(from)..at(to)])?;
        }
    }
    Ok(Some((start.0, bytes)))
}
