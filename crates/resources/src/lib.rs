//! One file per kind of kernel object: how it is stored, dumped, planned and tested.
#![forbid(unsafe_code)]
