//! A program of 32 bits that a task starts, and asks whether it still knows how often it was asked.
use std::fs;
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::io::Errno;

use super::{StepResult, Task};
use crate::subjects::Failure;
use crate::wait;

/// Its file, in the subject's folder.
pub(crate) const NAME: &str = "program-32";
/// Where its code is, and where its data.
const CODE_AT: u32 = 0x0804_8000;
const DATA_AT: u32 = 0x0806_0000;
/// What it has of memory: of each number, 1 above the one that it was asked, it keeps a word.
const DATA_BYTES: u32 = 3 * 4096;
const HEADER_BYTES: u32 = 52 + 2 * 32;

/// Waits for four bytes, a number; adds 1, keeps it, and answers with it, until there is nobody
/// who could ask.
#[rustfmt::skip]
const CODE: [u8; 80] = [
    // mov $3, %eax (read); xor %ebx, %ebx; mov $DATA_AT, %ecx; mov $4, %edx; int $0x80
    0xb8, 3, 0, 0, 0, 0x31, 0xdb, 0xb9, 0, 0, 6, 8, 0xba, 4, 0, 0, 0, 0xcd, 0x80,
    // cmp $4, %eax; jne to the end
    0x83, 0xf8, 4, 0x75, 0x2f,
    // mov DATA_AT, %eax; inc %eax; mov %eax, DATA_AT
    0xa1, 0, 0, 6, 8, 0x40, 0xa3, 0, 0, 6, 8,
    // mov %eax, %ecx; and $0x3ff, %ecx; mov %eax, DATA_AT + 4(, %ecx, 8)
    0x89, 0xc1, 0x81, 0xe1, 0xff, 3, 0, 0, 0x89, 0x04, 0xcd, 4, 0, 6, 8,
    // mov $4, %eax (write); xor %ebx, %ebx; mov $DATA_AT, %ecx; mov $4, %edx; int $0x80
    0xb8, 4, 0, 0, 0, 0x31, 0xdb, 0xb9, 0, 0, 6, 8, 0xba, 4, 0, 0, 0, 0xcd, 0x80,
    // jmp to the beginning
    0xeb, 0xb9,
    // mov $1, %eax (exit); xor %ebx, %ebx; int $0x80
    0xb8, 1, 0, 0, 0, 0x31, 0xdb, 0xcd, 0x80,
];

/// The program as a file: elf(5).
fn file() -> Vec<u8> {
    const LOAD: u32 = 1;
    const READ_EXECUTE: u32 = 5;
    const READ_WRITE: u32 = 6;
    const PAGE_BYTES: u32 = 4096;
    let code_bytes = HEADER_BYTES + CODE.len() as u32;
    let mut bytes = b"\x7fELF\x01\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    // An executable for the i386; 52 bytes of header, two program headers, no sections.
    let halves = |bytes: &mut Vec<u8>, halves: &[u16]| {
        bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
    };
    let words = |bytes: &mut Vec<u8>, words: &[u32]| {
        bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    };
    halves(&mut bytes, &[2, 3]);
    words(&mut bytes, &[1, CODE_AT + HEADER_BYTES, 52, 0, 0]);
    halves(&mut bytes, &[52, 32, 2, 0, 0, 0]);
    let code = [CODE_AT, CODE_AT, code_bytes, code_bytes, READ_EXECUTE];
    let data = [DATA_AT, DATA_AT, 0, DATA_BYTES, READ_WRITE];
    for part in [code, data] {
        words(&mut bytes, &[LOAD, 0]);
        words(&mut bytes, &part);
        words(&mut bytes, &[PAGE_BYTES]);
    }
    bytes.extend(CODE);
    bytes
}

/// One that runs.
pub(super) struct Program32 {
    child: Child,
    line: UnixStream,
    asked: u32,
}

impl Program32 {
    /// Starts it; none where the kernel runs no such programs.
    fn start(folder: &Path) -> Result<Option<Self>, Failure> {
        let path = folder.join(NAME);
        if !path.exists() {
            let mut options = fs::File::options();
            let options = options.write(true).create_new(true).mode(0o755);
            options.open(&path)?.write_all(&file())?;
        }
        let (line, its) = UnixStream::pair()?;
        line.set_read_timeout(Some(wait::SOON))?;
        let mut command = Command::new(&path);
        command.stdin(Stdio::from(OwnedFd::from(its)));
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let no_format = Errno::NOEXEC.raw_os_error();
        match command.spawn() {
            Ok(child) => Ok(Some(Self {
                child,
                line,
                asked: 0,
            })),
            Err(error) if error.raw_os_error() == Some(no_format) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Insists that it answers as it must.
    pub fn answer(&mut self) -> StepResult {
        self.asked += 1;
        self.line.write_all(&self.asked.to_le_bytes())?;
        let mut told = [0; 4];
        io::Read::read_exact(&mut self.line, &mut told)?;
        let told = u32::from_le_bytes(told);
        match told == self.asked + 1 {
            true => Ok(()),
            false => Err(format!("a program of 32 bits says {told} to {}", self.asked).into()),
        }
    }

    /// Has it end, and waits for that.
    pub fn end(mut self) -> StepResult {
        self.line.shutdown(std::net::Shutdown::Both)?;
        // Somebody else may have waited for it.
        let _ = self.child.wait();
        Ok(())
    }
}

impl Task {
    pub(super) fn start_program(&mut self) -> StepResult {
        // The C library knows nothing of who was made by clone(2).
        if self.numbered.is_cloned {
            return Ok(());
        }
        let Some(mut started) = Program32::start(&self.folder)? else {
            return Ok(());
        };
        started.answer()?;
        self.programs.push(started);
        Ok(())
    }
}
