//! A process and a child of it that have files of all namespaces that they are in, one of the
//! network also on its way in a socket.
//!
//! `check` answers "right" if each leads to the namespace that the process is in, `flags` how
//! the one of the time namespace was opened and whether the child has it.
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, fstat, open, stat};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood};

const KINDS: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts", "time"];

fn same(file: impl AsFd, path: &str) -> Result<bool, Failure> {
    let (file, there) = (fstat(file)?, stat(path)?);
    Ok((file.st_dev, file.st_ino) == (there.st_dev, there.st_ino))
}

fn send(through: &OwnedFd, file: BorrowedFd<'_>) -> Result<(), Failure> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = SendAncillaryBuffer::new(&mut room);
    let files = [file];
    along.push(SendAncillaryMessage::ScmRights(&files));
    sendmsg(
        through,
        &[IoSlice::new(b"x")],
        &mut along,
        SendFlags::empty(),
    )?;
    Ok(())
}

fn receive(from: &OwnedFd) -> Result<OwnedFd, Failure> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = RecvAncillaryBuffer::new(&mut room);
    let mut byte = [0];
    let mut into = [IoSliceMut::new(&mut byte)];
    recvmsg(from, &mut into, &mut along, RecvFlags::CMSG_CLOEXEC)?;
    for message in along.drain() {
        if let RecvAncillaryMessage::ScmRights(mut files) = message {
            return Ok(files.next().ok_or("no file came")?);
        }
    }
    Err("nothing came along".into())
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let path = |kind: &str| format!("/proc/self/ns/{kind}");
    let all = KINDS.map(|kind| File::open(path(kind)).map(|file| (kind, file)));
    let all = all.into_iter().collect::<Result<Vec<_>, _>>()?;
    let place = open("/proc/self/ns/net", OFlags::PATH, Mode::empty())?;
    let (near, far) = socketpair(
        AddressFamily::UNIX,
        SocketType::DGRAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    send(&near, all[3].1.as_fd())?;
    let child = match fork()? {
        Fork::Parent(child) => child,
        Fork::Child => loop {
            std::thread::park();
        },
    };
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            for (kind, file) in &all {
                if !same(file, &path(kind))? {
                    return Ok(format!("{kind} leads elsewhere"));
                }
            }
            let came = receive(&far)?;
            let right = same(&came, &path("net"))? && same(&place, &path("net"))?;
            send(&near, came.as_fd())?;
            Ok(if right {
                "right"
            } else {
                "net leads elsewhere"
            }
            .to_owned())
        }
        "flags" => {
            let (_, time) = &all[7];
            let flags = fcntl_getfd(time)?.contains(FdFlags::CLOEXEC);
            let theirs = format!("/proc/{child}/fd/{}", time.as_raw_fd());
            Ok(format!("{flags} {}", same(time, &theirs)?))
        }
        _ => not_understood(question),
    })
}
