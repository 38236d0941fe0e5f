//! Finds parents by their identity among the files that may be opened.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{OpenedFile, Opener};
use crate::chain::gate::plain_name;
use crate::file::{Access, HostFile, directory_of};
use crate::formats::vdi::header::{VdiHeader, VdiKind};
use crate::formats::{vhd, vhdx};
use crate::model::identity::ImageId;
use crate::model::info::{FormatSource, ImageKind};
use crate::{Error, Format, Result};

/// Limit of files that are examined in one folder.
const CANDIDATE_COUNT_MAX: usize = 10_000;

impl Opener {
    /// Finds the parent of a VDI, which is identified by its UUID only. VirtualBox stores it in the same folder, or in
    /// the parent folder if that one is called `Snapshots`; files that the user allowed are candidates, too.
    pub(super) fn parent_of_vdi(&mut self, overlay: &OpenedFile, header: &VdiHeader) -> Result<Option<OpenedFile>> {
        if header.kind != VdiKind::Differencing {
            return Ok(None);
        }
        let shown = overlay.path.display().to_string();
        let own_folder = directory_of(&overlay.path);
        let mut folders = vec![own_folder.clone()];
        if own_folder.file_name().is_some_and(|name| name == "Snapshots") {
            folders.push(directory_of(&own_folder));
        }
        let named = self.keeper.named().to_vec();
        folders.extend(named.iter().filter(|path| path.is_dir()).cloned());
        let in_folders = folders.iter().flat_map(|folder| images_in(folder, "vdi"));
        let candidates: Vec<PathBuf> = named
            .iter()
            .filter(|path| path.is_file())
            .cloned()
            .chain(in_folders)
            .collect();
        for path in candidates {
            // Skip files that must not be opened.
            let Some(path) = path
                .to_str()
                .and_then(|name| self.keeper.admit(&overlay.path, &plain_name(name)).ok())
            else {
                continue;
            };
            if self.is_known(&path) {
                continue;
            }
            let Ok(file) = HostFile::open_canonical(&path, Access::Read) else {
                continue;
            };
            let name = path.display().to_string();
            let Ok(found) = VdiHeader::load(&file, &name) else {
                continue;
            };
            if found.id != header.parent {
                continue;
            }
            check_modification(&shown, &name, found.modification, header.parent_modification)?;
            self.register(&file, &path, &overlay.path)?;
            let format = Some(Format::Vdi);
            return self
                .parse_file(file, &path, format, FormatSource::Overlay, None, Access::Read)
                .map(Some);
        }
        Err(Error::ParentNotFound {
            image: shown,
            parent: header.parent.to_string(),
        })
    }
}

impl Opener {
    /// Finds the parent of a VHD, which refers to it by several paths: the first path to an image with the right UUID
    /// is used.
    pub(super) fn parent_of_vhd(
        &mut self,
        overlay: &OpenedFile,
        header: &vhd::header::VhdHeader,
    ) -> Result<Option<OpenedFile>> {
        let Some(sparse) = header
            .sparse
            .as_ref()
            .filter(|_| header.footer.kind == ImageKind::Differencing)
        else {
            return Ok(None);
        };
        let is_parent = |file: Arc<HostFile>, name: &str| {
            let found = vhd::header::VhdHeader::load(&*file, name);
            Ok(found.is_ok_and(|found| found.footer.id == sparse.parent))
        };
        self.parent_of_names(
            overlay,
            Format::Vhd,
            &sparse.parent_names,
            &sparse.parent.to_string(),
            &is_parent,
        )
        .map(Some)
    }

    /// Finds the parent of a VHDX, which refers to it by several paths; its modification value must be the one that
    /// the child stores.
    pub(super) fn parent_of_vhdx(
        &mut self,
        overlay: &OpenedFile,
        opened: &vhdx::opened::OpenedVhdx,
    ) -> Result<Option<OpenedFile>> {
        let Some(parent) = &opened.metadata.parent else {
            return Ok(None);
        };
        let is_parent = |file: Arc<HostFile>, name: &str| match vhdx::opened::OpenedVhdx::load(file, Access::Read, name)
        {
            Ok(found) if found.header.data_write == parent.linkage => Ok(true),
            Ok(_) => Err(Error::ParentChanged {
                image: overlay.path.display().to_string(),
                parent: name.to_owned(),
            }),
            Err(_) => Ok(false),
        };
        self.parent_of_names(
            overlay,
            Format::Vhdx,
            &parent.names,
            &parent.linkage.to_string(),
            &is_parent,
        )
        .map(Some)
    }

    /// Opens the first of `names` that may be opened and is the parent. If none is, a refusal of the gate or an error
    /// of `is_parent` is returned.
    pub(super) fn parent_of_names(
        &mut self,
        overlay: &OpenedFile,
        format: Format,
        names: &[String],
        parent: &str,
        is_parent: &dyn Fn(Arc<HostFile>, &str) -> Result<bool>,
    ) -> Result<OpenedFile> {
        let mut refusal = None;
        let mut candidates = Vec::new();
        // A path may belong to another host, or be outdated after both files were moved: try the folder of the
        // image as well.
        let same_folder = names.iter().filter(|name| name.contains('/'));
        let same_folder = same_folder.filter_map(|name| Path::new(name).file_name()?.to_str());
        for name in names.iter().map(String::as_str).chain(same_folder) {
            match self.keeper.admit(&overlay.path, &plain_name(name)) {
                Ok(path) => candidates.push(path),
                Err(error @ Error::Refused { .. }) => drop(refusal.get_or_insert(error)),
                // The file does not exist any more.
                Err(_) => {}
            }
        }
        // A file that the user allowed may be the parent under another name.
        candidates.extend(self.keeper.named().iter().filter(|path| path.is_file()).cloned());
        // An image that refers to itself is refused when it is registered again.
        candidates.retain(|path| !self.is_known(path));
        for path in candidates {
            let file = Arc::new(HostFile::open_canonical(&path, Access::Read)?);
            match is_parent(Arc::clone(&file), &path.display().to_string()) {
                Ok(true) => {
                    drop(file);
                    let file = HostFile::open_canonical(&path, Access::Read)?;
                    self.register(&file, &path, &overlay.path)?;
                    return self.parse_file(file, &path, Some(format), FormatSource::Overlay, None, Access::Read);
                }
                Ok(false) => {}
                Err(error) => refusal = Some(error),
            }
        }
        Err(refusal.unwrap_or_else(|| Error::ParentNotFound {
            image: overlay.path.display().to_string(),
            parent: parent.to_owned(),
        }))
    }
}

/// Fails if the parent was modified after the child was created.
fn check_modification(image: &str, parent: &str, found: ImageId, expected: ImageId) -> Result<()> {
    if found == expected || expected.is_nil() {
        return Ok(());
    }
    Err(Error::ParentChanged {
        image: image.to_owned(),
        parent: parent.to_owned(),
    })
}

/// The files of a folder that have this extension, sorted by name.
pub(super) fn images_in(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return Vec::new();
    };
    let has_extension = |path: &PathBuf| {
        path.extension()
            .is_some_and(|found| found.eq_ignore_ascii_case(extension))
    };
    let mut paths: Vec<PathBuf> = entries
        .take(CANDIDATE_COUNT_MAX)
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(has_extension)
        .collect();
    paths.sort();
    paths
}
