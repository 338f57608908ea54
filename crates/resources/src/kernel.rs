//! The running kernel's structures, read where its own description of its types says that they are.
//!
//! /proc tells too little of some objects: of a ring neither its flags nor whether requests are
//! under way, of a thread neither its keyrings nor its Landlock domain. The kernel's memory tells
//! it, which takes no more than the privileges of a dump, and changes nothing. Where the kernel may
//! not be looked into, or calls a member by another name, nothing is guessed: the ring is refused.

pub mod credentials;
mod layout;

use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd};
use std::sync::OnceLock;

use sys::btf::Member;
use sys::kernel_memory::KernelMemory;
use sys::per_cpu::{self, PerCpuMap};
use sys::process::Process;

use credentials::CredentialsReader;
use layout::Layout;
pub use layout::{forget, is_known_for, keep, learn};

/// Looks into the kernel.
pub(crate) struct Kernel {
    memory: KernelMemory,
    layout: &'static Layout,
    credentials: OnceLock<std::result::Result<CredentialsReader, String>>,
}

/// Where each processor has its copies of what the kernel has for all of them.
pub(crate) struct PerCpu {
    /// How far behind the address that stands for all, by processor.
    distances: Vec<u64>,
}

impl PerCpu {
    fn find(kernel: &Kernel) -> Result<Self> {
        let map = PerCpuMap::make()?;
        let array = kernel.private(kernel.file(map.own())?)?;
        let array = kernel.read("bpf_array", array)?;
        let common = kernel.word(array.address("pptrs")?)?;
        let distance = |cpu| Ok(map.address(cpu)?.wrapping_sub(common));
        let distances = per_cpu::possible()?.into_iter().map(distance);
        Ok(Self {
            distances: distances.collect::<Result<_>>()?,
        })
    }

    /// The addresses of all copies of what is at `common`.
    pub fn all(&self, common: u64) -> impl Iterator<Item = u64> {
        let distances = self.distances.iter();
        distances.map(move |distance| common.wrapping_add(*distance))
    }
}

/// A structure that was read.
pub(crate) struct Structure<'a> {
    kernel: &'a Kernel,
    name: &'static str,
    /// Its address.
    pub at: u64,
    bytes: Vec<u8>,
}

impl Kernel {
    /// The running kernel; why it cannot be looked into otherwise.
    #[cfg(not(test))]
    pub fn get() -> std::result::Result<&'static Self, &'static str> {
        static KERNEL: OnceLock<std::result::Result<Kernel, String>> = OnceLock::new();
        KERNEL
            .get_or_init(Self::open)
            .as_ref()
            .map_err(String::as_str)
    }

    /// The same for each thread: those of tests have descriptors of their own.
    #[cfg(test)]
    pub fn get() -> std::result::Result<&'static Self, &'static str> {
        use std::cell::OnceCell;
        thread_local! {
            static KERNEL: OnceCell<&'static std::result::Result<Kernel, String>> =
                const { OnceCell::new() };
        }
        let kernel = KERNEL.with(|one| *one.get_or_init(|| Box::leak(Box::new(Self::open()))));
        kernel.as_ref().map_err(String::as_str)
    }

    fn open() -> std::result::Result<Self, String> {
        let memory = KernelMemory::open().map_err(|error| format!("bpf(2): {error}"))?;
        let layout = Layout::of_this_kernel();
        layout.check()?;
        Ok(Self {
            memory,
            layout,
            credentials: OnceLock::new(),
        })
    }

    /// Where each processor has its copies.
    pub fn per_cpu(&self) -> Result<&'static PerCpu> {
        static PER_CPU: OnceLock<std::result::Result<PerCpu, String>> = OnceLock::new();
        let found = PER_CPU.get_or_init(|| {
            let found = PerCpu::find(self);
            found.map_err(|error| format!("copies of processors: {error}"))
        });
        let failed = |why: &String| Error::new(ErrorKind::Unsupported, why.clone());
        found.as_ref().map_err(failed)
    }

    /// Reads a structure.
    pub fn read(&self, name: &'static str, at: u64) -> Result<Structure<'_>> {
        let size = self.layout.size(name).ok_or_else(|| unknown(name, ""))?;
        let bytes = self.memory.read(at, size);
        let bytes = bytes.inspect_err(|error| log::debug!("{name} at {at:#x}: {error}"))?;
        Ok(Structure {
            kernel: self,
            name,
            at,
            bytes,
        })
    }

    /// Reads `len_bytes` bytes.
    pub fn bytes(&self, at: u64, len_bytes: usize) -> Result<Vec<u8>> {
        self.memory.read(at, len_bytes)
    }

    /// Reads a string, without the NUL at its end.
    pub fn text(&self, at: u64) -> Result<Vec<u8>> {
        const MOST_BYTES: usize = 4096;
        const PIECE_BYTES: u64 = 64;
        let mut text = Vec::new();
        while text.len() < MOST_BYTES {
            let at = at + text.len() as u64;
            // A piece ends with its page: the next one may not be there.
            let piece = self
                .memory
                .read(at, (PIECE_BYTES - at % PIECE_BYTES) as usize)?;
            let end = piece.iter().position(|byte| *byte == 0);
            text.extend_from_slice(&piece[..end.unwrap_or(piece.len())]);
            if end.is_some() {
                return Ok(text);
            }
        }
        Err(Error::new(ErrorKind::Unsupported, "a string does not end"))
    }

    /// Reads a word.
    pub fn word(&self, at: u64) -> Result<u64> {
        self.memory.word(at)
    }

    /// Reads `count` words.
    pub fn words(&self, at: u64, count: usize) -> Result<Vec<u64>> {
        let bytes = self.memory.read(at, 8 * count)?;
        let words = bytes.as_chunks::<8>().0.iter();
        Ok(words.map(|word| u64::from_ne_bytes(*word)).collect())
    }

    /// Reads `count` signed numbers of 16 bits.
    pub fn shorts(&self, at: u64, count: usize) -> Result<Vec<i16>> {
        let bytes = self.memory.read(at, 2 * count)?;
        let shorts = bytes.as_chunks::<2>().0.iter();
        Ok(shorts.map(|short| i16::from_ne_bytes(*short)).collect())
    }

    /// The address of the structure whose member is at `at`.
    pub fn around(&self, name: &'static str, member: &str, at: u64) -> Result<u64> {
        Ok(at.wrapping_sub(self.offset(name, member)?))
    }

    /// The address of the `struct file` behind a descriptor of this process.
    pub fn file(&self, own: BorrowedFd<'_>) -> Result<u64> {
        self.memory.address(0, &self.way_to_file(own)?)
    }

    /// The address of the `struct sock` behind a descriptor of this process that is a socket.
    pub fn socket(&self, own: BorrowedFd<'_>) -> Result<u64> {
        let mut way = self.way_to_file(own)?;
        way.push(self.offset("file", "private_data")?);
        way.push(self.offset("socket", "sk")?);
        self.memory.address(0, &way)
    }

    /// The steps to the `struct file` behind a descriptor, from the calling thread's `task_struct`.
    fn way_to_file(&self, own: BorrowedFd<'_>) -> Result<Vec<u64>> {
        Ok(vec![
            self.offset("task_struct", "files")?,
            self.offset("files_struct", "fdt")?,
            self.offset("fdtable", "fd")?,
            8 * u64::from(own.as_raw_fd().cast_unsigned()),
        ])
    }

    /// A member of eight bytes of the structure at `at`, without the rest of it.
    pub fn word_of(&self, name: &'static str, member: &str, at: u64) -> Result<u64> {
        self.word(self.address_of(name, member, at)?)
    }

    /// A member of four bytes of the structure at `at`, without the rest of it.
    pub fn half_of(&self, name: &'static str, member: &str, at: u64) -> Result<u32> {
        let bytes = self.memory.read(self.address_of(name, member, at)?, 4)?;
        Ok(u32::from_ne_bytes(bytes.try_into().expect("four bytes")))
    }

    /// The address of a member of the structure at `at`.
    pub fn address_of(&self, name: &'static str, member: &str, at: u64) -> Result<u64> {
        Ok(at + self.offset(name, member)?)
    }

    /// Where a member begins, in bytes from the beginning of its structure.
    fn offset(&self, name: &'static str, member: &str) -> Result<u64> {
        let place = self.place(name, member)?;
        match place.bits == 0 && place.bit.is_multiple_of(8) {
            true => Ok((place.bit / 8) as u64),
            false => Err(unknown(name, member)),
        }
    }

    /// Whether this kernel's structure has the member.
    pub fn has(&self, name: &'static str, member: &str) -> bool {
        self.layout.member(name, member).is_some()
    }

    /// What a kind of files keeps for itself in a `struct file`.
    pub fn private(&self, file: u64) -> Result<u64> {
        self.word_of("file", "private_data", file)
    }

    /// The number by which the thread knows itself whose `task_struct` this is; none where it has
    /// ended.
    pub fn tid(&self, task: u64) -> Result<Option<i32>> {
        match self.word_of("task_struct", "thread_pid", task)? {
            0 => Ok(None),
            pid => self.number(pid).map(Some),
        }
    }

    /// The number by which a task knows itself whose `struct pid` this is, also when it has ended.
    pub fn number(&self, pid: u64) -> Result<i32> {
        let pid = self.read("pid", pid)?;
        let level = u64::from(pid.half("level")?);
        let upid = pid.address("numbers")? + level * self.size("upid")?;
        let upid = self.read("upid", upid)?;
        Ok(upid.half("nr")?.cast_signed())
    }

    /// The address of the `mm_struct` of a process.
    pub fn memory_of(&self, process: &Process) -> Result<u64> {
        let memory = process.open("mem")?;
        self.private(self.file(memory.as_fd())?)
    }

    /// The `task_struct` of the thread of a process that counts as the owner of its memory:
    /// mostly its leader.
    pub fn owner(&self, process: &Process) -> Result<Structure<'_>> {
        let owner = self.word_of("mm_struct", "owner", self.memory_of(process)?)?;
        self.read("task_struct", owner)
    }

    /// The size of a structure in bytes.
    pub fn size(&self, name: &'static str) -> Result<u64> {
        let size = self.layout.size(name);
        size.map(|size| size as u64)
            .ok_or_else(|| unknown(name, ""))
    }

    fn place(&self, name: &'static str, member: &str) -> Result<Member> {
        let place = self.layout.member(name, member);
        place.ok_or_else(|| unknown(name, member))
    }
}

impl<'a> Structure<'a> {
    /// A member of eight bytes.
    pub fn word(&self, member: &str) -> Result<u64> {
        self.bytes(member).map(u64::from_ne_bytes)
    }

    /// A member of eight bytes that not every kernel has; 0 where it has none.
    pub fn word_if_any(&self, member: &str) -> Result<u64> {
        match self.kernel.layout.member(self.name, member) {
            Some(_) => self.word(member),
            None => Ok(0),
        }
    }

    /// A member of four bytes.
    pub fn half(&self, member: &str) -> Result<u32> {
        self.bytes(member).map(u32::from_ne_bytes)
    }

    /// A signed member of two bytes.
    pub fn short(&self, member: &str) -> Result<i16> {
        self.bytes(member).map(i16::from_ne_bytes)
    }

    /// A member of one byte.
    pub fn byte(&self, member: &str) -> Result<u8> {
        self.bytes(member).map(|[byte]: [u8; 1]| byte)
    }

    /// Whether a bit field of one bit is set.
    pub fn bit(&self, member: &str) -> Result<bool> {
        let place = self.kernel.place(self.name, member)?;
        let byte = self.bytes.get(place.bit / 8);
        let byte = byte.filter(|_| place.bits == 1);
        let byte = byte.ok_or_else(|| unknown(self.name, member))?;
        Ok(byte >> (place.bit % 8) & 1 != 0)
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// The address of a member.
    pub fn address(&self, member: &str) -> Result<u64> {
        self.kernel.address_of(self.name, member, self.at)
    }

    /// The structures of a list, `most` at the most, by the member of each that links it: from its
    /// head here on, until it ends or comes back to its head.
    pub fn listed(
        &self,
        head: &str,
        (name, link): (&'static str, &str),
        most: usize,
    ) -> Result<Vec<Structure<'a>>> {
        let (end, mut at) = (self.address(head)?, self.word(head)?);
        let mut listed = Vec::new();
        for _ in 0..most {
            if at == 0 || at == end {
                return Ok(listed);
            }
            let one = self
                .kernel
                .read(name, self.kernel.around(name, link, at)?)?;
            at = one.word(link)?;
            listed.push(one);
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("the list {head} does not end"),
        ))
    }

    /// Whether a `struct list_head` has no members.
    pub fn is_empty_list(&self, member: &str) -> Result<bool> {
        Ok(self.word(member)? == self.address(member)?)
    }

    fn bytes<const N: usize>(&self, member: &str) -> Result<[u8; N]> {
        let at = self.kernel.offset(self.name, member)? as usize;
        let bytes = self.bytes.get(at..at + N);
        let bytes = bytes.ok_or_else(|| unknown(self.name, member))?;
        Ok(bytes.try_into().expect("as many bytes"))
    }
}

fn unknown(name: &str, member: &str) -> Error {
    let what = format!("this kernel has no {name}.{member}");
    Error::new(ErrorKind::Unsupported, what)
}
