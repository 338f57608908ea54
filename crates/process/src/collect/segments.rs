//! System V shared memory: all of it belongs to the tree, and each mapping is a whole segment.

use std::collections::HashMap;

use resources::map::listing::Listed;
use sys::shm;

use crate::Result;

/// Checks the segments that the tasks of a tree have attached.
///
/// # Errors
/// [`resources::Error::Unsupported`] naming a mapping that is a part of a segment, or a segment
/// that others have attached as well: a restore could not give them the same memory.
pub(super) fn check<'a>(tasks: impl Iterator<Item = (i32, &'a [Listed])>) -> Result<()> {
    let mut attached = HashMap::<i32, (i32, u64)>::new();
    for (pid, listed) in tasks {
        for map in listed {
            let Some(number) = map.segment() else {
                continue;
            };
            let unsupported = |what: &str| {
                let what = format!("{}: System V shared memory {what}", map.place());
                resources::Error::unsupported(pid, what)
            };
            let found = shm::stat(number)
                .map_err(|error| unsupported(&format!("{number} of elsewhere ({error})")))?;
            let bytes = found.bytes.next_multiple_of(abi::PAGE_BYTES);
            if map.offset != 0 || map.span.bytes() != bytes {
                return Err(unsupported("of which a part was unmapped or protected").into());
            }
            let (_, times) = attached.entry(number).or_insert((pid, 0));
            *times += 1;
            if found.attached < *times {
                return Err(unsupported("that is mapped without being attached").into());
            }
        }
    }
    for (number, (pid, times)) in attached {
        let all = shm::stat(number).map_or(times, |found| found.attached);
        if all > times {
            let others = all - times;
            let what = format!(
                "System V shared memory {number}: attached {others} times outside of the tree"
            );
            return Err(resources::Error::unsupported(pid, what).into());
        }
    }
    Ok(())
}
