//! Packet sockets: a program that listens on an interface hears every packet once and in order,
//! those that came before it was dumped and those that come afterwards.

use std::net::UdpSocket;
use std::path::Path;
use std::process::Command;

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use super::stillframe;

/// Sends packets with numbers in them, to a port where nobody reads.
struct Sender {
    to: UdpSocket,
    own: UdpSocket,
    sent: usize,
}

impl Sender {
    fn new() -> Self {
        let [to, own] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").expect("bound"));
        Self { to, own, sent: 0 }
    }

    fn filter(&self) -> String {
        let port = self.to.local_addr().expect("bound").port();
        format!("udp dst port {port}")
    }

    fn send(&mut self, count: usize) {
        let to = self.to.local_addr().expect("bound");
        for number in self.sent..self.sent + count {
            let packet = format!("number {number}.");
            self.own.send_to(packet.as_bytes(), to).expect("sent");
        }
        self.sent += count;
    }
}

/// Starts tcpdump, which writes each packet to a file as soon as it hears of it.
fn listen(folder: &Path, filter: &str, options: &[&str]) -> Spawned {
    let log = folder.join("log");
    // Without root's privileges it could not write here.
    let program = Program::new("tcpdump")
        .args(["-i", "lo", "-U", "-Z", "root"])
        .args(options)
        .arg("-w")
        .arg(folder.join("packets"))
        .arg(filter)
        .output(&log)
        .spawn();
    program.wait_text(&log, "listening on");
    program
}

/// The numbers of the packets that were written, in their order.
fn heard(folder: &Path) -> Vec<usize> {
    let shown = Command::new("tcpdump")
        .args(["-A", "-r"])
        .arg(folder.join("packets"))
        .output();
    let shown = shown.expect("it starts").stdout;
    let shown = String::from_utf8_lossy(&shown).into_owned();
    let numbers = shown.split("number ").skip(1);
    let numbers = numbers.filter_map(|text| text.split('.').next()?.parse().ok());
    numbers.collect()
}

#[test]
fn who_listens_on_an_interface_hears_every_packet_once() {
    needs_root!();
    needs_program!("tcpdump");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer saves no packets that are in a ring");
    }
    // Packets in blocks that are handed over when they are full or old, and each at once.
    for options in [&[][..], &["--immediate-mode"]] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let mut sender = Sender::new();
        let program = listen(folder.path(), &sender.filter(), options);
        for turn in 0..4 {
            sender.send(turn * 5);
            let tasks = tree::members(program.pid());
            stillframe.clear();
            stillframe.dump(program.pid(), &[]).must();
            tree::wait_gone(&tasks);
            stillframe.restore(&[]).must();
        }
        for way in [&["-R"][..], &["--live", "-R"]] {
            sender.send(3);
            stillframe.clear();
            stillframe.dump(program.pid(), way).must();
        }
        sender.send(2);
        let all = (0..sender.sent).collect::<Vec<_>>();
        wait_until("all packets to be heard", SOON, || {
            heard(folder.path()).len() >= all.len()
        });
        assert_eq!(heard(folder.path()), all, "{options:?}");
    }
}
