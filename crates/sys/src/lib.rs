//! The kernel as safe functions: every unsafe system call of Stillframe stands here.
//!
//! A module a subject; functions take and give owned or borrowed descriptors, never raw ones, and
//! return [`std::io::Error`], to which the caller adds what it was doing. What `rustix` offers
//! safely is called there directly.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod arch;
pub mod at_number;
pub mod boot;
pub mod bpf_map;
pub mod btf;
pub mod causes;
pub mod close;
pub mod core_scheduling;
pub mod dispositions;
pub mod ending;
pub mod epoll;
pub mod fanotify;
pub mod fcntl;
pub mod features;
pub mod fork;
pub mod freeze;
pub mod host;
pub mod identity;
pub mod inherited;
pub mod init;
pub mod inotify;
pub mod io_class;
pub mod job;
pub mod kcmp;
pub mod kernel_memory;
pub mod keys;
pub mod landlock;
pub mod launch;
pub mod ledger;
pub mod listener;
pub mod loop_device;
pub mod memfd;
pub mod mount_tree;
pub mod mountinfo;
pub mod mounts;
pub mod mqueue;
pub mod msg;
pub mod mutex;
pub mod namespace;
pub mod netlink;
pub mod new_file;
pub mod nft;
pub mod numbers;
pub mod own;
pub mod packet_ring;
pub mod pagemap;
pub mod per_cpu;
pub mod perf_event;
pub mod pidfd;
pub mod proc;
pub mod process;
pub mod procfs;
pub mod ptrace;
pub mod queue;
pub mod realtime;
pub mod restore_area;
pub mod ring;
pub mod sem;
pub mod shm;
pub mod signal;
pub mod signalfd;
pub mod socket;
pub mod spawn;
pub mod stand_in;
pub mod start;
pub mod tick;
pub mod timens;
pub mod timerfd;
pub mod tty;
pub mod tun;
pub mod uffd;

pub mod usage;
pub mod vdso;
pub mod vdso_32;
pub mod vm;
pub mod watchdog;
pub mod words;
pub mod world;
