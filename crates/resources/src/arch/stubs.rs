//! Code that stands where a function of a vDSO stood.

use abi::Addr;
use sys::arch::{INT_80, SYSCALL};
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

/// A jump of 32-bit code, which reaches everything.
#[must_use]
pub fn jump_32(from: Addr, to: Addr) -> Vec<u8> {
    let mut patch = vec![0xe9]; // jmp rel32
    let distance = to.0.wrapping_sub(from.0.wrapping_add(5)) as u32;
    patch.extend(distance.to_le_bytes());
    patch
}

/// Functions of 32-bit code and the number of the system call that does the same.
const CALLS_32: &[(&str, u32)] = &[
    ("__vdso_clock_getres", 266),
    ("__vdso_clock_gettime", 265),
    ("__vdso_clock_gettime64", 403),
    ("__vdso_getcpu", 318),
    ("__vdso_gettimeofday", 78),
    ("__vdso_time", 13),
];

/// As [`call`], of 32-bit code, whose functions have their arguments on the stack.
#[must_use]
pub fn call_32(names: &[&str]) -> Vec<u8> {
    const NONE: [u8; 6] = [0xb8, 0xda, 0xff, 0xff, 0xff, 0xc3]; // mov eax, -38; ret
    let known = CALLS_32.iter().find(|(name, _)| names.contains(name));
    let Some((_, number)) = known else {
        return NONE.to_vec();
    };
    let mut patch = vec![0x53]; // push ebx
    patch.extend([0x8b, 0x5c, 0x24, 8]); // mov ebx, [esp + 8]
    patch.extend([0x8b, 0x4c, 0x24, 12]); // mov ecx, [esp + 12]
    patch.extend([0x8b, 0x54, 0x24, 16]); // mov edx, [esp + 16]
    patch.push(0xb8); // mov eax, number
    patch.extend(number.to_le_bytes());
    patch.extend(INT_80);
    patch.extend([0x5b, 0xc3]); // pop ebx; ret
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
