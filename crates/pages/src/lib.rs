//! Pages from a source through one pipe to a sink.
#![forbid(unsafe_code)]
