//! How arguments of options are written: pids, sizes, inherited descriptors.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use process::options::Compression;
use process::{
    Allow, CgroupMode, CpuCap, ExternalMount, ExternalNamespace, FileValidation, Inherited,
};
use rustix::process::Pid;

/// Reads text that has to be there.
pub fn text(value: Option<&OsStr>) -> Result<&str, String> {
    let text = value.and_then(OsStr::to_str);
    text.ok_or_else(|| "it is no text".to_owned())
}

/// Reads a path, which has to be there.
pub fn path(value: Option<&OsStr>) -> Result<PathBuf, String> {
    let path = value.filter(|value| !value.is_empty()).map(Into::into);
    path.ok_or_else(|| "a path is not empty".to_owned())
}

/// Reads a number.
pub fn number<T: FromStr>(value: Option<&OsStr>) -> Result<T, String> {
    let number = text(value)?.parse();
    number.map_err(|_| "it is no number, or too large a one".to_owned())
}

/// Reads how many seconds somebody waits; 0 is for ever.
pub fn patience(value: Option<&OsStr>) -> Result<Option<Duration>, String> {
    let seconds = number(value)?;
    Ok((seconds > 0).then(|| Duration::from_secs(seconds)))
}

/// Reads how an image is compressed: with lz4 where nothing is said.
pub fn compression(value: Option<&OsStr>) -> Result<Option<Compression>, String> {
    match value {
        None => Ok(Some(Compression::Lz4)),
        value => text(value)?.parse().map(Some),
    }
}

/// Reads what a processor must have: names with commas between them, each taken back by a `^`
/// before it. Without any it is everything.
pub fn cpu_cap(value: Option<&OsStr>) -> Result<CpuCap, String> {
    let mut cap = CpuCap::default();
    let words = value.map_or(Ok("all"), |value| text(Some(value)))?;
    for word in words.split(',') {
        let (name, on) = match word.strip_prefix('^') {
            Some(name) => (name, false),
            None => (word, true),
        };
        match name {
            // What threads have in their registers counts in any case.
            "fpu" => {}
            "ins" => cap.instructions = on,
            "cpu" => cap.same = on,
            "all" if on => cap = CpuCap::ALL,
            "all" | "none" => cap = CpuCap::default(),
            _ => return Err(format!("there is no {word:?}: fpu, ins, cpu, all or none")),
        }
    }
    Ok(cap)
}

/// Reads inodes of sockets with commas between them, and allows these; without any, all.
pub fn inodes(value: Option<&OsStr>, allowed: &mut Allow) -> Result<(), String> {
    allowed.ext_unix_sk = true;
    let words = value.map_or(Ok(""), |value| text(Some(value)))?.split(',');
    for word in words.filter(|word| !word.is_empty()) {
        let inode = word.parse();
        let inode = inode.map_err(|_| format!("it takes inodes, and {word:?} is none"))?;
        allowed.ext_unix_inodes.push(inode);
    }
    Ok(())
}

/// Reads what is outside of the tree: of all that criu(8) knows, pipes and mounts.
pub fn external(text: &str, allowed: &mut Allow) -> Result<(), String> {
    if let Some((key, value)) = text
        .strip_prefix("mnt[")
        .and_then(|rest| rest.split_once(']'))
    {
        let value = match value.strip_prefix(':') {
            // What the host has mounted as well need not be named.
            _ if key.is_empty() => return Ok(()),
            Some(value) => value,
            None if value.is_empty() => key,
            None => return Err(format!("{text:?} is no mnt[KEY]:VALUE")),
        };
        return external_mount(key, value, allowed);
    }
    if let Some(rest) = text.strip_prefix("net[") {
        let namespace = rest.split_once("]:").and_then(|(inode, name)| {
            let kind = "net".to_owned();
            let name = Some(name.to_owned()).filter(|name| !name.is_empty())?;
            let inode = inode.parse().ok()?;
            Some(ExternalNamespace { kind, inode, name })
        });
        let namespace = namespace.ok_or_else(|| format!("{text:?} is no net[INODE]:NAME"))?;
        allowed.namespaces.external.push(namespace);
        return Ok(());
    }
    let pipes = &mut allowed.external_pipes;
    let inode = text
        .strip_prefix("pipe:[")
        .or_else(|| text.strip_prefix("pipe["));
    let inode = inode.and_then(|inode| inode.strip_suffix(']')?.parse().ok());
    match (text, inode) {
        ("pipe", _) => pipes.all = true,
        (_, Some(inode)) => pipes.inodes.push(inode),
        _ => {
            return Err(format!(
                "{text:?} is not there yet: pipe, pipe:[INODE], mnt[KEY]:VALUE or net[INODE]:NAME"
            ));
        }
    }
    Ok(())
}

/// Reads a mount from elsewhere as older versions of criu(8) have it.
pub fn mount_map(text: &str, allowed: &mut Allow) -> Result<(), String> {
    match text.split_once(':') {
        // What the host has mounted as well need not be named.
        None if text == "auto" => Ok(()),
        Some((key, value)) if !key.is_empty() => external_mount(key, value, allowed),
        _ => Err(format!("{text:?} is no KEY:VALUE")),
    }
}

fn external_mount(key: &str, value: &str, allowed: &mut Allow) -> Result<(), String> {
    let (key, value) = (key.to_owned(), value.to_owned());
    allowed.namespaces.mounts.push(ExternalMount { key, value });
    Ok(())
}

/// Reads the kind of a namespace in which nothing is saved.
pub fn empty_namespace(text: &str, allowed: &mut Allow) -> Result<(), String> {
    if text != "net" {
        return Err(format!("{text:?} cannot be empty: net"));
    }
    allowed.namespaces.empty.push(text.to_owned());
    Ok(())
}

/// Reads the root directory of a tree.
pub fn root(folder: PathBuf, allowed: &mut Allow) -> Result<(), String> {
    let whole = std::path::absolute(&folder);
    let whole = whole.map_err(|error| format!("{}: {error}", folder.display()))?;
    allowed.namespaces.root = Some(whole);
    Ok(())
}

/// Accepts a directory of plugins where there is none.
pub fn without_plugins(dir: PathBuf) -> Result<PathBuf, String> {
    let entries = std::fs::read_dir(&dir).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.path());
    match names.find(|path| path.extension() == Some(OsStr::new("so"))) {
        Some(plugin) => Err(format!("{} cannot be loaded", plugin.display())),
        None => Ok(dir),
    }
}

/// Reads how a file is known.
pub fn validation(value: Option<&OsStr>) -> Result<FileValidation, String> {
    match text(value)? {
        "buildid" => Ok(FileValidation::BuildId),
        "filesize" => Ok(FileValidation::FileSize),
        other => Err(format!("there is no {other:?}")),
    }
}

/// Reads what is done about control groups: those that are missing are made where nothing is said.
pub fn cgroups(value: Option<&OsStr>) -> Result<CgroupMode, String> {
    match value.map_or(Ok("soft"), |value| text(Some(value)))? {
        "ignore" => Ok(CgroupMode::Ignore),
        "none" => Ok(CgroupMode::None),
        "props" => Ok(CgroupMode::Props),
        "soft" => Ok(CgroupMode::Soft),
        "full" => Ok(CgroupMode::Full),
        "strict" => Ok(CgroupMode::Strict),
        other => Err(format!("there is no {other:?}")),
    }
}

/// Reads a pid: a positive number.
pub fn pid(text: &str) -> Result<Pid, String> {
    text.parse()
        .ok()
        .filter(|&pid| pid > 0)
        .and_then(Pid::from_raw)
        .ok_or_else(|| "a pid is a number above 0".to_owned())
}

/// Reads a size in bytes; K, M and G behind it stand for powers of 1024.
pub fn size(text: &str) -> Result<u64, String> {
    let (number, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        Some(b'G' | b'g') => (&text[..text.len() - 1], 30),
        _ => (text, 0),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| "a size is like 4096, 64K, 1M or 2G".to_owned())?;
    number
        .checked_mul(1 << shift)
        .ok_or_else(|| "that is more than any file holds".to_owned())
}

/// Reads `fd[NUMBER]:RESOURCE`, where the resource is `tty[RDEV:DEV]`, `pipe[INODE]`,
/// `socket[INODE]`, `file[MOUNT:INODE]` or a path. The kernel's form, `pipe:[INODE]`, means the
/// same.
pub fn inherit_fd(text: &str) -> Result<(i32, Inherited), String> {
    let form = || "it is written fd[NUMBER]:RESOURCE".to_owned();
    let (number, resource) = text
        .strip_prefix("fd[")
        .and_then(|rest| rest.split_once("]:"))
        .ok_or_else(form)?;
    let number: i32 = number.parse().ok().filter(|&fd| fd >= 0).ok_or_else(form)?;
    if resource.is_empty() {
        return Err(form());
    }
    Ok((number, self::resource(resource)?))
}

fn resource(text: &str) -> Result<Inherited, String> {
    let inside = |kind: &str| {
        text.strip_prefix(kind)
            .map(|rest| rest.strip_prefix(':').unwrap_or(rest))
            .and_then(|rest| rest.strip_prefix('[')?.strip_suffix(']'))
    };
    let wrong = || format!("{text:?} has no number where one belongs");
    let number = |text: &str, radix: u32| u64::from_str_radix(text, radix).map_err(|_| wrong());
    let pair = |text: &str, radix: u32| {
        let (first, second) = text.split_once(':').ok_or_else(wrong)?;
        Ok::<_, String>((number(first, radix)?, number(second, radix)?))
    };
    if let Some(inode) = inside("pipe") {
        return Ok(Inherited::Pipe(number(inode, 10)?));
    }
    if let Some(inode) = inside("socket") {
        return Ok(Inherited::Socket(number(inode, 10)?));
    }
    if let Some(numbers) = inside("tty") {
        let (rdev, dev) = pair(numbers, 16)?;
        return Ok(Inherited::Tty { rdev, dev });
    }
    if let Some(numbers) = inside("file") {
        let (mount, inode) = numbers.split_once(':').ok_or_else(wrong)?;
        return Ok(Inherited::File {
            mount: number(mount, 16)?,
            inode: number(inode, 16)?,
        });
    }
    Ok(Inherited::Path(text.trim_start_matches('/').into()))
}

/// Reads `[CONTROLLER:]/PATH`: the controller in whose hierarchy a group is, and its path. Where
/// there is no controller, it is for all others.
pub fn cgroup_root(text: &str) -> Result<(Option<String>, Vec<u8>), String> {
    let (controller, path) = match text.split_once(":/") {
        Some((controller, path)) => (Some(controller.to_owned()), format!("/{path}")),
        None => (None, text.to_owned()),
    };
    let sound = path.starts_with('/') && !path.split('/').any(|part| part == "..");
    match sound {
        true => Ok((controller, path.into())),
        false => Err("it is written [CONTROLLER:]/PATH".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 64 << 10),
            ("1M", 1 << 20),
            ("2G", 2 << 30),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "1T", "1 M", "99999999999G"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn capabilities_are_added_and_taken_back_in_order() {
        let cap = |instructions, same| Ok(CpuCap { instructions, same });
        for (text, read) in [
            ("fpu", cap(false, false)),
            ("ins", cap(true, false)),
            ("cpu,ins", cap(true, true)),
            ("all", cap(true, true)),
            ("all,^cpu", cap(true, false)),
            ("all,none", cap(false, false)),
            ("^all,ins", cap(true, false)),
        ] {
            assert_eq!(cpu_cap(Some(text.as_ref())), read, "{text}");
        }
        assert_eq!(cpu_cap(None), cap(true, true));
        for text in ["", "sse", "ins,", "^"] {
            assert!(cpu_cap(Some(text.as_ref())).is_err(), "{text}");
        }
    }

    #[test]
    fn plugins_are_named() {
        let folder = tempfile::tempdir().expect("a folder");
        for dir in [folder.path(), "/nowhere".as_ref()] {
            assert_eq!(without_plugins(dir.into()), Ok(dir.into()));
        }
        std::fs::write(folder.path().join("amdgpu_plugin.so"), "").expect("written");
        let error = without_plugins(folder.path().into()).expect_err("there is one");
        assert!(
            error.ends_with("amdgpu_plugin.so cannot be loaded"),
            "{error}"
        );
    }

    #[test]
    fn external_pipes_are_all_or_those_that_are_named() {
        let mut allowed = Allow::default();
        for text in ["pipe:[17]", "pipe[18]"] {
            external(text, &mut allowed).expect(text);
        }
        let pipes = &allowed.external_pipes;
        assert!(pipes.inodes == [17, 18] && !pipes.all);
        external("pipe", &mut allowed).expect("all");
        assert!(allowed.external_pipes.all);
        for text in [
            "mnt[/x]y", "pipe:[x]", "pipe:[1", "net[4]", "net[4]:", "net[x]:y", "dev[1]:x", "",
        ] {
            assert!(external(text, &mut allowed).is_err(), "{text}");
        }
    }

    #[test]
    fn external_mounts_and_networks_have_names() {
        let mut allowed = Allow::default();
        for text in ["mnt[/x]:y", "mnt[/z]", "mnt[]", "mnt[]:ms", "net[4]:x"] {
            external(text, &mut allowed).expect(text);
        }
        for text in ["/a:/b", "auto"] {
            mount_map(text, &mut allowed).expect(text);
        }
        for text in ["/a", ":/b", ""] {
            assert!(mount_map(text, &mut allowed).is_err(), "{text}");
        }
        let namespaces = &allowed.namespaces;
        let mounts = namespaces.mounts.iter();
        let mounts = mounts.map(|one| [&*one.key, &*one.value]);
        assert!(mounts.eq([["/x", "y"], ["/z", "/z"], ["/a", "/b"]]));
        assert_eq!(namespaces.external_name("net", 4).as_deref(), Some("x"));
        assert_eq!(namespaces.external_name("net", 5), None);
        empty_namespace("net", &mut allowed).expect("a kind");
        empty_namespace("ipc", &mut allowed).expect_err("not there yet");
        assert!(allowed.namespaces.is_empty("net"));
    }

    #[test]
    fn pids_are_above_zero() {
        assert_eq!(pid("17").unwrap().as_raw_nonzero().get(), 17);
        for text in ["0", "-1", "abc", "", "99999999999"] {
            assert!(pid(text).is_err(), "{text}");
        }
    }

    #[test]
    fn inherited_descriptors_name_what_they_stand_for() {
        let path = |text: &str| Inherited::Path(text.into());
        for (text, fd, resource) in [
            ("fd[3]:pipe[123]", 3, Inherited::Pipe(123)),
            ("fd[4]:socket[9]", 4, Inherited::Socket(9)),
            ("fd[4]:socket:[9]", 4, Inherited::Socket(9)),
            (
                "fd[5]:tty[8801:1a]",
                5,
                Inherited::Tty {
                    rdev: 0x8801,
                    dev: 0x1a,
                },
            ),
            (
                "fd[6]:file[1f:2a]",
                6,
                Inherited::File {
                    mount: 0x1f,
                    inode: 0x2a,
                },
            ),
            ("fd[7]:var/log/x", 7, path("var/log/x")),
            ("fd[7]:/var/log/x", 7, path("var/log/x")),
            ("fd[0]:/memfd:name", 0, path("memfd:name")),
        ] {
            assert_eq!(inherit_fd(text), Ok((fd, resource)), "{text}");
        }
        for text in [
            "3:pipe[1]",
            "fd[]:pipe[1]",
            "fd[-1]:x",
            "fd[3]:",
            "fd[3]:pipe[x]",
            "fd[3]:tty[1]",
            "fd[3]pipe[1]",
        ] {
            assert!(inherit_fd(text).is_err(), "{text}");
        }
    }

    #[test]
    fn cgroup_roots_are_read() {
        let root =
            |controller: Option<&str>, path: &str| Ok((controller.map(str::to_owned), path.into()));
        assert_eq!(cgroup_root("/a/b"), root(None, "/a/b"));
        assert_eq!(cgroup_root("name=x:/a"), root(Some("name=x"), "/a"));
        for text in ["", "a", "memory:a", "/a/../b"] {
            assert!(cgroup_root(text).is_err(), "{text}");
        }
    }
}
