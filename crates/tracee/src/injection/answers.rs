//! What a batch leaves when it has ended.

use abi::{Header, Op, offset};

use super::{Batch, Outcome, Place};

/// Takes apart what the threads have left.
pub(super) fn outcomes(
    places: &[Place],
    batches: &[&dyn Batch],
    answers: &[Vec<u8>],
) -> Vec<Outcome> {
    let outcome = |((place, batch), bytes): ((&Place, &&dyn Batch), &Vec<u8>)| {
        let word =
            |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let count = batch.ops_bytes() / Op::BYTES - 1;
        let first = Header::BYTES + offset::RESULT;
        let results = (0..count).map(|op| word(first + op * Op::BYTES).cast_signed());
        let failed = word(offset::FAILED).checked_sub(place.ops.0);
        let data = (place.data.0 - place.header.0) as usize;
        Outcome {
            results: results.collect(),
            data: bytes[data..data + batch.data_bytes()].to_vec(),
            failed: failed.map(|bytes| bytes as usize / Op::BYTES),
        }
    };
    let pairs = places.iter().zip(batches).zip(answers);
    pairs.map(outcome).collect()
}
