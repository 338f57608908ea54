//! criu(8)'s RPC protocol, by which runc, crun and podman have containers saved and brought back.
//!
//! A client passes a socket to `stillframe swrk`, or connects to `stillframe service`. It sends
//! requests, one a packet ([`messages`]). The options of a request become the words of a command
//! line ([`options`]), so the command line's table says what is taken and refused. Configuration
//! files count as there: the file that the request names overrides the request, and may be missing.
//! The work is that of the commands. The client hears of its stages ([`client`]) and is answered
//! ([`session`]).
//!
//! A field that this version does not know is refused by its number where it asks for something
//! ([`fields`]).
//!
//! A client that goes away stops a dump or a restore at its next stage: the tree goes on, or there
//! is none. The last stage of a dump comes before the tree is killed.

mod client;
mod connection;
mod fields;
mod files;
mod messages;
mod notes;
mod options;
mod refusal;
mod service;
mod session;
mod swrk;

pub use self::service::Service;
pub use self::swrk::Swrk;

/// The words of `--version` where the program is called `criu`: clients read the first line.
pub const VERSION_LINE: &str = "Version: 4.2\n";
