//! Squashing a chain of images.

use std::path::Path;
use std::sync::Arc;

use image::{ANCESTORS_MAX, ImageId, Link, Reader, Seal, Writer};
use store::{Directory, Store};

use crate::options::MergeOptions;
use crate::report::MergeReport;
use crate::{Error, Result};

/// How many descriptors merging needs besides the images' files.
const OWN_DESCRIPTORS: u64 = 64;

/// Makes an image that equals the one in `options.images_dir` and has pages of no other image, or
/// only of `options.until` and older ones. It takes the place of the old one at once, or goes to
/// `options.output`.
///
/// # Errors
/// Every failure leaves the old image as it was. [`image::Error::Needed`] where another image has
/// pages from the one that is to be replaced.
pub fn merge(options: &MergeOptions) -> Result<MergeReport> {
    let dir = &options.images_dir;
    let source = Directory::open(dir).map_err(Error::Store)?;
    // Nothing that it needs is freed meanwhile; its own writer has the right to it itself.
    let _claim = match &options.output {
        Some(_) => Some(source.claim().map_err(Error::Store)?),
        None => None,
    };
    let reader = Reader::open(&source)?;
    crate::room::for_descriptors(reader.far_files() + OWN_DESCRIPTORS);
    let output = options.output.as_deref().unwrap_or(dir);
    let store = Arc::new(Directory::create(output).map_err(Error::Store)?);
    let mut writer = match &options.until {
        None => Writer::create(store)?,
        Some(until) => {
            let parent = Arc::new(open(until)?);
            check_chain(dir, &reader, parent.id(), until)?;
            let way = |from, to| store::way(from, to).map_err(Error::Store);
            let link = Link {
                to_parent: way(output, until)?,
                to_child: way(until, output)?,
            };
            Writer::create_over(store, parent, link)?
        }
    };
    writer.compress(options.compress);
    let merged = image::merge(&reader, &writer)?;
    let id = writer.seal(Seal {
        durable: options.sync,
        facts: reader.facts().clone(),
    })?;
    log::info!("image {id} is whole");
    Ok(MergeReport {
        image: id.to_string(),
        ancestors_before: reader.ancestors().len() as u64,
        ancestors: open(output)?.ancestors().len() as u64,
        stored_pages: merged.stored_pages,
        parent_pages: merged.parent_pages,
    })
}

fn open(dir: &Path) -> Result<Reader> {
    let store = Directory::open(dir).map_err(Error::Store)?;
    Ok(Reader::open(&store)?)
}

/// Refuses to merge down to an image that the chain is not over.
fn check_chain(dir: &Path, reader: &Reader, until: ImageId, named: &Path) -> Result<()> {
    let mut at = dir.to_path_buf();
    let mut parent = reader.parent().map(|(id, path)| (id, path.to_owned()));
    for _ in 0..ANCESTORS_MAX {
        let Some((id, path)) = parent else { break };
        if id == until {
            return Ok(());
        }
        at.push(path);
        let older = open(&at)?;
        if older.id() != id {
            break;
        }
        parent = older.parent().map(|(id, path)| (id, path.to_owned()));
    }
    let (named, dir) = (named.display(), dir.display());
    Err(Error::Unfit(format!(
        "image {until} in {named} is none that the image in {dir} is over"
    )))
}
