//! What a tree's descriptors are called, before any file system is asked for anything.

use std::collections::HashMap;
use std::os::fd::AsFd;

use freeze::Frozen;
use resources::fd::table::{self, Link};
use resources::fd::{decider, unread};

use super::files::fetch;
use super::how::How;
use super::sharing::Sharing;
use crate::Result;
use crate::obstacles::Obstacles;
use crate::records::What;

/// The links of the descriptors of each task; none of a zombie, nor of one that has another's.
///
/// # Errors
/// [`crate::Error::Obstacles`] where a task decides on what others do with files: all that comes
/// after this may have to wait for such files, and so for the stopped task. Of what passes: unread
/// events, which are looked at before the dump causes some of its own, and what is found out first.
pub(super) fn links(
    frozen: &Frozen,
    sharing: &Sharing,
    how: &mut How<'_>,
    obstacles: &mut Obstacles,
) -> Result<Vec<Vec<Link>>> {
    let mut all: Vec<Vec<Link>> = Vec::with_capacity(frozen.tasks.len());
    let mut places = HashMap::new();
    for (at, task) in frozen.tasks.iter().enumerate() {
        frozen.limit.check(task.pid())?;
        places.insert(task.pid(), at);
        if task.is_zombie() || sharing.first(What::Descriptors, task.pid()).is_some() {
            all.push(Vec::new());
            continue;
        }
        let parent = task.stat()?.0.ppid;
        let parent = sharing.first(What::Descriptors, parent).unwrap_or(parent);
        let parent = places.get(&parent).map(|at| table::Parent {
            process: &frozen.tasks[*at].process,
            links: &all[*at],
        });
        let proc = (task.proc.as_fd(), &*task.close_queue);
        let links = table::links(&task.process, proc, parent)?;
        for link in &links {
            obstacles.note(decider::check(task.pid(), proc, link))?;
            unread::check(&task.process, link, how.allow, fetch)?;
        }
        how.homework.check_links(task.pid(), &links)?;
        all.push(links);
    }
    obstacles.check()?;
    Ok(all)
}
