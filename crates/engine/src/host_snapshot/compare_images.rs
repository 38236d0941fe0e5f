//! Where an image in one host snapshot differs from the same image in another: the file system reports the changed
//! ranges of its files, and the image maps them to ranges of the disk.

use std::fs::File;
use std::path::{Path, PathBuf};

use holdfast_block::DirtyBitmap;
use holdfast_host::changed_blocks::by_extents;
use holdfast_host::provider::{HostSnapshotName, SendQuery, Zfs};
use holdfast_image::{Format, Image, OpenOptions, changed_on_disk};

use crate::image::source::OpenSource;

/// Smallest granularity of changes, in bytes.
const GRANULARITY_BYTES_MIN: u64 = 4096;
/// Most pieces of a disk: 8 MiB of bits.
const PIECE_COUNT_MAX: u64 = 1 << 26;

/// An answer, or the reason why there is none.
pub(crate) type Answered<T> = std::result::Result<T, String>;

/// Query for the ranges in which a file may differ between two states.
type RangeQuery<'a> = dyn Fn(&Path, &Path) -> Answered<holdfast_host::changed_blocks::ChangedRanges> + 'a;

/// An image in two states of its dataset: two host snapshots, or a host snapshot and the present state.
pub(crate) struct TwoStates<'a> {
    pub(crate) format: Option<&'a str>,
    /// Both images, the older one first.
    pub(crate) images: (&'a Path, &'a Path),
    /// The root folders of the two states; for a volume its devices.
    pub(crate) roots: (&'a Path, &'a Path),
    /// The present folder of the dataset: images name their backing files by paths in it. None for a volume.
    pub(crate) today: Option<&'a Path>,
    /// Size of the disk in bytes.
    pub(crate) size_bytes: u64,
}

impl TwoStates<'_> {
    /// Ranges in which the disk may differ, from the storage that holds the image.
    pub(crate) fn changed(&self) -> Answered<DirtyBitmap> {
        self.changed_by(&|old: &Path, new: &Path| {
            let open = |path: &Path| File::open(path).map_err(|error| error.to_string());
            let changes = by_extents(&open(old)?, &open(new)?).map_err(|error| error.to_string())?;
            Ok(changes.ranges)
        })
    }

    /// Like [`changed`](Self::changed), with `ask` as the query.
    pub(crate) fn changed_by(&self, ask: &RangeQuery<'_>) -> Answered<DirtyBitmap> {
        let pieces = (self.size_bytes / PIECE_COUNT_MAX).next_power_of_two();
        let granularity_bytes = pieces.max(GRANULARITY_BYTES_MIN);
        let ranges = |old: &Path, new: &Path| {
            let bitmap = ask(old, new)?.to_bitmap(granularity_bytes);
            bitmap.map_err(|error| error.to_string())
        };
        let ((old, new), roots) = (self.images, self.roots);
        let format = self.format.and_then(Format::from_name);
        let Some(format) = format.filter(|format| *format != Format::Raw) else {
            return ranges(old, new);
        };
        let (before, after) = (self.open(format, old, roots.0)?, self.open(format, new, roots.1)?);
        let mut files = Vec::new();
        for layer in after.layers() {
            // A file outside the host snapshots may have been written in between.
            let inside = layer.path.strip_prefix(roots.1);
            let inside = inside.map_err(|_| outside(&layer.path.display()))?;
            files.push(ranges(&below(roots.0, inside), &layer.path)?);
        }
        for (layer, today) in before.layers().iter().zip(after.layers()) {
            let inside = layer.path.strip_prefix(roots.0);
            let inside = inside.map_err(|_| outside(&layer.path.display()))?;
            // Both files may exist in both states, so a comparison of each with itself proves nothing.
            if below(roots.1, inside) != today.path {
                return Err(format!(
                    "the disk was on {} there, and is on {} now",
                    inside.display(),
                    today.path.display()
                ));
            }
        }
        changed_on_disk(&before, &after, &files, granularity_bytes).map_err(|error| error.to_string())
    }

    fn open(&self, format: Format, path: &Path, root: &Path) -> Answered<Image> {
        let options = options_in_view(Some(format), root, self.today);
        holdfast_image::open(path, &options).map_err(|error| match error {
            holdfast_image::Error::Refused { file, .. } => outside(&file),
            other => other.to_string(),
        })
    }
}

fn outside(base: &dyn std::fmt::Display) -> String {
    format!("it is based on {base}, which is not in the host snapshot")
}

/// Options to open an image in a view. The image names its backing files by present paths: they are looked up in the
/// view first, and then at their present paths.
pub(crate) fn options_in_view(format: Option<Format>, root: &Path, today: Option<&Path>) -> OpenOptions {
    let pair = |from: &Path, to: &Path| (from.to_owned(), to.to_owned());
    let today = today.filter(|today| *today != root);
    OpenOptions {
        format,
        allow: vec![root.to_owned()],
        relocate: today.map_or_else(Vec::new, |today| vec![pair(today, root), pair(root, today)]),
        ..OpenOptions::default()
    }
}

/// A file below the root of a host snapshot; for a volume, which has no files, the volume itself.
pub(crate) fn below(root: &Path, inside: &Path) -> PathBuf {
    if inside.as_os_str().is_empty() {
        root.to_owned()
    } else {
        root.join(inside)
    }
}

/// Two ZFS snapshots of a dataset: the changes are what would be sent.
pub(crate) struct ZfsDifference<'a> {
    pub(crate) zfs: &'a Zfs,
    pub(crate) older: &'a HostSnapshotName,
    pub(crate) newer: &'a HostSnapshotName,
}

impl ZfsDifference<'_> {
    /// A stream holds the changes of all files of the dataset: reading the one file may be less work.
    pub(crate) fn is_worth_it(&self, disk: &OpenSource) -> Answered<()> {
        let data_bytes = disk.allocated_bytes().map_err(|error| error.to_string())?;
        match self.zfs.written_between(self.older, self.newer) {
            Some(written_bytes) if written_bytes > data_bytes => Err(format!(
                "{written_bytes} bytes were written to the whole dataset since, and to read the disk is less"
            )),
            _ => Ok(()),
        }
    }

    /// The ranges in which a file, or the volume, may differ.
    pub(crate) fn ranges(&self, old: &Path, new: &Path) -> Answered<holdfast_host::changed_blocks::ChangedRanges> {
        let look = |path: &Path| path.metadata().map_err(|error| error.to_string());
        let (before, after) = (look(old)?, look(new)?);
        let question = if after.is_file() {
            SendQuery::File {
                before: &before,
                after: &after,
            }
        } else {
            let size_of = |path: &Path| {
                let opened = OpenSource::open(path, Some(Format::Raw), &[]);
                opened
                    .map(|opened| opened.device.size_bytes())
                    .map_err(|error| error.to_string())
            };
            let (before_bytes, size_bytes) = (size_of(old)?, size_of(new)?);
            if before_bytes != size_bytes {
                return Err(format!("the volume had {before_bytes} bytes, and has {size_bytes} now"));
            }
            SendQuery::Volume { size_bytes }
        };
        let changes = self.zfs.changes(self.older, self.newer, question);
        changes.map_err(|error| error.to_string())
    }
}
