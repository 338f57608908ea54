//! How arguments of options are written: pids, sizes, inherited descriptors.

use process::Inherited;
use rustix::process::Pid;

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
