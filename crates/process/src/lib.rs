//! Process trees: freeze, collect, drain; plan, build, inject, run.
#![forbid(unsafe_code)]
