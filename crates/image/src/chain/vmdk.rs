//! Opens the files of a VMDK: the descriptor lists them, and the gate decides which may be opened.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::to_usize;

use super::parents::images_in;
use super::{OpenedFile, Opener};
use crate::error::corrupt;
use crate::file::{Access, HostFile, ImageFile, directory_of};
use crate::formats::vmdk::concatenated::{Concatenated, WINDOW_BYTES};
use crate::formats::vmdk::descriptor::{Descriptor, NO_PARENT, NamedExtentKind, TEXT_BYTES_MAX};
use crate::formats::vmdk::disk::{DescriptorPlace, Vmdk};
use crate::formats::vmdk::extent::{MAGIC, SparseExtent};
use crate::formats::vmdk::tables::{OpenedVmdk, VmdkExtent, VmdkExtentKind};
use crate::{Error, Format, ImageId, Result};

const SECTOR_BYTES: u64 = 512;

/// The kind of file that contains a descriptor.
enum DescriptorFile {
    /// A sparse extent with an embedded descriptor.
    Inside(SparseExtent),
    /// A separate descriptor.
    TextOnly,
}

/// Parses the descriptor of `file`; returns its offset and the kind of the file, too.
fn load_descriptor(file: &dyn ImageFile, image: &str) -> Result<(Descriptor, u64, DescriptorFile)> {
    let mut magic = [0; 4];
    file.read_at(&mut magic, 0)?;
    let (offset, length, kind) = if &magic == MAGIC {
        let extent = SparseExtent::load(file, image)?;
        let Some((offset, length)) = extent.descriptor else {
            return Err(Error::UnsupportedFeature {
                image: image.to_owned(),
                feature: "an extent without a descriptor".to_owned(),
                detail: "it is only a part of a disk: open its descriptor, a small text file in the same folder"
                    .to_owned(),
            });
        };
        (offset, length, DescriptorFile::Inside(extent))
    } else if &magic == b"COWD" {
        return Err(Error::UnsupportedFeature {
            image: image.to_owned(),
            feature: "a sparse extent of ESX".to_owned(),
            detail: "clone it on the ESX host (vmkfstools -i), or export it there".to_owned(),
        });
    } else {
        (0, file.length_bytes()?, DescriptorFile::TextOnly)
    };
    if length > TEXT_BYTES_MAX {
        return Err(corrupt(image, "descriptor", offset, format!("it has {length} bytes")));
    }
    let mut text = vec![0; to_usize(length)];
    file.read_at(&mut text, offset)?;
    Ok((Descriptor::parse(&text, image)?, offset, kind))
}

impl DescriptorFile {
    /// The extent with the embedded descriptor, if any, and the place of the text.
    fn split(self) -> (Option<SparseExtent>, DescriptorPlace) {
        match self {
            Self::Inside(extent) => {
                let (offset, length) = extent.descriptor.unwrap_or_default();
                (Some(extent), DescriptorPlace::Inside(offset..offset + length))
            }
            Self::TextOnly => (None, DescriptorPlace::WholeFile),
        }
    }
}

/// A file of one or more flat extents.
struct FlatFile {
    path: PathBuf,
    /// The offset at which it begins in the concatenation of all files.
    window: u64,
    length_bytes: u64,
    /// The ranges of the file that are used by extents.
    taken: Vec<Range<u64>>,
}

impl FlatFile {
    /// The offset at which an extent begins in the concatenation of all files. Fails if it ends past the end
    /// of its file, or overlaps another extent: a write to one would change both.
    fn take(&mut self, sector: u64, length: u64) -> std::result::Result<u64, &'static str> {
        let start = sector.checked_mul(SECTOR_BYTES);
        let range = start.and_then(|start| Some(start..start.checked_add(length)?));
        let range = range.filter(|range| range.end <= self.length_bytes);
        let range = range.ok_or("an extent ends past the end of its file")?;
        let is_shared = |taken: &Range<u64>| taken.start < range.end && range.start < taken.end;
        if self.taken.iter().any(is_shared) {
            return Err("two extents use the same bytes of a file");
        }
        let host = self.window + range.start;
        self.taken.push(range);
        Ok(host)
    }
}

/// Why a descriptor lists no usable extent, if so. `own` is the extent that contains the descriptor, unless a line
/// referred to it.
fn missing_extent(parts: &[VmdkExtent], own: Option<&SparseExtent>) -> Option<&'static str> {
    if parts.is_empty() {
        Some("it lists no extent")
    } else {
        own.map(|_| "it does not list the extent that contains it")
    }
}

/// Fails if a file is larger than its window in the concatenation: offsets in it would belong to the next file.
fn refuse_beyond_windows(files: &[Arc<dyn ImageFile>], image: &str) -> Result<()> {
    for file in files {
        let file_bytes = file.length_bytes()?;
        if file_bytes > WINDOW_BYTES {
            return Err(Error::UnsupportedFeature {
                image: image.to_owned(),
                feature: format!("a file of {file_bytes} bytes"),
                detail: format!("the maximum is {WINDOW_BYTES} bytes"),
            });
        }
    }
    Ok(())
}

/// Compares the size of an extent with that in the descriptor.
fn check_length(extent: &SparseExtent, length: u64, image: &str) -> Result<()> {
    // The header may count the last grain in full.
    if (length..length.saturating_add(extent.grain_bytes)).contains(&extent.disk_bytes) {
        return Ok(());
    }
    let detail = format!(
        "it has {} bytes, but {length} according to the descriptor",
        extent.disk_bytes
    );
    Err(corrupt(image, "extent", 0, detail))
}

impl Opener {
    /// Opens the extents of the VMDK in `file`.
    pub(super) fn open_vmdk(&mut self, file: Arc<dyn ImageFile>, path: &Path, access: Access) -> Result<Vmdk> {
        let image = path.display().to_string();
        let (descriptor, offset, kind) = load_descriptor(&*file, &image)?;
        let (mut files, mut extent_files) = (vec![file], Vec::new());
        let (mut own, text) = kind.split();
        let (mut parts, mut start) = (Vec::new(), 0_u64);
        let mut flats: Vec<FlatFile> = Vec::new();
        for named in &descriptor.extents {
            let length = named
                .sectors
                .checked_mul(SECTOR_BYTES)
                .filter(|length| start.checked_add(*length).is_some_and(|end| i64::try_from(end).is_ok()))
                .ok_or_else(|| corrupt(&image, "descriptor", offset, format!("{} sectors", named.sectors)))?;
            let kind = match &named.kind {
                NamedExtentKind::Zero => VmdkExtentKind::Zero,
                // The first sparse extent is the file itself, even if it was renamed.
                NamedExtentKind::Sparse { .. } if own.is_some() => VmdkExtentKind::Sparse {
                    window: 0,
                    extent: own.take().expect("it is some"),
                },
                NamedExtentKind::Sparse { file } => {
                    let (window, file) = self.extent_file(&mut files, &mut extent_files, path, file, access)?;
                    VmdkExtentKind::Sparse {
                        window,
                        extent: SparseExtent::load(&*file, &image)?,
                    }
                }
                NamedExtentKind::Flat { file, offset } => {
                    // One file may contain several extents, one after the other.
                    let name = self.keeper.admit(path, file)?;
                    if !flats.iter().any(|flat| flat.path == name) {
                        let (window, opened) = self.extent_file(&mut files, &mut extent_files, path, file, access)?;
                        flats.push(FlatFile {
                            path: name.clone(),
                            window,
                            length_bytes: opened.length_bytes()?,
                            taken: Vec::new(),
                        });
                    }
                    let flat = flats.iter_mut().find(|flat| flat.path == name);
                    let host = flat.expect("it is among them by now").take(*offset, length);
                    VmdkExtentKind::Flat {
                        host: host.map_err(|detail| corrupt(&image, "descriptor", 0, detail))?,
                    }
                }
            };
            if let VmdkExtentKind::Sparse { extent, .. } = &kind {
                check_length(extent, length, &image)?;
            }
            parts.push(VmdkExtent { start, length, kind });
            start += length;
        }
        if let Some(detail) = missing_extent(&parts, own.as_ref()) {
            return Err(corrupt(&image, "descriptor", offset, detail));
        }
        refuse_beyond_windows(&files, &image)?;
        let digits = &descriptor.content_id_at;
        let content_id_at = offset + digits.start as u64..offset + digits.end as u64;
        Ok(Vmdk {
            descriptor,
            text,
            opened: OpenedVmdk {
                parts,
                files: Arc::new(Concatenated { files }),
                content_id_at,
            },
            extent_files,
        })
    }

    /// Opens an extent of the image at `path` and adds it to `files` and `paths`; returns its start in the concatenation, too.
    fn extent_file(
        &mut self,
        files: &mut Vec<Arc<dyn ImageFile>>,
        paths: &mut Vec<PathBuf>,
        path: &Path,
        name: &str,
        access: Access,
    ) -> Result<(u64, Arc<dyn ImageFile>)> {
        let found = self.keeper.admit(path, name)?;
        let opened = HostFile::open_canonical(&found, access)?;
        self.register(&opened, &found, path).map_err(|error| match error {
            Error::ChainLoop { .. } => corrupt(
                &path.display().to_string(),
                "descriptor",
                0,
                format!("it lists the file {name:?} twice, or itself"),
            ),
            other => other,
        })?;
        paths.push(found);
        let opened: Arc<dyn ImageFile> = Arc::new(opened);
        let window = files.len() as u64 * WINDOW_BYTES;
        files.push(Arc::clone(&opened));
        Ok((window, opened))
    }

    /// Finds the parent of a VMDK, which refers to it by a path; its CID must be the one that the child stores. A
    /// child made by VirtualBox stores the UUID of the parent only, which is then looked up in the folder of the child
    /// and among the files that the user allowed.
    pub(super) fn parent_of_vmdk(&mut self, overlay: &OpenedFile, vmdk: &Vmdk) -> Result<Option<OpenedFile>> {
        let Some((content_id, hint)) = &vmdk.descriptor.parent else {
            return Ok(None);
        };
        if *content_id == NO_PARENT {
            return self.parent_of_virtualbox(overlay, vmdk, hint).map(Some);
        }
        let is_parent = |file: Arc<HostFile>, name: &str| match load_descriptor(&*file, name) {
            Ok((found, ..)) if found.content_id == *content_id => Ok(true),
            Ok(_) => Err(Error::ParentChanged {
                image: overlay.path.display().to_string(),
                parent: name.to_owned(),
            }),
            Err(_) => Ok(false),
        };
        let names = [hint.clone()];
        let shown = format!("{hint} with CID {content_id:08x}");
        self.parent_of_names(overlay, Format::Vmdk, &names, &shown, &is_parent)
            .map(Some)
    }

    /// Finds a parent by its UUID.
    fn parent_of_virtualbox(&mut self, overlay: &OpenedFile, vmdk: &Vmdk, hint: &str) -> Result<OpenedFile> {
        let wanted = vmdk.descriptor.parent_id;
        let is_parent = |file: Arc<HostFile>, name: &str| {
            let found = load_descriptor(&*file, name);
            Ok(found.is_ok_and(|(found, ..)| found.id.is_some() && found.id == wanted))
        };
        let same_folder = images_in(&directory_of(&overlay.path), "vmdk");
        let same_folder = same_folder.iter().filter_map(|path| Some(path.to_str()?.to_owned()));
        let hint = Some(hint).filter(|hint| !hint.is_empty()).map(str::to_owned);
        let names: Vec<String> = hint.into_iter().chain(same_folder).collect();
        let shown = wanted.unwrap_or_default().to_string();
        self.parent_of_names(overlay, Format::Vmdk, &names, &shown, &is_parent)
    }
}

/// What a child stores about its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identities {
    pub(crate) content_id: u32,
    pub(crate) id: Option<ImageId>,
    pub(crate) disk_bytes: u64,
}

/// Reads what a child stores about the parent `file`.
pub(crate) fn identities_of(file: &dyn ImageFile, image: &str) -> Result<Identities> {
    let (descriptor, ..) = load_descriptor(file, image)?;
    let sectors: u64 = descriptor
        .extents
        .iter()
        .fold(0, |sum, extent| extent.sectors.saturating_add(sum));
    Ok(Identities {
        content_id: descriptor.content_id,
        id: descriptor.id,
        disk_bytes: sectors.saturating_mul(SECTOR_BYTES),
    })
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::Arc;

    use holdfast_block::{ExtentList, Result};

    use super::{WINDOW_BYTES, refuse_beyond_windows};
    use crate::Error;
    use crate::file::ImageFile;

    /// A sparse file of this length.
    struct Holes(u64);

    impl ImageFile for Holes {
        fn length_bytes(&self) -> Result<u64> {
            Ok(self.0)
        }

        fn read_at(&self, buffer: &mut [u8], _offset: u64) -> Result<()> {
            buffer.fill(0);
            Ok(())
        }

        fn write_at(&self, _data: &[u8], _offset: u64) -> Result<()> {
            Ok(())
        }

        fn set_length(&self, _length_bytes: u64) -> Result<()> {
            Ok(())
        }

        fn punch(&self, _range: Range<u64>) -> Result<()> {
            Ok(())
        }

        fn sync(&self) -> Result<()> {
            Ok(())
        }

        fn extents(&self, range: Range<u64>, extent_count_max: usize) -> Result<ExtentList> {
            Ok(ExtentList::new(range.start, extent_count_max))
        }

        fn allocated_bytes(&self) -> Result<Option<u64>> {
            Ok(None)
        }
    }

    /// Some file systems support sparse files longer than a window: bytes past it would belong to the next file.
    #[test]
    fn file_larger_than_its_window_is_refused() {
        let files = |bytes| -> Vec<Arc<dyn ImageFile>> { vec![Arc::new(Holes(512)), Arc::new(Holes(bytes))] };
        refuse_beyond_windows(&files(WINDOW_BYTES), "image").unwrap();
        let error = refuse_beyond_windows(&files(WINDOW_BYTES + 1), "image").unwrap_err();
        assert!(matches!(error, Error::UnsupportedFeature { .. }), "{error}");
    }
}
