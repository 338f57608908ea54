//! Disks in QEMU's command line: those of the saved machine make way for a machine's own.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::command::{Word, fields, join, split, written};

/// A disk that a machine gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AssignedDisk {
    /// Its name in the image.
    pub disk: String,
    pub path: PathBuf,
    /// `raw` or `qcow2`.
    pub format: String,
    /// The files that the saved machine had it in.
    pub formers: Vec<PathBuf>,
}

/// Options whose value is a file.
const FILES: [&str; 10] = [
    "hda", "hdb", "hdc", "hdd", "cdrom", "fda", "fdb", "pflash", "mtdblock", "sd",
];

/// Keys of an option with the name of a file.
const NAMES: [&str; 3] = ["file", "filename", "file.filename"];

/// Tells whether a command line says which disk goes where.
pub(crate) fn names_disks(words: &[String]) -> bool {
    words.iter().any(|word| word.contains("{disk"))
}

/// Puts the files of disks where `{disk1}`, `{disk2}` and so on stand.
///
/// # Errors
/// Which of them there is no disk for, or which disk is not named.
pub(crate) fn fill_in(words: &[String], given: &[AssignedDisk]) -> Result<Vec<String>, String> {
    let mut words = words.to_vec();
    for (disk, number) in given.iter().zip(1..) {
        let (place, path) = (format!("{{disk{number}}}"), text(&disk.path)?);
        if !words.iter().any(|word| word.contains(&place)) {
            let disk = &disk.disk;
            return Err(format!(
                "the command line does not name the disk {disk}: {place} stands for its file"
            ));
        }
        for word in &mut words {
            *word = word.replace(&place, path);
        }
    }
    match words.iter().find(|word| word.contains("{disk")) {
        Some(word) => Err(format!("{word}: the image has {} disks", given.len())),
        None => Ok(words),
    }
}

/// Replaces the disks in the recorded command line of a machine that ran in `folder`.
///
/// # Errors
/// Which disk it does not name, or not so that it can be replaced.
pub(crate) fn replace(
    words: &[String],
    folder: &Path,
    given: &[AssignedDisk],
) -> Result<Vec<String>, String> {
    let mut all = split(words);
    for disk in given {
        let is_replaced = disk.formers.iter().try_fold(false, |is_replaced, former| {
            if is_replaced {
                return Ok(true);
            }
            let is_it = |name: &str| folder.join(name) == *former;
            replace_one(&mut all, &is_it, disk)
        });
        match is_replaced {
            Ok(true) => {}
            Ok(false) => {
                return Err(format!(
                    "the recorded command line does not name the file of the disk {}",
                    disk.disk
                ));
            }
            Err(what) => return Err(format!("the disk {}: {what}", disk.disk)),
        }
    }
    Ok(join(all))
}

/// Replaces one disk; tells whether it was there.
fn replace_one(
    all: &mut [Word],
    is_it: &dyn Fn(&str) -> bool,
    disk: &AssignedDisk,
) -> Result<bool, String> {
    let path = text(&disk.path)?;
    for at in 0..all.len() {
        let word = &mut all[at];
        if word.is(&FILES) && is_it(word.value()) {
            word.set(path.to_owned());
            return Ok(true);
        }
        if !word.is(&["drive", "blockdev"]) {
            continue;
        }
        let mut options = Options::of(word.value());
        // What -blockdev has there is another node.
        let keys = if word.is(&["blockdev"]) {
            &NAMES[1..]
        } else {
            &NAMES[..]
        };
        let Some(key) = keys.iter().copied().find(|key| options.is(key, is_it)) else {
            continue;
        };
        if options.get("backing").is_some() {
            return Err(format!("{} names what it is over", word.value()));
        }
        options.set(key, path);
        let is_protocol = key == "filename" && word.is(&["blockdev"]);
        if !is_protocol {
            for key in ["format", "driver"] {
                if options.get(key).is_some() {
                    options.set(key, &disk.format);
                }
            }
        }
        word.set(options.written());
        if is_protocol {
            let node = options.get("node-name");
            set_format(all, node.as_deref(), disk)?;
        }
        return Ok(true);
    }
    Ok(false)
}

/// Sets the format of the node over the one with the file.
fn set_format(all: &mut [Word], node: Option<&str>, disk: &AssignedDisk) -> Result<(), String> {
    for word in all.iter_mut().filter(|word| word.is(&["blockdev"])) {
        let mut options = Options::of(word.value());
        if node.is_none() || options.get("file").as_deref() != node {
            continue;
        }
        if options.get("backing").is_some() {
            return Err(format!("{} names what it is over", word.value()));
        }
        options.set("driver", &disk.format);
        word.set(options.written());
        return Ok(());
    }
    Err("no -blockdev gives its file a format".to_owned())
}

/// Values of an option, as fields or as JSON.
enum Options {
    Fields(Vec<(String, Option<String>)>),
    Json(Value),
}

impl Options {
    fn of(value: &str) -> Self {
        match serde_json::from_str::<Value>(value) {
            Ok(json @ Value::Object(_)) => Self::Json(json),
            _ => Self::Fields(fields(value)),
        }
    }

    fn get(&self, key: &str) -> Option<String> {
        match self {
            Self::Fields(fields) => {
                let field = fields.iter().find(|field| field.0 == key);
                field.and_then(|field| field.1.clone())
            }
            Self::Json(json) => {
                let inner = key.split('.').try_fold(json, |json, key| json.get(key));
                inner.map(|inner| inner.as_str().unwrap_or_default().to_owned())
            }
        }
    }

    fn is(&self, key: &str, is_it: &dyn Fn(&str) -> bool) -> bool {
        self.get(key).is_some_and(|value| is_it(&value))
    }

    /// Sets what is set already.
    fn set(&mut self, key: &str, value: &str) {
        match self {
            Self::Fields(fields) => {
                let field = fields.iter_mut().find(|field| field.0 == key);
                field.expect("it is there").1 = Some(value.to_owned());
            }
            Self::Json(json) => {
                let pointer = format!("/{}", key.replace('.', "/"));
                let inner = json.pointer_mut(&pointer).expect("it is there");
                *inner = value.into();
            }
        }
    }

    fn written(&self) -> String {
        match self {
            Self::Fields(fields) => written(fields),
            Self::Json(json) => json.to_string(),
        }
    }
}

fn text(path: &Path) -> Result<&str, String> {
    path.to_str()
        .ok_or_else(|| format!("the name of the folder of {} is no text", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given() -> AssignedDisk {
        AssignedDisk {
            disk: "disk".to_owned(),
            path: "/own/a-1.qcow2".into(),
            format: "qcow2".to_owned(),
            formers: vec!["/vm/over".into(), "/vm/disk".into()],
        }
    }

    fn replaced(words: &[&str]) -> Result<String, String> {
        let words = words.iter().map(|word| (*word).to_owned());
        let words = words.collect::<Vec<_>>();
        super::replace(&words, Path::new("/vm"), &[given()]).map(|words| words.join(" "))
    }

    #[test]
    fn a_disk_is_replaced_however_it_is_named() {
        for (words, expected) in [
            (
                &["-drive", "file=disk,format=raw,if=none,id=a"][..],
                "-drive file=/own/a-1.qcow2,format=qcow2,if=none,id=a",
            ),
            (&["-hda", "/vm/disk"], "-hda /own/a-1.qcow2"),
            (
                &["-drive", "file.filename=over,driver=raw,file.driver=file"],
                "-drive file.filename=/own/a-1.qcow2,driver=qcow2,file.driver=file",
            ),
            (
                &[
                    "-blockdev",
                    "driver=file,filename=disk,node-name=f",
                    "-blockdev",
                    "driver=raw,file=f,node-name=d",
                ],
                "-blockdev driver=file,filename=/own/a-1.qcow2,node-name=f \
                 -blockdev driver=qcow2,file=f,node-name=d",
            ),
        ] {
            assert_eq!(replaced(words).as_deref(), Ok(expected));
        }
        let nested = r#"{"driver":"raw","file":{"driver":"file","filename":"disk"}}"#;
        let words = replaced(&["-blockdev", nested]).expect("replaced");
        let expected = r#"{"driver":"qcow2","file":{"driver":"file","filename":"/own/a-1.qcow2"}}"#;
        assert_eq!(words, format!("-blockdev {expected}"));
    }

    #[test]
    fn a_disk_that_cannot_be_replaced_is_refused() {
        for (words, why) in [
            (&["-hda", "other"][..], "does not name"),
            (
                &["-blockdev", "driver=file,filename=disk,node-name=f"],
                "gives its file a format",
            ),
            (
                &["-blockdev", "driver=qcow2,file.filename=over,backing=b"],
                "names what it is over",
            ),
        ] {
            let told = replaced(words).expect_err(why);
            assert!(told.contains(why), "{told}");
        }
    }

    #[test]
    fn places_of_disks_are_filled_in() {
        let words = ["-hda", "{disk1}"].map(str::to_owned);
        assert!(names_disks(&words));
        let filled = fill_in(&words, &[given()]).expect("filled");
        assert_eq!(filled, ["-hda", "/own/a-1.qcow2"]);
        assert!(fill_in(&words, &[given(), given()]).is_err());
        let more = [&words[..], &["{disk2}".to_owned()]].concat();
        assert!(fill_in(&more, &[given()]).is_err());
    }
}
