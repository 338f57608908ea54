//! A small file with facts of this host, made again when it is of another boot, kernel or version,
//! or damaged. Without a place for it there is none.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use xxhash_rust::xxh3::xxh3_64;

/// Where they are kept: gone with the boot whose facts they are.
const FOLDER: &str = "/run/stillframe";
/// What it begins with; then come its checksum, the length of its key, its key and the facts.
const MAGIC: &[u8; 8] = b"SFhost1\n";
/// Larger than it ever is.
const BYTES_MAX: u64 = 64 << 10;

/// A cache of facts of one host.
#[derive(Debug)]
pub struct Cache {
    path: PathBuf,
    key: Vec<u8>,
}

impl Cache {
    /// The cache `name` of this boot of this kernel and this version of ours.
    #[must_use]
    pub fn of_this_host(name: &str) -> Self {
        let host = rustix::system::uname();
        // Without a boot's id, facts of another boot could be taken for this one's: keep none.
        let boot = sys::boot::id();
        let place = |_| sys::host::path(Path::new(FOLDER).join(name));
        let path = boot.map_or_else(PathBuf::new, place);
        let text = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
        let key = [
            boot.unwrap_or_default().to_owned(),
            text(host.release()),
            text(host.version()),
            env!("CARGO_PKG_VERSION").to_owned(),
        ];
        Self::at(path, &key.join("\n"))
    }

    /// A cache in the file `path` for the host that `key` names.
    #[must_use]
    pub fn at(path: PathBuf, key: &str) -> Self {
        Self {
            path,
            key: key.as_bytes().to_vec(),
        }
    }

    /// What was kept, if it is whole and of this host and only its owner, who is this user, can
    /// have written it.
    #[must_use]
    pub fn load(&self) -> Option<Vec<u8>> {
        const NOFOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
        let mut file = OpenOptions::new()
            .read(true)
            .custom_flags(NOFOLLOW)
            .open(&self.path)
            .ok()?;
        let facts = file.metadata().ok()?;
        let mine = facts.uid() == rustix::process::geteuid().as_raw();
        if !mine || !facts.is_file() || facts.mode() & 0o077 != 0 || facts.len() > BYTES_MAX {
            return None;
        }
        // With room for one byte more, one call reads it and another one sees its end.
        let mut bytes = Vec::with_capacity(facts.len() as usize + 1);
        let mut capped = (&mut file).take(BYTES_MAX);
        capped.read_to_end(&mut bytes).ok()?;
        self.open(&bytes)
    }

    fn open(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (sum, rest) = rest.split_first_chunk::<8>()?;
        if xxh3_64(rest) != u64::from_le_bytes(*sum) {
            log::debug!("{} is damaged", self.path.display());
            return None;
        }
        let (len, rest) = rest.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_le_bytes(*len)).ok()?;
        let (key, facts) = rest.split_at_checked(len)?;
        (key == self.key).then(|| facts.to_vec())
    }

    /// Keeps facts. That may fail: the next one who needs them looks again.
    pub fn store(&self, facts: &[u8]) {
        if let Err(error) = self.try_store(facts) {
            log::debug!("facts of this host are not kept: {error}");
        }
    }

    /// Forgets what was kept.
    pub fn forget(&self) {
        // There may be nothing.
        let _ = std::fs::remove_file(&self.path);
    }

    fn try_store(&self, facts: &[u8]) -> std::io::Result<()> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = self.path.parent().ok_or(std::io::ErrorKind::NotFound)?;
        if !folder.exists() {
            DirBuilder::new()
                .mode(0o700)
                .recursive(true)
                .create(folder)?;
        }
        let mut rest = u32::try_from(self.key.len())
            .unwrap_or(u32::MAX)
            .to_le_bytes()
            .to_vec();
        rest.extend(&self.key);
        rest.extend(facts);
        // Beside its name and renamed: whoever reads meanwhile sees one or the other.
        let own = std::process::id();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let part = folder.join(format!(".host-{own}-{number}"));
        let written = (|| {
            let mut file = File::options()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&part)?;
            file.write_all(&[MAGIC.as_slice(), &xxh3_64(&rest).to_le_bytes(), &rest].concat())?;
            std::fs::rename(&part, &self.path)
        })();
        if written.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        written
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn cache() -> (tempfile::TempDir, Cache) {
        let folder = tempfile::tempdir().expect("a folder");
        let cache = Cache::at(folder.path().join("new/host"), "boot\nkernel");
        (folder, cache)
    }

    #[test]
    fn facts_are_kept_for_their_owner() {
        let (_folder, cache) = cache();
        assert_eq!(cache.load(), None);
        cache.store(b"facts");
        assert_eq!(cache.load(), Some(b"facts".to_vec()));
        let mode = std::fs::metadata(&cache.path).expect("there").mode();
        assert_eq!(mode & 0o777, 0o600);
        std::fs::set_permissions(&cache.path, PermissionsExt::from_mode(0o644)).expect("mine");
        assert_eq!(cache.load(), None, "others may read what may be theirs");
        cache.forget();
        assert!(!cache.path.exists());
    }

    #[test]
    fn facts_of_another_host_are_not_used() {
        let (_folder, cache) = cache();
        cache.store(b"facts");
        let other = Cache::at(cache.path.clone(), "boot\nanother");
        assert_eq!(other.load(), None);
        other.store(b"others");
        assert_eq!(cache.load(), None);
        assert_eq!(other.load(), Some(b"others".to_vec()));
    }

    #[test]
    fn damage_is_seen_wherever_it_is() {
        let (_folder, cache) = cache();
        cache.store(b"facts");
        let whole = std::fs::read(&cache.path).expect("there");
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 0x10;
            assert_eq!(cache.open(&bytes), None, "byte {at}");
            assert_eq!(cache.open(&whole[..at]), None, "{at} bytes");
        }
        std::fs::write(&cache.path, &whole[..9]).expect("written");
        assert_eq!(cache.load(), None);
        cache.store(b"again");
        assert_eq!(cache.load(), Some(b"again".to_vec()));
    }

    #[test]
    fn writers_at_once_leave_one_whole_file() {
        let (folder, cache) = cache();
        std::thread::scope(|scope| {
            for writer in 0..4u8 {
                let cache = &cache;
                scope.spawn(move || {
                    for _ in 0..50 {
                        cache.store(&[writer; 1000]);
                        let seen = cache.load().expect("always whole");
                        assert!(seen.len() == 1000 && seen.iter().all(|byte| *byte == seen[0]));
                    }
                });
            }
        });
        let left = std::fs::read_dir(folder.path().join("new")).expect("a folder");
        assert_eq!(left.count(), 1, "parts are left");
    }

    #[test]
    fn without_a_place_nothing_is_kept() {
        let nowhere = Cache::at(PathBuf::new(), "key");
        nowhere.store(b"facts");
        assert_eq!(nowhere.load(), None);
        let below_a_file = Cache::at("/proc/version/host".into(), "key");
        below_a_file.store(b"facts");
        assert_eq!(below_a_file.load(), None);
    }
}
