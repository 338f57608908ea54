//! One cell: the same subject dumped and restored by each program in turn.
use std::path::{Path, PathBuf};

use crate::calls::Counter;
use crate::error::{Result, file_error};
use crate::record::{Calls, Cell, Series};
use crate::target::Target;
use crate::tool::{Timing, Tool, image_bytes, make_durable, timed};
use crate::workload::{Cache, Medium, Workload};

/// What is measured, and where.
pub struct Setting<'a> {
    /// The subject.
    pub workload: &'static Workload,
    /// Where images are put.
    pub medium: Medium,
    /// What /run is.
    pub cache: Cache,
    /// The programs, in the order of their turns.
    pub tools: &'a [Tool],
    /// True if system calls are counted, where images are in memory.
    pub counted: bool,
    /// Samples of each.
    pub rounds: usize,
    /// A folder on the medium.
    pub folder: PathBuf,
    /// Where the programs' output is kept.
    pub said: PathBuf,
}

/// What one turn of one program gave.
struct Sample {
    dump: Timing,
    frozen_ns: u64,
    plan_ms: Option<f64>,
    restore: Timing,
    runs_again_ns: u64,
    image_bytes: u64,
}

/// Measures a cell: a round that counts for nothing, the rounds, and one that counts calls.
///
/// # Errors
/// When a program fails, or a subject is not what it was afterwards.
pub fn measure(setting: &Setting<'_>) -> Result<Cell> {
    let mut series = vec![Series::default(); setting.tools.len()];
    for round in 0..=setting.rounds {
        for (tool, series) in setting.tools.iter().zip(&mut series) {
            // The first round warms caches up, and compares every byte of the memory.
            let sample = take_turn(setting, tool, round == 0)?;
            if round > 0 {
                series.add(&sample);
            }
        }
    }
    if setting.medium == Medium::Tmpfs && setting.counted {
        for (tool, series) in setting.tools.iter().zip(&mut series) {
            series.calls = count_calls(setting, tool)?;
        }
    }
    Ok(Cell {
        workload: setting.workload.name.into(),
        medium: setting.medium,
        cache: setting.cache,
        series,
    })
}

impl Series {
    fn add(&mut self, sample: &Sample) {
        self.dump_ms.push(milliseconds(sample.dump.ns));
        self.frozen_ms.push(milliseconds(sample.frozen_ns));
        self.plan_ms.extend(sample.plan_ms);
        self.restore_ms.push(milliseconds(sample.restore.ns));
        self.runs_again_ms.push(milliseconds(sample.runs_again_ns));
        self.image_bytes.push(sample.image_bytes);
    }
}

/// Dumps one fresh subject and leaves it running; dumps and kills another, and restores it.
fn take_turn(setting: &Setting<'_>, tool: &Tool, compare: bool) -> Result<Sample> {
    let target = Target::start(setting.workload)?;
    let durable = setting.medium == Medium::Durable;
    forget_host(setting);

    let images = Images::new(&setting.folder)?;
    target.forget_longest()?;
    timed(
        &mut tool.dump(target.pid(), &images.path, true, durable),
        &setting.said,
    )?;
    target.check_goes_on(&tool.name)?;
    let frozen_ns = target.pulse()?.longest_ns;
    drop((images, target));

    let target = Target::start(setting.workload)?;
    let images = Images::new(&setting.folder)?;
    let hash = compare.then(|| target.memory_hash()).transpose()?;
    let beats = target.pulse()?.beats;
    target.forget_longest()?;
    let mut dump = timed(
        &mut tool.dump(target.pid(), &images.path, false, durable),
        &setting.said,
    )?;
    if durable && !tool.durable {
        make_durable(&images.path)?;
        dump.ns = crate::subject::now_ns() - dump.start_ns;
    }
    target.reap()?;
    let plan_ms = tool.planned_ms(&images.path);

    forget_host(setting);
    let restore = timed(&mut tool.restore(&images.path), &setting.said)?;
    target.check_goes_on(&tool.name)?;
    let pulse = target.pulse()?;
    if pulse.beats <= beats || hash.is_some_and(|hash| target.memory_hash().ok() != Some(hash)) {
        return Err(target.lost(&tool.name, "its memory is not what it was"));
    }
    Ok(Sample {
        dump,
        frozen_ns,
        plan_ms,
        restore,
        runs_again_ns: pulse.end_ns.saturating_sub(restore.start_ns),
        image_bytes: image_bytes(&images.path)?,
    })
}

/// Takes away what we remember of the host, as the peer remembers nothing where /run is no tmpfs.
fn forget_host(setting: &Setting<'_>) {
    if setting.cache == Cache::Cold {
        // It may not be there.
        let _ = std::fs::remove_dir_all("/run/stillframe");
    }
}

/// Counts the calls of a dump and of a restore; nothing where the kernel has no trace.
fn count_calls(setting: &Setting<'_>, tool: &Tool) -> Result<Option<Calls>> {
    let Some(counter) = Counter::new() else {
        return Ok(None);
    };
    let target = Target::start(setting.workload)?;
    let images = Images::new(&setting.folder)?;
    let dump = tool.dump(target.pid(), &images.path, false, false);
    forget_host(setting);
    let dump = counter.count(&dump, &target.tasks()?, &setting.said)?;
    target.reap()?;
    forget_host(setting);
    let restore = counter.count(&tool.restore(&images.path), &[], &setting.said)?;
    target.check_goes_on(&tool.name)?;
    Ok(Some(Calls { dump, restore }))
}

/// A fresh folder for one image, removed when it is dropped.
struct Images {
    path: PathBuf,
}

impl Images {
    fn new(folder: &Path) -> Result<Self> {
        let path = folder.join("image");
        std::fs::create_dir(&path).map_err(file_error("make", &path))?;
        Ok(Self { path })
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[allow(clippy::cast_precision_loss, reason = "a hundred days fit")]
fn milliseconds(ns: u64) -> f64 {
    // Whole microseconds: what is below says nothing.
    (ns / 1000) as f64 / 1000.0
}
