//! Who has a map: the kernel counts that, and tells nobody.

use std::io;

use std::cmp::Ordering;
use sys::bpf_map::Definition;

use sys::kcmp::{self, Shared};

use super::{MAPPABLE, NUMA_NODE, id_of};
use crate::fd::{DumpContext, Open};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// What of a map stands in the kernel's memory alone.
pub(super) struct LookedUp {
    kernel: &'static Kernel,
    /// Where.
    at: u64,
    /// The node of its memory, where one was chosen.
    pub numa_node: u32,
}

/// How often something is referred to.
struct Counts {
    /// The map, by descriptions and pins.
    users: u64,
    /// The map, by these, programs and other maps.
    all: u64,
    /// The description, by descriptors, mappings, and messages in flight.
    description: u64,
}

impl Counts {
    fn read(kernel: &'static Kernel, file: u64, map: u64) -> io::Result<Self> {
        let (file, map) = (kernel.read("file", file)?, kernel.read("bpf_map", map)?);
        // Since 6.13, one less than there are.
        let description = match file.word("f_ref.refcnt.counter") {
            Ok(count) => count.wrapping_add(1),
            Err(_) => file.word("f_count.counter")?,
        };
        Ok(Self {
            users: map.word("usercnt.counter")?,
            all: map.word("refcnt.counter")?,
            description,
        })
    }
}

/// Looks up what is not told of the map behind `open`, and insists that nobody but the tree has it.
///
/// # Errors
/// [`Error::Unsupported`] for one that others have, or where it cannot be looked up.
pub(super) fn look_up(
    open: &Open<'_>,
    cx: &dyn DumpContext,
    definition: &Definition,
) -> Result<LookedUp> {
    let failed = |why: &dyn std::fmt::Display| {
        open.unsupported(&format!("who has it cannot be looked up: {why}"), None)
    };
    let own = open.own()?;
    let kernel = Kernel::get().map_err(|why| failed(&why))?;
    let find = || {
        let file = kernel.file(own)?;
        Ok((file, kernel.private(file)?))
    };
    let (file, at) = find().map_err(|error: io::Error| failed(&error))?;
    let counts = Counts::read(kernel, file, at).map_err(|error| failed(&error))?;
    check(open, cx, &counts, definition)?;
    let structure = kernel.read("bpf_map", at).map_err(|error| failed(&error))?;
    // Only newer kernels have such maps.
    if structure.word("excl_prog_sha").is_ok_and(|at| at != 0) {
        return Err(open.unsupported("it belongs to one program", None));
    }
    let numa_node = match definition.flags & NUMA_NODE {
        0 => 0,
        _ => structure
            .half("numa_node")
            .map_err(|error| failed(&error))?,
    };
    Ok(LookedUp {
        kernel,
        at,
        numa_node,
    })
}

fn check(
    open: &Open<'_>,
    cx: &dyn DumpContext,
    counts: &Counts,
    definition: &Definition,
) -> Result<()> {
    let refuse = |why: &str| Err(open.unsupported(why, None));
    if definition.flags & MAPPABLE != 0 && is_mapped(open, cx) {
        return refuse("it is mapped");
    }
    if open.in_flight {
        return refuse("it is on its way in a socket, and who else has it is not known");
    }
    if counts.all != counts.users {
        return refuse("a program or another map uses it");
    }
    let same = cx.all().iter().filter(|other| id_of(other) == id_of(open));
    if counts.users != same.count() as u64 {
        return refuse("it is pinned, or somebody outside of the tree has it");
    }
    // Ours is another one.
    let known = tables(open, cx) + 1;
    if counts.description != known {
        return refuse(
            "somebody outside of the tree has its descriptor as well, or it is also on its way in \
             a socket",
        );
    }
    Ok(())
}

/// How many descriptors the tree has of it: a table that tasks share counts once.
fn tables(open: &Open<'_>, cx: &dyn DumpContext) -> u64 {
    let numbers = cx.numbers(open.id);
    let processes = cx.processes();
    let process = |pid: i32| processes.iter().find(|process| process.pid() == pid);
    let compare = |one, other| {
        let compared = kcmp::compare(process(one)?, process(other)?, Shared::Descriptors);
        compared.ok()
    };
    let shares = |pid: i32, fd: i32, earlier: &[(i32, i32)]| {
        let mut same = earlier.iter().filter(|(_, number)| *number == fd);
        same.any(|(other, _)| compare(pid, *other).is_some_and(Ordering::is_eq))
    };
    let own = numbers.iter().enumerate();
    let own = own.filter(|(at, (pid, fd))| !shares(*pid, *fd, &numbers[..*at]));
    own.count() as u64
}

/// Whether one of the tasks that have it shows it in its memory.
fn is_mapped(open: &Open<'_>, cx: &dyn DumpContext) -> bool {
    let holders = cx.numbers(open.id);
    let mut holders = holders
        .iter()
        .map(|(pid, _)| *pid)
        .chain([open.process.pid()]);
    holders.any(|pid| {
        let maps = sys::procfs::read_text(format_args!("{pid}/maps")).unwrap_or_default();
        maps.lines()
            .any(|line| line.ends_with("anon_inode:bpf-map"))
    })
}

impl LookedUp {
    /// The values in a queue or on a stack, in the order in which they were put there.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where the kernel has it in another way.
    pub(super) fn values(&self, value_bytes: usize) -> Result<Vec<u8>> {
        self.try_values(value_bytes)
            .map_err(|error| Error::Mismatch {
                what: format!("who has it cannot be looked up: {error}"),
            })
    }

    fn try_values(&self, value_bytes: usize) -> io::Result<Vec<u8>> {
        let queue = self.kernel.read("bpf_queue_stack", self.at)?;
        let [head, tail, size] = ["head", "tail", "size"].map(|name| queue.half(name));
        let [head, tail, size] = [head?, tail?, size?].map(|number| number as usize);
        if head >= size || tail >= size {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let elements = queue.address("elements")?;
        let piece = |from: usize, to: usize| {
            let at = elements + (from * value_bytes) as u64;
            self.kernel.bytes(at, (to - from) * value_bytes)
        };
        match tail <= head {
            true => piece(tail, head),
            false => Ok([piece(tail, size)?, piece(0, head)?].concat()),
        }
    }
}
