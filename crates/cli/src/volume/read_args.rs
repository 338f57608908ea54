//! How a volume is read: the options that say so.

use clap::{Args, ValueEnum};
use sys::io_class::{self, Class};
use volume::IoContext;

use crate::exit::Failure;
use crate::values::size;

/// How fast, how early and by how many threads.
#[derive(Debug, Args)]
pub struct ReadArgs {
    /// How it is read: by one thread that has many reads under way, or by several, each of which
    /// the disk's scheduler takes for somebody else
    #[arg(
        long,
        value_name = "shared|separate",
        default_value = "shared",
        hide_default_value = true
    )]
    io_context: Context,

    /// Read so many bytes in a second at most (K, M or G: 1024 of the one before), beside users of
    /// a mounted file system; what is read while they wait is read as fast as that can be
    #[arg(long, value_name = "BYTES", value_parser = rate)]
    rate_limit: Option<u64>,

    /// Read and write in this class of ionice(1), where the disk's scheduler knows of them
    #[arg(long, value_name = "idle|best-effort[:LEVEL]|realtime[:LEVEL]", value_parser = class)]
    io_class: Option<Class>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Context {
    Shared,
    Separate,
}

impl ReadArgs {
    /// Has the class hold from now on, and gives the others.
    ///
    /// # Errors
    /// The class is not allowed.
    pub fn apply(&self) -> Result<(IoContext, Option<u64>), Failure> {
        if let Some(class) = self.io_class {
            let set = io_class::set(class);
            set.map_err(|source| Failure::File {
                action: "set the I/O class of",
                path: "this process".into(),
                source,
            })?;
        }
        let context = match self.io_context {
            Context::Shared => IoContext::Shared,
            Context::Separate => IoContext::Separate,
        };
        Ok((context, self.rate_limit))
    }
}

/// A size that is not 0.
fn rate(text: &str) -> Result<u64, String> {
    let bytes = size(text)?;
    let bytes = Some(bytes).filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| "nothing would ever be read".to_owned())
}

fn class(text: &str) -> Result<Class, String> {
    let (name, level) = match text.split_once(':') {
        None => (text, Some(4)),
        Some((name, level)) => (name, level.parse::<u8>().ok().filter(|level| *level <= 7)),
    };
    match (name, level) {
        ("idle", _) if text == name => Ok(Class::Idle),
        ("best-effort", Some(level)) => Ok(Class::BestEffort(level)),
        ("realtime", Some(level)) => Ok(Class::Realtime(level)),
        _ => Err("it is none of idle, best-effort and realtime with a level from 0 to 7".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_and_classes_are_read() {
        assert_eq!(rate("73").unwrap(), 73);
        assert_eq!(rate("20M").unwrap(), 20 << 20);
        for wrong in ["", "0", "0G", "1.5M"] {
            assert!(rate(wrong).is_err(), "{wrong}");
        }
        assert_eq!(class("idle").unwrap(), Class::Idle);
        assert_eq!(class("best-effort").unwrap(), Class::BestEffort(4));
        assert_eq!(class("realtime:7").unwrap(), Class::Realtime(7));
        for wrong in ["", "idle:1", "realtime:8", "best-effort:", "none"] {
            assert!(class(wrong).is_err(), "{wrong}");
        }
    }
}
