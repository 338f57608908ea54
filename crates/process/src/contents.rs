//! The contents of memory and objects on their way into an image.

use std::os::fd::AsFd;
use std::sync::Mutex;

use abi::Addr;
use image::PAGE_BYTES;
use pages::{Extent, Source, source};

use crate::Observer;
use crate::collect::{Contents, Object};

/// Tells the observer how far the work is, from whichever thread.
pub(crate) fn watch_progress(observer: &mut dyn Observer, total_bytes: u64) -> impl Fn(u64) + Sync {
    let observer = Mutex::new(observer);
    move |done_bytes| {
        // Nobody panics while holding it; a bar that misses a step is none to stop for.
        if let Ok(mut observer) = observer.try_lock() {
            observer.progress(done_bytes, total_bytes);
        }
    }
}

/// The pages of an object, holes left out.
pub(crate) fn of_object(object: Object) -> (Box<dyn Source>, Vec<Extent>) {
    let whole = abi::Span::new(
        Addr(0),
        object.len_bytes.next_multiple_of(PAGE_BYTES as u64),
    );
    let allocated = match &object.contents {
        Contents::File(file) => source::allocated(file.as_fd()).ok(),
        Contents::Bytes(_) => None,
    };
    let spans = allocated.unwrap_or_else(|| vec![whole]);
    let spans = spans
        .iter()
        .map(|span| span.intersect(whole))
        .filter(|span| !span.is_empty());
    let extents = spans.map(|span| Extent::of(object.space, span));
    let extents = extents.collect();
    match object.contents {
        Contents::File(file) => (Box::new(source::Object::new(file)), extents),
        Contents::Bytes(bytes) => (Box::new(source::Bytes(bytes)), extents),
    }
}
