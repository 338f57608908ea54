//! What the kernel calls itself.
use std::sync::OnceLock;

use rustix::system::Uname;

/// What the kernel calls itself, asked once.
pub(crate) fn kernel() -> &'static Uname {
    static KERNEL: OnceLock<Uname> = OnceLock::new();
    KERNEL.get_or_init(rustix::system::uname)
}
