//! Image → description: what `show` prints, without touching any task.

use std::path::PathBuf;

use image::{FORMAT_VERSION, Reader, Run, SpaceId, SpaceKind};
use resources::fd::tcp::lock;
use resources::fd::{attributes, locks};
use resources::map::memory::{Mapping, Memory, Special};
use store::{Images, Store};

use crate::chain::{self, files};
use crate::fates::{Fate, count, count_all, fates};
use crate::records::{Descriptor, Node, Saved, SavedTask, SavedThread, State, What};
use crate::report::{
    BlockDescription, Creation, DescriptorDescription, MappingDescription, Network, PageCounts,
    PartDescription, TaskDescription, Vdso,
};
use crate::text::describe_status;
use crate::{Description, ImageKind, Result, Statistics, host};

/// Tells what the image there holds.
///
/// # Errors
/// A missing or damaged image.
pub fn describe(images: &Images) -> Result<Description> {
    describe_in(&*images.open().map_err(image::Error::Place)?)
}

fn describe_in(store: &dyn Store) -> Result<Description> {
    let reader = Reader::open(store)?;
    let saved = match ImageKind::of(&reader)? {
        ImageKind::Machine | ImageKind::PreDump | ImageKind::Volume => Saved::nothing(),
        ImageKind::Processor => Saved::processor_of(&reader)?,
        ImageKind::Tree => Saved::read(&reader)?,
    };
    let described = Descriptions::read(&saved)?;
    let fates = fates(&reader);
    let tasks = saved.tasks.iter().enumerate();
    let tasks = tasks.map(|(index, task)| {
        let mut described =
            described.task(&fates, (task, saved.with_memory_of(task)), index == 0)?;
        describe_shared(&saved, &task.node, &mut described.parts);
        describe_groups(&saved, task, &mut described.parts);
        if index == 0 {
            describe_namespaces(&saved, task, &mut described.parts);
        }
        Ok(described)
    });
    let facts = reader.facts();
    Ok(Description {
        image: reader.id().to_string(),
        parent: reader.parent().map(|(id, path)| format!("{id} in {path}")),
        links: crate::links::of(&reader)
            .iter()
            .map(crate::links::Link::path)
            .collect(),
        format: FORMAT_VERSION,
        features: reader.features().to_vec(),
        creation: Creation {
            created_ns: facts.created_ns,
            stillframe: facts.stillframe_version.clone(),
            kernel: facts.kernel_release.clone(),
            arch: facts.arch.clone(),
        },
        vdsos: vdsos(&saved),
        instructions: saved.instructions.clone().map(|all| all.names),
        pages: count_all(&reader),
        blocks: blocks(&reader, SpaceKind::Block),
        volumes: blocks(&reader, SpaceKind::Volume),
        files: files(store, &reader)?,
        network: network(&saved),
        tasks: tasks.collect::<Result<_>>()?,
        statistics: Statistics::of(&reader)?,
        layers: chain::layers(store, &reader)?,
    })
}

/// What holds the image's connections back.
fn network(saved: &Saved<'_>) -> Option<Network> {
    let table = lock::table(&saved.descriptions)?;
    Some(Network {
        stands: crate::network::stands(&table),
        table,
    })
}

/// Adds the tree's own namespaces to its root.
fn describe_namespaces(saved: &Saved<'_>, root: &SavedTask<'_>, parts: &mut Vec<PartDescription>) {
    parts.extend(saved.namespaces.iter().map(|namespace| PartDescription {
        tid: root.node.pid,
        name: format!("{} namespace", namespace.name()),
        what: namespace.describe(),
    }));
}

/// Adds the control groups of a task, and of its threads that are in others.
fn describe_groups(saved: &Saved<'_>, task: &SavedTask<'_>, parts: &mut Vec<PartDescription>) {
    let Some(cgroups) = &saved.cgroups else {
        return;
    };
    for thread in &task.threads {
        if let Some(what) = cgroups.describe(thread.tid) {
            parts.push(PartDescription {
                tid: thread.tid,
                name: "control groups".to_owned(),
                what,
            });
        }
    }
}

/// Each vDSO that a task has mapped, once.
fn vdsos(saved: &Saved<'_>) -> Vec<Vdso> {
    let mut ids = saved
        .tasks
        .iter()
        .map(|task| task.memory.vdso_build_id.as_slice())
        .filter(|id| !id.is_empty())
        .collect::<Vec<_>>();
    ids.sort_unstable();
    ids.dedup();
    // Where this host cannot be looked at, it has none.
    let own = host::vdso_for(saved).unwrap_or_default();
    let of_32_bits = own.host_32.map(|host| host.build_id);
    let is_own = |id: &[u8]| [&own.build_id, &of_32_bits].contains(&&Some(id.to_vec()));
    let vdso = |id: &[u8]| Vdso {
        build_id: id.iter().map(|byte| format!("{byte:02x}")).collect(),
        is_ours: is_own(id),
        needs_proxy: !is_own(id),
    };
    ids.into_iter().map(vdso).collect()
}

/// The blocks of a machine's memory, or the volumes and disks.
fn blocks(reader: &Reader, kind: SpaceKind) -> Vec<BlockDescription> {
    let blocks = reader.spaces().iter();
    let blocks = blocks.filter(|space| space.kind == kind);
    let describe = |space: &image::Space| BlockDescription {
        name: space.name.clone(),
        bytes: space.len_pages.saturating_mul(image::PAGE_BYTES as u64),
    };
    blocks.map(describe).collect()
}

/// The pages of a mapping among the sorted runs of its space.
fn count_in(runs: &[(Run, Fate)], map: &Mapping) -> PageCounts {
    let mut counts = PageCounts::default();
    let (start, end) = (map.start / abi::PAGE_BYTES, map.end / abi::PAGE_BYTES);
    let from = runs.partition_point(|(run, _)| run.end_page() <= start);
    let inside = runs[from..].iter();
    for (run, fate) in inside.take_while(|(run, _)| run.first_page < end) {
        let pages = run.end_page().min(end) - run.first_page.max(start);
        count(&mut counts, *fate, pages);
    }
    counts
}

/// The open file descriptions, by id.
pub(crate) struct Descriptions(Vec<DescriptionText>);

struct DescriptionText {
    kind: &'static str,
    what: String,
    /// Of those that have one.
    path: Option<String>,
    /// Its owner and its locks.
    holds: Option<String>,
}

impl Descriptions {
    pub fn read(saved: &Saved<'_>) -> Result<Self> {
        let all = (0u32..).zip(&saved.descriptions);
        let all = all.map(|(id, description)| {
            let holds = saved.attributes.get(&id);
            Ok(DescriptionText {
                kind: description.name(),
                what: description.describe(),
                path: description.path(),
                holds: holds
                    .map(|payload| attributes::describe(payload))
                    .transpose()?,
            })
        });
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// All of them in short: paths, where there are some.
    pub fn files(&self) -> Vec<String> {
        let ids = 0..u32::try_from(self.0.len()).expect("fewer than records");
        ids.map(|id| self.file(id)).collect()
    }

    /// All of them in full.
    pub fn lines(&self) -> Vec<String> {
        let line = |text: &DescriptionText| format!("{} {}", text.kind, text.what);
        self.0.iter().map(line).collect()
    }

    /// The file as a mapping shows it.
    fn file(&self, id: u32) -> String {
        let text = &self.0[id as usize];
        let named = || format!("{} {}", text.kind, text.what);
        text.path.clone().unwrap_or_else(named)
    }

    fn path(&self, id: u32) -> PathBuf {
        PathBuf::from(self.file(id))
    }

    fn task(
        &self,
        fates: &[(Run, Fate)],
        (task, with_memory): (&SavedTask<'_>, &SavedTask<'_>),
        is_root: bool,
    ) -> Result<TaskDescription> {
        let node = &task.node;
        let mut described = TaskDescription {
            pid: node.pid,
            parent_pid: if is_root { 0 } else { node.parent },
            group: node.group,
            session: node.session,
            name: String::from_utf8_lossy(&node.name).into_owned(),
            threads: node.threads.clone(),
            ..TaskDescription::default()
        };
        described.state = match node.state() {
            State::Running => "running",
            State::Stopped => "stopped",
            State::Zombie => "zombie",
        }
        .to_owned();
        if node.state() == State::Zombie {
            described.ended = Some(describe_status(node.exit_status));
            return Ok(described);
        }
        described.exe = Some(self.path(with_memory.memory.exe));
        described.cwd = Some(self.path(task.place.cwd));
        described.root = task.place.root.map(|root| self.path(root));
        for thread in &task.threads {
            describe_parts(thread, &mut described.parts);
        }
        let own = |part: &&PartDescription| part.tid == node.pid && part.name == "name";
        if let Some(name) = described.parts.iter().find(own) {
            described.name.clone_from(&name.what);
        }
        if let Some(payload) = task.locks {
            described.parts.push(PartDescription {
                tid: node.pid,
                name: "file locks".to_owned(),
                what: locks::describe(payload)?,
            });
        }
        if node.memory_of == 0 {
            described.mappings = self.mappings(fates, node.space(), &task.memory)?;
        }
        let descriptors = task.descriptors.iter();
        described.descriptors = descriptors.map(|one| self.descriptor(one)).collect();
        described
            .descriptors
            .sort_by_key(|descriptor| descriptor.fd);
        Ok(described)
    }

    fn mappings(
        &self,
        fates: &[(Run, Fate)],
        space: SpaceId,
        memory: &Memory,
    ) -> Result<Vec<MappingDescription>> {
        memory.check()?;
        let first = fates.partition_point(|(run, _)| run.space < space);
        let end = fates.partition_point(|(run, _)| run.space <= space);
        let runs = &fates[first..end];
        let described = memory.mappings.iter().map(|map| MappingDescription {
            start: map.start,
            end: map.end,
            protection: protection(map),
            what: self.what(map, memory),
            pages: if map.is_private() {
                count_in(runs, map)
            } else {
                PageCounts::default()
            },
        });
        Ok(described.collect())
    }

    /// What /proc/PID/maps shows behind the numbers, and `anonymous` where it shows nothing.
    fn what(&self, map: &Mapping, memory: &Memory) -> String {
        // As in `Memory::marks`.
        let (start_brk, brk, stack) = (memory.marks[4], memory.marks[5], memory.marks[6]);
        match (map.special(), map.file) {
            (Special::Vdso, _) => "[vdso]".to_owned(),
            (Special::Vvar, _) => "[vvar]".to_owned(),
            (Special::Aio, _) => "[aio]".to_owned(),
            (Special::No | Special::Ring, Some(file)) => self.file(file),
            (Special::No, None) if !map.name.is_empty() => {
                format!("[anon:{}]", String::from_utf8_lossy(&map.name))
            }
            _ if map.start < brk && start_brk < map.end => "[heap]".to_owned(),
            _ if (map.start..map.end).contains(&stack) => "[stack]".to_owned(),
            _ => "anonymous".to_owned(),
        }
    }

    fn descriptor(&self, descriptor: &Descriptor) -> DescriptorDescription {
        let text = &self.0[descriptor.description as usize];
        DescriptorDescription {
            fd: descriptor.fd,
            description: descriptor.description,
            kind: text.kind.to_owned(),
            what: text.what.clone(),
            holds: text.holds.clone(),
            close_on_exec: descriptor.close_on_exec,
        }
    }
}

fn describe_parts(thread: &SavedThread, described: &mut Vec<PartDescription>) {
    described.extend(thread.parts.iter().map(|part| PartDescription {
        tid: thread.tid,
        name: part.name().to_owned(),
        what: part.describe(),
    }));
}

/// Tells what a task shares with an earlier one.
fn describe_shared(saved: &Saved<'_>, node: &Node, described: &mut Vec<PartDescription>) {
    for what in What::ALL {
        let of = node.shared_with(what);
        let mut tasks = saved.tree.tasks.iter();
        let Some(other) = tasks.find(|other| of != 0 && other.number == of) else {
            continue;
        };
        let (name, flag) = what.names();
        described.push(PartDescription {
            tid: node.pid,
            name: name.to_owned(),
            what: format!("shared with pid {} ({flag})", other.pid),
        });
    }
}

/// As in /proc/PID/maps: `rw-p`.
fn protection(map: &Mapping) -> String {
    let letter = |bit: u32, letter: char| if map.prot & bit != 0 { letter } else { '-' };
    let sharing = if map.flags & 1 != 0 { 's' } else { 'p' };
    [letter(1, 'r'), letter(2, 'w'), letter(4, 'x'), sharing]
        .iter()
        .collect()
}

#[cfg(test)]
mod tests {
    use image::Record;
    use proptest::prelude::*;

    use super::*;
    use crate::plan::{Setting, plan, print};
    use crate::records::{FIRST_OBJECT, Tree, record};
    use crate::sample;

    fn described() -> Description {
        let store = sample::image(sample::records(), &[]);
        describe_in(&*store).expect("a right image")
    }

    #[test]
    fn tasks_are_told() {
        let image = described();
        let told = |task: &TaskDescription| {
            let TaskDescription { pid, name, .. } = task;
            let (parent, threads) = (task.parent_pid, &task.threads);
            format!("{pid} of {parent}: {name} {} {threads:?}", task.state)
        };
        let all = image.tasks.iter().map(told).collect::<Vec<_>>();
        assert_eq!(
            all,
            [
                "100 of 0: t100 running [100, 101]",
                "102 of 100: t102 running [102]",
                "103 of 100: gone zombie []",
            ]
        );
        assert_eq!(image.tasks[2].ended.as_deref(), Some("signal 9"));
        let root = &image.tasks[0];
        let places = (root.exe.as_deref(), root.cwd.as_deref(), &root.root);
        let want = (
            Some(std::path::Path::new("/usr/bin/true")),
            Some(std::path::Path::new("/srv")),
        );
        assert_eq!(places, (want.0, want.1, &None));
        let names = root.parts.iter().map(|part| (part.tid, part.name.as_str()));
        let want = [
            (100, "name"),
            (100, "credentials"),
            (101, "name"),
            (101, "credentials"),
        ];
        assert_eq!(names.collect::<Vec<_>>(), want);
    }

    #[test]
    fn an_image_of_before_tasks_had_numbers_tells_the_same() {
        let old = describe_in(&*sample::old_image()).expect("a right image");
        let new = described();
        assert_eq!(old.tasks, new.tasks);
        assert_eq!(old.pages, new.pages);
        let plan = |store: &dyn Store| {
            let reader = Reader::open(store).expect("a right image");
            let saved = Saved::read(&reader).expect("right records");
            let plan = plan(&reader, &saved, &Setting::default()).expect("it can be restored");
            print(&plan, &saved, &reader).expect("it can be told")
        };
        let new = plan(&*sample::image(sample::records(), &[]));
        assert_eq!(plan(&*sample::old_image()), new);
    }

    #[test]
    fn numbers_that_are_anothers_are_refused() {
        let changed = |change: &dyn Fn(&mut Tree)| {
            let mut records = sample::records();
            let mut tree = Tree::read(&records[0]).expect("a right one");
            change(&mut tree);
            records[0] = tree.record();
            records
        };
        let number = changed(&|tree| tree.tasks[2].number = 1);
        refused(number, "task 103 has no numbers of its own");
        let thread = changed(&|tree| tree.tasks[0].thread_numbers[1] = 3);
        refused(thread, "task 102 has no numbers of its own");
        let few = changed(&|tree| tree.tasks[0].thread_numbers.truncate(1));
        refused(few, "task 100 has no numbers of its own");
        let none = changed(&|tree| tree.tasks[1].number = 0);
        refused(none, "task 102 has no numbers of its own");
        let space = changed(&|tree| tree.tasks[1].space_number = sample::ROOT_SPACE.0);
        refused(space, "task 102 has no space of its own");
        let object = changed(&|tree| tree.tasks[1].space_number = FIRST_OBJECT);
        refused(object, "task 102 has no space of its own");
        // Itself, a thread, one that has ended, none at all.
        for first in [3, 2, 4, 99] {
            let shared = changed(&|tree| tree.tasks[1].directories_of = first);
            let what = "task 102 has the working directory and umask of nobody before it";
            refused(shared, what);
        }
        let mut attributes = sample::records();
        attributes.push(record(attributes::TAG, 4, Vec::new()));
        refused(
            attributes,
            "description 4, which has attributes, is missing",
        );
        let after = changed(&|tree| tree.tasks[0].descriptors_of = 3);
        refused(
            after,
            "task 100 has the descriptor table of nobody before it",
        );
    }

    #[test]
    fn mappings_are_told_with_their_pages() {
        let image = described();
        let told = |map: &MappingDescription| {
            let PageCounts {
                stored,
                zero,
                shared,
                ..
            } = map.pages;
            let (protection, what) = (&map.protection, &map.what);
            format!("{protection} {what} {stored} {zero} {shared}")
        };
        let all = |task: &TaskDescription| task.mappings.iter().map(told).collect::<Vec<_>>();
        let want = [
            "r-xp /usr/bin/true 0 0 0",
            "rw-p [heap] 2 1 0",
            "r--p [anon:arena] 0 0 0",
            "rw-p [stack] 0 0 0",
            "r--p [vvar] 0 0 0",
            "r-xp [vdso] 0 0 0",
        ];
        assert_eq!(all(&image.tasks[0]), want);
        assert_eq!(all(&image.tasks[1])[1], "rw-p [heap] 0 0 2");
        let want = PageCounts {
            stored: 2,
            zero: 1,
            parent: 0,
            shared: 2,
            equal: 0,
        };
        assert_eq!(image.pages, want);
    }

    #[test]
    fn descriptors_are_told() {
        let image = described();
        let told = |one: &DescriptorDescription| {
            let (fd, id, kind, what) = (one.fd, one.description, &one.kind, &one.what);
            format!("{fd} {id} {kind} {what} {}", one.close_on_exec)
        };
        let all = image.tasks[0].descriptors.iter().map(told);
        let want = [
            "0 2 regular /srv/a pos=0 flags=0o2 false",
            "5 3 eventfd count=3 true",
            "6 3 eventfd count=3 false",
        ];
        assert_eq!(all.collect::<Vec<_>>(), want);
    }

    #[test]
    fn files_and_creation_are_told() {
        let image = described();
        assert_eq!(image.creation.kernel, "6.18.0");
        assert_eq!((image.format, image.vdsos.len()), (2, 1));
        assert!(image.vdsos[0].is_ours && image.vdsos[0].build_id.len() == 40);
        let names = image.files.iter().map(|file| file.name.as_str());
        let pages = format!("pages-{}.img", image.image);
        assert_eq!(names.collect::<Vec<_>>(), ["manifest.img", pages.as_str()]);
        assert_eq!(image.files[1].bytes, 8192);
    }

    #[track_caller]
    fn refused(records: Vec<Record>, what: &str) {
        let error = describe_in(&*sample::image(records, &[])).expect_err("forged");
        let told = error.to_string();
        assert!(told.contains(what), "{told}");
        assert_eq!(error.blame(), image::Blame::Corrupt);
    }

    #[test]
    fn forged_records_are_named() {
        let change = |tag: u16, id: u32, change: &dyn Fn(&mut Record)| {
            let mut records = sample::records();
            let mut all = records.iter_mut();
            let found = all.find(|record| record.tag == tag && record.id == id);
            change(found.expect("there is such a record"));
            records
        };
        let memory = resources::map::memory::TAG;
        let cut = change(memory, sample::id(sample::ROOT), &|record| {
            record.payload.clear()
        });
        refused(cut, "0 marks instead of 11");
        let gone = change(memory, sample::id(sample::CHILD), &|record| record.tag = 0);
        refused(gone, "memory of 102 is missing");
        let eventfd = resources::fd::tags::EVENTFD;
        let unknown = change(eventfd, 3, &|record| record.tag = 199);
        refused(unknown, "record 199 of 3: is of a kind that is not known");
        let number = change(eventfd, 3, &|record| record.id = 4);
        refused(number, "description 4 is out of order");
        let name = resources::task::PARTS
            .iter()
            .find(|part| part.name() == "name");
        let name = name.expect("a part").tag();
        let part = change(name, sample::id(sample::THREAD), &|record| record.tag = 299);
        refused(part, "is of a kind that is not known");
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        /// Neither `show` nor `restore --plan` panics, whatever an image claims.
        #[test]
        fn forged_images_are_no_panic(
            which in any::<prop::sample::Index>(),
            at in any::<prop::sample::Index>(),
            bytes in prop::collection::vec(any::<u8>(), 0..12),
            cut in any::<bool>(),
            pages in prop::option::of((0u64..3, 1u32..=u32::MAX)),
        ) {
            let mut records = sample::records();
            let record = which.get(&records).clone();
            let place = records.iter().position(|other| *other == record).expect("one of them");
            let payload = &mut records[place].payload;
            let at = at.index(payload.len() + 1);
            let end = if cut { payload.len() } else { (at + bytes.len()).min(payload.len()) };
            payload.splice(at..end, bytes);
            let far = pages.into_iter().map(|(from_end, pages)| Run {
                space: sample::CHILD_SPACE,
                first_page: (1 << 52) - u64::from(pages) - from_end,
                pages,
                kind: image::RunKind::Zero,
            });
            let store = sample::image(records, &far.collect::<Vec<_>>());
            let _ = describe_in(&*store);
            let reader = Reader::open(&*store).expect("sealed right");
            if let Ok(saved) = Saved::read(&reader) {
                let _ = plan(&reader, &saved, &Setting::default())
                    .and_then(|plan| print(&plan, &saved, &reader));
            }
        }
    }
}
