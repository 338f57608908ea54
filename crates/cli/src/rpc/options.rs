//! The options of a request in the words of the command line, which its table understands.
//!
//! An option that is refused on the command line is refused here, too, under the same name. Fields
//! that concern the connection alone become no word: directories, the log, notifications, and the
//! configuration file. `orphan_pts_master` only allows for what a dump refuses by name where it
//! finds it. `pidfd_store_sk` keeps pids between rounds of pre-dumps, which the tracker of the
//! memory does.
//!
//! A dump saves pipes whose other end is outside of the tree without a word of the client, as
//! criu(8) does: runtimes note the pipes of a container and hand them back. A restore without one
//! of them is refused.

use std::ffi::OsString;
use std::fmt::Display;
use std::path::Path;

use crate::command_line::Command;
use crate::rpc::messages::{MountMap, RequestOptions};

/// The name of the log where a client names none.
const DEFAULT_LOG: &str = "criu.log";

/// `CLONE_NEWNET`, the only kind of namespace that can be kept empty.
const NEW_NET: u32 = 0x4000_0000;

/// Places that descriptors of the client lead to.
pub struct Places<'a> {
    /// The directory of the image.
    pub images_dir: &'a Path,
    /// The directory of the log and of the statistics.
    pub work_dir: &'a Path,
}

/// Words of a command line.
struct Line(Vec<OsString>);

impl Line {
    /// Adds an option without an argument, where the client has asked for it.
    fn switch(&mut self, name: &str, given: Option<bool>) {
        if given == Some(true) {
            self.0.push(format!("--{name}").into());
        }
    }

    /// Adds an option with its argument, where the client has given one.
    fn value(&mut self, name: &str, value: Option<impl Display>) {
        if let Some(value) = value {
            self.0.push(format!("--{name}={value}").into());
        }
    }

    /// Adds an option once for each of its arguments.
    fn values(&mut self, name: &str, values: impl IntoIterator<Item = impl Display>) {
        for value in values {
            self.value(name, Some(value));
        }
    }

    fn path(&mut self, name: &str, path: &Path) {
        let mut word = OsString::from(format!("--{name}="));
        word.push(path);
        self.0.push(word);
    }
}

/// Translates the options of a request for `command`.
///
/// # Errors
/// The field that has no counterpart, by name.
pub fn words(
    command: Command,
    options: &RequestOptions,
    places: &Places<'_>,
) -> Result<Vec<OsString>, String> {
    let name = match command {
        Command::PreDump => "pre-dump",
        Command::Restore => "restore",
        _ => "dump",
    };
    let mut line = Line(vec![name.into()]);
    line.path("images-dir", places.images_dir);
    line.path("work-dir", places.work_dir);
    add_general(&mut line, command, options)?;
    add_resources(&mut line, command, options);
    add_memory(&mut line, options)?;
    add_namespaces(&mut line, options)?;
    add_cgroups(&mut line, options)?;
    add_network(&mut line, options)?;
    Ok(line.0)
}

/// Returns the name of the log file, which stands in the work directory.
///
/// # Errors
/// A name that leads elsewhere.
pub fn log_name(options: &RequestOptions) -> Result<&str, String> {
    if options.log_to_stderr == Some(true) && options.log_file.is_none() {
        return Ok("/dev/stderr");
    }
    match options.log_file.as_deref().unwrap_or(DEFAULT_LOG) {
        name @ ("" | "-" | "." | "..") => Err(format!("log_file: {name:?} is not a file name")),
        name if name.contains('/') => Err(format!("log_file: {name:?} has a directory")),
        name => Ok(name),
    }
}

/// What becomes of the tree, and what is said meanwhile.
fn add_general(line: &mut Line, command: Command, options: &RequestOptions) -> Result<(), String> {
    if let Some(number) = options.status_fd {
        return Err(format!("status_fd: {number} is not supported"));
    }
    if !options.exec_cmd.is_empty() {
        return Err(format!(
            "exec_cmd: {:?} is not supported",
            options.exec_cmd[0]
        ));
    }
    if command == Command::Restore {
        line.0.push("--restore-detached".into());
    } else if options.pid.unwrap_or_default() == 0 {
        return Err("pid: 0 is the client itself, whose dump is not supported".to_owned());
    }
    line.value("tree", options.pid.filter(|_| command != Command::Restore));
    line.value("log-file", Some(log_name(options)?));
    line.value("verbosity", options.log_level);
    line.switch("restore-sibling", options.rst_sibling);
    line.switch("leave-running", options.leave_running);
    line.switch("leave-stopped", options.leave_stopped);
    line.switch("shell-job", options.shell_job);
    line.switch("display-stats", options.display_stats);
    line.switch("unprivileged", options.unprivileged);
    line.value("timeout", options.timeout);
    line.value("lsm-profile", options.lsm_profile.as_deref());
    line.value("lsm-mount-context", options.lsm_mount_context.as_deref());
    Ok(())
}

/// What the tree has open.
fn add_resources(line: &mut Line, command: Command, options: &RequestOptions) {
    line.switch("file-locks", options.file_locks);
    line.switch("link-remap", options.link_remap);
    line.switch("evasive-devices", options.evasive_devices);
    line.switch("skip-file-rwx-check", options.skip_file_rwx_check);
    line.value("ghost-limit", options.ghost_limit);
    line.switch("force-irmap", options.force_irmap);
    line.values("irmap-scan-path", &options.irmap_scan_paths);
    if command == Command::Dump {
        line.value("external", Some("pipe"));
    }
    line.values("external", &options.external);
    let inherited = options.inherit_fd.iter();
    line.values(
        "inherit-fd",
        inherited.map(|one| format!("fd[{}]:{}", one.fd, one.key)),
    );
    line.switch("ext-unix-sk", options.ext_unix_sk);
    line.values(
        "ext-unix-sk",
        options.unix_sk_ino.iter().map(|socket| socket.inode),
    );
}

/// Memory, and the processor that the tree needs.
fn add_memory(line: &mut Line, options: &RequestOptions) -> Result<(), String> {
    line.value("prev-images-dir", options.parent_img.as_deref());
    line.switch("track-mem", options.track_mem);
    line.switch("auto-dedup", options.auto_dedup);
    line.switch("lazy-pages", options.lazy_pages);
    line.switch("page-server", options.page_server.is_some().then_some(true));
    line.value("tls-cacert", options.tls_cacert.as_deref());
    line.value("tls-cacrl", options.tls_cacrl.as_deref());
    line.value("tls-cert", options.tls_cert.as_deref());
    line.value("tls-key", options.tls_key.as_deref());
    line.switch("tls", options.tls);
    line.switch("tls-no-cn-verify", options.tls_no_cn_verify);
    let mode = options.pre_dump_mode.map(|mode| match mode {
        1 => Ok("splice"),
        2 => Ok("read"),
        other => Err(format!("pre_dump_mode: {other} is not known")),
    });
    line.value("pre-dump-mode", mode.transpose()?);
    line.value("cpu-cap", options.cpu_cap.map(cpu_cap).transpose()?);
    Ok(())
}

/// The names of the capabilities that the bits stand for.
///
/// # Errors
/// A bit without a name.
pub fn cpu_cap(bits: u32) -> Result<String, String> {
    const NAMES: [(u32, &str); 3] = [(1, "fpu"), (2, "cpu"), (4, "ins")];
    if bits == u32::MAX {
        return Ok("all".to_owned());
    }
    let known = NAMES.iter().fold(0, |all, (bit, _)| all | bit);
    if bits & !known != 0 {
        return Err(format!("cpu_cap: {bits:#x} is not known"));
    }
    let names = NAMES.iter().filter(|(bit, _)| bits & bit != 0);
    let names = names.map(|(_, name)| *name).collect::<Vec<_>>();
    Ok(if names.is_empty() {
        "none".to_owned()
    } else {
        names.join(",")
    })
}

/// Mounts and other namespaces.
fn add_namespaces(line: &mut Line, options: &RequestOptions) -> Result<(), String> {
    line.value("root", options.root.as_deref());
    for MountMap { key, value } in &options.ext_mnt {
        if key.is_empty() || key.contains(']') {
            return Err(format!("ext_mnt: {key:?} cannot be a key"));
        }
        line.value("external", Some(format!("mnt[{key}]:{value}")));
    }
    let auto = options.auto_ext_mnt.filter(|auto| *auto);
    line.value("external", auto.map(|_| "mnt[]"));
    line.switch("enable-external-sharing", options.ext_sharing);
    line.switch("enable-external-masters", options.ext_masters);
    line.values("skip-mnt", &options.skip_mnt);
    line.values("enable-fs", &options.enable_fs);
    line.switch("mntns-compat-mode", options.mntns_compat_mode);
    line.switch("weak-sysctls", options.weak_sysctls);
    let empty = match options.empty_ns.unwrap_or_default() {
        0 => None,
        NEW_NET => Some("net"),
        other => return Err(format!("empty_ns: {other:#x} has other kinds than net")),
    };
    line.value("empty-ns", empty);
    let joined = options.join_ns.iter();
    line.values(
        "join-ns",
        joined.map(|one| format!("{}:{}", one.kind, one.file)),
    );
    Ok(())
}

/// Control groups.
fn add_cgroups(line: &mut Line, options: &RequestOptions) -> Result<(), String> {
    let mode = match options.manage_cgroups_mode {
        None => None,
        Some(0) => Some("ignore"),
        Some(1) => Some("none"),
        Some(2) => Some("props"),
        Some(3 | 6) => Some("soft"),
        Some(4) => Some("full"),
        Some(5) => Some("strict"),
        Some(other) => return Err(format!("manage_cgroups_mode: {other} is not known")),
    };
    match mode {
        Some(_) => line.value("manage-cgroups", mode),
        None => line.switch("manage-cgroups", options.manage_cgroups),
    }
    let roots = options.cg_root.iter().map(|root| match &root.controller {
        Some(controller) => format!("{controller}:{}", root.path),
        None => root.path.clone(),
    });
    line.values("cgroup-root", roots);
    line.value("cgroup-yard", options.cgroup_yard.as_deref());
    line.value("cgroup-props", options.cgroup_props.as_deref());
    line.value("cgroup-props-file", options.cgroup_props_file.as_deref());
    line.values("cgroup-dump-controller", &options.cgroup_dump_controller);
    line.value("freeze-cgroup", options.freeze_cgroup.as_deref());
    Ok(())
}

/// Connections and network interfaces.
fn add_network(line: &mut Line, options: &RequestOptions) -> Result<(), String> {
    line.switch("tcp-established", options.tcp_established);
    line.switch("tcp-close", options.tcp_close);
    line.switch("skip-in-flight", options.tcp_skip_in_flight);
    let method = options.network_lock.map(|method| match method {
        1 => Ok("iptables"),
        2 => Ok("nftables"),
        3 => Ok("skip"),
        other => Err(format!("network_lock: {other} is not known")),
    });
    line.value("network-lock", method.transpose()?);
    let pairs = options.veths.iter();
    line.values(
        "veth-pair",
        pairs.map(|pair| format!("{}={}", pair.inside, pair.outside)),
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::rpc::messages::{CgroupRoot, InheritedFd};

    fn translated(command: Command, options: &RequestOptions) -> Result<String, String> {
        let places = Places {
            images_dir: "/images".as_ref(),
            work_dir: "/work".as_ref(),
        };
        let words = words(command, options, &places)?;
        let words = words.iter().map(|word| word.to_str().expect("plain"));
        Ok(words.collect::<Vec<_>>().join(" "))
    }

    fn mount(key: &str, value: &str) -> MountMap {
        let (key, value) = (key.to_owned(), value.to_owned());
        MountMap { key, value }
    }

    #[test]
    fn what_runc_asks_for_at_a_dump_is_a_line() {
        let options = RequestOptions {
            images_dir_fd: Some(7),
            pid: Some(73),
            leave_running: Some(false),
            log_level: Some(4),
            log_file: Some("dump.log".to_owned()),
            notify_scripts: Some(true),
            root: Some("/b/rootfs".to_owned()),
            work_dir_fd: Some(8),
            ext_mnt: vec![mount("/etc/bound", "/etc/bound")],
            manage_cgroups: Some(true),
            empty_ns: Some(NEW_NET),
            freeze_cgroup: Some("/sys/fs/cgroup/x".to_owned()),
            orphan_pts_master: Some(true),
            config_file: Some("/etc/criu/runc.conf".to_owned()),
            ..Default::default()
        };
        let line = translated(Command::Dump, &options).unwrap();
        assert_eq!(
            line,
            "dump --images-dir=/images --work-dir=/work --tree=73 --log-file=dump.log \
             --verbosity=4 --external=pipe --root=/b/rootfs --external=mnt[/etc/bound]:/etc/bound --empty-ns=net \
             --manage-cgroups --freeze-cgroup=/sys/fs/cgroup/x"
        );
    }

    #[test]
    fn what_crun_asks_for_at_a_restore_is_a_line() {
        let options = RequestOptions {
            rst_sibling: Some(true),
            manage_cgroups: Some(true),
            manage_cgroups_mode: Some(3),
            cg_root: vec![CgroupRoot {
                controller: None,
                path: "/x".to_owned(),
            }],
            inherit_fd: vec![InheritedFd {
                key: "pipe:[5]".to_owned(),
                fd: 1,
            }],
            tcp_close: Some(false),
            ..Default::default()
        };
        let line = translated(Command::Restore, &options).unwrap();
        assert_eq!(
            line,
            "restore --images-dir=/images --work-dir=/work --restore-detached \
             --log-file=criu.log --restore-sibling --inherit-fd=fd[1]:pipe:[5] \
             --manage-cgroups=soft --cgroup-root=/x"
        );
    }

    /// The options that say nothing but in this field, in each form that it may have.
    fn with_field(number: u32) -> RequestOptions {
        let tag = |wire: u32| {
            let mut bytes = Vec::new();
            prost::encoding::encode_varint(u64::from(number << 3 | wire), &mut bytes);
            bytes
        };
        // A number; a text; a message with two fields.
        let message = b"\x06\x0a\x01k\x12\x01v";
        let mapped = b"\x05\x0a\x01k\x10\x01";
        let socket = b"\x02\x08\x05";
        let forms = [
            [&tag(0)[..], &[1]].concat(),
            [&tag(2)[..], message].concat(),
            [&tag(2)[..], mapped].concat(),
            [&tag(2)[..], socket].concat(),
            [&tag(2)[..], b"\x01x"].concat(),
        ];
        let mut decoded = forms.iter().map(|form| RequestOptions::decode(&**form));
        let fits = |options: &RequestOptions| *options != RequestOptions::default();
        let found = decoded.find_map(|decoded| decoded.ok().filter(fits));
        found.unwrap_or_else(|| panic!("no form of field {number} is understood"))
    }

    #[test]
    fn no_field_is_forgotten() {
        // Directories, notifications, the configuration file, and what needs no word.
        const OF_CONNECTION: [u32; 7] = [1, 12, 17, 50, 51, 62, 68];
        const LAST: u32 = 71;
        // There is no field 40.
        for number in (1..=LAST).filter(|number| *number != 40) {
            let given = with_field(number);
            let command = if number == 2 || number == 71 {
                Command::Dump
            } else {
                Command::Restore
            };
            let with = |options: &RequestOptions| {
                let mut options = options.clone();
                options.pid = options.pid.or(Some(7).filter(|_| number != 2));
                translated(command, &options)
            };
            let without = with(&RequestOptions::default());
            let is_said = with(&given) != without;
            assert_eq!(is_said, !OF_CONNECTION.contains(&number), "field {number}");
        }
    }

    #[test]
    fn what_has_no_word_is_refused_by_name() {
        type Change = fn(&mut RequestOptions);
        let cases: [(&str, Change); 12] = [
            ("pid", |options| options.pid = None),
            ("status_fd", |options| options.status_fd = Some(3)),
            ("exec_cmd", |options| options.exec_cmd.push("sh".into())),
            ("log_file", |options| options.log_file = Some("a/b".into())),
            ("log_file", |options| options.log_file = Some("..".into())),
            ("log_file", |options| options.log_file = Some("-".into())),
            ("empty_ns", |options| options.empty_ns = Some(NEW_NET | 1)),
            ("cpu_cap", |options| options.cpu_cap = Some(16)),
            ("network_lock", |options| options.network_lock = Some(4)),
            ("pre_dump_mode", |options| options.pre_dump_mode = Some(3)),
            ("ext_mnt", |options| options.ext_mnt.push(mount("a]:", "b"))),
            ("manage_cgroups_mode", |options| {
                options.manage_cgroups_mode = Some(9);
            }),
        ];
        for (name, change) in cases {
            let mut options = RequestOptions {
                pid: Some(7),
                ..Default::default()
            };
            assert!(translated(Command::Dump, &options).is_ok());
            change(&mut options);
            let error = translated(Command::Dump, &options).expect_err(name);
            assert!(error.starts_with(&format!("{name}: ")), "{error}");
        }
    }

    #[test]
    fn bits_of_capabilities_have_names() {
        for (bits, names) in [(0, "none"), (1, "fpu"), (5, "fpu,ins"), (7, "fpu,cpu,ins")] {
            assert_eq!(cpu_cap(bits).as_deref(), Ok(names));
        }
        assert_eq!(cpu_cap(u32::MAX).as_deref(), Ok("all"));
    }
}
