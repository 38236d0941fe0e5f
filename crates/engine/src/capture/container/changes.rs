//! What was written since the backup before.

use holdfast_block::{BlockDevice as _, DirtyBitmap, ExtentKind};
use holdfast_image::{ContainerTree, ImageId, PointInTime};
use holdfast_repo::Manifest;

use super::DISK;
use crate::job::Result;
use crate::notes::{NOTE_CONTAINER, NOTE_CONTAINER_LAYER};

/// Extents per request.
pub(super) const EXTENT_COUNT: usize = 4096;
/// The finest granularity: what the layers are written in.
const GRANULARITY_BYTES_MIN: u64 = 4096;

/// The layer that a backup is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ChangesBase {
    Layer(ImageId),
    /// There is none, for this reason.
    None(String),
}

impl ChangesBase {
    /// The layer of `parent`, if it is among `chain`: the layers that the disk consists of now.
    pub(super) fn find(parent: Option<&Manifest>, container: &str, chain: &[ImageId], tree: &ContainerTree) -> Self {
        let none = |reason: &str| Self::None(reason.to_owned());
        let Some(parent) = parent else {
            return none("there is no snapshot to compare with");
        };
        let Some(noted) = NotedLayer::of(parent) else {
            return none("the snapshot before is not of a container");
        };
        if noted.container != container {
            return none("the snapshot before is of another container");
        }
        if chain.contains(&noted.layer) {
            return Self::Layer(noted.layer);
        }
        match tree.layer(noted.layer) {
            Some(_) => none("the container was switched to another state since the snapshot before"),
            None => none("the container no longer has the layer of the snapshot before"),
        }
    }
}

/// The layer of a container that a snapshot was made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NotedLayer {
    pub(super) container: String,
    pub(super) layer: ImageId,
}

impl NotedLayer {
    pub(super) fn of(manifest: &Manifest) -> Option<Self> {
        let disk = manifest.disk(Some(DISK)).ok()?;
        Some(Self {
            container: disk.notes.get(NOTE_CONTAINER)?.clone(),
            layer: disk.notes.get(NOTE_CONTAINER_LAYER)?.parse().ok()?,
        })
    }
}

/// The ranges that were written between the layer `base` and `point`. Ranges behind `known_bytes` count as written.
/// None if `point` is not based on it.
pub(super) fn changed_ranges(point: &PointInTime, base: ImageId, known_bytes: u64) -> Result<Option<DirtyBitmap>> {
    let Some(changes) = point.changes_since(base) else {
        return Ok(None);
    };
    let size_bytes = point.size_bytes();
    let mut changed = DirtyBitmap::new(size_bytes, granularity_of(size_bytes))?;
    let mut at = 0;
    while at < size_bytes {
        let list = changes.extents(at..size_bytes, EXTENT_COUNT)?;
        for extent in list.as_slice() {
            if extent.kind != ExtentKind::Absent {
                changed.set(extent.offset..extent.offset + extent.length);
            }
        }
        at = list.end();
    }
    changed.set(known_bytes.min(size_bytes)..size_bytes);
    Ok(Some(changed))
}

/// The granularity at which a bitmap covers the disk with at most 2^32 bits.
fn granularity_of(size_bytes: u64) -> u64 {
    size_bytes
        .div_ceil(1 << 32)
        .next_power_of_two()
        .max(GRANULARITY_BYTES_MIN)
}

#[cfg(test)]
mod tests {
    use super::granularity_of;

    #[test]
    fn a_bitmap_covers_every_size() {
        assert_eq!(granularity_of(1 << 30), 4096);
        assert_eq!(granularity_of(1 << 44), 4096);
        assert_eq!(granularity_of((1 << 44) + 1), 8192);
    }
}
