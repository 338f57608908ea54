//! An image that others are layers over, and where it is.

use std::sync::Arc;

use store::{Images, Store};

use crate::{Compression, Error, Link, Reader, Result, Writer};

/// An image with the store that has it.
#[derive(Clone)]
pub struct Base {
    /// Where it is.
    pub store: Arc<dyn Store>,
    /// The image.
    pub reader: Arc<Reader>,
}

impl Base {
    /// Opens the image in `images`, whose pages are to be used.
    ///
    /// # Errors
    /// [`Error::Place`]; [`Error::Freed`] where pages of it are gone; those of [`Reader::open`].
    pub fn open(images: &Images) -> Result<Self> {
        let base = Self::open_in(images.open().map_err(Error::Place)?)?;
        base.reader.check_freed()?;
        Ok(base)
    }

    /// Opens the image in `store`, also one that parts were freed of.
    ///
    /// # Errors
    /// Those of [`Reader::open`].
    pub fn open_in(store: Arc<dyn Store>) -> Result<Self> {
        let reader = Arc::new(Reader::open(&*store)?);
        Ok(Self { store, reader })
    }

    /// The ways between this image and one in `store`.
    ///
    /// # Errors
    /// [`Error::Place`] where there are none.
    pub fn link(&self, store: &dyn Store) -> Result<Link> {
        Link::between(store, &*self.store).map_err(Error::Place)
    }
}

impl Writer {
    /// Starts an image in `store`, over `base` where there is one, whose chunks are compressed.
    ///
    /// # Errors
    /// Those of [`Writer::create`], [`Writer::create_layer`] and [`Base::link`].
    pub fn begin(
        store: Arc<dyn Store>,
        base: Option<&Base>,
        compression: Option<Compression>,
    ) -> Result<Self> {
        let mut writer = match base {
            None => Self::create(store)?,
            Some(base) => {
                let link = base.link(&*store)?;
                Self::create_layer(store, base.reader.clone(), link)?
            }
        };
        writer.compress(compression);
        Ok(writer)
    }
}
