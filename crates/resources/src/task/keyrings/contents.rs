//! What is in a session keyring, as the kernel's memory tells.

use sys::boot;

use super::{
    Credentials, CredentialsReader, KEYS_MAX, Key, Record, USER_KEYRING, USER_SESSION_KEYRING,
    UserKey,
};
use crate::task::Facts;
use crate::{Error, Result};

/// The longest contents of a key of type "user", in bytes.
const CONTENTS_MAX_BYTES: usize = 32_767;
/// A possessor may change the keyring.
const POSSESSOR_WRITES: u32 = 0x0400_0000;

/// What is in a session keyring, or why that cannot be saved.
#[derive(Default)]
pub(super) struct Contents {
    pub keys: Vec<UserKey>,
    pub links: Vec<i32>,
    pub obstacle: Option<Error>,
}

impl Contents {
    pub fn refuse(&mut self, error: Error) {
        self.obstacle.get_or_insert(error);
    }
}

/// `KEY_FLAG_DEAD`, `KEY_FLAG_REVOKED`, `KEY_FLAG_INVALIDATED`, `KEY_FLAG_UID_KEYRING`.
const DEAD: u64 = 1;
const REVOKED: u64 = 1 << 1;
const INVALIDATED: u64 = 1 << 5;
const OF_USER: u64 = 1 << 9;

pub(super) fn now_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

fn is_usable(key: &Key) -> bool {
    let expired = key.expires_s.is_some_and(|at| at <= now_s());
    key.flags & (DEAD | REVOKED | INVALIDATED) == 0 && key.state == 1 && !expired
}

/// The record of a process that has `own`, none where its session keyring is the default one.
pub(super) fn record(
    reader: &CredentialsReader,
    facts: &dyn Facts,
    own: Credentials,
) -> Result<Option<Record>> {
    let (pid, uid) = (facts.tid(), facts.status()?.uids[0]);
    if own.session == 0 {
        return Ok(None);
    }
    let failed = |error| Error::kernel(format!("reading the session keyring of {pid}"), error);
    let keyring = reader.key(own.session).map_err(failed)?;
    let refused = |why| Err(Error::unsupported(pid, "its session keyring").because(why));
    if keyring.flags & OF_USER != 0 {
        let name = format!("_uid_ses.{uid}");
        return match keyring.description == name.as_bytes() {
            true => Ok(None),
            false => refused("it is another user's"),
        };
    }
    let is_revoked = keyring.flags & REVOKED != 0;
    if !is_revoked && !is_usable(&keyring) {
        return refused("it has expired");
    }
    let mut contents = Contents::default();
    if !is_revoked {
        let all = reader.keys_in(own.session, KEYS_MAX).map_err(failed)?;
        for at in all {
            let key = reader.key(at).map_err(failed)?;
            add((reader, &key), (pid, uid), &mut contents)?;
        }
        contents
            .keys
            .sort_by(|one, other| one.description.cmp(&other.description));
        contents.links.sort_unstable();
    }
    if !contents.links.is_empty() && keyring.permissions & POSSESSOR_WRITES == 0 {
        contents
            .refuse(Error::unsupported(pid, "its session keyring").because("it may not change it"));
    }
    let record = Record {
        serial: keyring.serial,
        name: keyring.description,
        uid: keyring.uid,
        gid: keyring.gid,
        permissions: keyring.permissions,
        is_revoked,
        ..Record::default()
    };
    let is_ours = reader.own_session == own.session;
    record.with(contents, is_ours).map(Some)
}

impl Record {
    /// Adds what is in it. What cannot be saved is no obstacle in the session of who dumps.
    pub(super) fn with(mut self, contents: Contents, is_ours: bool) -> Result<Self> {
        match contents.obstacle {
            None => {}
            Some(Error::Unsupported { what, .. }) if is_ours => self.missing = what,
            Some(error) => return Err(error),
        }
        (self.keys, self.links) = (contents.keys, contents.links);
        self.boot = boot::id().unwrap_or_default().to_owned();
        Ok(self)
    }
}

/// Adds a key to what is in a keyring of process `pid` of user `uid`.
fn add(
    (reader, key): (&CredentialsReader, &Key),
    (pid, uid): (i32, u32),
    contents: &mut Contents,
) -> Result<()> {
    let named = String::from_utf8_lossy(&key.description).into_owned();
    let refused = |why: &str| {
        let what = format!("key {named} in its session keyring");
        Error::unsupported(pid, what).because(why)
    };
    let is_of_user = key.kind == b"keyring" && key.flags & OF_USER != 0;
    match &key.kind[..] {
        _ if !is_usable(key) => {
            contents.refuse(refused("it is revoked, expired or refused"));
        }
        _ if is_of_user && named == format!("_uid.{uid}") => contents.links.push(USER_KEYRING),
        _ if is_of_user && named == format!("_uid_ses.{uid}") => {
            contents.links.push(USER_SESSION_KEYRING);
        }
        b"keyring" => contents.refuse(refused("keyrings within it are not saved")),
        b"user" => {
            let failed = |error| Error::kernel(format!("reading a key of {pid}"), error);
            let bytes = reader.contents(key).map_err(failed)?;
            if bytes.len() > CONTENTS_MAX_BYTES {
                contents.refuse(refused("its text is too long"));
                return Ok(());
            }
            contents.keys.push(UserKey {
                description: key.description.clone(),
                contents: bytes,
                uid: key.uid,
                gid: key.gid,
                permissions: key.permissions,
                expires_s: key.expires_s.unwrap_or(0),
            });
        }
        _ => contents.refuse(refused("only keys of type user are saved")),
    }
    Ok(())
}
