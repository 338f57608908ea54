//! The vDSO of a subject: called through pointers, moved, unmapped, replaced by another kernel's.
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::FileExt;
use std::ptr;

use super::check;

/// Where four functions of a vDSO are, in bytes from its start.
#[derive(Clone, Copy, Debug)]
pub struct Offsets {
    /// Of `__vdso_clock_gettime`.
    pub clock_gettime: usize,
    /// Of `__vdso_gettimeofday`.
    pub gettimeofday: usize,
    /// Of `__vdso_time`.
    pub time: usize,
    /// Of `__vdso_getcpu`.
    pub getcpu: usize,
}

type ClockGettime = unsafe extern "C" fn(libc::clockid_t, *mut libc::timespec) -> libc::c_int;
type Gettimeofday = unsafe extern "C" fn(*mut libc::timeval, *mut libc::c_void) -> libc::c_int;
type Time = unsafe extern "C" fn(*mut libc::time_t) -> libc::time_t;
type Getcpu = unsafe extern "C" fn(*mut u32, *mut u32, *mut libc::c_void) -> libc::c_int;

/// The four functions by their addresses.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    clock_gettime: ClockGettime,
    gettimeofday: Gettimeofday,
    time: Time,
    getcpu: Getcpu,
}

/// Addresses of a mapping: the first, and the one after the last.
type AddressRange = (usize, usize);

/// Pages of made-up data before another kernel's vDSO.
const DATA_BYTES: usize = 8 * 4096;

impl Clock {
    fn at(start: usize, offsets: Offsets) -> Self {
        let code = |offset| ptr::with_exposed_provenance::<u8>(start + offset);
        // SAFETY: the caller has put a vDSO with this function at this offset there.
        let clock_gettime =
            unsafe { std::mem::transmute::<*const u8, ClockGettime>(code(offsets.clock_gettime)) };
        // SAFETY: as above.
        let gettimeofday =
            unsafe { std::mem::transmute::<*const u8, Gettimeofday>(code(offsets.gettimeofday)) };
        // SAFETY: as above.
        let time = unsafe { std::mem::transmute::<*const u8, Time>(code(offsets.time)) };
        // SAFETY: as above.
        let getcpu = unsafe { std::mem::transmute::<*const u8, Getcpu>(code(offsets.getcpu)) };
        Self {
            clock_gettime,
            gettimeofday,
            time,
            getcpu,
        }
    }

    /// The process's own vDSO as the kernel has mapped it.
    ///
    /// # Errors
    /// There is none.
    pub fn own(offsets: Offsets) -> Result<Self> {
        Ok(Self::at(code()?.0, offsets))
    }

    /// Moves the vDSO and its data to another place. What libc knows of it is wrong afterwards.
    ///
    /// # Errors
    /// There is none; as mremap(2).
    pub fn moved(offsets: Offsets) -> Result<Self> {
        let (data, code) = (data()?, code()?);
        let first = data.first().map_or(code.0, |ends| ends.0);
        let to = reserve(code.1 - first)?;
        for ends in data.iter().chain([&code]) {
            let at = ptr::with_exposed_provenance_mut(ends.0);
            let to = ptr::with_exposed_provenance_mut::<libc::c_void>(to + ends.0 - first);
            let bytes = ends.1 - ends.0;
            let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            // SAFETY: the target was reserved above, and nothing calls the vDSO meanwhile.
            let moved = unsafe { libc::mremap(at, bytes, bytes, flags, to) };
            check(if moved == libc::MAP_FAILED { -1 } else { 0 })?;
        }
        Ok(Self::at(to + code.0 - first, offsets))
    }

    /// Writes `image`, another kernel's vDSO, over the own one, and zeros in the place of its
    /// data. What libc knows of it is wrong afterwards.
    ///
    /// # Errors
    /// There is none, or it is smaller; as mmap(2).
    pub fn foreign(image: &[u8], offsets: Offsets) -> Result<Self> {
        unmap_data()?;
        let code = code()?;
        let mut bytes = image.to_vec();
        if bytes.len() > code.1 - code.0 {
            return Err(Error::new(ErrorKind::InvalidInput, "it is too large"));
        }
        bytes.resize(code.1 - code.0, 0);
        let memory = std::fs::File::options()
            .write(true)
            .open("/proc/self/mem")?;
        memory.write_all_at(&bytes, code.0 as u64)?;
        map_fixed(code.0 - DATA_BYTES, DATA_BYTES)?;
        protect(code.0 - DATA_BYTES, DATA_BYTES, libc::PROT_READ)?;
        Ok(Self::at(code.0, offsets))
    }

    /// Puts a copy of `image` into memory of its own, behind `data_bytes` of zeros, as a restore
    /// does with the vDSO of another kernel.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn copy(image: &[u8], data_bytes: usize, offsets: Offsets) -> Result<Self> {
        let bytes = image.len().next_multiple_of(4096);
        let start = reserve(data_bytes + bytes)?;
        let code = start + data_bytes;
        map_fixed(code, bytes)?;
        let memory = std::fs::File::options()
            .write(true)
            .open("/proc/self/mem")?;
        memory.write_all_at(image, code as u64)?;
        protect(code, bytes, libc::PROT_READ | libc::PROT_EXEC)?;
        protect(start, data_bytes, libc::PROT_READ)?;
        for (at, bytes) in [(start, data_bytes), (code, bytes)] {
            let at = ptr::with_exposed_provenance_mut(at);
            // SAFETY: an advice about memory of our own.
            check(unsafe { libc::madvise(at, bytes, libc::MADV_RANDOM) }.into())?;
        }
        Ok(Self::at(code, offsets))
    }

    /// The address of `__vdso_clock_gettime`.
    #[must_use]
    pub fn address(&self) -> usize {
        self.clock_gettime as usize
    }

    /// A clock by the vDSO, in nanoseconds.
    #[must_use]
    pub fn nanoseconds(&self, clock: i32) -> i64 {
        let mut now = zero();
        // SAFETY: it writes the time of that clock.
        let failed = unsafe { (self.clock_gettime)(clock, &raw mut now) };
        if failed == 0 { total(now) } else { -1 }
    }

    /// The time of day by the vDSO, in microseconds.
    #[must_use]
    pub fn microseconds(&self) -> i64 {
        let mut now = libc::timeval {
            tv_sec: 0,
            tv_usec: 0,
        };
        // SAFETY: it writes the time of day.
        let failed = unsafe { (self.gettimeofday)(&raw mut now, ptr::null_mut()) };
        if failed == 0 {
            now.tv_sec * 1_000_000 + now.tv_usec
        } else {
            -1
        }
    }

    /// The time by the vDSO, in seconds.
    #[must_use]
    pub fn seconds(&self) -> i64 {
        // SAFETY: it writes nothing.
        unsafe { (self.time)(ptr::null_mut()) }
    }

    /// The processor that it runs on, by the vDSO.
    #[must_use]
    pub fn processor(&self) -> Option<u32> {
        let mut number = 0;
        // SAFETY: it writes one number.
        let failed = unsafe { (self.getcpu)(&raw mut number, ptr::null_mut(), ptr::null_mut()) };
        (failed == 0).then_some(number)
    }
}

/// A clock by the system call, in nanoseconds.
#[must_use]
pub fn nanoseconds(clock: i32) -> i64 {
    let mut now = zero();
    // SAFETY: it writes the time of that clock.
    let failed = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, &raw mut now) };
    if failed == 0 { total(now) } else { -1 }
}

/// The processor that it runs on, by the system call.
#[must_use]
pub fn processor() -> Option<u32> {
    let mut number = 0_u32;
    let none = ptr::null_mut::<u32>();
    // SAFETY: it writes one number.
    let failed = unsafe { libc::syscall(libc::SYS_getcpu, &raw mut number, none, none) };
    (failed == 0).then_some(number)
}

/// Unmaps the vDSO and its data. What libc knows of it is wrong afterwards.
///
/// # Errors
/// There is none; as munmap(2).
pub fn unmap() -> Result<()> {
    unmap_data()?;
    unmap_one(code()?)
}

fn unmap_data() -> Result<()> {
    data()?.into_iter().try_for_each(unmap_one)
}

fn unmap_one(ends: AddressRange) -> Result<()> {
    let at = ptr::with_exposed_provenance_mut(ends.0);
    // SAFETY: it is the vDSO or its data, which nothing uses from here on.
    check(unsafe { libc::munmap(at, ends.1 - ends.0) }.into()).map(drop)
}

fn zero() -> libc::timespec {
    libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    }
}

fn total(time: libc::timespec) -> i64 {
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn code() -> Result<AddressRange> {
    let found = mapped(|name| name == "[vdso]")?.pop();
    found.ok_or_else(|| Error::new(ErrorKind::NotFound, "no vDSO"))
}

fn data() -> Result<Vec<AddressRange>> {
    mapped(|name| name.starts_with("[vvar"))
}

fn mapped(wanted: impl Fn(&str) -> bool) -> Result<Vec<AddressRange>> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let line = |line: &str| {
        let name = line.split_ascii_whitespace().nth(5)?;
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        wanted(name).then_some((number(start)?, number(end)?))
    };
    Ok(maps.lines().filter_map(line).collect())
}

fn reserve(bytes: usize) -> Result<usize> {
    map(ptr::null_mut(), bytes, 0)
}

fn map_fixed(at: usize, bytes: usize) -> Result<usize> {
    map(ptr::with_exposed_provenance_mut(at), bytes, libc::MAP_FIXED)
}

fn map(at: *mut libc::c_void, bytes: usize, flags: i32) -> Result<usize> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a fixed address is one that was reserved or where the vDSO's data was.
    let start = unsafe { libc::mmap(at, bytes, prot, flags, -1, 0) };
    check(if start == libc::MAP_FAILED { -1 } else { 0 })?;
    Ok(start.expose_provenance())
}

fn protect(at: usize, bytes: usize, prot: i32) -> Result<()> {
    let at = ptr::with_exposed_provenance_mut(at);
    // SAFETY: memory that was mapped here.
    check(unsafe { libc::mprotect(at, bytes, prot) }.into()).map(drop)
}
