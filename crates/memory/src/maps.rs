//! The page maps of a tree's tasks, each opened once.
use std::collections::HashMap;
use std::io;
use std::rc::Rc;

use sys::pagemap::Pagemap;
use sys::process::Process;

/// Page maps (/proc/PID/pagemap) that are open.
#[derive(Debug, Default)]
pub struct PageMaps(HashMap<i32, Rc<Pagemap>>);

impl PageMaps {
    /// How many are kept open; of a larger tree, some are opened again.
    const MOST: usize = 64;

    /// The page map of a process.
    ///
    /// # Errors
    /// Those of [`Pagemap::open`].
    pub fn of(&mut self, process: &Process) -> io::Result<Rc<Pagemap>> {
        if let Some(map) = self.0.get(&process.pid()) {
            return Ok(map.clone());
        }
        let map = Rc::new(Pagemap::open(process)?);
        if self.0.len() >= Self::MOST {
            self.close();
        }
        self.0.insert(process.pid(), map.clone());
        Ok(map)
    }

    fn close(&mut self) {
        let maps = self.0.drain().map(|(_, map)| map);
        sys::close::all(maps.filter_map(Rc::into_inner).map(Into::into));
    }
}

impl Drop for PageMaps {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_kept_and_not_too_many_of_them() {
        let own = Process::own();
        let mut maps = PageMaps::default();
        let first = maps.of(&own).expect("the own page map");
        assert!(Rc::ptr_eq(&first, &maps.of(&own).expect("the same")));
        for pid in 0..i32::try_from(PageMaps::MOST).expect("small") {
            maps.0.entry(-pid).or_insert_with(|| first.clone());
        }
        maps.0.remove(&own.pid());
        maps.of(&own).expect("opened again");
        assert_eq!(maps.0.len(), 1);
    }
}
