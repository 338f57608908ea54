//! The auxiliary vector that a program was started with (getauxval(3)).

use linux_raw_sys::prctl::PR_GET_AUXV;
use resources::script::{Answers, DataAt, Script, StepAt};
use syscalls::Sysno;

/// More bytes than the kernel keeps.
const BYTES_MAX: usize = 1024;
/// A type and a value.
const PAIR_BYTES: usize = 16;

/// The question to a task about its vector.
pub(super) struct Auxv(StepAt, DataAt);

impl Auxv {
    /// Asks for it. Before Linux 6.4 only /proc tells.
    pub fn ask(script: &mut Script) -> Self {
        let buffer = script.buffer(BYTES_MAX);
        let args = [
            PR_GET_AUXV.into(),
            buffer.into(),
            u32::try_from(BYTES_MAX).expect("it is small").into(),
            0u32.into(),
            0u32.into(),
        ];
        Self(script.attempt(Sysno::prctl, args), buffer)
    }

    /// What /proc/PID/auxv would say: the pairs up to the one that ends them.
    pub fn answer(&self, answers: &Answers) -> Option<Vec<u8>> {
        let len = usize::try_from(answers.result(self.0)).ok()?;
        let all = (len <= BYTES_MAX).then(|| answers.bytes(self.1, len))?;
        let end = all.chunks_exact(PAIR_BYTES).position(|pair| {
            let (kind, _) = pair.split_at(PAIR_BYTES / 2);
            kind.iter().all(|byte| *byte == 0)
        });
        Some(all[..(end? + 1) * PAIR_BYTES].to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vector_ends_where_it_says() {
        let mut script = Script::default();
        let auxv = Auxv::ask(&mut script);
        let mut data = vec![0; BYTES_MAX];
        (data[0], data[8], data[16], data[48]) = (6, 1, 9, 7);
        let answer = |result| {
            let (results, data) = (vec![result], data.clone());
            auxv.answer(&Answers { results, data })
        };
        assert_eq!(answer(64), Some(data[..48].to_vec()));
        // Without an end, of an odd size, and where the kernel does not know the call.
        assert_eq!((answer(32), answer(2000), answer(-22)), (None, None, None));
    }
}
