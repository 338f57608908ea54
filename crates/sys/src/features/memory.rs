//! Features of memory: userfaultfd, page maps, guard pages, the vDSO.
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::ptr::NonNull;

use abi::{Addr, Span};
use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};

use super::Need::{Always, Sometimes};
use super::{Feature, Outcome, called, why, yes};
use crate::btf::Types;
use crate::kernel_memory::KernelMemory;
use crate::pagemap::{Action, Category, Pagemap, Query, Region};
use crate::per_cpu::PerCpuMap;
use crate::process::Process;
use crate::uffd::{Features, Uffd};

const PAGE_BYTES: usize = 4096;

pub(super) static ALL: &[Feature] = &[
    Feature::here(
        "pagemap_scan",
        Sometimes,
        "find the pages of a task fast, dump it live",
        pagemap_scan,
    ),
    Feature::here(
        "process_vm_readv",
        Always,
        "read the memory of a task",
        process_vm_readv,
    ),
    Feature::here(
        "procmap_query",
        Sometimes,
        "list mappings fast",
        procmap_query,
    ),
    Feature::here("map_files", Sometimes, "open what is mapped", map_files),
    Feature::here("uffd", Sometimes, "fill memory from outside", uffd),
    Feature::here(
        "uffd-noncoop",
        Sometimes,
        "follow a task that remaps and forks",
        uffd_noncoop,
    ),
    Feature::here("uffd_wp_async", Sometimes, "track writes", uffd_wp_async),
    Feature::here(
        "uffd_move",
        Sometimes,
        "move filled pages into place",
        uffd_move,
    ),
    Feature::here(
        "uffd_minor_shmem",
        Sometimes,
        "fill shared memory",
        uffd_minor_shmem,
    ),
    Feature::here(
        "mem_dirty_track",
        Sometimes,
        "track writes between pre-dumps",
        dirty_track,
    ),
    Feature::here(
        "soft_dirty",
        Sometimes,
        "track writes by soft-dirty bits",
        soft_dirty,
    ),
    Feature::here(
        "pagemap_scan_guard_pages",
        Sometimes,
        "find guard pages",
        scan_guard_pages,
    ),
    Feature::here("guard_pages", Sometimes, "install guard pages", guard_pages),
    Feature::here("memfd", Sometimes, "files in memory with seals", memfd),
    Feature::here(
        "memfd_hugetlb",
        Sometimes,
        "files of huge pages",
        memfd_hugetlb,
    ),
    Feature::here(
        "can_map_vdso",
        Always,
        "map the vDSO where it was",
        map_vdso_64,
    ),
    Feature::here("compat_cr", Sometimes, "32-bit tasks", map_vdso_32),
    Feature::here(
        "set_mm_map",
        Always,
        "set code, data, stack and arguments",
        set_mm_map,
    ),
    Feature::here(
        "aio_remap",
        Sometimes,
        "rings of asynchronous IO",
        aio_remap,
    ),
];

/// Pages of this process, unmapped again when dropped.
struct Scratch {
    start: NonNull<libc::c_void>,
    bytes: usize,
}

impl Scratch {
    fn new(pages: usize) -> Result<Self, String> {
        let bytes = pages * PAGE_BYTES;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let hint = std::ptr::null_mut();
        // SAFETY: the kernel chooses an address where nothing is mapped.
        let start =
            unsafe { rustix::mm::mmap_anonymous(hint, bytes, protection, MapFlags::PRIVATE) };
        let start = start.map_err(|error| why("mmap", &error.into()))?;
        let start = NonNull::new(start).expect("the kernel maps nothing at 0 without being asked");
        Ok(Self { start, bytes })
    }

    fn touch(&self) {
        // SAFETY: the first page is mapped, writable and used by nobody else.
        unsafe { self.start.cast::<u8>().write_volatile(1) }
    }

    fn span(&self) -> Span {
        let start = self.start.addr().get() as u64;
        Span {
            start: Addr(start),
            end: Addr(start + self.bytes as u64),
        }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the pages were mapped by `new` and nothing points into them any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.bytes) };
    }
}

fn own_pagemap() -> Result<Pagemap, String> {
    Pagemap::open(&Process::own()).map_err(|error| why("/proc/self/pagemap", &error))
}

fn scan(scratch: &Scratch, wanted: Category) -> Result<usize, String> {
    let query = Query {
        inverted: Category::empty(),
        all: Category::empty(),
        any: wanted,
        told: wanted,
    };
    let mut regions = [Region::EMPTY; 4];
    own_pagemap()?
        .scan(scratch.span(), &query, Action::empty(), &mut regions)
        .map(|(found, _)| found)
        .map_err(|error| why("PAGEMAP_SCAN", &error))
}

fn pagemap_scan() -> Outcome {
    let scratch = Scratch::new(2)?;
    scratch.touch();
    match scan(&scratch, Category::PRESENT)? {
        1 => yes(),
        found => Err(format!(
            "PAGEMAP_SCAN found {found} regions where there is one"
        )),
    }
}

fn process_vm_readv() -> Outcome {
    let scratch = Scratch::new(1)?;
    scratch.touch();
    let mut byte = [0];
    crate::vm::read_exact(&Process::own(), scratch.span().start, &mut byte)
        .map_err(|error| why("process_vm_readv", &error))?;
    if byte == [1] {
        yes()
    } else {
        Err("process_vm_readv read something else".to_owned())
    }
}

fn procmap_query() -> Outcome {
    /// `struct procmap_query` of the kernel's include/uapi/linux/fs.h.
    #[repr(C)]
    #[derive(Default)]
    struct Question {
        size: u64,
        flags: u64,
        addr: u64,
        answer: [u64; 10],
    }
    const PROCMAP_QUERY: libc::Ioctl =
        rustix::ioctl::opcode::read_write::<Question>(b'f', 17) as libc::Ioctl;
    let maps = File::open("/proc/self/maps");
    let maps = maps.map_err(|error| why("/proc/self/maps", &error))?;
    let scratch = Scratch::new(1)?;
    let size = size_of::<Question>() as u64;
    let mut question = Question {
        size,
        addr: scratch.span().start.0,
        ..Question::default()
    };
    // SAFETY: the argument is the structure of the number, with its size in it; with no room for
    // names given, the kernel writes nothing else.
    let answer = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY, &raw mut question) };
    called("PROCMAP_QUERY", answer.into())?;
    yes()
}

fn map_files() -> Outcome {
    let directory = "/proc/self/map_files";
    let mut entries = std::fs::read_dir(directory).map_err(|error| why(directory, &error))?;
    let first = entries
        .next()
        .ok_or_else(|| format!("{directory} is empty"))?;
    let path = first.map_err(|error| why(directory, &error))?.path();
    std::fs::metadata(&path).map_err(|error| why("following map_files", &error))?;
    yes()
}

fn uffd_features() -> Result<Features, String> {
    let uffd = Uffd::create().map_err(|error| why("userfaultfd", &error))?;
    uffd.api(Features::empty())
        .map_err(|error| why("UFFDIO_API", &error))
}

fn uffd() -> Outcome {
    uffd_features()?;
    yes()
}

fn uffd_has(wanted: Features) -> Outcome {
    lacks(wanted - uffd_features()?)
}

/// Succeeds if nothing is missing.
fn lacks(missing: Features) -> Outcome {
    if missing.is_empty() {
        yes()
    } else {
        Err(format!("the kernel lacks {missing:?}"))
    }
}

fn uffd_noncoop() -> Outcome {
    let events = Features::EVENT_FORK
        | Features::EVENT_REMAP
        | Features::EVENT_REMOVE
        | Features::EVENT_UNMAP;
    uffd_has(events)?;
    // To be told of forks needs a privilege, which shows only when it is asked for.
    let uffd = Uffd::create().map_err(|error| why("userfaultfd", &error))?;
    uffd.api(events)
        .map_err(|error| why("UFFDIO_API", &error))?;
    yes()
}

/// A tracker needs no faults of the kernel's: a userfaultfd that anybody may make is enough.
fn uffd_wp_async() -> Outcome {
    let uffd = Uffd::create_for_user_mode().map_err(|error| why("userfaultfd", &error))?;
    let features = uffd.api(Features::empty());
    let features = features.map_err(|error| why("UFFDIO_API", &error))?;
    lacks(Features::WP_ASYNC - features)
}

fn uffd_move() -> Outcome {
    uffd_has(Features::MOVE)
}

fn uffd_minor_shmem() -> Outcome {
    uffd_has(Features::MINOR_SHMEM)
}

/// What criu(8) calls so, whichever way there is.
fn dirty_track() -> Outcome {
    let by = |remark: &str| Ok(remark.to_owned());
    match (uffd_wp_async(), soft_dirty()) {
        (Ok(_), _) => by("by asynchronous write protection"),
        (_, Ok(_)) => by("by soft-dirty bits"),
        (Err(one), Err(other)) => Err(format!("{one}; {other}")),
    }
}

fn soft_dirty() -> Outcome {
    /// The bit of an entry of /proc/PID/pagemap.
    const SOFT_DIRTY: u32 = 55;
    let scratch = Scratch::new(1)?;
    scratch.touch();
    let mut entry = [0; 8];
    let file = File::open("/proc/self/pagemap").map_err(|error| why("pagemap", &error))?;
    let offset_bytes = scratch.span().start.0 / PAGE_BYTES as u64 * 8;
    file.read_exact_at(&mut entry, offset_bytes)
        .map_err(|error| why("pagemap", &error))?;
    if u64::from_ne_bytes(entry) >> SOFT_DIRTY & 1 == 1 {
        yes()
    } else {
        Err("a written page is not soft-dirty: the kernel has no such bits".to_owned())
    }
}

fn guarded() -> Result<Scratch, String> {
    const MADV_GUARD_INSTALL: libc::c_int =
        linux_raw_sys::general::MADV_GUARD_INSTALL as libc::c_int;
    let scratch = Scratch::new(1)?;
    let (start, bytes) = (scratch.start.as_ptr(), scratch.bytes);
    // SAFETY: the pages are ours and nobody touches them again before they are unmapped.
    let result = unsafe { libc::madvise(start, bytes, MADV_GUARD_INSTALL) };
    called("MADV_GUARD_INSTALL", result.into())?;
    Ok(scratch)
}

fn guard_pages() -> Outcome {
    guarded()?;
    yes()
}

fn scan_guard_pages() -> Outcome {
    match scan(&guarded()?, Category::GUARD)? {
        1 => yes(),
        _ => Err("PAGEMAP_SCAN does not find a guard page".to_owned()),
    }
}

fn memfd() -> Outcome {
    rustix::fs::memfd_create(c"probe", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|error| why("memfd_create", &error.into()))?;
    yes()
}

fn memfd_hugetlb() -> Outcome {
    rustix::fs::memfd_create(c"probe", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB)
        .map_err(|error| why("memfd_create(MFD_HUGETLB)", &error.into()))?;
    yes()
}

/// Asks for a vDSO that cannot be given: a kernel that has the call tells that one is mapped.
fn map_vdso(code: libc::c_long) -> Outcome {
    // SAFETY: with a vDSO mapped, as in this process, the call fails before it maps anything.
    let result = unsafe { libc::syscall(libc::SYS_arch_prctl, code, PAGE_BYTES) };
    let error = io::Error::last_os_error();
    match (result, error.raw_os_error()) {
        (0.., _) | (_, Some(libc::EEXIST)) => yes(),
        _ => Err(why("arch_prctl", &error)),
    }
}

fn map_vdso_64() -> Outcome {
    const ARCH_MAP_VDSO_64: libc::c_long = abi::kernel::ARCH_MAP_VDSO_64 as libc::c_long;
    map_vdso(ARCH_MAP_VDSO_64)
}

fn map_vdso_32() -> Outcome {
    const ARCH_MAP_VDSO_32: libc::c_long = abi::kernel::ARCH_MAP_VDSO_32 as libc::c_long;
    map_vdso(ARCH_MAP_VDSO_32)
}

fn set_mm_map() -> Outcome {
    let mut bytes: libc::c_uint = 0;
    let size = libc::PR_SET_MM_MAP_SIZE;
    // SAFETY: the call writes the size of a structure to a number that is ours.
    let result = unsafe { libc::prctl(libc::PR_SET_MM, size, &raw mut bytes, 0, 0) };
    called("PR_SET_MM_MAP_SIZE", result.into())?;
    yes()
}

/// Whether requests are under way in a ring stands in the kernel's memory alone.
fn aio_remap() -> Outcome {
    let counters = || {
        KernelMemory::open()?;
        PerCpuMap::make()?;
        Types::of_kernel()
    };
    let types = counters().map_err(|error| why("look into the kernel", &error))?;
    match types.member("kioctx", "reqs.percpu_count_ptr") {
        Some(_) => yes(),
        None => Err("the kernel does not describe them".to_owned()),
    }
}
