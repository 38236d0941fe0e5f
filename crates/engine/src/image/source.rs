//! Sources of a backup: images, block devices and standard input, as users name them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::{BlockDevice, ExtentKind, FileChange, FileDevice, IoMode, for_each_extent};
use holdfast_image::{Format, LayerInfo, Note, OpenOptions, USUAL_SECTOR_BYTES};

use super::consistency::warn_of_inconsistencies;
use super::sector_size::sector_of_block_device;
use crate::job::{DiskName, Error, Progress, Result};

/// File name extensions that show the kind of the file; they are not a part of a disk's name.
const EXTENSIONS: [&str; 14] = [
    "raw", "img", "qcow2", "qcow", "qed", "vdi", "vhd", "vhdx", "vmdk", "iso", "bin", "dd", "hds", "hdd",
];
/// Default name of the disk on standard input.
const STANDARD_INPUT: &str = "stdin";

/// A disk to back up: its source and its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceName {
    /// Its name, if given.
    pub disk: Option<DiskName>,
    /// Its source.
    pub origin: DiskOrigin,
}

/// Source of a disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskOrigin {
    /// An image or a block device.
    Path(PathBuf),
    /// Standard input, read to its end.
    StandardInput,
}

impl SourceName {
    /// Parses `PATH`, `NAME=PATH`, `-` or `NAME=-`. For a path with `=` before its first `/` write `./a=b`.
    pub fn parse(text: &OsStr) -> Result<Self> {
        let bytes = text.as_bytes();
        let folder = bytes.iter().position(|byte| *byte == b'/').unwrap_or(bytes.len());
        let (disk, path) = match bytes[..folder].iter().position(|byte| *byte == b'=') {
            None => (None, text.to_owned()),
            Some(at) => {
                let name = String::from_utf8_lossy(&bytes[..at]).into_owned();
                (Some(DiskName::new(name)?), OsString::from_vec(bytes[at + 1..].to_vec()))
            }
        };
        let origin = if path == "-" {
            DiskOrigin::StandardInput
        } else {
            DiskOrigin::Path(path.into())
        };
        Ok(Self { disk, origin })
    }

    /// Whether the extension of a file name can only be that of an image.
    pub fn is_called_like_an_image(name: &OsStr) -> bool {
        let extension = Path::new(name).extension();
        extension.is_some_and(|extension| EXTENSIONS.iter().any(|known| extension.eq_ignore_ascii_case(known)))
    }

    /// Name of its file without the extension; none for standard input.
    pub(crate) fn base_name(&self) -> Option<String> {
        let DiskOrigin::Path(path) = &self.origin else {
            return None;
        };
        let name = path.file_name()?;
        let base = if Self::is_called_like_an_image(name) {
            Path::new(name).file_stem()?
        } else {
            name
        };
        Some(base.to_string_lossy().into_owned())
    }
}

/// Unique names for all disks: the given ones, or those of the files, with a number added to duplicates.
pub(crate) fn disk_names(sources: &[SourceName], progress: &dyn Progress) -> Result<Vec<String>> {
    let mut names: Vec<Option<String>> = sources
        .iter()
        .map(|source| source.disk.as_ref().map(ToString::to_string))
        .collect();
    for (index, name) in names.iter().enumerate() {
        if let Some(name) = name
            && names[..index].contains(&Some(name.clone()))
        {
            return Err(Error::DuplicateDisk { name: name.clone() });
        }
    }
    for (index, source) in sources.iter().enumerate() {
        if names[index].is_some() {
            continue;
        }
        let base = source.base_name().unwrap_or_else(|| STANDARD_INPUT.to_owned());
        let mut name = base.clone();
        let mut number = 1;
        while names.contains(&Some(name.clone())) {
            number += 1;
            name = format!("{base}-{number}");
        }
        if number > 1
            && let DiskOrigin::Path(path) = &source.origin
        {
            progress.note(&format!(
                "{} is the disk {name:?}; NAME=PATH gives it another name",
                path.display()
            ));
        }
        names[index] = Some(DiskName::new(name)?.to_string());
    }
    Ok(names.into_iter().flatten().collect())
}

/// An image or block device, open for reading.
pub(crate) struct OpenSource {
    pub(crate) device: Arc<dyn BlockDevice>,
    pub(crate) format: Format,
    /// Sector size as its guest sees it.
    pub(crate) sector_bytes: u64,
    /// The canonical path, which identifies the file.
    pub(crate) canonical: PathBuf,
    /// All files that are read, to detect changes meanwhile.
    files: Vec<(PathBuf, Arc<FileDevice>)>,
    /// The path and options it was opened with.
    opened: (PathBuf, OpenOptions),
    /// Doubts about its format, and about the formats of its backing images.
    format_notes: Vec<Note>,
}

impl OpenSource {
    /// Opens the image at `path` and its backing images.
    ///
    /// Without `format`, the format of a file is detected from its content, and a block device is raw: a guest controls
    /// the bytes of a raw disk, and could write an image header there that names other files.
    pub(crate) fn open(path: &Path, format: Option<Format>, allowed: &[PathBuf]) -> Result<Self> {
        let options = OpenOptions {
            format,
            allow: allowed.to_vec(),
            ..OpenOptions::default()
        };
        Self::open_with(path, &options)
    }

    /// Like [`open`](Self::open), with options for the backing images.
    pub(crate) fn open_with(path: &Path, options: &OpenOptions) -> Result<Self> {
        let failed = |source| Error::File {
            action: "open",
            path: path.to_owned(),
            source,
        };
        let canonical = path.canonicalize().map_err(failed)?;
        let is_block_device = std::fs::metadata(path).map_err(failed)?.file_type().is_block_device();
        let image = match options.format {
            Some(Format::Raw) => None,
            None if is_block_device => None,
            _ => Some(holdfast_image::open(path, options)?),
        };
        let format = image.as_ref().map_or(Format::Raw, |image| image.layers()[0].format);
        let is_of_format = |note: &&Note| {
            matches!(
                note,
                Note::CalledRaw { .. } | Note::FormatGuessed { .. } | Note::BackingFormatGuessed { .. }
            )
        };
        let notes = image.iter().flat_map(holdfast_image::Image::notes);
        let format_notes = notes.filter(is_of_format).cloned().collect();
        let opened = (path.to_owned(), options.clone());
        let Some(image) = image.filter(|_| format != Format::Raw) else {
            let file = Arc::new(FileDevice::open(path, IoMode::Buffered)?);
            let sector_bytes = if is_block_device {
                sector_of_block_device(&file)?
            } else {
                USUAL_SECTOR_BYTES
            };
            return Ok(Self {
                device: file.clone(),
                format,
                sector_bytes,
                canonical,
                files: vec![(path.to_owned(), file)],
                opened,
                format_notes,
            });
        };
        let paths = image.layers().iter().flat_map(LayerInfo::files);
        let watched = paths.map(|path| {
            let file = FileDevice::open(&path, IoMode::Buffered)?;
            Ok((path, Arc::new(file)))
        });
        Ok(Self {
            files: watched.collect::<Result<_>>()?,
            device: image.device(),
            format,
            sector_bytes: image.sector_bytes(),
            canonical,
            opened,
            format_notes,
        })
    }

    /// Warns if no format was given and the detected one is doubtful. `before` is the format that it had at another time.
    pub(crate) fn warn_of_format(&self, before: Option<&str>, progress: &dyn Progress) {
        for note in &self.format_notes {
            let is_known = matches!(note, Note::FormatGuessed { format, .. } if before == Some(format.name()));
            if !is_known {
                progress.warning(&note.to_string());
            }
        }
    }

    /// Warns of inconsistent metadata. For images that no process has open.
    pub(crate) fn warn_of_inconsistencies(&self, progress: &dyn Progress) -> Result<()> {
        if self.format == Format::Raw {
            return Ok(());
        }
        let files: Vec<PathBuf> = self.paths().map(Path::to_owned).collect();
        let (path, options) = &self.opened;
        warn_of_inconsistencies(path, options, &files, progress)
    }

    /// The files that are read, the image itself first.
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.files.iter().map(|(path, _)| path.as_path())
    }

    /// Bytes that the image stores as data: a backup has to read them.
    pub(crate) fn allocated_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        for_each_extent(&*self.device, 0..self.device.size_bytes(), |extent| {
            if extent.kind == ExtentKind::Data {
                bytes += extent.length;
            }
            Ok(())
        })?;
        Ok(bytes)
    }

    /// Changes of its files since it was opened; a change of owner or mode does not count.
    pub(crate) fn changes(&self) -> Result<Vec<(PathBuf, FileChange)>> {
        let mut found = Vec::new();
        for (path, file) in &self.files {
            let changes = file.changed_since_open()?.into_iter();
            found.extend(
                changes
                    .filter(|change| *change != FileChange::Attributes)
                    .map(|change| (path.clone(), change)),
            );
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::path::PathBuf;

    use super::{DiskOrigin, SourceName, disk_names};
    use crate::job::{Error, NoProgress};

    fn parse(text: &str) -> SourceName {
        SourceName::parse(OsStr::new(text)).unwrap()
    }

    fn names(texts: &[&str]) -> Result<Vec<String>, Error> {
        let sources: Vec<_> = texts.iter().map(|text| parse(text)).collect();
        disk_names(&sources, &NoProgress)
    }

    #[test]
    fn a_source_is_a_path_with_or_without_a_name() {
        let named = parse("vda=/vm/a=b.raw");
        assert_eq!(named.disk.unwrap().as_str(), "vda");
        assert_eq!(named.origin, DiskOrigin::Path(PathBuf::from("/vm/a=b.raw")));
        for path in ["/vm/a=b.raw", "./a=b"] {
            assert_eq!(parse(path).origin, DiskOrigin::Path(PathBuf::from(path)));
            assert_eq!(parse(path).disk, None);
        }
        assert_eq!(parse("-").origin, DiskOrigin::StandardInput);
        assert_eq!(parse("memory=-").origin, DiskOrigin::StandardInput);
        assert!(SourceName::parse(OsStr::new("=x")).is_err());
    }

    #[test]
    fn disks_are_called_like_their_files_and_all_differently() {
        let texts = [
            "/a/web1.qcow2",
            "/b/web1.raw",
            "web1-2=/c/x.img",
            "/dev/vg/web.example.org",
            "-",
        ];
        assert_eq!(
            names(&texts).unwrap(),
            ["web1", "web1-3", "web1-2", "web.example.org", "stdin"]
        );
        assert!(matches!(names(&["a=/x", "a=/y"]), Err(Error::DuplicateDisk { name }) if name == "a"));
    }
}
