//! What subjects have besides memory: descriptors of several kinds, and many mappings.
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::{EventfdFlags, eventfd};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit, setrlimit};
use testkit::calls::Mapping;

use crate::error::{Result, file_error, kernel_error};
use crate::subject::PAGE_BYTES;

/// Opens `count` descriptors, each of a description of its own: a quarter each of files, pipes,
/// event counters and sockets that are connected to each other.
///
/// # Errors
/// When the kernel refuses that.
pub fn descriptors(count: usize) -> Result<Vec<OwnedFd>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    // As many again for what stands open anyway, and for whoever restores it.
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.current.map(|bound| bound.max(2 * count as u64));
    setrlimit(Resource::Nofile, limit).map_err(kernel_error("allow more descriptors"))?;
    let program = Path::new("/proc/self/exe");
    let program = std::fs::read_link(program).map_err(file_error("read", program))?;
    let mut all: Vec<OwnedFd> = Vec::new();
    while all.len() < count {
        for _ in 0..2 {
            let file = File::open(&program).map_err(file_error("open", &program))?;
            all.push(file.into());
            let counter = eventfd(0, EventfdFlags::empty());
            all.push(counter.map_err(kernel_error("make an event counter"))?);
        }
        let (read, write) = std::io::pipe().map_err(kernel_error("make a pipe"))?;
        all.extend([read.into(), write.into()]);
        let (one, other) = UnixStream::pair().map_err(kernel_error("make sockets"))?;
        all.extend([one.into(), other.into()]);
    }
    all.truncate(count);
    Ok(all)
}

/// Makes `count` mappings, each of a page with a number of its own.
///
/// # Errors
/// When the kernel refuses that.
pub fn mappings(count: usize) -> Result<Option<Mapping>> {
    if count == 0 {
        return Ok(None);
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let all = Mapping::anonymous(count * PAGE_BYTES, protection, MapFlags::PRIVATE);
    let all = all.map_err(kernel_error("map memory"))?;
    for page in 0..count {
        all.store(page * PAGE_BYTES, page as u64 + 1);
        // Neighbours of one protection would be one mapping.
        if page % 2 == 1 {
            let only_read = ProtFlags::READ.bits().cast_signed();
            let range = page * PAGE_BYTES..(page + 1) * PAGE_BYTES;
            let protected = all.protect(range, only_read);
            protected.map_err(kernel_error("protect memory"))?;
        }
    }
    Ok(Some(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_as_many_as_were_asked_for() {
        assert_eq!(descriptors(41).unwrap().len(), 41);
        let made = mappings(20).unwrap().unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let inside = maps.lines().filter(|line| {
            let start = line.split('-').next().unwrap();
            let start = u64::from_str_radix(start, 16).unwrap();
            (made.address()..made.address() + made.bytes() as u64).contains(&start)
        });
        // The first may have joined one before it.
        assert!(inside.count() >= 19, "{maps}");
    }
}
