//! `stillframe swrk`: serves one client of criu(8)'s RPC protocol, who passes a socket.

use clap::Args;

use crate::exit::{Failure, Status};
use crate::rpc::session;

/// Serve requests of criu's RPC protocol on an inherited socket
#[derive(Debug, Args)]
pub struct Swrk {
    /// The descriptor of the socket, of the type SOCK_SEQPACKET
    #[arg(value_name = "FD")]
    fd: i32,
}

impl Swrk {
    /// Serves the client.
    ///
    /// # Errors
    /// The descriptor is no such socket.
    pub fn run(self) -> Result<Status, Failure> {
        let failed = |source| Failure::Descriptor {
            fd: self.fd,
            option: "swrk",
            source,
        };
        let socket = sys::inherited::take(self.fd).map_err(failed)?;
        session::serve(socket, failed)
    }
}
