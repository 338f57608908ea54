//! The words exchanged with the blob: operations of a script, and the layout of its window.
#![forbid(unsafe_code)]
