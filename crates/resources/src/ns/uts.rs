//! The names of a host: uts_namespaces(7).
//!
//! - What: uts namespaces
//! - Kept: one of the whole tree, with its host name and its NIS domain name.
//! - CRIU 4.2: the same.

use rustix::system::{setdomainname, sethostname, uname};

use super::kind::{Construction, FIRST_TAG, Kind, Tree, record_name};
use crate::{Error, Result};

/// The most bytes of a name (`__NEW_UTS_LEN`).
const NAME_MAX_BYTES: usize = 64;

/// See the file.
pub struct Uts;

/// The names.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The host's.
    #[prost(bytes = "vec", tag = "1")]
    host: Vec<u8>,
    /// The NIS domain's.
    #[prost(bytes = "vec", tag = "2")]
    domain: Vec<u8>,
}

impl Kind for Uts {
    type Record = Record;
    const TAG: u16 = FIRST_TAG;
    const NAME: &'static str = "uts";
    const FLAG: libc::c_int = libc::CLONE_NEWUTS;

    fn dump(_: &Tree<'_>, _: &mut Vec<Error>) -> Result<Record> {
        let names = uname();
        Ok(Record {
            host: names.nodename().to_bytes().to_vec(),
            domain: names.domainname().to_bytes().to_vec(),
        })
    }

    fn check(record: &Record) -> Result<()> {
        let is_name = |name: &[u8]| name.len() <= NAME_MAX_BYTES && !name.contains(&0);
        match is_name(&record.host) && is_name(&record.domain) {
            true => Ok(()),
            false => Err(Error::corrupt(record_name(Self::NAME), "has no such name")),
        }
    }

    fn restore(record: &Record, _: &Construction<'_>) -> Result<()> {
        let set = sethostname(&record.host).and_then(|()| setdomainname(&record.domain));
        set.map_err(|errno| Error::kernel("cannot set the names of the host", errno))
    }

    fn describe(record: &Record) -> String {
        let [host, domain] = [&record.host, &record.domain].map(|name| name.escape_ascii());
        format!("host name {host}, domain name {domain}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_host_and_fit() {
        let tree = Tree {
            root: 1,
            tasks: &[],
            options: &crate::NamespaceOptions::default(),
        };
        let record = Uts::dump(&tree, &mut Vec::new()).expect("it is read");
        let own = std::fs::read_to_string("/proc/sys/kernel/hostname").expect("it is there");
        assert_eq!(record.host, own.trim_end().as_bytes());
        Uts::check(&record).expect("it is sound");
        for (bytes, is_sound) in [(0, true), (64, true), (65, false)] {
            let host = vec![b'x'; bytes];
            let checked = Uts::check(&Record {
                host,
                ..record.clone()
            });
            assert_eq!(checked.is_ok(), is_sound, "{bytes}");
        }
    }
}
