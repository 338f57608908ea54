//! Features of files and mounts.
use std::ffi::{CStr, CString};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use rustix::fs::{CWD, FlockOperation, MemfdFlags, Mode, OFlags, ResolveFlags, flock, openat2};

use super::Need::Sometimes;
use super::namespaces::enter_new;
use super::{Feature, Outcome, called, read, why, yes};

pub(super) static ALL: &[Feature] = &[
    Feature::here("mnt_id", Sometimes, "tell mounts of open files", mnt_id),
    Feature::here("fdinfo_lock", Sometimes, "file locks", fdinfo_lock),
    Feature::here(
        "openat2",
        Sometimes,
        "open below a directory only",
        openat2_works,
    ),
    Feature::in_child("autofs", Sometimes, "mounts of autofs", autofs),
    Feature::in_child(
        "overlayfs_maps",
        Sometimes,
        "mappings of overlay files",
        overlayfs_maps,
    ),
    Feature::in_child(
        "move_mount_set_group",
        Sometimes,
        "shared mounts",
        set_group,
    ),
    Feature::here(
        "cgroup_freezer",
        Sometimes,
        "freeze a control group",
        cgroup_freezer,
    ),
    Feature::here(
        "apparmor_stacking",
        Sometimes,
        "stacked AppArmor profiles",
        apparmor,
    ),
    Feature::here("tun", Sometimes, "TUN devices", tun),
];

fn mnt_id() -> Outcome {
    let file = File::open("/proc/self/fdinfo").map_err(|error| why("/proc/self/fdinfo", &error))?;
    if read(&format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?.contains("mnt_id:") {
        yes()
    } else {
        Err("fdinfo has no mnt_id".to_owned())
    }
}

fn fdinfo_lock() -> Outcome {
    let file = rustix::fs::memfd_create(c"probe", MemfdFlags::CLOEXEC);
    let file = file.map_err(|error| why("memfd_create", &error.into()))?;
    flock(&file, FlockOperation::LockExclusive).map_err(|error| why("flock", &error.into()))?;
    if read(&format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?.contains("lock:") {
        yes()
    } else {
        Err("fdinfo has no locks".to_owned())
    }
}

fn openat2_works() -> Outcome {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    openat2(CWD, ".", flags, Mode::empty(), ResolveFlags::BENEATH)
        .map_err(|error| why("openat2", &error.into()))?;
    yes()
}

fn apparmor() -> Outcome {
    match read("/sys/kernel/security/apparmor/features/domain/stack")?.trim() {
        "yes" => yes(),
        other => Err(format!("AppArmor says {other:?}")),
    }
}

fn tun() -> Outcome {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")
        .map_err(|error| why("/dev/net/tun", &error))?;
    yes()
}

/// Looks for the freezer of the control group that this process is in.
fn cgroup_freezer() -> Outcome {
    let groups = read("/proc/self/cgroup")?;
    let group = groups.lines().find_map(|line| line.strip_prefix("0::"));
    let group = group.ok_or("this process is in no group of the unified hierarchy")?;
    let mounts = read("/proc/self/mountinfo")?;
    let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
    let mount = mount.and_then(|line| line.split(' ').nth(4));
    let mount = mount.ok_or("the unified hierarchy is not mounted")?;
    let directory = PathBuf::from(format!("{mount}{group}"));
    if directory.join("cgroup.freeze").exists() {
        return yes();
    }
    // The root group has no freezer of its own; the kernel has one if groups below it do.
    let below = std::fs::read_dir(&directory).map_err(|error| why("the group", &error))?;
    let any = below
        .flatten()
        .any(|entry| entry.path().join("cgroup.freeze").exists());
    if any {
        yes()
    } else {
        Err(format!("{} has no cgroup.freeze", directory.display()))
    }
}

/// Gives this child a mount namespace of its own and an empty directory that vanishes with it.
fn scratch_directory() -> Result<PathBuf, String> {
    let place = [c"/tmp", c"/run", c"/mnt", c"/var"]
        .into_iter()
        .find(|place| {
            place
                .to_str()
                .is_ok_and(|place| std::path::Path::new(place).is_dir())
        });
    let place = place.ok_or("no directory to try mounts on")?;
    enter_new(libc::CLONE_NEWNS)?;
    mount(c"none", c"/", None, libc::MS_REC | libc::MS_PRIVATE, "")?;
    mount(c"none", place, Some(c"tmpfs"), 0, "")?;
    Ok(PathBuf::from(place.to_str().expect("the names are plain")))
}

/// Makes a directory and returns its name for calls.
fn directory(path: &std::path::Path) -> Result<CString, String> {
    std::fs::create_dir(path).map_err(|error| why("mkdir", &error))?;
    Ok(CString::new(path.as_os_str().as_bytes()).expect("the names are plain"))
}

fn mount(
    source: &CStr,
    target: &CStr,
    kind: Option<&CStr>,
    flags: libc::c_ulong,
    data: &str,
) -> Result<(), String> {
    let data = CString::new(data).map_err(|_| "mount options with a zero byte".to_owned())?;
    let kind = kind.map_or(std::ptr::null(), CStr::as_ptr);
    let (source, target) = (source.as_ptr(), target.as_ptr());
    // SAFETY: the four strings end with a zero byte and live during the call.
    let result = unsafe { libc::mount(source, target, kind, flags, data.as_ptr().cast()) };
    called("mount", result.into()).map(drop)
}

/// Mounts an autofs and looks whether the kernel tells the pipe that it answers on.
fn autofs() -> Outcome {
    let place = directory(&scratch_directory()?.join("autofs"))?;
    let (_reader, writer) = rustix::pipe::pipe().map_err(|error| why("pipe", &error.into()))?;
    let group = rustix::process::getpgrp().as_raw_nonzero();
    let options = format!(
        "fd={},pgrp={group},minproto=5,maxproto=5,direct",
        writer.as_raw_fd()
    );
    mount(c"none", &place, Some(c"autofs"), 0, &options)?;
    if read("/proc/self/mountinfo")?.contains("pipe_ino=") {
        yes()
    } else {
        Err("mountinfo does not tell the pipe of an autofs".to_owned())
    }
}

/// Maps a file of an overlay and compares what the list of mappings says with the file itself.
fn overlayfs_maps() -> Outcome {
    let place = scratch_directory()?;
    for layer in ["lower", "upper", "work"] {
        directory(&place.join(layer))?;
    }
    let merged = directory(&place.join("merged"))?;
    let layer = |name: &str| place.join(name).display().to_string();
    let (lower, upper, work) = (layer("lower"), layer("upper"), layer("work"));
    std::fs::write(place.join("lower/file"), "text").map_err(|error| why("write", &error))?;
    let options = format!("lowerdir={lower},upperdir={upper},workdir={work}");
    mount(c"none", &merged, Some(c"overlay"), 0, &options)?;
    let file = File::open(place.join("merged/file")).map_err(|error| why("open", &error))?;
    let status = file.metadata().map_err(|error| why("fstat", &error))?;
    let (flags, hint) = (rustix::mm::MapFlags::PRIVATE, std::ptr::null_mut());
    // SAFETY: the kernel chooses an address where nothing is mapped; nothing reads there.
    let map = unsafe { rustix::mm::mmap(hint, 4096, rustix::mm::ProtFlags::READ, flags, &file, 0) };
    let map = map.map_err(|error| why("mmap", &error.into()))?;
    let start = format!("{:x}-", map.addr());
    let device = status.dev();
    let device = format!(
        "{:02x}:{:02x}",
        rustix::fs::major(device),
        rustix::fs::minor(device)
    );
    let maps = read("/proc/self/maps")?;
    let line = maps.lines().find(|line| line.starts_with(&start));
    let line = line.ok_or("the mapping is not listed")?;
    if line.split(' ').nth(3) == Some(&device) {
        yes()
    } else {
        Err("the list of mappings tells another device than the file".to_owned())
    }
}

/// Puts one mount into the peer group of another.
fn set_group() -> Outcome {
    const MOVE_MOUNT_SET_GROUP: libc::c_uint = libc::MOVE_MOUNT_SET_GROUP;
    let place = scratch_directory()?;
    let first = directory(&place.join("first"))?;
    let second = directory(&place.join("second"))?;
    mount(c"none", &first, Some(c"tmpfs"), 0, "")?;
    mount(c"none", &first, None, libc::MS_SHARED, "")?;
    mount(&first, &second, None, libc::MS_BIND, "")?;
    mount(c"none", &second, None, libc::MS_PRIVATE, "")?;
    let (here, from, to) = (libc::AT_FDCWD, first.as_ptr(), second.as_ptr());
    let flags = MOVE_MOUNT_SET_GROUP;
    // SAFETY: both names end with a zero byte and live during the call.
    let result = unsafe { libc::syscall(libc::SYS_move_mount, here, from, here, to, flags) };
    called("move_mount(MOVE_MOUNT_SET_GROUP)", result)?;
    yes()
}
