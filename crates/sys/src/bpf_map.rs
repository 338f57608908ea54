//! Maps of bpf(2): what they are, and what is in them.

use std::io::{self, Error};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use crate::kernel_memory::{bpf, instruction, load};

/// The longest name, with the zero behind it.
pub const NAME_BYTES: usize = 16;
/// `BPF_F_RDONLY`: a descriptor that may not write.
pub const READ_ONLY: u32 = 1 << 3;
/// `BPF_F_WRONLY`: one that may not read.
pub const WRITE_ONLY: u32 = 1 << 4;
/// How many entries are asked for at first.
const ROOM: u32 = 256;
/// More entries than any bucket has.
const MOST_ROOM: u32 = 1 << 24;

/// Commands of bpf(2).
mod command {
    pub const CREATE: i32 = 0;
    pub const LOOK_UP: i32 = 1;
    pub const UPDATE: i32 = 2;
    pub const OPEN_BY_ID: i32 = 14;
    pub const INFO: i32 = 15;
    pub const QUERY: i32 = 16;
    pub const TAKE: i32 = 21;
    pub const FREEZE: i32 = 22;
    pub const LOOK_UP_BATCH: i32 = 24;
    pub const UPDATE_BATCH: i32 = 26;
}

/// The hooks of a network namespace that programs are attached to: `enum bpf_attach_type`, and
/// their names.
pub const NETWORK_HOOKS: [(u32, &str); 2] = [(17, "flow dissector"), (36, "sk_lookup")];

/// Counts the programs that are attached to a hook of the network namespace `network`.
///
/// # Errors
/// As bpf(2) with `BPF_PROG_QUERY`: `EPERM` without `CAP_NET_ADMIN`. A kernel that has no such hook
/// has no programs.
pub fn attached_to_network(network: impl AsFd, hook: u32) -> io::Result<u32> {
    let network = u64::from(network.as_fd().as_raw_fd().cast_unsigned());
    // The namespace and the hook; flags; where the numbers of programs go; how many, of which none
    // has room; six more that are not used.
    let mut query = [network | u64::from(hook) << 32, 0, 0, 0, 0, 0, 0];
    match bpf(command::QUERY, &mut query) {
        Ok(_) => Ok(query[3] as u32),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOSPC) => Ok(query[3] as u32),
            Some(libc::EINVAL | libc::ENOSYS) => Ok(0),
            _ => Err(error),
        },
    }
}

/// What a map is made of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Definition {
    /// `enum bpf_map_type`.
    pub kind: u32,
    /// The size of a key.
    pub key_bytes: u32,
    /// The size of a value, of one processor where each has its own.
    pub value_bytes: u32,
    /// How many entries there may be.
    pub max_entries: u32,
    /// `BPF_F_` bits of the map, not of its descriptors.
    pub flags: u32,
    /// The node of its memory, where one was chosen (`BPF_F_NUMA_NODE`).
    pub numa_node: u32,
    /// Its name, of fewer than [`NAME_BYTES`].
    pub name: Vec<u8>,
}

/// What the kernel tells of a map (`BPF_OBJ_GET_INFO_BY_FD`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Info {
    /// Its number, as long as the kernel runs.
    pub id: u32,
    /// What it is made of; the node of its memory is not told.
    pub definition: Definition,
    /// Whether the types of its keys or values are known (BTF).
    pub is_typed: bool,
    /// The network device that it is on; 0 for none.
    pub device: u32,
    /// What some kinds have besides (`map_extra`).
    pub extra: u64,
}

fn number(map: impl AsFd) -> u64 {
    map.as_fd().as_raw_fd().cast_unsigned().into()
}

fn address(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

fn address_mut(bytes: &mut [u8]) -> u64 {
    bytes.as_mut_ptr().expose_provenance() as u64
}

/// A descriptor that bpf(2) gave.
fn descriptor(number: i64) -> OwnedFd {
    // SAFETY: the kernel just returned this descriptor and nobody else knows it.
    unsafe { OwnedFd::from_raw_fd(number as i32) }
}

/// Asks what a map is.
///
/// # Errors
/// `EINVAL` for what is none.
pub fn info(map: impl AsFd) -> io::Result<Info> {
    const BYTES: usize = 88;
    let mut told = [0; BYTES];
    let mut attributes = [number(map) | (BYTES as u64) << 32, address_mut(&mut told)];
    bpf(command::INFO, &mut attributes)?;
    let word = |at: usize| u32::from_ne_bytes(told[at..at + 4].try_into().expect("four bytes"));
    let name = told[24..24 + NAME_BYTES].split(|byte| *byte == 0).next();
    Ok(Info {
        id: word(4),
        definition: Definition {
            kind: word(0),
            key_bytes: word(8),
            value_bytes: word(12),
            max_entries: word(16),
            flags: word(20),
            numa_node: 0,
            name: name.unwrap_or_default().to_vec(),
        },
        is_typed: [44, 64, 68, 72].iter().any(|at| word(*at) != 0),
        device: word(40),
        extra: u64::from(word(80)) | u64::from(word(84)) << 32,
    })
}

/// Makes a map.
///
/// # Errors
/// As bpf(2): `EPERM` without `CAP_BPF`, `EINVAL` for what makes no sense, `E2BIG`, `ENOMEM`.
///
/// # Panics
/// For a name that is too long.
pub fn create(definition: &Definition) -> io::Result<OwnedFd> {
    assert!(definition.name.len() < NAME_BYTES, "it was checked");
    let mut bytes = [0; 48];
    let words = [
        definition.kind,
        definition.key_bytes,
        definition.value_bytes,
        definition.max_entries,
        definition.flags,
        0,
        definition.numa_node,
    ];
    for (four, word) in bytes.chunks_exact_mut(4).zip(words) {
        four.copy_from_slice(&word.to_ne_bytes());
    }
    bytes[28..28 + definition.name.len()].copy_from_slice(&definition.name);
    let words = bytes.as_chunks::<8>().0.iter();
    let mut attributes = words
        .map(|word| u64::from_ne_bytes(*word))
        .collect::<Vec<_>>();
    bpf(command::CREATE, &mut attributes).map(descriptor)
}

/// Opens a map by its number, for reading and writing, or as [`READ_ONLY`] or [`WRITE_ONLY`] say.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`, `ENOENT` where there is none.
pub fn open(id: u32, access: u32) -> io::Result<OwnedFd> {
    let mut attributes = [id.into(), access.into()];
    bpf(command::OPEN_BY_ID, &mut attributes).map(descriptor)
}

/// Keeps everybody but programs from writing to a map from now on.
///
/// # Errors
/// `EBUSY` where it is being written to, or is frozen already.
pub fn freeze(map: impl AsFd) -> io::Result<()> {
    bpf(command::FREEZE, &mut [number(map)]).map(drop)
}

/// Puts a value behind the last one of a queue, or onto a stack.
///
/// # Errors
/// `E2BIG` where it is full.
pub fn push(map: impl AsFd, value: &[u8]) -> io::Result<()> {
    bpf(command::UPDATE, &mut [number(map), 0, address(value), 0]).map(drop)
}

/// Takes the first value out of a queue, or the last one off a stack, if there is one.
///
/// # Errors
/// As bpf(2).
pub fn pop(map: impl AsFd, value_bytes: usize) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; value_bytes];
    let mut attributes = [number(map), 0, address_mut(&mut value), 0];
    match bpf(command::TAKE, &mut attributes) {
        Ok(_) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Loads a program that has a map and does nothing: as long as it is there, the map is.
///
/// # Errors
/// As [`crate::kernel_memory::KernelMemory::open`].
pub fn use_in_program(map: impl AsFd) -> io::Result<OwnedFd> {
    const LOAD_MAP: u8 = 0x18;
    const BY_DESCRIPTOR: u8 = 1;
    const MOVE_VALUE: u8 = 0xb7;
    const EXIT: u8 = 0x95;
    load(&[
        instruction(LOAD_MAP, 1, BY_DESCRIPTOR, 0, map.as_fd().as_raw_fd()),
        instruction(0, 0, 0, 0, 0),
        instruction(MOVE_VALUE, 0, 0, 0, 0),
        instruction(EXIT, 0, 0, 0, 0),
    ])
}

/// The sizes of a map's entries, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// A key.
    pub key: usize,
    /// What is read and written for it: the values of all processors where each has its own.
    pub value: usize,
}

/// Whether a map has an entry with this key.
///
/// # Errors
/// As bpf(2).
pub fn has(map: impl AsFd, key: &[u8], sizes: Sizes) -> io::Result<bool> {
    let mut value = vec![0; sizes.value];
    let mut attributes = [number(map), address(key), address_mut(&mut value), 0];
    match bpf(command::LOOK_UP, &mut attributes) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Writes entries, all of which have `sizes`.
///
/// # Errors
/// As bpf(2): `E2BIG` where there is no room, `EPERM`.
///
/// # Panics
/// When there are not as many values as keys.
pub fn update(map: impl AsFd, (keys, values): (&[u8], &[u8]), sizes: Sizes) -> io::Result<()> {
    let count = keys.len() / sizes.key;
    assert_eq!(values.len(), count * sizes.value, "a value for each key");
    if count == 0 {
        return Ok(());
    }
    let count = u32::try_from(count).map_err(io::Error::other)?;
    let mut attributes = [
        0,
        0,
        address(keys),
        address(values),
        u64::from(count) | number(map) << 32,
        0,
        0,
    ];
    bpf(command::UPDATE_BATCH, &mut attributes).map(drop)
}

/// Reads what is in a map, some entries at a time.
#[derive(Debug)]
pub struct Entries<Map> {
    map: Map,
    sizes: Sizes,
    /// Where the kernel goes on; nothing before the first ones.
    place: Option<Vec<u8>>,
    is_over: bool,
    room: u32,
}

impl<Map: AsFd> Entries<Map> {
    /// Begins with the first ones.
    pub fn new(map: Map, sizes: Sizes) -> Self {
        Self {
            map,
            sizes,
            place: None,
            is_over: false,
            room: ROOM,
        }
    }

    /// The next keys and their values; none behind the last ones.
    ///
    /// # Errors
    /// As bpf(2): `ENOTSUPP` (524) for kinds that cannot be read so.
    pub fn read(&mut self) -> io::Result<Option<(Vec<u8>, Vec<u8>)>> {
        while !self.is_over {
            let room = self.room as usize;
            let mut keys = vec![0; room * self.sizes.key];
            let mut values = vec![0; room * self.sizes.value];
            // The kernel's own place in a map takes four bytes, or a key.
            let mut next = vec![0; self.sizes.key.max(8)];
            let mut attributes = [
                self.place.as_deref().map_or(0, address),
                address_mut(&mut next),
                address_mut(&mut keys),
                address_mut(&mut values),
                u64::from(self.room) | number(&self.map) << 32,
                0,
                0,
            ];
            match bpf(command::LOOK_UP_BATCH, &mut attributes) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => self.is_over = true,
                Err(error) if is_no_room(&error) && self.room < MOST_ROOM => {
                    self.room *= 2;
                    continue;
                }
                Err(error) => return Err(error),
            }
            let count = (attributes[4] & u64::from(u32::MAX)) as usize;
            if count > room {
                return Err(io::ErrorKind::InvalidData.into());
            }
            self.place = Some(next);
            keys.truncate(count * self.sizes.key);
            values.truncate(count * self.sizes.value);
            if count > 0 {
                return Ok(Some((keys, values)));
            }
        }
        Ok(None)
    }
}

/// Whether more entries belong together than there was room for.
fn is_no_room(error: &Error) -> bool {
    error.raw_os_error() == Some(libc::ENOSPC)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HASH: u32 = 1;
    const QUEUE: u32 = 22;
    const SIZES: Sizes = Sizes { key: 4, value: 8 };

    fn hash(max_entries: u32) -> Option<OwnedFd> {
        let definition = Definition {
            kind: HASH,
            key_bytes: 4,
            value_bytes: 8,
            max_entries,
            name: b"counts".to_vec(),
            ..Definition::default()
        };
        match create(&definition) {
            Ok(map) => {
                let told = info(&map).expect("it is a map");
                assert_eq!((told.definition, told.is_typed), (definition, false));
                Some(map)
            }
            Err(error) => {
                eprintln!("skipped: this system lets nobody make maps: {error}");
                None
            }
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let Some(map) = hash(5000) else { return };
        let keys: Vec<u8> = (0..4000_u32).flat_map(u32::to_ne_bytes).collect();
        let values: Vec<u8> = (0..4000_u64)
            .flat_map(|at| (at * at).to_ne_bytes())
            .collect();
        update(&map, (&keys, &values), SIZES).expect("there is room");
        let other = open(info(&map).expect("told").id, READ_ONLY).expect("root may");
        let mut entries = Entries::new(&other, SIZES);
        let mut seen = vec![false; 4000];
        while let Some((keys, values)) = entries.read().expect("read") {
            let pairs = keys
                .as_chunks::<4>()
                .0
                .iter()
                .zip(values.as_chunks::<8>().0);
            for (key, value) in pairs {
                let (key, value) = (u32::from_ne_bytes(*key), u64::from_ne_bytes(*value));
                assert_eq!(value, u64::from(key) * u64::from(key));
                assert!(!std::mem::replace(&mut seen[key as usize], true), "once");
            }
        }
        assert!(seen.iter().all(|seen| *seen));
        assert!(has(&map, &7_u32.to_ne_bytes(), SIZES).expect("asked"));
        assert!(!has(&map, &4000_u32.to_ne_bytes(), SIZES).expect("asked"));
        let error = update(&other, (&keys[..4], &values[..8]), SIZES);
        assert_eq!(
            error.expect_err("it only reads").raw_os_error(),
            Some(libc::EPERM)
        );
        freeze(&map).expect("nobody writes");
        assert!(update(&map, (&keys[..4], &values[..8]), SIZES).is_err());
    }

    #[test]
    fn an_empty_map_has_no_entries() {
        let Some(map) = hash(1) else { return };
        assert_eq!(Entries::new(&map, SIZES).read().expect("read"), None);
    }

    #[test]
    fn a_queue_takes_as_many_as_fit() {
        let definition = Definition {
            kind: QUEUE,
            value_bytes: 3,
            max_entries: 2,
            ..Definition::default()
        };
        let Ok(map) = create(&definition) else { return };
        push(&map, b"one").expect("room");
        push(&map, b"two").expect("room");
        let error = push(&map, b"six").expect_err("it is full");
        assert_eq!(error.raw_os_error(), Some(libc::E2BIG));
    }
}
