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
}

impl What {
    /// All kinds.
    pub const ALL: [Self; 4] = [
        Self::Descriptors,
        Self::Directories,
        Self::SemaphoreUndo,
        Self::IoContext,
    ];

    /// The flag of clone(2), and of unshare(2) but for an I/O context, which nobody can leave.
    pub const fn flag(self) -> u64 {
        match self {
            Self::Directories => 0x200,
            Self::Descriptors => 0x400,
            Self::SemaphoreUndo => 0x4_0000,
            Self::IoContext => 0x8000_0000,
        }
    }

    /// What it is called, and the name of its flag.
    pub const fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::Descriptors => ("descriptor table", "CLONE_FILES"),
            Self::Directories => ("working directory and umask", "CLONE_FS"),
            Self::SemaphoreUndo => ("semaphore undo list", "CLONE_SYSVSEM"),
            Self::IoContext => ("I/O context", "CLONE_IO"),
        }
    }
}
