//! Record numbers of this crate.

/// [`super::Tree`], one an image: version 2.
pub const TREE: u16 = 1;
/// [`super::ThreadState`], by the number of the thread.
pub const THREAD: u16 = 2;
/// [`super::Descriptors`], by the number of the task.
pub const DESCRIPTORS: u16 = 3;
/// [`super::Place`], by the number of the task.
pub const PLACE: u16 = 4;
/// [`crate::Statistics`], one an image.
pub const STATISTICS: u16 = 5;
/// [`crate::clocks::TreeClocks`], one an image.
pub const CLOCKS: u16 = 6;
/// [`resources::arch::xstate::Layout`], one an image.
pub const PROCESSOR: u16 = 7;
/// [`resources::arch::instructions::Instructions`], one an image.
pub const INSTRUCTIONS: u16 = 9;
/// Hard links that the dump made (`links`), one an image.
pub const LINKS: u16 = 8;
