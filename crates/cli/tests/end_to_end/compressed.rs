//! Images whose pages are compressed: dumped in each way, and restored.

use testkit::needs_root;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};

use crate::stillframe;

/// The pages of each child.
const PAGES: u64 = 300;

#[test]
fn trees_come_back_from_compressed_images() {
    needs_root!();
    let subject = Subject::start("equal-pages", &["3", &PAGES.to_string()]);
    let stillframe = stillframe();
    let size = || {
        let files = std::fs::read_dir(stillframe.images()).expect("an image");
        let pages = files.filter_map(|file| {
            let file = file.expect("a file");
            let is_pages = file.file_name().to_string_lossy().starts_with("pages-");
            is_pages.then(|| file.metadata().expect("it is there").len())
        });
        pages.sum::<u64>()
    };
    let features = || {
        let mut show = stillframe.command(&["show", "--json"]);
        let shown = show.arg(stillframe.images()).output().expect("it starts");
        let image: serde_json::Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        let features = image["features"].as_array().expect("a list").clone();
        features
            .iter()
            .filter_map(|one| Some(one.as_str()?.to_owned()))
            .collect::<Vec<_>>()
    };
    let mut plain_bytes = 0;
    for (option, codec) in [
        (None, None),
        (Some("--compress"), Some("lz4")),
        (Some("--compress=zstd:1"), Some("zstd")),
    ] {
        for live in [false, true] {
            stillframe.clear();
            let mut options = Vec::from_iter(option);
            options.extend(live.then_some("--live"));
            let tasks = subject.tree();
            stillframe.dump(subject.pid(), &options).must();
            if live {
                subject.kill();
            }
            tree::wait_gone(&tasks);
            let known = features();
            for name in ["lz4", "zstd"] {
                let has = known.iter().any(|one| one == name);
                assert_eq!(has, codec == Some(name), "{known:?}");
            }
            if codec.is_none() {
                plain_bytes = size();
            } else {
                assert!(size() < plain_bytes * 9 / 10, "{} of {plain_bytes}", size());
            }
            stillframe.restore(&[]).must();
            assert_eq!(subject.ask("check"), "right", "{options:?}");
            let now = subject.ask_number("rounds");
            wait_until("the children to go on", SOON, || {
                subject.ask_number("rounds") > now + 1
            });
        }
    }
}

#[test]
fn codecs_and_levels_that_there_are_not_are_refused() {
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has other options");
    }
    for (option, told) in [
        ("--compress=gzip", "it is lz4, zstd or zstd:LEVEL"),
        ("--compress=lz4:1", "it is lz4, zstd or zstd:LEVEL"),
        ("--compress=zstd:99", "the levels of zstd are 1 to 22"),
    ] {
        let outcome = stillframe.dump(std::process::id(), &[option]).must_fail();
        outcome.names(&[told]);
    }
}
