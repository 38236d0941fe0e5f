//! Options of new images in block formats: VDI, VHD, VHDX, VMDK, Parallels.

use std::path::PathBuf;

use crate::file::{Access, HostFile};
use crate::model::identity::require_other_id;
use crate::model::info::{ImageKind, USUAL_SECTOR_BYTES};
use crate::{Error, ImageId, Result};

/// Options of a new VDI, VHD, VHDX, VMDK or Parallels image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockOptions {
    /// How blocks are allocated. [`ImageKind::Differencing`] needs a parent.
    pub kind: ImageKind,
    /// The identity; random if none is given.
    pub id: Option<ImageId>,
    /// Time of creation in seconds since 1970, which a VHD stores.
    pub created_s: u64,
    /// The parent, which must have the same format and size.
    pub parent: Option<PathBuf>,
    /// Sector size, 512 or 4096, of a VHDX without a parent; the other formats do not store it.
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
    /// Opens the parent by `load`, which gets the name for its errors, and checks it against the other options.
    pub(crate) fn parent<T>(&self, load: impl FnOnce(HostFile, &str) -> Result<T>) -> Result<Option<T>> {
        match (self.kind, &self.parent) {
            (ImageKind::Differencing, Some(parent)) => {
                let file = HostFile::open(parent, Access::Read)?;
                Ok(Some(load(file, &parent.display().to_string())?))
            }
            (ImageKind::Differencing, None) => Err(Error::InvalidOption {
                option: "parent",
                detail: "a differencing image needs one".to_owned(),
            }),
            (_, Some(_)) => Err(Error::InvalidOption {
                option: "parent",
                detail: "only a differencing image has one".to_owned(),
            }),
            (_, None) => Ok(None),
        }
    }

    /// The identity of the new image, which must differ from that of its parent.
    pub(crate) fn id(&self, parent: Option<ImageId>) -> Result<ImageId> {
        let id = self.id.map_or_else(ImageId::random, Ok)?;
        require_other_id(id, parent)?;
        Ok(id)
    }
}
