//! packet_diag: what the kernel tells of packet sockets besides their options.

use sys::netlink::{Batch, DUMP, Netlink, REQUEST, attributes};

use super::Membership;
use super::ring::Shape;

const SOCK_DIAG_BY_FAMILY: u16 = abi::kernel::SOCK_DIAG_BY_FAMILY;
const AF_PACKET: u8 = libc::AF_PACKET as u8;
const MESSAGE_BYTES: usize = 16;
/// Where a message has the socket's inode number.
const INODE: usize = 4;
/// `PACKET_SHOW_INFO | PACKET_SHOW_MCLIST | PACKET_SHOW_RING_CFG | PACKET_SHOW_FANOUT`
const SHOW: u32 = 1 | 2 | 4 | 8;
const RUNNING: u32 = 1;
/// The size of `struct packet_diag_mclist`.
const MEMBERSHIP_BYTES: usize = 44;

/// What is told of one.
#[derive(Debug, Default)]
pub(super) struct Facts {
    /// Whether packets come in.
    pub(super) running: bool,
    /// `PACKET_COPY_THRESH`
    pub(super) copy_threshold: u32,
    /// What it is a member of; interfaces by number.
    pub(super) memberships: Vec<(u32, Membership)>,
    /// The ring into which packets come.
    pub(super) receive_ring: Option<Shape>,
    /// Whether it has a ring from which packets go.
    pub(super) sends_from_ring: bool,
    /// Whether it is in a group over which packets are spread.
    pub(super) in_fanout: bool,
}

/// Asks about the packet socket with this inode number; there is no asking for one alone.
pub(super) fn facts(inode: u32) -> std::io::Result<Option<Facts>> {
    let mut request = [0u8; 20];
    request[0] = AF_PACKET;
    request[8..12].copy_from_slice(&SHOW.to_ne_bytes());
    let mut batch = Batch::default();
    batch.message(SOCK_DIAG_BY_FAMILY, REQUEST | DUMP, &request);
    let answers = Netlink::sock_diag()?.list(batch)?;
    let mut found = answers
        .iter()
        .filter(|answer| word(&answer.payload, INODE) == Some(inode));
    Ok(found.next().and_then(|answer| parse(&answer.payload)))
}

fn word(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(data.get(at..at + 4)?.try_into().ok()?))
}

fn parse(payload: &[u8]) -> Option<Facts> {
    let mut facts = Facts::default();
    let mut version = 0;
    for (kind, data) in attributes(payload, MESSAGE_BYTES) {
        match kind {
            0 => {
                version = word(data, 4)?;
                facts.copy_threshold = word(data, 12)?;
                facts.running = word(data, 20)? & RUNNING != 0;
            }
            1 => {
                let memberships = data.chunks_exact(MEMBERSHIP_BYTES).map(membership);
                facts.memberships = memberships.collect::<Option<_>>()?;
            }
            2 => facts.receive_ring = Some(shape(data)?),
            3 => facts.sends_from_ring = true,
            4 => facts.in_fanout = true,
            _ => {}
        }
    }
    if let Some(ring) = &mut facts.receive_ring {
        ring.version = version;
    }
    Some(facts)
}

fn membership(data: &[u8]) -> Option<(u32, Membership)> {
    let half = |at: usize| Some(u16::from_ne_bytes(data.get(at..at + 2)?.try_into().ok()?));
    let address_bytes = usize::from(half(10)?);
    let membership = Membership {
        interface: Vec::new(),
        kind: half(8)?.into(),
        address: data.get(12..12 + address_bytes)?.to_vec(),
        count: word(data, 4)?,
    };
    Some((word(data, 0)?, membership))
}

fn shape(data: &[u8]) -> Option<Shape> {
    Some(Shape {
        version: 0,
        block_bytes: word(data, 0)?,
        blocks: word(data, 4)?,
        frame_bytes: word(data, 8)?,
        frames: word(data, 12)?,
        retire_ms: word(data, 16)?,
        private_bytes: word(data, 20)?,
        features: word(data, 24)?,
    })
}
