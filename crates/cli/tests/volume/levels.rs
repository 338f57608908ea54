//! `stillframe volume dump --level`: levels are what dump(8) means by them, and it reads what is
//! noted.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use testkit::volumes::{Loop, Mount, make, noise, run, seen_by_kernel};
use testkit::wait::wait_until;

use super::{LIMIT, Place, refused, succeed};

#[test]
fn levels_are_over_the_last_one_below_them() {
    testkit::needs_root!();
    let place = Place::new();
    make(&place.path("fs"), "64M", &["-b", "4096"], None);
    let device = Loop::attach(&place.path("fs"));
    let mount = Mount::new(&device.device, &place.path("mount"), "noatime").unwrap();
    let (point, dumpdates) = (place.name("mount"), place.name("dumpdates"));
    let device_name = device.device.to_str().unwrap();
    // Of another device, and of a level that is replaced.
    let others = format!(
        "/dev/other 0 Mon Nov 23 20:34:12 2026 +0000\n\
         {device_name} 1 Fri Jan  1 00:00:00 1999 +0000\n"
    );
    fs::write(&dumpdates, &others).unwrap();
    let dump = |level: &str, name: &str, options: &[&str]| {
        // Dumps are told apart by the second.
        let quiet = Instant::now() + Duration::from_millis(1100);
        wait_until("the clock has gone on", LIMIT, || Instant::now() > quiet);
        fs::write(mount.point.join(name), noise(50_000, name.len() as u64)).unwrap();
        let images = place.name(name);
        let all = [
            "dump",
            "-D",
            &images,
            "--json",
            "--level",
            level,
            "--dumpdates",
            &dumpdates,
        ];
        succeed(&[&all[..], &[&point], options].concat())["volume_dump"].clone()
    };
    let over = |name: &str| serde_json::Value::from(place.name(name));
    let nothing = serde_json::Value::Null;
    // The sequence of levels that dump(8)'s own page shows, and one that is not noted.
    assert_eq!(dump("0", "sunday", &["-u"])["parent"], nothing);
    assert_eq!(dump("3", "monday", &["-u"])["parent"], over("sunday"));
    assert_eq!(dump("2", "tuesday", &["-u"])["parent"], over("sunday"));
    assert_eq!(dump("5", "wednesday", &["-u"])["parent"], over("tuesday"));
    assert_eq!(dump("4", "thursday", &[])["parent"], over("tuesday"));
    assert_eq!(dump("7", "friday", &["-u"])["parent"], over("wednesday"));
    assert_eq!(dump("1", "saturday", &["-u"])["parent"], over("sunday"));
    let noted = fs::read_to_string(&dumpdates).unwrap();
    assert!(
        noted.starts_with("/dev/other 0 Mon Nov 23 20:34:12 2026 +0000\n"),
        "{noted}"
    );
    assert_eq!(noted.lines().count(), 7, "{noted}");
    assert!(!noted.contains("1999"), "{noted}");
    let expected = seen_by_kernel(&mount.point);
    drop(mount);
    // dump(8) takes the dates for its own.
    let mut command = Command::new("dump");
    let stream = place.name("stream");
    command.args(["-2", "-D", &dumpdates, "-f", &stream, device_name]);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("Date of last level 1 dump: "), "{said}");
    // What is missing is named.
    fs::remove_dir_all(place.path("wednesday")).unwrap();
    let images = place.name("new");
    let arguments = [
        "dump",
        "-D",
        &images,
        "--dumpdates",
        &dumpdates,
        device_name,
        "--level",
    ];
    succeed(&[&arguments[..], &["3"]].concat());
    fs::create_dir(place.path("elsewhere")).unwrap();
    fs::rename(place.path("saturday"), place.path("elsewhere/saturday")).unwrap();
    let complained = refused(&[&arguments[..], &["3"]].concat(), 3);
    assert!(
        complained.contains("was one of level 1 on "),
        "{complained}"
    );
    fs::write(&dumpdates, format!("{device_name} 0 yesterday\n")).unwrap();
    let complained = refused(&[&arguments[..], &["3"]].concat(), 3);
    assert!(complained.contains("yesterday"), "{complained}");
    fs::rename(place.path("elsewhere/saturday"), place.path("saturday")).unwrap();
    succeed(&["restore", "-D", &place.name("new"), &place.name("out")]);
    run("e2fsck", &["-fn", &place.name("out")]);
    let copy = Mount::new(&place.path("out"), &place.path("copy"), "loop,ro").unwrap();
    assert_eq!(seen_by_kernel(&copy.point), expected);
}

#[test]
fn images_of_two_volumes_in_one_second_are_told_apart() {
    let place = Place::new();
    let dumpdates = place.name("dumpdates");
    let volumes = ["a", "b"];
    for volume in volumes {
        make(&place.path(volume), "16M", &[], None);
    }
    let dump = |volume: &str, level: &str| {
        let images = place.name(&format!("{volume}-{level}"));
        let words = [
            "dump",
            "-D",
            &images,
            "--level",
            level,
            "-u",
            "--no-sync",
            "--json",
        ];
        let more = ["--dumpdates", &dumpdates, &place.name(volume)];
        succeed(&[&words[..], &more].concat())["volume_dump"].clone()
    };
    // The dates of the notes, which stand behind the name and the level.
    let dates = || {
        let text = fs::read_to_string(&dumpdates).unwrap();
        let dates = text
            .lines()
            .map(|line| line.splitn(3, ' ').nth(2).unwrap().to_owned());
        dates.collect::<Vec<_>>()
    };
    wait_until("both are dumped in one second", LIMIT, || {
        for volume in volumes {
            dump(volume, "0");
        }
        dates()[0] == dates()[1]
    });
    for volume in volumes {
        let parent = place.name(&format!("{volume}-0"));
        assert_eq!(dump(volume, "1")["parent"], parent, "{volume}");
    }
}
