//! Freeing what newer images of a chain have replaced in older ones.

use image::{ANCESTORS_MAX, DedupSummary};
use store::Store;

use crate::Result;
use crate::options::DedupOptions;
use crate::report::DedupReport;

/// Frees all pages that the image in `options.images` does not need in those that it is over, which
/// cannot be restored any more then.
///
/// # Errors
/// [`image::Error::Needed`] where another image has pages from one of them; [`image::Error::Store`]
/// where the store cannot free parts of objects. Whenever it is cut short, the newest image is
/// whole.
pub fn dedup(options: &DedupOptions) -> Result<DedupReport> {
    dedup_in(
        &*options.images.open().map_err(image::Error::Place)?,
        options.sync,
    )
}

fn dedup_in(store: &dyn Store, sync: bool) -> Result<DedupReport> {
    raise_open_files();
    let DedupSummary {
        freed_bytes,
        images,
    } = image::dedup(store, sync)?;
    Ok(DedupReport {
        freed_bytes,
        images,
    })
}

/// Refuses `--auto-dedup` that would be refused after the dump: of an image in `store` over the one
/// in `parent`.
///
/// # Errors
/// Those of [`image::check_dedup`].
pub(crate) fn check(store: &dyn Store, parent: &dyn Store) -> Result<()> {
    raise_open_files();
    let own = image::Reader::open(store).ok().map(|reader| reader.id());
    Ok(image::check_dedup(parent, own)?)
}

/// Frees what the new image in `store` has replaced; tells how many bytes that were. The image is
/// whole without that.
pub(crate) fn after_dump(store: &dyn Store, sync: bool) -> u64 {
    match dedup_in(store, sync) {
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
fn raise_open_files() {
    crate::alone::raise_open_files(2 * ANCESTORS_MAX as u64);
}
