//! Settings of a namespace: files in /proc/sys that show a process those of its own (proc_sys(5)).
//!
//! - What: settings of namespaces
//! - Kept: those in /proc/sys that a tree's own network or ipc namespace has.
//! - At a restore: "the setting … of the tree's namespace is missing"; "the setting … of the tree's
//!   namespace does not stay …"; of one that was as in any new namespace, nothing is said.
//! - CRIU 4.2: kept in part.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use rustix::io::Errno;

use crate::{Error, Result};

/// Longer than any value: a list of ports, most of which stand alone.
const VALUE_MAX_BYTES: usize = 256 << 10;
/// More than there are in any namespace.
const MOST: usize = 1 << 16;
/// Those that a namespace shows as its own, and that are the whole host's.
const OF_HOST: [&str; 1] = ["net/netfilter/nf_hooks_lwtunnel"];

/// One setting.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Setting {
    /// Its file below /proc/sys: "kernel/shmmax".
    #[prost(string, tag = "1")]
    pub path: String,
    /// Its value, as it is read.
    #[prost(string, tag = "2")]
    pub value: String,
    /// True if a new namespace has it so, too.
    #[prost(bool, tag = "3")]
    pub is_default: bool,
}

impl Setting {
    /// Tells whether its path is one below a folder of `roots`, or one of these.
    fn is_below(&self, roots: &[&str]) -> bool {
        let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
        let is_below = |root: &&str| {
            let rest = self.path.strip_prefix(*root);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.path.split('/').all(is_plain)
            && roots.iter().any(is_below)
            && self.value.len() <= VALUE_MAX_BYTES
            && !self.path.contains('\0')
            && !OF_HOST.contains(&&*self.path)
    }
}

/// The settings that a kind of namespace has.
pub(super) struct Settings {
    /// Their files and folders below /proc/sys.
    pub roots: &'static [&'static str],
    /// The kind, as a flag of unshare(2).
    pub flag: libc::c_int,
    /// Limits that hold for new objects alone, with the widest values that they take.
    pub limits: &'static [(&'static str, &'static str)],
    /// The values of a new namespace, by path.
    pub usual: OnceLock<HashMap<String, String>>,
}

impl Settings {
    /// Finds out which values a new namespace has.
    ///
    /// # Errors
    /// [`Error::Kernel`] for a value that cannot be read, or where no namespace can be made.
    pub fn prepare(&self) -> Result<&HashMap<String, String>> {
        if let Some(usual) = self.usual.get() {
            return Ok(usual);
        }
        let usual = std::thread::scope(|scope| {
            let usual = scope.spawn(|| {
                let made = sys::world::unshare(self.flag);
                made.map_err(|e| Error::kernel("cannot make a namespace to compare with", e))?;
                read(self.roots)
            });
            let usual = usual.join();
            usual.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        let usual = usual.into_iter().map(|one| (one.path, one.value));
        Ok(self.usual.get_or_init(|| usual.collect()))
    }

    /// Reads those of the namespace that this process is in: the writable ones, as a restore can
    /// set no others.
    ///
    /// # Errors
    /// As [`Settings::prepare`].
    pub fn read(&self) -> Result<Vec<Setting>> {
        let usual = self.prepare()?;
        let mut all = read(self.roots)?;
        for setting in &mut all {
            setting.is_default = usual.get(&setting.path) == Some(&setting.value);
        }
        Ok(all)
    }

    /// Tells whether these are settings of a namespace, in a number that one may have.
    pub fn are_sound(&self, settings: &[Setting]) -> bool {
        let mut all = settings.iter();
        settings.len() <= MOST && all.all(|setting| setting.is_below(self.roots))
    }

    /// Sets all but the limits, which are as wide as they can be until [`Settings::limit`]: an
    /// object of the image may be beyond one that was lowered later.
    ///
    /// # Errors
    /// Those of [`apply`].
    pub fn restore(&self, settings: &[Setting]) -> Result<()> {
        let widest = self.limits.iter().map(|(path, value)| Setting {
            path: (*path).to_owned(),
            value: (*value).to_owned(),
            // A kernel may have others.
            is_default: true,
        });
        let others = settings.iter().filter(|setting| !self.is_limit(setting));
        apply(&widest.chain(others.cloned()).collect::<Vec<_>>())
    }

    /// Sets the limits.
    ///
    /// # Errors
    /// Those of [`apply`].
    pub fn limit(&self, settings: &[Setting]) -> Result<()> {
        let limits = settings.iter().filter(|setting| self.is_limit(setting));
        apply(&limits.cloned().collect::<Vec<_>>())
    }

    fn is_limit(&self, setting: &Setting) -> bool {
        self.limits.iter().any(|(path, _)| *path == setting.path)
    }
}

fn file(path: &str) -> PathBuf {
    PathBuf::from(sys::procfs::path(format_args!("sys/{path}")))
}

/// Room for a value and one byte.
fn room() -> Vec<u8> {
    vec![0; VALUE_MAX_BYTES + 1]
}

/// The value of a setting, by way of the `room`; none of one that has no value yet. The kernel
/// gives some values in one read alone: it takes the next for the end.
fn value(path: &str, room: &mut [u8]) -> io::Result<Option<String>> {
    let read = File::open(file(path)).and_then(|mut file| file.read(room));
    match read {
        Ok(bytes) if bytes > VALUE_MAX_BYTES => Err(Errno::OVERFLOW.into()),
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&room[..bytes]);
            Ok(Some(text.trim_end().to_owned()))
        }
        Err(error) if Errno::from_io_error(&error) == Some(Errno::IO) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads the writable files below `roots` of /proc/sys, by path.
fn read(roots: &[&str]) -> Result<Vec<Setting>> {
    let (mut all, mut room) = (Vec::new(), room());
    for root in roots {
        read_into(root, &mut room, &mut all)?;
    }
    all.sort_by(|one: &Setting, other| one.path.cmp(&other.path));
    Ok(all)
}

fn read_into(path: &str, room: &mut [u8], all: &mut Vec<Setting>) -> Result<()> {
    let own = file(path);
    let failed = |error| Error::kernel(format!("cannot read /proc/sys/{path}"), error);
    let found = match own.metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(failed)?,
    };
    if found.is_dir() {
        for entry in own.read_dir().map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            read_into(&format!("{path}/{}", name.to_string_lossy()), room, all)?;
        }
        return Ok(());
    }
    const FOR_ROOT: u32 = 0o600;
    let is_writable = found.permissions().mode() & FOR_ROOT == FOR_ROOT;
    if !is_writable || OF_HOST.contains(&path) {
        return Ok(());
    }
    if let Some(value) = value(path, room).map_err(failed)? {
        all.push(Setting {
            path: path.to_owned(),
            value,
            is_default: false,
        });
    }
    Ok(())
}

/// Sets those that differ in the namespace that this process is in, until none does: some change
/// others, and some are only taken when others are set.
///
/// # Errors
/// [`Error::Mismatch`] for one that this kernel does not have, or that does not stay;
/// [`Error::Kernel`] for one that does not take its value. One that was as in a new namespace may
/// be missing, and stays as it is where it takes no value.
fn apply(settings: &[Setting]) -> Result<()> {
    const PASSES: usize = 10;
    let mut room = room();
    for pass in 1.. {
        let mut failed = None;
        for setting in settings {
            match set(setting, &mut room) {
                Ok(false) => {}
                Ok(true) => failed = failed.or(Some((setting, None))),
                Err(error) => failed = Some((setting, Some(error))),
            }
        }
        let Some((setting, error)) = failed else {
            return Ok(());
        };
        if pass < PASSES {
            continue;
        }
        let Setting { path, value, .. } = setting;
        return Err(match error {
            Some(error) if error.kind() == io::ErrorKind::NotFound => Error::Mismatch {
                what: format!("the setting {path} of the tree's namespace is missing"),
            },
            Some(error) => {
                Error::kernel(format!("cannot set /proc/sys/{path} to {value:?}"), error)
            }
            None => Error::Mismatch {
                what: format!("the setting {path} of the tree's namespace does not stay {value:?}"),
            },
        });
    }
    unreachable!("the last pass returns")
}

/// Sets one that differs, and tells whether it did.
fn set(setting: &Setting, room: &mut [u8]) -> io::Result<bool> {
    let Setting { path, value, .. } = setting;
    let present = match self::value(path, room) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && setting.is_default => {
            return Ok(false);
        }
        present => present?.unwrap_or_default(),
    };
    if present == *value {
        return Ok(false);
    }
    // In one call: of two, the kernel takes each for a whole value.
    match fs::write(file(path), format!("{value}\n")) {
        Err(error) if setting.is_default => {
            log::info!("setting {path} stays {present:?}: {error}");
            Ok(false)
        }
        written => written.map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_below_their_folders() {
        let setting = |path: &str| Setting {
            path: path.to_owned(),
            value: String::new(),
            is_default: false,
        };
        for (path, is_below) in [
            ("net/ipv4/ip_forward", true),
            ("kernel/sem", true),
            ("kernel/semaphore", false),
            ("net/../kernel/core_pattern", false),
            ("net//x", false),
            ("kernel/core_pattern", false),
            ("network/x", false),
        ] {
            assert_eq!(
                setting(path).is_below(&["net", "kernel/sem"]),
                is_below,
                "{path}"
            );
        }
        let all = read(&["net"]).expect("it is there");
        assert!(
            all.iter()
                .any(|one| one.path == "net/ipv4/conf/lo/forwarding")
        );
        assert!(all.iter().all(|one| one.is_below(&["net"])));
        assert!(read(&["net/nothing"]).expect("nothing").is_empty());
        assert!(!setting(OF_HOST[0]).is_below(&["net"]));
    }

    /// Calls `f` in a network namespace of its own.
    fn elsewhere<T: Send>(f: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                sys::world::unshare(libc::CLONE_NEWNET).expect("a namespace");
                f()
            });
            made.join().expect("no panic")
        })
    }

    /// What a new namespace has, where these were set in that order, once it was applied to another
    /// new one.
    fn moved(set: &[(&str, &str)]) -> (Vec<Setting>, Vec<Setting>) {
        let own = Settings {
            roots: &["net"],
            flag: libc::CLONE_NEWNET,
            limits: &[("net/core/somaxconn", "4097")],
            usual: OnceLock::new(),
        };
        own.prepare().expect("they are read");
        let before = elsewhere(|| {
            for (path, value) in set {
                fs::write(file(path), value).expect("it is set");
            }
            own.read().expect("they are read")
        });
        let after = elsewhere(|| {
            own.restore(&before).expect("they are taken");
            let somaxconn = value("net/core/somaxconn", &mut room());
            assert_eq!(somaxconn.expect("it is read").as_deref(), Some("4097"));
            own.limit(&before).expect("it is taken");
            own.read().expect("they are read")
        });
        (before, after)
    }

    #[test]
    fn settings_that_change_each_other_come_back() {
        testkit::needs_root!();
        let ports = (0..200).map(|port| (1000 + 2 * port).to_string());
        let ports = ports.collect::<Vec<_>>().join(",");
        for set in [
            &[][..],
            &[("net/ipv4/ip_local_reserved_ports", &*ports)],
            // Forwarding switches redirects off.
            &[
                ("net/ipv4/conf/all/forwarding", "1"),
                ("net/ipv4/conf/all/accept_redirects", "1"),
                ("net/ipv4/conf/lo/accept_redirects", "1"),
            ],
            // The one is only taken once the other is set.
            &[
                ("net/ipv4/ip_unprivileged_port_start", "0"),
                ("net/ipv4/ip_local_port_range", "500\t60000"),
            ],
        ] {
            let (before, after) = moved(set);
            assert_eq!(before, after);
            let changed = before.iter().filter(|setting| !setting.is_default);
            let changed = changed.map(|setting| &*setting.path).collect::<Vec<_>>();
            for (path, value) in set {
                let found = before.iter().find(|setting| setting.path == *path);
                assert_eq!(found.expect("it is there").value, *value);
            }
            assert_eq!(changed.is_empty(), set.is_empty(), "{changed:?}");
        }
    }

    #[test]
    fn setting_that_is_missing_is_refused_unless_it_is_usual() {
        let setting = |is_default| Setting {
            path: "net/ipv4/no_such_setting".to_owned(),
            value: "1".to_owned(),
            is_default,
        };
        apply(&[setting(true)]).expect("nothing is lost");
        let error = apply(&[setting(false)]).expect_err("it is lost");
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
    }
}
