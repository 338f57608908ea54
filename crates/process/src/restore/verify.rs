//! Verifies stored pages that no other part of a restore verifies.

use image::{Reader, Run, RunKind};
use resources::map::vdso;

use crate::Result;
use crate::build::Built;

/// Checks the pages that tasks read for themselves, while they do so. What the restorer fills it
/// checks then.
pub(super) fn verify_rest(reader: &Reader, built: &Built) -> Result<()> {
    const BATCH_BYTES: usize = 1 << 20;
    let outside = built
        .plan
        .outside
        .iter()
        .flat_map(|outside| &outside.stored);
    let mut outside = outside
        .map(|stored| (stored.offset, stored.span.bytes()))
        .collect::<Vec<_>>();
    outside.sort_unstable();
    let elsewhere = |run: &Run| {
        let RunKind::Data { offset_bytes, .. } = run.kind else {
            return true;
        };
        let after = outside.partition_point(|(at, _)| *at <= offset_bytes);
        let filled = after > 0 && offset_bytes < outside[after - 1].0 + outside[after - 1].1;
        // Objects were filled before; of vDSOs nobody may have read anything.
        let is_object = run.space.0 >> 31 == 1 && run.space.0 < vdso::FIRST_SPACE;
        filled || is_object
    };
    let runs = reader
        .stored()
        .into_iter()
        .filter(|run| !elsewhere(run))
        .collect::<Vec<_>>();
    let mut buffer = Vec::new();
    let mut rest = runs.as_slice();
    while let Some(first) = rest.first() {
        let mut bytes = first.len_bytes() as usize;
        let follows = rest.windows(2).take_while(|pair| {
            let fits = bytes + pair[1].len_bytes() as usize <= BATCH_BYTES;
            let next = start(&pair[0]) + pair[0].len_bytes() == start(&pair[1]);
            if fits && next {
                bytes += pair[1].len_bytes() as usize;
            }
            fits && next
        });
        let count = 1 + follows.count();
        buffer.resize(bytes, 0);
        reader.read_stored(&mut buffer, start(first), first.space)?;
        let mut at = 0;
        for run in &rest[..count] {
            let end = at + run.len_bytes() as usize;
            reader.check(run, &buffer[at..end])?;
            at = end;
        }
        rest = &rest[count..];
    }
    Ok(())
}

fn start(run: &Run) -> u64 {
    match run.kind {
        RunKind::Data { offset_bytes, .. } => offset_bytes,
        _ => 0,
    }
}
