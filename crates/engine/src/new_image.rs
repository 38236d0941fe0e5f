//! An image that is there complete, with its data file, or not at all.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use holdfast_image::{CreateOptions, Error as ImageError};
use holdfast_repo::Surroundings;

use crate::Progress;
use crate::error::{Error, Result};
use crate::new_file::{Existing, NewFile};

/// What to do about a file that is where the new image is to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overwrite {
    /// It stays, and the job is refused.
    Refuse,
    /// The new image takes its place, when it is complete.
    Replace,
}

/// An image on its way; dropped before [`finish`](Self::finish), neither it nor its data file was ever there.
pub(crate) struct NewImage {
    file: NewFile,
    data_file: NewDataFile,
}

/// The external data file of an image on its way; none where the image holds its data itself.
struct NewDataFile(Option<PathBuf>);

impl Drop for NewDataFile {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // It may not exist yet; an error that brought us here says more than one about this.
            drop(std::fs::remove_file(path));
        }
    }
}

impl NewImage {
    /// Chooses a name to write under, and has `create` make the image there.
    ///
    /// A data file gets its own name at once, since that name is in the image; nothing may be there in any case.
    pub(crate) fn begin<T>(
        path: &Path,
        overwrite: Overwrite,
        options: &CreateOptions,
        surroundings: &Surroundings,
        create: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<(Self, T)> {
        // A device or a pipe is not replaced by a file of its name.
        if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return Err(Error::NotAFile { path: path.to_owned() });
        }
        let existing = match overwrite {
            Overwrite::Refuse => Existing::Keep,
            Overwrite::Replace => Existing::Replace,
        };
        let file = NewFile::begin(path, existing, surroundings)?;
        let data_file = options.qcow2.data_file.as_ref();
        let data_file = data_file.map(|data| path.parent().unwrap_or(Path::new("")).join(&data.name));
        if let Some(path) = &data_file
            && path.symlink_metadata().is_ok()
        {
            return Err(Error::DataFileExists { path: path.clone() });
        }
        let mut data_file = NewDataFile(data_file);
        match create(file.partial()) {
            Ok(made) => Ok((Self { file, data_file }, made)),
            Err(error) => {
                // Somebody made a data file just now: it is theirs.
                if matches!(&error, Error::Image(ImageError::Io { source, .. }) if source.kind() == ErrorKind::AlreadyExists)
                {
                    data_file.0 = None;
                }
                Err(error)
            }
        }
    }

    /// As [`NewFile::tell_of_cleared`].
    pub(crate) fn tell_of_cleared(&self, progress: &dyn Progress) {
        self.file.tell_of_cleared(progress);
    }

    /// Where it is being written.
    pub(crate) fn partial(&self) -> &Path {
        self.file.partial()
    }

    /// Gives it its name, durably. What is in it must be durable already.
    pub(crate) fn finish(self) -> Result<()> {
        let Self { file, mut data_file } = self;
        file.finish()?;
        data_file.0 = None;
        Ok(())
    }
}
