//! Loads and stores descriptor files.

use std::fs::{File, Metadata, Permissions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use holdfast_block::to_usize;

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
        let stored = self.write_new(&new, place.metadata().ok().as_ref()).and_then(|()| {
            // Only a complete file gets the final name.
            std::fs::rename(&new, &place).map_err(|source| Error::io("rename", &new, source))
        });
        if stored.is_err() {
            std::fs::remove_file(&new).ok();
        }
        stored?;
        HostFile::sync_directory(&place)
    }

    /// Writes the text durably to a file that will replace `old`.
    fn write_new(&self, new: &Path, old: Option<&Metadata>) -> Result<()> {
        let failed = |source| Error::io("write", new, source);
        match std::fs::remove_file(new) {
            // A leftover of a process that was killed.
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let mut options = File::options();
        let mut file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(new)
            .map_err(failed)?;
        if let Some(old) = old {
            // Without the right to change the owner, the file belongs to the current user, which does not matter to
            // readers.
            fchown(&file, Some(old.uid()), Some(old.gid())).ok();
            let mode = Permissions::from_mode(old.mode() & 0o777);
            file.set_permissions(mode).map_err(failed)?;
        }
        file.write_all(self.as_text().as_bytes()).map_err(failed)?;
        file.sync_all().map_err(failed)
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
