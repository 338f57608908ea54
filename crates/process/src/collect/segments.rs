//! System V shared memory: all of it belongs to the tree, and each mapping is a whole segment.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use resources::map::listing::Listed;
use sys::shm::{self, Segment};

use crate::Result;

/// A segment that tasks of the tree have attached.
struct Attached {
    /// The first of them.
    pid: i32,
    /// What the kernel tells of it.
    segment: Segment,
    /// How often they have it.
    times: u64,
}

/// Checks the segments that the tasks of a tree have attached.
///
/// # Errors
/// [`resources::Error::Unsupported`] naming a mapping that is a part of a segment, or a segment
/// that others have attached as well: a restore could not give them the same memory.
pub(super) fn check<'a>(tasks: impl Iterator<Item = (i32, &'a [Listed])>) -> Result<()> {
    let mut attached = HashMap::<i32, Attached>::new();
    for (pid, listed) in tasks {
        for map in listed {
            let Some(number) = map.segment() else {
                continue;
            };
            let unsupported = |what: &str| {
                let what = format!("{}: System V shared memory {what}", map.place());
                resources::Error::unsupported(pid, what)
            };
            let one = match attached.entry(number) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(new) => {
                    let segment = shm::stat(number).map_err(|error| {
                        unsupported(&format!("{number} of elsewhere ({error})"))
                    })?;
                    new.insert(Attached {
                        pid,
                        segment,
                        times: 0,
                    })
                }
            };
            let bytes = one.segment.bytes.next_multiple_of(abi::PAGE_BYTES);
            if map.offset != 0 || map.span.bytes() != bytes {
                return Err(unsupported("of which a part was unmapped or protected").into());
            }
            one.times += 1;
            if one.segment.attached < one.times {
                return Err(unsupported("that is mapped without being attached").into());
            }
        }
    }
    for (number, one) in attached {
        let others = one.segment.attached - one.times;
        if others > 0 {
            let what = format!(
                "System V shared memory {number}: attached {others} times outside of the tree"
            );
            return Err(resources::Error::unsupported(one.pid, what).into());
        }
    }
    Ok(())
}
