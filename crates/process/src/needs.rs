//! What an image needs of the host that it is to be restored on, tried without making any task.

use image::Reader;
use resources::map::vdso::Way;
use store::Images;
use sys::features;

use crate::clocks::Resumed;
use crate::error::Holder;
use crate::options::RestoreOptions;
use crate::processor::Processor;
use crate::records::Saved;
use crate::{Error, Result, host, huge_pages, plan, restore};

/// Something that a restore needs, and whether it is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    /// Its name, in one word.
    pub name: &'static str,
    /// What it is.
    pub what: &'static str,
    /// How it is met; or why it is not.
    pub outcome: std::result::Result<String, String>,
}

/// Tells what the image there needs of this host.
///
/// # Errors
/// A missing or damaged image.
pub fn needs(images: &Images) -> Result<Vec<Need>> {
    let store = images.open().map_err(image::Error::Place)?;
    let reader = Reader::open(&*store)?;
    let mut saved = Saved::read(&reader)?;
    reader.open_ancestors()?;
    saved.read_vdsos(&reader, sys::vdso::own_build_id().as_deref())?;
    let need = |name, what, outcome: Result<String>| Need {
        name,
        what,
        outcome: outcome.map_err(|error| error.with_causes()),
    };
    let options = RestoreOptions::new(images.clone());
    Ok(vec![
        need(
            "processor",
            "what threads have in their registers",
            processor(&saved, &reader),
        ),
        need("vdso", "the kernel's code in programs", vdso(&saved)),
        need(
            "huge-pages",
            "so many of the host's pages of hugetlbfs",
            huge_pages::check(&saved, &reader).map(|()| String::new()),
        ),
        need("clocks", "monotonic clocks go on", clocks(&saved)),
        need("pids", "the numbers of all tasks are free", pids(&saved)),
        need(
            "attributes",
            "privileges and features of the kernel",
            plan_of(&options, &saved, &reader),
        ),
    ])
}

fn processor(saved: &Saved<'_>, reader: &Reader) -> Result<String> {
    let remark = match Processor::check(saved, reader)? {
        None => "the image does not tell: an older version made it".to_owned(),
        Some(processor) => processor.remark(),
    };
    Ok(remark)
}

fn vdso(saved: &Saved<'_>) -> Result<String> {
    let own = host::vdso_for(saved)?;
    let mut memories = saved.tasks.iter().map(|task| &task.memory);
    let foreign = memories.any(|memory| own.way(memory) == Way::Proxied);
    let remark = if foreign {
        "a proxy for another kernel's"
    } else {
        ""
    };
    Ok(remark.to_owned())
}

fn clocks(saved: &Saved<'_>) -> Result<String> {
    let Some(clocks) = &saved.clocks else {
        let remark = "the image does not tell: they are the host's";
        return Ok(remark.to_owned());
    };
    let namespaces = features::named("timens").map(features::Feature::probe);
    match namespaces {
        Some(Ok(_)) => Ok("in a time namespace".to_owned()),
        other => {
            let why = other.and_then(std::result::Result::err).unwrap_or_default();
            let root = saved.tasks[0].node.pid;
            let error = std::io::Error::other(why);
            Resumed::from_now(clocks).without(root, &error)?;
            Ok("no: they jump ahead to the host's".to_owned())
        }
    }
}

fn pids(saved: &Saved<'_>) -> Result<String> {
    let threads = saved.tasks.iter().flat_map(|task| &task.threads);
    let tasks = saved.tasks.iter().map(|task| task.node.pid);
    let mut all = tasks.chain(threads.map(|thread| thread.tid));
    let taken = all.find(|pid| sys::procfs::has(pid));
    match taken {
        Some(pid) => Err(Error::Taken {
            pid,
            by: Holder::Unseen,
        }),
        None => Ok(String::new()),
    }
}

fn plan_of(options: &RestoreOptions, saved: &Saved<'_>, reader: &Reader) -> Result<String> {
    let setting = restore::setting(options, saved, resources::Inherited::read()?)?;
    plan::plan(reader, saved, &setting)?;
    Ok(String::new())
}
