//! The command line that machines of an image are started with.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::command;
use super::disks::written_ns;
use super::record::QemuMachine;
use crate::{Error, Result};

/// The command line that all machines are started with.
#[derive(Debug)]
pub(crate) struct CommandLine {
    pub program: PathBuf,
    /// Their working directory.
    pub folder: PathBuf,
    pub words: Vec<String>,
}

/// The command line of all machines: the given one, or else that which the image has. `many`:
/// whether there are to be several of them.
///
/// # Errors
/// [`Error::Unfit`] with what is in the way of the recorded one.
pub(crate) fn line(given: &[OsString], machine: &QemuMachine, many: bool) -> Result<CommandLine> {
    let unfit = |what: String| Error::Unfit(what);
    let give = "give the command line behind --";
    if let Some((program, words)) = given.split_first() {
        let text = |word: &OsString| word.to_str().map(str::to_owned);
        let words = words.iter().map(text).collect::<Option<Vec<_>>>();
        let words = words.ok_or_else(|| unfit("the command line is no text".to_owned()))?;
        let folder = std::env::current_dir().map_err(Error::file("find", "."))?;
        return Ok(CommandLine {
            program: program.into(),
            folder,
            words,
        });
    }
    if machine.words.is_empty() {
        return Err(unfit(format!("the image has no command line: {give}")));
    }
    if let Some(word) = machine.withheld.first() {
        let option = machine.words.get((*word as usize).saturating_sub(1));
        let option = option.map_or("an option", String::as_str);
        return Err(unfit(format!(
            "the recorded command line lacks a secret of {option}: {give}"
        )));
    }
    if !machine.plugged.is_empty() {
        return Err(unfit(format!(
            "the machine differs from its command line in {}: {give}, with what it had",
            machine.plugged.join(", ")
        )));
    }
    check_disks(machine)?;
    let words = command::recorded(&machine.words, &machine.machine, many, machine.has_disks());
    for place in words.iter().flat_map(|words| command::listening_at(words)) {
        if is_listened_at(&place)? {
            return Err(unfit(format!(
                "somebody listens at {place}, which the recorded command line names: {give}"
            )));
        }
    }
    let more = if many {
        ", with {n} or {name} where they differ"
    } else {
        ""
    };
    Ok(CommandLine {
        program: PathBuf::from(&machine.program),
        folder: PathBuf::from(&machine.folder),
        words: words.map_err(|what| unfit(format!("{what}: {give}{more}")))?,
    })
}

/// Tells whether a unix socket of this name listens: connecting would be noticed.
fn is_listened_at(place: &str) -> Result<bool> {
    let path = Path::new("/proc/net/unix");
    let all = fs::read(path).map_err(Error::file("read", path))?;
    let all = String::from_utf8_lossy(&all);
    Ok(all.lines().any(|line| listener(line) == Some(place)))
}

/// The name of a socket that listens, out of its line in /proc/net/unix.
fn listener(line: &str) -> Option<&str> {
    const LISTENS: u32 = 1 << 16;
    // Address, count, protocol, flags, type, state and inode stand before it, some filled up.
    let mut rest = line;
    let mut flags = 0;
    for column in 0..7 {
        let (word, behind) = rest.trim_start().split_once(' ')?;
        if column == 3 {
            flags = u32::from_str_radix(word, 16).ok()?;
        }
        rest = behind;
    }
    (flags & LISTENS != 0).then_some(rest)
}

/// Refuses disks that are not as they were when the machine was stopped, or that the recorded
/// command line does not name: with what it names, the guest would have another disk.
fn check_disks(machine: &QemuMachine) -> Result<()> {
    for disk in machine.disks.iter().filter(|disk| disk.files.is_empty()) {
        if !names(&machine.words, Path::new(&disk.path)) {
            return Err(Error::Unfit(format!(
                "the disk {} is {}, which the recorded command line does not name: the machine was \
                 started with another file, as one that this is an overlay over; give the command \
                 line behind -- with it",
                disk.name, disk.path
            )));
        }
        let over = disk.over.iter();
        let over = over.map(|file| (&file.path, file.bytes, file.written_ns));
        let own = (&disk.path, disk.bytes, disk.written_ns);
        for (path, bytes, time_ns) in std::iter::once(own).chain(over) {
            check_unwritten(&disk.name, path, bytes, time_ns)?;
        }
    }
    Ok(())
}

/// Refuses a file of a disk whose length and time are others than they were.
fn check_unwritten(disk: &str, path: &str, bytes: u64, time_ns: i64) -> Result<()> {
    let facts = fs::metadata(path).map_err(Error::file("look at the disk", path))?;
    match facts.len() == bytes && written_ns(&facts) == time_ns {
        true => Ok(()),
        false => Err(Error::Unfit(format!(
            "the disk {disk} ({path}) was written to since the machine was saved: put it back, or \
             give the command line behind -- with another"
        ))),
    }
}

/// Tells whether a command line may name a file, by whichever path.
fn names(words: &[String], file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let is_it = |word: &String| word.replace(",,", ",").contains(&*name);
    // That of a file can name anything.
    words
        .iter()
        .any(|word| is_it(word) || word.ends_with("-readconfig"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_told_by_its_flags() {
        let line = "0000000000000000: 00000002 00000000 00010000 0001 01  1062 /run/a b";
        assert_eq!(listener(line), Some("/run/a b"));
        assert_eq!(listener(&line.replace("00010000", "00000000")), None);
        assert_eq!(
            listener("Num       RefCount Protocol Flags    Type St Inode Path"),
            None
        );
        assert_eq!(listener("0: 2 0 00010000 1 01 11326235"), None);
    }

    #[test]
    fn who_listens_is_seen_without_a_connection() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a socket");
        let name = path.to_str().expect("text");
        assert!(!is_listened_at(name).expect("told"));
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("it listens");
        assert!(is_listened_at(name).expect("told"));
        drop(listener);
        // A child that another test forks has a copy of it until it executes its program.
        testkit::wait::wait_until("nobody to listen", testkit::wait::SOON, || {
            !is_listened_at(name).expect("told")
        });
    }

    #[test]
    fn a_file_is_named_by_whichever_path() {
        let words = ["-drive", "file=../x/a,,b.raw,format=raw"].map(str::to_owned);
        assert!(names(&words, Path::new("/x/a,b.raw")));
        assert!(!names(&words, Path::new("/x/a,b.raw.0123abcd.qcow2")));
        assert!(names(&["-readconfig".to_owned()], Path::new("/x/a")));
    }

    #[test]
    fn a_line_that_lacks_something_is_refused() {
        let mut machine = QemuMachine::default();
        let error = |machine: &QemuMachine| {
            let error = line(&[], machine, false).expect_err("it lacks something");
            error.to_string()
        };
        assert!(error(&machine).contains("no command line"));
        machine.words = vec!["-object".to_owned(), "secret,x".to_owned()];
        machine.withheld = vec![1];
        assert!(error(&machine).contains("secret of -object"));
        let given = ["qemu".into(), "-m".into()];
        let line = line(&given, &machine, false).expect("it is given");
        assert_eq!(line.words, ["-m"]);
    }
}
