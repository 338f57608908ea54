//! Code that stands where a function of a vDSO stood.

use abi::Addr;
use sys::arch::SYSCALL;
use syscalls::Sysno;

/// A jump from `from` to `to`: five bytes where it is near enough, else fourteen.
#[must_use]
pub fn jump(from: Addr, to: Addr, room_bytes: u64) -> Vec<u8> {
    const NEAR_BYTES: u64 = 5;
    let distance =
        to.0.wrapping_sub(from.0.wrapping_add(NEAR_BYTES))
            .cast_signed();
    let mut patch = Vec::with_capacity(14);
    match i32::try_from(distance) {
        Ok(distance) if room_bytes >= NEAR_BYTES => {
            patch.push(0xe9); // jmp rel32
            patch.extend(distance.to_le_bytes());
        }
        _ => {
            patch.extend([0xff, 0x25, 0, 0, 0, 0]); // jmp [rip]
            patch.extend(to.0.to_le_bytes());
        }
    }
    patch
}

/// Functions and the system call that does the same.
const CALLS: &[(&str, Sysno)] = &[
    ("__vdso_clock_getres", Sysno::clock_getres),
    ("__vdso_clock_gettime", Sysno::clock_gettime),
    ("__vdso_getcpu", Sysno::getcpu),
    ("__vdso_gettimeofday", Sysno::gettimeofday),
    ("__vdso_time", Sysno::time),
];

/// Code that makes the system call in the place of a function that the host lacks. Where there is
/// no such call the function says so (`ENOSYS`).
#[must_use]
pub fn call(names: &[&str]) -> Vec<u8> {
    const NONE: [u8; 8] = [0x48, 0xc7, 0xc0, 0xda, 0xff, 0xff, 0xff, 0xc3]; // mov rax, -38; ret
    if names.contains(&"__vdso_getrandom") {
        // Asked how its state has to be allocated (cmp r8, -1; je), it must not say that it did.
        let mut patch = vec![0x49, 0x83, 0xf8, 0xff, 0x74, 0x08];
        patch.extend(make(Sysno::getrandom));
        patch.extend(NONE);
        return patch;
    }
    let known = CALLS.iter().find(|(name, _)| names.contains(name));
    known.map_or_else(|| NONE.to_vec(), |(_, number)| make(*number))
}

/// `mov eax, number; syscall; ret`
fn make(number: Sysno) -> Vec<u8> {
    let mut patch = vec![0xb8];
    patch.extend((number as u32).to_le_bytes());
    patch.extend(SYSCALL);
    patch.push(0xc3);
    patch
}
