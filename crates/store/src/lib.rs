//! Opaque objects by name: a directory or memory.
#![forbid(unsafe_code)]
