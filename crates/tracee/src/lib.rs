//! A stopped process: its registers, its memory, batches of calls made inside it.
#![forbid(unsafe_code)]
