//! Loads and stores descriptor files.

use std::path::{Path, PathBuf};

use holdfast_block::{replace_file, to_usize};

use super::{DiskDescriptor, FILE_NAME, TEXT_BYTES_MAX};
use crate::error::corrupt;
use crate::file::{Access, HostFile, ImageFile};
use crate::{Error, Result};

/// Reads the descriptor in `file`; errors call it `image`.
pub(crate) fn load_from(file: &dyn ImageFile, image: &str) -> Result<DiskDescriptor> {
    let length = file.length_bytes()?;
    if length > TEXT_BYTES_MAX {
        return Err(corrupt(image, "descriptor", 0, format!("it has {length} bytes")));
    }
    let mut text = vec![0; to_usize(length)];
    file.read_at(&mut text, 0)?;
    DiskDescriptor::parse(&text, image)
}

impl DiskDescriptor {
    /// Reads the descriptor at `path`, or in the folder at `path`.
    pub fn load(path: &Path) -> Result<Self> {
        let path = place_of(path);
        load_from(&HostFile::open(&path, Access::Read)?, &path.display().to_string())
    }

    /// Replaces the descriptor at `path`, or in the folder at `path`, atomically; durable when this returns.
    ///
    /// The new file gets the permissions of the old one, and its owner if that is allowed. Other programs must not
    /// change the file in between: lock the top delta meanwhile, as [`open_mut`](crate::open_mut) does.
    pub fn store(&self, path: &Path) -> Result<()> {
        let place = place_of(path);
        // Replace the target of a symbolic link, not the link.
        let place = place.canonicalize().unwrap_or(place);
        let mut new = place.clone().into_os_string();
        // The name that ploop uses.
        new.push(".tmp");
        let new = PathBuf::from(new);
        let old = place.metadata().ok();
        replace_file(&place, &new, self.as_text().as_bytes(), old.as_ref())
            .map_err(|source| Error::io("replace", &place, source))
    }
}

/// The path of the descriptor, if `path` may be its folder.
fn place_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(FILE_NAME)
    } else {
        path.to_owned()
    }
}
