//! Fills the root folder of a container from a directory, an archive or an image, and packs one.
//!
//! Everything that becomes a file is a [`TreeEntry`] with a stream of data: a directory, an archive and a layer of an image
//! are sources of entries; a root folder ([`RootTarget`]) and an archive are their targets.
//!
//! Names from archives and images are hostile. [`RootTarget`] resolves them as a process with this root folder would see
//! them, one component at a time without following links by the kernel, so that nothing outside is ever touched.

use std::io::Read;
use std::path::{Path, PathBuf};

use holdfast_archive::{EndMarker, TreeEntry, TreeTarReader};

mod file_attributes;
mod image;
mod layout;
mod loss;
mod pack;
mod removal;
mod root_path;
mod root_target;
mod source_file;
#[cfg(test)]
mod tests;
mod walk;

use crate::job::{Job, Result, Unit};
use crate::{ContainerContentError, Error};
use image::ArchiveNames;
pub use image::{ImageChoice, ImageConfiguration, ImagePlatform};
use loss::{Account, shown};
pub use loss::{ContentCounts, ContentLoss};
pub use pack::{PackReport, PackRootOptions, PackedHoles, pack_root};
use root_target::RootTarget;
use walk::TreeWalker;

/// What a root folder is filled from.
pub enum ContentSource {
    /// A directory: everything in it that is on the same file system.
    Directory(PathBuf),
    /// A tar archive, which may be compressed.
    Tar(TarInput),
    /// An image in an OCI image layout: a folder, or a tar archive of it, also as `docker save` writes it.
    Image {
        /// The folder or archive.
        layout: PathBuf,
        /// Which image in it.
        choice: ImageChoice,
    },
}

/// Where an archive comes from.
pub enum TarInput {
    /// A file.
    File(PathBuf),
    /// A stream, such as standard input.
    Stream(Box<dyn Read + Send>),
}

/// What was filled in.
#[derive(Debug, Default)]
pub struct FillReport {
    /// Files by kind, and bytes.
    pub counts: ContentCounts,
    /// What was not carried: the first of them.
    pub losses: Vec<ContentLoss>,
    /// The number of all files and attributes that were not carried.
    pub loss_count: u64,
    /// The configuration of the image, if the source is one.
    pub image: Option<ImageConfiguration>,
}

impl FillReport {
    fn of(account: Account<'_>, image: Option<ImageConfiguration>) -> Self {
        Self {
            counts: account.counts,
            losses: account.losses,
            loss_count: account.loss_count,
            image,
        }
    }
}

/// Takes entries: a root folder, or an archive.
trait EntrySink {
    /// Takes the next entry. `data` returns the bytes of its ranges; unread data is skipped.
    fn entry(&mut self, entry: &TreeEntry, data: &mut dyn Read, account: &mut Account<'_>) -> Result<()>;
}

/// Fills `root`, an empty folder (or one with `lost+found` only), and makes the content durable. After an error the folder
/// holds a part of the content.
///
/// # Errors
/// The folder is not empty; the source cannot be read, is damaged or hostile; writing; an interruption.
pub fn fill_root(root: &Path, source: ContentSource, job: Job<'_>) -> Result<FillReport> {
    root_target::check_empty(root)?;
    let target = RootTarget::open(root)?;
    match source {
        ContentSource::Directory(from) => copy_tree(&from, target, job),
        ContentSource::Tar(input) => fill_from_tar(target, input, job),
        ContentSource::Image { layout, choice } => image::fill_from_image(target, &layout, &choice, job),
    }
}

/// Copies a root folder to the directory `to`, which is created and must be empty.
///
/// # Errors
/// Like [`fill_root`].
pub fn copy_root(from: &Path, to: &Path, job: Job<'_>) -> Result<FillReport> {
    let created = std::fs::create_dir_all(to);
    created.map_err(|source| Error::File {
        action: "create",
        path: to.to_owned(),
        source,
    })?;
    fill_root(to, ContentSource::Directory(from.to_owned()), job)
}

fn copy_tree(from: &Path, mut target: RootTarget, job: Job<'_>) -> Result<FillReport> {
    job.progress.phase("copying files", Unit::Bytes);
    let mut account = Account::new(job);
    let excluded = target.identity()?;
    TreeWalker::new(&mut target, &mut account, Some(excluded)).walk(from)?;
    target.finish(&mut account)?;
    Ok(FillReport::of(account, None))
}

fn fill_from_tar(mut target: RootTarget, input: TarInput, job: Job<'_>) -> Result<FillReport> {
    job.progress.phase("unpacking files", Unit::Bytes);
    let TarFile { origin, mut reader } = TarFile::open(input, job)?;
    let mut account = Account::new(job);
    let mut names = ArchiveNames::default();
    while let Some(entry) = next_entry(&mut reader, &origin)? {
        names.add(&entry.path);
        target.entry(&entry, &mut reader, &mut account)?;
    }
    if names.is_of_image() {
        return Err(ContainerContentError::IsImage { origin }.into());
    }
    target.finish(&mut account)?;
    Ok(FillReport::of(account, None))
}

/// Checks that a root folder can be filled from `source`: a directory or an archive can be opened, an image can be chosen,
/// and its blobs are not damaged. Reads nothing of a stream.
///
/// # Errors
/// Like [`fill_root`].
pub fn check_source(source: ContentSource, job: Job<'_>) -> Result<()> {
    match source {
        ContentSource::Directory(path) => {
            let list = std::fs::read_dir(&path).map(drop);
            list.map_err(|source| Error::File {
                action: "read",
                path,
                source,
            })
        }
        ContentSource::Tar(TarInput::Stream(_)) => Ok(()),
        ContentSource::Tar(input) => {
            let TarFile { origin, mut reader } = TarFile::open(input, job)?;
            next_entry(&mut reader, &origin).map(drop)
        }
        ContentSource::Image { layout, choice } => image::check_image(&layout, &choice, job),
    }
}

/// Whether the tar archive at `path`, which may be compressed, is an image layout or what `docker save` writes, and not an
/// archive of a root folder. Reads it up to the first file that no image has.
///
/// # Errors
/// It cannot be read, or is damaged.
pub fn is_image_archive(path: &Path, job: Job<'_>) -> Result<bool> {
    let input = TarInput::File(path.to_owned());
    let TarFile { origin, mut reader } = TarFile::open(input, job)?;
    let mut names = ArchiveNames::default();
    while !names.has_other()
        && let Some(entry) = next_entry(&mut reader, &origin)?
    {
        job.interrupt.check()?;
        names.add(&entry.path);
    }
    Ok(names.is_of_image())
}

/// An opened archive of files.
struct TarFile {
    /// Its name for messages.
    origin: String,
    reader: TreeTarReader<Box<dyn Read + Send>>,
}

impl TarFile {
    fn open(input: TarInput, job: Job<'_>) -> Result<Self> {
        let (origin, stream): (String, Box<dyn Read + Send>) = match input {
            TarInput::Stream(stream) => ("the archive on the input".to_owned(), stream),
            TarInput::File(path) => {
                let file = std::fs::File::open(&path).map_err(|source| Error::File {
                    action: "open",
                    path: path.clone(),
                    source,
                })?;
                (path.display().to_string(), Box::new(file))
            }
        };
        let stream = layout::unpacked(stream, job.thread_count, &origin)?;
        Ok(Self {
            origin,
            reader: TreeTarReader::new(stream, EndMarker::Required),
        })
    }
}

fn next_entry<R: Read>(reader: &mut TreeTarReader<R>, origin: &str) -> Result<Option<TreeEntry>> {
    let next = reader.next_entry().map_err(|source| ContainerContentError::Archive {
        origin: origin.to_owned(),
        source,
    });
    Ok(next?)
}

/// An error of one file of the content.
fn entry_error(action: &'static str, path: &[u8], source: impl Into<std::io::Error>) -> Error {
    ContainerContentError::Entry {
        action,
        entry: shown(path),
        source: source.into(),
    }
    .into()
}
