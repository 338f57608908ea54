//! What processes may share by clone(2) beyond what fork(2) leaves them.

/// A kind of what is shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum What {
    /// The descriptor table.
    Descriptors,
    /// Working directory, root directory and umask.
    Directories,
    /// What is undone to semaphores when the last of those ends that share it.
    SemaphoreUndo,
    /// The I/O context: whose reads and writes a disk's scheduler takes for one's.
    IoContext,
    /// The memory, and all that belongs to it.
    Memory,
    /// What is done when signals come; only of those who share memory.
    Handlers,
}

impl What {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Descriptors,
        Self::Directories,
        Self::SemaphoreUndo,
        Self::IoContext,
        Self::Memory,
        Self::Handlers,
    ];

    /// The flag of clone(2), and of unshare(2) where it [can be left](Self::can_be_left).
    pub const fn flag(self) -> u64 {
        match self {
            Self::Memory => 0x100,
            Self::Directories => 0x200,
            Self::Descriptors => 0x400,
            Self::Handlers => 0x800,
            Self::SemaphoreUndo => 0x4_0000,
            Self::IoContext => 0x8000_0000,
        }
    }

    /// Whether who has it by clone(2) can have its own in its place, and run on.
    pub const fn can_be_left(self) -> bool {
        !matches!(self, Self::IoContext | Self::Memory | Self::Handlers)
    }

    /// What it is called, and the name of its flag.
    pub const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Descriptors => ("descriptor table", "CLONE_FILES"),
            Self::Directories => ("working directory and umask", "CLONE_FS"),
            Self::SemaphoreUndo => ("semaphore undo list", "CLONE_SYSVSEM"),
            Self::IoContext => ("I/O context", "CLONE_IO"),
            Self::Memory => ("memory", "CLONE_VM"),
            Self::Handlers => ("signal handlers", "CLONE_SIGHAND"),
        }
    }
}
