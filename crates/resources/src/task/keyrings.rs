//! The keyrings of a process (keyrings(7)): who may read which keys of the kernel's.
//!
//! A task inherits the session keyring of its maker, so a restored one would have the restorer's.
//! It joins a new one instead, with the same owner, permissions and keys, unless it has had the very
//! one that its maker has now: tasks that share one by inheritance share it again, and a tree that
//! is restored in its own session keeps that.
//!
//! What a task has stands in the kernel's memory alone: to ask for a session keyring gives one to a
//! task that has none. Where that memory may not be looked into, tasks are asked all the same.
//!
//! The keys of a keyring are made by the restorer, which gets their numbers; the task links them.
//!
//! - What: keyrings
//! - Kept: session keyrings, with owner, permissions, keys of type "user" (these with theirs, and
//!   with what is left of their time), links to the user's own keyrings, and whether they were
//!   revoked; which tasks share one. Their numbers are new ones, and a name of their own is lost.
//! - Refused: "key … in its session keyring", as "only keys of type \"user\" are saved", "it is
//!   revoked, expired or refused", "keyrings within it are not saved" or "its text is too long";
//!   "its session keyring", as "it is user …'s", "it has expired", "it may not change it", "its
//!   contents are not told" or the kernel's words; "keys of its process keyring"; "keys of its
//!   thread keyring"; "a session keyring of the thread's own"; "the authority to give a key its
//!   contents"; "a keyring of its choice for keys that it asks for
//!   (KEYCTL_SET_REQKEY_KEYRING)"; "the session keyring that it shares with pid …", as "no task
//!   that is made before both had it".
//! - At a restore: "its session keyring was that of the dump, with …".
//! - CRIU 4.2: a restored task has the session keyring of who restores it.

use std::cell::Cell;
use std::collections::HashMap;
use std::io;
use std::sync::OnceLock;

use prost::Message;
use rustix::io::Errno;
use rustix::process::{getgid, getuid};
use rustix::thread::gettid;
use sys::keys;
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, decode, tags};
use crate::kernel::credentials::{Credentials, Key, Looker};
use crate::script::{Answers, Arg, Script};
use crate::{Error, Result};

const GET_KEYRING_ID: u32 = 0;
const JOIN_SESSION_KEYRING: u32 = 1;
const REVOKE: u32 = 3;
const CHOWN: u32 = 4;
const SETPERM: u32 = 5;
const DESCRIBE: u32 = 6;
const LINK: u32 = 8;
const READ: u32 = 11;
const SET_REQKEY_KEYRING: u32 = 14;

const THREAD_KEYRING: i32 = -1;
const PROCESS_KEYRING: i32 = -2;
const SESSION_KEYRING: i32 = -3;
const USER_KEYRING: i32 = -4;
const USER_SESSION_KEYRING: i32 = -5;

/// More keys than a keyring is saved with.
const KEYS_MAX: usize = 1000;
/// The longest contents of a key of type "user", in bytes.
const CONTENTS_MAX_BYTES: usize = 32_767;
/// A possessor may change the keyring.
const POSSESSOR_WRITES: u32 = 0x0400_0000;

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

/// What this boot is called; nothing where the kernel does not tell.
fn this_boot() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        boot.unwrap_or_default().trim().to_owned()
    })
}

/// The restorer's session keyring as tasks see it whose payloads are given: where they are of
/// another boot, it may have the number of one of theirs.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn of_restorer<'a>(own: Session, payloads: impl Iterator<Item = &'a [u8]>) -> Result<Session> {
    if own == Session::Default {
        return Ok(own);
    }
    for payload in payloads {
        let record: Record = decode(&Keyrings, payload)?;
        if record.boot.is_empty() || record.boot != this_boot() {
            return Ok(Session::Own(0));
        }
    }
    Ok(own)
}

/// The session keyring of this process.
pub(crate) fn own_session() -> Session {
    match keys::own_session() {
        Ok(None | Some(keys::Session::Default)) => Session::Default,
        Ok(Some(keys::Session::Own(serial))) => Session::Own(serial),
        // One that was revoked, or may not be searched: no task may have it.
        Err(_) => Session::Own(0),
    }
}

/// Whether this process has no session keyring at all.
pub(crate) fn own_is_unset() -> bool {
    if !are_there() {
        return true;
    }
    let own = gettid().as_raw_nonzero().get();
    let seen = Looker::get().map(|looker| looker.look(own));
    seen.is_ok_and(|seen| seen.is_ok_and(|seen| seen.session == 0))
}

fn are_there() -> bool {
    static ARE_THERE: OnceLock<bool> = OnceLock::new();
    *ARE_THERE.get_or_init(keys::are_there)
}

thread_local! {
    /// The process whose leader was checked last, and what it has.
    static LEADER: Cell<Option<(i32, Credentials)>> = const { Cell::new(None) };
}

fn look(looker: &Looker, tid: i32) -> Result<Credentials> {
    let failed = |error| Error::kernel(format!("looking for the keyrings of thread {tid}"), error);
    looker.look(tid).map_err(failed)
}

/// Checks what can be told of a thread, of which those of a process come one after the other.
///
/// # Errors
/// [`Error::Unsupported`], [`Error::Kernel`].
pub(super) fn check(facts: &dyn Facts) -> Result<()> {
    if !are_there() {
        return Ok(());
    }
    let Ok(looker) = Looker::get() else {
        return Ok(());
    };
    let (pid, tid) = (facts.pid(), facts.tid());
    let own = look(looker, tid)?;
    let leader = LEADER.get().filter(|(of, _)| *of == pid && tid != pid);
    let refused = |what: &str| Err(Error::unsupported(tid, what));
    if leader.is_some_and(|(_, leader)| leader.session != own.session) {
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
            && !looker
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
    if leader.is_none() {
        LEADER.set(Some((pid, own)));
        // What is in it is refused before the task is asked anything.
        record(looker, facts, own)?;
    }
    Ok(())
}

/// What is in a session keyring, or why that cannot be saved.
#[derive(Default)]
struct Contents {
    keys: Vec<UserKey>,
    links: Vec<i32>,
    obstacle: Option<Error>,
}

impl Contents {
    fn refuse(&mut self, error: Error) {
        self.obstacle.get_or_insert(error);
    }
}

/// `KEY_FLAG_DEAD`, `KEY_FLAG_REVOKED`, `KEY_FLAG_INVALIDATED`, `KEY_FLAG_UID_KEYRING`.
const DEAD: u64 = 1;
const REVOKED: u64 = 1 << 1;
const INVALIDATED: u64 = 1 << 5;
const OF_USER: u64 = 1 << 9;

fn now_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

fn is_usable(key: &Key) -> bool {
    let expired = key.expires_s.is_some_and(|at| at <= now_s());
    key.flags & (DEAD | REVOKED | INVALIDATED) == 0 && key.state == 1 && !expired
}

/// The record of a process that has `own`, none where its session keyring is the default one.
fn record(looker: &Looker, facts: &dyn Facts, own: Credentials) -> Result<Option<Record>> {
    let (pid, uid) = (facts.tid(), facts.status()?.uids[0]);
    if own.session == 0 {
        return Ok(None);
    }
    let failed = |error| Error::kernel(format!("reading the session keyring of {pid}"), error);
    let keyring = looker.key(own.session).map_err(failed)?;
    let refused = |why: String| Err(Error::unsupported(pid, "its session keyring").because(why));
    if keyring.flags & OF_USER != 0 {
        let name = format!("_uid_ses.{uid}");
        return match keyring.description == name.as_bytes() {
            true => Ok(None),
            false => refused(format!("it is user {}'s", keyring.uid)),
        };
    }
    let is_revoked = keyring.flags & REVOKED != 0;
    if !is_revoked && !is_usable(&keyring) {
        return refused("it has expired".to_owned());
    }
    let mut contents = Contents::default();
    if !is_revoked {
        let all = looker.keys_in(own.session, KEYS_MAX).map_err(failed)?;
        for at in all {
            let key = looker.key(at).map_err(failed)?;
            add((looker, &key), (pid, uid), &mut contents)?;
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
    let own_tid = gettid().as_raw_nonzero().get();
    let is_ours = look(looker, own_tid)?.session == own.session;
    record.with(contents, is_ours).map(Some)
}

impl Record {
    /// Adds what is in it. What cannot be saved is no obstacle in the session of who dumps.
    fn with(mut self, contents: Contents, is_ours: bool) -> Result<Self> {
        match contents.obstacle {
            None => {}
            Some(Error::Unsupported { what, .. }) if is_ours => self.missing = what,
            Some(error) => return Err(error),
        }
        (self.keys, self.links) = (contents.keys, contents.links);
        self.boot = this_boot().to_owned();
        Ok(self)
    }
}

/// Adds a key to what is in a keyring of process `pid` of user `uid`.
fn add(
    (looker, key): (&Looker, &Key),
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
            let bytes = looker.contents(key).map_err(failed)?;
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
        _ => contents.refuse(refused("only keys of type \"user\" are saved")),
    }
    Ok(())
}

impl Part for Keyrings {
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
        match !are_there() || Looker::get().is_ok() {
            true => Ok(Asked::default()),
            false => Ok(Told::ask(questions)),
        }
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Vec<u8>>> {
        let record = match (are_there(), Looker::get()) {
            (false, _) => None,
            (true, Ok(looker)) => {
                let seen = LEADER.get().filter(|(pid, _)| *pid == facts.pid());
                let own = match seen {
                    Some((_, own)) => own,
                    None => look(looker, facts.tid())?,
                };
                record(looker, facts, own)?
            }
            (true, Err(_)) => Told::new(asked, answers).record(facts.tid())?,
        };
        Ok(record.map(|record| record.encode_to_vec()))
    }

    fn describe(&self, payload: &[u8]) -> Result<String> {
        let record: Record = decode(self, payload)?;
        let keys = record.keys.iter();
        let keys = keys.map(|key| String::from_utf8_lossy(&key.description).into_owned());
        let links = record.links.iter().map(|link| match *link {
            USER_KEYRING => "@u".to_owned(),
            _ => "@us".to_owned(),
        });
        let all = keys.chain(links).collect::<Vec<_>>().join(", ");
        let name = String::from_utf8_lossy(&record.name).into_owned();
        let revoked = if record.is_revoked { " revoked" } else { "" };
        Ok(format!(
            "{name} {}{revoked} uid {} [{all}]",
            record.serial, record.uid
        ))
    }

    /// Nothing: [`plan`] does, when it is known whose child the process is.
    fn plan(&self, _: Option<&[u8]>, _: Planned<'_>, _: &mut ThreadPlan) -> Result<()> {
        Ok(())
    }
}

/// What a task tells of its session keyring itself.
struct Told {
    session: i64,
    user_session: i64,
    user: i64,
    described: Vec<u8>,
    /// How many bytes of serial numbers there are, and the first of them.
    read: (i64, Vec<i32>),
    /// How many bytes of them its process's and its thread's keyring have.
    others: [i64; 2],
    destination: i64,
}

impl Told {
    const SERIALS: usize = 4;
    const DESCRIBED_BYTES: usize = 256;

    fn ask(questions: &mut Script) -> Asked {
        let keyring = |questions: &mut Script, which: i32| {
            questions.attempt(
                Sysno::keyctl,
                [GET_KEYRING_ID.into(), which.into(), 0u32.into()],
            )
        };
        // The first question first: it has the kernel make what the others are about.
        let mut steps = Vec::new();
        for which in [SESSION_KEYRING, USER_SESSION_KEYRING, USER_KEYRING] {
            steps.push(keyring(questions, which));
        }
        let described = questions.buffer(Self::DESCRIBED_BYTES);
        let serials = questions.buffer(4 * Self::SERIALS);
        let args =
            |what: u32, at: Arg, len: usize| [what.into(), SESSION_KEYRING.into(), at, len.into()];
        let describe = args(DESCRIBE, described.into(), Self::DESCRIBED_BYTES);
        steps.push(questions.attempt(Sysno::keyctl, describe));
        let read = args(READ, serials.into(), 4 * Self::SERIALS);
        steps.push(questions.attempt(Sysno::keyctl, read));
        for which in [PROCESS_KEYRING, THREAD_KEYRING] {
            let args = [READ.into(), which.into(), 0u32.into(), 0u32.into()];
            steps.push(questions.attempt(Sysno::keyctl, args));
        }
        let args = [SET_REQKEY_KEYRING.into(), (-1i32).into()];
        steps.push(questions.attempt(Sysno::keyctl, args));
        Asked {
            steps,
            data: vec![described, serials],
        }
    }

    fn new(asked: &Asked, answers: &Answers) -> Self {
        let result = |at: usize| answers.result(asked.steps[at]);
        let words = answers.bytes(asked.data[1], 4 * Self::SERIALS);
        let serials = words.as_chunks::<4>().0.iter();
        Self {
            session: result(0),
            user_session: result(1),
            user: result(2),
            described: answers.bytes(asked.data[0], Self::DESCRIBED_BYTES).to_vec(),
            read: (
                result(4),
                serials.map(|word| i32::from_le_bytes(*word)).collect(),
            ),
            others: [result(5), result(6)],
            destination: result(7),
        }
    }

    fn record(&self, pid: i32) -> Result<Option<Record>> {
        let refused = |what: &str| Err(Error::unsupported(pid, what));
        match self {
            _ if self.others[0] > 0 => return refused("keys of its process keyring"),
            _ if self.others[1] > 0 => return refused("keys of its thread keyring"),
            _ if self.destination > 0 => {
                return refused(
                    "a keyring of its choice for keys that it asks for (KEYCTL_SET_REQKEY_KEYRING)",
                );
            }
            _ => {}
        }
        let failed = |errno: i64| {
            let error = io::Error::from_raw_os_error(i32::try_from(-errno).unwrap_or(0));
            Err(Error::unsupported(pid, "its session keyring").because(error.to_string()))
        };
        let revoked = -i64::from(Errno::KEYREVOKED.raw_os_error());
        if self.session == revoked {
            // Neither its number nor its permissions are told, and nobody can use it.
            return Ok(Some(Record {
                serial: -1,
                name: b"_ses".to_vec(),
                uid: getuid().as_raw(),
                gid: getgid().as_raw(),
                permissions: 0x3f03_0000,
                is_revoked: true,
                ..Record::default()
            }));
        }
        match self.session {
            ..0 => return failed(self.session),
            own if own == self.user_session => return Ok(None),
            _ => {}
        }
        let serial = i32::try_from(self.session).unwrap_or(0);
        let Some(record) = described(&self.described, serial) else {
            let error = Error::unsupported(pid, "its session keyring");
            return Err(error.because("its contents are not told"));
        };
        let is_ours = own_session() == Session::Own(serial);
        record.with(self.contents(pid), is_ours).map(Some)
    }

    fn contents(&self, pid: i32) -> Contents {
        let mut contents = Contents::default();
        let count = usize::try_from(self.read.0).map(|bytes| bytes / 4);
        let serials = count.ok().and_then(|count| self.read.1.get(..count));
        let links = serials.map(|serials| {
            let links = serials.iter().map(|serial| match i64::from(*serial) {
                serial if serial == self.user => Some(USER_KEYRING),
                serial if serial == self.user_session => Some(USER_SESSION_KEYRING),
                _ => None,
            });
            links.collect::<Option<Vec<_>>>()
        });
        match links.flatten() {
            Some(links) => contents.links = links,
            None => {
                let error = Error::unsupported(pid, "its session keyring");
                contents.refuse(error.because("its contents are not told"));
            }
        }
        contents
    }
}

/// What `KEYCTL_DESCRIBE` says: "keyring;1000;1000;3f030000;_ses".
fn described(text: &[u8], serial: i32) -> Option<Record> {
    let text = text.split(|byte| *byte == 0).next()?;
    let mut fields = text.splitn(5, |byte| *byte == b';').skip(1);
    let mut field = || std::str::from_utf8(fields.next()?).ok();
    let (uid, gid) = (field()?.parse().ok()?, field()?.parse().ok()?);
    let permissions = u32::from_str_radix(field()?, 16).ok()?;
    let name = field()?.as_bytes().to_vec();
    Some(Record {
        serial,
        name,
        uid,
        gid,
        permissions,
        ..Record::default()
    })
}

/// A process whose session keyring is planned.
#[derive(Clone, Copy, Debug)]
pub struct Owner<'a> {
    /// Its pid.
    pub pid: i32,
    /// The payload of its record.
    pub payload: Option<&'a [u8]>,
    /// The payload of its credentials' record.
    pub credentials: Option<&'a [u8]>,
}

impl Owner<'_> {
    fn record(&self) -> Result<Option<Record>> {
        let decoded = self
            .payload
            .map(|payload| decode::<Record>(&Keyrings, payload));
        decoded.transpose()
    }

    fn credentials(&self) -> Result<super::credentials::Record> {
        decode(
            &super::credentials::Credentials,
            self.credentials.unwrap_or_default(),
        )
    }

    /// Which session keyring it has when it runs, if it is made with `born`: `root` where that is
    /// the restorer's.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn session(&self, born: Session, root: Option<&crate::Inherited>) -> Result<Session> {
        if let Some(record) = self.record()? {
            return Ok(Session::Own(record.serial));
        }
        let uid = self.credentials()?.uids.first().copied().unwrap_or(0);
        let same = match (born, root) {
            (Session::Default, Some(root)) => {
                root.credentials.uids.first() == Some(&uid) || root.session_is_unset.get()
            }
            (born, _) => born == Session::Default,
        };
        Ok(if same {
            Session::Default
        } else {
            Session::Substitute(uid)
        })
    }
}

/// The keys that the restorer has made, by the serial number of the keyring at the dump, in the
/// order of its record.
pub type Made = HashMap<i32, Vec<i32>>;

/// Makes the keys of session keyrings, which tasks then link, given the payloads of processes.
///
/// # Errors
/// [`Error::Corrupt`], [`Error::Kernel`].
pub fn make<'a>(payloads: impl Iterator<Item = &'a [u8]>) -> Result<Made> {
    /// For possessor and owner everything.
    const LINKABLE: u32 = 0x3f3f_0000;
    let mut made = Made::new();
    for payload in payloads {
        let record: Record = decode(&Keyrings, payload)?;
        if record.keys.is_empty() || made.contains_key(&record.serial) {
            continue;
        }
        let failed = |error| Error::kernel("making the keys of a session keyring", error);
        let name = std::ffi::CString::new(format!("stillframe-{}", record.serial));
        let name = name.expect("it has no NUL");
        let keyring = keys::add(&name, None, keys::PROCESS_KEYRING).map_err(failed)?;
        let serials = record.keys.iter().map(|key| {
            let name = std::ffi::CString::new(key.description.clone());
            let name = name.map_err(|_| Error::corrupt("session keyring", "a key's name"))?;
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
/// [`Error::Corrupt`], [`Error::Mismatch`].
pub fn plan(
    owner: Owner<'_>,
    (born, session): (Session, Session),
    (inherited, made): (&crate::Inherited, &Made),
    plan: &mut ThreadPlan,
) -> Result<()> {
    if born == session {
        return Ok(());
    }
    let ids = inherited
        .credentials
        .uids
        .first()
        .zip(inherited.credentials.gids.first());
    let (uid, gid) = ids.map_or((0, 0), |(uid, gid)| (*uid, *gid));
    let record = owner.record()?;
    let script = plan.at(Phase::Fork);
    keyctl(script, JOIN_SESSION_KEYRING, [0u32.into(); 3]);
    script.note(Keyrings.name());
    let Some(record) = record else {
        let credentials = owner.credentials()?;
        let ids = [&credentials.uids, &credentials.gids].map(|ids| ids.first().copied());
        if let [Some(own_uid), Some(own_gid)] = ids
            && (own_uid, own_gid) != (uid, gid)
        {
            own(script, SESSION_KEYRING.into(), (own_uid, own_gid));
        }
        let links = [
            LINK.into(),
            USER_SESSION_KEYRING.into(),
            SESSION_KEYRING.into(),
        ];
        // A program that runs as another user than who started it may not.
        plan.at(Phase::Last).attempt(Sysno::keyctl, links);
        return Ok(());
    };
    if !record.missing.is_empty() {
        let what = format!(
            "its session keyring was that of the dump, with {}",
            record.missing
        );
        let what = format!("task {}: {}: {what}", owner.pid, Keyrings.name());
        return Err(Error::Mismatch { what });
    }
    let none = Vec::new();
    let made = made.get(&record.serial).unwrap_or(&none);
    for (index, key) in record.keys.iter().enumerate() {
        let serial = Arg::from(made.get(index).copied().unwrap_or(0));
        keyctl(script, LINK, [serial, SESSION_KEYRING.into(), 0u32.into()]);
        if (key.uid, key.gid) != (uid, gid) {
            own(script, serial, (key.uid, key.gid));
        }
        keyctl(
            script,
            SETPERM,
            [serial, key.permissions.into(), 0u32.into()],
        );
    }
    if (record.uid, record.gid) != (uid, gid) {
        own(script, SESSION_KEYRING.into(), (record.uid, record.gid));
    }
    let permissions = [
        SESSION_KEYRING.into(),
        record.permissions.into(),
        0u32.into(),
    ];
    keyctl(script, SETPERM, permissions);
    let script = plan.at(Phase::Last);
    for link in &record.links {
        if ![USER_KEYRING, USER_SESSION_KEYRING].contains(link) {
            let record = format!("task {} {}", owner.pid, Keyrings.name());
            return Err(Error::corrupt(record, format!("a link to {link}")));
        }
        keyctl(
            script,
            LINK,
            [(*link).into(), SESSION_KEYRING.into(), 0u32.into()],
        );
    }
    if record.is_revoked {
        keyctl(
            script,
            REVOKE,
            [SESSION_KEYRING.into(), 0u32.into(), 0u32.into()],
        );
    }
    Ok(())
}

fn keyctl(script: &mut Script, what: u32, args: [Arg; 3]) {
    let [first, second, third] = args;
    script.call(Sysno::keyctl, [what.into(), first, second, third]);
}

fn own(script: &mut Script, key: Arg, (uid, gid): (u32, u32)) {
    keyctl(script, CHOWN, [key, uid.into(), gid.into()]);
}

/// The error for a task that has no part in the making of the keyring that it shares with `other`.
#[must_use]
pub fn unshared(pid: i32, other: i32) -> Error {
    let what = format!("the session keyring that it shares with pid {other}");
    Error::unsupported(pid, what).because("no task that is made before both had it")
}

#[cfg(test)]
mod tests;
