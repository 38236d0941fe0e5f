//! Options of new images that have blocks, an identity, and perhaps a parent.

use std::path::PathBuf;

use crate::file::{Access, HostFile};
use crate::model::identity::require_other_id;
use crate::model::info::{ImageKind, USUAL_SECTOR_BYTES};
use crate::{Error, ImageId, Result};

/// Options of a new image of VirtualBox, Microsoft, VMware or Parallels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockOptions {
    /// How its blocks come about. [`ImageKind::Differencing`] needs a parent.
    pub kind: ImageKind,
    /// Its identity; a new one where none is given.
    pub id: Option<ImageId>,
    /// When it is made, in seconds since 1970; a VHD says it.
    pub created_s: u64,
    /// The image that it is to differ from, which must be of the same format and size.
    pub parent: Option<PathBuf>,
    /// Size of a sector, 512 or 4096, of a VHDX without a parent; others do not say it.
    pub sector_bytes: u64,
}

impl Default for BlockOptions {
    fn default() -> Self {
        Self {
            kind: ImageKind::Dynamic,
            id: None,
            created_s: 0,
            parent: None,
            sector_bytes: USUAL_SECTOR_BYTES,
        }
    }
}

impl BlockOptions {
    /// The parent's path, opened by `load` with the name that errors have for it; checked against the other options.
    pub(crate) fn parent<T>(&self, load: impl FnOnce(HostFile, &str) -> Result<T>) -> Result<Option<T>> {
        match (self.kind, &self.parent) {
            (ImageKind::Differencing, Some(parent)) => {
                let file = HostFile::open(parent, Access::Read)?;
                Ok(Some(load(file, &parent.display().to_string())?))
            }
            (ImageKind::Differencing, None) => Err(Error::InvalidOption {
                option: "parent",
                detail: "an image that differs from another one needs it".to_owned(),
            }),
            (_, Some(_)) => Err(Error::InvalidOption {
                option: "parent",
                detail: "only differencing images have one".to_owned(),
            }),
            (_, None) => Ok(None),
        }
    }

    /// Its identity, which is not that of its parent.
    pub(crate) fn id(&self, parent: Option<ImageId>) -> Result<ImageId> {
        let id = self.id.map_or_else(ImageId::random, Ok)?;
        require_other_id(id, parent)?;
        Ok(id)
    }
}
