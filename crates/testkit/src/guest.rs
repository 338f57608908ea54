//! A virtual machine without an operating system, which fills its memory in ring 3 and verifies it.
use std::io::{Error, Result};
use std::marker::PhantomData;

use kvm_bindings::{kvm_segment, kvm_sregs};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::calls::Mapping;
use crate::calls::guest::{code, lend};

/// The serial port.
const PORT: u16 = 0x3f8;
/// What words are multiplied with, unless they are to be zero.
const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;

/// Where the guest has its tables and its code: behind all memory. They stand there in pages of
/// their own.
const BOOT: u64 = 1 << 30;
const BOOT_BYTES: usize = 0x8000;
const PDPT: u64 = 0x1000;
const LOW: u64 = 0x2000;
const HIGH: u64 = 0x3000;
const TSS: u64 = 0x4000;
const CODE: u64 = 0x6000;
/// Where the map of ports begins in a TSS, which is all zeros: each is allowed.
const PORTS: u64 = 104;
/// Bytes of it: ports up to 0x7ff, and the one at its end.
const PORTS_BYTES: u64 = 0x100;

/// What a word of a guest's memory holds that was filled from `seed`.
#[must_use]
pub const fn word(addr: u64, seed: u64) -> u64 {
    (addr ^ seed).wrapping_mul(FACTOR)
}

/// What a guest is to do with a part of its memory, which begins at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Fill it from a seed.
    Fill(u64),
    /// Look whether that is what it holds.
    Verify(u64),
    /// Look whether it is zero.
    VerifyZero,
}

/// A machine with one processor, which stands still but in [`Guest::run`].
#[derive(Debug)]
pub struct Guest<'m> {
    vcpu: VcpuFd,
    _vm: VmFd,
    _boot: Mapping,
    memory: PhantomData<&'m Mapping>,
}

impl<'m> Guest<'m> {
    /// Makes a machine whose memory, from 0 on, is `memory`, of 1 GiB at the most.
    ///
    /// # Errors
    /// Those of KVM: `ENOENT` where there is no /dev/kvm.
    pub fn new(memory: &'m Mapping) -> Result<Self> {
        let vm = Kvm::new().and_then(|kvm| kvm.create_vm()).map_err(system)?;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let boot = Mapping::anonymous(BOOT_BYTES, both, MapFlags::PRIVATE)?;
        load(&boot);
        lend(&vm, 0, 0, memory)?;
        lend(&vm, 1, BOOT, &boot)?;
        let vcpu = vm.create_vcpu(0).map_err(system)?;
        let mut registers = vcpu.get_sregs().map_err(system)?;
        enter_ring_3(&mut registers);
        vcpu.set_sregs(&registers).map_err(system)?;
        Ok(Self {
            vcpu,
            _vm: vm,
            _boot: boot,
            memory: PhantomData,
        })
    }

    /// Has the guest do something with the bytes `from..to`; the address of a word that is not what
    /// it has to be, if there is one.
    ///
    /// # Errors
    /// Those of KVM; another where the guest stops in another way than by its report.
    pub fn run(&mut self, work: Work, from: u64, to: u64) -> Result<Option<u64>> {
        let (rcx, rdx, r8) = match work {
            Work::Fill(seed) => (0, seed, FACTOR),
            Work::Verify(seed) => (1, seed, FACTOR),
            Work::VerifyZero => (1, 0, 0),
        };
        let mut registers = self.vcpu.get_regs().map_err(system)?;
        registers.rip = BOOT + CODE;
        registers.rflags = 2;
        (registers.rdi, registers.rsi) = (from, to);
        (registers.rcx, registers.rdx, registers.r8) = (rcx, rdx, r8);
        self.vcpu.set_regs(&registers).map_err(system)?;
        let right = loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(PORT, [b'r'])) => break true,
                Ok(VcpuExit::IoOut(PORT, [b'w'])) => break false,
                Ok(VcpuExit::Intr) => {}
                Ok(exit) => {
                    let what = format!("the guest stopped with {exit:?}");
                    return Err(Error::other(what));
                }
                Err(errno) if errno.errno() == Errno::INTR.raw_os_error() => {}
                Err(errno) => return Err(system(errno)),
            }
        };
        let stopped = self.vcpu.get_regs().map_err(system)?.rdi;
        Ok((!right).then_some(stopped))
    }
}

fn system(errno: kvm_ioctls::Error) -> Error {
    Error::from_raw_os_error(errno.errno())
}

/// Writes the tables and the code.
fn load(boot: &Mapping) {
    // Present, writable, the user's; in the last level also touched, written, and of 2 MiB.
    let (table, page) = (7, 0xe7);
    let store = |at: u64, word: u64| boot.store(at as usize, word);
    store(0, (BOOT + PDPT) | table);
    store(PDPT, (BOOT + LOW) | table);
    store(PDPT + 8, (BOOT + HIGH) | table);
    for number in 0..512 {
        store(LOW + 8 * number, (number << 21) | page);
    }
    store(HIGH, BOOT | page);
    // Where the map of ports begins, the word at byte 102.
    store(TSS + 96, PORTS << 48);
    for (number, bytes) in code().chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        store(CODE + 8 * number as u64, u64::from_le_bytes(word));
    }
}

/// 64-bit code with the rights of a program.
fn enter_ring_3(registers: &mut kvm_sregs) {
    let segment = |selector, type_, long: bool| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl: 3,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        ..kvm_segment::default()
    };
    registers.cs = segment(0x1b, 11, true);
    let data = segment(0x23, 3, false);
    (registers.ss, registers.ds, registers.es) = (data, data, data);
    (registers.fs, registers.gs) = (data, data);
    registers.tr = kvm_segment {
        base: BOOT + TSS,
        limit: (PORTS + PORTS_BYTES) as u32,
        selector: 0x28,
        type_: 11,
        present: 1,
        ..kvm_segment::default()
    };
    // Protection, paging, and the coprocessor; physical addresses of more than 32 bits; long mode.
    registers.cr0 = 0x8000_0033;
    registers.cr3 = BOOT;
    registers.cr4 = 0x20;
    registers.efer = 0x500;
}
