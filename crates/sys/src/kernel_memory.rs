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

/// The program: it is given [`PIECE_BYTES`], of which the first word is an address and the second
/// how many bytes are wanted, less 1; then come [`STEPS`] words, each 0 or one more than what is
/// added to the address before the pointer there becomes the address. It leaves in them what is
/// at the last address; for address 0, that of the calling task.
fn program() -> Vec<Instruction> {
    const MOVE: u8 = 0xbf;
    const MOVE_VALUE: u8 = 0xb7;
    const ADD_VALUE: u8 = 0x07;
    const AND_VALUE: u8 = 0x57;
    const STORE_VALUE: u8 = 0x7a;
    const LOAD: u8 = 0x79;
    const STORE: u8 = 0x7b;
    const JUMP: u8 = 0x05;
    const JUMP_IF: u8 = 0x15;
    const JUMP_UNLESS: u8 = 0x55;
    const ADD: u8 = 0x0f;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    const CURRENT_TASK: i32 = 35;
    const READ_KERNEL: i32 = 113;
    const WORDS: i16 = (PIECE_BYTES / 8) as i16;
    const FRAME: u8 = 10;
    let piece = PIECE_BYTES as i32;
    const STEP: i16 = 11;
    let steps = STEPS as i16;
    let mut program = vec![
        instruction(MOVE, 6, 1, 0, 0),
        instruction(LOAD, 7, 6, 0, 0),
        instruction(JUMP_UNLESS, 7, 0, 3, 0),
        instruction(CALL, 0, 0, 0, CURRENT_TASK),
        instruction(STORE, 6, 0, 0, 0),
        instruction(JUMP, 0, 0, steps * STEP + 8 + 3 * WORDS, 0),
    ];
    for step in 0..steps {
        let to_end = (steps - step - 1) * STEP + 7 + 3 * WORDS;
        program.extend([
            instruction(LOAD, 1, 6, 16 + 8 * step, 0),
            instruction(JUMP_IF, 1, 0, STEP - 2, 0),
            instruction(ADD, 7, 1, 0, 0),
            instruction(ADD_VALUE, 7, 0, 0, -1),
            instruction(MOVE, 1, FRAME, 0, 0),
            instruction(ADD_VALUE, 1, 0, 0, -8),
            instruction(MOVE_VALUE, 2, 0, 0, 8),
            instruction(MOVE, 3, 7, 0, 0),
            instruction(CALL, 0, 0, 0, READ_KERNEL),
            instruction(JUMP_UNLESS, 0, 0, to_end + 1, 0),
            instruction(LOAD, 7, FRAME, -8, 0),
        ]);
    }
    program.extend([
        instruction(MOVE, 3, 7, 0, 0),
        instruction(LOAD, 2, 6, 8, 0),
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
    program.push(instruction(EXIT, 0, 0, 0, 0));
    program.push(instruction(MOVE_VALUE, 0, 0, 0, 0));
    program.push(instruction(EXIT, 0, 0, 0, 0));
    program
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

    /// The address of the calling thread's `task_struct`.
    ///
    /// # Errors
    /// As bpf(2).
    pub fn own_task(&self) -> io::Result<u64> {
        let mut piece = [0; PIECE_BYTES];
        run(&self.program, &mut piece)?;
        Ok(u64::from_ne_bytes(piece[..8].try_into().expect("a word")))
    }

    /// Reads `len` bytes from `address` on.
    ///
    /// # Errors
    /// `EFAULT` where nothing is.
    pub fn read(&self, address: u64, len: usize) -> io::Result<Vec<u8>> {
        let fault = || Error::from_raw_os_error(libc::EFAULT);
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let count = (len - bytes.len()).min(PIECE_BYTES);
            let at = address.checked_add(bytes.len() as u64);
            let at = at.filter(|at| *at != 0).ok_or_else(fault)?;
            let mut piece = [0; PIECE_BYTES];
            piece[..8].copy_from_slice(&at.to_ne_bytes());
            piece[8..16].copy_from_slice(&(count as u64 - 1).to_ne_bytes());
            if run(&self.program, &mut piece)? != 0 {
                return Err(fault());
            }
            bytes.extend_from_slice(&piece[..count]);
        }
        Ok(bytes)
    }

    /// Reads `len` bytes, at most 256, where a way of pointers leads: each step adds a number to
    /// the address, from `address` on, and takes the pointer that is there. That is one call.
    ///
    /// # Errors
    /// `EFAULT` where a pointer leads nowhere; `EINVAL` for more than 8 steps, or no or too many
    /// bytes.
    pub fn follow(&self, address: u64, steps: &[u64], len: usize) -> io::Result<Vec<u8>> {
        let fault = |errno| Error::from_raw_os_error(errno);
        if steps.len() > STEPS || len == 0 || len > PIECE_BYTES {
            return Err(fault(libc::EINVAL));
        }
        if address == 0 {
            return Err(fault(libc::EFAULT));
        }
        let mut piece = [0; PIECE_BYTES];
        piece[..8].copy_from_slice(&address.to_ne_bytes());
        piece[8..16].copy_from_slice(&(len as u64 - 1).to_ne_bytes());
        for (step, word) in steps.iter().zip(piece[16..].chunks_exact_mut(8)) {
            word.copy_from_slice(&step.wrapping_add(1).to_ne_bytes());
        }
        match run(&self.program, &mut piece)? {
            0 => Ok(piece[..len].to_vec()),
            _ => Err(fault(libc::EFAULT)),
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

    #[test]
    fn this_task_finds_itself() {
        let (Ok(memory), Ok(types)) = (KernelMemory::open(), Types::of_kernel()) else {
            eprintln!("skipped: this system does not let the kernel be looked into");
            return;
        };
        let task = memory.own_task().expect("its address");
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
    fn pointers_are_followed_in_one_call() {
        let (Ok(memory), Ok(types)) = (KernelMemory::open(), Types::of_kernel()) else {
            eprintln!("skipped: this system does not let the kernel be looked into");
            return;
        };
        let at = |name, path| types.member(name, path).expect("a member").bit as u64 / 8;
        let task = memory.own_task().expect("its address");
        let (leader, group) = (
            at("task_struct", "group_leader"),
            at("task_struct", "real_cred"),
        );
        let uid = at("cred", "uid") as usize;
        let bytes = memory.follow(task, &[leader, leader, group], 64);
        let bytes = bytes.expect("it is there");
        let seen = u32::from_ne_bytes(bytes[uid..uid + 4].try_into().expect("four bytes"));
        assert_eq!(seen, rustix::process::getuid().as_raw());
        // No step is as a read.
        let whole = memory.follow(task, &[], 256).expect("it is there");
        assert_eq!(whole.len(), 256);
        // A step back: the address of the address.
        let back = memory.follow(task + leader + 64, &[64u64.wrapping_neg()], 8);
        back.expect("the leader is there");
        for (address, steps) in [(task, &[4096u64.wrapping_sub(task)][..]), (0, &[])] {
            let error = memory.follow(address, steps, 8).expect_err("nowhere");
            assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        }
        for (steps, len) in [(9, 8), (0, 0), (0, 257)] {
            let error = memory.follow(task, &vec![0; steps], len);
            let error = error.expect_err("too much");
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        }
    }
}
