//! An image that is there complete, with its data file, or not at all.

use std::path::{Path, PathBuf};

use holdfast_image::{Backing, CreateOptions, OpenOptions, dependents_in_folder, plan_create};
use holdfast_repo::Environment;

use crate::files::atomic_file::{Existing, NewFile, clear, report_cleared};
use crate::files::block_target::Overwrite;
use crate::job::{Error, Progress, Result};

/// An image on its way; dropped before [`finish`](Self::finish), neither it nor its data file was ever there.
pub(crate) struct NewImage {
    file: NewFile,
    /// The external data file; none where the image holds its data itself.
    data_file: Option<NewFile>,
    /// What killed programs had left of the data file.
    cleared: Vec<PathBuf>,
}

impl NewImage {
    /// Chooses a name to write under, and has `create` make the image there, with the options as they are then.
    ///
    /// A data file is not replaced in any case.
    pub(crate) fn begin<T>(
        path: &Path,
        overwrite: Overwrite,
        options: &CreateOptions,
        environment: &Environment,
        create: impl FnOnce(&Path, &CreateOptions) -> Result<T>,
    ) -> Result<(Self, T)> {
        let existing = existing(overwrite);
        let data_file = check_places(path, existing, options)?;
        // As long as the image itself is incomplete, its writer may be alive.
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

    /// Checks that an image of these options could be made; makes nothing.
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

    /// Where it is being written.
    pub(crate) fn partial(&self) -> &Path {
        self.file.partial()
    }

    /// Where its data is being written, if that is another file.
    pub(crate) fn partial_data(&self) -> Option<&Path> {
        self.data_file.as_ref().map(NewFile::partial)
    }

    /// Gives it its name, durably. What is in it must be durable already.
    pub(crate) fn finish(self) -> Result<()> {
        // An image without its data would be none; data without an image is whole all the same, and can be removed.
        let data_path = self.data_file.as_ref().map(|data| data.path().to_owned());
        self.data_file.map_or(Ok(()), NewFile::finish).map_err(of_data_file)?;
        self.file.finish().inspect_err(|_| {
            if let Some(path) = data_path {
                // The error says more than one about this.
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

/// Where the data file is to be, if there is to be one.
///
/// # Errors
/// It is the image itself, or others are based on the image that is to be replaced.
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

/// An image that is replaced takes from those that are based on it what they have of it.
fn refuse_base(path: &Path) -> Result<()> {
    let options = OpenOptions {
        backing: Backing::Ignore,
        ..OpenOptions::default()
    };
    // An image that cannot be read is no base.
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

/// Whether two files, which need not be there, are to be in one place.
fn is_same_place(one: &Path, other: &Path) -> bool {
    let place = |path: &Path| {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new(".")).canonicalize().ok()?;
        Some(folder.join(path.file_name()?))
    };
    place(one).is_some_and(|place_of_one| place(other) == Some(place_of_one))
}

/// The same for what is in the way of a data file.
fn of_data_file(error: Error) -> Error {
    match error {
        Error::TargetExists { path } | Error::NotAFile { path } => Error::DataFileExists { path },
        other => other,
    }
}
