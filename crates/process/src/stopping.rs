//! The tree stopped and looked at, as every kind of dump does it.

use freeze::returned::patiently;
use freeze::{Frozen, Task, freeze};
use resources::fd::tcp::newcomers::{Held, Newcomers};

use crate::collect::memory_view::MemoryView;
use crate::collect::{How, Inventory, collect};
use crate::patience::Patience;
use crate::{DumpKind, DumpOptions, Result};

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
                namespaces: options.namespaces,
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
