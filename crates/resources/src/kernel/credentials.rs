//! What the kernel knows of a thread's credentials and tells nobody: its keyrings, and whether it
//! is in a Landlock domain.
//!
//! Each thread of a dump is looked at while it is stopped, so a look takes three calls, and the
//! kernel's description of its types, which is large, is read before: by [`prepare`], once in a
//! boot where somebody keeps what it gives.

use std::cell::Cell;
use std::io::{Error, ErrorKind, Result};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};

use sys::btf::Types;
use sys::kernel_memory::KernelMemory;
use sys::{keys, landlock};

/// Members that are needed wherever there are tasks; "" is a structure's size.
const OF_TASKS: [(&str, &str); 14] = [
    ("task_struct", "thread_pid"),
    ("task_struct", "pid_links"),
    ("task_struct", "real_cred"),
    ("pid", "level"),
    ("pid", "numbers"),
    ("pid", "tasks"),
    ("upid", ""),
    ("upid", "nr"),
    ("upid", "ns"),
    ("pid_namespace", "idr.idr_rt.xa_head"),
    ("xa_node", ""),
    ("xa_node", "shift"),
    ("xa_node", "slots"),
    ("cred", "uid"),
];

/// Those that are needed where there are keys.
const OF_KEYS: [(&str, &str); 19] = [
    ("cred", "jit_keyring"),
    ("cred", "session_keyring"),
    ("cred", "process_keyring"),
    ("cred", "thread_keyring"),
    ("cred", "request_key_auth"),
    ("key", ""),
    ("key", "serial"),
    ("key", "uid"),
    ("key", "gid"),
    ("key", "perm"),
    ("key", "expiry"),
    ("key", "flags"),
    ("key", "state"),
    ("key", "type"),
    ("key", "description"),
    ("key", "payload"),
    ("key", "keys.root"),
    ("key_type", "name"),
    ("user_key_payload", "datalen"),
];

/// The rest of those, which belong together.
const OF_CONTENTS: [(&str, &str); 3] = [
    ("user_key_payload", "data"),
    ("assoc_array_node", "slots"),
    ("assoc_array_shortcut", "next_node"),
];

/// The one that is needed where there is Landlock, and what is found out about it: the place of a
/// thread's domain in what security modules keep of its credentials.
const OF_LANDLOCK: [(&str, &str); 2] = [("cred", "security"), ("landlock", "domain")];

/// How much of a structure is read at once, in bytes.
const STRUCTURE_BYTES: usize = 256;

/// Where everything is.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Places(Vec<(&'static str, &'static str, u64)>);

impl Places {
    /// Those that this system needs.
    fn wanted(
        has_keys: bool,
        has_landlock: bool,
    ) -> impl Iterator<Item = (&'static str, &'static str)> {
        let keys = OF_KEYS.into_iter().chain(OF_CONTENTS);
        let keys = keys.filter(move |_| has_keys);
        let landlock = OF_LANDLOCK.into_iter().filter(move |_| has_landlock);
        OF_TASKS.into_iter().chain(keys).chain(landlock)
    }

    fn find(&self, structure: &str, member: &str) -> Option<u64> {
        let mut all = self.0.iter();
        let found = all.find(|(of, name, _)| (*of, *name) == (structure, member));
        found.map(|(.., at)| *at)
    }

    fn at(&self, structure: &'static str, member: &'static str) -> Result<u64> {
        self.find(structure, member)
            .ok_or_else(|| unknown(structure, member))
    }

    /// What was kept, if it is what is wanted.
    fn parse(
        text: &[u8],
        wanted: impl Iterator<Item = (&'static str, &'static str)>,
    ) -> Option<Self> {
        let mut lines = std::str::from_utf8(text).ok()?.lines();
        let parse = |(structure, member): (&'static str, &'static str)| {
            let at = lines.next()?.strip_prefix(structure)?.strip_prefix('.')?;
            let at = at.strip_prefix(member)?.strip_prefix(' ')?;
            Some((structure, member, at.parse().ok()?))
        };
        let places = wanted.map(parse).collect::<Option<Vec<_>>>()?;
        lines.next().is_none().then_some(Self(places))
    }

    fn text(&self) -> Vec<u8> {
        let lines = self.0.iter();
        let lines = lines.map(|(structure, member, at)| format!("{structure}.{member} {at}\n"));
        lines.collect::<String>().into_bytes()
    }
}

/// What is known of a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// Its user id.
    pub uid: u32,
    /// Its session keyring, by the address of its structure; 0 for none. So are the others.
    pub session: u64,
    pub process: u64,
    pub thread: u64,
    /// A key that says that it may give another key its contents.
    pub authority: u64,
    /// Where keys go that are asked for (`KEYCTL_SET_REQKEY_KEYRING`).
    pub destination: u8,
    /// Whether it is in a Landlock domain.
    pub is_in_domain: bool,
}

/// A key or a keyring.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    pub at: u64,
    pub serial: i32,
    pub uid: u32,
    pub gid: u32,
    pub permissions: u32,
    /// When it expires, in seconds since 1970, if ever.
    pub expires_s: Option<u64>,
    pub flags: u64,
    /// 1 where it has its contents; an errno, below 0, where those were refused.
    pub state: i16,
    pub kind: Vec<u8>,
    pub description: Vec<u8>,
}

/// Looks at threads.
pub(crate) struct Looker {
    memory: KernelMemory,
    places: Places,
    /// Where the kernel looks up numbers of this namespace.
    numbers: u64,
    level: u64,
    /// By how many bits a number is shifted for the first step; a guess that is checked.
    shift: AtomicU8,
    /// What this process has.
    own: Option<Credentials>,
}

thread_local! {
    /// Who was looked at last, for who asks next.
    static LAST: Cell<Option<(i32, Credentials)>> = const { Cell::new(None) };
}

static LOOKER: OnceLock<std::result::Result<Looker, String>> = OnceLock::new();

/// Finds out where everything is, before a tree is stopped: from `kept`, which is what an earlier
/// call has given in this boot of this kernel. Gives what is to be kept, if that is new.
pub fn prepare(kept: impl FnOnce() -> Option<Vec<u8>>) -> Option<Vec<u8>> {
    let mut new = None;
    LOOKER.get_or_init(|| {
        let found = Looker::find(kept, &mut new);
        found.map_err(|error| error.to_string())
    });
    new
}

impl Looker {
    /// The one for the running kernel; why there is none otherwise.
    pub fn get() -> std::result::Result<&'static Self, &'static str> {
        prepare(|| None);
        let looker = LOOKER.get().expect("it was just set").as_ref();
        looker.map_err(String::as_str)
    }

    fn find(kept: impl FnOnce() -> Option<Vec<u8>>, new: &mut Option<Vec<u8>>) -> Result<Self> {
        let doing = |what: &'static str| {
            move |error: Error| Error::new(error.kind(), format!("{what}: {error}"))
        };
        let memory = KernelMemory::open().map_err(doing("bpf(2)"))?;
        let has = (keys::are_there(), landlock::is_there());
        let wanted = || Places::wanted(has.0, has.1);
        let places = kept().and_then(|text| Places::parse(&text, wanted()));
        let places = match places {
            Some(places) => places,
            None => {
                let types = Types::of_kernel().map_err(doing("/sys/kernel/btf/vmlinux"))?;
                let places = Self::places(&memory, &types, wanted())?;
                *new = Some(places.text());
                places
            }
        };
        Self::new(memory, places)
    }

    /// Looks for all places.
    fn places(
        memory: &KernelMemory,
        types: &Types,
        wanted: impl Iterator<Item = (&'static str, &'static str)>,
    ) -> Result<Places> {
        let mut places = Places(Vec::new());
        for (structure, member) in wanted {
            let at = match (structure, member) {
                ("landlock", _) => Some(Self::domain_place(memory, &places)?),
                (_, "") => types.size(structure).map(|size| size as u64),
                _ => {
                    let member = types.member(structure, member);
                    let member = member.filter(|at| at.bits == 0 && at.bit.is_multiple_of(8));
                    member.map(|at| at.bit as u64 / 8)
                }
            };
            let at = at.ok_or_else(|| unknown(structure, member))?;
            places.0.push((structure, member, at));
        }
        Ok(places)
    }

    /// Finds out where the domain stands in what security modules keep of credentials: it is the
    /// pointer that changes when a thread of ours enters one.
    fn domain_place(memory: &KernelMemory, places: &Places) -> Result<u64> {
        let steps = [
            places.at("task_struct", "real_cred")?,
            places.at("cred", "security")?,
        ];
        let words = || -> Result<Vec<u64>> {
            let bytes = memory.follow(memory.own_task()?, &steps, STRUCTURE_BYTES)?;
            let words = bytes.as_chunks::<8>().0.iter();
            Ok(words.map(|word| u64::from_ne_bytes(*word)).collect())
        };
        let (before, after) = (words()?, landlock::in_domain(words)??);
        let is_pointer = |word: u64| word >> 47 == u64::MAX >> 47;
        let pairs = before.iter().zip(&after).enumerate();
        let mut changed =
            pairs.filter(|(_, (before, after))| before != after && is_pointer(**after));
        match (changed.next(), changed.next()) {
            (Some((at, _)), None) => Ok(8 * at as u64),
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                "where Landlock keeps domains is not clear",
            )),
        }
    }

    fn new(memory: KernelMemory, places: Places) -> Result<Self> {
        let own = memory.own_task()?;
        let way = [places.at("task_struct", "thread_pid")?];
        let pid = memory.follow(own, &way, STRUCTURE_BYTES)?;
        let level = u64::from(half(&pid, places.at("pid", "level")?)?);
        let upid = places.at("pid", "numbers")? + level * places.at("upid", "")?;
        let namespace = word(&pid, upid + places.at("upid", "ns")?)?;
        let numbers = namespace + places.at("pid_namespace", "idr.idr_rt.xa_head")?;
        let mut looker = Self {
            memory,
            places,
            numbers,
            level,
            shift: AtomicU8::new(u8::MAX),
            own: None,
        };
        // A place that is wrong is seen by who this is.
        let own = looker.look(rustix::thread::gettid().as_raw_nonzero().get())?;
        looker.own = Some(own);
        match own.uid == rustix::process::getuid().as_raw() {
            true => Ok(looker),
            false => Err(Error::new(
                ErrorKind::Unsupported,
                "this process is not found",
            )),
        }
    }

    fn at(&self, structure: &'static str, member: &'static str) -> Result<u64> {
        self.places.at(structure, member)
    }

    /// The session keyring of this process, by its address; 0 for none.
    pub fn own_session(&self) -> u64 {
        self.own.map_or(0, |own| own.session)
    }

    /// Looks at a thread that is stopped, and keeps what it sees for who [asks next](Self::known).
    pub fn look_first(&self, tid: i32) -> Result<Credentials> {
        let seen = self.look(tid)?;
        LAST.set(Some((tid, seen)));
        Ok(seen)
    }

    /// What was just seen of a thread that is stopped, or is seen now.
    pub fn known(&self, tid: i32) -> Result<Credentials> {
        match LAST.take() {
            Some((last, seen)) if last == tid => Ok(seen),
            _ => self.look(tid),
        }
    }

    /// Looks at a thread that is stopped, or the caller's.
    pub fn look(&self, tid: i32) -> Result<Credentials> {
        let first = match self.links_of(tid, self.shift.load(Ordering::Relaxed))? {
            Some(first) => first,
            None => {
                let shift = self.find_shift()?;
                self.shift.store(shift, Ordering::Relaxed);
                let found = self.links_of(tid, shift)?;
                found.ok_or_else(|| Error::new(ErrorKind::NotFound, "the thread is not found"))?
            }
        };
        let links = self.at("task_struct", "pid_links")?;
        let way = self.at("task_struct", "real_cred")?.wrapping_sub(links);
        let bytes = self.memory.follow(first, &[way], STRUCTURE_BYTES)?;
        let key = |member| match self.places.find("cred", member) {
            Some(at) => word(&bytes, at),
            None => Ok(0),
        };
        Ok(Credentials {
            uid: half(&bytes, self.at("cred", "uid")?)?,
            session: key("session_keyring")?,
            process: key("process_keyring")?,
            thread: key("thread_keyring")?,
            authority: key("request_key_auth")?,
            destination: match self.places.find("cred", "jit_keyring") {
                Some(at) => *part::<1>(&bytes, at)?.first().expect("one byte"),
                None => 0,
            },
            is_in_domain: self.is_in_domain(first, way)?,
        })
    }

    fn is_in_domain(&self, first: u64, way: u64) -> Result<bool> {
        let Some(domain) = self.places.find("landlock", "domain") else {
            return Ok(false);
        };
        let way = [way, self.at("cred", "security")?];
        let blob = self.memory.follow(first, &way, STRUCTURE_BYTES)?;
        Ok(word(&blob, domain)? != 0)
    }

    /// The address of what links the thread of this number to its number; none where the way by
    /// `shift` does not lead to it.
    fn links_of(&self, tid: i32, shift: u8) -> Result<Option<u64>> {
        /// What marks a pointer to a node.
        const NODE: u64 = 2;
        let slots = self.at("xa_node", "slots")?;
        let bits = slot_bits(self.at("xa_node", "")?, slots);
        let mut way = vec![0];
        let mut shift = i32::from(shift);
        if shift > 24 {
            return Ok(None);
        }
        while shift >= 0 {
            let slot = u64::from(tid.cast_unsigned() >> shift) & ((1 << bits) - 1);
            way.push((slots + 8 * slot).wrapping_sub(NODE));
            shift -= bits;
        }
        let Ok(pid) = self.memory.follow(self.numbers, &way, STRUCTURE_BYTES) else {
            return Ok(None);
        };
        let upid = self.at("pid", "numbers")? + self.level * self.at("upid", "")?;
        let number = half(&pid, upid + self.at("upid", "nr")?)?;
        let first = word(&pid, self.at("pid", "tasks")?)?;
        Ok((number == tid.cast_unsigned() && first != 0).then_some(first))
    }

    fn find_shift(&self) -> Result<u8> {
        const NODE: u64 = 2;
        let node = self.memory.word(self.numbers)?.wrapping_sub(NODE);
        let shift = self.memory.read(node + self.at("xa_node", "shift")?, 1)?;
        Ok(shift[0])
    }

    /// Reads a key.
    pub fn key(&self, at: u64) -> Result<Key> {
        let size = usize::try_from(self.at("key", "")?).map_err(Error::other)?;
        let bytes = self.memory.read(at, size)?;
        let member = |name| self.at("key", name);
        let expires_s = word(&bytes, member("expiry")?)?;
        let name = self.at("key_type", "name")?;
        let kind = self.memory.word(word(&bytes, member("type")?)? + name)?;
        Ok(Key {
            at,
            serial: half(&bytes, member("serial")?)?.cast_signed(),
            uid: half(&bytes, member("uid")?)?,
            gid: half(&bytes, member("gid")?)?,
            permissions: half(&bytes, member("perm")?)?,
            expires_s: (expires_s != 0 && expires_s < i64::MAX.cast_unsigned())
                .then_some(expires_s),
            flags: word(&bytes, member("flags")?)?,
            state: i16::from_ne_bytes(part(&bytes, member("state")?)?),
            kind: self.text(kind)?,
            description: self.text(word(&bytes, member("description")?)?)?,
        })
    }

    /// The contents of a key of type "user".
    pub fn contents(&self, key: &Key) -> Result<Vec<u8>> {
        let payload = self.memory.word(key.at + self.at("key", "payload")?)?;
        let len = self
            .memory
            .read(payload + self.at("user_key_payload", "datalen")?, 2)?;
        let len = u16::from_ne_bytes(part(&len, 0)?);
        self.memory
            .read(payload + self.at("user_key_payload", "data")?, len.into())
    }

    /// The addresses of the keys in a keyring, at most `most`.
    pub fn keys_in(&self, keyring: u64, most: usize) -> Result<Vec<u64>> {
        let mut found = Vec::new();
        let mut todo = vec![self.memory.word(keyring + self.at("key", "keys.root")?)?];
        let mut looked = 0;
        while let Some(pointer) = todo.pop() {
            /// Set in pointers to nodes and shortcuts; in the latter, [`OTHER`] is as well. Keys
            /// that are keyrings have only that.
            const META: u64 = 1;
            const OTHER: u64 = 2;
            looked += 1;
            if found.len() > most || looked > 64 * (most + 1) {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    "there are too many keys",
                ));
            }
            let at = pointer & !(META | OTHER);
            match (at, pointer & META != 0, pointer & OTHER != 0) {
                (0, ..) => {}
                (at, false, _) => found.push(at),
                (at, true, true) => {
                    let next = self.at("assoc_array_shortcut", "next_node")?;
                    todo.push(self.memory.word(at + next)?);
                }
                (at, true, false) => {
                    const SLOTS: usize = 16;
                    let slots = self
                        .memory
                        .read(at + self.at("assoc_array_node", "slots")?, 8 * SLOTS)?;
                    let slots = slots.as_chunks::<8>().0.iter();
                    todo.extend(slots.map(|word| u64::from_ne_bytes(*word)));
                }
            }
        }
        Ok(found)
    }

    /// Reads a string, without the NUL at its end.
    fn text(&self, at: u64) -> Result<Vec<u8>> {
        const MOST_BYTES: usize = 4096;
        const PIECE_BYTES: u64 = 64;
        let mut text = Vec::new();
        while text.len() < MOST_BYTES {
            let at = at + text.len() as u64;
            // A piece ends with its page: the next one may not be there.
            let len = usize::try_from(PIECE_BYTES - at % PIECE_BYTES).expect("a small number");
            let piece = self.memory.read(at, len)?;
            let end = piece.iter().position(|byte| *byte == 0);
            text.extend_from_slice(&piece[..end.unwrap_or(piece.len())]);
            if end.is_some() {
                return Ok(text);
            }
        }
        Err(Error::new(ErrorKind::Unsupported, "a string does not end"))
    }
}

/// How many bits of a number choose a slot of a node of this size. Behind the slots come marks.
fn slot_bits(node_bytes: u64, slots: u64) -> i32 {
    let words = node_bytes.saturating_sub(slots) / 8;
    words.checked_ilog2().unwrap_or(0).cast_signed().max(1)
}

fn part<const N: usize>(bytes: &[u8], at: u64) -> Result<[u8; N]> {
    let part = usize::try_from(at)
        .ok()
        .and_then(|at| bytes.get(at..at + N));
    let beyond = || {
        Error::new(
            ErrorKind::Unsupported,
            "a structure is larger than expected",
        )
    };
    Ok(part.ok_or_else(beyond)?.try_into().expect("as many bytes"))
}

fn word(bytes: &[u8], at: u64) -> Result<u64> {
    part(bytes, at).map(u64::from_ne_bytes)
}

fn half(bytes: &[u8], at: u64) -> Result<u32> {
    part(bytes, at).map(u32::from_ne_bytes)
}

fn unknown(structure: &str, member: &str) -> Error {
    let what = format!("this kernel has no {structure}.{member}");
    Error::new(ErrorKind::Unsupported, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_are_kept_are_those_that_are_wanted() {
        let wanted = || Places::wanted(true, true);
        let places = Places(
            wanted()
                .zip(7..)
                .map(|((of, name), at)| (of, name, at))
                .collect(),
        );
        let text = places.text();
        assert_eq!(Places::parse(&text, wanted()), Some(places));
        for wrong in [
            &text[1..],
            &text[..text.len() - 30],
            b"",
            &[&text[..], b"x.y 1\n"].concat(),
        ] {
            assert_eq!(Places::parse(wrong, wanted()), None);
        }
        assert_eq!(Places::parse(&text, Places::wanted(false, true)), None);
    }

    #[test]
    fn every_thread_of_this_process_is_found() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        let looker = Looker::get().expect("it was asked");
        for entry in std::fs::read_dir("/proc/self/task").expect("a folder") {
            let name = entry.expect("a thread").file_name();
            let tid = name.to_str().and_then(|tid| tid.parse().ok());
            // One that has ended meanwhile is another test's.
            let Ok(seen) = looker.look(tid.expect("a number")) else {
                continue;
            };
            assert_eq!(seen.uid, 0);
        }
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        looker.look(own).expect("it runs");
        looker.look(i32::MAX).expect_err("nobody has it");
        looker.look(0).expect_err("nobody has it");
    }

    #[test]
    fn a_domain_is_seen_in_the_thread_that_is_in_it() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        if !landlock::is_there() {
            testkit::skip!("a kernel without Landlock");
        }
        let looker = Looker::get().expect("it was asked");
        let look = || looker.look(rustix::thread::gettid().as_raw_nonzero().get());
        let before = look().expect("this thread");
        let inside = landlock::in_domain(look)
            .expect("a domain")
            .expect("it is found");
        let own = before.is_in_domain;
        assert!(!own && inside.is_in_domain, "{before:?} {inside:?}");
        assert_eq!(look().expect("this thread"), before);
    }

    #[test]
    fn a_keyring_is_seen_with_all_of_its_keys() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        if !keys::are_there() {
            testkit::skip!("a kernel without keys");
        }
        let looker = Looker::get().expect("it was asked");
        let look = |serial| {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            let made = (0..40u8).map(|number| {
                let name = std::ffi::CString::new(format!("key {number}")).expect("a string");
                keys::add(
                    &name,
                    Some(&vec![number; usize::from(number) * 100 + 1]),
                    serial,
                )
            });
            let made = made.collect::<Result<Vec<_>>>().expect("room for them");
            let inner = keys::add(c"inner", None, serial).expect("room for it");
            keys::permit(made[3], 0x3f00_0000).expect("ours");
            let seen = looker.look(tid).expect("this thread");
            let keyring = looker.key(seen.session).expect("a keyring");
            assert_eq!(
                (keyring.serial, &keyring.description[..]),
                (serial, &b"_ses"[..])
            );
            let all = looker.keys_in(seen.session, 100).expect("keys");
            let all = all.into_iter().map(|at| looker.key(at).expect("a key"));
            let mut all = all.collect::<Vec<_>>();
            all.sort_by_key(|key| key.serial);
            let mut want = made.clone();
            want.push(inner);
            want.sort_unstable();
            assert!(all.iter().map(|key| key.serial).eq(want));
            let third = all
                .iter()
                .find(|key| key.serial == made[3])
                .expect("it is there");
            assert_eq!(
                (third.permissions, third.state, third.expires_s),
                (0x3f00_0000, 1, None)
            );
            assert_eq!(
                (&third.kind[..], &third.description[..]),
                (&b"user"[..], &b"key 3"[..])
            );
            assert_eq!(looker.contents(third).expect("contents"), vec![3; 301]);
            looker.keys_in(seen.session, 3).expect_err("too many");
        };
        keys::in_new_session(look).expect("a keyring");
    }
}
