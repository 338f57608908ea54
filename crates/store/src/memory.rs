//! A store in memory, for tests and for images that never leave a process.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Claim, ClaimGuard, Error, NewObject, Object, Result, Store, check_name};

type Objects = Arc<Mutex<BTreeMap<String, Arc<Vec<u8>>>>>;

/// A store in memory; clones share the objects.
#[derive(Clone, Default)]
pub struct Memory {
    objects: Objects,
    claimed: Arc<AtomicBool>,
    beside: Arc<Mutex<BTreeMap<String, Memory>>>,
}

const PLACE: &str = "memory";

/// Takes the lock; a thread that panicked while it held it left whole values behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Memory {
    /// Makes `other` what [`Store::beside`] finds at `path`.
    pub fn put_beside(&self, path: &str, other: &Self) {
        lock(&self.beside).insert(path.into(), other.clone());
    }

    fn missing(name: &str) -> Error {
        Error::Missing {
            name: name.into(),
            store: PLACE.into(),
        }
    }
}

impl Store for Memory {
    fn claim(&self) -> Result<Claim> {
        if self.claimed.swap(true, Ordering::Acquire) {
            return Err(Error::Busy {
                store: PLACE.into(),
            });
        }
        let guard = ClaimGuard(Arc::clone(&self.claimed));
        Ok(Claim {
            names: self.list()?,
            exclusive: true,
            _guard: Box::new(guard),
        })
    }

    fn create(&self, name: &str) -> Result<Box<dyn NewObject>> {
        check_name(name)?;
        Ok(Box::new(NewBuffer {
            name: name.into(),
            bytes: Mutex::default(),
            objects: Arc::clone(&self.objects),
        }))
    }

    fn open(&self, name: &str) -> Result<Box<dyn Object>> {
        check_name(name)?;
        let bytes = lock(&self.objects)
            .get(name)
            .cloned()
            .ok_or_else(|| Self::missing(name))?;
        Ok(Box::new(Buffer {
            name: name.into(),
            bytes,
        }))
    }

    fn list(&self) -> Result<Vec<String>> {
        Ok(lock(&self.objects).keys().cloned().collect())
    }

    fn remove(&self, name: &str) -> Result<()> {
        check_name(name)?;
        lock(&self.objects)
            .remove(name)
            .map(drop)
            .ok_or_else(|| Self::missing(name))
    }

    fn free(&self, name: &str, parts_bytes: &[Range<u64>]) -> Result<u64> {
        check_name(name)?;
        let mut objects = lock(&self.objects);
        let object = objects.get_mut(name).ok_or_else(|| Self::missing(name))?;
        Ok(clear(Arc::make_mut(object).as_mut_slice(), parts_bytes))
    }

    fn beside(&self, path: &str) -> Result<Arc<dyn Store>> {
        let other = lock(&self.beside).get(path).cloned();
        let other = other.ok_or_else(|| Error::System {
            action: "open",
            name: path.into(),
            store: PLACE.into(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        Ok(Arc::new(other))
    }

    fn handle(&self) -> Arc<dyn Store> {
        Arc::new(self.clone())
    }

    fn place(&self) -> String {
        PLACE.into()
    }
}

struct NewBuffer {
    name: String,
    bytes: Mutex<Vec<u8>>,
    objects: Objects,
}

impl NewBuffer {
    fn too_large(&self) -> Error {
        Error::System {
            action: "write",
            name: self.name.clone(),
            store: PLACE.into(),
            source: std::io::ErrorKind::OutOfMemory.into(),
        }
    }
}

/// Makes parts of an object zero, as far as it has them; tells how many bytes those are.
fn clear(object: &mut [u8], parts_bytes: &[Range<u64>]) -> u64 {
    let mut cleared_bytes = 0;
    for part in parts_bytes {
        let end = part.end.min(object.len() as u64);
        if part.start < end {
            object[part.start as usize..end as usize].fill(0);
            cleared_bytes += end - part.start;
        }
    }
    cleared_bytes
}

/// Fills all of `bytes` from `offset_bytes` of the object called `name`.
fn read(name: &str, object: &[u8], bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
    let range = usize::try_from(offset_bytes)
        .ok()
        .and_then(|start| Some(start..start.checked_add(bytes.len())?));
    let source = range
        .and_then(|range| object.get(range))
        .ok_or_else(|| Error::Short {
            name: name.into(),
            end_bytes: offset_bytes.saturating_add(bytes.len() as u64),
            len_bytes: object.len() as u64,
        })?;
    bytes.copy_from_slice(source);
    Ok(())
}

impl NewObject for NewBuffer {
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let start = usize::try_from(offset_bytes).map_err(|_| self.too_large())?;
        let end = start
            .checked_add(bytes.len())
            .ok_or_else(|| self.too_large())?;
        let mut buffer = lock(&self.bytes);
        if end > buffer.len() {
            let more = end - buffer.len();
            buffer.try_reserve(more).map_err(|_| self.too_large())?;
            buffer.resize(end, 0);
        }
        buffer[start..end].copy_from_slice(bytes);
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        read(&self.name, &lock(&self.bytes), bytes, offset_bytes)
    }

    fn reserve(&self, len_bytes: u64) -> Result<()> {
        let len = usize::try_from(len_bytes).map_err(|_| self.too_large())?;
        let mut buffer = lock(&self.bytes);
        let more = len.saturating_sub(buffer.len());
        buffer.try_reserve(more).map_err(|_| self.too_large())
    }

    fn free(&self, parts_bytes: &[Range<u64>]) -> Result<()> {
        clear(&mut lock(&self.bytes), parts_bytes);
        Ok(())
    }

    fn cut(&self, len_bytes: u64) -> Result<()> {
        let len = usize::try_from(len_bytes).map_err(|_| self.too_large())?;
        lock(&self.bytes).truncate(len);
        Ok(())
    }

    fn commit(self: Box<Self>, _durable: bool) -> Result<()> {
        let bytes = std::mem::take(&mut *lock(&self.bytes));
        lock(&self.objects).insert(self.name.clone(), Arc::new(bytes));
        Ok(())
    }
}

struct Buffer {
    name: String,
    bytes: Arc<Vec<u8>>,
}

impl Object for Buffer {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        read(&self.name, &self.bytes, bytes, offset_bytes)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conforms() {
        crate::conformance::suite(&|| Box::new(Memory::default()));
    }
}
