//! The keyrings of a process (keyrings(7)): who may read which keys of the kernel's.
//!
//! A task inherits the session keyring of its maker, so a restored one would have the restorer's.
//! It joins a new one instead, with the same owner, permissions and keys, unless it has had the
//! very keyring that its maker has now: tasks that share one by inheritance share it again, and a
//! tree that is restored in its own session keeps that.
//!
//! What a task has stands in the kernel's memory alone: to ask for a session keyring gives one to a
//! task that has none. Where that memory may not be looked into, tasks are asked all the same.
//!
//! The keys of a keyring are made by the restorer, which gets their numbers; the task links them.
//!
//! - What: keyrings
//! - Kept: session keyrings, with owner, permissions, keys of type user (these with theirs, and
//!   with what is left of their time), links to the user's own keyrings, and whether they were
//!   revoked; which tasks share one. Their numbers are new ones, and a name of their own is lost.
//! - Refused: "key … in its session keyring", as "only keys of type user are saved", "it is
//!   revoked, expired or refused", "keyrings within it are not saved" or "its text is too long";
//!   "its session keyring", as "it is another user's", "it has expired", "it may not change it",
//!   "its contents are not told" or the kernel's words; "keys of its process keyring"; "keys of its
//!   thread keyring"; "a session keyring of the thread's own"; "the authority to give a key its
//!   contents"; "a keyring of its choice for keys that it asks for
//!   (KEYCTL_SET_REQKEY_KEYRING)"; "the session keyring that it shares with pid …", as "no task
//!   that is made before both had it".
//! - At a restore: "its session keyring was that of the dump, with …".
//! - CRIU 4.2: a restored task has the session keyring of who restores it.

mod contents;
mod plan;
mod told;

use prost::Message;
use sys::keys;

use self::contents::record;
pub use self::plan::{Made, Owner, make, of_restorer, plan, recorded, unshared};
use self::told::Told;
use super::{Asked, Facts, Part, Planned, Scope, ThreadPlan, tags};
use crate::kernel::credentials::{Credentials, CredentialsReader, Key, own_session_serial};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// What keyctl(2) does.
mod operation {
    pub const GET_KEYRING_ID: u32 = 0;
    pub const JOIN_SESSION_KEYRING: u32 = 1;
    pub const REVOKE: u32 = 3;
    pub const CHOWN: u32 = 4;
    pub const SETPERM: u32 = 5;
    pub const DESCRIBE: u32 = 6;
    pub const LINK: u32 = 8;
    pub const READ: u32 = 11;
    pub const SET_REQKEY_KEYRING: u32 = 14;
}

const THREAD_KEYRING: i32 = -1;
const PROCESS_KEYRING: i32 = -2;
const SESSION_KEYRING: i32 = -3;
const USER_KEYRING: i32 = -4;
const USER_SESSION_KEYRING: i32 = -5;

/// More keys than a keyring is saved with.
const KEYS_MAX: usize = 1000;

/// The keyrings of a process.
pub struct Keyrings;

/// A session keyring that is not the default one of its user.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Its serial number.
    #[prost(sint32, tag = "1")]
    pub serial: i32,
    /// Its name; "_ses" for one without.
    #[prost(bytes = "vec", tag = "2")]
    pub name: Vec<u8>,
    /// Its owner.
    #[prost(uint32, tag = "3")]
    pub uid: u32,
    /// Its group.
    #[prost(uint32, tag = "4")]
    pub gid: u32,
    /// What its possessor, owner, group and others may do, a byte each from the top.
    #[prost(uint32, tag = "5")]
    pub permissions: u32,
    /// Whether it was revoked.
    #[prost(bool, tag = "6")]
    pub is_revoked: bool,
    /// The keys in it.
    #[prost(message, repeated, tag = "7")]
    pub keys: Vec<UserKey>,
    /// Keyrings of the process's user that it links: -4 that of the user, -5 that of the user's
    /// sessions.
    #[prost(sint32, repeated, tag = "8")]
    pub links: Vec<i32>,
    /// What it has besides, where it was the dumping program's as well: only there it comes back.
    #[prost(string, tag = "9")]
    pub missing: String,
    /// The boot in which it had its number (/proc/sys/kernel/random/boot_id).
    #[prost(string, tag = "10")]
    pub boot: String,
}

/// A key of type "user".
#[derive(Clone, PartialEq, Message)]
pub struct UserKey {
    /// Its description.
    #[prost(bytes = "vec", tag = "1")]
    pub description: Vec<u8>,
    /// Its contents.
    #[prost(bytes = "vec", tag = "2")]
    pub contents: Vec<u8>,
    /// Its owner.
    #[prost(uint32, tag = "3")]
    pub uid: u32,
    /// Its group.
    #[prost(uint32, tag = "4")]
    pub gid: u32,
    /// As those of its keyring.
    #[prost(uint32, tag = "5")]
    pub permissions: u32,
    /// When it expires, in seconds since 1970; 0 for never.
    #[prost(uint64, tag = "6")]
    pub expires_s: u64,
}

/// Which session keyring a task has at a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Session {
    /// The default one of its user, or none.
    Default,
    /// That which had this serial number at the dump.
    Own(i32),
    /// A new one that links the default one of this user.
    Substitute(u32),
}

/// The session keyring of this process.
pub(crate) fn own_session() -> Session {
    // A look takes some calls; a child that asks waits for a processor as well.
    if let Some(serial) = own_session_serial()
        && let Ok(default) = keys::user_session()
    {
        return match serial {
            0 => Session::Default,
            serial if serial == default => Session::Default,
            serial => Session::Own(serial),
        };
    }
    match keys::own_session() {
        Ok(None | Some(keys::Session::Default)) => Session::Default,
        Ok(Some(keys::Session::Own(serial))) => Session::Own(serial),
        // One that was revoked, or may not be searched: no task may have it.
        Err(_) => Session::Own(0),
    }
}

/// Whether this process has no session keyring at all, not even its user's.
#[must_use]
pub fn own_is_unset() -> bool {
    if !keys::are_there() {
        return true;
    }
    CredentialsReader::get().is_ok_and(|reader| reader.own_session == 0)
}

/// Checks what can be told of a thread with these credentials, given those of the process's first
/// one that was checked.
///
/// # Errors
/// [`Error::Unsupported`], [`Error::Kernel`].
pub(super) fn check(facts: &dyn Facts, own: Credentials, first: Option<Credentials>) -> Result<()> {
    if !keys::are_there() {
        return Ok(());
    }
    let Ok(reader) = CredentialsReader::get() else {
        return Ok(());
    };
    let tid = facts.tid();
    let refused = |what: &str| Err(Error::unsupported(tid, what));
    if first.is_some_and(|first| first.session != own.session) {
        return refused("a session keyring of the thread's own");
    }
    if own.authority != 0 {
        return refused("the authority to give a key its contents");
    }
    if own.destination != 0 {
        return refused(
            "a keyring of its choice for keys that it asks for (KEYCTL_SET_REQKEY_KEYRING)",
        );
    }
    let holds = |keyring: u64| -> Result<bool> {
        let failed = |error| Error::kernel(format!("looking for keys of thread {tid}"), error);
        Ok(keyring != 0
            && !reader
                .keys_in(keyring, KEYS_MAX)
                .map_err(failed)?
                .is_empty())
    };
    if holds(own.process)? {
        return refused("keys of its process keyring");
    }
    if holds(own.thread)? {
        return refused("keys of its thread keyring");
    }
    if first.is_none() {
        // What is in it is refused before the task is asked anything.
        record(reader, facts, own)?;
    }
    Ok(())
}

impl Part for Keyrings {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::KEYRINGS
    }

    fn name(&self) -> &'static str {
        "session keyring"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn ask(&self, _: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        match !keys::are_there() || CredentialsReader::get().is_ok() {
            true => Ok(Asked::default()),
            false => Ok(Told::ask(questions)),
        }
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let record = match (keys::are_there(), CredentialsReader::get()) {
            (false, _) => None,
            (true, Ok(reader)) => {
                let tid = facts.tid();
                let failed = |error| Error::kernel(format!("look at the keyrings of {tid}"), error);
                let own = reader.look(tid).map_err(failed)?;
                record(reader, facts, own)?
            }
            (true, Err(_)) => Told::new(asked, answers).record(facts.tid())?,
        };
        Ok(record)
    }

    fn check(&self, record: &Record) -> Result<()> {
        let corrupt = |what: String| Err(Error::corrupt(self.name(), what));
        if record.keys.iter().any(|key| key.description.contains(&0)) {
            return corrupt("a key's name".to_owned());
        }
        let mut links = record.links.iter();
        match links.find(|link| ![USER_KEYRING, USER_SESSION_KEYRING].contains(link)) {
            Some(link) => corrupt(format!("a link to {link}")),
            None => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        let keys = record.keys.iter();
        let keys = keys.map(|key| String::from_utf8_lossy(&key.description).into_owned());
        let links = record.links.iter().map(|link| match *link {
            USER_KEYRING => "@u".to_owned(),
            _ => "@us".to_owned(),
        });
        let all = keys.chain(links).collect::<Vec<_>>().join(", ");
        let name = String::from_utf8_lossy(&record.name).into_owned();
        let revoked = if record.is_revoked { " revoked" } else { "" };
        format!(
            "{name} {}{revoked} uid {} [{all}]",
            record.serial, record.uid
        )
    }

    /// Nothing: [`plan`] does, when it is known whose child the process is.
    fn plan(&self, _: Option<&Record>, _: Planned<'_>, _: &mut ThreadPlan) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
