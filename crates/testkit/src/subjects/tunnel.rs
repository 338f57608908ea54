//! The other end of a virtual interface: datagrams to anywhere behind it come back to their
//! senders. Argument: the interface's name; `several` for three queues, one of them detached.
//!
//! `count` answers how many were sent back, `listen ADDRESS` has it wait for datagrams at one of
//! the interface's own addresses, under a lower number than the queue's, `heard` what came there;
//! `check` answers "right" if all queues are of the interface.
use std::fs::File;
use std::io::Read as _;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;

use super::{Control, Failure, not_understood};

const IFF_TUN: u16 = 1;
const IFF_MULTI_QUEUE: u16 = 0x100;
const IFF_NO_PI: u16 = 0x1000;
/// Where a packet of IPv4 has the addresses, and behind a header without options the ports.
const SOURCE: usize = 12;
const PORTS: usize = 20;
const UDP: u8 = 17;

fn queue(name: &str, flags: u16) -> Result<File, Failure> {
    let options = File::options().read(true).write(true).clone();
    let queue = options.open("/dev/net/tun")?;
    sys::tun::attach(&queue, name, IFF_TUN | IFF_NO_PI | flags)?;
    Ok(queue)
}

/// Sends every datagram back, as if from where it was to go; checksums stay what they are.
fn send_back(mut queue: &File, count: &AtomicU64) -> Result<(), Failure> {
    let mut packet = [0; 2048];
    loop {
        let bytes = queue.read(&mut packet)?;
        let packet = &mut packet[..bytes];
        if bytes < PORTS + 8 || packet[0] != 0x45 || packet[9] != UDP {
            continue;
        }
        let (one, other) = packet.split_at_mut(SOURCE + 4);
        one[SOURCE..].swap_with_slice(&mut other[..4]);
        let (one, other) = packet.split_at_mut(PORTS + 2);
        one[PORTS..].swap_with_slice(&mut other[..2]);
        rustix::io::write(queue, packet)?;
        count.fetch_add(1, Relaxed);
    }
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let name = arguments.first().ok_or("which interface?")?.clone();
    // Keeps a number below that of the queue.
    let mut kept: Option<OwnedFd> = Some(File::open("/dev/null")?.into());
    let several = arguments.get(1).is_some_and(|word| word == "several");
    let flags = if several { IFF_MULTI_QUEUE } else { 0 };
    let mut queues = vec![queue(&name, flags)?];
    if several {
        queues.push(queue(&name, flags)?);
        queues.push(queue(&name, flags)?);
        sys::tun::set_detached(&queues[1], true)?;
    }
    let count = Arc::new(AtomicU64::new(0));
    for queue in &queues {
        let (queue, count) = (queue.try_clone()?, count.clone());
        thread::spawn(move || send_back(&queue, &count).expect("the interface is there"));
    }
    let mut listener = None;
    control.serve(|question| match question.verb.as_str() {
        "count" => Ok(count.load(Relaxed).to_string()),
        "listen" => {
            let at = question.words.first().ok_or("where?")?;
            kept = None;
            let socket = UdpSocket::bind((at.as_str(), 0))?;
            let port = socket.local_addr()?.port();
            socket.set_read_timeout(Some(Duration::from_secs(10)))?;
            listener = Some(socket);
            Ok(port.to_string())
        }
        "heard" => {
            let mut text = [0; 100];
            let bytes = listener.as_ref().ok_or("nowhere")?.recv(&mut text)?;
            Ok(String::from_utf8_lossy(&text[..bytes]).into_owned())
        }
        "check" => {
            for queue in &queues {
                let attached = sys::tun::attached(queue)?;
                let flags = rustix::fs::fcntl_getfl(queue)?;
                if attached.is_none_or(|attached| attached.name != name)
                    || flags.contains(OFlags::NONBLOCK)
                {
                    return Ok(format!("not a queue of {name}"));
                }
            }
            let is_kept = kept.is_some() || listener.is_some();
            Ok(if is_kept { "right" } else { "lost" }.to_owned())
        }
        _ => not_understood(question),
    })
}
