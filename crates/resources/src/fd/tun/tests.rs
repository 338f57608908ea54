//! Queues of interfaces in a network namespace of the test's own.

use std::fs::File;
use std::net::UdpSocket;
use std::os::fd::AsFd;
use std::process::Command;

use rustix::fs::OFlags;

use super::super::testing::{At, World};
use super::*;
use crate::testing::alone;

/// A new descriptor of /dev/net/tun, which does not wait.
fn device() -> Option<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::open("/dev/net/tun", flags, rustix::fs::Mode::empty()).ok()
}

fn queue(name: &str, flags: u32) -> Option<OwnedFd> {
    let own = device()?;
    tun::attach(&own, name, u16::try_from(flags).unwrap()).ok()?;
    Some(own)
}

/// Makes queues, or skips the test.
macro_rules! queues {
    ($($name:expr, $flags:expr);+) => {{
        let made = [$(queue($name, $flags)),+];
        if made.iter().any(Option::is_none) {
            testkit::skip!("no tun devices here");
        }
        made.map(|own| own.expect("looked at"))
    }};
}

/// What iproute2 prints; lifetimes of addresses are none of these.
fn ip(arguments: &str) -> String {
    let told = Command::new("ip")
        .args(arguments.split_whitespace())
        .output();
    let told = told.expect("iproute2 is there");
    let complaint = String::from_utf8_lossy(&told.stderr);
    assert!(told.status.success(), "ip {arguments}: {complaint}");
    String::from_utf8(told.stdout).expect("text")
}

/// All that iproute2 tells of an interface, but for how the kernel came by an address of its own,
/// and whether it has heard of a carrier since the interface is up.
fn seen(name: &str) -> String {
    let wanted = [
        format!("address show dev {name}"),
        format!("-4 route show table all dev {name}"),
        format!("-6 route show table all dev {name}"),
        format!("neigh show nud permanent dev {name}"),
    ];
    let all = wanted.iter().map(|wanted| ip(wanted)).collect::<String>();
    let passing = [" nodad", " stable-privacy", " state UP", " state UNKNOWN"];
    let without = |text: String, word: &&str| text.replace(*word, "");
    passing.iter().fold(all, without)
}

/// Insists that iproute2 tells the same; the kernel takes its time to look after carriers.
#[track_caller]
fn assert_seen(name: &str, before: &str) {
    let same = || (seen(name) == before).then_some(());
    if testkit::wait::try_wait_for(testkit::wait::SOON, same).is_none() {
        assert_eq!(seen(name), before);
    }
}

/// Waits until the kernel has found that nobody else has the address that it gave an interface.
fn wait_for_own_address(name: &str) {
    let what = "the address to be nobody else's";
    testkit::wait::wait_until(what, testkit::wait::SOON, || {
        let told = ip(&format!("-6 address show dev {name}"));
        told.contains("fe80") && !told.contains("tentative")
    });
}

fn conf(family: &str, interface: &str, name: &str) -> String {
    let path = format!("/proc/sys/net/{family}/conf/{interface}/{name}");
    std::fs::read_to_string(path)
        .expect("it is there")
        .trim_end()
        .to_owned()
}

fn set_conf(family: &str, interface: &str, name: &str, value: &str) {
    let path = format!("/proc/sys/net/{family}/conf/{interface}/{name}");
    std::fs::write(path, value).expect("it can be set");
}

/// Dumps and restores three times.
fn cycle(world: &mut World) {
    for _ in 0..3 {
        world.dump().expect("dump");
        world.restore().expect("restore");
    }
}

fn world_of(own: OwnedFd) -> (World, At) {
    let mut world = World::default();
    let at = world.add(own);
    (world, at)
}

#[test]
fn a_tunnel_comes_back_with_addresses_and_routes() {
    testkit::needs_program!("ip");
    alone!({
        let [own] = queues!("vpn0", IFF_TUN | IFF_NO_PI);
        tun::set_number(&own, Number::SendBufferBytes, 123_456).unwrap();
        for command in [
            "link set vpn0 mtu 1380 txqueuelen 77 alias the_tunnel",
            "address add 10.9.0.1 peer 10.9.0.2/32 dev vpn0",
            "address add 10.9.1.1/24 brd + dev vpn0 noprefixroute",
            "address add 10.9.1.7/24 dev vpn0 label vpn0:second",
            "link set vpn0 up",
            "-6 address add fd99::1/64 dev vpn0",
            "route add 192.0.2.0/24 via 10.9.0.2 dev vpn0 metric 50",
            "route add 198.51.100.0/24 dev vpn0 src 10.9.0.1 mtu 1300",
            "route add default via 192.0.2.9 dev vpn0 onlink table 77",
            "route add 203.0.113.0/24 via 10.9.0.2 dev vpn0",
            "-6 route add 2001:db8::/32 via fd99::2 dev vpn0 metric 9",
            "-6 route add fd98::/64 dev vpn0",
        ] {
            ip(command);
        }
        set_conf("ipv4", "vpn0", "rp_filter", "2");
        set_conf("ipv4", "vpn0", "forwarding", "1");
        set_conf("ipv6", "vpn0", "accept_ra", "0");
        let before = seen("vpn0");
        let (mut world, at) = world_of(own);
        cycle(&mut world);
        assert_seen("vpn0", &before);
        assert_eq!(
            world.describe(at),
            "tun device tun vpn0 addresses=5 routes=6"
        );
        assert_eq!(conf("ipv4", "vpn0", "rp_filter"), "2");
        assert_eq!(conf("ipv4", "vpn0", "forwarding"), "1");
        assert_eq!(conf("ipv6", "vpn0", "accept_ra"), "0");
        let bytes = tun::number(world.get(at), Number::SendBufferBytes);
        assert_eq!(bytes.unwrap(), 123_456);
        // A packet to the other end comes out of it.
        let sender = UdpSocket::bind("10.9.0.1:0").unwrap();
        sender
            .send_to(b"through the tunnel", "192.0.2.5:9")
            .unwrap();
        let mut packet = [0; 2000];
        let bytes = rustix::io::read(world.get(at), &mut packet).unwrap();
        assert!(packet[..bytes].ends_with(b"through the tunnel"));
    });
}

#[test]
fn a_tap_comes_back_with_headers_and_offloads() {
    testkit::needs_program!("ip");
    alone!({
        let flags = IFF_TAP | IFF_NO_PI | IFF_ONE_QUEUE | IFF_VNET_HDR;
        let [own] = queues!("tap7", flags);
        ip("link add name br7 type bridge");
        ip("link set tap7 address 52:54:00:12:34:56 group 5 multicast off");
        ip("link set tap7 master br7 up");
        wait_for_own_address("tap7");
        ip("address add 10.8.0.1/24 dev tap7");
        ip("neigh add 10.8.0.9 lladdr 52:54:00:00:00:09 nud permanent dev tap7");
        tun::set_number(&own, Number::HeaderBytes, 12).unwrap();
        tun::set_number(&own, Number::IsLittleEndian, 1).unwrap();
        tun::set(&own, Setting::Offload, 0x1 | 0x2 | 0x4 | 0x20 | 0x40).unwrap();
        tun::set(&own, Setting::Owner, 61_234).unwrap();
        tun::set(&own, Setting::Group, 61_235).unwrap();
        let (before, features) = (seen("tap7"), tun::active_features("tap7").unwrap());
        let (mut world, at) = world_of(own);
        cycle(&mut world);
        assert_seen("tap7", &before);
        let device = ip("-d link show tap7");
        assert!(device.contains("user 61234 group 61235"), "{device}");
        assert_eq!(tun::active_features("tap7").unwrap(), features);
        let number = |which| tun::number(world.get(at), which).unwrap();
        assert_eq!(number(Number::HeaderBytes), 12);
        assert_eq!(number(Number::IsLittleEndian), 1);
        let attached = tun::attached(world.get(at)).unwrap().unwrap();
        assert_eq!(u32::from(attached.flags) & flags, flags);
    });
}

#[test]
fn packets_keep_headers_of_their_own() {
    alone!({
        let [plain, other] = queues!("pi0", IFF_TUN; "pi1", IFF_TUN | IFF_NO_PI);
        let mut world = World::default();
        let all = [plain, other].map(|own| world.add(own));
        cycle(&mut world);
        for (at, name, has_header) in [(all[0], "pi0", true), (all[1], "pi1", false)] {
            let (_, told) = Interface::read(name).unwrap();
            assert_eq!(told.has_header, has_header, "{name}");
            assert!(world.describe(at).contains(name));
        }
    });
}

#[test]
fn what_is_no_queue_yet_becomes_one_later() {
    alone!({
        let Some(own) = device() else {
            testkit::skip!("no tun devices here");
        };
        let (mut world, at) = world_of(own);
        cycle(&mut world);
        assert_eq!(world.describe(at), "tun device no queue yet");
        tun::attach(world.get(at), "late0", 1).unwrap();
        assert!(interface::exists("late0").unwrap());
    });
}

#[test]
fn several_queues_are_of_one_interface_again() {
    testkit::needs_program!("ip");
    alone!({
        let flags = IFF_TAP | IFF_NO_PI | IFF_MULTI_QUEUE;
        let all = queues!("many", flags; "many", flags; "many", flags);
        ip("link set many up");
        ip("-6 address flush dev many");
        tun::set_detached(&all[0], true).unwrap();
        let mut world = World::default();
        let all = all.map(|own| world.add(own));
        let before = seen("many");
        cycle(&mut world);
        assert_seen("many", &before);
        let told = all.map(|at| world.describe(at));
        assert_eq!(told[0], "tun device tap many detached addresses=0 routes=0");
        assert_eq!(told[1], "tun device tap many addresses=0 routes=0");
        // One without the others is somebody's outside of the tree.
        let mut part = World::default();
        let _others = [world.take(all[1]), world.take(all[2])];
        part.add(world.take(all[0]));
        let error = part.dump().unwrap_err().to_string();
        assert!(error.contains("outside of the tree has a queue"), "{error}");
    });
}

#[test]
fn a_persistent_one_is_taken_as_it_is_or_made_again() {
    testkit::needs_program!("ip");
    alone!({
        let [own] = queues!("stays", IFF_TUN | IFF_NO_PI);
        tun::set(&own, Setting::Persistent, 1).unwrap();
        ip("address add 10.7.0.1/24 dev stays");
        ip("link set stays up");
        wait_for_own_address("stays");
        let before = seen("stays");
        let (mut world, at) = world_of(own);
        cycle(&mut world);
        assert_seen("stays", &before);
        // What was changed meanwhile is the host's.
        world.dump().unwrap();
        drop(world.take(at));
        ip("link set stays mtu 1400");
        world.restore().unwrap();
        assert!(seen("stays").contains("mtu 1400"));
        ip("link set stays mtu 1500");
        // As on a host that was started since.
        world.dump().unwrap();
        drop(world.take(at));
        ip("link delete stays");
        world.restore().unwrap();
        assert_seen("stays", &before);
        drop(world.take(at));
        ip("link show stays");
    });
}

#[test]
fn a_name_or_number_that_another_one_has_by_now() {
    testkit::needs_program!("ip");
    alone!({
        let [own] = queues!("taken", IFF_TUN | IFF_NO_PI);
        let (index, (mut world, at)) = (Interface::read("taken").unwrap().0.index, world_of(own));
        world.dump().unwrap();
        drop(world.take(at));
        ip("link add name taken type bridge");
        let error = world.restore().unwrap_err().to_string();
        let advice = "an interface named taken is there already: remove or rename it";
        assert!(error.contains(advice), "{error}");
        ip("link delete taken");
        ip(&format!("link add name other index {index} type bridge"));
        world.restore().unwrap();
        assert_ne!(Interface::read("taken").unwrap().0.index, index);
    });
}

#[test]
fn a_missing_bridge_is_named_and_nothing_stays() {
    testkit::needs_program!("ip");
    alone!({
        let [own] = queues!("port", IFF_TAP | IFF_NO_PI);
        ip("link add name span type bridge");
        ip("link set port master span");
        let (mut world, at) = world_of(own);
        world.dump().unwrap();
        drop(world.take(at));
        ip("link delete span");
        let error = world.restore().unwrap_err().to_string();
        let wanted = "interface port of the image is part of span, which is missing";
        assert!(error.contains(wanted), "{error}");
        assert!(!interface::exists("port").unwrap());
    });
}

#[test]
fn what_the_kernel_does_not_tell_is_refused() {
    testkit::needs_program!("ip");
    alone!({
        let [own] = queues!("far0", IFF_TAP | IFF_NO_PI);
        let file = File::open("/proc/thread-self/ns/net").unwrap();
        // Moved into a namespace that only a process of it keeps.
        let mut other = Command::new("unshare");
        let other = other.args(["--net", "sleep", "60"]).spawn();
        let mut other = other.expect("unshare is there");
        let there = format!("/proc/{}/ns/net", other.id());
        let here = rustix::fs::fstat(&file).unwrap().st_ino;
        while rustix::fs::stat(&there).unwrap().st_ino == here {
            std::thread::yield_now();
        }
        ip(&format!("link set far0 netns {}", other.id()));
        let (mut world, _) = world_of(own);
        let error = world.dump().unwrap_err().to_string();
        other.kill().unwrap();
        other.wait().unwrap();
        assert!(error.contains("in another network namespace"), "{error}");
    });
}

#[test]
fn damaged_records_are_refused() {
    let sound = Queue {
        name: "tun0".to_owned(),
        flags: IFF_TUN,
        ..Queue::default()
    };
    let record = |queue: Queue| {
        let place = Place {
            path: b"/dev/net/tun".to_vec(),
            mode: 0o20_600,
            ..Place::default()
        };
        let record = Record {
            place,
            flags: 2,
            id: 0,
            queue: Some(queue),
        };
        Tun::check(&record)
    };
    record(sound.clone()).unwrap();
    let with = |change: fn(&mut Queue)| {
        let mut queue = sound.clone();
        change(&mut queue);
        record(queue)
    };
    with(|queue| queue.flags = IFF_TUN | IFF_TAP).unwrap_err();
    with(|queue| queue.flags |= 1 << 20).unwrap_err();
    with(|queue| queue.name = "..".to_owned()).unwrap_err();
    with(|queue| queue.interface.address = vec![0; 33]).unwrap_err();
    with(|queue| queue.interface.routes.push(network::Entry::default())).unwrap_err();
    with(|queue| {
        let setting = settings::Value {
            name: "../../../kernel/core_pattern".to_owned(),
            ..settings::Value::default()
        };
        queue.interface.settings.push(setting);
    })
    .unwrap_err();
    let error = tun::attach(device_or_null().as_fd(), "tun%d", 1).unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::INVAL));
}

fn device_or_null() -> OwnedFd {
    device().unwrap_or_else(|| File::open("/dev/null").expect("it is there").into())
}
