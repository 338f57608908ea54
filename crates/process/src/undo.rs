//! What a dump takes back if it fails.

/// What the dump changed on the host and takes back if it fails.
#[derive(Default)]
pub(crate) struct Undo(pub Vec<Box<dyn FnOnce()>>);

impl Drop for Undo {
    fn drop(&mut self) {
        self.0.drain(..).for_each(|undo| undo());
    }
}
