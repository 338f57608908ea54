//! What records an image may have: none that a restore would overlook.

use std::collections::HashSet;

use image::Record;
use resources::cgroup;
use resources::fd::{kind_of, tags};
use resources::map::{aio, memory, registered, vdso};
use resources::ns;
use resources::task::PARTS;

use crate::records::{State, TREE_VERSION, Tree, tag};
use crate::{Error, Result};

/// The number of the record that tells of a companion, and is read by its own crate.
const COMPANION: u16 = 500;

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum About {
    /// The image: there is one.
    Image,
    /// A process that has not ended.
    Process,
    /// A thread of such a process.
    Thread,
    /// One of several that have numbers of their own.
    Item,
}

/// The version that the record of a number is written in, and what it is about.
fn expected(tag: u16) -> Option<(u16, About)> {
    Some(match tag {
        tag::STATISTICS => (2, About::Image),
        tag::TREE => (TREE_VERSION, About::Image),
        tag::CLOCKS | tag::PROCESSOR | tag::INSTRUCTIONS | tag::LINKS | cgroup::TAG => {
            (1, About::Image)
        }
        _ if ns::kind_of(tag).is_some() => (1, About::Image),
        COMPANION => (1, About::Image),
        tag::DESCRIPTORS | tag::PLACE | tags::LOCKS => (1, About::Process),
        memory::TAG | aio::TAG | registered::TAG => (1, About::Process),
        tag::THREAD => (1, About::Thread),
        tags::ATTRIBUTES | vdso::TAG => (1, About::Item),
        _ if kind_of(tag).is_some() => (1, About::Item),
        _ if PARTS.iter().any(|part| part.tag() == tag) => (1, About::Thread),
        _ => return None,
    })
}

/// Refuses records that a restore knows nothing of, or of which it would use another.
///
/// # Errors
/// [`resources::Error::Corrupt`], which names the record.
pub(crate) fn check(records: &[Record], tree: &Tree) -> Result<()> {
    let living = tree.tasks.iter();
    let living = living.filter(|node| node.state() != State::Zombie);
    let processes = living.clone().map(|node| node.number);
    let processes = processes.collect::<HashSet<_>>();
    let threads = living.flat_map(|node| &node.thread_numbers);
    let threads = threads.collect::<HashSet<_>>();
    let mut seen = HashSet::with_capacity(records.len());
    for Record {
        tag, version, id, ..
    } in records
    {
        let wrong = |what: &str| {
            let record = format!("{tag} of {id}");
            Err(Error::from(resources::Error::corrupt(record, what)))
        };
        let Some((known, about)) = expected(*tag) else {
            return wrong("is of a kind that is not known to this version");
        };
        let old = *tag == tag::TREE && *version == 1;
        if *version != known && !old {
            return wrong(&format!("has version {version}, and {known} is known"));
        }
        let has_subject = match about {
            About::Image => *id == 0,
            About::Process => processes.contains(id),
            About::Thread => threads.contains(id),
            About::Item => true,
        };
        if !has_subject {
            return wrong("is about something that the image does not have");
        }
        if !seen.insert((*tag, *id)) {
            return wrong("is there twice");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use image::{Reader, Record};

    use super::*;
    use crate::records::Saved;
    use crate::sample;

    fn refused(change: impl Fn(&mut Vec<Record>), what: &str) {
        let mut records = sample::records();
        change(&mut records);
        let store = sample::image(records, &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let error = Saved::read(&reader).err().expect("refused");
        let told = crate::Error::with_causes(&error);
        assert!(told.contains(what), "{told}");
    }

    #[test]
    fn what_a_restore_would_overlook_is_refused_by_name() {
        let record = |tag, version, id| Record {
            tag,
            version,
            id,
            payload: Vec::new(),
        };
        let name = |records: &[Record]| {
            let mut parts = records.iter().filter(|record| record.tag == 210);
            parts.next().expect("a name").clone()
        };
        refused(
            |all| all.push(record(299, 1, 1)),
            "record 299 of 1: is of a kind",
        );
        refused(
            |all| all.push(record(10, 1, 0)),
            "record 10 of 0: is of a kind",
        );
        refused(|all| all[0].version = 3, "the list of tasks has version 3");
        refused(
            |all| all.push(record(210, 1, 99)),
            "record 210 of 99: is about something",
        );
        refused(
            |all| all.push(record(tag::CLOCKS, 1, 5)),
            "record 6 of 5: is about something",
        );
        refused(|all| all.push(name(all)), "is there twice");
        refused(
            |all| {
                let found = all.iter_mut().find(|record| record.tag == tag::PLACE);
                // Field 15, a number.
                found.expect("a place").payload.extend([15 << 3, 1]);
            },
            "field 15 is not known",
        );
        refused(|all| all[0].version = 1, "tasks of version 1 have numbers");
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        assert!(Saved::read(&reader).is_ok());
    }
}
