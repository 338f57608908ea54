//! How arguments of options are written: pids, sizes, inherited descriptors.

use std::ffi::OsStr;

use process::Inherited;
use process::options::Compression;
use rustix::process::Pid;

/// Reads how an image is compressed: with lz4 where nothing is said.
pub fn compression(value: Option<&OsStr>) -> Option<Compression> {
    match value {
        None => Some(Compression::Lz4),
        Some(value) => value.to_str()?.parse().ok(),
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
/// `socket[INODE]`, `file[MOUNT:INODE]` or a path.
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

/// A group of `--cgroup-root`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupRoot {
    /// The controller in whose hierarchy it is; where there is none, it is for all others.
    pub controller: Option<String>,
    /// Its path.
    pub path: Vec<u8>,
}

/// Reads `[CONTROLLER:]/PATH`.
pub fn cgroup_root(text: &str) -> Result<CgroupRoot, String> {
    let (controller, path) = match text.split_once(":/") {
        Some((controller, path)) => (Some(controller.to_owned()), format!("/{path}")),
        None => (None, text.to_owned()),
    };
    let sound = path.starts_with('/') && !path.split('/').any(|part| part == "..");
    match sound {
        true => Ok(CgroupRoot {
            controller,
            path: path.into(),
        }),
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
        let root = |controller: Option<&str>, path: &str| {
            let controller = controller.map(str::to_owned);
            let path = path.into();
            Ok(CgroupRoot { controller, path })
        };
        assert_eq!(cgroup_root("/a/b"), root(None, "/a/b"));
        assert_eq!(cgroup_root("name=x:/a"), root(Some("name=x"), "/a"));
        for text in ["", "a", "memory:a", "/a/../b"] {
            assert!(cgroup_root(text).is_err(), "{text}");
        }
    }
}
