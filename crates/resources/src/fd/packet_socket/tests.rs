//! Packet sockets of every kind, dumped and made again, with packets before and after.

use super::super::testing::World;
use super::*;
use sys::packet_ring::PacketRing;
use sys::socket::Along;

use super::ring::{KERNEL, Shape, V3};

const PACKET_RX_RING: i32 = libc::PACKET_RX_RING;
const PACKET_VERSION: i32 = libc::PACKET_VERSION;
const LOOPBACK: u32 = 1;
/// Protocols of these tests' own.
const PROTOCOL: u16 = 0x88b5;

/// A socket for packets of a protocol over the loopback interface.
fn socket(protocol: u16) -> OwnedFd {
    let own = sys::socket::open(AF_PACKET, SOCK_DGRAM, 0).expect("made");
    sys::socket::bind(&own, &address(protocol, LOOPBACK)).expect("bound");
    own
}

fn send(protocol: u16, bytes: &[u8]) {
    let from = sys::socket::open(AF_PACKET, SOCK_DGRAM, 0).expect("made");
    let along = Along {
        name: Some(&address(protocol, LOOPBACK)),
        ..Along::default()
    };
    sys::socket::send(&from, bytes, along, 0).expect("sent");
}

fn set(own: &OwnedFd, name: i32, value: i32) {
    sys::socket::set_number(own, SOL_PACKET, name, value).expect("set");
}

fn get(own: &OwnedFd, name: i32) -> i32 {
    sys::socket::number(own, SOL_PACKET, name).expect("told")
}

#[test]
fn options_filters_and_memberships_survive() {
    testkit::needs_root!();
    let own = sys::socket::open(AF_PACKET, SOCK_RAW, 0).expect("made");
    // All packets pass that are longer than 1000 bytes.
    let filter = [0x80u16, 0x25, 6, 6]
        .into_iter()
        .zip([(0, 0), (1, 0), (0, 0), (0, 0)]);
    let filter = filter
        .zip([0u32, 1000, 0, 65535])
        .flat_map(|((code, (yes, no)), k)| {
            let mut one = code.to_ne_bytes().to_vec();
            one.extend([no, yes]);
            one.extend(k.to_ne_bytes());
            one
        });
    let filter = filter.collect::<Vec<_>>();
    sys::socket::attach_filter(&own, &filter).expect("taken");
    for (name, value) in [(8, 1), (9, 1), (14, 1), (15, 1), (17, 16), (20, 1), (23, 1)] {
        set(&own, name, value);
    }
    set(&own, PACKET_VERSION, 1);
    set(&own, PACKET_COPY_THRESH, 77);
    let mut promiscuous = LOOPBACK.to_ne_bytes().to_vec();
    promiscuous.extend([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    let multicast = [
        &LOOPBACK.to_ne_bytes()[..],
        &[0, 0, 6, 0, 1, 0, 94, 0, 0, 9, 0, 0],
    ]
    .concat();
    for request in [&promiscuous, &promiscuous, &multicast] {
        sys::socket::set_option(&own, SOL_PACKET, PACKET_ADD_MEMBERSHIP, request).expect("member");
    }
    sys::socket::bind(&own, &address(PROTOCOL + 1, LOOPBACK)).expect("bound");
    // By processor, and a number that nobody else has.
    let fanout = i32::try_from(std::process::id() & 0xffff).expect("small") | 2 << 16;
    set(&own, PACKET_FANOUT, fanout);
    let mut world = World::default();
    let at = world.add(own);
    world.dump().expect("dump");
    assert_eq!(world.describe(at), "packet socket protocol=0x88b6 on lo");
    world.restore().expect("restore");
    let own = world.get(at);
    for (name, value) in [(8, 1), (9, 1), (14, 1), (15, 1), (17, 16), (20, 1), (23, 1)] {
        assert_eq!(get(own, name), value, "{name}");
    }
    assert_eq!(
        (get(own, PACKET_VERSION), get(own, PACKET_FANOUT)),
        (1, fanout)
    );
    assert_eq!(sys::socket::filter(own).expect("told"), filter);
    let inode = u32::try_from(rustix::fs::fstat(own).expect("stat").st_ino).expect("32 bits");
    let facts = diag::facts(inode).expect("asked").expect("told");
    assert!(facts.running && facts.copy_threshold == 77);
    let counts = facts
        .memberships
        .iter()
        .map(|(on, one)| (*on, one.kind, one.count));
    let mut counts = counts.collect::<Vec<_>>();
    counts.sort_unstable();
    assert_eq!(counts, [(LOOPBACK, 0, 1), (LOOPBACK, 1, 2)]);
    assert_eq!(
        sys::socket::name(own).expect("told")[..8],
        address(PROTOCOL + 1, LOOPBACK)[..8]
    );
}

#[test]
fn packets_come_before_and_after_and_unread_ones_are_refused() {
    testkit::needs_root!();
    let mut world = World::default();
    let at = world.add(socket(PROTOCOL + 2));
    world.dump().expect("dump");
    world.restore().expect("restore");
    send(PROTOCOL + 2, b"after");
    let mut packet = [0; 10];
    let len = rustix::io::read(world.get(at), &mut packet[..]).expect("received");
    assert_eq!(&packet[..len], b"after");
    send(PROTOCOL + 2, b"unread");
    let error = world.dump().expect_err("there is one").to_string();
    assert!(error.contains("unread packets"), "{error}");
}

/// What a program is in the middle of that reads a ring of frames.
struct Reader {
    shape: Shape,
    next: u32,
    protocol: u16,
    sent: u32,
}

impl Reader {
    fn start(version: u32, protocol: u16) -> (OwnedFd, Self) {
        let shape = Shape {
            version,
            block_bytes: 8192,
            blocks: 3,
            frame_bytes: 2048,
            frames: 12,
            ..Shape::default()
        };
        let own = socket(protocol);
        set(&own, PACKET_VERSION, version.cast_signed());
        let request = [8192u32, 3, 2048, 12].map(u32::to_ne_bytes).concat();
        sys::socket::set_option(&own, SOL_PACKET, PACKET_RX_RING, &request).expect("a ring");
        let (next, sent) = (0, 0);
        (
            own,
            Self {
                shape,
                next,
                protocol,
                sent,
            },
        )
    }

    fn send(&mut self, count: u32) {
        for _ in 0..count {
            self.sent += 1;
            send(
                self.protocol,
                &[&b"packet  "[..], &self.sent.to_ne_bytes()].concat(),
            );
        }
    }

    /// Reads packets, which have come, in their order: the numbers in them.
    fn read(&mut self, own: &OwnedFd, count: u32) -> Vec<u32> {
        let ring = PacketRing::map(own, self.shape.bytes().expect("sound")).expect("mapped");
        let one = |_| {
            let at = self.shape.frame(self.next);
            testkit::wait::wait_until("a packet", testkit::wait::SOON, || ring.word(at) != KERNEL);
            // Where version 1 and 2 have the offset of what a datagram socket sees.
            let at_network = if self.shape.version == 0 { 18 } else { 14 };
            let frame = ring.read(at, 256);
            let start = u16::from_ne_bytes([frame[at_network], frame[at_network + 1]]);
            let number = usize::from(start) + 8;
            ring.set_word(at, KERNEL);
            self.next = (self.next + 1) % self.shape.frames;
            u32::from_ne_bytes(frame[number..number + 4].try_into().expect("four"))
        };
        (0..count).map(one).collect()
    }
}

#[test]
fn rings_of_frames_go_on_where_they_were() {
    testkit::needs_root!();
    for version in [0, 1] {
        let protocol = PROTOCOL + 3 + version as u16;
        let (own, mut reader) = Reader::start(version, protocol);
        let mut world = World::default();
        let at = world.add(own);
        let mut seen = Vec::new();
        // Nothing yet, all read, some unread, around the end.
        for (sent, read) in [(0, 0), (3, 3), (5, 2), (8, 9), (10, 11)] {
            reader.send(sent);
            seen.extend(reader.read(world.get(at), read));
            world.dump().expect("dump");
            world.restore().expect("restore");
        }
        let unread = reader.sent - seen.len() as u32;
        seen.extend(reader.read(world.get(at), unread));
        assert_eq!(
            seen,
            (1..=reader.sent).collect::<Vec<_>>(),
            "version {version}"
        );
        let told = world.describe(at);
        assert!(
            told.ends_with(&format!(" ring=v{} 3x8192", version + 1)),
            "{told}"
        );
        // Full, and with packets for which there was no room.
        let whole = reader.sent + 1..=reader.sent + 12;
        reader.send(15);
        for _ in 0..2 {
            world.dump().expect("dump");
            world.restore().expect("restore");
        }
        let seen = reader.read(world.get(at), 12);
        assert_eq!(seen, whole.collect::<Vec<_>>(), "version {version}");
        reader.send(3);
        let next = reader.sent - 2..=reader.sent;
        let seen = reader.read(world.get(at), 3);
        assert_eq!(seen, next.collect::<Vec<_>>(), "version {version}");
    }
}

#[test]
fn a_ring_without_a_protocol_hears_nothing() {
    testkit::needs_root!();
    for version in 0..3 {
        let own = sys::socket::open(AF_PACKET, SOCK_RAW, 0).expect("made");
        set(&own, PACKET_VERSION, version);
        let words = [8192u32, 3, 2048, 12, 60_000, 0, 0];
        let words = if version == 2 {
            &words[..]
        } else {
            &words[..4]
        };
        let request = words.iter().flat_map(|word| word.to_ne_bytes());
        let request = request.collect::<Vec<_>>();
        sys::socket::set_option(&own, SOL_PACKET, PACKET_RX_RING, &request).expect("a ring");
        let mut world = World::default();
        let at = world.add(own);
        for _ in 0..2 {
            world.dump().expect("dump");
            world.restore().expect("restore");
        }
        let name = sys::socket::name(world.get(at)).expect("told");
        assert_eq!(name[2..8], [0; 6], "version {version}");
    }
}

/// Reads blocks of a ring.
fn read_blocks(own: &OwnedFd, shape: &Shape, next: &mut u32, count: usize) -> Vec<u32> {
    let ring = PacketRing::map(own, shape.bytes().expect("sound")).expect("mapped");
    let mut numbers = Vec::new();
    while numbers.len() < count {
        let start = *next as usize * shape.block_bytes as usize;
        testkit::wait::wait_until("a block", testkit::wait::SOON, || {
            ring.word(start + 8) & 1 != 0
        });
        let packets = ring.word(start + 12);
        let mut at = start + ring.word(start + 16) as usize;
        for _ in 0..packets {
            let network = (ring.word(at + 24) >> 16) as usize;
            numbers.push(ring.word(at + network + 8));
            at += ring.word(at) as usize;
        }
        ring.set_word(start + 8, KERNEL);
        *next = (*next + 1) % shape.blocks;
    }
    numbers
}

#[test]
fn rings_of_blocks_go_on_where_they_were() {
    testkit::needs_root!();
    for (retire_ms, protocol) in [(60_000, PROTOCOL + 5), (5, PROTOCOL + 6)] {
        let own = socket(protocol);
        set(&own, PACKET_VERSION, 2);
        let words = [16384u32, 4, 2048, 32, retire_ms, 16, 0];
        let request = words.map(u32::to_ne_bytes).concat();
        sys::socket::set_option(&own, SOL_PACKET, PACKET_RX_RING, &request).expect("a ring");
        let shape = Shape {
            version: V3,
            block_bytes: 16384,
            blocks: 4,
            frame_bytes: 2048,
            frames: 32,
            ..Shape::default()
        };
        let mut world = World::default();
        let at = world.add(own);
        let (mut sent, mut seen, mut next) = (0u32, Vec::new(), 0);
        // Blocks of some packets, and of as many as there is room for; where they are handed over
        // after a moment, each packet may have one.
        let steps: &[(u32, usize)] = match retire_ms {
            5 => &[(0, 0), (1, 100), (2, 100), (0, 0), (2, 9000), (1, 12)],
            _ => &[(0, 0), (3, 100), (1, 3000), (9, 4000), (2, 8000), (5, 12)],
        };
        for (count, bytes) in steps.iter().copied() {
            for _ in 0..count {
                sent += 1;
                let mut packet = vec![0; bytes.max(12)];
                packet[8..12].copy_from_slice(&sent.to_ne_bytes());
                send(protocol, &packet);
            }
            let dumped = world.dump();
            dumped.unwrap_or_else(|error| panic!("{retire_ms}: {count} of {bytes}: {error}"));
            world.restore().expect("restore");
            let left = sent as usize - seen.len();
            seen.extend(read_blocks(world.get(at), &shape, &mut next, left));
        }
        assert_eq!(seen, (1..=sent).collect::<Vec<_>>(), "{retire_ms}");
        assert!(world.describe(at).ends_with(" ring=v3 4x16384"));
        for _ in 0..9 {
            send(protocol, &[0; 9000]);
        }
        let error = world.dump().expect_err("it is full").to_string();
        assert!(error.contains("its ring is full"), "{error}");
    }
}

fn sound_ring() -> Ring {
    let shape = Shape {
        version: 1,
        block_bytes: 4096,
        blocks: 1,
        frame_bytes: 2048,
        frames: 2,
        ..Shape::default()
    };
    let (next, space) = (1, 0);
    Ring { shape, next, space }
}

#[test]
fn rings_that_make_no_sense_are_refused() {
    let ring = sound_ring();
    let shape = ring.shape;
    assert_eq!(ring.nonsense(), None);
    let shapes = [
        Shape {
            version: 3,
            ..shape
        },
        Shape {
            block_bytes: 4000,
            ..shape
        },
        Shape {
            block_bytes: 0,
            frames: 0,
            ..shape
        },
        Shape {
            blocks: 0,
            frames: 0,
            ..shape
        },
        Shape {
            blocks: u32::MAX,
            frames: u32::MAX,
            ..shape
        },
        Shape {
            frame_bytes: 0,
            ..shape
        },
        Shape {
            frame_bytes: 2047,
            ..shape
        },
        Shape { frames: 3, ..shape },
        Shape {
            private_bytes: u32::MAX,
            ..shape
        },
    ];
    for shape in shapes {
        let (next, space) = (1, 0);
        let ring = Ring { shape, next, space };
        assert!(ring.nonsense().is_some(), "{shape:?}");
    }
    let behind_its_end = Ring { next: 2, ..ring };
    assert!(behind_its_end.nonsense().is_some());
}

#[test]
fn records_that_make_no_sense_are_refused() {
    let ring = sound_ring();
    let sound = Packet {
        kind: SOCK_RAW,
        ..Packet::default()
    };
    let membership = Membership {
        kind: 1,
        ..Membership::default()
    };
    let refused = [
        Packet {
            kind: 10,
            ..sound.clone()
        },
        Packet {
            protocol: 0x10000,
            ..sound.clone()
        },
        Packet {
            interface: b"sixteen letters!".to_vec(),
            ..sound.clone()
        },
        Packet {
            interface: b"a\0".to_vec(),
            ..sound.clone()
        },
        Packet {
            ring: Some(ring.clone()),
            ..sound.clone()
        },
        Packet {
            protocol: 3,
            ring: Some(Ring { next: 9, ..ring }),
            ..sound.clone()
        },
        Packet {
            memberships: vec![Membership {
                kind: 4,
                ..membership.clone()
            }],
            ..sound.clone()
        },
        Packet {
            memberships: vec![Membership {
                address: vec![0; 33],
                ..membership
            }],
            ..sound
        },
    ];
    for record in refused {
        let error = PacketSocket::check(&record).expect_err("it makes no sense");
        assert!(
            matches!(error, Error::Corrupt { .. }),
            "{record:?}: {error}"
        );
    }
}
