//! A unix socket that listens at a path, for one user alone.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{FileType, Mode, fchmod, lstat, unlink};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Why nothing listens at the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Somebody else does.
    Taken,
    /// A call failed, in doing what is said.
    Call(&'static str, Errno),
}

/// Listens at `path`, where only this user can connect (unix(7)); a socket there that nobody
/// listens on is replaced. At most `backlog` connections wait to be accepted.
///
/// # Errors
/// [`Failure::Taken`]; [`Failure::Call`].
pub fn listen_at(path: &Path, kind: SocketType, backlog: i32) -> Result<OwnedFd, Failure> {
    let failed = |doing| move |errno| Failure::Call(doing, errno);
    let address = SocketAddrUnix::new(path).map_err(failed("use"))?;
    if lstat(path).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket) {
        match connect(unconnected(kind)?, &address) {
            Err(Errno::CONNREFUSED) => unlink(path).map_err(failed("replace"))?,
            _ => return Err(Failure::Taken),
        }
    }
    let listener = unconnected(kind)?;
    // The file gets what the socket has when it is bound.
    fchmod(&listener, Mode::RUSR | Mode::WUSR).map_err(failed("protect"))?;
    bind(&listener, &address).map_err(failed("listen on"))?;
    listen(&listener, backlog).map_err(failed("listen on"))?;
    Ok(listener)
}

fn unconnected(kind: SocketType) -> Result<OwnedFd, Failure> {
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
    socket.map_err(|errno| Failure::Call("make a socket for", errno))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn what_nobody_listens_on_is_replaced_and_only_its_owner_connects() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("socket");
        for kind in [SocketType::STREAM, SocketType::SEQPACKET] {
            let listener = listen_at(&path, kind, 1).expect("it listens");
            let mode = std::fs::metadata(&path).expect("it is there").permissions();
            assert_eq!(mode.mode() & 0o777, 0o600);
            assert_eq!(listen_at(&path, kind, 1).err(), Some(Failure::Taken));
            drop(listener);
        }
        std::fs::remove_file(&path).expect("it is there");
        std::fs::write(&path, "text").expect("written");
        let other = listen_at(&path, SocketType::STREAM, 1).err();
        assert_eq!(other, Some(Failure::Call("listen on", Errno::ADDRINUSE)));
        assert_eq!(std::fs::read(&path).expect("it is there"), b"text");
    }
}
