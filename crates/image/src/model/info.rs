//! Metadata of an image, without its data.

use std::path::PathBuf;

use crate::model::qcow2_info::{Feature, Qcow2Info};
use crate::{BitmapState, Format, ImageId};

/// One file of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    /// The path by which it was opened.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// The origin of the format.
    pub format_source: FormatSource,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// Bytes allocated on the medium, if known.
    pub allocated_bytes: Option<u64>,
    /// Further files of the layer: its extents, where they are separate files, and the descriptor by which it was
    /// opened.
    pub extent_files: Vec<PathBuf>,
    /// Details of a qcow2.
    pub qcow2: Option<Qcow2Info>,
    /// Details of a VDI, VHD, VHDX, VMDK or Parallels image.
    pub blocks: Option<BlockInfo>,
    /// The entry in the descriptor of a Parallels or ploop disk, if it was opened by one.
    pub delta: Option<DeltaInfo>,
}

impl LayerInfo {
    /// All files of the layer.
    pub fn files(&self) -> Vec<PathBuf> {
        let data = self.qcow2.as_ref().and_then(|qcow2| qcow2.data_file.as_deref());
        // Relative to the folder of the image, as in QEMU.
        let data = data.map(|name| {
            self.path
                .with_file_name("")
                .join(name.strip_prefix("file:").unwrap_or(name))
        });
        let own = std::iter::once(self.path.clone());
        own.chain(self.extent_files.iter().cloned()).chain(data).collect()
    }
}

/// The entry of a file in the descriptor of a Parallels or ploop disk; its GUID is the [`id`](BlockInfo::id).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaInfo {
    /// The descriptor.
    pub descriptor: PathBuf,
    /// The name of the file in the descriptor.
    pub file: String,
    /// For the top: all other deltas of the disk, each of which is a readable snapshot.
    pub snapshots: Vec<Delta>,
}

/// Details of an image in a block format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockInfo {
    /// How its blocks are allocated.
    pub kind: ImageKind,
    /// Size of a block in bytes.
    pub block_bytes: u64,
    /// For the top: all other deltas of the disk, each of which is a readable snapshot.
    pub sector_bytes: u64,
    /// The identity by which hypervisors and child images recognize it.
    pub id: Option<ImageId>,
    /// A value that changes when the image is written, by which a child detects that its parent was modified.
    pub modification: Option<String>,
    /// Its parent.
    pub parent: Option<ParentInfo>,
    /// The program that created it, if recorded.
    pub creator: Option<String>,
}

/// What a differencing image records about its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentInfo {
    /// Its identity.
    pub id: Option<ImageId>,
    /// The modification value of the parent when the child was created.
    pub modification: Option<String>,
    /// Its possible paths, as the image stores them. Parents in formats that store no name are looked up in the
    /// folder of the image.
    pub names: Vec<String>,
}

/// Sector size of most disks; the default where a format does not store one.
pub const USUAL_SECTOR_BYTES: u64 = 512;

/// How the blocks of an image are allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageKind {
    /// On first write.
    Dynamic,
    /// All at creation.
    Fixed,
    /// On first write; other blocks are read from the parent.
    Differencing,
    /// Once, compressed, in the order of the disk.
    Stream,
}

impl ImageKind {
    /// The name in output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dynamic => "dynamic",
            Self::Fixed => "fixed",
            Self::Differencing => "differencing",
            Self::Stream => "stream",
        }
    }
}

/// How the format of a file was determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatSource {
    /// From the caller.
    Caller,
    /// From the overlay's header, or from the descriptor.
    Overlay,
    /// From the content, which the guest of a raw disk controls.
    Content,
}

/// A notable fact about an image that does not prevent reading it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Note {
    /// The format of a backing file is not recorded, and was detected from its content.
    BackingFormatGuessed {
        /// The backing file.
        image: PathBuf,
        /// The detected format.
        format: Format,
    },
    /// A file with the name of a raw disk looks like an image of another format.
    CalledRaw {
        /// The file.
        image: PathBuf,
        /// The format that it is read as.
        format: Format,
        /// The format of its content.
        looks_like: Format,
    },
    /// The format was detected from the content only, and the extension does not confirm it.
    FormatGuessed {
        /// The file.
        image: PathBuf,
        /// The format that it is read as.
        format: Format,
    },
    /// The image was not closed cleanly; its refcounts may be wrong, its data is not.
    NotClosedCleanly {
        /// The image.
        image: PathBuf,
    },
    /// The image was not closed; the changes in its log are applied when it is read.
    LogReplayed {
        /// The image.
        image: PathBuf,
    },
    /// The descriptor of a Parallels or ploop disk records another size than its top delta.
    DiskSizeDiffers {
        /// The descriptor.
        image: PathBuf,
        /// Size according to the descriptor.
        descriptor_bytes: u64,
        /// Size of the top delta, which is used.
        size_bytes: u64,
    },
    /// The image is marked as corrupt: its data may be wrong.
    MarkedCorrupt {
        /// The image.
        image: PathBuf,
    },
    /// A bitmap misses writes and must not be used to find changed blocks.
    BitmapUnusable {
        /// The image.
        image: PathBuf,
        /// Name of the bitmap.
        bitmap: String,
    },
}

impl std::fmt::Display for Note {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::BackingFormatGuessed { image, format } => write!(
                formatter,
                "the image does not record the format of its backing file {}; it is read as {format}, by its content",
                image.display()
            ),
            Self::CalledRaw {
                image,
                format,
                looks_like,
            } => write!(
                formatter,
                "{} has the name of a raw disk, but looks like a {looks_like} image, which its guest may have written: it is read as {format}; set its format (--format raw or --format {looks_like})",
                image.display()
            ),
            Self::FormatGuessed { image, format } => write!(
                formatter,
                "{} does not have the name of a {format} image, but is read as one by its content, which the guest of a raw disk can write: set its format (--format raw or --format {format})",
                image.display()
            ),
            Self::NotClosedCleanly { image } => write!(
                formatter,
                "{} was not closed cleanly; its data can be read, its refcounts may be wrong",
                image.display()
            ),
            Self::LogReplayed { image } => write!(
                formatter,
                "{} was not closed cleanly; the changes in its log are applied, and nothing is lost",
                image.display()
            ),
            Self::DiskSizeDiffers {
                image,
                descriptor_bytes,
                size_bytes,
            } => write!(
                formatter,
                "the disk has {descriptor_bytes} bytes according to {}, but {size_bytes} bytes according to its top delta, which is used",
                image.display()
            ),
            Self::MarkedCorrupt { image } => {
                write!(
                    formatter,
                    "{} is marked as corrupt; what is read may be wrong",
                    image.display()
                )
            }
            Self::BitmapUnusable { image, bitmap } => {
                write!(
                    formatter,
                    "bitmap {bitmap} of {} misses writes and is not used",
                    image.display()
                )
            }
        }
    }
}

/// The notes about one layer.
pub(crate) fn notes_of(layer: &LayerInfo) -> Vec<Note> {
    let Some(qcow2) = &layer.qcow2 else {
        return Vec::new();
    };
    let image = || layer.path.clone();
    let mut notes = Vec::new();
    if qcow2.has(Feature::Dirty) {
        notes.push(Note::NotClosedCleanly { image: image() });
    }
    if qcow2.has(Feature::Corrupt) {
        notes.push(Note::MarkedCorrupt { image: image() });
    }
    for bitmap in qcow2.bitmaps.iter().filter(|bitmap| bitmap.state != BitmapState::Valid) {
        notes.push(Note::BitmapUnusable {
            image: image(),
            bitmap: bitmap.name.clone(),
        });
    }
    notes
}

/// A file of a disk of Parallels or ploop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delta {
    /// Its GUID, which is also the name of a snapshot.
    pub id: ImageId,
    /// The delta below it; none for the root.
    pub parent: Option<ImageId>,
    /// How the file stores data.
    pub kind: DeltaKind,
    /// The file name as stored: relative to the folder of the descriptor, or absolute.
    pub file: String,
}

/// How a file of a Parallels or ploop disk stores data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaKind {
    /// `Compressed`: an expanding image with an allocation table.
    Expanding,
    /// `Plain`: the bytes of the disk.
    Plain,
}
