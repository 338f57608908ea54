//! Numbers of descriptions.

/// Number of an open file description in an image, from 0 in the order of the dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DescriptionId(pub u32);
