//! The tree stopped and looked at, as every kind of dump does it.

use std::time::{Duration, Instant};

use resources::fd::tcp::newcomers::{Held, Newcomers};
use rustix::process::Pid;

use crate::collect::memory_view::MemoryView;
use crate::collect::{How, Inventory, collect};
use crate::freeze::{Frozen, Task, freeze};
use crate::patience::Patience;
use crate::{DumpKind, DumpOptions, Error, Result, returned};

/// Stops the tree and collects it, with `view` for its memory; see [`How`] about `stay`. A client
/// that asks a tree for a connection waits until the tree is killed, if it is going to be.
pub(crate) fn freeze_and_collect(
    options: &DumpOptions,
    stay: bool,
    view: &mut dyn MemoryView,
) -> Result<(Frozen, Inventory)> {
    resources::task::prepare();
    let root = options.tree.as_raw_nonzero().get();
    let live = options.kind == DumpKind::Live;
    let plain = !live && options.parent.is_none() && options.track.is_none();
    let newcomers = Newcomers::of(root, stay, options.allowed.network_unlocked);
    let mut patience = Patience::new(newcomers, options.timeout, plain);
    loop {
        let mut is_halted = false;
        let tried = patiently(options.timeout, || {
            let mut frozen = freeze(root, options.timeout)?;
            is_halted = are_halted(&frozen.tasks);
            if !live {
                frozen.limit.lift();
            }
            let how = How {
                allow: &options.allowed,
                stay,
                newcomers: &mut patience.newcomers,
                homework: &mut patience.homework,
            };
            let inventory = collect(&mut frozen, how, view)?;
            frozen.take_time();
            Ok((frozen, inventory))
        });
        match tried {
            Err(error) => patience.wait(error, is_halted, &options.allowed)?,
            Ok((frozen, mut inventory)) => {
                inventory.homework = patience.homework;
                let held = patience.newcomers.into_hold();
                (inventory.held, inventory.leftover) = match stay {
                    true => (held, None),
                    false => (None, held.and_then(Held::lift)),
                };
                return Ok((frozen, inventory));
            }
        }
    }
}

/// True if a signal has stopped each of these tasks: none of them runs when the dump lets it go.
fn are_halted(tasks: &[Task]) -> bool {
    let living = tasks.iter().filter(|task| !task.is_zombie());
    let mut first = living.flat_map(|task| task.threads().first());
    first.all(|thread| thread.group_stop.is_some())
}

/// Stops the tree under `root` and has `look` look at it.
///
/// # Errors
/// Those of [`freeze`] and of `look`; the tree goes on then.
pub(crate) fn freeze_and<T>(
    root: Pid,
    timeout: Option<Duration>,
    mut look: impl FnMut(&mut Frozen) -> Result<T>,
) -> Result<(Frozen, T)> {
    patiently(timeout, || {
        let mut frozen = freeze(root.as_raw_nonzero().get(), timeout)?;
        let found = look(&mut frozen)?;
        Ok((frozen, found))
    })
}

/// Tries again while threads are still on their way back from a dump that was cut short, or out of
/// a function of the vDSO. Memory that such a dump has left is removed.
pub(crate) fn patiently<T>(
    timeout: Option<Duration>,
    mut work: impl FnMut() -> Result<T>,
) -> Result<T> {
    const PATIENCE: Duration = Duration::from_secs(5);
    let mut begun = None;
    loop {
        let tried = match work() {
            Err(Error::LeftArea { pid }) => match returned::remove(pid, timeout) {
                Ok(()) => continue,
                Err(error) => Err(error),
            },
            tried => tried,
        };
        match tried {
            Err(Error::Returning { .. })
                if begun.get_or_insert_with(Instant::now).elapsed() < PATIENCE =>
            {
                std::thread::sleep(Duration::from_millis(20));
            }
            done => return done,
        }
    }
}
