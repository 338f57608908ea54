//! Squashing a chain of images.

use image::{ANCESTORS_MAX, Base, Reader, Seal, Writer};
use store::Store;

use crate::options::MergeOptions;
use crate::report::MergeReport;
use crate::{Error, Result};

/// How many descriptors merging needs besides the images' files.
const OWN_DESCRIPTORS: u64 = 64;

/// Makes an image that equals the one in `options.images` and has pages of no other image, or
/// only of `options.until` and older ones. It takes the place of the old one at once, or goes to
/// `options.output`.
///
/// # Errors
/// Every failure leaves the old image as it was. [`image::Error::Needed`] where another image has
/// pages from the one that is to be replaced.
pub fn merge(options: &MergeOptions) -> Result<MergeReport> {
    let source = options.images.open().map_err(image::Error::Place)?;
    // Nothing that it needs is freed meanwhile; its own writer has the right to it itself.
    let _claim = match &options.output {
        Some(_) => Some(source.claim().map_err(image::Error::Place)?),
        None => None,
    };
    let reader = Reader::open(&*source)?;
    crate::alone::raise_open_files(reader.ancestor_files() + OWN_DESCRIPTORS);
    let output = options.output.as_ref().unwrap_or(&options.images);
    let store = output.create().map_err(image::Error::Place)?;
    let base = options.until.as_ref().map(|until| {
        let base = Base::open_in(until.open().map_err(image::Error::Place)?)?;
        check_chain(&*source, &reader, &base)?;
        Ok::<_, Error>(base)
    });
    let base = base.transpose()?;
    let writer = Writer::begin(store.handle(), base.as_ref(), options.compress)?;
    let merged = image::merge(&reader, &writer)?;
    let id = writer.seal(Seal {
        durable: options.sync,
        facts: reader.facts().clone(),
    })?;
    log::info!("image {id} is whole");
    Ok(MergeReport {
        image: id.to_string(),
        ancestors_before: reader.ancestors().len() as u64,
        ancestors: Reader::open(&*store)?.ancestors().len() as u64,
        stored_pages: merged.stored_pages,
        parent_pages: merged.parent_pages,
    })
}

/// Refuses to merge down to an image that the chain is not over.
fn check_chain(store: &dyn Store, reader: &Reader, until: &Base) -> Result<()> {
    let own = |reader: &Reader| reader.parent().map(|(id, path)| (id, path.to_owned()));
    let mut at = store.handle();
    let mut parent = own(reader);
    for _ in 0..ANCESTORS_MAX {
        let Some((id, path)) = parent else { break };
        if id == until.reader.id() {
            return Ok(());
        }
        at = at.beside(&path).map_err(image::Error::Place)?;
        let older = Reader::open(&*at)?;
        if older.id() != id {
            break;
        }
        parent = own(&older);
    }
    let (id, named, own) = (until.reader.id(), until.store.place(), store.place());
    Err(Error::Unfit(format!(
        "image {id} in {named} is none that the image in {own} is over"
    )))
}
