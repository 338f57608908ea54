//! Which session keyring a task has at a restore, and the calls by which it gets that.

use std::collections::HashMap;

use sys::{boot, keys};
use syscalls::Sysno;

use super::contents::now_s;
use super::{Keyrings, Record, SESSION_KEYRING, Session, USER_SESSION_KEYRING, operation};
use crate::script::{Arg, Script};
use crate::task::credentials::{self, Credentials};
use crate::task::{Part as _, PartState, Phase, ThreadPlan};
use crate::{Error, Inherited, Result};

/// The session keyring that a process had at the dump, given its leader's parts.
#[must_use]
pub fn recorded(parts: &[Box<dyn PartState>]) -> Session {
    session_of(parts.iter().find_map(|part| part.record::<Keyrings>()))
}

fn session_of(record: Option<&Record>) -> Session {
    record.map_or(Session::Default, |record| Session::Own(record.serial))
}

/// The records of session keyrings among some parts.
fn records<'a>(parts: impl Iterator<Item = &'a dyn PartState>) -> impl Iterator<Item = &'a Record> {
    parts.filter_map(|part| part.record::<Keyrings>())
}

/// The restorer's session keyring as tasks see it whose leaders' parts are given: where they are of
/// another boot, it may have the number of one of theirs.
pub fn of_restorer<'a>(own: Session, parts: impl Iterator<Item = &'a dyn PartState>) -> Session {
    let of_this_boot =
        |record: &Record| !record.boot.is_empty() && Some(&record.boot[..]) == boot::id();
    match own == Session::Default || records(parts).all(of_this_boot) {
        true => own,
        false => Session::Own(0),
    }
}

/// A process whose session keyring is planned.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    pub(super) pid: i32,
    /// Its record.
    pub(super) record: Option<&'a Record>,
    /// The record of its credentials.
    pub(super) credentials: Option<&'a credentials::Record>,
}

impl<'a> Owner<'a> {
    /// Process `pid`, whose leader has these `parts`.
    #[must_use]
    pub fn new(pid: i32, parts: &'a [Box<dyn PartState>]) -> Self {
        let record = parts.iter().find_map(|part| part.record::<Keyrings>());
        let credentials = parts.iter().find_map(|part| part.record::<Credentials>());
        Self {
            pid,
            record,
            credentials,
        }
    }

    fn uid(&self) -> Option<u32> {
        self.credentials?.uids.first().copied()
    }

    /// Which session keyring it has when it runs, if it is made with `born`: `root` where that is
    /// the restorer's.
    #[must_use]
    pub fn session(&self, born: Session, root: Option<&Inherited>) -> Session {
        if let own @ Session::Own(_) = session_of(self.record) {
            return own;
        }
        let uid = self.uid().unwrap_or(0);
        let same = match (born, root) {
            (Session::Default, Some(root)) => {
                root.credentials.uids.first() == Some(&uid) || root.session_is_unset.get()
            }
            (born, _) => born == Session::Default,
        };
        if same {
            Session::Default
        } else {
            Session::Substitute(uid)
        }
    }
}

/// The keys that the restorer has made, by the serial number of the keyring at the dump, in the
/// order of its record.
pub type Made = HashMap<i32, Vec<i32>>;

/// Makes the keys of session keyrings, which tasks then link, given the parts of leaders.
///
/// # Errors
/// [`Error::Kernel`].
pub fn make<'a>(parts: impl Iterator<Item = &'a dyn PartState>) -> Result<Made> {
    /// For possessor and owner everything.
    const LINKABLE: u32 = 0x3f3f_0000;
    let mut made = Made::new();
    for record in records(parts) {
        if record.keys.is_empty() || made.contains_key(&record.serial) {
            continue;
        }
        let failed = |error| Error::kernel("making the keys of a session keyring", error);
        let name = std::ffi::CString::new(format!("stillframe-{}", record.serial));
        let name = name.expect("it has no NUL");
        let keyring = keys::add(&name, None, keys::PROCESS_KEYRING).map_err(failed)?;
        let serials = record.keys.iter().map(|key| {
            let name = std::ffi::CString::new(key.description.clone());
            let name = name.expect("checked when decoded");
            let serial = keys::add(&name, Some(&key.contents), keyring).map_err(failed)?;
            keys::permit(serial, LINKABLE).map_err(failed)?;
            if key.expires_s != 0 {
                // One that has expired meanwhile is of as little use as it would be now.
                let left_s = key.expires_s.saturating_sub(now_s()).max(1);
                let left_s = u32::try_from(left_s).unwrap_or(u32::MAX);
                keys::expire(serial, left_s).map_err(failed)?;
            }
            Ok(serial)
        });
        made.insert(record.serial, serials.collect::<Result<_>>()?);
    }
    Ok(made)
}

/// Plans the session keyring of a process that is made with `born` and is to have `session`.
///
/// # Errors
/// [`Error::Mismatch`].
pub fn plan(
    owner: Owner<'_>,
    (born, session): (Session, Session),
    (inherited, made): (&Inherited, &Made),
    plan: &mut ThreadPlan,
) -> Result<()> {
    if born == session {
        return Ok(());
    }
    let credentials = &inherited.credentials;
    let ids = credentials.uids.first().zip(credentials.gids.first());
    let ids = ids.map_or((0, 0), |(uid, gid)| (*uid, *gid));
    let script = plan.at(Phase::Fork);
    keyctl(script, operation::JOIN_SESSION_KEYRING, [0u32.into(); 3]);
    script.note(Keyrings.name());
    match owner.record {
        None => {
            substitute(owner, ids, plan);
            Ok(())
        }
        Some(record) if !record.missing.is_empty() => {
            let missing = &record.missing;
            let what = format!("its session keyring was that of the dump, with {missing}");
            let what = format!("task {}: {}: {what}", owner.pid, Keyrings.name());
            Err(Error::Mismatch { what })
        }
        Some(record) => {
            let made = made.get(&record.serial).map_or(&[][..], Vec::as_slice);
            fill(record, (ids, made), plan);
            finish(record, plan);
            Ok(())
        }
    }
}

/// Has a new keyring lead to the default one of its user.
fn substitute(owner: Owner<'_>, ids: (u32, u32), plan: &mut ThreadPlan) {
    let own_ids = owner.credentials;
    let own_ids = own_ids.and_then(|own| own.uids.first().zip(own.gids.first()));
    let own_ids = own_ids.map_or(ids, |(uid, gid)| (*uid, *gid));
    give((SESSION_KEYRING.into(), own_ids), ids, plan.at(Phase::Fork));
    let links = [
        operation::LINK.into(),
        USER_SESSION_KEYRING.into(),
        SESSION_KEYRING.into(),
    ];
    // A program that runs as another user than who started it may not.
    plan.at(Phase::Last).attempt(Sysno::keyctl, links);
}

/// Gives a new keyring the keys that were `made` for it, its owner and its permissions; new keys
/// and keyrings belong to `ids`.
fn fill(record: &Record, (ids, made): ((u32, u32), &[i32]), plan: &mut ThreadPlan) {
    let script = plan.at(Phase::Fork);
    let permit = |script: &mut Script, key: Arg, permissions: u32| {
        keyctl(
            script,
            operation::SETPERM,
            [key, permissions.into(), 0u32.into()],
        );
    };
    for (index, key) in record.keys.iter().enumerate() {
        let serial = Arg::from(made.get(index).copied().unwrap_or(0));
        let link = [serial, SESSION_KEYRING.into(), 0u32.into()];
        keyctl(script, operation::LINK, link);
        give((serial, (key.uid, key.gid)), ids, script);
        permit(script, serial, key.permissions);
    }
    let keyring = Arg::from(SESSION_KEYRING);
    give((keyring, (record.uid, record.gid)), ids, script);
    permit(script, keyring, record.permissions);
}

/// Links the keyrings of its user, which only he may, and revokes the whole where it was.
fn finish(record: &Record, plan: &mut ThreadPlan) {
    let script = plan.at(Phase::Last);
    for link in &record.links {
        let link = [(*link).into(), SESSION_KEYRING.into(), 0u32.into()];
        keyctl(script, operation::LINK, link);
    }
    if record.is_revoked {
        let whole = [SESSION_KEYRING.into(), 0u32.into(), 0u32.into()];
        keyctl(script, operation::REVOKE, whole);
    }
}

fn keyctl(script: &mut Script, what: u32, args: [Arg; 3]) {
    let [first, second, third] = args;
    script.call(Sysno::keyctl, [what.into(), first, second, third]);
}

/// Gives a key, which belongs to `ids`, its owner and its group.
fn give((key, owner): (Arg, (u32, u32)), ids: (u32, u32), script: &mut Script) {
    if owner != ids {
        let owner = [key, owner.0.into(), owner.1.into()];
        keyctl(script, operation::CHOWN, owner);
    }
}

/// The error for a task that has no part in the making of the keyring that it shares with `other`.
#[must_use]
pub fn unshared(pid: i32, other: i32) -> Error {
    let what = format!("the session keyring that it shares with pid {other}");
    Error::unsupported(pid, what).because("no task that is made before both had it")
}
