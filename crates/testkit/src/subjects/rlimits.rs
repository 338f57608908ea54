//! Resource limits, soft and hard, unlike the defaults.
//!
//! `limits` answers soft and hard limit of each that was changed.
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{Control, Failure, not_understood};

const CHANGED: &[(Resource, u64, u64)] = &[
    (Resource::Nofile, 123, 456),
    (Resource::Core, 0, 4096),
    (Resource::Stack, 1 << 20, 64 << 20),
    (Resource::Fsize, 1 << 33, 1 << 34),
    (Resource::Cpu, 5000, 6000),
    (Resource::Sigpending, 77, 88),
    (Resource::Memlock, 8192, 16384),
];

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    for &(resource, soft, hard) in CHANGED {
        let new = Rlimit {
            current: Some(soft),
            maximum: Some(hard),
        };
        setrlimit(resource, new)?;
    }
    control.serve(|question| match question.verb.as_str() {
        "limits" => {
            let shown: Vec<String> = CHANGED
                .iter()
                .map(|&(resource, _, _)| {
                    let limit = getrlimit(resource);
                    format!("{:?}/{:?}", limit.current, limit.maximum)
                })
                .collect();
            Ok(shown.join(" "))
        }
        _ => not_understood(question),
    })
}
