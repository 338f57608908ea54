//! The chain of images that a layer is over, as `show` tells it.

use std::collections::HashMap;

use image::{ANCESTORS_MAX, ImageId, MANIFEST_NAME, PARTS_MAX, Reader};
use store::Store;

use crate::fates::count_all;
use crate::report::{FileSize, Layer};
use crate::{Error, Result, Statistics};

/// The image and those that it is over, as far as they are there.
pub(crate) fn layers(store: &dyn Store, newest: &Reader) -> Result<Vec<Layer>> {
    let mut held = HashMap::<ImageId, u64>::new();
    for run in newest
        .spaces()
        .iter()
        .flat_map(|space| newest.runs(space.id))
    {
        if let Some(ancestor) = newest.ancestor_of(&run) {
            *held.entry(ancestor.id).or_default() += u64::from(run.pages);
        }
    }
    let mut layers = vec![layer(store, newest, ".")?];
    layers[0].held_pages = layers[0].pages.stored;
    let mut parent = own_parent(newest);
    while let Some((id, path)) = parent.take() {
        // A chain that leads back to itself ends as well.
        if layers.len() > ANCESTORS_MAX {
            break;
        }
        let opened = store.beside(&path).map_err(image::Error::Place);
        let opened = opened.map_err(Error::from);
        let opened = opened.and_then(|store| Ok((Reader::open(&*store)?, store)));
        let (mut next, older) = match opened {
            Ok((reader, store)) if reader.id() == id => {
                let older = own_parent(&reader).map(|(id, way)| (id, image::join(&path, &way)));
                (layer(&*store, &reader, &path)?, older)
            }
            other => {
                let missing = match other {
                    Ok((reader, _)) => format!("image {} is there", reader.id()),
                    Err(error) => error.with_causes(),
                };
                let layer = Layer {
                    image: id.to_string(),
                    path: path.clone().into(),
                    missing: Some(missing),
                    ..Layer::default()
                };
                (layer, None)
            }
        };
        next.held_pages = held.get(&id).copied().unwrap_or(0);
        layers.push(next);
        parent = older;
    }
    Ok(layers)
}

fn own_parent(reader: &Reader) -> Option<(ImageId, String)> {
    reader.parent().map(|(id, path)| (id, path.to_owned()))
}

fn layer(store: &dyn Store, reader: &Reader, path: &str) -> Result<Layer> {
    Ok(Layer {
        image: reader.id().to_string(),
        path: path.into(),
        missing: None,
        freed_by: reader.freed_by().map(|by| by.to_string()),
        pages: count_all(reader),
        held_pages: 0,
        bytes: files(store, reader)?.iter().map(|file| file.bytes).sum(),
        statistics: Statistics::of(reader)?,
    })
}

/// The files of an image that are there.
pub(crate) fn files(store: &dyn Store, reader: &Reader) -> Result<Vec<FileSize>> {
    let pages = (0..PARTS_MAX).map(|part| reader.id().pages_part_name(part));
    let mut files = Vec::new();
    for name in std::iter::once(MANIFEST_NAME.to_owned()).chain(pages) {
        match store.open(&name) {
            Ok(object) => files.push(FileSize {
                bytes: object.len_bytes(),
                name,
            }),
            Err(store::Error::Missing { .. }) => {}
            Err(error) => return Err(image::Error::Place(error).into()),
        }
    }
    Ok(files)
}
