//! The options and commands of criu(8) 4.2 as data, and this program's own: what becomes of each
//! one here, what it sets, and what is said of it.

use std::ffi::OsStr;
use std::time::Duration;

use process::{Afterwards, DumpKind};

use crate::command_line::Command;
use crate::options::Options;
use crate::values::{self, number, path, text};

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

/// Treatment of an option on one command.
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
    /// True if it has an argument.
    pub argument: Argument,
    /// True if every occurrence counts; otherwise the last one does.
    pub repeats: bool,
    /// Its fate on dump.
    pub dump: Fate,
    /// Its fate on restore.
    pub restore: Fate,
    /// Its fate on check.
    pub check: Fate,
    /// The arguments that there are; empty means any.
    pub values: &'static [&'static str],
    /// True if criu(8) has it.
    pub of_criu: bool,
    /// True if a pre-dump does something about it. Otherwise it accepts it where the dump after it
    /// does: most of that is not about memory.
    pub on_pre_dump: bool,
    /// Its effect.
    pub set: Set,
    /// How its argument is called in the help.
    pub value_name: &'static str,
    /// The default, where that has to be said.
    pub usual: &'static str,
    /// Text of the help.
    pub help: &'static str,
}

/// Effect of an option; an error says why its argument cannot be that.
#[derive(Debug, Clone, Copy)]
pub enum Set {
    /// Nothing, because it is refused, has no effect, or is read elsewhere.
    Nothing,
    /// It has no argument.
    Flag(fn(&mut Options)),
    /// It has one, unless it is optional.
    Value(fn(&mut Options, Option<&OsStr>) -> Result<(), String>),
}

/// Each has a name of its own.
impl PartialEq for Flag {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Flag {}

impl Flag {
    /// The option of this name, which there is.
    pub fn named(name: &str) -> &'static Self {
        let mut flags = FLAGS.iter();
        flags
            .find(|flag| flag.name == name)
            .expect("it is in the table")
    }

    /// How it is written where it is given.
    pub fn shown(&self) -> &'static str {
        match self.name {
            "sync" => "no-sync",
            name => name,
        }
    }

    /// Tells what becomes of the option on `command`.
    pub fn fate(&self, command: Command) -> Fate {
        match command {
            Command::Dump => self.dump,
            Command::PreDump => self.pre_dump(),
            Command::Restore => self.restore,
            Command::Check => self.check,
            Command::Dedup | Command::LazyPages | Command::Cpuinfo => {
                self.fate_without_tree(command)
            }
            Command::Show
            | Command::Merge
            | Command::Network
            | Command::Import
            | Command::Export
            | Command::Serve
            | Command::Service
            | Command::Swrk
            | Command::Vm
            | Command::Volume
            | Command::Generate => Fate::Taken,
        }
    }

    /// The same on criu(8)'s commands that neither save nor restore a tree: each of them accepts
    /// every option there.
    fn fate_without_tree(&self, command: Command) -> Fate {
        const GENERAL: [&str; 9] = [
            "close",
            "config",
            "help",
            "images-dir",
            "log-file",
            "no-default-config",
            "verbosity",
            "version",
            "work-dir",
        ];
        let is_taken = match (command, self.name) {
            (Command::LazyPages, "status-fd") | (Command::Cpuinfo, "cpu-cap") => true,
            (_, name) => GENERAL.contains(&name) || !self.of_criu,
        };
        // A server that goes to the background, or has pages of another one.
        let is_refused = matches!(
            (command, self.name),
            (
                Command::LazyPages,
                "daemon" | "page-server" | "restore-detached"
            )
        );
        match (is_taken, is_refused) {
            (true, _) => Fate::Taken,
            (false, true) => Fate::Refused,
            (false, false) => Fate::Idle,
        }
    }

    const fn pre_dump(&self) -> Fate {
        match self.dump {
            Fate::Taken if !self.on_pre_dump => Fate::Idle,
            Fate::Idle if self.on_pre_dump => Fate::Taken,
            fate => fate,
        }
    }

    /// Sets what the option says.
    ///
    /// # Errors
    /// What its argument cannot be; nothing where it is only for other commands.
    pub fn apply(&self, options: &mut Options, value: Option<&OsStr>) -> Result<(), String> {
        match self.set {
            Set::Nothing => {}
            Set::Flag(set) => set(options),
            Set::Value(set) => set(options, value)?,
        }
        Ok(())
    }
}

/// Commands of criu(8) that are not there yet: refused by name.
pub const REFUSED_COMMANDS: &[&str] = &["exec", "page-server"];

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
        on_pre_dump: false,
        set: Set::Nothing,
        value_name: "",
        usual: "",
        help: "",
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

    const fn on_pre_dump(mut self) -> Flag {
        self.on_pre_dump = true;
        self
    }

    const fn on(mut self, set: fn(&mut Options)) -> Flag {
        self.set = Set::Flag(set);
        self
    }

    const fn with(
        mut self,
        name: &'static str,
        set: fn(&mut Options, Option<&OsStr>) -> Result<(), String>,
    ) -> Flag {
        (self.value_name, self.set) = (name, Set::Value(set));
        self
    }

    const fn usual(mut self, usual: &'static str) -> Flag {
        self.usual = usual;
        self
    }

    const fn help(mut self, help: &'static str) -> Flag {
        self.help = help;
        self
    }
}

/// Puts what an argument says in its place.
fn put<T>(place: &mut T, value: Result<T, String>) -> Result<(), String> {
    *place = value?;
    Ok(())
}

/// Adds what an argument says to those before it.
fn push<T>(place: &mut Vec<T>, value: Result<T, String>) -> Result<(), String> {
    place.push(value?);
    Ok(())
}

/// Every option: those of criu(8) 4.2 in the order of their names, then this program's own.
///
/// The three fates are those on dump, restore and check.
#[rustfmt::skip]
pub static FLAGS: &[Flag] = &[
    flag("action-script", Required, [Taken, Taken, Idle]).repeats().on_pre_dump()
        .with("FILE", |o, value| push(&mut o.action_script, path(value)))
        .help("A program to call at each stage, told by CRTOOLS_SCRIPT_ACTION; may be given again"),
    flag("address", Required, [Idle, Idle, Idle]),
    flag("all", Bare, [Idle, Idle, Taken])
        .on(|o| o.extra = true)
        .help("The same as --extra --experimental"),
    flag("allow-uprobes", Switch, [Refused, Refused, Idle]),
    flag("auto-dedup", Switch, [Taken, Refused, Idle]).on_pre_dump()
        .on(|o| o.dump.auto_dedup = true)
        .help("Free in older images what this one replaces; they cannot be restored any more then"),
    flag("cgroup-dump-controller", Required, [Refused, Idle, Idle]).repeats(),
    flag("cgroup-props", Required, [Refused, Idle, Idle]),
    flag("cgroup-props-file", Required, [Refused, Idle, Idle]),
    flag("cgroup-root", Required, [Taken, Taken, Idle]).repeats()
        .with("[CONTROLLER:]/PATH", |o, value| {
            push(&mut o.allowed.cgroups.roots, values::cgroup_root(text(value)?))
        })
        .help("The topmost control group of the tree, in that controller's hierarchy or in all \
            others: a dump saves what is below it, a restore puts it in the place of what was the \
            topmost one; may be given again"),
    flag("cgroup-yard", Required, [Taken, Taken, Idle])
        .with("DIR", |o, value| put(&mut o.allowed.cgroups.yard, path(value).map(Some)))
        .help("Where the hierarchies of control groups are, each in a folder named after its \
            controllers, instead of where they are mounted"),
    flag("close", Required, [Taken, Taken, Taken]).repeats().on_pre_dump()
        .with("FD", |o, value| push(&mut o.close, number(value)))
        .help("Close this descriptor first; may be given again"),
    flag("config", Required, [Taken, Taken, Taken]).on_pre_dump()
        .with("FILE", |o, value| put(&mut o.config, path(value).map(Some)))
        .help("Read this configuration file instead of the default ones"),
    flag("cpu-cap", Optional, [Taken, Taken, Idle])
        .with("CAP,…", |o, value| {
            let cap = values::cpu_cap(value)?;
            (o.dump.cpu_cap, o.restore.cpu_cap) = (cap, cap);
            Ok(())
        })
        .usual("fpu")
        .help("What this processor must have of the one that the image was made on: fpu, the \
            registers that are in use, which always count; ins, all instructions; cpu, the same \
            and no more; all; none; ^ before one takes it back. On dump: the image is to tell"),
    flag("daemon", Switch, [Idle, Taken, Idle]),
    flag("deprecated", Switch, [Idle, Idle, Idle]),
    flag("display-stats", Switch, [Taken, Taken, Idle]).on_pre_dump()
        .on(|o| o.display_stats = true)
        .help("Print what was done: tasks, pages, bytes, times"),
    flag("empty-ns", Required, [Taken, Idle, Idle]).repeats()
        .with("net", |o, value| values::empty_namespace(text(value)?, &mut o.allowed))
        .help("Interfaces, rules and filters of the tree's own network namespace are not saved: \
            somebody else brings them back; the loopback is"),
    flag("enable-external-masters", Bare, [Refused, Idle, Idle]),
    flag("enable-external-sharing", Bare, [Refused, Idle, Idle]),
    flag("enable-fs", Required, [Refused, Refused, Idle]).repeats(),
    flag("evasive-devices", Switch, [Refused, Idle, Idle]),
    flag("exec-cmd", Bare, [Misplaced, Taken, Misplaced])
        .help("Execute the command behind -- as the root's parent once the tree runs"),
    flag("experimental", Switch, [Idle, Idle, Taken])
        .on(|o| o.extra = true)
        .help("The same as --extra: no feature is experimental"),
    flag("ext-mount-map", Required, [Taken, Taken, Idle]).short('M').repeats()
        .with("KEY:VALUE", |o, value| values::mount_map(text(value)?, &mut o.allowed))
        .help("The same as --external mnt[KEY]:VALUE; auto needs not be said"),
    flag("ext-unix-sk", Optional, [Taken, Taken, Idle]).short('x').repeats()
        .with("INODE,…", |o, value| values::inodes(value, &mut o.allowed))
        .help("Unix sockets may be connected to somebody outside the tree: any, or those of these \
            inodes"),
    flag("external", Required, [Taken, Taken, Idle]).repeats()
        .with("RESOURCE", |o, value| values::external(text(value)?, &mut o.allowed))
        .help("What is outside of the tree; may be given again. pipe, pipe:[INODE]: pipes may have \
            their other end there, any or this one; a restore is handed them by --inherit-fd. \
            mnt[PATH]:NAME: what is mounted at PATH is not saved; on restore, mnt[NAME]:PATH says \
            where it is. net[INODE]:NAME: the tree's network namespace is not saved; on restore, \
            --inherit-fd fd[N]:NAME hands one on"),
    flag("extra", Switch, [Idle, Idle, Taken])
        .on(|o| o.extra = true)
        .help("A feature that only some targets need counts, too"),
    flag("feature", Required, [Idle, Idle, Taken]).repeats()
        .with("NAME", |o, value| push(&mut o.feature, text(value).map(str::to_owned)))
        .help("Only this feature; `list` names them all; may be given again"),
    flag("file-locks", Switch, [Taken, Taken, Idle]).short('l')
        .on(|o| o.allowed.file_locks = true)
        .help("Keep file locks; nobody outside the tree may share them"),
    flag("file-validation", Required, [Taken, Taken, Idle]).values(&["buildid", "filesize"])
        .with("MODE", |o, value| put(&mut o.allowed.file_validation, values::validation(value)))
        .help("How a file is known to be the one that was open: by its size, or in ELF files also \
            by their build ID, which is the default"),
    flag("force-irmap", Switch, [Taken, Idle, Idle])
        .on(|o| o.allowed.force_irmap = true)
        .help("Look for watched files by their paths, even where the kernel tells their handles"),
    flag("freeze-cgroup", Required, [Taken, Idle, Idle])
        .with("DIR", |o, value| put(&mut o.freeze_cgroup, path(value).map(Some)))
        .on_pre_dump()
        .help("The control group of the tree, which must not be frozen: tasks are stopped one by \
            one"),
    flag("ghost-fiemap", Switch, [Idle, Idle, Idle]),
    flag("ghost-limit", Required, [Taken, Idle, Idle])
        .with("SIZE", |o, value| put(&mut o.allowed.ghost_limit_bytes, values::size(text(value)?)))
        .usual("1M")
        .help("Store deleted files up to this size, in bytes or with K, M or G"),
    flag("help", Bare, [Taken, Taken, Taken]).short('h').on_pre_dump(),
    flag("images-dir", Required, [Taken, Taken, Idle]).short('D').on_pre_dump()
        .with("DIR", |o, value| put(&mut o.images_dir, path(value)))
        .usual(".")
        .help("The directory of the image"),
    flag("inherit-fd", Required, [Idle, Taken, Idle]).repeats()
        .with("fd[NUMBER]:RESOURCE", |o, value| {
            push(&mut o.inherit_fd, values::inherit_fd(text(value)?))
        })
        .help("Let an open descriptor take the place of a saved one; may be given again"),
    flag("irmap-scan-path", Required, [Taken, Idle, Idle]).repeats()
        .with("DIR", |o, value| push(&mut o.allowed.irmap_scan_paths, path(value)))
        .help("Look below this directory for watched files that cannot be opened by their handles; \
            may be given again"),
    flag("join-ns", Required, [Idle, Refused, Idle]).short('J').repeats(),
    flag("lazy-pages", Bare, [Refused, Taken, Idle])
        .on(|o| o.lazy_pages = true)
        .help("Have memory come when it is touched: the tree runs at once"),
    flag("leave-running", Bare, [Taken, Idle, Idle]).short('R')
        .on(|o| o.dump.afterwards = Afterwards::Run)
        .help("Let the tree run on instead of killing it"),
    flag("leave-stopped", Bare, [Taken, Taken, Idle]).short('s')
        .on(|o| (o.dump.afterwards, o.restore.afterwards) = (Afterwards::Stop, Afterwards::Stop))
        .help("Leave the tree stopped"),
    flag("libdir", Required, [Taken, Taken, Idle]).short('L')
        .with("DIR", |o, value| put(&mut o.libdir, values::without_plugins(path(value)?).map(Some)))
        .help("Where plugins of criu(8) are: there must be none, for none is loaded"),
    flag("link-remap", Switch, [Taken, Taken, Idle])
        .on(|o| o.allowed.link_remap = true)
        .help("Give a deleted file that has other names a temporary one"),
    flag("log-file", Required, [Taken, Taken, Taken]).short('o').on_pre_dump()
        .with("FILE", |o, value| put(&mut o.log_file, path(value).map(Some)))
        .help("The log file, relative to the work directory; `-` is stdout [default: COMMAND.log; \
            none of check]"),
    flag("log-pid", Switch, [Idle, Refused, Idle]),
    flag("lsm-mount-context", Required, [Idle, Refused, Idle]),
    flag("lsm-profile", Required, [Idle, Refused, Idle]),
    flag("manage-cgroups", Optional, [Taken, Taken, Idle])
        .values(&["none", "props", "soft", "full", "strict", "ignore"])
        .with("MODE", |o, value| put(&mut o.allowed.cgroups.mode, values::cgroups(value)))
        .help("What is done about control groups; soft makes those that are missing"),
    flag("mntns-compat-mode", Switch, [Refused, Refused, Idle]),
    flag("ms", Bare, [Idle, Idle, Idle]),
    flag("network-lock", Required, [Taken, Idle, Idle])
        .values(&["iptables", "nftables", "skip"])
        .with("METHOD", |o, value| {
            put(&mut o.allowed.network_unlocked, text(value).map(|method| method == "skip"))
        })
        .usual("nftables")
        .help("How packets are kept away from TCP connections until the restore: by nf_tables, \
            whichever of the two is named; with skip not at all, which the caller has to do"),
    flag("no-default-config", Bare, [Taken, Taken, Taken]).on_pre_dump()
        .on(|o| o.no_default_config = true)
        .help("Read no default configuration file"),
    flag("page-server", Switch, [Refused, Idle, Idle]),
    flag("pidfile", Required, [Idle, Taken, Idle])
        .with("FILE", |o, value| put(&mut o.pidfile, path(value).map(Some)))
        .help("Write the root's pid into this new file, relative to the work directory"),
    flag("port", Required, [Idle, Idle, Idle]),
    flag("pre-dump-mode", Required, [Idle, Idle, Idle]).values(&["read", "splice"]).on_pre_dump()
        .with("MODE", |_, _| Ok(()))
        .help("How memory is read: both are the same here, from outside while the tree runs"),
    flag("prev-images-dir", Required, [Taken, Idle, Idle]).on_pre_dump()
        .with("DIR", |o, value| put(&mut o.prev_images_dir, path(value).map(Some)))
        .help("The directory of the last image of this tree, relative to --images-dir: of memory \
            that was tracked since, only what was written is saved"),
    flag("ps-socket", Required, [Idle, Idle, Idle]),
    flag("restore-detached", Switch, [Idle, Taken, Idle]).short('d')
        .on(|o| o.restore.detached = true)
        .help("End once the tree runs, instead of waiting for its root"),
    flag("restore-sibling", Switch, [Idle, Taken, Idle]).short('S')
        .on(|o| o.restore.sibling = true)
        .help("Make the root a child of this program's parent; needs --restore-detached"),
    flag("root", Required, [Idle, Taken, Idle]).short('r')
        .with("DIR", |o, value| values::root(path(value)?, &mut o.allowed))
        .help("The root directory of a tree that has a mount namespace of its own"),
    flag("shell-job", Switch, [Taken, Taken, Idle]).short('j')
        .on(|o| o.allowed.shell_job = true)
        .help("The session or the terminal of the tree belongs to a shell outside of it"),
    flag("skip-file-rwx-check", Switch, [Idle, Refused, Idle]),
    flag("skip-in-flight", Switch, [Taken, Idle, Idle])
        .on(|o| o.allowed.skip_in_flight = true)
        .help("Drop TCP connections that wait to be accepted instead of trying again until there \
            are none"),
    flag("skip-mnt", Required, [Refused, Refused, Idle]).repeats(),
    flag("status-fd", Required, [Taken, Taken, Idle]).on_pre_dump()
        .with("FD", |o, value| put(&mut o.status_fd, number(value).map(Some)))
        .help("Write a zero byte to this descriptor when the work is done, then close it"),
    flag("stream", Switch, [Refused, Refused, Idle]),
    flag("tcp-close", Switch, [Taken, Taken, Idle])
        .on(|o| o.allowed.tcp_close = true)
        .help("Bring TCP connections back closed"),
    flag("tcp-established", Switch, [Taken, Taken, Idle])
        .on(|o| o.allowed.tcp_established = true)
        .help("Keep established TCP connections"),
    flag("timeout", Required, [Taken, Idle, Idle]).on_pre_dump()
        .with("SECONDS", |o, value| put(&mut o.dump.timeout, values::patience(value)))
        .usual("10")
        .help("Give up after this many seconds of stopping and collecting tasks, or of connections \
            that wait to be accepted; 0 never does"),
    flag("tls", Switch, [Idle, Idle, Idle]),
    flag("tls-cacert", Required, [Idle, Idle, Idle]),
    flag("tls-cacrl", Required, [Idle, Idle, Idle]),
    flag("tls-cert", Required, [Idle, Idle, Idle]),
    flag("tls-key", Required, [Idle, Idle, Idle]),
    flag("tls-no-cn-verify", Bare, [Idle, Idle, Idle]),
    flag("track-mem", Switch, [Taken, Idle, Idle])
        .on(|o| o.track_mem = true)
        .help("Track what a tree that runs on writes from now on"),
    flag("tree", Required, [Taken, Idle, Idle]).short('t').on_pre_dump()
        .with("PID", |o, value| put(&mut o.tree, values::pid(text(value)?).map(Some)))
        .help("The root of the tree"),
    flag("unprivileged", Switch, [Taken, Idle, Idle])
        .on(|o| o.dump.unprivileged = true)
        .help("Kill the target also where the caller could not restore it: somebody else will"),
    flag("verbosity", Optional, [Taken, Taken, Taken]).short('v').repeats().on_pre_dump()
        .with("LEVEL", |o, value| put(&mut o.verbosity, number(value)))
        .help("Say more in the log: -v or -v3 informs, -vv or -v4 tells details; 0 is silence, 2 \
            is usual"),
    flag("version", Bare, [Taken, Taken, Taken]).short('V').on_pre_dump(),
    flag("veth-pair", Required, [Idle, Refused, Idle]).repeats(),
    flag("weak-sysctls", Switch, [Idle, Refused, Idle]),
    flag("work-dir", Required, [Taken, Taken, Taken]).short('W').on_pre_dump()
        .with("DIR", |o, value| put(&mut o.work_dir, path(value).map(Some)))
        .help("The directory of the log file and the pidfile; --images-dir unless given"),

    flag("compress", Optional, [Taken, Misplaced, Misplaced]).own().on_pre_dump()
        .with("lz4|zstd[:LEVEL]", |o, value| put(&mut o.dump.compress, values::compression(value)))
        .help("Compress pages where that pays, with lz4 or zstd"),
    flag("drop-events", Switch, [Taken, Idle, Idle]).own()
        .on(|o| o.allowed.drop_events = true)
        .help("Drop what waits to be read and cannot be put back: events of inotify and fanotify, \
            messages of netlink, packets of raw sockets"),
    flag("dry-run", Bare, [Taken, Misplaced, Misplaced]).own()
        .on(|o| o.dry_run = true)
        .help("Save nothing: say what is in the way of a dump, and let the tree run on"),
    // Elsewhere than on check the beginning of criu's --images-dir.
    flag("image", Required, [Taken, Taken, Taken]).own().on_pre_dump()
        .with("DIR", |o, value| put(&mut o.image, path(value).map(Some)))
        .help("Tell what the image in this directory needs of this host, and restore nothing"),
    flag("json", Bare, [Taken, Taken, Taken]).own().on_pre_dump()
        .on(|o| o.json = true)
        .help("Print the result, or the error, as JSON"),
    flag("live", Bare, [Taken, Misplaced, Misplaced]).own()
        .on(|o| o.dump.kind = DumpKind::Live)
        .help("Let the tree run on, and stop it only for moments: its memory is copied while it \
            runs"),
    flag("max-frozen", Required, [Taken, Misplaced, Misplaced]).own()
        .with("MS", |o, value| put(&mut o.max_frozen, number(value).map(Duration::from_millis)))
        .usual("5000")
        .help("For how long the volume of --with-volume may be frozen at a time; it is thawed then \
            in any case"),
    flag("new-pid-ns", Bare, [Misplaced, Taken, Misplaced]).own()
        .on(|o| o.restore.new_pid_ns = true)
        .help("Give the tree a pid namespace of its own, in which its tasks get their numbers \
            whoever has them outside, and a /proc of that namespace"),
    flag("no-timens", Bare, [Misplaced, Taken, Misplaced]).own()
        .on(|o| o.restore.timens = false)
        .help("Leave monotonic clocks as this host has them, instead of going on from where they \
            stood"),
    flag("output", Required, [Misplaced, Misplaced, Misplaced]).own(),
    flag("perf-events", Switch, [Taken, Taken, Idle]).own()
        .on(|o| o.allowed.perf_events = true)
        .help("Keep performance events, whose counts begin at 0 again at the restore"),
    flag("plan", Bare, [Misplaced, Taken, Misplaced]).own()
        .on(|o| o.plan = true)
        .help("Print the scripts that would be run, a line a system call, and restore nothing"),
    flag("save-files", Required, [Taken, Idle, Idle]).repeats().own()
        .with("PATTERN", |o, value| push(&mut o.allowed.save_files, path(value).map(Into::into)))
        .help("Save files of these names with the tree, which has them open or mapped: the restore \
            makes them again where they are missing; may be given again"),
    flag("sync", Switch, [Taken, Misplaced, Misplaced]).own().on_pre_dump()
        .on(|o| o.dump.sync = false)
        .help("Do not wait until the image is on the disk"),
    flag("track-time", Required, [Taken, Misplaced, Misplaced]).own().on_pre_dump()
        .with("SECONDS", |o, value| put(&mut o.track_time, number(value).map(Duration::from_secs)))
        .usual("3600")
        .help("Stop tracking after this many seconds without another dump"),
    flag("trust-image", Bare, [Misplaced, Taken, Misplaced]).own()
        .on(|o| o.trust_image = true)
        .help("Restore an image that another user than root owns or may write to, too: it says \
            what runs, and as whom"),
    flag("unix-close", Switch, [Taken, Idle, Idle]).own()
        .on(|o| o.allowed.unix_close = true)
        .help("End what leads to somebody outside the tree: connections of unix sockets come back \
            as if the other end had been closed, terminals hung up"),
    flag("until", Required, [Misplaced, Misplaced, Misplaced]).own(),
    flag("with-volume", Required, [Taken, Taken, Misplaced]).own()
        .with("VOLUME", |o, value| put(&mut o.with_volume, path(value).map(Some)))
        .help("On dump: save the mounted ext4 volume, a device or where it is mounted, with the \
            tree and of the same instant. On restore: write the volume of the image to this \
            device, and mount it where it was"),
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
