//! Whose end gives the parked threads of a process free.

use std::os::fd::BorrowedFd;

use sys::stand_in::StandIn;

use super::Injection;
use crate::{Error, Result};

impl Injection {
    /// The same for a process in another namespace of pids, `namespace`, in which this thread has
    /// no number: one that ends with it takes its place.
    ///
    /// # Errors
    /// [`Error::Kernel`]; the threads go on then.
    pub fn in_namespace(mut self, namespace: BorrowedFd<'_>) -> Result<Self> {
        let stand_in = StandIn::start(namespace);
        let doing = "cannot start a process in its namespace of pids";
        let stand_in = stand_in.map_err(|e| Error::of(self.threads[0].process.pid(), doing, e))?;
        self.owner = stand_in.number();
        self.stand_in = Some(stand_in);
        Ok(self)
    }
}
