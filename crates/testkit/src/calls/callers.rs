//! Processes and threads that share memory with who made them, and make the calls they are told to.
//!
//! None of them uses the C library, which has one thread where they are several: they run the loop
//! of this file and nothing else.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::mm::{MapFlags, ProtFlags};

use super::Mapping;
use super::clone::{DESCRIPTORS, DIRECTORIES, MEMORY, SIBLING, THREAD};
use super::puppet::{futex_wait, futex_wake, raw_call};

const IDLE: u32 = 0;
const CALLING: u32 = 1;
const DONE: u32 = 2;

/// What is no system call: to read and write a word, and to make another one.
const LOAD: i64 = -1;
const STORE: i64 = -2;
const MAKE: i64 = -3;

const STACK_BYTES: u64 = 64 << 10;
const PAGE_BYTES: u64 = 4096;
const LOOK: Duration = Duration::from_millis(100);
const PATIENCE: Duration = Duration::from_secs(60);

/// What stands for one of them in the memory that all have.
#[repr(C)]
struct Words {
    state: AtomicU32,
    number: AtomicI64,
    args: [AtomicU64; 6],
    result: AtomicI64,
    /// For structures of calls.
    data: [AtomicU64; 16],
}

/// This process, number 0, and those that were made.
#[derive(Debug)]
pub struct Callers {
    words: Mapping,
    made: Cell<usize>,
    /// Where they have mapped something, and how many bytes.
    maps: RefCell<Vec<(usize, u64)>>,
}

impl Callers {
    /// Room for `count` of them.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn new(count: usize) -> io::Result<Self> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let bytes = count * size_of::<Words>();
        Ok(Self {
            words: Mapping::anonymous(bytes, both, MapFlags::SHARED)?,
            made: Cell::new(1),
            maps: RefCell::default(),
        })
    }

    fn words(&self, caller: usize) -> &'static Words {
        let at = self.address_of(caller) as usize;
        // SAFETY: within the mapping, which is never unmapped, as whoever was made uses it; all
        // fields are atomic.
        unsafe { &*std::ptr::with_exposed_provenance(at) }
    }

    fn address_of(&self, caller: usize) -> u64 {
        let at = caller * size_of::<Words>();
        assert!(at + size_of::<Words>() <= self.words.bytes(), "no room");
        self.words.address() + at as u64
    }

    /// Has `by` make the next one, which shares with it what `flags` say: of the constants of
    /// [`super::clone`]. Gives its pid.
    ///
    /// # Errors
    /// As clone(2).
    pub fn make(&self, by: usize, flags: u64) -> io::Result<i32> {
        const SHARING: u64 = THREAD | DIRECTORIES | DESCRIPTORS | SIBLING;
        let next = self.made.get();
        let signal = match flags & THREAD {
            THREAD => 0,
            _ => libc::SIGCHLD.cast_unsigned().into(),
        };
        // Who gets a copy goes on with the copy of the stack.
        let stack = match flags & MEMORY {
            0 => 0,
            _ => self.map(by, STACK_BYTES)? + STACK_BYTES,
        };
        let words = self.address_of(next);
        let made = self.call(by, MAKE, [flags & SHARING | signal, stack, words, 0, 0, 0])?;
        self.made.set(next + 1);
        Ok(i32::try_from(made).expect("a pid"))
    }

    /// Has one of them make a call.
    fn call(&self, caller: usize, number: i64, args: [u64; 6]) -> io::Result<u64> {
        let result = match caller {
            0 => perform(number, args),
            _ => self.ask(caller, number, args),
        };
        match result {
            -4095..0 => {
                let errno = i32::try_from(-result).expect("an errno");
                Err(io::Error::from_raw_os_error(errno))
            }
            result => Ok(result.cast_unsigned()),
        }
    }

    fn ask(&self, caller: usize, number: i64, args: [u64; 6]) -> i64 {
        let words = self.words(caller);
        words.number.store(number, Ordering::Relaxed);
        for (slot, arg) in words.args.iter().zip(args) {
            slot.store(arg, Ordering::Relaxed);
        }
        words.state.store(CALLING, Ordering::Release);
        futex_wake(&words.state);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = words.state.load(Ordering::Acquire);
            if state == DONE {
                words.state.store(IDLE, Ordering::Relaxed);
                return words.result.load(Ordering::Relaxed);
            }
            assert!(Instant::now() < deadline, "caller {caller} does not answer");
            futex_wait(&words.state, state, LOOK);
        }
    }

    /// Has one map memory of its own, where the kernel has room.
    ///
    /// # Errors
    /// As mmap(2).
    pub fn map(&self, caller: usize, bytes: u64) -> io::Result<u64> {
        let prot = (libc::PROT_READ | libc::PROT_WRITE).cast_unsigned();
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS).cast_unsigned();
        let args = [0, bytes, prot.into(), flags.into(), u64::MAX, 0];
        let at = self.call(caller, libc::SYS_mmap, args)?;
        self.maps.borrow_mut().push((at as usize, bytes));
        Ok(at)
    }

    /// Has one unmap what was mapped last.
    ///
    /// # Errors
    /// As munmap(2).
    ///
    /// # Panics
    /// When something else was.
    pub fn unmap(&self, caller: usize, at: u64) -> io::Result<()> {
        let last = self.maps.borrow_mut().pop().expect("something is mapped");
        assert_eq!(last.0 as u64, at, "it was not the last");
        let args = [at, last.1, 0, 0, 0, 0];
        self.call(caller, libc::SYS_munmap, args).map(drop)
    }

    /// Tells whether one has anything mapped at an address.
    ///
    /// # Errors
    /// As mincore(2).
    pub fn has(&self, caller: usize, at: u64) -> io::Result<bool> {
        let args = [at, PAGE_BYTES, self.data(caller), 0, 0, 0];
        match self.call(caller, libc::SYS_mincore, args) {
            Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => Ok(false),
            called => called.map(|_| true),
        }
    }

    fn check(&self, at: u64) {
        let maps = self.maps.borrow();
        let mut maps = maps
            .iter()
            .map(|(start, bytes)| *start as u64..*start as u64 + bytes);
        let is_there = maps.any(|range| range.contains(&at) && range.contains(&(at + 7)));
        assert!(is_there && at.is_multiple_of(8), "nothing is mapped there");
    }

    /// Reads a word that one has, in what was mapped.
    ///
    /// # Errors
    /// None that is known.
    pub fn load(&self, caller: usize, at: u64) -> io::Result<u64> {
        self.check(at);
        self.call(caller, LOAD, [at, 0, 0, 0, 0, 0])
    }

    /// Writes a word, below 2⁶³, to what was mapped.
    ///
    /// # Errors
    /// None that is known.
    pub fn store(&self, caller: usize, at: u64, value: u64) -> io::Result<()> {
        self.check(at);
        self.call(caller, STORE, [at, value, 0, 0, 0, 0]).map(drop)
    }

    /// Has one move the end of its heap (brk(2)) to an address, or nowhere with 0. Where it is.
    ///
    /// # Errors
    /// None.
    ///
    /// # Panics
    /// Below where it was at first: what is there may be in use.
    pub fn end_heap(&self, caller: usize, at: u64) -> io::Result<u64> {
        let now = self.call(caller, libc::SYS_brk, [0; 6])?;
        match at {
            0 => Ok(now),
            _ => {
                assert!(at + PAGE_BYTES >= now, "it is in use");
                self.call(caller, libc::SYS_brk, [at, 0, 0, 0, 0, 0])
            }
        }
    }

    /// Has one say with which number it tells handlers of SIGUSR2, which nobody sends, apart.
    ///
    /// # Errors
    /// As sigaction(2).
    pub fn handler(&self, caller: usize) -> io::Result<u64> {
        let at = self.data(caller);
        self.action(caller, [0, at])?;
        Ok(self.words(caller).data[0].load(Ordering::Relaxed))
    }

    /// Has one set that number.
    ///
    /// # Errors
    /// As sigaction(2).
    pub fn set_handler(&self, caller: usize, number: u64) -> io::Result<()> {
        const SA_RESTORER: u64 = 0x0400_0000;
        for (slot, word) in self
            .words(caller)
            .data
            .iter()
            .zip([number, SA_RESTORER, 0x1000, 0])
        {
            slot.store(word, Ordering::Relaxed);
        }
        self.action(caller, [self.data(caller), 0])
    }

    fn action(&self, caller: usize, [new, old]: [u64; 2]) -> io::Result<()> {
        let signal = libc::SIGUSR2.cast_unsigned().into();
        let args = [signal, new, old, 8, 0, 0];
        self.call(caller, libc::SYS_rt_sigaction, args).map(drop)
    }

    /// Ends one that was made, whose end nobody waits for here.
    pub fn end(&self, caller: usize) {
        let words = self.words(caller);
        words.number.store(libc::SYS_exit_group, Ordering::Relaxed);
        words.args[0].store(0, Ordering::Relaxed);
        words.state.store(CALLING, Ordering::Release);
        futex_wake(&words.state);
    }

    fn data(&self, caller: usize) -> u64 {
        self.words(caller).data.as_ptr() as u64
    }
}

/// The life of one that was made.
extern "C" fn obey(words: &Words) -> ! {
    loop {
        let state = words.state.load(Ordering::Acquire);
        if state == CALLING {
            let args = &words.args;
            let args = [&args[0], &args[1], &args[2], &args[3], &args[4], &args[5]];
            let args = args.map(|arg| arg.load(Ordering::Relaxed));
            let result = perform(words.number.load(Ordering::Relaxed), args);
            words.result.store(result, Ordering::Relaxed);
            words.state.store(DONE, Ordering::Release);
            futex_wake(&words.state);
        } else {
            futex_wait(&words.state, state, PATIENCE);
        }
    }
}

fn perform(number: i64, args: [u64; 6]) -> i64 {
    match number {
        LOAD => word(args[0]).load(Ordering::SeqCst).cast_signed(),
        STORE => {
            word(args[0]).store(args[1], Ordering::SeqCst);
            0
        }
        MAKE => make(args[0], args[1], args[2]),
        _ => raw_call(number, args),
    }
}

fn word<'a>(at: u64) -> &'a AtomicU64 {
    // SAFETY: what is mapped for words is only used as such, and atomically.
    unsafe { AtomicU64::from_ptr(std::ptr::with_exposed_provenance_mut(at as usize)) }
}

/// clone(2), after which the new one obeys the words at an address. It has a stack of its own, or a
/// copy of this one.
fn make(flags: u64, stack: u64, words: u64) -> i64 {
    let result: i64;
    // SAFETY: the new one never returns to here: it begins on an empty stack of its own, or below
    // what is used of a copy, and goes on in `obey`, which uses nothing that two threads of the C
    // library would have one each of.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "sub rsp, 1024",
            "and rsp, -16",
            "mov rdi, r12",
            "call {obey}",
            "ud2",
            "2:",
            obey = sym obey,
            inlateout("rax") libc::SYS_clone => result,
            in("rdi") flags, in("rsi") stack, in("rdx") 0_u64, in("r10") 0_u64, in("r8") 0_u64,
            in("r12") words,
            lateout("rcx") _, lateout("r11") _,
        );
    }
    result
}
