//! Options of many sockets, asked for by one call: a ring of io_uring whose entries are the
//! questions (`SOCKET_URING_OP_GETSOCKOPT`, Linux 6.7).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use io_uring::{IoUring, squeue};

/// The opcode `IORING_OP_URING_CMD`.
const URING_CMD: u8 = 46;
/// `SOCKET_URING_OP_GETSOCKOPT`
const GETSOCKOPT: u32 = 2;
/// So many entries a ring has at the most.
const MOST: usize = 4096;

/// An option of the level `SOL_SOCKET` that is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The socket.
    pub socket: BorrowedFd<'a>,
    /// The option.
    pub name: i32,
    /// The most bytes that its value has.
    pub bytes: usize,
}

/// Asks for options of the level `SOL_SOCKET`; each answer is a value, or the errno that
/// getsockopt(2) would give.
///
/// # Errors
/// The errno of io_uring_setup(2) or io_uring_enter(2): `ENOSYS`, `EPERM` where rings may not be
/// made; `EOPNOTSUPP` where the kernel answers no such questions.
pub fn options(questions: &[Question<'_>]) -> io::Result<Vec<io::Result<Vec<u8>>>> {
    let mut answers = Vec::with_capacity(questions.len());
    if questions.is_empty() {
        return Ok(answers);
    }
    let entries = questions.len().min(MOST).next_power_of_two();
    let mut ring = IoUring::new(u32::try_from(entries).expect("few"))?;
    for some in questions.chunks(entries) {
        answers.extend(ask(&mut ring, some)?);
    }
    let unknown = |answer: &io::Result<Vec<u8>>| {
        let error = answer.as_ref().err().and_then(io::Error::raw_os_error);
        matches!(error, Some(libc::EOPNOTSUPP | libc::EINVAL))
    };
    if answers.iter().all(unknown) {
        return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
    }
    Ok(answers)
}

fn ask(ring: &mut IoUring, questions: &[Question<'_>]) -> io::Result<Vec<io::Result<Vec<u8>>>> {
    let mut values: Vec<_> = questions.iter().map(|one| vec![0u8; one.bytes]).collect();
    for (number, (question, value)) in questions.iter().zip(&mut values).enumerate() {
        let entry = entry(question, value, number as u64);
        // SAFETY: the value lives, and is not touched, until the entry has its completion, which
        // is waited for below; so does the socket.
        unsafe { ring.submission().push(&entry) }.expect("there is room for as many");
    }
    let mut left = questions.len();
    let mut answers: Vec<_> = values.iter().map(|_| None).collect();
    while left > 0 {
        match ring.submit_and_wait(left) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if left == questions.len() => return Err(error),
            other => drop(other),
        }
        for completion in ring.completion() {
            let number = completion.user_data() as usize;
            let result = completion.result();
            answers[number] = Some(match usize::try_from(result) {
                Ok(len) => {
                    let mut value = std::mem::take(&mut values[number]);
                    value.truncate(len);
                    Ok(value)
                }
                Err(_) => Err(io::Error::from_raw_os_error(-result)),
            });
            left -= 1;
        }
    }
    let answers = answers.into_iter();
    Ok(answers.map(|one| one.expect("all of them came")).collect())
}

/// A `struct io_uring_sqe` that asks, as eight words.
fn entry(question: &Question<'_>, value: &mut [u8], number: u64) -> squeue::Entry {
    let socket = u64::from(question.socket.as_fd().as_raw_fd().cast_unsigned());
    let name = u64::from(question.name.cast_unsigned());
    let bytes = value.len() as u64;
    let words = [
        u64::from(URING_CMD) | socket << 32,
        u64::from(GETSOCKOPT),
        libc::SOL_SOCKET as u64 | name << 32,
        0,
        number,
        bytes << 32,
        value.as_mut_ptr().expose_provenance() as u64,
        0,
    ];
    // SAFETY: an entry is 64 bytes without any value that would be invalid.
    unsafe { std::mem::transmute::<[u64; 8], squeue::Entry>(words) }
}

#[cfg(test)]
mod tests {
    use super::super::{open, option};
    use super::*;

    #[test]
    fn answers_are_those_of_single_calls() {
        let sockets: Vec<_> = (0..100).map(|_| open(1, 1, 0).unwrap()).collect();
        let mut questions = Vec::new();
        for socket in &sockets {
            for name in 1..100 {
                if name != 77 && !super::super::holds_addresses(1, name) {
                    let (socket, bytes) = (socket.as_fd(), 16);
                    questions.push(Question {
                        socket,
                        name,
                        bytes,
                    });
                }
            }
        }
        assert!(questions.len() > 2 * MOST);
        let answers = match options(&questions) {
            Err(error) => {
                eprintln!("skipped: {error}");
                return;
            }
            Ok(answers) => answers,
        };
        assert_eq!(answers.len(), questions.len());
        for (question, answer) in questions.iter().zip(answers) {
            let wanted = option(question.socket, 1, question.name, question.bytes);
            let errno = |one: io::Result<Vec<u8>>| one.map_err(|error| error.raw_os_error());
            assert_eq!(errno(answer), errno(wanted), "{}", question.name);
        }
    }
}
