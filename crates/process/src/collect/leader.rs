//! A leader that has ended while other threads of its process run on.

use freeze::{Task, stat_of};
use image::Record;
use prost::Message;
use resources::task::{Facts, leader};
use sys::proc::Status;

use crate::records::{TaskId, ThreadState, record, tag};
use crate::{Error, Result};

/// What /proc/PID/status says of the leader itself.
pub(super) fn status(task: &Task) -> Result<Status> {
    let pid = task.pid();
    let text = sys::procfs::read(format_args!("{pid}/status"));
    let text = text.map_err(|_| Error::Gone { pid })?;
    let unclear = |what| std::io::Error::new(std::io::ErrorKind::InvalidData, what);
    let status = Status::parse(&text);
    status.map_err(|e| Error::kernel(format!("cannot understand /proc/{pid}/status"), unclear(e)))
}

/// The records of the leader, who is number `own`, by what the thread is that is asked in its
/// place: that is number `asked`, and `records` are the process's.
pub(super) fn records(
    task: &Task,
    facts: &dyn Facts,
    (own, asked): (TaskId, TaskId),
    records: &[Record],
) -> Result<Vec<Record>> {
    let pid = task.pid();
    let of_asked = |tag| {
        let mut all = records.iter();
        let found = all.find(|record| (record.tag, record.id) == (tag, asked.get()));
        found.map(|record| record.payload.as_slice())
    };
    let stat = stat_of(pid).ok_or(Error::Gone { pid })?;
    let status = status(task)?;
    let parts = leader::parts((&stat, &status), facts, of_asked)?;
    let state = ThreadState::of_ended(status.blocked).encode_to_vec();
    let all = parts.into_iter().chain([(tag::THREAD, state)]);
    let records = all.map(|(tag, payload)| record(tag, own.get(), payload));
    Ok(records.collect())
}
