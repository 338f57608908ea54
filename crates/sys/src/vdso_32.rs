//! The vDSO that the kernel gives to 32-bit programs, looked at in a child of this process.

use std::fs::File;
use std::io::{self, Read as _};

use abi::{Addr, Span};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::process::Process;

/// What a child has of it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The child's /proc/PID/maps, with no other vDSO in it.
    pub maps: Vec<u8>,
    /// The code, in whole pages.
    pub code: Vec<u8>,
}

/// Has a child change its vDSO for that of 32-bit programs, looks at it and ends it.
///
/// # Errors
/// [`io::ErrorKind::Unsupported`] where the kernel has none; as fork(2), and when the child cannot
/// be looked at.
pub fn look() -> io::Result<Seen> {
    let own = spans(&std::fs::read("/proc/self/maps")?);
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: the child makes nothing but system calls of its own and takes no lock, so it does
    // not matter what other threads hold.
    let pid = unsafe { libc::fork() };
    match pid {
        0 => change(&own, &writer),
        ..0 => return Err(io::Error::last_os_error()),
        _ => drop(writer),
    }
    let child = Pid::from_raw(pid).expect("the parent gets a pid above 0");
    let mut reader = File::from(reader);
    let seen = see(pid, &mut reader);
    let _ = kill_process(child, Signal::KILL);
    while let Err(rustix::io::Errno::INTR) = waitpid(Some(child), WaitOptions::empty()) {}
    seen
}

/// Changes the vDSO of this process, tells of it and waits for its end.
fn change(own: &[(Span, bool)], writer: &impl std::os::fd::AsFd) -> ! {
    const ARCH_MAP_VDSO_32: libc::c_long = abi::kernel::ARCH_MAP_VDSO_32 as libc::c_long;
    const PLACE: libc::c_long = 0x4000_0000;
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    for (span, _) in own {
        // SAFETY: from here on this process calls nothing that looks at the time.
        unsafe { libc::munmap(span.start.0 as *mut libc::c_void, span.bytes() as usize) };
    }
    // SAFETY: the kernel maps its vDSO where nothing else is.
    let mapped = unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_MAP_VDSO_32, PLACE) };
    if mapped > 0 && rustix::io::write(writer, b"+").is_ok() {
        loop {
            // SAFETY: pause waits for a signal and touches no memory.
            unsafe { libc::pause() };
        }
    }
    // SAFETY: ends this process, without anything that was the parent's.
    unsafe { libc::_exit(1) }
}

fn see(pid: i32, reader: &mut File) -> io::Result<Seen> {
    if reader.read(&mut [0])? == 0 {
        let what = "the kernel has no vDSO for 32-bit programs";
        return Err(io::Error::new(io::ErrorKind::Unsupported, what));
    }
    let maps = std::fs::read(format!("/proc/{pid}/maps"))?;
    let code = spans(&maps).into_iter().find(|(_, is_code)| *is_code);
    let (span, _) = code.ok_or(io::ErrorKind::UnexpectedEof)?;
    let mut code = vec![0; span.bytes() as usize];
    crate::vm::read_exact(&Process::new(pid), span.start, &mut code)?;
    Ok(Seen { maps, code })
}

/// The mappings of a vDSO in a /proc/PID/maps, and whether each is its code.
fn spans(maps: &[u8]) -> Vec<(Span, bool)> {
    let text = String::from_utf8_lossy(maps);
    let span = |line: &str| {
        let is_code = line.ends_with("[vdso]");
        if !is_code && !line.contains(" [vvar") {
            return None;
        }
        let (start, end) = line.split_once(' ')?.0.split_once('-')?;
        let address = |text: &str| u64::from_str_radix(text, 16).ok().map(Addr);
        let span = Span {
            start: address(start)?,
            end: address(end)?,
        };
        Some((span, is_code))
    };
    text.lines().filter_map(span).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_another_one_than_ours() {
        let seen = match look() {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => return,
            seen => seen.expect("it can be looked at"),
        };
        assert!(seen.code.starts_with(b"\x7fELF\x01"));
        let id = crate::vdso::build_id(&seen.code);
        assert!(id.is_some() && id != crate::vdso::own_build_id());
        assert!(spans(&seen.maps).len() > 1);
    }
}
