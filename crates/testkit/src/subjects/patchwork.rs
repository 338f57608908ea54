//! Memory that a program has mapped at once and the kernel keeps apart: single pages of every
//! protection among pages of another one, written before, and memory that does not count as
//! committed (MAP_NORESERVE) beside memory that does, half of it advised. Argument: the size of
//! each of the two in MiB.
//!
//! `check` answers "right" while each page holds the word that was written.
use rustix::mm::{MapFlags, ProtFlags};

use super::{Control, Failure, not_understood, number};
use crate::calls::Mapping;

const PAGE_BYTES: usize = 4096;
const MADV_NOHUGEPAGE: i32 = 15;
/// Every how many pages one has another protection.
const EVERY: usize = 89;
const PROT_READ: i32 = 1;
/// How many pairs are mapped at most.
const TRIES: usize = 8;
/// PROT_READ, PROT_WRITE and PROT_EXEC in all ways but the usual one.
const PROTECTIONS: [i32; 7] = [0, 1, 2, 4, 5, 6, 7];

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let bytes = (number(arguments, 0, 16)? as usize) << 20;
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // Where a hole has room for one of them alone, they are not neighbours: it stays filled.
    let mut apart = Vec::new();
    let (plain, unreserved) = loop {
        let plain = Mapping::anonymous(bytes, both, MapFlags::PRIVATE)?;
        let unreserved = Mapping::anonymous(bytes, both, MapFlags::PRIVATE | MapFlags::NORESERVE)?;
        if plain.address().abs_diff(unreserved.address()) == bytes as u64 {
            break (plain, unreserved);
        }
        apart.push((plain, unreserved));
        if apart.len() == TRIES {
            return Err("the kernel did not map one beside the other".into());
        }
    };
    for page in 0..bytes / PAGE_BYTES {
        plain.store(page * PAGE_BYTES, page as u64 + 1);
        unreserved.store(page * PAGE_BYTES, !(page as u64));
    }
    for (page, protection) in patches(bytes) {
        plain.protect(page..page + PAGE_BYTES, protection)?;
    }
    unreserved.advise(0..bytes / 2, MADV_NOHUGEPAGE)?;
    control.serve(|question| match question.verb.as_str() {
        "check" => check(&plain, &unreserved),
        _ => not_understood(question),
    })
}

/// Where the pages are that have a protection of their own, and which.
fn patches(bytes: usize) -> impl Iterator<Item = (usize, i32)> {
    let pages = (EVERY..bytes / PAGE_BYTES).step_by(EVERY);
    pages
        .map(|page| page * PAGE_BYTES)
        .zip(PROTECTIONS.into_iter().cycle())
}

fn check(plain: &Mapping, unreserved: &Mapping) -> Result<String, Failure> {
    let bytes = plain.bytes();
    for (page, _) in patches(bytes) {
        plain.protect(page..page + PAGE_BYTES, PROT_READ)?;
    }
    let is_wrong = |page: &usize| {
        let (at, number) = (page * PAGE_BYTES, *page as u64);
        plain.load(at) != number + 1 || unreserved.load(at) != !number
    };
    let wrong = (0..bytes / PAGE_BYTES).find(is_wrong);
    for (page, protection) in patches(bytes) {
        plain.protect(page..page + PAGE_BYTES, protection)?;
    }
    Ok(wrong.map_or("right".into(), |page| format!("page {page} is another one")))
}
