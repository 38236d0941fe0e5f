//! What there is to know about an image without reading its data.

use std::path::PathBuf;

use crate::model::qcow2_info::{Feature, Qcow2Info};
use crate::{BitmapState, Format, ImageId};

/// One file of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerInfo {
    /// The file, by the name under which it was opened.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Who said so.
    pub format_source: FormatSource,
    /// Size of the disk.
    pub size_bytes: u64,
    /// Length of the file.
    pub file_bytes: u64,
    /// What the file takes on its medium, where that is known.
    pub allocated_bytes: Option<u64>,
    /// What else it is made of: the files of its extents, where these are not in the file itself, and the descriptor by which it was opened.
    pub extent_files: Vec<PathBuf>,
    /// What only qcow2 has.
    pub qcow2: Option<Qcow2Info>,
    /// What the formats of VirtualBox, Microsoft, VMware and Parallels have.
    pub blocks: Option<BlockInfo>,
    /// What the descriptor of a disk of Parallels or ploop says of the file, where it was opened by that.
    pub delta: Option<DeltaInfo>,
}

impl LayerInfo {
    /// All files that it is made of.
    pub fn files(&self) -> Vec<PathBuf> {
        let data = self.qcow2.as_ref().and_then(|qcow2| qcow2.data_file.as_deref());
        // As QEMU takes it: from the folder of the image on.
        let data = data.map(|name| {
            self.path
                .with_file_name("")
                .join(name.strip_prefix("file:").unwrap_or(name))
        });
        let own = std::iter::once(self.path.clone());
        own.chain(self.extent_files.iter().cloned()).chain(data).collect()
    }
}

/// What the descriptor of a disk of Parallels or ploop says of one of its files; its GUID is the [`id`](BlockInfo::id).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeltaInfo {
    /// The descriptor.
    pub descriptor: PathBuf,
    /// The file as it is named there.
    pub file: String,
    /// Of the top: all other deltas of the disk, each of which is a snapshot that can be read.
    pub snapshots: Vec<Delta>,
}

/// What there is to know about an image that has blocks, an identity, and perhaps a parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockInfo {
    /// What it is for.
    pub kind: ImageKind,
    /// Size of a block.
    pub block_bytes: u64,
    /// Size of a sector, as its guest sees it: by it partitions are counted.
    pub sector_bytes: u64,
    /// By what hypervisors and children know it.
    pub id: Option<ImageId>,
    /// What changes when it is written, by which children see that their parent is not what it was.
    pub modification: Option<String>,
    /// What it differs from.
    pub parent: Option<ParentInfo>,
    /// The program that made it, as far as it says.
    pub creator: Option<String>,
}

/// What an image that differs from another one says of that.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParentInfo {
    /// Its identity.
    pub id: Option<ImageId>,
    /// What its modification was.
    pub modification: Option<String>,
    /// Where it was, as it is named; the formats that name none are looked for beside the image.
    pub names: Vec<String>,
}

/// Sectors of most disks, and of all where nothing else is said.
pub const USUAL_SECTOR_BYTES: u64 = 512;

/// How the blocks of an image come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ImageKind {
    /// When they are written.
    Dynamic,
    /// All of them at the beginning.
    Fixed,
    /// When they are written; all others are the parent's.
    Differencing,
    /// Once, compressed, one after another.
    Stream,
}

impl ImageKind {
    /// A word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dynamic => "dynamic",
            Self::Fixed => "fixed",
            Self::Differencing => "differencing",
            Self::Stream => "stream",
        }
    }
}

/// Who said which format a file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FormatSource {
    /// The caller.
    Caller,
    /// The image above, in whose header it stands, or the descriptor.
    Overlay,
    /// Detected from the content, which for a raw disk its guest controls.
    Content,
}

/// Something about an image that a person should know; nothing that keeps it from being read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Note {
    /// The format of a backing file is not written down, and was taken from its content.
    BackingFormatGuessed {
        /// The backing file.
        image: PathBuf,
        /// What it was taken for.
        format: Format,
    },
    /// A file that is called like a raw disk looks like an image of another format.
    CalledRaw {
        /// The file.
        image: PathBuf,
        /// What it is read as.
        format: Format,
        /// What it looks like.
        looks_like: Format,
    },
    /// Nothing but the content of a file says what format it has, and its name says no format, or another one.
    FormatGuessed {
        /// The file.
        image: PathBuf,
        /// What it is read as.
        format: Format,
    },
    /// The image was not closed cleanly; its refcounts may be wrong, its data is not.
    NotClosedCleanly {
        /// The image.
        image: PathBuf,
    },
    /// The image was not closed: what its log says is taken for done.
    LogReplayed {
        /// The image.
        image: PathBuf,
    },
    /// The descriptor of a disk of Parallels or ploop has another size than its top delta.
    DiskSizeDiffers {
        /// The descriptor.
        image: PathBuf,
        /// What it says.
        said_bytes: u64,
        /// What counts.
        size_bytes: u64,
    },
    /// The image is marked as corrupt: what is read may be wrong.
    MarkedCorrupt {
        /// The image.
        image: PathBuf,
    },
    /// A bitmap misses writes and must not be used to find changes.
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
                "the format of the backing file {} is not written down; taken for {format}, by its content",
                image.display()
            ),
            Self::CalledRaw {
                image,
                format,
                looks_like,
            } => write!(
                formatter,
                "{} is called like a raw disk and looks like a {looks_like} image, which its guest may have written: it is read as {format}; say its format (--format raw or --format {looks_like})",
                image.display()
            ),
            Self::FormatGuessed { image, format } => write!(
                formatter,
                "{} does not have the name of a {format} image, and is read as one by its content, which the guest of a raw disk can write: say its format (--format raw or --format {format})",
                image.display()
            ),
            Self::NotClosedCleanly { image } => write!(
                formatter,
                "{} was not closed cleanly; its data can be read, its refcounts may be wrong",
                image.display()
            ),
            Self::LogReplayed { image } => write!(
                formatter,
                "{} was not closed cleanly; what is in its log is taken for done, and nothing is lost",
                image.display()
            ),
            Self::DiskSizeDiffers {
                image,
                said_bytes,
                size_bytes,
            } => write!(
                formatter,
                "{} says that the disk has {said_bytes} bytes; it is taken as its top delta has it, {size_bytes} bytes",
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

/// What is noteworthy about one layer.
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
    /// Its GUID, by which it is also the name of a snapshot.
    pub id: ImageId,
    /// What it differs from; none for the root.
    pub parent: Option<ImageId>,
    /// What is in the file.
    pub kind: DeltaKind,
    /// The file as it is named: relative to the folder of the descriptor, or absolute.
    pub file: String,
}

/// What is in a file of a disk of Parallels or ploop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaKind {
    /// `Compressed`: an expanding image, which says of each cluster whether it has it.
    Expanding,
    /// `Plain`: the bytes of the disk.
    Plain,
}
