//! The image: manifest, records, page runs, index, reader and writer.
#![forbid(unsafe_code)]
