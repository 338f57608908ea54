//! Reader → plan: what a restore will do, as data, without touching the kernel.

pub(crate) mod births;
mod early;
mod family;
pub(crate) mod groups;
#[cfg(test)]
mod model;
mod pooled;
mod print;
mod task;
mod vdso;

use image::{Part, Reader, RunKind, SpaceId, SpaceKind};
use resources::Born;
use resources::map::layout::{DECODED_FILE, Pages, Place, Stored};
use resources::map::vdso::Host;
use resources::script::{PoolId, Script, ScriptId, StepAt, WordId};
use resources::task::Write;

use crate::Result;
use crate::records::Saved;
pub use groups::{Join, Placing};
pub(crate) use print::print;

/// All scripts of a restore.
#[derive(Debug, Default)]
pub struct Plan {
    /// The scripts; a [`ScriptId`] is an index.
    pub scripts: Vec<Planned>,
    /// How many shared words they use.
    pub words: u32,
    /// The threads that stay, each at the end of its script; leaders before their threads.
    pub threads: Vec<Staying>,
    /// Pages that the restorer fills while a task waits.
    pub outside: Vec<Outside>,
    /// How many descriptions the pool begins with.
    pub descriptions: u32,
    /// The files by which tasks join control groups, as they stand in the pool behind the
    /// descriptions.
    pub groups: Vec<Join>,
    /// Threads that the restorer puts into groups of their own when the scripts have ended.
    pub thread_groups: Vec<(i32, Join)>,
    /// The numbers of the files whose pages tasks read for themselves, as they stand in the pool.
    pub files: Vec<u32>,
    /// The pages of which the restorer makes the file [`DECODED_FILE`], and where they are there.
    pub decoded: Vec<pages::Extent>,
    /// Files of /proc that the restorer writes when the scripts have ended: the thread, the file
    /// and its text.
    pub writes: Vec<(i32, Write)>,
    /// Addresses that the window must leave free, as mappings of the image's tasks are.
    pub taken: Vec<abi::Span>,
}

/// One script and who runs it.
#[derive(Debug)]
pub struct Planned {
    /// The thread.
    pub tid: i32,
    /// What it is to become: "task", "thread", "zombie", "stand-in".
    pub role: &'static str,
    /// Its calls.
    pub script: Script,
}

/// A thread that runs on after the restore.
#[derive(Clone, Copy, Debug)]
pub struct Staying {
    /// Its process.
    pub pid: i32,
    /// The thread.
    pub tid: i32,
}

/// Pages to be filled from outside.
#[derive(Debug)]
pub struct Outside {
    /// The process.
    pub pid: i32,
    /// The call that gives its userfaultfd, in its script.
    pub uffd: (ScriptId, StepAt),
    /// Posted when the userfaultfd is there.
    pub ready: WordId,
    /// To be posted when all is filled.
    pub filled: WordId,
    /// The pages.
    pub stored: Vec<Stored>,
    /// The mappings that they are in.
    pub mappings: Vec<abi::Span>,
}

/// Words that all scripts share.
pub mod word {
    use resources::script::WordId;

    /// How many births are done and have their own session and group.
    pub const BORN: WordId = WordId(0);
    /// How many have joined their process group.
    pub const GROUPED: WordId = WordId(1);
    /// How many threads have everything that does not depend on others.
    pub const ALONE: WordId = WordId(2);
    /// How many threads are complete and wait to be traced.
    pub const READY: WordId = WordId(3);
    /// Set to 1 by the restorer when all are traced.
    pub const GO: WordId = WordId(4);
    /// The first free one.
    pub const FREE: u32 = 5;
}

/// What the restore looks like from outside, as far as the plan depends on it.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The pid that the root's parent will have; 0 when it is not known or does not matter.
    pub parent: i32,
    /// From how many bytes on a process's memory is filled from outside.
    pub outside_from_bytes: u64,
    /// What the restorer hands down to its children.
    pub born: Born,
    /// The vDSO of this host.
    pub vdso: OwnVdso,
    /// The control groups of the tree and of the restorer, where tasks are to join some.
    pub cgroups: Option<Placing>,
}

/// What is known of the vDSO of this host.
#[derive(Clone, Debug, Default)]
pub struct OwnVdso {
    /// Its build id, if it has one.
    pub build_id: Option<Vec<u8>>,
    /// All of it; known where a task of the image needs another one replaced or its own moved.
    pub host: Option<Host>,
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            parent: 0,
            outside_from_bytes: 8 << 20,
            born: Born::default(),
            vdso: OwnVdso {
                build_id: sys::vdso::own_build_id(),
                host: None,
            },
            cgroups: None,
        }
    }
}

/// Plans the restore of an image.
///
/// # Errors
/// [`crate::Error::Resource`] for records that do not make sense or cannot be restored.
pub(crate) fn plan(reader: &Reader, saved: &Saved<'_>, setting: &Setting) -> Result<Plan> {
    let births = births::births(&saved.tree)?;
    let mut plan = Plan {
        words: word::FREE,
        ..Plan::default()
    };
    plan.descriptions = u32::try_from(saved.descriptions.len()).expect("checked when read");
    task::Tasks::new(reader, saved, &births, setting)?.plan(&mut plan)?;
    Ok(plan)
}

impl Plan {
    /// The pool descriptor of a pages file.
    fn pages_file(&mut self, number: u32) -> PoolId {
        let known = self.files.iter().position(|file| *file == number);
        let at = known.unwrap_or_else(|| {
            self.files.push(number);
            self.files.len() - 1
        });
        let at = self.groups.len() + at;
        PoolId(self.descriptions + u32::try_from(at).expect("at most 65,536 files"))
    }

    /// Has the restorer decode pages of a process; where they are then.
    fn decode(&mut self, pid: i32, span: abi::Span) -> Place {
        let last = self.decoded.last();
        let end = last.map_or(abi::Addr(0), |last| last.span().end);
        self.decoded.push(pages::Extent {
            space: SpaceId(pid.cast_unsigned()),
            first_page: span.start.page(),
            at: end,
            pages: span.pages(),
        });
        Place {
            file: DECODED_FILE,
            offset_bytes: end.0,
        }
    }

    /// A new shared word.
    fn word(&mut self) -> WordId {
        self.words += 1;
        WordId(self.words - 1)
    }
}

/// No task has more: 56 bits are the most that processors of this kind address.
const ADDRESSES_PAGES: u64 = 1 << 44;

/// The pages of a process: those stored, those inherited from `parent` if it may inherit, and
/// zeros.
pub(crate) fn pages_of(reader: &Reader, pid: i32, parent: Option<i32>) -> Result<Pages> {
    let space = SpaceId(pid.cast_unsigned());
    let kind = reader.space(space).map(|space| space.kind);
    if let Some(kind) = kind.filter(|kind| *kind != SpaceKind::Memory) {
        let what = format!("space {space} is of another kind: {kind:?}");
        return Err(resources::Error::corrupt(format!("memory of {pid}"), what).into());
    }
    let mut pages = Pages::default();
    for run in reader.runs(space) {
        if run.end_page() > ADDRESSES_PAGES {
            let what = format!("page {:#x} is outside of every task", run.end_page() - 1);
            return Err(resources::Error::corrupt(format!("memory of {pid}"), what).into());
        }
        let start = abi::Addr(run.first_page * abi::PAGE_BYTES);
        let span = abi::Span::new(start, run.len_bytes());
        match run.kind {
            RunKind::Part(part) => pages.store(stored(reader, span, part)),
            RunKind::Same { space } if Some(space.0) == parent.map(i32::cast_unsigned) => {
                pages.inherited.push(span);
            }
            RunKind::Zero => pages.zero.push(span),
            RunKind::Same { .. } => resolve(reader, space, span, &mut pages)?,
        }
    }
    Ok(pages)
}

/// Pages of a chunk, as a task gets them.
fn stored(reader: &Reader, span: abi::Span, part: Part) -> Stored {
    let at = reader.straight(part).map(|at| Place {
        file: at.file,
        offset_bytes: at.offset_bytes,
    });
    Stored { span, at }
}

/// Pages that are another space's are read from there.
fn resolve(reader: &Reader, space: SpaceId, span: abi::Span, pages: &mut Pages) -> Result<()> {
    let mut page = span.start.page();
    while page < span.end.page() {
        let located = reader.locate(space, page, span.end.page() - page)?;
        let count = u64::from(located.pages);
        let span = abi::Span::new(abi::Addr::of_page(page), count * abi::PAGE_BYTES);
        match located.part {
            Some(part) => pages.store(stored(reader, span, part)),
            None => pages.zero.push(span),
        }
        page += count;
    }
    Ok(())
}
