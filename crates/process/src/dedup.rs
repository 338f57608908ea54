//! Freeing what newer images of a chain have replaced in older ones.

use std::path::Path;

use image::{ANCESTORS_MAX, Deduped};
use store::Directory;

use crate::options::DedupOptions;
use crate::report::DedupReport;
use crate::{Error, Result};

/// Frees all pages that the image in `options.images_dir` does not need in those that it is over,
/// which cannot be restored any more then.
///
/// # Errors
/// [`image::Error::Needed`] where another image has pages from one of them. Whenever it is cut
/// short, the newest image is whole.
pub fn dedup(options: &DedupOptions) -> Result<DedupReport> {
    room();
    let store = Directory::open(&options.images_dir).map_err(Error::Store)?;
    let Deduped {
        freed_bytes,
        images,
    } = image::dedup(&store, options.sync)?;
    Ok(DedupReport {
        freed_bytes,
        images,
    })
}

/// Refuses `--auto-dedup` that would be refused after the dump: of an image in `dir` over the one
/// in `parent`.
///
/// # Errors
/// Those of [`image::check_dedup`].
pub(crate) fn check(dir: &Path, parent: &Path) -> Result<()> {
    room();
    let own = Directory::open(dir).map_err(Error::Store)?;
    let own = image::Reader::open(&own).ok().map(|reader| reader.id());
    let parent = Directory::open(parent).map_err(Error::Store)?;
    Ok(image::check_dedup(&parent, own)?)
}

/// Frees what the new image in `dir` has replaced; tells how many bytes that were. The image is
/// whole without that.
pub(crate) fn after_dump(dir: &Path, sync: bool) -> u64 {
    let options = DedupOptions {
        images_dir: dir.to_owned(),
        sync,
    };
    match dedup(&options) {
        Ok(done) => {
            let (bytes, images) = (done.freed_bytes, done.images);
            log::info!("{bytes} bytes were freed in {images} older images");
            bytes
        }
        Err(error) => {
            log::warn!("nothing was freed in older images: {}", error.with_causes());
            0
        }
    }
}

/// Each image of the chain takes descriptors.
fn room() {
    crate::room::for_descriptors(2 * ANCESTORS_MAX as u64);
}
