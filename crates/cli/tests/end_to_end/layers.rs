//! Restores from an image that has part of its pages from another one.
use std::path::Path;
use std::sync::Arc;

use image::{Link, NewRun, PAGE_BYTES, Reader, RunKind, Seal, Writer};
use store::Directory;
use testkit::facts::Facts;
use testkit::needs_root;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};

use crate::{assert_restored, stillframe};

fn open(path: &Path) -> Reader {
    let store = Directory::open(path).expect("there is an image");
    Reader::open(&store).expect("it is whole")
}

/// Writes to `child` an image that equals the one in `parent` and has every other page from it.
fn layer(parent: &Path, child: &Path) {
    let store = Directory::create(child).expect("a directory can be made");
    let way = |from, to| store::way(from, to).expect("both are there");
    let link = Link {
        to_parent: way(child, parent),
        to_child: way(parent, child),
    };
    let older = Arc::new(open(parent));
    let writer = Writer::create_layer(Arc::new(store), older.clone(), link).expect("it is begun");
    for record in older.records() {
        writer.record(record.clone());
    }
    for space in older.spaces() {
        writer.space(space.said());
    }
    for run in older.spaces().iter().flat_map(|space| older.runs(space.id)) {
        if matches!(run.kind, RunKind::Zero | RunKind::Same { .. }) {
            writer.mark(run);
            continue;
        }
        for page in run.first_page..run.end_page() {
            if page.is_multiple_of(2) {
                let inherited = writer.inherit(run.space, page, 1);
                inherited.expect("the parent describes it");
                continue;
            }
            let mut bytes = [0; PAGE_BYTES];
            let read = older.read_pages(run.space, page, &mut bytes);
            read.expect("the parent has it");
            let own = NewRun {
                space: run.space,
                first_page: page,
                pages: 1,
            };
            writer.append(&bytes, &[own]).expect("it is stored");
        }
    }
    let facts = older.facts().clone();
    let sealed = writer.seal(Seal {
        durable: false,
        facts,
    });
    sealed.expect("it is finished");
}

#[test]
fn a_tree_comes_back_from_layers() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the layers are made by Stillframe's own code");
    }
    for (name, arguments) in [("mmaps", &[][..]), ("tree", &["7", "still"])] {
        let subject = Subject::start(name, arguments);
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let before = Facts::still(subject.pid());
        stillframe.dump(subject.pid(), &[]).must();
        let newest = stillframe.images();
        let [older, away] = ["older", "away"].map(|name| newest.with_file_name(name));
        let moved = |from: &Path, to: &Path| std::fs::rename(from, to).expect("it can be moved");
        moved(newest, &older);
        layer(&older, newest);
        assert!(open(newest).parent().is_some());
        moved(&older, &away);
        let refused = stillframe.restore(&[]).must_fail();
        assert_eq!(refused.status.code(), Some(4), "{}", refused.told());
        refused.names(&["../older"]);
        moved(&away, &older);
        // Who dumps into the older image's directory would make the newest one useless.
        let other = Subject::start("fds", &[]);
        wait_until("the subject to wait", SOON, || other.is_waiting());
        let older_dir = older.to_str().expect("a plain name");
        let pid = other.pid().to_string();
        let dump = ["dump", "-t", &pid, "-D", older_dir];
        let output = stillframe.command(&dump).output().expect("it is started");
        assert_eq!(output.status.code(), Some(6));
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains("is needed by image"), "{told}");
        assert_eq!(other.ask("check"), "right");
        stillframe.restore(&[]).must();
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let after = Facts::still(subject.pid());
        assert_restored(&stillframe, &before, &after, name);
        stillframe.clear();
        std::fs::remove_dir_all(&older).expect("it is there");
    }
}
