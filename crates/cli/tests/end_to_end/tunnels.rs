//! Virtual interfaces: datagrams go through them before and after, and the host's network knows of
//! them what it knew.

use std::net::{Ipv4Addr, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use testkit::chance::Chance;
use testkit::program::Program;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, try_wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::kills::wait_for_cleanup;
use crate::{stillframe, ways};

const KILLS: usize = 40;

fn ip(arguments: &str) -> String {
    let told = Command::new("ip")
        .args(arguments.split_whitespace())
        .output();
    let told = told.expect("it is installed");
    let complaint = String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success(), "ip {arguments}: {complaint}");
    String::from_utf8(told.stdout).expect("text")
}

/// A network of four addresses that is nobody's else, and an interface's name.
struct Network {
    name: String,
    net: [u8; 3],
}

impl Network {
    /// One with a number of the test's.
    fn new(number: u8) -> Self {
        let pid = std::process::id();
        // RFC 2544: for measurements, on no real network.
        let net = [198, 18 + (pid >> 8 & 1) as u8, pid as u8];
        let name = format!("sf{number}n{pid}");
        let net = [net[0], net[1], net[2] ^ (number << 5)];
        Self { name, net }
    }

    fn address(&self, last: u8) -> Ipv4Addr {
        let [one, two, three] = self.net;
        Ipv4Addr::new(one, two, three, last)
    }

    fn set_up(&self) {
        let (name, own, other) = (&self.name, self.address(1), self.address(2));
        ip(&format!("address add {own} peer {other}/32 dev {name}"));
        ip(&format!("link set {name} mtu 1400 up"));
        ip(&format!(
            "route add {}/25 via {other} dev {name}",
            self.address(128)
        ));
    }

    fn exists(&self) -> bool {
        Path::new("/sys/class/net").join(&self.name).exists()
    }

    /// What iproute2 tells of it, but for how the kernel came by an address of its own, and
    /// whether it has heard of a carrier since the interface is up.
    fn seen(&self) -> String {
        let name = &self.name;
        let all = ["-d address show dev", "-4 route show table all dev"];
        let all = all.map(|wanted| ip(&format!("{wanted} {name}")));
        let passing = [" nodad", " stable-privacy", " state UP", " state UNKNOWN"];
        let without = |text: String, word: &&str| text.replace(*word, "");
        passing.iter().fold(all.concat(), without)
    }

    #[track_caller]
    fn assert_seen(&self, before: &str, told: &str) {
        let same = || (self.seen() == before).then_some(());
        if try_wait_for(SOON, same).is_none() {
            assert_eq!(self.seen(), before, "{told}");
        }
    }

    /// Sends a datagram to somewhere behind the interface, and has it back.
    #[track_caller]
    fn assert_goes_round(&self, told: &str) {
        let socket = UdpSocket::bind((self.address(1), 0)).expect("the address is there");
        let timeout = Some(Duration::from_secs(1));
        socket.set_read_timeout(timeout).expect("some time");
        let goes = || {
            socket
                .send_to(told.as_bytes(), (self.address(200), 7))
                .ok()?;
            let mut back = [0; 100];
            let (bytes, from) = socket.recv_from(&mut back).ok()?;
            assert_eq!(from.ip(), self.address(200));
            (&back[..bytes] == told.as_bytes()).then_some(())
        };
        assert!(try_wait_for(SOON, goes).is_some(), "{told}");
    }
}

fn has_devices() -> bool {
    let opened = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun");
    opened.is_ok()
}

/// A subject behind an interface with addresses.
fn start(network: &Network, more: &[&str]) -> Subject {
    let subject = Subject::start("tunnel", &[&[network.name.as_str()], more].concat());
    network.set_up();
    network.assert_goes_round("before");
    subject
}

/// What a socket hears that has one of the interface's addresses.
#[track_caller]
fn assert_heard(network: &Network, subject: &Subject, port: &str) {
    let socket = UdpSocket::bind((network.address(1), 0)).expect("the address is there");
    let to = (network.address(1), port.parse().expect("a port"));
    socket.send_to(b"word", to).expect("sent");
    assert_eq!(subject.ask("heard"), "word");
}

#[test]
fn a_tunnel_goes_on() {
    needs_root!();
    needs_program!("ip");
    let stillframe = stillframe();
    if stillframe.is_peer() || !has_devices() {
        testkit::skip!("no tun devices, or a peer that needs a namespace");
    }
    for (number, more) in [(1, &[][..]), (2, &["several"])] {
        let network = Network::new(number);
        let subject = start(&network, more);
        let port = subject.ask(&format!("listen {}", network.address(1)));
        let before = network.seen();
        // Memory need not be the same: the kernel's own packets come through it at any time.
        stillframe.cycle(3, &subject, &[]);
        let check = |told: &str| {
            network.assert_seen(&before, told);
            network.assert_goes_round(told);
            assert_heard(&network, &subject, &port);
            assert_eq!(subject.ask("check"), "right", "{told}");
        };
        check("after three cycles");
        for how in ["--leave-running", "--live"] {
            let count = subject.ask_number("count");
            stillframe.clear();
            stillframe.dump(subject.pid(), &[how]).must();
            check(how);
            assert!(subject.ask_number("count") > count, "{how}");
        }
        // The live image, and one over a pre-dump.
        let pids = subject.tree();
        subject.kill();
        tree::wait_gone(&pids);
        wait_until("the interface to go", SOON, || !network.exists());
        stillframe.restore(&[]).must();
        check("of a live image");
        ways::over_pre_dump(&stillframe, &subject, check);
    }
}

#[test]
fn a_name_that_is_taken_is_told_before_anything_is_made() {
    needs_root!();
    needs_program!("ip");
    let stillframe = stillframe();
    if stillframe.is_peer() || !has_devices() {
        testkit::skip!("no tun devices, or a peer that needs a namespace");
    }
    let network = Network::new(3);
    let name = &network.name;
    let subject = start(&network, &[]);
    stillframe.dump(subject.pid(), &[]).must();
    ip(&format!("tuntap add dev {name} mode tun"));
    let advice = format!("an interface named {name} is there already: remove or rename it");
    stillframe.restore(&[]).must_fail().names(&[&advice]);
    ip(&format!("tuntap del dev {name} mode tun"));
    stillframe.restore(&[]).must();
    network.assert_goes_round("with the name free again");
}

#[test]
fn a_restore_that_is_killed_leaves_no_interface() {
    needs_root!();
    needs_program!("ip");
    let stillframe = stillframe();
    if stillframe.is_peer() || !has_devices() {
        testkit::skip!("no tun devices, or a peer that needs a namespace");
    }
    let mut chance = Chance::of("a_restore_that_is_killed_leaves_no_interface");
    let network = Network::new(4);
    let subject = start(&network, &[]);
    stillframe.dump(subject.pid(), &[]).must();
    let longest = stillframe.restore(&[]).must().elapsed;
    for round in 0..KILLS {
        if subject.try_ask("count").is_ok() {
            stillframe.clear();
            stillframe.dump(subject.pid(), &[]).must();
        }
        killed(
            &stillframe,
            &network,
            &subject,
            (round, chance.time(longest)),
        );
    }
    if subject.try_ask("count").is_err() {
        stillframe.restore(&[]).must();
    }
    network.assert_goes_round("at last");
}

/// Kills a restore at an instant; all of the tree is there then, or nothing.
#[track_caller]
fn killed(
    stillframe: &Stillframe,
    network: &Network,
    subject: &Subject,
    (round, instant): (usize, Duration),
) {
    let command = stillframe.restore_command(&[]);
    let ended = stillframe.kill_after(command, instant);
    let told = format!("round {round}, killed after {instant:?}, ended {ended:?}");
    wait_for_cleanup(stillframe, &[subject.pid()], &told);
    if subject.try_ask("count").is_ok() {
        network.assert_goes_round(&told);
        return;
    }
    tree::wait_gone(&[subject.pid()]);
    wait_until(&format!("the interface to go: {told}"), SOON, || {
        !network.exists()
    });
}

/// socat, which takes packets out of a socket and puts them into an interface, and back.
#[test]
fn socat_goes_on_with_its_tunnel() {
    needs_root!();
    needs_program!("socat");
    needs_program!("ip");
    let stillframe = stillframe();
    if stillframe.is_peer() || !has_devices() {
        testkit::skip!("no tun devices, or a peer that needs a namespace");
    }
    let network = Network::new(5);
    let far = UdpSocket::bind("127.0.0.1:0").expect("bound");
    far.set_read_timeout(Some(Duration::from_secs(10)))
        .expect("some time");
    let port = far.local_addr().expect("bound").port();
    let (name, own) = (&network.name, network.address(1));
    let socat = Program::new("socat")
        .arg(format!("UDP4-DATAGRAM:127.0.0.1:{port},bind=127.0.0.1:0"))
        .arg(format!("TUN:{own}/24,tun-name={name},iff-no-pi,iff-up"))
        .spawn();
    let up = || network.exists() && network.seen().contains(",UP");
    socat.wait_ready("its interface", up);
    let before = network.seen();
    let near = UdpSocket::bind((own, 0)).expect("the address is there");
    near.set_read_timeout(Some(Duration::from_secs(10)))
        .expect("some time");
    let goes_round = |told: &str| {
        near.send_to(told.as_bytes(), (network.address(9), 7))
            .expect("sent");
        let mut packet = [0; 2000];
        let (bytes, socat) = loop {
            let (bytes, from) = far.recv_from(&mut packet).expect("it comes out");
            if packet[0] == 0x45 && packet[..bytes].ends_with(told.as_bytes()) {
                break (bytes, from);
            }
        };
        let packet = &mut packet[..bytes];
        let (one, other) = packet.split_at_mut(16);
        one[12..].swap_with_slice(&mut other[..4]);
        let (one, other) = packet.split_at_mut(22);
        one[20..].swap_with_slice(&mut other[..2]);
        far.send_to(packet, socat).expect("sent");
        let mut back = [0; 100];
        let bytes = near.recv(&mut back).expect("it comes back");
        assert_eq!(&back[..bytes], told.as_bytes());
    };
    goes_round("before");
    for options in [&[][..], &["--live"], &["--leave-running"]] {
        for _ in 0..3 {
            stillframe.clear();
            stillframe.dump(socat.pid(), options).must();
            if !options.is_empty() {
                goes_round("left running");
                socat.kill();
            }
            wait_until("its end", SOON, || !socat.is_alive() && !network.exists());
            stillframe.restore(&[]).must();
            network.assert_seen(&before, &format!("{options:?}"));
            goes_round("restored");
        }
    }
}
