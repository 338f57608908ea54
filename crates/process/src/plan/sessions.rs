//! Which session keyring a task is made with, which is its maker's, and which it has then.

use std::collections::HashMap;

use resources::Inherited;
use resources::task::ThreadPlan;
use resources::task::keyrings::{self, Owner, Session};

use super::forks::{self, Fork, Kind};
use super::setting::Setting;
use crate::Result;
use crate::records::{Saved, SavedTask};

/// By index of the task: with which session keyring it is made, and which it has then.
#[derive(Default)]
pub(super) struct Sessions(Vec<(Session, Session)>);

/// Whose session keyring a task has.
fn owner<'a>(task: &'a SavedTask<'_>) -> Owner<'a> {
    let leader = task.threads.first();
    let parts = leader.map_or(&[][..], |leader| &leader.parts);
    Owner::new(task.node.pid, parts)
}

impl Sessions {
    /// Finds them; `made_by` has the task that makes another, by its index.
    ///
    /// # Errors
    /// [`crate::Error::Resource`] where two share one that no task hands down to both.
    pub fn find(
        saved: &Saved<'_>,
        (all, made_by): (&[Fork], &[Option<usize>]),
        inherited: &Inherited,
    ) -> Result<Self> {
        let mut sessions = vec![(Session::Default, Session::Default); saved.tasks.len()];
        let mut owners = HashMap::new();
        for id in forks::makers_first(all) {
            let Kind::Live(index) = all[id].kind else {
                continue;
            };
            let task = &saved.tasks[index];
            let maker = made_by[index];
            let root = maker.is_none().then_some(inherited);
            let born = maker.map_or_else(|| inherited.session(), |maker| sessions[maker].1);
            let session = owner(task).session(born, root);
            sessions[index] = (born, session);
            // A revoked one without a number is nobody's.
            if let Session::Own(serial @ 0..) = session
                && (born != session || root.is_some())
                && let Some(other) = owners.insert(serial, task.node.pid)
            {
                return Err(keyrings::unshared(task.node.pid, other).into());
            }
        }
        Ok(Self(sessions))
    }

    /// Plans that of a task, for its leader.
    ///
    /// # Errors
    /// Those of [`keyrings::plan`].
    pub fn plan(
        &self,
        (index, task): (usize, &SavedTask<'_>),
        setting: &Setting,
        leader: &mut ThreadPlan,
    ) -> Result<()> {
        let known = (&setting.inherited, &setting.keys);
        Ok(keyrings::plan(owner(task), self.0[index], known, leader)?)
    }
}
