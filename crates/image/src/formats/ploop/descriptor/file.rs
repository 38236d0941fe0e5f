//! Descriptors in files.

use std::fs::{File, Metadata, Permissions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use holdfast_block::to_usize;

use super::{DiskDescriptor, FILE_NAME, TEXT_BYTES_MAX};
use crate::error::corrupt;
use crate::file::{Access, HostFile, ImageFile};
use crate::{Error, Result};

/// Reads the descriptor in `file`, which errors call `image`.
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
    /// Reads the descriptor at `path`, or of the folder at `path`.
    pub fn load(path: &Path) -> Result<Self> {
        let path = place_of(path);
        load_from(&HostFile::open(&path, Access::Read)?, &path.display().to_string())
    }

    /// Writes the descriptor to `path`, or into the folder at `path`: after a crash there is the one from before, or
    /// this. Durable when this returns.
    ///
    /// It keeps the owner, where that is allowed, and the permissions of the one that it takes the place of. Nobody may
    /// change that in between: whoever changes a disk keeps machines and other programs from its top delta meanwhile,
    /// as [`open_mut`](crate::open_mut) does.
    pub fn store(&self, path: &Path) -> Result<()> {
        let place = place_of(path);
        // Through a link, the file that it leads to.
        let place = place.canonicalize().unwrap_or(place);
        let mut new = place.clone().into_os_string();
        // As ploop calls it.
        new.push(".tmp");
        let new = PathBuf::from(new);
        let stored = self.write_new(&new, place.metadata().ok().as_ref()).and_then(|()| {
            // Under its name, it is whole.
            std::fs::rename(&new, &place).map_err(|source| Error::io("rename", &new, source))
        });
        if stored.is_err() {
            std::fs::remove_file(&new).ok();
        }
        stored?;
        HostFile::sync_directory(&place)
    }

    /// Writes the text to a file that is to take the place of `old`, durably.
    fn write_new(&self, new: &Path, old: Option<&Metadata>) -> Result<()> {
        let failed = |source| Error::io("write", new, source);
        match std::fs::remove_file(new) {
            // It was left by who was killed.
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
            // Who may not give a file away writes one of their own, and that is all the same to who reads it.
            fchown(&file, Some(old.uid()), Some(old.gid())).ok();
            let mode = Permissions::from_mode(old.mode() & 0o777);
            file.set_permissions(mode).map_err(failed)?;
        }
        file.write_all(self.as_text().as_bytes()).map_err(failed)?;
        file.sync_all().map_err(failed)
    }
}

/// The descriptor itself, where `path` is its folder.
fn place_of(path: &Path) -> PathBuf {
    if path.is_dir() {
        path.join(FILE_NAME)
    } else {
        path.to_owned()
    }
}
