//! Examines the path where a machine has the image of a disk: an image to write into, nothing, or an unusable file.
//!
//! A machine is often restored because its images are damaged. So a missing or broken image is no reason to refuse: it
//! is written anew. A broken one is kept beside the new one, because its owner may still need data in it.

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

/// The maximum number of symbolic links that are followed to a missing file.
const LINK_COUNT_MAX: usize = 40;

/// What exists at the path of an image.
#[derive(Debug)]
pub(super) enum ExistingImage {
    /// An image that can be written into.
    Usable {
        /// Its virtual size in bytes.
        size_bytes: u64,
    },
    /// No file.
    Missing,
    /// A file that is not an image of the format, or an inconsistent one; the reason as text.
    Unusable(String),
}

impl ExistingImage {
    /// Examines `path`, at which a machine has an image of `format`.
    ///
    /// # Errors
    /// The path cannot be written, or the problem is not the content of the file: a lock, missing permissions, an
    /// unsupported feature.
    pub(super) fn at(path: &Path, format: Format, presence: Presence) -> Result<Self> {
        if is_block_device(path) || path.starts_with("/dev") {
            return Ok(Self::Usable {
                size_bytes: size(path, format, presence)?,
            });
        }
        match path.metadata() {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::Missing),
            // A folder may be a Parallels disk.
            Ok(_) | Err(_) => {}
        }
        let looked = size(path, format, presence).and_then(|size_bytes| {
            // An image that QEMU is writing looks inconsistent.
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

/// Damage in the metadata of an image or of its base images: writing into it would destroy more data, or fail in the
/// middle.
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

/// Whether an error is caused by the content of the file at `path`, so that a new file would not have it.
fn is_about_content(error: &Error, path: &Path) -> bool {
    match error {
        // A missing base image.
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

/// Whether a medium has unreadable bytes.
fn is_unreadable(error: &DeviceError) -> bool {
    let DeviceError::Io { source, .. } = error else {
        return false;
    };
    // In a truncated image, bytes are missing that its header refers to.
    source.kind() == ErrorKind::UnexpectedEof || source.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

/// Resolves symbolic links, even if the last one points to a missing file: a new file is created there, and the links
/// are kept.
pub(super) fn followed(path: &Path) -> PathBuf {
    let mut path = path.to_owned();
    for _ in 0..LINK_COUNT_MAX {
        let Ok(next) = path.read_link() else { break };
        path = path.parent().unwrap_or(Path::new("/")).join(next);
    }
    path
}

/// A free name beside `path`: `web1.qcow2.broken`, `web1.qcow2.broken-2`.
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
        // No magic number; marked as corrupt; truncated within its header; empty.
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

    /// The image opens, but a restore would fail in the middle.
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
