//! Credentials that the kernel tells nobody: the keyrings of a thread, and its Landlock domain.
//!
//! Each thread of a dump is looked at while it is stopped, so a look takes two calls, and all
//! places in the kernel's structures are known before: by [`prepare`].

use std::io::{Error, ErrorKind, Result};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use sys::kernel_memory::{self, Walk};
use sys::{keys, landlock};

use super::Kernel;
use super::layout::Layout;

/// Members that a look at keys needs; "" is a structure's size.
const OF_KEYS: [(&str, &str); 20] = [
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
    ("user_key_payload", "data"),
];

/// Those of the tree in which a keyring has its keys.
const OF_KEYRINGS: [(&str, &str); 2] = [
    ("assoc_array_node", "slots"),
    ("assoc_array_shortcut", "next_node"),
];

/// How much of a structure is read at once, in bytes.
const STRUCTURE_BYTES: usize = 256;

/// The mark of a pointer to a node of an XArray.
const NODE: u64 = 2;

/// Credentials of a thread, as far as no call tells them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// Its user id.
    pub uid: u32,
    /// Its session keyring, by the address of its structure; 0 for none. So are the others.
    pub session: u64,
    pub process: u64,
    pub thread: u64,
    /// The key by which it may give another key its contents.
    pub authority: u64,
    /// Where keys go that are asked for (`KEYCTL_SET_REQKEY_KEYRING`).
    pub destination: u8,
    /// Set for a thread in a Landlock domain.
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
    /// The time at which it expires, in seconds since 1970, if ever.
    pub expires_s: Option<u64>,
    pub flags: u64,
    /// 1 where it has its contents; an errno, below 0, where those were refused.
    pub state: i16,
    pub kind: Vec<u8>,
    pub description: Vec<u8>,
}

/// The root of an XArray.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Root {
    /// Its address, marked.
    at: u64,
    /// By how many bits a number is shifted for its slot.
    shift: u32,
}

/// The XArray in which the kernel looks up the numbers of this process's pid namespace.
#[derive(Debug)]
struct Numbers {
    /// The address of the pointer to its root.
    head: u64,
    /// Where a node has its slots, in bytes.
    slots: u64,
    /// How many bits of a number choose a slot of a node.
    slot_bits: u32,
    /// The root that was seen last, which another one replaces as numbers grow.
    root: Mutex<Root>,
}

impl Numbers {
    fn find(kernel: &Kernel) -> Result<Self> {
        let pid = [kernel.offset("task_struct", "thread_pid")?];
        let pid = kernel.memory.walk(0, &pid, STRUCTURE_BYTES)?.bytes;
        let level = u64::from(half(&pid, kernel.offset("pid", "level")?)?);
        let upid = kernel.offset("pid", "numbers")? + level * kernel.size("upid")?;
        let namespace = word(&pid, upid + kernel.offset("upid", "ns")?)?;
        let head = kernel.address_of("pid_namespace", "idr.idr_rt.xa_head", namespace)?;
        let slots = kernel.offset("xa_node", "slots")?;
        Ok(Self {
            head,
            slots,
            slot_bits: slot_bits(kernel.size("xa_node")?, slots),
            root: Mutex::new(Self::root_at(kernel, head)?),
        })
    }

    fn root_at(kernel: &Kernel, head: u64) -> Result<Root> {
        let at = kernel.word(head)?;
        if at & 3 != NODE {
            return Err(unclear("the numbers of this namespace have no root"));
        }
        let shift = kernel.address_of("xa_node", "shift", at - NODE)?;
        let [shift] = part(&kernel.bytes(shift, 1)?, 0)?;
        let shift = u32::from(shift);
        Ok(Root { at, shift })
    }

    fn root(&self) -> Root {
        *self.root.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the root again. Gives whether it is another one.
    fn learn(&self, kernel: &Kernel) -> Result<bool> {
        let root = Self::root_at(kernel, self.head)?;
        let mut known = self.root.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(std::mem::replace(&mut *known, root) != root)
    }

    /// The steps from [`Numbers::head`] to the `struct pid` of a number; none where it is larger
    /// than all below this root.
    fn way(&self, number: i32, root: Root) -> Option<Vec<u64>> {
        let number = u64::from(number.cast_unsigned());
        if number.unbounded_shr(root.shift + self.slot_bits) != 0 {
            return None;
        }
        let mut way = vec![0];
        let mut shift = Some(root.shift);
        while let Some(bits) = shift {
            let slot = number >> bits & ((1 << self.slot_bits) - 1);
            way.push((self.slots + 8 * slot).wrapping_sub(NODE));
            shift = bits.checked_sub(self.slot_bits);
        }
        Some(way)
    }
}

/// Where a `struct cred` has a thread's keyrings, in bytes.
#[derive(Debug)]
struct KeyringPlaces {
    session: u64,
    process: u64,
    thread: u64,
    authority: u64,
    destination: u64,
}

/// Where the kernel has the Landlock domain of a thread, in bytes.
#[derive(Debug)]
struct DomainPlace {
    /// In a `struct cred`: the pointer to what security modules keep.
    security: u64,
    /// In that: the pointer to the domain.
    domain: u64,
}

/// Reads the credentials of threads.
pub(crate) struct CredentialsReader {
    kernel: &'static Kernel,
    numbers: Numbers,
    /// The steps from a `struct pid` to the credentials of the thread of that number.
    to_credentials: [u64; 2],
    uid: u64,
    /// None where the kernel has no keys.
    keyrings: Option<KeyringPlaces>,
    /// None where the kernel has no Landlock.
    domain: Option<DomainPlace>,
    /// The session keyring of this process, by its address; 0 for none.
    pub own_session: u64,
}

/// Finds all places before a tree is stopped, and keeps them for the next dump of this boot: the
/// kernel's description of its types is large.
pub fn prepare() {
    match CredentialsReader::get() {
        Ok(_) => super::keep(),
        Err(why) => log::debug!("the kernel's memory does not tell credentials: {why}"),
    }
}

/// The serial number of the calling thread's session keyring, 0 for none, by a look of its own;
/// none where the places are not kept by a dump of this boot.
pub(crate) fn own_session_serial() -> Option<i32> {
    let layout = Layout::of_this_kernel();
    let way = [
        ("task_struct", "real_cred"),
        ("cred", "session_keyring"),
        ("key", "serial"),
    ];
    let [credentials, session, serial] = way.map(|(structure, member)| {
        let at = layout.kept(structure, member)?;
        u32::try_from(at).ok()
    });
    let word = kernel_memory::own_word(&[credentials?, session?, serial?]);
    // A number of four bytes.
    word.ok().map(|word| word as i32)
}

impl CredentialsReader {
    /// The one for the running kernel; why there is none otherwise.
    pub fn get() -> std::result::Result<&'static Self, &'static str> {
        let kernel = Kernel::get()?;
        let reader = kernel.credentials.get_or_init(|| {
            let found = Self::find(kernel);
            found.map_err(|error| error.to_string())
        });
        reader.as_ref().map_err(String::as_str)
    }

    fn find(kernel: &'static Kernel) -> Result<Self> {
        let cred = |member| kernel.offset("cred", member);
        let links = kernel.offset("task_struct", "pid_links")?;
        let real = kernel.offset("task_struct", "real_cred")?;
        let mut reader = Self {
            kernel,
            numbers: Numbers::find(kernel)?,
            to_credentials: [kernel.offset("pid", "tasks")?, real.wrapping_sub(links)],
            uid: cred("uid")?,
            keyrings: None,
            domain: None,
            own_session: 0,
        };
        if keys::are_there() {
            for (structure, member) in OF_KEYS.into_iter().chain(OF_KEYRINGS) {
                match member {
                    "" => kernel.size(structure)?,
                    member => kernel.offset(structure, member)?,
                };
            }
            reader.keyrings = Some(KeyringPlaces {
                session: cred("session_keyring")?,
                process: cred("process_keyring")?,
                thread: cred("thread_keyring")?,
                authority: cred("request_key_auth")?,
                destination: cred("jit_keyring")?,
            });
        }
        if landlock::is_there() {
            let security = cred("security")?;
            let find = || find_domain(kernel, [real, security]);
            let domain = kernel.layout.found("landlock.domain", find)?;
            reader.domain = Some(DomainPlace { security, domain });
        }
        // A place that is wrong is seen by the user of this process.
        let own = reader.look(rustix::thread::gettid().as_raw_nonzero().get())?;
        reader.own_session = own.session;
        match own.uid == rustix::process::getuid().as_raw() {
            true => Ok(reader),
            false => Err(unclear("this process is not found")),
        }
    }

    /// Looks at a thread that is stopped, or the caller's.
    pub fn look(&self, tid: i32) -> Result<Credentials> {
        let walk = self.walk(tid)?;
        let word_at = |at| word(&walk.bytes, at);
        let mut seen = Credentials {
            uid: half(&walk.bytes, self.uid)?,
            ..Credentials::default()
        };
        if let Some(places) = &self.keyrings {
            seen.session = word_at(places.session)?;
            seen.process = word_at(places.process)?;
            seen.thread = word_at(places.thread)?;
            seen.authority = word_at(places.authority)?;
            [seen.destination] = part(&walk.bytes, places.destination)?;
        }
        if let Some(places) = &self.domain {
            let credentials = walk.addresses.last().copied().unwrap_or(0);
            let modules = [places.security];
            let modules = self
                .kernel
                .memory
                .walk(credentials, &modules, STRUCTURE_BYTES)?;
            seen.is_in_domain = word(&modules.bytes, places.domain)? != 0;
        }
        Ok(seen)
    }

    /// The way to the credentials of a thread.
    fn walk(&self, tid: i32) -> Result<Walk> {
        /// The root grows that often while the numbers of processes do.
        const ROOTS: usize = 6;
        let (kernel, numbers) = (self.kernel, &self.numbers);
        for _ in 0..ROOTS {
            let root = numbers.root();
            if let Some(mut way) = numbers.way(tid, root) {
                way.extend(self.to_credentials);
                match kernel.memory.walk(numbers.head, &way, STRUCTURE_BYTES) {
                    Ok(walk) if walk.addresses.first() == Some(&root.at) => return Ok(walk),
                    Err(error) if Errno::from_io_error(&error) != Some(Errno::FAULT) => {
                        return Err(error);
                    }
                    Ok(_) | Err(_) => {}
                }
            }
            if !numbers.learn(kernel)? {
                break;
            }
        }
        Err(Error::new(ErrorKind::NotFound, "the thread is not found"))
    }

    /// Reads a key.
    pub fn key(&self, at: u64) -> Result<Key> {
        let kernel = self.kernel;
        let key = kernel.read("key", at)?;
        let expires_s = key.word("expiry")?;
        let kind = kernel.word_of("key_type", "name", key.word("type")?)?;
        Ok(Key {
            at,
            serial: key.half("serial")?.cast_signed(),
            uid: key.half("uid")?,
            gid: key.half("gid")?,
            permissions: key.half("perm")?,
            expires_s: (expires_s != 0 && expires_s < i64::MAX.cast_unsigned())
                .then_some(expires_s),
            flags: key.word("flags")?,
            state: key.short("state")?,
            kind: kernel.text(kind)?,
            description: kernel.text(key.word("description")?)?,
        })
    }

    /// The contents of a key of type "user".
    pub fn contents(&self, key: &Key) -> Result<Vec<u8>> {
        let kernel = self.kernel;
        let payload = kernel.word_of("key", "payload", key.at)?;
        let len = kernel.address_of("user_key_payload", "datalen", payload)?;
        let len = u16::from_ne_bytes(part(&kernel.bytes(len, 2)?, 0)?);
        let data = kernel.address_of("user_key_payload", "data", payload)?;
        kernel.bytes(data, len.into())
    }

    /// The addresses of the keys in a keyring, at most `most`.
    pub fn keys_in(&self, keyring: u64, most: usize) -> Result<Vec<u64>> {
        let mut found = Vec::new();
        let kernel = self.kernel;
        let mut todo = vec![kernel.word_of("key", "keys.root", keyring)?];
        let mut looked = 0;
        while let Some(pointer) = todo.pop() {
            /// Set in pointers to nodes and shortcuts; in the latter, [`OTHER`] is as well. Keys
            /// that are keyrings have only that.
            const META: u64 = 1;
            const OTHER: u64 = 2;
            looked += 1;
            if found.len() > most || looked > 64 * (most + 1) {
                return Err(unclear("there are too many keys"));
            }
            let at = pointer & !(META | OTHER);
            match (at, pointer & META != 0, pointer & OTHER != 0) {
                (0, ..) => {}
                (at, false, _) => found.push(at),
                (at, true, true) => {
                    todo.push(kernel.word_of("assoc_array_shortcut", "next_node", at)?);
                }
                (at, true, false) => {
                    const SLOTS: usize = 16;
                    let slots = kernel.address_of("assoc_array_node", "slots", at)?;
                    todo.extend(kernel.words(slots, SLOTS)?);
                }
            }
        }
        Ok(found)
    }
}

/// Finds where the domain stands in what security modules keep of credentials: it is the pointer
/// that changes when a thread of ours enters one. `steps` lead there from a `task_struct`. Behind
/// it stands memory of others, credentials as well, where pointers differ by chance; before it
/// stands what other modules keep, which a domain does not concern.
fn find_domain(kernel: &Kernel, steps: [u64; 2]) -> Result<u64> {
    let words = || -> Result<Vec<u64>> {
        let bytes = kernel.memory.walk(0, &steps, STRUCTURE_BYTES)?.bytes;
        let words = bytes.as_chunks::<8>().0.iter();
        Ok(words.map(|word| u64::from_ne_bytes(*word)).collect())
    };
    let (before, after) = (words()?, landlock::in_domain(words)??);
    let at = first_changed_pointer(&before, &after);
    let unclear = || unclear("where Landlock keeps domains is not clear");
    at.map(|at| 8 * at as u64).ok_or_else(unclear)
}

/// Where the first pointer of the kernel stands that is another one than before.
fn first_changed_pointer(before: &[u64], after: &[u64]) -> Option<usize> {
    let is_pointer = |word: u64| word >> 47 == u64::MAX >> 47;
    let mut pairs = before.iter().zip(after);
    pairs.position(|(before, after)| before != after && is_pointer(*after))
}

/// How many bits of a number choose a slot of a node of this size. Behind the slots come marks.
fn slot_bits(node_bytes: u64, slots: u64) -> u32 {
    let words = node_bytes.saturating_sub(slots) / 8;
    words.checked_ilog2().unwrap_or(0).max(1)
}

fn part<const N: usize>(bytes: &[u8], at: u64) -> Result<[u8; N]> {
    let at = usize::try_from(at).ok();
    let part = at.and_then(|at| bytes.get(at..at + N));
    let part = part.ok_or_else(|| unclear("a structure is larger than expected"))?;
    Ok(part.try_into().expect("as many bytes"))
}

fn word(bytes: &[u8], at: u64) -> Result<u64> {
    part(bytes, at).map(u64::from_ne_bytes)
}

fn half(bytes: &[u8], at: u64) -> Result<u32> {
    part(bytes, at).map(u32::from_ne_bytes)
}

fn unclear(why: &'static str) -> Error {
    Error::new(ErrorKind::Unsupported, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_by_the_slots_of_its_root() {
        let numbers = Numbers {
            head: 0x1000,
            slots: 40,
            slot_bits: 6,
            root: Mutex::new(Root { at: 0, shift: 0 }),
        };
        let way = |number, shift| numbers.way(number, Root { at: 0, shift });
        assert_eq!(way(63, 0), Some(vec![0, 38 + 8 * 63]));
        assert_eq!(way(64, 0), None, "behind the last slot");
        assert_eq!(way(65, 6), Some(vec![0, 38 + 8, 38 + 8]));
        assert_eq!(way(4095, 6), Some(vec![0, 38 + 8 * 63, 38 + 8 * 63]));
        assert_eq!(way(4096, 6), None);
        assert_eq!(way(5, 12), Some(vec![0, 38, 38, 38 + 8 * 5]));
        assert_eq!(way(i32::MAX, 24), None);
        assert_eq!(
            way(-1, 30),
            Some(
                vec![0, 38 + 8 * 3]
                    .into_iter()
                    .chain([38 + 8 * 63; 5])
                    .collect()
            )
        );
    }

    #[test]
    fn other_pointers_are_told_from_other_words() {
        const POINTER: u64 = 0xffff_8880_0000_1000;
        let before = [1, POINTER, 0, POINTER];
        let after = [2, POINTER, POINTER + 64, POINTER + 8];
        assert_eq!(first_changed_pointer(&before, &after), Some(2));
        assert_eq!(first_changed_pointer(&before, &before), None);
    }

    #[test]
    fn every_thread_of_this_process_is_found() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        let reader = CredentialsReader::get().expect("it was asked");
        for entry in std::fs::read_dir("/proc/self/task").expect("a folder") {
            let name = entry.expect("a thread").file_name();
            let tid = name.to_str().and_then(|tid| tid.parse().ok());
            // One that has ended meanwhile is another test's.
            let Ok(seen) = reader.look(tid.expect("a number")) else {
                continue;
            };
            assert_eq!(seen.uid, 0);
        }
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        reader.look(own).expect("it runs");
        reader.look(i32::MAX).expect_err("nobody has it");
        reader.look(0).expect_err("nobody has it");
    }

    #[test]
    fn a_domain_is_seen_in_the_thread_that_is_in_it() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        if !landlock::is_there() {
            testkit::skip!("a kernel without Landlock");
        }
        let reader = CredentialsReader::get().expect("it was asked");
        let look = || reader.look(rustix::thread::gettid().as_raw_nonzero().get());
        let before = look().expect("this thread");
        let inside = landlock::in_domain(look)
            .expect("a domain")
            .expect("it is found");
        let own = before.is_in_domain;
        assert!(!own && inside.is_in_domain, "{before:?} {inside:?}");
        assert_eq!(look().expect("this thread"), before);
    }

    #[test]
    fn the_place_of_a_domain_is_the_same_whatever_stands_behind_it() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        if !landlock::is_there() {
            testkit::skip!("a kernel without Landlock");
        }
        let kernel = Kernel::get().expect("it was asked");
        let steps = [("task_struct", "real_cred"), ("cred", "security")];
        let steps = steps.map(|(structure, member)| kernel.offset(structure, member));
        let steps = steps.map(|at| at.expect("this kernel has it"));
        let first = find_domain(kernel, steps).expect("it is found");
        for _ in 0..200 {
            assert_eq!(find_domain(kernel, steps).expect("it is found"), first);
        }
    }

    #[test]
    fn a_keyring_is_seen_with_all_of_its_keys() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        if !keys::are_there() {
            testkit::skip!("a kernel without keys");
        }
        let reader = CredentialsReader::get().expect("it was asked");
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
            let seen = reader.look(tid).expect("this thread");
            let keyring = reader.key(seen.session).expect("a keyring");
            assert_eq!(
                (keyring.serial, &keyring.description[..]),
                (serial, &b"_ses"[..])
            );
            let all = reader.keys_in(seen.session, 100).expect("keys");
            let all = all.into_iter().map(|at| reader.key(at).expect("a key"));
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
            assert_eq!(reader.contents(third).expect("contents"), vec![3; 301]);
            reader.keys_in(seen.session, 3).expect_err("too many");
        };
        testkit::calls::in_new_session(look).expect("a keyring");
    }
}
