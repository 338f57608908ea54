//! The processor that an image was made on, beside this one: `--cpu-cap`, and images of a processor
//! alone, which tell beforehand whether trees may move.
//!
//! What threads have in their registers is always looked at ([`crate::processor`]). Which
//! instructions a program has chosen nobody can see, only which ones it could have chosen: all
//! that its processor had.
//!
//! - What: instructions
//! - Kept: with `--cpu-cap=ins`, which ones the processor of the dump had.
//! - Refused: at a restore with `--cpu-cap`, and by `cpuinfo check`: "lacks instructions of the
//!   image's"; "has instructions that the image's lacks"; "this processor keeps its registers
//!   otherwise than the image's"; "lacks what the image's has".
//! - CRIU 4.2: the same with `--cpu-cap`, from a file of its own beside the image.

use image::{Reader, Seal, Writer};
use prost::Message;
use resources::arch::instructions::Instructions;
use resources::arch::xstate::{self, Layout};
use store::Images;

use crate::processor::Processor;
use crate::records::{Saved, is_of_processor, record, tag};
use crate::seal::facts;
use crate::{Error, Result};

/// What this processor must have of the one that an image was made on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CpuCap {
    /// Every set of instructions that the other one has for programs.
    pub instructions: bool,
    /// Neither less nor more than the other one, and registers laid out in the same way.
    pub same: bool,
}

impl CpuCap {
    /// All that there is.
    pub const ALL: Self = Self {
        instructions: true,
        same: true,
    };

    /// Whether the image has to say which instructions there were.
    pub(crate) fn needs_instructions(self) -> bool {
        self.instructions || self.same
    }

    /// Checks what the image says of its processor against this one.
    ///
    /// # Errors
    /// [`Error::Unfit`], also where the image says nothing.
    pub(crate) fn check(self, saved: &Saved<'_>) -> Result<()> {
        if !self.needs_instructions() {
            return Ok(());
        }
        let (Some(there), Some(layout)) = (&saved.instructions, &saved.processor) else {
            let what = "the image does not tell which instructions its processor had: \
                        `--cpu-cap=ins` has a dump say so";
            return Err(Error::Unfit(what.to_owned()));
        };
        self.compare((there, layout), (&Instructions::here(), &Layout::here()))
    }

    fn compare(
        self,
        (there, layout): (&Instructions, &Layout),
        (here, own): (&Instructions, &Layout),
    ) -> Result<()> {
        refuse("lacks instructions of the image's", there.missing_in(here))?;
        if !self.same {
            return Ok(());
        }
        refuse(
            "has instructions that the image's lacks",
            here.missing_in(there),
        )?;
        match layout == own {
            true => Ok(()),
            false => {
                let what = "this processor keeps its registers otherwise than the image's";
                Err(Error::Unfit(what.to_owned()))
            }
        }
    }
}

/// Refuses what has any of these names.
fn refuse<'a>(what: &str, names: impl IntoIterator<Item = &'a str>) -> Result<()> {
    let names = names.into_iter().collect::<Vec<_>>().join(", ");
    match names.is_empty() {
        true => Ok(()),
        false => Err(Error::Unfit(format!("this processor {what}: {names}"))),
    }
}

/// The record of this processor's instructions.
pub(crate) fn instructions() -> image::Record {
    record(tag::INSTRUCTIONS, 0, Instructions::here().encode_to_vec())
}

/// Makes an image that says what this processor has, and nothing else. Returns its id. One that is
/// there already is replaced if it is of a processor, too.
///
/// # Errors
/// [`Error::Unfit`] where an image of something else is there; [`Error::Image`] for a damaged one.
pub fn dump_cpuinfo(images: &Images) -> Result<String> {
    let store = images.create().map_err(image::Error::Place)?;
    match Reader::open(&*store) {
        Err(image::Error::NoImage { .. }) => {}
        Ok(reader) if is_of_processor(&reader) => {}
        Ok(reader) => {
            let id = reader.id();
            let what = format!("{images} has image {id}: what a processor has goes elsewhere");
            return Err(Error::Unfit(what));
        }
        Err(error) => return Err(error.into()),
    }
    let writer = Writer::create(store)?;
    writer.record(record(tag::PROCESSOR, 0, Layout::here().encode_to_vec()));
    writer.record(instructions());
    let seal = Seal {
        durable: true,
        facts: facts(),
    };
    Ok(writer.seal(seal)?.to_string())
}

/// Checks whether this processor has what an image needs: that of a tree what its threads have in
/// their registers, that of a processor all registers of it; and what `cap` says. Without `cap`
/// everything that the image tells of counts.
///
/// # Errors
/// [`Error::Unfit`] with what is missing; a missing or damaged image.
pub fn check_cpuinfo(images: &Images, cap: Option<CpuCap>) -> Result<()> {
    let store = images.open().map_err(image::Error::Place)?;
    let reader = Reader::open(&*store)?;
    if is_of_processor(&reader) {
        let saved = Saved::processor_of(&reader)?;
        if let Some(layout) = &saved.processor {
            let missing = xstate::missing_components(layout, &Layout::here());
            refuse("lacks what the image's has", missing)?;
        }
        return cap.unwrap_or(CpuCap::ALL).check(&saved);
    }
    let saved = Saved::read(&reader)?;
    reader.open_ancestors()?;
    Processor::check(&saved, &reader)?;
    let told = match saved.instructions {
        Some(_) => CpuCap::ALL,
        None => CpuCap::default(),
    };
    cap.unwrap_or(told).check(&saved)
}

#[cfg(test)]
mod tests {
    use resources::arch::xstate::Component;

    use super::*;
    use crate::{describe, sample};

    fn processor(names: &[&str], offset_bytes: u32) -> (Instructions, Layout) {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let component = Component {
            number: 2,
            offset_bytes,
            size_bytes: 256,
        };
        let layout = Layout {
            components: vec![component],
        };
        (Instructions { names }, layout)
    }

    fn told(cap: CpuCap, image: &[&str], image_at: u32, here: &[&str]) -> String {
        let (image, here) = (processor(image, image_at), processor(here, 576));
        let compared = cap.compare((&image.0, &image.1), (&here.0, &here.1));
        compared.map_or_else(|error| error.to_string(), |()| String::new())
    }

    #[test]
    fn instructions_must_be_there_and_what_must_be_the_same_has_no_more() {
        let ins = CpuCap {
            instructions: true,
            same: false,
        };
        assert_eq!(told(ins, &["sse"], 600, &["avx", "sse"]), "");
        let missing = told(ins, &["avx2", "avx", "sse"], 576, &["sse"]);
        assert!(
            missing.ends_with("lacks instructions of the image's: avx, avx2"),
            "{missing}"
        );
        let more = told(CpuCap::ALL, &["sse"], 576, &["avx", "sse"]);
        assert!(
            more.ends_with("has instructions that the image's lacks: avx"),
            "{more}"
        );
        assert!(told(CpuCap::ALL, &["sse"], 600, &["sse"]).contains("otherwise"));
        assert_eq!(told(CpuCap::ALL, &["sse"], 576, &["sse"]), "");
    }

    #[test]
    fn an_image_of_this_processor_fits_it_and_nothing_else_is_in_it() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let images = Images::from(folder.path().to_path_buf());
        dump_cpuinfo(&images).expect("made");
        // A second one takes its place.
        dump_cpuinfo(&images).expect("made again");
        for cap in [None, Some(CpuCap::default()), Some(CpuCap::ALL)] {
            check_cpuinfo(&images, cap).expect("it is this very processor");
        }
        let shown = describe(&images).expect("it can be shown");
        assert!(
            shown
                .instructions
                .expect("told")
                .iter()
                .any(|name| name == "sse2")
        );
    }

    #[test]
    fn an_image_that_tells_no_instructions_is_refused_where_they_count() {
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let saved = Saved::read(&reader).expect("right records");
        CpuCap::default()
            .check(&saved)
            .expect("nothing was asked for");
        let refused = CpuCap::ALL.check(&saved).expect_err("it does not tell");
        assert!(refused.to_string().contains("--cpu-cap=ins"), "{refused}");
    }
}
