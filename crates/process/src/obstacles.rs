//! What keeps a tree from being saved: everything of it is told at once.

use crate::{Error, Obstacle, Result};

/// The obstacles that were found so far.
#[derive(Debug, Default)]
pub(crate) struct Obstacles(Vec<Obstacle>);

impl Obstacles {
    /// Notes what `result` refuses, and gives nothing then.
    ///
    /// # Errors
    /// All that are not [`resources::Error::Unsupported`].
    pub fn note<T, E: Into<Error>>(
        &mut self,
        result: std::result::Result<T, E>,
    ) -> Result<Option<T>> {
        let error = match result {
            Ok(value) => return Ok(Some(value)),
            Err(error) => error.into(),
        };
        let Error::Resource(resources::Error::Unsupported {
            pid,
            what,
            why,
            allow,
        }) = error
        else {
            return Err(error);
        };
        let name = sys::procfs::read(format_args!("{pid}/comm")).unwrap_or_default();
        let obstacle = Obstacle {
            pid,
            name: String::from_utf8_lossy(name.trim_ascii_end()).into_owned(),
            what,
            why,
            allow,
        };
        if !self.0.contains(&obstacle) {
            self.0.push(obstacle);
        }
        Ok(None)
    }

    /// Whether nothing was found.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Refuses the tree if anything was found.
    ///
    /// # Errors
    /// [`Error::Obstacles`].
    pub fn check(&mut self) -> Result<()> {
        match std::mem::take(&mut self.0) {
            none if none.is_empty() => Ok(()),
            some => Err(Error::Obstacles(some)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn obstacles_are_sentences() {
        let mut obstacles = Obstacles::default();
        let first = || resources::Error::unsupported(0, "fd 3 (pipe:[7])");
        let second = || first().because("it is full").unless("--more");
        for error in [first(), second(), first()] {
            assert_eq!(obstacles.note(Err::<(), _>(error)).expect("noted"), None);
        }
        assert_eq!(obstacles.note(Ok::<_, Error>(5)).expect("fine"), Some(5));
        let other = obstacles.note(Err::<(), _>(Error::Gone { pid: 4 }));
        assert!(matches!(other, Err(Error::Gone { pid: 4 })));
        let Err(Error::Obstacles(all)) = obstacles.check() else {
            panic!("there are obstacles");
        };
        let told = all.iter().map(ToString::to_string).collect::<Vec<_>>();
        let want = [
            "pid 0: fd 3 (pipe:[7]) is not supported",
            "pid 0: fd 3 (pipe:[7]) is not supported: it is full (use --more to allow it)",
        ];
        assert_eq!(told, want);
        obstacles.check().expect("they were told");
    }
}
