//! Threads under seccomp filters: the leader, which has given up its privileges, has three,
//! another thread the first two of them and one of its own, a third one just the first. One thread
//! may only read and write. Argument `together`: all have the same two, and no thread is strict.
//!
//! `judged` answers what each thread's calls come to, `echo` "right" if the strict thread is there,
//! `tell-all` how a filter for all threads at once is taken.
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, set_capabilities, set_thread_groups, set_thread_res_gid,
};

use super::{Control, Failure, not_understood};
use crate::calls::filters::{Answer, GONE, call_gone, echo_strictly, install_filter};

/// Calls that a dump or a restore makes and the subject does not.
const FATAL: &[u32] = &[
    36,  // getitimer
    116, // setgroups
    119, // setresgid
    135, // personality
    239, // get_mempolicy
    323, // userfaultfd
    324, // membarrier
];

/// A thread that is asked what its calls come to.
struct FilteredThread {
    asks: Sender<()>,
    answers: Receiver<String>,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let together = arguments.first().is_some_and(|word| word == "together");
    set_thread_groups(&[Gid::from_raw(1234)])?;
    set_thread_res_gid(Gid::from_raw(21), Gid::from_raw(22), Gid::from_raw(23))?;
    let mut strict = (!together).then(strict).transpose()?;
    install_filter(&[(GONE[0], Answer::Errno(500))], false)?;
    let plain = judged(|| Ok(()))?;
    let fatal = FATAL.iter().map(|call| (*call, Answer::Kill));
    let fatal = fatal.chain([(GONE[1], Answer::Errno(501))]);
    // A strict thread would be in the way of one for all threads.
    install_filter(&fatal.collect::<Vec<_>>(), together)?;
    let own = judged(move || match together {
        true => Ok(()),
        false => install_filter(&[(GONE[2], Answer::Errno(502))], false).map(drop),
    })?;
    if !together {
        install_filter(&[(GONE[3], Answer::Errno(503))], false)?;
    }
    // Without privileges nobody could install them again.
    set_capabilities(
        None,
        CapabilitySets {
            effective: CapabilitySet::empty(),
            permitted: CapabilitySet::empty(),
            inheritable: CapabilitySet::empty(),
        },
    )?;
    control.serve(|question| match question.verb.as_str() {
        "judged" => Ok(format!("{} | {} | {}", calls(), plain.ask()?, own.ask()?)),
        "echo" => match &mut strict {
            Some(strict) => Ok(echo(strict)?.to_owned()),
            None => not_understood(question),
        },
        "tell-all" => {
            rustix::thread::set_no_new_privs(true)?;
            let refused = install_filter(&[(GONE[0], Answer::Errno(504))], true)?;
            Ok(refused.map_or("taken", |_| "refused").to_owned())
        }
        _ => not_understood(question),
    })
}

/// What the calls of this thread come to.
fn calls() -> String {
    let errors = GONE.map(|call| call_gone(call).to_string());
    errors.join(" ")
}

/// Starts a thread that gets ready and answers then.
fn judged(
    ready: impl FnOnce() -> std::io::Result<()> + Send + 'static,
) -> Result<FilteredThread, Failure> {
    let ((asks, asked), (tells, answers)) = (channel(), channel());
    thread::Builder::new().spawn(move || {
        ready().expect("the filter is taken");
        while asked.recv().is_ok() {
            tells.send(calls()).expect("the subject waits for it");
        }
    })?;
    let judged = FilteredThread { asks, answers };
    judged.ask()?;
    Ok(judged)
}

impl FilteredThread {
    fn ask(&self) -> Result<String, Failure> {
        self.asks.send(())?;
        Ok(self.answers.recv()?)
    }
}

/// Starts the thread that may only read and write.
fn strict() -> Result<(PipeWriter, PipeReader), Failure> {
    let ((from, sends), (receives, to)) = (pipe()?, pipe()?);
    thread::Builder::new().spawn(move || echo_strictly(from, to))?;
    let mut both = (sends, receives);
    echo(&mut both)?;
    Ok(both)
}

fn echo((to, from): &mut (PipeWriter, PipeReader)) -> Result<&'static str, Failure> {
    let mut answer = [0; 3];
    to.write_all(b"abc")?;
    from.read_exact(&mut answer)?;
    Ok(match &answer {
        b"abc" => "right",
        _ => "wrong",
    })
}
