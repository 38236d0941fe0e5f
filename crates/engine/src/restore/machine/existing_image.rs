//! What is at the place where a machine has the image of a disk: one to write into, none, or one that cannot be used.
//!
//! A machine is restored because something is wrong with its images. So an image that is missing or broken is no reason to refuse: it is
//! written anew. A broken one is kept beside it, because the restore cannot know whether its owner still needs something of it.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use holdfast_block::Error as DeviceError;
use holdfast_block::error_text;
use holdfast_image::{Error as ImageError, Format, OpenOptions, quick_check};

use super::neighbours::chain_of;
use super::present_image::{size_if_writable, size_if_writable_then};
use super::request::Presence;
use crate::files::block_target::is_block_device;
use crate::job::{Error, Result};

/// Symbolic links that are followed to a file that is missing.
const LINK_COUNT_MAX: usize = 40;

/// What is at the place of an image.
#[derive(Debug)]
pub(super) enum ExistingImage {
    /// An image that can be written into, with this many bytes as its machine sees it.
    Usable {
        /// Its size as the machine sees it.
        size_bytes: u64,
    },
    /// Nothing.
    Missing,
    /// A file that is not an image of the format, or is an inconsistent one; why, in words.
    Unusable(String),
}

impl ExistingImage {
    /// Looks at `path`, which a machine has an image of `format` at.
    ///
    /// # Errors
    /// Nothing can be written there, or something else than the content of a file is the reason: a lock, missing rights, a feature.
    pub(super) fn at(path: &Path, format: Format, presence: Presence) -> Result<Self> {
        if is_block_device(path) || path.starts_with("/dev") {
            return Ok(Self::Usable {
                size_bytes: size(path, format, presence)?,
            });
        }
        match path.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::Missing),
            // A folder may be a disk of Parallels.
            Ok(_) | Err(_) => {}
        }
        let looked = size(path, format, presence).and_then(|size_bytes| {
            // An image that QEMU still writes looks inconsistent.
            let contradiction = match presence {
                Presence::ShutOff => contradiction(path, format)?,
                Presence::SwitchedOffFirst => None,
            };
            Ok((size_bytes, contradiction))
        });
        match looked {
            Ok((size_bytes, None)) => Ok(Self::Usable { size_bytes }),
            Ok((_, Some(reason))) => Ok(Self::Unusable(reason)),
            Err(error) if path.is_file() && is_about_content(&error, path) => Ok(Self::Unusable(error_text(&error))),
            Err(error) => Err(error),
        }
    }
}

fn size(path: &Path, format: Format, presence: Presence) -> Result<u64> {
    match presence {
        Presence::ShutOff => size_if_writable(path, format),
        Presence::SwitchedOffFirst => size_if_writable_then(path, format),
    }
}

/// Damage in the metadata of an image or of what it is based on: writing into it would destroy more, or end in the middle.
fn contradiction(path: &Path, format: Format) -> Result<Option<String>> {
    let options = OpenOptions {
        format: Some(format),
        allow: chain_of(path, Some(format.name())),
        ..OpenOptions::default()
    };
    let layers = quick_check(path, &options)?;
    let first = layers.iter().find_map(|layer| {
        let report = layer.report.as_ref().filter(|report| report.corruption_count > 0)?;
        let problem = report
            .problems
            .iter()
            .find(|problem| problem.severity == holdfast_image::Severity::Corruption)?;
        Some(format!("{} is inconsistent: {}", layer.path.display(), problem.kind))
    });
    Ok(first)
}

/// Whether an error is about the content of the file at `path`, so that a new file there does not have it.
fn is_about_content(error: &Error, path: &Path) -> bool {
    match error {
        // What an image is based on and does not find.
        Error::Image(ImageError::Io {
            path: other, source, ..
        }) => other != path && source.kind() == ErrorKind::NotFound,
        Error::Image(error) => {
            error.is_corrupt()
                || matches!(
                    error,
                    ImageError::Backing { .. }
                        | ImageError::NotWritable { .. }
                        | ImageError::ChainTooLong { .. }
                        | ImageError::ParentNotFound { .. }
                        | ImageError::ParentChanged { .. }
                )
                || matches!(error, ImageError::Device(source) if is_unreadable(source))
        }
        Error::Medium { source, .. } | Error::Device(source) => is_unreadable(source),
        _ => false,
    }
}

/// Whether a medium does not give its bytes.
fn is_unreadable(error: &DeviceError) -> bool {
    let DeviceError::Io { source, .. } = error else {
        return false;
    };
    // An image that ends too early has no bytes where its header says that there are some.
    source.kind() == ErrorKind::UnexpectedEof || source.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

/// Where a path leads through symbolic links, also where the last one leads to nothing: a new file belongs there, and the links stay.
pub(super) fn followed(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..LINK_COUNT_MAX {
        let Ok(next) = path.read_link() else { break };
        path = path.parent().unwrap_or(Path::new("/")).join(next);
    }
    path
}

/// A name beside `path` that is free: `web1.qcow2.broken`, `web1.qcow2.broken-2`.
pub(super) fn name_to_keep(path: &Path) -> PathBuf {
    let named = |number: u64| {
        let mut name: OsString = path.file_name().unwrap_or_default().to_owned();
        name.push(".broken");
        if number > 1 {
            name.push(format!("-{number}"));
        }
        path.with_file_name(name)
    };
    let mut names = (1..).map(named);
    names
        .find(|name| name.symlink_metadata().is_err())
        .expect("numbers do not end")
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt as _, symlink};

    use holdfast_image::{CreateOptions, Format};

    use super::{ExistingImage, followed, name_to_keep};
    use crate::Presence;

    fn look(path: &std::path::Path, format: Format) -> ExistingImage {
        ExistingImage::at(path, format, Presence::ShutOff).unwrap()
    }

    #[test]
    fn an_image_is_usable_missing_or_unusable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        assert!(matches!(look(&path, Format::Qcow2), ExistingImage::Missing));
        holdfast_image::create(&path, &CreateOptions::new(Format::Qcow2, 1 << 20)).unwrap();
        let found = look(&path, Format::Qcow2);
        assert!(matches!(found, ExistingImage::Usable { size_bytes } if size_bytes == 1 << 20));
        let whole = std::fs::read(&path).unwrap();
        let file = File::options().write(true).open(&path).unwrap();
        let is_unusable = || matches!(look(&path, Format::Qcow2), ExistingImage::Unusable(_));
        // No magic number; marked as corrupt; cut in its header, and cut to nothing.
        file.write_all_at(&[0xEE; 512], 0).unwrap();
        assert!(is_unusable());
        file.write_all_at(&whole, 0).unwrap();
        file.write_all_at(&[0, 0, 0, 0, 0, 0, 0, 2], 72).unwrap();
        assert!(is_unusable());
        file.write_all_at(&whole, 0).unwrap();
        for length in [60, 0] {
            file.set_len(length).unwrap();
            assert!(is_unusable(), "{length}");
        }
    }

    /// It opens, and a restore would stop in its middle.
    #[test]
    fn a_table_that_leads_nowhere_is_found_before_the_first_byte() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        holdfast_image::create(&path, &CreateOptions::new(Format::Qcow2, 1 << 20)).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut l1 = [0; 8];
        file.read_exact_at(&mut l1, 40).unwrap();
        let far = (1_u64 << 63) | (1 << 40);
        file.write_all_at(&far.to_be_bytes(), u64::from_be_bytes(l1)).unwrap();
        assert!(matches!(look(&path, Format::Qcow2), ExistingImage::Unusable(_)));
    }

    #[test]
    fn an_overlay_without_its_base_is_unusable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        let mut options = CreateOptions::new(Format::Qcow2, 1 << 20);
        options.qcow2.backing = Some(holdfast_image::BackingFile {
            name: "gone.raw".to_owned(),
            format: Format::Raw,
        });
        File::create(folder.path().join("gone.raw"))
            .unwrap()
            .set_len(1 << 20)
            .unwrap();
        holdfast_image::create(&path, &options).unwrap();
        assert!(matches!(look(&path, Format::Qcow2), ExistingImage::Usable { .. }));
        std::fs::remove_file(folder.path().join("gone.raw")).unwrap();
        assert!(matches!(look(&path, Format::Qcow2), ExistingImage::Unusable(_)));
    }

    #[test]
    fn names_that_are_kept_are_new_and_links_are_followed_to_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.qcow2");
        assert_eq!(name_to_keep(&path), folder.path().join("a.qcow2.broken"));
        File::create(folder.path().join("a.qcow2.broken")).unwrap();
        assert_eq!(name_to_keep(&path), folder.path().join("a.qcow2.broken-2"));
        symlink("elsewhere/b.qcow2", &path).unwrap();
        assert_eq!(followed(&path), folder.path().join("elsewhere/b.qcow2"));
    }
}
