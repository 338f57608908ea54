//! The options and commands of criu(8) 4.2 as data: what becomes of each one here.

use crate::reading::Command;

/// Whether an option has an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Argument {
    /// It has none.
    None,
    /// It has none, and `--no-NAME` takes it back.
    Switch,
    /// It needs one.
    Required,
    /// It may have one, written `--name=value` or `-nvalue`.
    Optional,
}

/// What happens to an option on one command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The command does what the option says.
    Taken,
    /// criu(8) accepts it on this command without any effect, and so does this program.
    Idle,
    /// It would have an effect that is not there yet: refused by name.
    Refused,
    /// It makes no sense on this command: an error in usage, as in criu(8).
    Misplaced,
}

/// One option of the command line.
#[derive(Debug)]
pub struct Flag {
    /// The long name, without dashes.
    pub name: &'static str,
    /// The letter, where there is one.
    pub short: Option<char>,
    /// Whether it has an argument.
    pub argument: Argument,
    /// Whether every occurrence counts; otherwise the last one does.
    pub repeats: bool,
    /// Its fate on dump.
    pub dump: Fate,
    /// Its fate on restore.
    pub restore: Fate,
    /// Its fate on check.
    pub check: Fate,
    /// The arguments that there are; empty means any.
    pub values: &'static [&'static str],
    /// Whether criu(8) has it.
    pub of_criu: bool,
}

impl Flag {
    /// Tells what becomes of the option on `command`.
    pub fn fate(&self, command: Command) -> Fate {
        match command {
            Command::Dump => self.dump,
            Command::PreDump => self.pre_dump(),
            Command::Restore => self.restore,
            Command::Check => self.check,
            Command::Show
            | Command::Merge
            | Command::Dedup
            | Command::Network
            | Command::Import
            | Command::Export
            | Command::Serve
            | Command::LazyPages
            | Command::Generate => Fate::Taken,
        }
    }

    /// A pre-dump accepts what the dump after it does: most of that is not about memory.
    fn pre_dump(&self) -> Fate {
        match self.dump {
            Fate::Taken if !ON_PRE_DUMP.contains(&self.name) => Fate::Idle,
            _ if self.name == "pre-dump-mode" => Fate::Taken,
            fate => fate,
        }
    }
}

/// The options of a dump that a pre-dump does something about.
const ON_PRE_DUMP: &[&str] = &[
    "action-script",
    "auto-dedup",
    "close",
    "compress",
    "config",
    "display-stats",
    "help",
    "image",
    "images-dir",
    "json",
    "log-file",
    "no-default-config",
    "prev-images-dir",
    "status-fd",
    "sync",
    "timeout",
    "track-time",
    "tree",
    "verbosity",
    "version",
    "work-dir",
];

/// Commands of criu(8) that are not there yet: refused by name.
pub const REFUSED_COMMANDS: &[&str] = &["cpuinfo", "exec", "page-server", "service", "swrk"];

use Argument::{None as Bare, Optional, Required, Switch};
use Fate::{Idle, Misplaced, Refused, Taken};

const fn flag(name: &'static str, argument: Argument, fates: [Fate; 3]) -> Flag {
    let [dump, restore, check] = fates;
    Flag {
        name,
        short: None,
        argument,
        repeats: false,
        dump,
        restore,
        check,
        values: &[],
        of_criu: true,
    }
}

impl Flag {
    const fn short(mut self, letter: char) -> Flag {
        self.short = Some(letter);
        self
    }

    const fn repeats(mut self) -> Flag {
        self.repeats = true;
        self
    }

    const fn values(mut self, values: &'static [&'static str]) -> Flag {
        self.values = values;
        self
    }

    const fn own(mut self) -> Flag {
        self.of_criu = false;
        self
    }
}

/// Every option: those of criu(8) 4.2 in the order of their names, then this program's own.
///
/// The three fates are those on dump, restore and check.
#[rustfmt::skip]
pub static FLAGS: &[Flag] = &[
    flag("action-script", Required, [Taken, Taken, Idle]).repeats(),
    flag("address", Required, [Idle, Idle, Idle]),
    flag("all", Bare, [Idle, Idle, Taken]),
    flag("allow-uprobes", Switch, [Refused, Refused, Idle]),
    flag("auto-dedup", Switch, [Taken, Refused, Idle]),
    flag("cgroup-dump-controller", Required, [Refused, Idle, Idle]).repeats(),
    flag("cgroup-props", Required, [Refused, Idle, Idle]),
    flag("cgroup-props-file", Required, [Refused, Idle, Idle]),
    flag("cgroup-root", Required, [Refused, Taken, Idle]).repeats(),
    flag("cgroup-yard", Required, [Refused, Refused, Idle]),
    flag("close", Required, [Taken, Taken, Taken]).repeats(),
    flag("config", Required, [Taken, Taken, Taken]),
    flag("cpu-cap", Optional, [Refused, Refused, Idle]),
    flag("daemon", Switch, [Idle, Taken, Idle]),
    flag("deprecated", Switch, [Idle, Idle, Idle]),
    flag("display-stats", Switch, [Taken, Taken, Idle]),
    flag("empty-ns", Required, [Refused, Refused, Idle]),
    flag("enable-external-masters", Bare, [Refused, Idle, Idle]),
    flag("enable-external-sharing", Bare, [Refused, Idle, Idle]),
    flag("enable-fs", Required, [Refused, Refused, Idle]).repeats(),
    flag("evasive-devices", Switch, [Refused, Refused, Idle]),
    flag("exec-cmd", Bare, [Misplaced, Taken, Misplaced]),
    flag("experimental", Switch, [Idle, Idle, Taken]),
    flag("ext-mount-map", Required, [Refused, Refused, Idle]).short('M').repeats(),
    flag("ext-unix-sk", Optional, [Taken, Taken, Idle]).short('x').repeats(),
    flag("external", Required, [Refused, Refused, Idle]).repeats(),
    flag("extra", Switch, [Idle, Idle, Taken]),
    flag("feature", Required, [Idle, Idle, Taken]).repeats(),
    flag("file-locks", Switch, [Taken, Taken, Idle]).short('l'),
    flag("file-validation", Required, [Taken, Taken, Idle]).values(&["buildid", "filesize"]),
    flag("force-irmap", Switch, [Refused, Idle, Idle]),
    flag("freeze-cgroup", Required, [Refused, Idle, Idle]),
    flag("ghost-fiemap", Switch, [Idle, Idle, Idle]),
    flag("ghost-limit", Required, [Taken, Idle, Idle]),
    flag("help", Bare, [Taken, Taken, Taken]).short('h'),
    flag("images-dir", Required, [Taken, Taken, Idle]).short('D'),
    flag("inherit-fd", Required, [Idle, Taken, Idle]).repeats(),
    flag("irmap-scan-path", Required, [Refused, Idle, Idle]).repeats(),
    flag("join-ns", Required, [Idle, Refused, Idle]).short('J').repeats(),
    flag("lazy-pages", Bare, [Refused, Taken, Idle]),
    flag("leave-running", Bare, [Taken, Idle, Idle]).short('R'),
    flag("leave-stopped", Bare, [Taken, Taken, Idle]).short('s'),
    flag("libdir", Required, [Refused, Refused, Idle]).short('L'),
    flag("link-remap", Switch, [Taken, Taken, Idle]),
    flag("log-file", Required, [Taken, Taken, Taken]).short('o'),
    flag("log-pid", Switch, [Idle, Refused, Idle]),
    flag("lsm-mount-context", Required, [Idle, Refused, Idle]),
    flag("lsm-profile", Required, [Idle, Refused, Idle]),
    flag("manage-cgroups", Optional, [Taken, Taken, Idle])
        .values(&["none", "props", "soft", "full", "strict", "ignore"]),
    flag("mntns-compat-mode", Switch, [Refused, Refused, Idle]),
    flag("ms", Bare, [Refused, Refused, Refused]),
    flag("network-lock", Required, [Refused, Refused, Idle])
        .values(&["iptables", "nftables", "skip"]),
    flag("no-default-config", Bare, [Taken, Taken, Taken]),
    flag("page-server", Switch, [Refused, Idle, Idle]),
    flag("pidfile", Required, [Idle, Taken, Idle]),
    flag("port", Required, [Idle, Idle, Idle]),
    flag("pre-dump-mode", Required, [Idle, Idle, Idle]).values(&["read", "splice"]),
    flag("prev-images-dir", Required, [Taken, Idle, Idle]),
    flag("ps-socket", Required, [Idle, Idle, Idle]),
    flag("restore-detached", Switch, [Idle, Taken, Idle]).short('d'),
    flag("restore-sibling", Switch, [Idle, Taken, Idle]).short('S'),
    // It is about mount namespaces, and no image has one of its own.
    flag("root", Required, [Idle, Idle, Idle]).short('r'),
    flag("shell-job", Switch, [Taken, Taken, Idle]).short('j'),
    flag("skip-file-rwx-check", Switch, [Idle, Refused, Idle]),
    flag("skip-in-flight", Switch, [Taken, Idle, Idle]),
    flag("skip-mnt", Required, [Refused, Refused, Idle]).repeats(),
    flag("status-fd", Required, [Taken, Taken, Idle]),
    flag("stream", Switch, [Refused, Refused, Idle]),
    flag("tcp-close", Switch, [Taken, Taken, Idle]),
    flag("tcp-established", Switch, [Taken, Taken, Idle]),
    flag("timeout", Required, [Taken, Idle, Idle]),
    flag("tls", Switch, [Idle, Idle, Idle]),
    flag("tls-cacert", Required, [Idle, Idle, Idle]),
    flag("tls-cacrl", Required, [Idle, Idle, Idle]),
    flag("tls-cert", Required, [Idle, Idle, Idle]),
    flag("tls-key", Required, [Idle, Idle, Idle]),
    flag("tls-no-cn-verify", Bare, [Idle, Idle, Idle]),
    flag("track-mem", Switch, [Taken, Idle, Idle]),
    flag("tree", Required, [Taken, Idle, Idle]).short('t'),
    flag("unprivileged", Switch, [Idle, Idle, Idle]),
    flag("verbosity", Optional, [Taken, Taken, Taken]).short('v').repeats(),
    flag("version", Bare, [Taken, Taken, Taken]).short('V'),
    flag("veth-pair", Required, [Idle, Refused, Idle]).repeats(),
    flag("weak-sysctls", Switch, [Idle, Refused, Idle]),
    flag("work-dir", Required, [Taken, Taken, Taken]).short('W'),

    flag("compress", Optional, [Taken, Misplaced, Misplaced]).own(),
    flag("dry-run", Bare, [Taken, Misplaced, Misplaced]).own(),
    // Elsewhere than on check the beginning of criu's --images-dir.
    flag("image", Required, [Taken, Taken, Taken]).own(),
    flag("json", Bare, [Taken, Taken, Taken]).own(),
    flag("live", Bare, [Taken, Misplaced, Misplaced]).own(),
    flag("no-timens", Bare, [Misplaced, Taken, Misplaced]).own(),
    flag("output", Required, [Misplaced, Misplaced, Misplaced]).own(),
    flag("plan", Bare, [Misplaced, Taken, Misplaced]).own(),
    flag("sync", Switch, [Taken, Misplaced, Misplaced]).own(),
    flag("track-time", Required, [Taken, Misplaced, Misplaced]).own(),
    flag("until", Required, [Misplaced, Misplaced, Misplaced]).own(),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, kinds of arguments and letters, as the option table in the binary of criu 4.2.1 has
    /// them.
    const CRIU: &str = include_str!("../tests/fixtures/criu-4.2-options.txt");

    fn known() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
        CRIU.lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| {
                let mut words = line.split(' ');
                let mut next = || words.next().unwrap();
                (next(), next(), next())
            })
    }

    #[test]
    fn no_option_of_criu_is_forgotten() {
        for (name, kind, letter) in known() {
            let flag = FLAGS.iter().find(|flag| flag.name == name);
            let flag = flag.unwrap_or_else(|| panic!("{name} is missing"));
            let expected = match kind {
                "none" => Bare,
                "switch" => Switch,
                "required" => Required,
                "optional" => Optional,
                other => panic!("{other}"),
            };
            assert_eq!(flag.argument, expected, "{name}");
            assert_eq!(
                flag.short.map_or("-".to_owned(), String::from),
                letter,
                "{name}"
            );
        }
    }

    #[test]
    fn no_option_is_ascribed_to_criu_that_it_does_not_have() {
        for flag in FLAGS.iter().filter(|flag| flag.of_criu) {
            assert!(known().any(|(name, ..)| name == flag.name), "{}", flag.name);
        }
    }

    #[test]
    fn options_are_in_order_and_unique() {
        for of_criu in [true, false] {
            let flags = FLAGS.iter().filter(|flag| flag.of_criu == of_criu);
            let names: Vec<_> = flags.map(|flag| flag.name).collect();
            assert!(names.is_sorted_by(|a, b| a < b), "{names:?}");
        }
        let own = FLAGS.iter().filter(|flag| !flag.of_criu);
        for own in own {
            assert_eq!(FLAGS.iter().filter(|flag| flag.name == own.name).count(), 1);
        }
    }
}
