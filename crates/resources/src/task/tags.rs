//! The numbers of the parts in images, 200 to 299: never reused, never changed.

/// Ids, groups, capabilities and securebits, by thread.
pub const CREDENTIALS: u16 = 200;
/// What is done with each signal, by process.
pub const ACTIONS: u16 = 201;
/// Signals sent to a thread, by thread.
pub const PENDING: u16 = 202;
/// Signals sent to a process, by process.
pub const SHARED_PENDING: u16 = 203;
/// The alternate signal stack, by thread.
pub const ALTSTACK: u16 = 204;
/// Interval timers, by process.
pub const ITIMERS: u16 = 205;
/// POSIX timers, by process.
pub const POSIX_TIMERS: u16 = 206;
/// The robust futex list, by thread.
pub const ROBUST: u16 = 207;
/// The area for restartable sequences, by thread.
pub const RSEQ: u16 = 208;
/// The word that is cleared at the thread's end, by thread.
pub const TID_ADDRESS: u16 = 209;
/// The name, by thread.
pub const COMM: u16 = 210;
/// The parent-death signal, by thread.
pub const PARENT_DEATH: u16 = 211;
/// Whether it is a child subreaper, by process.
pub const SUBREAPER: u16 = 212;
/// Whether it is dumpable, by thread.
pub const DUMPABLE: u16 = 213;
/// Whether it can gain privileges, by thread.
pub const NO_NEW_PRIVS: u16 = 214;
/// The execution domain, by thread.
pub const PERSONALITY: u16 = 215;
/// Resource limits, by process.
pub const LIMITS: u16 = 216;
/// Policy, nice value, priority, affinity, I/O priority and timer slack, by thread.
pub const SCHEDULING: u16 = 217;
/// The adjustment of its badness when memory runs out, by process.
pub const OOM: u16 = 218;
/// Whether it gets no transparent huge pages, by process.
pub const HUGE_PAGES: u16 = 219;
/// Whether writable memory can become executable, by process.
pub const MDWE: u16 = 220;
/// Whether its equal pages are merged, by process.
pub const MEMORY_MERGE: u16 = 221;
/// The machine-check policy, by thread.
pub const MACHINE_CHECK: u16 = 222;
/// Whether reading the time stamp counter is allowed, by thread.
pub const TIME_STAMP: u16 = 223;
/// Speculation controls, by thread.
pub const SPECULATION: u16 = 224;
/// Whether it is an I/O flusher, by thread.
pub const IO_FLUSHER: u16 = 225;
/// Never in an image: states that are refused.
pub const REFUSED: u16 = 226;
/// A call to be made before the thread gets its registers, by thread.
pub const REMAKE: u16 = 227;
/// The file mode creation mask, by process.
pub const UMASK: u16 = 228;
/// Whether the cpuid instruction is allowed, by thread.
pub const CPUID: u16 = 229;
/// Which mappings a core dump has, by process.
pub const CORE_FILTER: u16 = 230;
/// The nice value of a session as a whole, by process.
pub const AUTOGROUP: u16 = 231;
/// Where memory comes from on a machine of several nodes, by thread.
pub const MEMORY_POLICY: u16 = 232;
/// What it has registered for with membarrier(2), by process.
pub const MEMBARRIER: u16 = 233;
/// The user as whom it was logged in, by process.
pub const LOGIN_UID: u16 = 234;
/// Which system calls it may make, by thread.
pub const SECCOMP: u16 = 235;
/// What is undone to System V semaphores when it ends, by process.
pub const SEMAPHORES: u16 = 236;
/// Segments of 32-bit code, by thread.
pub const THREAD_AREAS: u16 = 237;
/// Never in an image: a table of segments, which is refused.
pub const LDT: u16 = 238;
/// The label that a security module has given it, by thread.
pub const SANDBOX: u16 = 239;
/// The session keyring, by process.
pub const KEYRINGS: u16 = 240;
/// How many slots of its own it has for futexes, by process.
pub const FUTEX_HASH: u16 = 241;
