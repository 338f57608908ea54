//! Whom a QEMU runs as: its user, groups, capabilities and whether it may get privileges. A
//! restored one that is started by root runs as the saved one did.

use std::fs;
use std::path::{Path, PathBuf};

use prost::Message;
use sys::launch::User;
use sys::proc::{Capabilities, Status};

use super::command;
use super::record::QemuMachine;
use crate::{Error, Result};

/// The same as the image has it.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QemuUser {
    /// The real, effective and saved user.
    #[prost(uint32, repeated, tag = "1")]
    pub uids: Vec<u32>,
    /// The same groups.
    #[prost(uint32, repeated, tag = "2")]
    pub gids: Vec<u32>,
    /// More groups.
    #[prost(uint32, repeated, tag = "3")]
    pub groups: Vec<u32>,
    /// Capabilities: inheritable, permitted, effective, bounding, ambient.
    #[prost(uint64, repeated, tag = "4")]
    pub capabilities: Vec<u64>,
    /// True if no program gives it privileges.
    #[prost(bool, tag = "5")]
    pub no_new_privileges: bool,
}

impl QemuUser {
    /// Returns the user of process `pid`.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn of(pid: &str) -> Result<Self> {
        let path = PathBuf::from(format!("/proc/{pid}/status"));
        let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
        let strange = || {
            let source = std::io::Error::from(std::io::ErrorKind::InvalidData);
            Error::file("understand", &path)(source)
        };
        parse(&text).ok_or_else(strange)
    }

    fn checked(&self) -> Option<User> {
        let three = |all: &[u32]| <[u32; 3]>::try_from(all).ok();
        let [inheritable, permitted, effective, bounding, ambient] =
            <[u64; 5]>::try_from(self.capabilities.as_slice()).ok()?;
        Some(User {
            uids: three(&self.uids)?,
            gids: three(&self.gids)?,
            groups: self.groups.clone(),
            capabilities: Capabilities {
                inheritable,
                permitted,
                effective,
                bounding,
                ambient,
            },
            no_new_privileges: self.no_new_privileges,
        })
    }
}

fn parse(status: &str) -> Option<QemuUser> {
    let status = Status::parse(status.as_bytes()).ok()?;
    let Capabilities {
        inheritable,
        permitted,
        effective,
        bounding,
        ambient,
    } = status.capabilities;
    Some(QemuUser {
        uids: status.uids[..3].to_vec(),
        gids: status.gids[..3].to_vec(),
        groups: status.groups,
        capabilities: vec![inheritable, permitted, effective, bounding, ambient],
        no_new_privileges: status.no_new_privs,
    })
}

/// Whom restored machines are to run as, where that is not this process's user: root starts them as
/// the saved one was, unless the caller gave the command line, or that names a user itself.
///
/// # Errors
/// [`Error::Unfit`] where a program cannot be started so.
pub(crate) fn of_restored(machine: &QemuMachine, is_recorded: bool) -> Result<Option<User>> {
    if !is_recorded || !rustix::process::geteuid().is_root() {
        return Ok(None);
    }
    if command::names_user(&machine.words) {
        return Ok(None);
    }
    let Some(saved) = &machine.user else {
        log::warn!("the image does not tell whom QEMU ran as: it runs as root");
        return Ok(None);
    };
    let own = QemuUser::of("self")?;
    if *saved == own {
        return Ok(None);
    }
    let corrupt = || Error::Corrupt {
        record: "the machine",
        what: "its user".to_owned(),
    };
    let saved = saved.checked().ok_or_else(corrupt)?;
    let own = own.checked().ok_or_else(corrupt)?;
    match obstacle(&saved, &own) {
        None => Ok(Some(saved)),
        Some(what) => Err(Error::Unfit(format!(
            "QEMU ran as user {}: {what}; give the command line behind --",
            saved.uids[1]
        ))),
    }
}

/// Why a program cannot be started as `saved` by `own`.
fn obstacle(saved: &User, own: &User) -> Option<String> {
    let Capabilities {
        inheritable,
        permitted,
        effective,
        bounding,
        ambient,
    } = saved.capabilities;
    let lacking = (bounding | inheritable) & !own.capabilities.bounding;
    if lacking != 0 {
        return Some(format!(
            "it had the capabilities {lacking:#x} in its bounding set, which this process lacks"
        ));
    }
    if own.no_new_privileges && !saved.no_new_privileges {
        return Some("it could get privileges, and this process cannot".to_owned());
    }
    let are_kept = |ids: [u32; 3]| ids[1] == ids[2];
    if !are_kept(saved.uids) || !are_kept(saved.gids) {
        return Some("its saved user or group is another one than its effective one".to_owned());
    }
    // The capabilities that execve(2) gives the started program.
    let is_root = saved.uids[0] == 0 || saved.uids[1] == 0;
    let gets = match is_root {
        true => inheritable | bounding,
        false => ambient,
    };
    let in_effect = match is_root && saved.uids[1] != 0 {
        true => 0,
        false => gets,
    };
    if (permitted, effective) != (gets, in_effect) || inheritable & !bounding != 0 {
        return Some(format!(
            "it had the capabilities {permitted:#x}, {effective:#x} of them in effect, and a \
             program that is started as it has {gets:#x}"
        ));
    }
    None
}

/// Gives a file to whom a machine runs as.
pub(crate) fn give(file: &fs::File, path: &Path, user: Option<&User>) -> Result<()> {
    match user {
        None => Ok(()),
        Some(user) => std::os::unix::fs::fchown(file, Some(user.uids[1]), Some(user.gids[1]))
            .map_err(Error::file("give away", path)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tqemu\nState:\tS (sleeping)\nTgid:\t5\nPid:\t5\nPPid:\t1\n\
        TracerPid:\t0\nThreads:\t1\nSigQ:\t0/9\nSigPnd:\t0\nShdPnd:\t0\nSigBlk:\t0\nSigIgn:\t0\n\
        SigCgt:\t0\nCpus_allowed:\t3\nUid:\t65533\t65533\t65533\t65533\n\
        Gid:\t65533\t65533\t65533\t65533\nGroups:\t7 107 \nNStgid:\t5\nCapInh:\t0000000000000000\n\
        CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\nCapBnd:\t000001ffffffffff\n\
        CapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t0\n";

    fn root() -> User {
        let all = 0x1ff_ffff_ffff;
        User {
            uids: [0; 3],
            gids: [0; 3],
            groups: vec![0],
            capabilities: Capabilities {
                inheritable: 0,
                permitted: all,
                effective: all,
                bounding: all,
                ambient: 0,
            },
            no_new_privileges: false,
        }
    }

    #[test]
    fn a_user_is_read_out_of_the_status() {
        let user = parse(STATUS).and_then(|user| user.checked()).expect("read");
        assert_eq!((user.uids, user.gids), ([65533; 3], [65533; 3]));
        assert_eq!(user.groups, [7, 107]);
        assert_eq!(user.capabilities.bounding, 0x1ff_ffff_ffff);
        assert!(user.no_new_privileges);
        assert_eq!(parse("Uid:\t1 1 1 1\n"), None);
        assert_eq!(QemuUser::default().checked(), None);
    }

    #[test]
    fn what_execve_would_change_is_refused() {
        let plain = parse(STATUS).and_then(|user| user.checked()).expect("read");
        assert_eq!(obstacle(&plain, &root()), None);
        assert_eq!(obstacle(&root(), &root()), None);
        let of = |change: fn(&mut User)| {
            let mut user = plain.clone();
            change(&mut user);
            obstacle(&user, &root())
        };
        let kept = of(|user| {
            user.capabilities.inheritable = 8;
            user.capabilities.ambient = 8;
            user.capabilities.permitted = 8;
            user.capabilities.effective = 8;
        });
        assert_eq!(kept, None);
        let lost = of(|user| user.capabilities.permitted = 8);
        assert!(lost.expect("refused").contains("0x8"));
        assert!(
            of(|user| user.uids[2] = 0)
                .expect("refused")
                .contains("saved user")
        );
        let mut narrow = root();
        narrow.capabilities.bounding = 1;
        assert!(
            obstacle(&plain, &narrow)
                .expect("refused")
                .contains("lacks")
        );
        narrow = root();
        narrow.no_new_privileges = true;
        assert!(obstacle(&root(), &narrow).is_some());
    }
}
