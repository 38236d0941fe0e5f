//! The image chain of a disk: the attached image and its parents, down to the base.
//!
//! The settings assign files to images, and every image contains its own UUID. Both must agree: otherwise a replaced
//! file would be read as another disk.

use std::path::{Path, PathBuf};

use holdfast_hardware::virtualbox::Medium;
use holdfast_image::{Format, Gate, OpenOptions};

use super::machine::{LoadedSettings, VirtualBoxMachine};
use super::media::{chain_of, format_of};
use super::of;
use crate::image::source::OpenSource;
use crate::job::error::VirtualBoxError;
use crate::job::{Error, Result};

/// The files of the host that may be opened.
pub(super) struct Admission<'a> {
    /// The machine's own folder, with links resolved.
    folder: PathBuf,
    /// Files and folders that the user has allowed.
    allowed: &'a [PathBuf],
}

impl<'a> Admission<'a> {
    pub(super) fn new(machine: &VirtualBoxMachine<'_>, allowed: &'a [PathBuf]) -> Self {
        Self {
            folder: machine.folder().to_owned(),
            allowed,
        }
    }

    /// The path of a file that the settings name, with links resolved.
    ///
    /// # Errors
    /// The file is elsewhere, and was not allowed. The error does not reveal whether the file exists.
    pub(super) fn admit(&self, path: &Path) -> Result<PathBuf> {
        let outside = || {
            of(VirtualBoxError::Outside {
                file: path.to_owned(),
                folder: self.folder.clone(),
            })
        };
        // If folders are missing the file is missing, too: the existing part of its path is checked.
        let folder = path.ancestors().skip(1).find_map(|folder| folder.canonicalize().ok());
        if !folder.is_some_and(|folder| self.admits(&folder)) && !self.admits_file(path) {
            return Err(outside());
        }
        let canonical = path.canonicalize().map_err(|source| Error::File {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        if self.admits(&canonical) {
            Ok(canonical)
        } else {
            Err(outside())
        }
    }

    fn admits(&self, canonical: &Path) -> bool {
        let allowed = self.allowed.iter().filter_map(|path| path.canonicalize().ok());
        std::iter::once(self.folder.clone())
            .chain(allowed)
            .any(|within| canonical.starts_with(within))
    }

    fn admits_file(&self, path: &Path) -> bool {
        path.canonicalize().is_ok_and(|canonical| self.admits(&canonical))
    }
}

/// Opens the disk with the image `uuid`, including all parent images.
pub(super) fn open_disk(
    machine: &VirtualBoxMachine<'_>,
    said: &LoadedSettings,
    disk: &str,
    uuid: &str,
    admission: &Admission<'_>,
) -> Result<OpenSource> {
    let chain = chain_of(&said.media, uuid);
    let Some(top) = chain.first() else {
        return Err(of(VirtualBoxError::UnknownImage {
            disk: disk.to_owned(),
            uuid: uuid.to_owned(),
        }));
    };
    let mut files = Vec::new();
    for medium in &chain {
        files.push(file_of(machine, said, disk, medium, admission)?);
    }
    let options = OpenOptions {
        format: Some(format_of(&top.format).ok_or_else(|| unknown_format(&files[0], &top.format))?),
        gate: Gate::Within(admission.folder.clone()),
        allow: files
            .iter()
            .chain(admission.allowed)
            .filter(|path| path.exists())
            .cloned()
            .collect(),
        ..OpenOptions::default()
    };
    if top.format.to_lowercase() != Format::Raw.name() {
        compare(disk, &chain, &files, &options)?;
    }
    OpenSource::open_with(&files[0], &options)
}

/// The error of a medium whose format is not supported; its format is not guessed from the content.
fn unknown_format(path: &Path, name: &str) -> Error {
    holdfast_image::Error::UnsupportedFeature {
        image: path.display().to_string(),
        feature: format!("the format {name:?}"),
        detail: "have VirtualBox clone the medium as a VDI first".to_owned(),
    }
    .into()
}

/// The file of an image that can be read.
fn file_of(
    machine: &VirtualBoxMachine<'_>,
    said: &LoadedSettings,
    disk: &str,
    medium: &Medium,
    admission: &Admission<'_>,
) -> Result<PathBuf> {
    let (disk, location) = (disk.to_owned(), medium.location.clone());
    let duplicate = said
        .media
        .iter()
        .find(|other| other.uuid == medium.uuid && machine.file(&other.location) != machine.file(&location));
    if let Some(duplicate) = duplicate {
        return Err(of(VirtualBoxError::SameUuid {
            uuid: medium.uuid.clone(),
            first: location,
            second: duplicate.location.clone(),
        }));
    }
    if medium.is_encrypted {
        return Err(of(VirtualBoxError::Encrypted { disk, location }));
    }
    if format_of(&medium.format).is_none() {
        return Err(of(VirtualBoxError::Format {
            disk,
            location,
            format: medium.format.clone(),
        }));
    }
    admission.admit(&machine.file(&location))
}

/// Compares the UUIDs in the images with those in the settings.
fn compare(disk: &str, chain: &[&Medium], files: &[PathBuf], options: &OpenOptions) -> Result<()> {
    let other = |file: &Path, detail: String| {
        Err(of(VirtualBoxError::OtherImage {
            disk: disk.to_owned(),
            file: file.to_owned(),
            detail,
        }))
    };
    let image = holdfast_image::open(&files[0], options)?;
    let layers = image.layers();
    if layers.len() != chain.len() {
        let detail = format!(
            "it has {} images in a row, and the settings say {}",
            layers.len(),
            chain.len()
        );
        return other(&files[0], detail);
    }
    for ((layer, medium), file) in layers.iter().zip(chain).zip(files) {
        if layer.path.canonicalize().ok().as_ref() != Some(file) {
            let detail = format!("the one above it differs from {}", layer.path.display());
            return other(file, detail);
        }
        let found = layer.blocks.as_ref().and_then(|blocks| blocks.id);
        if let Some(found) = found.filter(|id| !id.is_nil() && id.to_string() != medium.uuid) {
            return other(file, format!("its UUID is {found}, and not {}", medium.uuid));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use holdfast_hardware::virtualbox::{Medium, MediumKind};
    use holdfast_image::Format;

    use super::{Admission, chain_of, format_of};
    use crate::job::Error;

    fn medium(uuid: &str, parent: Option<&str>) -> Medium {
        Medium {
            uuid: uuid.to_owned(),
            location: format!("{uuid}.vdi"),
            format: "VDI".to_owned(),
            parent: parent.map(str::to_owned),
            is_encrypted: false,
            kind: MediumKind::Normal,
        }
    }

    #[test]
    fn a_chain_goes_down_to_its_base_and_ends() {
        let names = |media: &[Medium], uuid: &str| -> Vec<String> {
            let chain = chain_of(media, uuid);
            chain.iter().map(|medium| medium.uuid.clone()).collect()
        };
        let media = [medium("a", None), medium("b", Some("a")), medium("c", Some("b"))];
        assert_eq!(names(&media, "c"), ["c", "b", "a"]);
        assert_eq!(names(&media, "a"), ["a"]);
        assert!(names(&media, "d").is_empty());
        let circle = [medium("a", Some("b")), medium("b", Some("a"))];
        assert_eq!(names(&circle, "a"), ["a", "b"]);
        assert_eq!(names(&[medium("a", Some("a"))], "a"), ["a"]);
    }

    #[test]
    fn only_what_is_read_has_a_format() {
        assert_eq!(format_of("VDI"), Some(Format::Vdi));
        assert_eq!(format_of("vmdk"), Some(Format::Vmdk));
        assert_eq!(format_of("VHD"), Some(Format::Vhd));
        for other in ["iSCSI", "QCOW", "QED", "Parallels", "", "luks"] {
            assert_eq!(format_of(other), None, "{other}");
        }
    }

    #[test]
    fn files_elsewhere_are_refused_whether_they_are_there_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        let here = root.join("here");
        for name in ["here/sub", "there/sub"] {
            std::fs::create_dir_all(root.join(name)).unwrap();
        }
        for name in ["here/a", "here/sub/b", "there/c"] {
            std::fs::File::create(root.join(name)).unwrap();
        }
        std::os::unix::fs::symlink(root.join("there/c"), here.join("link")).unwrap();
        let admitted = |allowed: &[PathBuf], path: &Path| {
            let folder = here.clone();
            Admission { folder, allowed }.admit(path)
        };
        let is_refused = |path: &str| matches!(admitted(&[], &here.join(path)), Err(Error::Exchange(_)));
        assert_eq!(admitted(&[], &here.join("sub/../sub/b")).unwrap(), here.join("sub/b"));
        for path in ["../there/c", "link", "../there/gone", "../nowhere/gone", "/etc/shadow"] {
            assert!(is_refused(path), "{path}");
        }
        assert!(matches!(admitted(&[], &here.join("gone")), Err(Error::File { .. })));
        for allowed in [root.join("there"), root.join("there/c")] {
            let allowed = [allowed];
            assert_eq!(admitted(&allowed, &here.join("link")).unwrap(), root.join("there/c"));
            assert_eq!(admitted(&allowed, &root.join("there/c")).unwrap(), root.join("there/c"));
            admitted(&allowed, Path::new("/etc/shadow")).unwrap_err();
        }
    }
}
