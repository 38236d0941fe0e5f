//! A new image that appears complete, with its data file, or not at all.

use std::path::{Path, PathBuf};

use holdfast_image::{Backing, CreateOptions, OpenOptions, dependents_in_folder, plan_create};
use holdfast_repo::Environment;

use crate::files::atomic_file::{Existing, NewFile, clear, report_cleared};
use crate::files::block_target::Overwrite;
use crate::job::{Error, Progress, Result};

/// An image that is being written; if it is dropped before [`finish`](Self::finish), it and its data file are removed.
pub(crate) struct NewImage {
    file: NewFile,
    /// The external data file; none if the image holds its data itself.
    data_file: Option<NewFile>,
    /// Partial data files of killed programs that were deleted.
    cleared: Vec<PathBuf>,
}

impl NewImage {
    /// Chooses a temporary name, and creates the image there by `create`, with options for the temporary names.
    ///
    /// A data file is never replaced.
    pub(crate) fn begin<T>(
        path: &Path,
        overwrite: Overwrite,
        options: &CreateOptions,
        environment: &Environment,
        create: impl FnOnce(&Path, &CreateOptions) -> Result<T>,
    ) -> Result<(Self, T)> {
        let existing = existing(overwrite);
        let data_file = check_places(path, existing, options)?;
        // If the image itself is still incomplete, its writer may be alive.
        let cleared = data_file.as_deref().map(clear).unwrap_or_default();
        let mut options = options.clone();
        let file = NewFile::begin(path, existing, environment)?;
        let begin = |place: PathBuf| NewFile::begin(&place, Existing::Keep, environment);
        let data_file = data_file.map(begin).transpose().map_err(of_data_file)?;
        if let (Some(data), Some(new)) = (&mut options.qcow2.data_file, &data_file) {
            data.made_at = Some(new.partial().to_owned());
        }
        let made = create(file.partial(), &options)?;
        let new = Self {
            file,
            data_file,
            cleared,
        };
        Ok((new, made))
    }

    /// Checks that an image with these options could be created; creates nothing.
    pub(crate) fn check(path: &Path, overwrite: Overwrite, options: &CreateOptions) -> Result<()> {
        let existing = existing(overwrite);
        let data_file = check_places(path, existing, options)?;
        NewFile::check(path, existing)?;
        if let Some(data_file) = data_file {
            NewFile::check(&data_file, Existing::Keep).map_err(of_data_file)?;
        }
        Ok(plan_create(path, options)?)
    }

    /// As [`NewFile::report_cleared`].
    pub(crate) fn report_cleared(&self, progress: &dyn Progress) {
        self.file.report_cleared(progress);
        report_cleared(&self.cleared, progress);
    }

    /// Temporary path of the image.
    pub(crate) fn partial(&self) -> &Path {
        self.file.partial()
    }

    /// Temporary path of the data file, if there is one.
    pub(crate) fn partial_data(&self) -> Option<&Path> {
        self.data_file.as_ref().map(NewFile::partial)
    }

    /// Gives the image its name, durably. Its content must be durable already.
    pub(crate) fn finish(self) -> Result<()> {
        // An image without its data file is useless; a data file alone is harmless and can be removed.
        let data_path = self.data_file.as_ref().map(|data| data.path().to_owned());
        self.data_file.map_or(Ok(()), NewFile::finish).map_err(of_data_file)?;
        self.file.finish().inspect_err(|_| {
            if let Some(path) = data_path {
                // The original error is more helpful than one about this cleanup.
                drop(std::fs::remove_file(path));
            }
        })
    }
}

fn existing(overwrite: Overwrite) -> Existing {
    match overwrite {
        Overwrite::Refuse => Existing::Keep,
        Overwrite::Replace => Existing::Replace,
    }
}

/// Path of the data file, if there is one.
///
/// # Errors
/// It is the image itself, or other images are based on the image to replace.
fn check_places(path: &Path, existing: Existing, options: &CreateOptions) -> Result<Option<PathBuf>> {
    if existing == Existing::Replace {
        refuse_base(path)?;
    }
    let Some(data) = &options.qcow2.data_file else {
        return Ok(None);
    };
    let place = path.parent().unwrap_or(Path::new("")).join(&data.name);
    if is_same_place(&place, path) {
        return Err(holdfast_image::Error::InvalidOption {
            option: "data file",
            detail: format!("{} is to be the image, and the file of its data", path.display()),
        }
        .into());
    }
    Ok(Some(place))
}

/// Refuses to replace an image that others are based on: they would lose their data.
fn refuse_base(path: &Path) -> Result<()> {
    let options = OpenOptions {
        backing: Backing::Ignore,
        ..OpenOptions::default()
    };
    // An image that cannot be read is not a base.
    let dependents = dependents_in_folder(path, &options).unwrap_or_default();
    if dependents.is_empty() {
        return Ok(());
    }
    Err(holdfast_image::Error::HasChildren {
        image: path.display().to_string(),
        children: dependents.iter().map(|path| path.display().to_string()).collect(),
    }
    .into())
}

/// Whether two paths, which need not exist, are the same file.
fn is_same_place(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(folder.join(path.file_name()?))
    };
    place(one).is_some_and(|place_of_one| place(other) == Some(place_of_one))
}

/// Converts errors about an existing file to errors about the data file.
fn of_data_file(error: Error) -> Error {
    match error {
        Error::TargetExists { path } | Error::NotAFile { path } => Error::DataFileExists { path },
        other => other,
    }
}
