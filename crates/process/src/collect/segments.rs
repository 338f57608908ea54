//! System V shared memory: all of it belongs to the tree.
//!
//! - What: attached System V shared memory
//! - Kept: segments that only tasks of the tree have attached, each as often as it was, also parts
//!   of them and parts of another protection.
//! - Refused: "it is System V shared memory …": "… of elsewhere (…)", "that is mapped without being
//!   attached", "that was mapped beyond its end (mremap)"; "System V shared memory …", as "it is
//!   attached … times outside of the tree".
//! - CRIU 4.2: in an IPC namespace of the tree's own; also with parts of another protection, not
//!   with parts unmapped.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use resources::map::listing::Listed;
use sys::shm::{self, Segment};

use crate::Result;
use crate::obstacles::Obstacles;

/// A segment that tasks of the tree have attached.
struct Attached {
    /// The first of them.
    pid: i32,
    /// What the kernel tells of it.
    segment: Segment,
    /// How often they have it.
    times: u64,
}

/// Checks the segments that the tasks of a tree have attached: those that others have attached as
/// well are noted. A restore could not give them the same memory.
pub(super) fn check<'a>(
    tasks: impl Iterator<Item = (i32, &'a [Listed])>,
    obstacles: &mut Obstacles,
) -> Result<()> {
    let mut attached = HashMap::<i32, Attached>::new();
    for (pid, listed) in tasks {
        for map in listed {
            let Some(number) = map.segment() else {
                continue;
            };
            let unsupported = |why: &str| {
                let why = format!("it is System V shared memory {why}");
                resources::Error::unsupported(pid, map.place()).because(why)
            };
            let one = match attached.entry(number) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let segment = shm::stat(number)
                        .map_err(|error| unsupported(&format!("{number} of elsewhere ({error})")));
                    let Some(segment) = obstacles.note(segment)? else {
                        continue;
                    };
                    new.insert(Attached {
                        pid,
                        segment,
                        times: 0,
                    })
                }
            };
            // The kernel counts each mapping, also each that one was split into.
            one.times += 1;
            let bytes = one.segment.bytes.next_multiple_of(map.page_bytes);
            if map.offset.saturating_add(map.span.bytes()) > bytes {
                let refused = unsupported("that was mapped beyond its end (mremap)");
                obstacles.note(Err::<(), _>(refused))?;
            }
            if one.segment.attached < one.times {
                let refused = unsupported("that is mapped without being attached");
                obstacles.note(Err::<(), _>(refused))?;
            }
        }
    }
    for (number, one) in attached {
        let others = one.segment.attached.saturating_sub(one.times);
        if others > 0 {
            let what = format!("System V shared memory {number}");
            let why = format!("it is attached {others} times outside of the tree");
            let refused = resources::Error::unsupported(one.pid, what).because(why);
            obstacles.note(Err::<(), _>(refused))?;
        }
    }
    Ok(())
}
