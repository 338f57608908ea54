//! What a guest does with its disk and its network, all the time, and whether that is right.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::mount::{MountFlags, mount};
use sys::netlink::{self, Batch, Netlink};

use crate::machine::inside::insert_modules;

/// Where others connect to.
const PORT: u16 = 7;

/// How long it is waited between two questions.
const PAUSE: Duration = Duration::from_millis(5);

/// Work that goes on: how often it was done, how often it was found wrong, and how often it ended.
#[derive(Debug, Default)]
pub struct Work {
    done: AtomicU64,
    wrong: AtomicU64,
    ended: AtomicU64,
}

/// What is done with the disk.
pub static DISK: Work = Work::new();
/// What is done with the network.
pub static TALK: Work = Work::new();

impl Work {
    const fn new() -> Self {
        Self {
            done: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        }
    }

    /// Its three numbers.
    pub fn told(&self) -> String {
        let [done, wrong, ended] = [&self.done, &self.wrong, &self.ended];
        let numbers = [done, wrong, ended].map(|number| number.load(Ordering::SeqCst).to_string());
        numbers.join(" ")
    }

    /// Has a thread of its own do the work, until it fails.
    fn begin(&'static self, work: impl FnOnce(&Self) -> io::Result<()> + Send + 'static) {
        thread::spawn(move || {
            if let Err(error) = work(self) {
                println!("the work has ended: {error}");
            }
            self.ended.fetch_add(1, Ordering::SeqCst);
        });
    }

    fn count(&self, is_right: bool) {
        let number = if is_right { &self.done } else { &self.wrong };
        number.fetch_add(1, Ordering::SeqCst);
    }
}

/// Mounts what shows devices, and inserts their drivers.
pub fn find() -> io::Result<String> {
    for (kind, at) in [("devtmpfs", "/dev"), ("sysfs", "/sys")] {
        mount(kind, at, kind, MountFlags::empty(), None)?;
    }
    insert_modules()?;
    Ok("found".to_owned())
}

/// What is written to a disk and read of it at once, where direct transfers can take it.
#[repr(align(4096))]
struct Block([u8; 4096]);

/// Writes the number of the pass to each block of the first MiB of the disk, past the page cache.
/// Each must be as the pass before has left it.
pub fn begin_disk(mib: u64) -> io::Result<String> {
    let disk = File::options()
        .read(true)
        .write(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed())
        .open("/dev/vda")?;
    let blocks = (mib << 20) / 4096;
    DISK.begin(move |work| {
        let mut block = Block([0; 4096]);
        for pass in 1_u64.. {
            let mut are_right = true;
            for number in 0..blocks {
                disk.read_exact_at(&mut block.0, number * 4096)?;
                let before = (pass - 1).to_le_bytes();
                // In the first pass there is whatever the disk has.
                are_right &= pass == 1 || block.0.chunks(8).all(|word| word == before);
                block
                    .0
                    .chunks_mut(8)
                    .for_each(|word| word.copy_from_slice(&pass.to_le_bytes()));
                disk.write_all_at(&block.0, number * 4096)?;
            }
            work.count(are_right);
        }
        Ok(())
    });
    Ok("writing".to_owned())
}

fn address(last: u64) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, last as u8)
}

/// Gives the network device an address, and answers all who connect: each line is said again.
pub fn serve(last: u64) -> io::Result<String> {
    const RTM_NEWLINK: u16 = 16;
    const RTM_NEWADDR: u16 = 20;
    const IFA_LOCAL: u16 = 2;
    const IFF_UP: u32 = 1;
    const AF_INET: u8 = 2;
    const PREFIX_BITS: u8 = 24;
    let index = fs::read_to_string("/sys/class/net/eth0/ifindex")?;
    let index = index.trim().parse::<u32>().map_err(io::Error::other)?;
    let asked = netlink::REQUEST | netlink::ACK;
    let mut batch = Batch::default();
    // struct ifaddrmsg: family, length of the prefix, flags, scope; index.
    let of_address = [AF_INET, PREFIX_BITS, 0, 0];
    let of_address = [of_address, index.to_ne_bytes()].concat();
    batch
        .message(RTM_NEWADDR, asked | netlink::CREATE, &of_address)
        .attribute(IFA_LOCAL, &address(last).octets());
    // struct ifinfomsg: family and type are left open; index, flags, those that are to change.
    let words = [0, index, IFF_UP, IFF_UP].map(u32::to_ne_bytes);
    batch.message(RTM_NEWLINK, asked, &words.concat());
    Netlink::route()?.apply(batch)?;
    let listener = TcpListener::bind((address(last), PORT))?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            thread::spawn(move || answer(&stream));
        }
    });
    Ok("there".to_owned())
}

fn answer(stream: &TcpStream) -> io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let mut answered = 0_u64;
    while let Some(line) = lines.next().transpose()? {
        answered += 1;
        // How many it were on this very connection.
        (&mut &*stream).write_all(format!("{line} {answered}\n").as_bytes())?;
    }
    Ok(())
}

/// Asks over one connection, one question after the other.
pub fn begin_talk(last: u64) -> io::Result<String> {
    let stream = TcpStream::connect((address(last), PORT))?;
    TALK.begin(move |work| {
        let mut lines = BufReader::new(&stream).lines();
        for number in 1_u64.. {
            (&mut &stream).write_all(format!("question {number}\n").as_bytes())?;
            let answer = lines.next().ok_or(io::ErrorKind::UnexpectedEof)??;
            work.count(answer == format!("question {number} {number}"));
            thread::sleep(PAUSE);
        }
        Ok(())
    });
    Ok("talking".to_owned())
}
