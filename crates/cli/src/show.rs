//! `stillframe show`: tells what an image holds.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use process::report::{
    Layer, MappingDescription, Network, PageCounts, TaskDescription, date, printable,
};
use process::{Description, DumpKind};
use serde_json::{Value, json};

use crate::exit::{Failure, Status};
use crate::{output, statistics};

/// Bytes of a page.
const PAGE_BYTES: u64 = 4096;

/// Tell what an image holds: tasks, mappings, descriptors, sizes
#[derive(Debug, Args)]
pub struct Show {
    /// The directory of the image
    #[arg(value_name = "DIR", required_unless_present = "images_dir")]
    image: Option<PathBuf>,

    /// The same, as dump and restore name it
    #[arg(short = 'D', long, value_name = "DIR", conflicts_with = "image")]
    images_dir: Option<PathBuf>,

    /// Tell only what the dump did, and those of the images that this one is over
    #[arg(long)]
    stats: bool,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

impl Show {
    /// Prints what the image holds.
    ///
    /// # Errors
    /// There is no image, or it is damaged.
    pub fn run(self) -> Result<Status, Failure> {
        let dir = self.image.or(self.images_dir).unwrap_or_default();
        let description = process::describe(&dir.into()).map_err(Failure::engine("show"))?;
        let text = match (self.json, self.stats) {
            (true, false) => format!("{}\n", to_json(&description)),
            (true, true) => format!(
                "{}\n",
                json!({"layers": layers_to_json(&description.layers)})
            ),
            (false, false) => to_text(&description),
            (false, true) => layers_to_text(&description.layers),
        };
        output::say(&text);
        Ok(Status::Done)
    }
}

fn to_json(image: &Description) -> Value {
    json!({
        "image": image.image,
        "parent": image.parent,
        "links": image.links.iter()
            .map(|link| link.display().to_string())
            .collect::<Vec<_>>(),
        "format": image.format,
        "features": image.features,
        "creation": {
            "created_ns": image.creation.created_ns,
            "stillframe": image.creation.stillframe,
            "kernel": image.creation.kernel,
            "arch": image.creation.arch,
        },
        "vdsos": image.vdsos.iter()
            .map(|vdso| json!({
                "build_id": vdso.build_id,
                "is_ours": vdso.is_ours,
                "needs_proxy": vdso.needs_proxy,
            }))
            .collect::<Vec<_>>(),
        "instructions": image.instructions,
        "network": image.network.as_ref().map(|network| json!({
            "table": network.table,
            "stands": network.stands,
        })),
        "pages": pages_to_json(&image.pages),
        "blocks": image.blocks.iter()
            .map(|block| json!({"name": block.name, "bytes": block.bytes}))
            .collect::<Vec<_>>(),
        "volumes": image.volumes.iter()
            .map(|volume| json!({"name": volume.name, "bytes": volume.bytes}))
            .collect::<Vec<_>>(),
        "files": image.files.iter()
            .map(|file| json!({"name": file.name, "bytes": file.bytes}))
            .collect::<Vec<_>>(),
        "tasks": image.tasks.iter().map(task_to_json).collect::<Vec<_>>(),
        "statistics": image.statistics.as_ref().map(statistics::to_json),
        "layers": layers_to_json(&image.layers),
    })
}

fn layers_to_json(layers: &[Layer]) -> Vec<Value> {
    let layer = |layer: &Layer| {
        json!({
            "image": layer.image,
            "path": layer.path.display().to_string(),
            "missing": layer.missing,
            "freed_by": layer.freed_by,
            "pages": pages_to_json(&layer.pages),
            "held_pages": layer.held_pages,
            "bytes": layer.bytes,
            "statistics": layer.statistics.as_ref().map(statistics::to_json),
        })
    };
    layers.iter().map(layer).collect()
}

fn pages_to_json(pages: &PageCounts) -> Value {
    json!({
        "stored": pages.stored,
        "zero": pages.zero,
        "parent": pages.parent,
        "shared": pages.shared,
        "equal": pages.equal,
    })
}

fn task_to_json(task: &TaskDescription) -> Value {
    let path = |path: &Option<PathBuf>| path.as_ref().map(|path| path.display().to_string());
    json!({
        "pid": task.pid,
        "parent_pid": task.parent_pid,
        "group": task.group,
        "session": task.session,
        "name": task.name,
        "state": task.state,
        "ended": task.ended,
        "threads": task.threads,
        "exe": path(&task.exe),
        "cwd": path(&task.cwd),
        "root": path(&task.root),
        "parts": task.parts.iter().map(|part| json!({
            "tid": part.tid,
            "name": part.name,
            "what": part.what,
        })).collect::<Vec<_>>(),
        "mappings": task.mappings.iter().map(|mapping| json!({
            "start": mapping.start,
            "end": mapping.end,
            "protection": mapping.protection,
            "what": mapping.what,
            "pages": pages_to_json(&mapping.pages),
        })).collect::<Vec<_>>(),
        "descriptors": task.descriptors.iter().map(|descriptor| json!({
            "fd": descriptor.fd,
            "description": descriptor.description,
            "kind": descriptor.kind,
            "what": descriptor.what,
            "holds": descriptor.holds,
            "close_on_exec": descriptor.close_on_exec,
        })).collect::<Vec<_>>(),
    })
}

fn to_text(image: &Description) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_text(&mut text, image);
    text
}

fn write_text(text: &mut String, image: &Description) -> std::fmt::Result {
    writeln!(text, "image {}, format {}", image.image, image.format)?;
    let creation = &image.creation;
    writeln!(
        text,
        "written {} by stillframe {} on Linux {}, {}",
        date(creation.created_ns / 1_000_000_000),
        printable(&creation.stillframe),
        printable(&creation.kernel),
        printable(&creation.arch)
    )?;
    if let Some(known) = &image.statistics
        && known.kind == DumpKind::PreDump
    {
        writeln!(text, "a pre-dump of {} tasks: memory only", known.tasks)?;
    }
    if let Some(parent) = &image.parent {
        writeln!(text, "a difference from {parent}")?;
    }
    if !image.features.is_empty() {
        writeln!(text, "features {}", image.features.join(", "))?;
    }
    for link in &image.links {
        let link = link.display().to_string();
        writeln!(text, "needs the hard link {}", printable(&link))?;
    }
    for vdso in &image.vdsos {
        let ours = if vdso.needs_proxy {
            "another kernel's: a restore on this host needs a proxy"
        } else {
            "the same as this host's: a restore needs no proxy"
        };
        writeln!(text, "vDSO {}, {ours}", vdso.build_id)?;
    }
    write_instructions(text, image)?;
    writeln!(text, "pages {}", fates(&image.pages))?;
    for file in &image.files {
        writeln!(text, "file {} {}", file.name, bytes(file.bytes))?;
    }
    if let Some(network) = &image.network {
        writeln!(text, "connections {}", rules(network))?;
    }
    if image.layers.len() > 1 {
        writeln!(text, "\nlayers, the newest first")?;
    }
    for layer in image.layers.iter().filter(|_| image.layers.len() > 1) {
        write_layer(text, layer)?;
    }
    write_spaces(text, image)?;
    let is_of_processor = image.instructions.is_some() && image.tasks.is_empty();
    let is_of_volume = image.tasks.is_empty() && !image.volumes.is_empty();
    if is_of_processor || is_of_volume || !image.blocks.is_empty() {
        return Ok(());
    }
    writeln!(text, "\ntree")?;
    for task in &image.tasks {
        write_node(text, task, depth(image, task))?;
    }
    for task in image.tasks.iter().filter(|task| task.ended.is_none()) {
        write_task(text, task)?;
    }
    Ok(())
}

fn write_spaces(text: &mut String, image: &Description) -> std::fmt::Result {
    for volume in &image.volumes {
        let name = printable(&volume.name);
        writeln!(text, "volume, {name}: {}", bytes(volume.bytes))?;
    }
    for block in &image.blocks {
        let (name, size) = (printable(&block.name), bytes(block.bytes));
        writeln!(text, "memory of a virtual machine, {name}: {size}")?;
    }
    Ok(())
}

fn write_instructions(text: &mut String, image: &Description) -> std::fmt::Result {
    match &image.instructions {
        Some(names) => writeln!(text, "instructions {}", printable(&names.join(" "))),
        None => Ok(()),
    }
}

/// Tells what holds the image's connections back.
fn rules(network: &Network) -> String {
    let table = &network.table;
    match network.stands {
        Some(true) => format!(
            "are held back on this host by the table {table}, until the image is restored \
             or `stillframe network clear` removes it"
        ),
        Some(false) => format!("are not held back on this host: there is no table {table}"),
        None => format!("may be held back by the table {table}: tables cannot be listed"),
    }
}

/// Tells pages by their fate.
fn fates(pages: &PageCounts) -> String {
    let size = |pages: u64| bytes(pages.saturating_mul(PAGE_BYTES));
    format!(
        "{} stored ({}), {} zero, {} shared with a parent task, {} equal to others, \
         {} as in the parent image ({})",
        pages.stored,
        size(pages.stored),
        pages.zero,
        pages.shared,
        pages.equal,
        pages.parent,
        size(pages.parent),
    )
}

/// A line of the chain.
fn write_layer(text: &mut String, layer: &Layer) -> std::fmt::Result {
    let path = layer.path.display().to_string();
    let (image, path) = (&layer.image, printable(&path));
    let held = bytes(layer.held_pages.saturating_mul(PAGE_BYTES));
    write!(
        text,
        "  {image} in {path}, holds {} pages ({held}): ",
        layer.held_pages
    )?;
    if let Some(by) = &layer.freed_by {
        write!(text, "parts of it were freed by auto-dedup of {by}; ")?;
    }
    match &layer.missing {
        Some(why) => writeln!(text, "cannot be read: {}", printable(why)),
        None => writeln!(
            text,
            "{}, {} of files",
            fates(&layer.pages),
            bytes(layer.bytes)
        ),
    }
}

/// Describes the dumps of a chain.
fn layers_to_text(layers: &[Layer]) -> String {
    let mut text = String::new();
    for layer in layers {
        // Writing to a string cannot fail.
        let _ = write_layer(&mut text, layer);
        match &layer.statistics {
            Some(known) => text.push_str(&statistics::to_text(known, "    ")),
            None if layer.missing.is_none() => text.push_str("    it says nothing of its dump\n"),
            None => {}
        }
    }
    text
}

/// Returns how many ancestors of the task are in the image.
fn depth(image: &Description, task: &TaskDescription) -> usize {
    let mut depth = 0;
    let mut parent = task.parent_pid;
    // An image may claim a circle of parents: no chain is longer than the tasks are many.
    while depth < image.tasks.len()
        && let Some(above) = image.tasks.iter().find(|above| above.pid == parent)
    {
        depth += 1;
        parent = above.parent_pid;
    }
    depth
}

/// A line of the tree.
fn write_node(text: &mut String, task: &TaskDescription, depth: usize) -> std::fmt::Result {
    let indent = "  ".repeat(depth + 1);
    let (pid, name, state) = (task.pid, printable(&task.name), &task.state);
    write!(text, "{indent}{pid} {name} {state}")?;
    if let Some(ended) = &task.ended {
        write!(text, " ({ended})")?;
    }
    write!(text, ", group {}, session {}", task.group, task.session)?;
    if task.threads.len() > 1 {
        let threads: Vec<String> = task.threads.iter().map(ToString::to_string).collect();
        write!(text, ", threads {}", threads.join(" "))?;
    }
    writeln!(text)
}

fn write_task(text: &mut String, task: &TaskDescription) -> std::fmt::Result {
    writeln!(text, "\ntask {} {}", task.pid, printable(&task.name))?;
    let places = [("runs", &task.exe), ("in", &task.cwd), ("root", &task.root)];
    for (what, path) in places {
        if let Some(path) = path {
            let path = path.display().to_string();
            writeln!(text, "  {what} {}", printable(&path))?;
        }
    }
    for part in &task.parts {
        if part.tid == task.pid {
            writeln!(text, "  {}: {}", part.name, printable(&part.what))?;
        } else {
            let (tid, what) = (part.tid, printable(&part.what));
            writeln!(text, "  thread {tid} {}: {what}", part.name)?;
        }
    }
    for mapping in &task.mappings {
        write_mapping(text, mapping)?;
    }
    for descriptor in &task.descriptors {
        let closes = if descriptor.close_on_exec {
            " cloexec"
        } else {
            ""
        };
        let (fd, kind, what) = (descriptor.fd, &descriptor.kind, printable(&descriptor.what));
        write!(text, "  fd {fd} {kind} {what}{closes}")?;
        match &descriptor.holds {
            Some(holds) => writeln!(text, ", {}", printable(holds))?,
            None => writeln!(text)?,
        }
    }
    Ok(())
}

fn write_mapping(text: &mut String, mapping: &MappingDescription) -> std::fmt::Result {
    let pages = mapping.pages;
    write!(
        text,
        "  {:012x}-{:012x} {} {:>9} of {:>9} {}",
        mapping.start,
        mapping.end,
        mapping.protection,
        bytes(pages.stored.saturating_mul(PAGE_BYTES)),
        bytes(mapping.end.saturating_sub(mapping.start)),
        printable(&mapping.what)
    )?;
    for (count, fate) in [
        (pages.shared, "shared with its parent task"),
        (pages.zero, "zero"),
        (pages.equal, "equal to others"),
        (pages.parent, "as in the parent image"),
    ] {
        if count > 0 {
            let size = bytes(count.saturating_mul(PAGE_BYTES));
            write!(text, ", {size} {fate}")?;
        }
    }
    writeln!(text)
}

/// Writes a size for people: whole units below 10,000 of them.
fn bytes(bytes: u64) -> String {
    let mut number = bytes;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if number < 10_000 {
            return format!("{number} {unit}");
        }
        number /= 1024;
    }
    format!("{number} TiB")
}

#[cfg(test)]
mod tests {
    use process::report::{Creation, DescriptorDescription, FileSize, PartDescription, Vdso};

    use super::*;

    fn task(pid: i32, parent_pid: i32, name: &str) -> TaskDescription {
        TaskDescription {
            pid,
            parent_pid,
            group: 10,
            session: 10,
            name: name.to_owned(),
            state: "running".to_owned(),
            threads: vec![pid],
            ..TaskDescription::default()
        }
    }

    fn part(tid: i32, name: &str, what: &str) -> PartDescription {
        PartDescription {
            tid,
            name: name.to_owned(),
            what: what.to_owned(),
        }
    }

    fn image() -> Description {
        let mut root = task(10, 0, "shell");
        root.exe = Some("/bin/sh".into());
        root.mappings.push(MappingDescription {
            start: 0x40_0000,
            end: 0x60_0000,
            protection: "r-xp".to_owned(),
            what: "/bin/sh".to_owned(),
            pages: PageCounts {
                stored: 3,
                shared: 2,
                ..PageCounts::default()
            },
        });
        root.cwd = Some("/home/\u{1b}[2J".into());
        root.parts.push(part(10, "limits", "NOFILE=1024:4096"));
        let mut child = task(11, 10, "worker");
        child.threads.push(12);
        child.parts.push(part(12, "umask", "0022"));
        let mut dead = task(13, 11, "gone");
        dead.state = "zombie".to_owned();
        dead.ended = Some("signal 9".to_owned());
        dead.threads.clear();
        child.descriptors.push(DescriptorDescription {
            fd: 3,
            description: 0,
            kind: "pipe".to_owned(),
            what: "pipe:[77]".to_owned(),
            holds: Some("a flock for writing".to_owned()),
            close_on_exec: true,
        });
        Description {
            image: "5f".to_owned(),
            parent: None,
            links: Vec::new(),
            format: 1,
            features: vec!["checksums".to_owned()],
            creation: Creation {
                created_ns: 1_709_209_445_000_000_000,
                stillframe: "0.1.0".to_owned(),
                kernel: "6.18.0".to_owned(),
                arch: "x86_64".to_owned(),
            },
            instructions: None,
            vdsos: vec![Vdso {
                build_id: "0a1b".to_owned(),
                is_ours: false,
                needs_proxy: true,
            }],
            pages: PageCounts {
                stored: 12_000,
                zero: 5,
                parent: 0,
                shared: 2,
                equal: 1,
            },
            blocks: Vec::new(),
            volumes: Vec::new(),
            files: vec![FileSize {
                name: "pages".to_owned(),
                bytes: 49_152_000,
            }],
            network: None,
            tasks: vec![root, child, dead],
            statistics: None,
            layers: Vec::new(),
        }
    }

    #[test]
    fn an_image_is_told_to_people() {
        insta::assert_snapshot!(to_text(&image()), @r"
        image 5f, format 1
        written 2024-02-29 12:24:05 UTC by stillframe 0.1.0 on Linux 6.18.0, x86_64
        features checksums
        vDSO 0a1b, another kernel's: a restore on this host needs a proxy
        pages 12000 stored (46 MiB), 5 zero, 2 shared with a parent task, 1 equal to others, 0 as in the parent image (0 B)
        file pages 46 MiB

        tree
          10 shell running, group 10, session 10
            11 worker running, group 10, session 10, threads 11 12
              13 gone zombie (signal 9), group 10, session 10

        task 10 shell
          runs /bin/sh
          in /home/\u{1b}[2J
          limits: NOFILE=1024:4096
          000000400000-000000600000 r-xp    12 KiB of  2048 KiB /bin/sh, 8192 B shared with its parent task

        task 11 worker
          thread 12 umask: 0022
          fd 3 pipe pipe:[77] cloexec, a flock for writing
        ");
    }

    #[test]
    fn layers_are_told() {
        let newest = Layer {
            image: "5f".to_owned(),
            path: ".".into(),
            pages: image().pages,
            held_pages: 12_000,
            bytes: 50_000_000,
            statistics: Some(process::Statistics {
                kind: DumpKind::PreDump,
                frozen_us: 17,
                ..process::Statistics::default()
            }),
            ..Layer::default()
        };
        let gone = Layer {
            image: "4e".to_owned(),
            path: "../1".into(),
            held_pages: 5,
            missing: Some("there is no image".to_owned()),
            ..Layer::default()
        };
        let layers = [newest, gone];
        let text = layers_to_text(&layers);
        assert!(
            text.contains("  5f in ., holds 12000 pages (46 MiB): 12000 stored"),
            "{text}"
        );
        assert!(
            text.contains("frozen_time                    17 us\n"),
            "{text}"
        );
        assert!(
            text.ends_with(
                "4e in ../1, holds 5 pages (20 KiB): cannot be read: there is no image\n"
            )
        );
        let json = layers_to_json(&layers);
        assert_eq!(json[0]["statistics"]["kind"], "pre-dump");
        assert_eq!(json[1]["held_pages"], 5);
        let mut image = image();
        image.layers = layers.into();
        assert!(to_text(&image).contains("layers, the newest first\n  5f in ."));
    }

    #[test]
    fn an_image_is_told_to_machines() {
        let json = to_json(&image());
        assert_eq!(json["tasks"][0]["mappings"][0]["pages"]["stored"], 3);
        assert_eq!(json["tasks"][1]["threads"], json!([11, 12]));
        assert_eq!(json["tasks"][1]["descriptors"][0]["close_on_exec"], true);
        assert_eq!(
            json["pages"],
            json!({"stored": 12_000, "zero": 5, "parent": 0, "shared": 2, "equal": 1})
        );
    }

    #[test]
    fn a_circle_of_parents_ends() {
        let mut image = image();
        image.tasks[0].parent_pid = 11;
        assert!(to_text(&image).contains("task 11"));
    }
}
