//! `stillframe show`: tells what an image holds.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::Args;
use process::Description;
use process::report::TaskDescription;
use serde_json::{Value, json};

use crate::exit::{Failure, Status};
use crate::output;

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
        let description = process::describe(&dir).map_err(|source| Failure::Engine {
            doing: "show",
            source: Box::new(source),
        })?;
        let text = if self.json {
            format!("{}\n", to_json(&description))
        } else {
            to_text(&description)
        };
        output::say(&text);
        Ok(Status::Done)
    }
}

fn to_json(image: &Description) -> Value {
    json!({
        "image": image.image,
        "parent": image.parent,
        "format": image.format,
        "features": image.features,
        "pages": {
            "stored": image.pages.stored,
            "zero": image.pages.zero,
            "parent": image.pages.parent,
        },
        "files": image.files.iter()
            .map(|file| json!({"name": file.name, "bytes": file.bytes}))
            .collect::<Vec<_>>(),
        "tasks": image.tasks.iter().map(task_to_json).collect::<Vec<_>>(),
    })
}

fn task_to_json(task: &TaskDescription) -> Value {
    json!({
        "pid": task.pid,
        "parent_pid": task.parent_pid,
        "group": task.group,
        "session": task.session,
        "name": task.name,
        "state": task.state,
        "threads": task.threads,
        "exe": task.exe.as_ref().map(|exe| exe.display().to_string()),
        "mappings": task.mappings.iter().map(|mapping| json!({
            "start": mapping.start,
            "end": mapping.end,
            "protection": mapping.protection,
            "what": mapping.what,
            "stored_pages": mapping.stored_pages,
        })).collect::<Vec<_>>(),
        "descriptors": task.descriptors.iter().map(|descriptor| json!({
            "fd": descriptor.fd,
            "kind": descriptor.kind,
            "what": descriptor.what,
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
    if let Some(parent) = &image.parent {
        writeln!(text, "a difference from {parent}")?;
    }
    if !image.features.is_empty() {
        writeln!(text, "features {}", image.features.join(", "))?;
    }
    let pages = image.pages;
    writeln!(
        text,
        "pages {} stored ({}), {} zero, {} as in the parent",
        pages.stored,
        bytes(pages.stored * PAGE_BYTES),
        pages.zero,
        pages.parent
    )?;
    for file in &image.files {
        writeln!(text, "file {} {}", file.name, bytes(file.bytes))?;
    }
    for task in &image.tasks {
        write_task(text, task, depth(image, task))?;
    }
    Ok(())
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

fn write_task(text: &mut String, task: &TaskDescription, depth: usize) -> std::fmt::Result {
    let indent = "  ".repeat(depth);
    write!(
        text,
        "\n{indent}task {} {} {}",
        task.pid, task.name, task.state
    )?;
    write!(text, ", group {}, session {}", task.group, task.session)?;
    if task.threads.len() > 1 {
        let threads: Vec<String> = task.threads.iter().map(ToString::to_string).collect();
        write!(text, ", threads {}", threads.join(" "))?;
    }
    writeln!(text)?;
    if let Some(exe) = &task.exe {
        writeln!(text, "{indent}  runs {}", exe.display())?;
    }
    for mapping in &task.mappings {
        writeln!(
            text,
            "{indent}  {:012x}-{:012x} {} {:>9} of {:>9} {}",
            mapping.start,
            mapping.end,
            mapping.protection,
            bytes(mapping.stored_pages * PAGE_BYTES),
            bytes(mapping.end.saturating_sub(mapping.start)),
            mapping.what
        )?;
    }
    for descriptor in &task.descriptors {
        let closes = if descriptor.close_on_exec {
            " cloexec"
        } else {
            ""
        };
        writeln!(
            text,
            "{indent}  fd {} {} {}{closes}",
            descriptor.fd, descriptor.kind, descriptor.what
        )?;
    }
    Ok(())
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
    use process::report::{DescriptorDescription, FileSize, MappingDescription, PageCounts};

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

    fn image() -> Description {
        let mut root = task(10, 0, "shell");
        root.exe = Some("/bin/sh".into());
        root.mappings.push(MappingDescription {
            start: 0x40_0000,
            end: 0x60_0000,
            protection: "r-xp".to_owned(),
            what: "/bin/sh".to_owned(),
            stored_pages: 3,
        });
        let mut child = task(11, 10, "worker");
        child.threads.push(12);
        child.descriptors.push(DescriptorDescription {
            fd: 3,
            kind: "pipe".to_owned(),
            what: "pipe:[77]".to_owned(),
            close_on_exec: true,
        });
        Description {
            image: "5f".to_owned(),
            parent: None,
            format: 1,
            features: vec!["checksums".to_owned()],
            pages: PageCounts {
                stored: 12_000,
                zero: 5,
                parent: 0,
            },
            files: vec![FileSize {
                name: "pages".to_owned(),
                bytes: 49_152_000,
            }],
            tasks: vec![root, child],
        }
    }

    #[test]
    fn an_image_is_told_to_people() {
        insta::assert_snapshot!(to_text(&image()), @"
        image 5f, format 1
        features checksums
        pages 12000 stored (46 MiB), 5 zero, 0 as in the parent
        file pages 46 MiB

        task 10 shell running, group 10, session 10
          runs /bin/sh
          000000400000-000000600000 r-xp    12 KiB of  2048 KiB /bin/sh

          task 11 worker running, group 10, session 10, threads 11 12
            fd 3 pipe pipe:[77] cloexec
        ");
    }

    #[test]
    fn an_image_is_told_to_machines() {
        let json = to_json(&image());
        assert_eq!(json["tasks"][0]["mappings"][0]["stored_pages"], 3);
        assert_eq!(json["tasks"][1]["threads"], json!([11, 12]));
        assert_eq!(json["tasks"][1]["descriptors"][0]["close_on_exec"], true);
        assert_eq!(
            json["pages"],
            json!({"stored": 12_000, "zero": 5, "parent": 0})
        );
    }

    #[test]
    fn a_circle_of_parents_ends() {
        let mut image = image();
        image.tasks[0].parent_pid = 11;
        assert!(to_text(&image).contains("task 11"));
    }
}
