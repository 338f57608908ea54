//! The processors of a machine: a guest goes on where there are as many, with all that it knows
//! them to have.

use serde::Deserialize;
use serde_json::json;

use super::qmp::{Qmp, Question};
use super::record::{QemuFeatures, QemuProcessors};
use crate::{Error, Result};

/// The most words of features that are told: each is a register of an answer of CPUID.
const WORDS_MAX: usize = 1024;

/// A processor as QEMU tells of it (`query-cpus-fast`).
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Processor {
    qom_path: String,
}

/// A word of features (`feature-words` of x86 processors).
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Word {
    cpuid_input_eax: u32,
    cpuid_input_ecx: Option<u32>,
    cpuid_register: String,
    features: u32,
}

/// Numbers of the questions about QEMU's processors.
pub(crate) struct ProcessorQuery {
    count: u64,
    kind: u64,
    features: u64,
}

/// Asks for what [`told`] gives, of which one is at `path`.
pub(crate) fn ask(qmp: &mut Qmp, path: &str) -> Result<ProcessorQuery> {
    let property = |name: &str| json!({ "path": path, "property": name });
    Ok(ProcessorQuery {
        count: qmp.ask("query-cpus-fast", json!({}))?,
        kind: qmp.ask("qom-get", property("type"))?,
        features: qmp.ask("qom-get", property("feature-words"))?,
    })
}

/// Takes the answers, in the order of questions.
pub(crate) fn told(qmp: &mut Qmp, path: &str, asked: &ProcessorQuery) -> Result<QemuProcessors> {
    let all: Vec<Processor> = qmp.told("query-cpus-fast", asked.count)?;
    // Other architectures have none of these. What else fails is the first that is told.
    let kind = match qmp.told::<String>("qom-get", asked.kind) {
        Err(Error::Refused { .. }) => String::new(),
        kind => kind?,
    };
    let words = match qmp.told::<Vec<Word>>("qom-get", asked.features) {
        Err(Error::Refused { .. }) => Vec::new(),
        words => words?,
    };
    let words = words.into_iter().take(WORDS_MAX);
    let mut features = words
        .filter(|word| word.features != 0)
        .map(|word| QemuFeatures {
            leaf: word.cpuid_input_eax,
            part: word.cpuid_input_ecx,
            register: word.cpuid_register,
            bits: word.features,
        })
        .collect::<Vec<_>>();
    features.sort_by(|one, other| one.place().cmp(&other.place()));
    let is_one = all.iter().any(|one| one.qom_path == path);
    Ok(QemuProcessors {
        count: all.len() as u32,
        // What is at another one's place is no processor.
        path: if is_one {
            path.to_owned()
        } else {
            String::new()
        },
        kind: if is_one { kind } else { String::new() },
        features: if is_one { features } else { Vec::new() },
    })
}

/// The question that [`of`] asks first.
pub(crate) fn question() -> Question {
    ("query-cpus-fast", json!({}))
}

/// Returns the processors of a machine.
pub(crate) fn of(qmp: &mut Qmp) -> Result<QemuProcessors> {
    let (command, with) = question();
    let all: Vec<Processor> = qmp.call(command, with)?;
    let Some(first) = all.first() else {
        return Ok(QemuProcessors::default());
    };
    let asked = ask(qmp, &first.qom_path)?;
    told(qmp, &first.qom_path, &asked)
}

/// Refuses a machine that lacks something of what the saved one had.
///
/// # Errors
/// [`Error::Unfit`] with both.
pub(crate) fn check(saved: &QemuProcessors, own: &QemuProcessors) -> Result<()> {
    let unfit = |what: String| Err(Error::Unfit(what));
    if saved.count == 0 {
        // An image of before they were recorded.
        return Ok(());
    }
    if saved.count != own.count {
        return unfit(format!(
            "the image is of a machine with {} processors, and QEMU was started with {}",
            saved.count, own.count
        ));
    }
    let lacking = |word: &&QemuFeatures| {
        let has = own.features.iter().find(|one| one.place() == word.place());
        word.bits & !has.map_or(0, |has| has.bits) != 0
    };
    let Some(word) = saved.features.iter().find(lacking) else {
        return Ok(());
    };
    let has = own.features.iter().find(|one| one.place() == word.place());
    let missing = word.bits & !has.map_or(0, |has| has.bits);
    unfit(format!(
        "the guest knows its processors to be {} with bits {missing:#x} of CPUID {:#x} in {}, \
         which those that QEMU was started with ({}) do not have: see -cpu",
        saved.kind, word.leaf, word.register, own.kind
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processors(count: u32, bits: u32) -> QemuProcessors {
        QemuProcessors {
            count,
            path: "/machine/0".to_owned(),
            kind: format!("with-{bits}"),
            features: vec![QemuFeatures {
                leaf: 7,
                part: Some(0),
                register: "EBX".to_owned(),
                bits,
            }],
        }
    }

    #[test]
    fn a_guest_lacks_nothing_that_it_knows() {
        check(&processors(2, 5), &processors(2, 7)).expect("more of them");
        check(&QemuProcessors::default(), &processors(2, 7)).expect("an older image");
        for (own, why) in [
            (
                processors(1, 5),
                "2 processors, and QEMU was started with 1",
            ),
            (processors(2, 4), "with-5 with bits 0x1 of CPUID 0x7 in EBX"),
            (
                QemuProcessors {
                    features: Vec::new(),
                    ..processors(2, 5)
                },
                "bits 0x5",
            ),
        ] {
            let error = check(&processors(2, 5), &own).expect_err(why);
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
