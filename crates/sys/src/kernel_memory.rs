//! The running kernel's own memory, read through a program that the kernel itself checks and runs:
//! bpf(2), of the type `BPF_PROG_TYPE_SYSCALL`.

use std::io::{self, Error};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// How many bytes come at a time.
const PIECE_BYTES: usize = 256;

/// Reads the kernel's memory.
#[derive(Debug)]
pub struct KernelMemory {
    program: OwnedFd,
}

/// One instruction: `struct bpf_insn`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    value: i32,
}

pub(crate) const fn instruction(
    code: u8,
    to: u8,
    from: u8,
    offset: i16,
    value: i32,
) -> Instruction {
    Instruction {
        code,
        registers: to | from << 4,
        offset,
        value,
    }
}

/// How many pointers can be followed before bytes are read.
const STEPS: usize = 8;
/// Where the context has the words of the steps, and the address after each, in bytes.
const WORDS_AT: usize = 16;
const ADDRESSES_AT: usize = PIECE_BYTES;
const CONTEXT_BYTES: usize = PIECE_BYTES + 8 * STEPS;

const MOVE: u8 = 0xbf;
const MOVE_VALUE: u8 = 0xb7;
const ADD: u8 = 0x0f;
const ADD_VALUE: u8 = 0x07;
const AND: u8 = 0x5f;
const AND_VALUE: u8 = 0x57;
const XOR: u8 = 0xaf;
const LOAD: u8 = 0x79;
const STORE_VALUE: u8 = 0x7a;
const STORE: u8 = 0x7b;
const JUMP_IF: u8 = 0x15;
const JUMP_UNLESS: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const CURRENT_TASK: i32 = 35;
const READ_KERNEL: i32 = 113;
/// The register of the program's own memory.
const FRAME: u8 = 10;

/// The program. Its context begins with an address, 0 for that of the calling thread's
/// `task_struct`; then come how many bytes are wanted, and two words for each of [`STEPS`] steps:
/// the number that is added to the address, and a mask of the bits of the pointer there that make
/// the next address, all or none. The program leaves the bytes there in the context; where none are
/// wanted, the address itself. It returns 0, or an error for an address where nothing is.
fn program() -> Vec<Instruction> {
    const WORDS: i16 = (PIECE_BYTES / 8) as i16;
    let piece = PIECE_BYTES as i32;
    let mut program = vec![
        instruction(MOVE, 6, 1, 0, 0),
        instruction(LOAD, 7, 6, 0, 0),
        instruction(JUMP_UNLESS, 7, 0, 2, 0),
        instruction(CALL, 0, 0, 0, CURRENT_TASK),
        instruction(MOVE, 7, 0, 0, 0),
    ];
    program.extend((0..STEPS as i16).flat_map(step));
    program.extend([
        instruction(LOAD, 2, 6, 8, 0),
        instruction(JUMP_IF, 2, 0, 8 + 3 * WORDS, 0),
        instruction(MOVE, 3, 7, 0, 0),
        instruction(ADD_VALUE, 2, 0, 0, -1),
        instruction(AND_VALUE, 2, 0, 0, piece - 1),
        instruction(ADD_VALUE, 2, 0, 0, 1),
    ]);
    for word in 0..WORDS {
        let at = 8 * word - PIECE_BYTES as i16;
        program.push(instruction(STORE_VALUE, FRAME, 0, at, 0));
    }
    program.push(instruction(MOVE, 1, FRAME, 0, 0));
    program.push(instruction(ADD_VALUE, 1, 0, 0, -piece));
    program.push(instruction(CALL, 0, 0, 0, READ_KERNEL));
    for word in 0..WORDS {
        let at = 8 * word;
        program.push(instruction(LOAD, 1, FRAME, at - PIECE_BYTES as i16, 0));
        program.push(instruction(STORE, 6, 1, at, 0));
    }
    program.extend([
        instruction(EXIT, 0, 0, 0, 0),
        instruction(STORE, 6, 7, 0, 0),
        instruction(MOVE_VALUE, 0, 0, 0, 0),
        instruction(EXIT, 0, 0, 0, 0),
    ]);
    program
}

/// A step from the address in register 7 to the next one, by two words of the context in register
/// 6, which gets the address as well.
///
/// The kernel checks a program once for each way through it, so the steps have none: a step that is
/// not wanted reads as well, and its mask keeps the address. A read that fails gives address 0.
fn step(step: i16) -> [Instruction; 13] {
    let word = WORDS_AT as i16 + 16 * step;
    let address = ADDRESSES_AT as i16 + 8 * step;
    [
        instruction(LOAD, 8, 6, word, 0),
        instruction(MOVE, 3, 7, 0, 0),
        instruction(ADD, 3, 8, 0, 0),
        instruction(MOVE, 1, FRAME, 0, 0),
        instruction(ADD_VALUE, 1, 0, 0, -8),
        instruction(MOVE_VALUE, 2, 0, 0, 8),
        instruction(CALL, 0, 0, 0, READ_KERNEL),
        instruction(LOAD, 1, FRAME, -8, 0),
        instruction(LOAD, 2, 6, word + 8, 0),
        instruction(XOR, 1, 7, 0, 0),
        instruction(AND, 1, 2, 0, 0),
        instruction(XOR, 7, 1, 0, 0),
        instruction(STORE, 6, 7, address, 0),
    ]
}

/// A short program for these steps alone, from the calling thread's `task_struct` on. It leaves the
/// word to which they lead in its context: 0 where a pointer leads nowhere.
fn short_program(steps: &[u32]) -> Vec<Instruction> {
    let mut program = vec![
        instruction(MOVE, 6, 1, 0, 0),
        instruction(CALL, 0, 0, 0, CURRENT_TASK),
    ];
    let mut address = 0;
    for step in steps {
        program.extend([
            instruction(MOVE, 3, address, 0, 0),
            instruction(ADD_VALUE, 3, 0, 0, step.cast_signed()),
            instruction(MOVE, 1, FRAME, 0, 0),
            instruction(ADD_VALUE, 1, 0, 0, -8),
            instruction(MOVE_VALUE, 2, 0, 0, 8),
            // A read that fails leaves 0, and the next one fails as well.
            instruction(CALL, 0, 0, 0, READ_KERNEL),
            instruction(LOAD, 1, FRAME, -8, 0),
        ]);
        address = 1;
    }
    program.extend([
        instruction(STORE, 6, 1, 0, 0),
        instruction(MOVE_VALUE, 0, 0, 0, 0),
        instruction(EXIT, 0, 0, 0, 0),
    ]);
    program
}

/// The word to which some pointers lead from the calling thread's `task_struct` on: each step adds
/// a number to the address before the word there becomes the address. 0 where one leads nowhere.
///
/// That takes a third of the time of [`KernelMemory::open`], for one look.
///
/// # Errors
/// Those of [`KernelMemory::open`]; `EINVAL` without a step.
pub fn own_word(steps: &[u32]) -> io::Result<u64> {
    if steps.is_empty() {
        return Err(errno(libc::EINVAL));
    }
    let mut word = [0; 8];
    run(&load(&short_program(steps))?, &mut word)?;
    Ok(u64::from_ne_bytes(word))
}

/// The end of a way of pointers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walk {
    /// The bytes there.
    pub bytes: Vec<u8>,
    /// The address after each step.
    pub addresses: Vec<u64>,
}

/// Has bpf(2) done what a command asks for.
pub(crate) fn bpf(command: libc::c_int, attributes: &mut [u64]) -> io::Result<i64> {
    let (pointer, len) = (attributes.as_mut_ptr(), size_of_val(attributes));
    // SAFETY: the attributes live for the call, and so does what the callers have them point at.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, pointer, len) };
    match result {
        ..0 => Err(Error::last_os_error()),
        result => Ok(result),
    }
}

/// Loads a program that is called with some bytes, and may read the kernel's memory.
pub(crate) fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    const LOAD: libc::c_int = 5;
    const TYPE_SYSCALL: u64 = 31;
    const SLEEPABLE: u64 = 1 << 4;
    // The helper that reads wants a program that may be under the GPL, too.
    let license = c"Dual MIT/GPL";
    let count = program.len() as u64;
    let mut attributes = [
        TYPE_SYSCALL | count << 32,
        program.as_ptr() as u64,
        license.as_ptr() as u64,
        // No log; the kernel's version does not matter.
        0,
        0,
        SLEEPABLE << 32,
    ];
    // The check of a program ends where a signal comes meanwhile.
    let program = loop {
        match bpf(LOAD, &mut attributes) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {}
            loaded => break loaded? as i32,
        }
    };
    // SAFETY: the kernel just returned this descriptor and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(program) })
}

/// Runs a loaded program with a piece of bytes, which it may change; gives what it returned.
pub(crate) fn run(program: &OwnedFd, piece: &mut [u8]) -> io::Result<u32> {
    const TEST_RUN: libc::c_int = 10;
    let mut attributes = [0; 10];
    attributes[0] = u64::from(program.as_raw_fd().cast_unsigned());
    attributes[5] = piece.len() as u64;
    attributes[6] = piece.as_mut_ptr() as u64;
    bpf(TEST_RUN, &mut attributes)?;
    Ok(attributes[0].wrapping_shr(32) as u32)
}

fn errno(number: i32) -> Error {
    Error::from_raw_os_error(number)
}

impl KernelMemory {
    /// Loads the program.
    ///
    /// # Errors
    /// `EPERM` without `CAP_BPF` and `CAP_PERFMON`; `ENOSYS`; `EINVAL` where the kernel may not be
    /// looked into (kernel_lockdown(7)) or does not know this type.
    pub fn open() -> io::Result<Self> {
        let program = load(&program())?;
        Ok(Self { program })
    }

    /// Reads `len` bytes from `address` on.
    ///
    /// # Errors
    /// `EFAULT` where nothing is.
    pub fn read(&self, address: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let count = (len - bytes.len()).min(PIECE_BYTES);
            let at = address.checked_add(bytes.len() as u64);
            let at = at
                .filter(|at| *at != 0)
                .ok_or_else(|| errno(libc::EFAULT))?;
            bytes.extend(self.walk(at, &[], count)?.bytes);
        }
        Ok(bytes)
    }

    /// Reads `len` bytes, 1 to 256, where a way of pointers leads: each step adds a number to the
    /// address, from `address` on, and takes the pointer that is there. Address 0 is that of the
    /// calling thread's `task_struct`. That is one call.
    ///
    /// # Errors
    /// `EFAULT` where a pointer leads nowhere; `EINVAL` for more than 8 steps, or no or too many
    /// bytes.
    pub fn walk(&self, address: u64, steps: &[u64], len: usize) -> io::Result<Walk> {
        if len == 0 || len > PIECE_BYTES {
            return Err(errno(libc::EINVAL));
        }
        let context = self.run(address, steps, len as u64)?;
        let addresses = context[ADDRESSES_AT..].as_chunks::<8>().0.iter();
        let addresses = addresses.map(|word| u64::from_ne_bytes(*word));
        Ok(Walk {
            bytes: context[..len].to_vec(),
            addresses: addresses.take(steps.len()).collect(),
        })
    }

    /// The address to which a way of pointers leads, by steps as those of [`KernelMemory::walk`].
    ///
    /// # Errors
    /// `EFAULT` where a pointer leads nowhere, or is 0; `EINVAL` for more than 8 steps.
    pub fn address(&self, address: u64, steps: &[u64]) -> io::Result<u64> {
        let context = self.run(address, steps, 0)?;
        match u64::from_ne_bytes(context[..8].try_into().expect("a word")) {
            0 => Err(errno(libc::EFAULT)),
            address => Ok(address),
        }
    }

    /// Runs the program; gives its context.
    fn run(&self, address: u64, steps: &[u64], len: u64) -> io::Result<[u8; CONTEXT_BYTES]> {
        if steps.len() > STEPS {
            return Err(errno(libc::EINVAL));
        }
        let mut context = [0; CONTEXT_BYTES];
        context[..8].copy_from_slice(&address.to_ne_bytes());
        context[8..16].copy_from_slice(&len.to_ne_bytes());
        for (step, words) in steps.iter().zip(context[WORDS_AT..].chunks_exact_mut(16)) {
            words[..8].copy_from_slice(&step.to_ne_bytes());
            words[8..].copy_from_slice(&u64::MAX.to_ne_bytes());
        }
        match run(&self.program, &mut context)? {
            0 => Ok(context),
            _ => Err(errno(libc::EFAULT)),
        }
    }

    /// Reads a word.
    ///
    /// # Errors
    /// As [`KernelMemory::read`].
    pub fn word(&self, address: u64) -> io::Result<u64> {
        let bytes = self.read(address, 8)?;
        Ok(u64::from_ne_bytes(bytes.try_into().expect("a word")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::btf::Types;

    /// None where the kernel lets nobody look. A program that it finds wrong (`EACCES`) is a fault.
    fn looked_into() -> Option<(KernelMemory, Types)> {
        let memory = KernelMemory::open();
        if let Err(error) = &memory {
            assert_ne!(error.raw_os_error(), Some(libc::EACCES), "{error}");
        }
        let both = memory.and_then(|memory| Ok((memory, Types::of_kernel()?)));
        both.inspect_err(|error| eprintln!("skipped: {error}")).ok()
    }

    #[test]
    fn this_task_finds_itself() {
        let Some((memory, types)) = looked_into() else {
            return;
        };
        let task = memory.address(0, &[]).expect("its address");
        for len in [8, 255, 256, 257, 3000] {
            assert_eq!(memory.read(task, len).expect("it is there").len(), len);
        }
        let whole = memory.read(task, 3000).expect("it is there");
        let at = types.member("task_struct", "pid").expect("a member").bit / 8;
        let bytes = memory.read(task + at as u64, 4).expect("it is there");
        let tid = i32::from_ne_bytes(bytes.try_into().expect("four bytes"));
        assert_eq!(tid, rustix::thread::gettid().as_raw_nonzero().get());
        assert_eq!(whole[at..at + 4], tid.to_ne_bytes());
        let error = memory.read(4096, 8).expect_err("nothing is there");
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }

    #[test]
    fn short_program_finds_the_word_that_the_long_one_finds() {
        let Some((memory, types)) = looked_into() else {
            return;
        };
        let at = |name, path| types.member(name, path).expect("a member").bit / 8;
        let leader = at("task_struct", "group_leader");
        let way = [leader, leader, at("task_struct", "start_time")];
        let long = memory.walk(0, &way.map(|step| step as u64)[..2], 256);
        let long = long.expect("it is there").addresses[1] + way[2] as u64;
        let short = own_word(&way.map(|step| step as u32)).expect("a look");
        assert_eq!(short, memory.word(long).expect("it is there"));
        assert_ne!(short, 0);
        // A number is no pointer.
        let pid = at("task_struct", "pid") as u32;
        assert_eq!(own_word(&[pid, 0, 0]).expect("a look"), 0);
        let error = own_word(&[]).expect_err("no step");
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn pointers_are_followed_in_one_call() {
        let Some((memory, types)) = looked_into() else {
            return;
        };
        let at = |name, path| types.member(name, path).expect("a member").bit as u64 / 8;
        let task = memory.address(0, &[]).expect("its address");
        let leader = at("task_struct", "group_leader");
        let real = at("task_struct", "real_cred");
        let uid = at("cred", "uid") as usize;
        let own = rustix::process::getuid().as_raw();
        for from in [task, 0] {
            let way = [leader, leader, real];
            let walk = memory.walk(from, &way, 64).expect("it is there");
            let seen = u32::from_ne_bytes(walk.bytes[uid..uid + 4].try_into().expect("four bytes"));
            assert_eq!(seen, own);
            let address = |steps| memory.address(from, &way[..steps]).expect("it is there");
            assert_eq!(walk.addresses, [address(1), address(2), address(3)]);
        }
        // No step is as a read.
        let whole = memory.walk(task, &[], 256).expect("it is there");
        assert_eq!(whole.bytes.len(), 256);
        assert!(whole.addresses.is_empty());
        // As many steps as there can be, and one back: the address of the address.
        memory
            .walk(task, &[leader; 8], 8)
            .expect("the leader is there");
        let back = memory.walk(task + leader + 64, &[64u64.wrapping_neg()], 8);
        back.expect("the leader is there");
        let nowhere = 4096u64.wrapping_sub(task);
        for steps in [&[nowhere][..], &[nowhere, 0], &[0, 0, nowhere, leader]] {
            let error = memory.walk(task, steps, 8).expect_err("nowhere");
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{steps:?}");
            let error = memory.address(task, steps).expect_err("nowhere");
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT), "{steps:?}");
        }
        for (steps, len) in [(9, 8), (0, 0), (0, 257)] {
            let error = memory.walk(task, &vec![0; steps], len);
            let error = error.expect_err("too much");
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        }
    }
}
