//! The family of mappings: what a range of addresses refers to.
