//! Where an image in one host snapshot differs from what it is in another: told by the file system, for the files of which it is made, and
//! by the image itself for the disk.

use std::fs::File;
use std::path::{Path, PathBuf};

use holdfast_block::DirtyBitmap;
use holdfast_host::changed_blocks::by_extents;
use holdfast_host::provider::{HostSnapshotName, SendQuestion, Zfs};
use holdfast_image::{Format, OpenOptions, changed_on_disk};

use crate::source::OpenSource;

/// What is called changed comes in pieces of so many bytes, at least.
const GRANULARITY_BYTES_MIN: u64 = 4096;
/// Pieces of a disk, at most: 8 MiB of bits.
const PIECE_COUNT_MAX: u64 = 1 << 26;

/// An answer, or why nobody can tell.
pub(crate) type Told<T> = std::result::Result<T, String>;

/// Where a file may differ between two states of it.
type Ask<'a> = dyn Fn(&Path, &Path) -> Told<holdfast_host::changed_blocks::ChangedRanges> + 'a;

/// Where a disk may differ between two states of its image, by where they lie. `roots` are the folders of the two host snapshots.
pub(crate) fn compare(
    format: Option<&str>,
    images: (&Path, &Path),
    roots: (&Path, &Path),
    size_bytes: u64,
) -> Told<DirtyBitmap> {
    let ask = |old: &Path, new: &Path| {
        let open = |path: &Path| File::open(path).map_err(|error| error.to_string());
        let changes = by_extents(&open(old)?, &open(new)?).map_err(|error| error.to_string())?;
        Ok(changes.ranges)
    };
    compare_by(format, images, roots, size_bytes, &ask)
}

/// The same, by `ask`.
pub(crate) fn compare_by(
    format: Option<&str>,
    (old, new): (&Path, &Path),
    roots: (&Path, &Path),
    size_bytes: u64,
    ask: &Ask<'_>,
) -> Told<DirtyBitmap> {
    let pieces = (size_bytes / PIECE_COUNT_MAX).next_power_of_two();
    let granularity_bytes = pieces.max(GRANULARITY_BYTES_MIN);
    let ranges = |old: &Path, new: &Path| {
        let bitmap = ask(old, new)?.to_bitmap(granularity_bytes);
        bitmap.map_err(|error| error.to_string())
    };
    let format = format.and_then(Format::from_name);
    let Some(format) = format.filter(|format| *format != Format::Raw) else {
        return ranges(old, new);
    };
    let options = OpenOptions {
        format: Some(format),
        ..OpenOptions::default()
    };
    let open = |path: &Path| holdfast_image::open(path, &options).map_err(|error| error.to_string());
    let (before, after) = (open(old)?, open(new)?);
    let mut files = Vec::new();
    for layer in after.layers() {
        // What lies outside of the host snapshots may have been written in between.
        let inside = layer.path.strip_prefix(roots.1);
        let inside = inside.map_err(|_| format!("{} is outside of the host snapshot", layer.path.display()))?;
        files.push(ranges(&below(roots.0, inside), &layer.path)?);
    }
    let is_inside = before.layers().iter().all(|layer| layer.path.starts_with(roots.0));
    if !is_inside {
        return Err("it was based on an image outside of the host snapshot".to_owned());
    }
    changed_on_disk(&before, &after, &files, granularity_bytes).map_err(|error| error.to_string())
}

/// A file below the root of a host snapshot; of a volume's, which has no files, the volume.
pub(crate) fn below(root: &Path, inside: &Path) -> PathBuf {
    if inside.as_os_str().is_empty() {
        root.to_owned()
    } else {
        root.join(inside)
    }
}

/// Two snapshots of a dataset of ZFS: what changed is what would have to be sent.
pub(crate) struct Sent<'a> {
    pub(crate) zfs: &'a Zfs,
    pub(crate) older: &'a HostSnapshotName,
    pub(crate) newer: &'a HostSnapshotName,
}

impl Sent<'_> {
    /// A stream holds the changes of all files of the dataset: to read one file may be less.
    pub(crate) fn is_worth_it(&self, disk: &OpenSource) -> Told<()> {
        let data_bytes = disk.allocated_bytes().map_err(|error| error.to_string())?;
        match self.zfs.written_between(self.older, self.newer) {
            Some(written_bytes) if written_bytes > data_bytes => Err(format!(
                "{written_bytes} bytes were written to the whole dataset since, and to read the disk is less"
            )),
            _ => Ok(()),
        }
    }

    /// Where a file, or the volume, may differ.
    pub(crate) fn ranges(&self, old: &Path, new: &Path) -> Told<holdfast_host::changed_blocks::ChangedRanges> {
        let look = |path: &Path| path.metadata().map_err(|error| error.to_string());
        let (before, after) = (look(old)?, look(new)?);
        let question = if after.is_file() {
            SendQuestion::File {
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
            SendQuestion::Volume { size_bytes }
        };
        let told = self.zfs.changes((self.older, self.newer), question);
        told.map_err(|error| error.to_string())
    }
}
