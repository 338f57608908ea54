//! System V shared memory: shmget(2), shmctl(2), shmat(2).

use std::io;
use std::os::fd::OwnedFd;

/// What the kernel tells of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The key by which others find it; 0 (`IPC_PRIVATE`) for none.
    pub key: i32,
    /// Its owner.
    pub uid: u32,
    /// Its owner's group.
    pub gid: u32,
    /// The user that made it.
    pub maker_uid: u32,
    /// The group that made it.
    pub maker_gid: u32,
    /// Permissions.
    pub mode: u32,
    /// Whether it goes when the last one detaches it.
    pub doomed: bool,
    /// The size that was asked for, in bytes.
    pub bytes: u64,
    /// How often it is attached, by all processes together.
    pub attached: u64,
}

/// A segment that this process has attached. Dropping it detaches it.
#[derive(Debug)]
pub struct Attached {
    start: *mut libc::c_void,
    bytes: u64,
}

impl Drop for Attached {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and goes with it.
        unsafe { libc::shmdt(self.start) };
    }
}

impl Attached {
    /// Attaches a segment for reading and writing.
    ///
    /// # Errors
    /// `EINVAL` and `EIDRM` where there is none, `EACCES`, `ENOMEM`.
    pub fn new(id: i32) -> io::Result<Self> {
        let bytes = stat(id)?.bytes;
        // SAFETY: the kernel chooses a free place: nothing that is in use is replaced.
        let start = unsafe { libc::shmat(id, std::ptr::null(), 0) };
        if start.addr() == usize::MAX {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start, bytes })
    }

    /// Where it is.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Unmaps a part of it, or changes its protection (`PROT_` bits): `part` counts from its first
    /// byte, in whole pages.
    ///
    /// # Errors
    /// `EINVAL` for parts of pages, `ERANGE` for what is not in it.
    pub fn change(&self, part: std::ops::Range<u64>, protection: Option<i32>) -> io::Result<()> {
        if part.start > part.end || part.end > self.bytes {
            return Err(io::Error::from_raw_os_error(libc::ERANGE));
        }
        let len = usize::try_from(part.end - part.start).expect("less than the whole");
        let start = self.start.wrapping_byte_add(part.start as usize);
        let done = match protection {
            // SAFETY: it is a part of the mapping, to which nothing refers.
            None => unsafe { libc::munmap(start, len) },
            // SAFETY: as above.
            Some(protection) => unsafe { libc::mprotect(start, len, protection) },
        };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The segment as a file, which may be read and written beyond the time that it is attached.
    /// Needs `CAP_CHECKPOINT_RESTORE` or `CAP_SYS_ADMIN`. `page_bytes`: the size of its pages.
    ///
    /// # Errors
    /// `EPERM` without the privilege, `ENOENT` where it has other pages.
    pub fn file(&self, page_bytes: u64) -> io::Result<OwnedFd> {
        let start = self.start.addr() as u64;
        let end = start + self.bytes.next_multiple_of(page_bytes);
        let path = crate::procfs::path(format_args!("self/map_files/{start:x}-{end:x}"));
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)?;
        Ok(file.into())
    }
}

/// Tells of a segment of this process's IPC namespace.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is none, `EACCES`.
pub fn stat(id: i32) -> io::Result<Segment> {
    let raw = raw(id)?;
    let mode = u32::from(raw.shm_perm.mode);
    Ok(Segment {
        key: raw.shm_perm.__key,
        uid: raw.shm_perm.uid,
        gid: raw.shm_perm.gid,
        maker_uid: raw.shm_perm.cuid,
        maker_gid: raw.shm_perm.cgid,
        mode: mode & 0o777,
        doomed: mode & SHM_DEST != 0,
        bytes: raw.shm_segsz as u64,
        attached: raw.shm_nattch,
    })
}

/// `SHM_DEST`, which libc does not have.
const SHM_DEST: u32 = 0o1000;

fn raw(id: i32) -> io::Result<libc::shmid_ds> {
    // SAFETY: the structure is plain numbers, for which zeros are valid.
    let mut raw: libc::shmid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel fills the structure, which lives through the call.
    let done = unsafe { libc::shmctl(id, libc::IPC_STAT, &raw mut raw) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(raw)
}

/// Makes a segment and gives its id. `huge_page_bytes`: the size of its pages, a power of two,
/// where they are huge pages.
///
/// # Errors
/// `EEXIST` when the key is taken, `EINVAL` for a size out of bounds, `ENOSPC`, `ENOMEM` (also
/// where there are too few huge pages), `EPERM`.
pub fn create(key: i32, bytes: u64, mode: u32, huge_page_bytes: Option<u64>) -> io::Result<i32> {
    let flags = (mode & 0o777).cast_signed();
    make(key, bytes, flags, huge_page_bytes)
}

/// The same for a segment of small pages for which the kernel promises no memory
/// (`SHM_NORESERVE`), so that it may be larger than what is there.
///
/// # Errors
/// Those of [`create`].
pub fn create_unreserved(key: i32, bytes: u64, mode: u32) -> io::Result<i32> {
    let flags = libc::SHM_NORESERVE | (mode & 0o777).cast_signed();
    make(key, bytes, flags, None)
}

fn make(key: i32, bytes: u64, flags: i32, huge_page_bytes: Option<u64>) -> io::Result<i32> {
    /// Where shmget(2) has the base-2 logarithm of the size of a page.
    const SHM_HUGE_SHIFT: u32 = 26;
    let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut flags = libc::IPC_CREAT | libc::IPC_EXCL | flags;
    if let Some(bytes) = huge_page_bytes {
        let size = bytes.trailing_zeros() << SHM_HUGE_SHIFT;
        flags |= libc::SHM_HUGETLB | size.cast_signed();
    }
    // SAFETY: the call takes no pointers.
    let id = unsafe { libc::shmget(key, bytes, flags) };
    if id < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(id)
}

/// Gives a segment its owner and permissions.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is none, `EPERM`.
pub fn give(id: i32, (uid, gid): (u32, u32), mode: u32) -> io::Result<()> {
    let mut raw = raw(id)?;
    raw.shm_perm.uid = uid;
    raw.shm_perm.gid = gid;
    raw.shm_perm.mode = (mode & 0o777) as u16;
    // SAFETY: the kernel reads the structure, which lives through the call.
    let done = unsafe { libc::shmctl(id, libc::IPC_SET, &raw mut raw) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Removes a segment as soon as nobody has it attached.
///
/// # Errors
/// `EINVAL` and `EIDRM` where there is none, `EPERM`.
pub fn remove(id: i32) -> io::Result<()> {
    // SAFETY: the command takes no structure.
    let done = unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_segment_is_made_attached_and_removed() {
        const IPC_PRIVATE: i32 = libc::IPC_PRIVATE;
        let id = create(IPC_PRIVATE, 5000, 0o640, None).expect("a segment");
        let attached = Attached::new(id).expect("attached");
        give(id, (1, 2), 0o600).expect("root may");
        remove(id).expect("ours");
        let wanted = Segment {
            key: IPC_PRIVATE,
            uid: 1,
            gid: 2,
            maker_uid: rustix::process::geteuid().as_raw(),
            maker_gid: rustix::process::getegid().as_raw(),
            mode: 0o600,
            doomed: true,
            bytes: 5000,
            attached: 1,
        };
        assert_eq!(stat(id).expect("still attached"), wanted);
        let file = File::from(attached.file(4096).expect("root may"));
        let changed = |part, to| {
            attached
                .change(part, to)
                .map_err(|error| error.raw_os_error())
        };
        assert_eq!(changed(0..8192, None), Err(Some(libc::ERANGE)));
        changed(0..4096, Some(libc::PROT_NONE)).expect("protected");
        changed(0..4096, None).expect("unmapped");
        file.write_all_at(b"text", 4096).expect("write");
        drop(attached);
        assert!(stat(id).is_err());
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, 4096).expect("read");
        assert_eq!(&bytes, b"text");
    }
}
