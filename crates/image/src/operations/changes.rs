//! Finds what changed on a disk from what changed in its files.
//!
//! A file system can list the bytes of an image file that differ between two of its snapshots. For a raw image these
//! are the bytes of the disk. For other formats they are not: a cluster may have moved without a change of its data,
//! or stay in place and be mapped elsewhere.
//!
//! Therefore a byte of the disk counts as unchanged only if both states read it from the same layer, the same offset
//! of its file and in the same way (uncompressed, or as the same part of the same compressed data), and the file did
//! not change there; or if both states read it as zero without reading a file. Then both states compute the byte in
//! the same way from the same input.
//!
//! Tables are not compared byte by byte: both are parsed, each from its own file, and their mappings are compared.

use std::ops::Range;

use holdfast_block::DirtyBitmap;

use crate::chain::ChainLayer;
use crate::model::info::LayerInfo;
use crate::model::mapped_extent::MappedKind;
use crate::operations::image::Image;
use crate::{Error, Format, Result};

/// Returns which ranges of the disk may differ between `before` and `after`, two states of one chain of files.
///
/// `files` lists for each file of the chain, the image itself first, where it may differ; each bitmap has the size of
/// the file of `after`. A file that both states share, such as a template that is never written to, has a clear
/// bitmap. The result has one bit for `granularity_bytes`.
///
/// The whole disk counts as changed if the states have different numbers of files, formats or cluster layouts, if a
/// descriptor refers to different files, or if the image has an external data file.
pub fn changed_on_disk(
    before: &Image,
    after: &Image,
    files: &[DirtyBitmap],
    granularity_bytes: u64,
) -> Result<DirtyBitmap> {
    let (old, new) = (before.chain(), after.chain());
    let size_before = old[0].device.size_bytes();
    let size_after = new[0].device.size_bytes();
    let mut changed = DirtyBitmap::new(size_after, granularity_bytes).map_err(Error::from)?;
    let kept: Option<Vec<UnchangedFile<'_>>> = if old.len() == new.len() && new.len() == files.len() {
        let infos = before.layers().iter().zip(after.layers());
        let layers = old.iter().zip(new);
        let all = layers.zip(infos).zip(files);
        all.map(|(((old, new), (old_info, new_info)), file)| UnchangedFile::new(old, new, old_info, new_info, file))
            .collect()
    } else {
        None
    };
    let Some(kept) = kept else {
        changed.set_all();
        return Ok(changed);
    };
    changed.set(size_before..size_after);
    let common = size_before.min(size_after);
    let mut offset = 0;
    while offset < common {
        let (was, is) = (
            piece_at(old, offset, common - offset)?,
            piece_at(new, offset, common - offset)?,
        );
        let length = was.length.min(is.length);
        let transition = Transition {
            before: was.origin,
            after: is.origin,
        };
        mark(&mut changed, offset..offset + length, &transition, &kept);
        offset += length;
    }
    Ok(changed)
}

/// The unchanged ranges of one file, usable where both states read it alike.
struct UnchangedFile<'a> {
    changed: &'a DirtyBitmap,
    /// The file was truncated: what now reads as past its end was data before.
    is_shorter: bool,
}

impl<'a> UnchangedFile<'a> {
    /// None if offsets of the two states cannot be compared.
    fn new(
        old: &ChainLayer,
        new: &ChainLayer,
        old_info: &'a LayerInfo,
        new_info: &'a LayerInfo,
        changed: &'a DirtyBitmap,
    ) -> Option<Self> {
        // A descriptor may refer to different files in the two states.
        let name = |info: &'a LayerInfo| info.delta.as_ref().map(|delta| &delta.file);
        if name(old_info) != name(new_info) {
            return None;
        }
        let is_alike = match (&old.qcow2, &new.qcow2) {
            // The caller has no bitmaps of the further files of a VMDK.
            (None, None) => old_info.format == new_info.format && new_info.format != Format::Vmdk,
            (Some(old), Some(new)) => {
                old.header.geometry == new.header.geometry
                    && old.header.compression == new.header.compression
                    && !old.header.has_data_file()
                    && !new.header.has_data_file()
            }
            _ => false,
        };
        (is_alike && changed.size_bytes() == new_info.file_bytes).then_some(Self {
            changed,
            is_shorter: new_info.file_bytes < old_info.file_bytes,
        })
    }

    /// Calls `visit` for the parts of `range` that may have changed.
    fn for_each_changed(&self, range: Range<u64>, mut visit: impl FnMut(Range<u64>)) {
        let size = self.changed.size_bytes();
        let mut offset = range.start;
        while let Some(found) = self.changed.next_dirty(offset).filter(|found| found.start < range.end) {
            visit(found.start..found.end.min(range.end));
            offset = found.end;
        }
        // Past the end of both files both states read zero.
        if self.is_shorter && range.end > size {
            visit(range.start.max(size)..range.end);
        }
    }
}

/// A layer and the mapping in it; [`None`] if no layer has the bytes.
type Origin = Option<(usize, MappedKind)>;

/// A range of bytes with one origin.
struct OriginRun {
    length: u64,
    origin: Origin,
}

/// The origin of the bytes at `offset`, at most `length_max` of them.
fn piece_at(layers: &[ChainLayer], offset: u64, length_max: u64) -> Result<OriginRun> {
    let mut length = length_max;
    for (depth, layer) in layers.iter().enumerate() {
        let held = layer.alone.size_bytes().saturating_sub(offset);
        if held == 0 {
            break;
        }
        length = length.min(held);
        let Some(layer) = &layer.layered else {
            let kind = MappedKind::Data { host: offset };
            return Ok(OriginRun {
                length,
                origin: Some((depth, kind)),
            });
        };
        let run = layer.run(offset, length)?;
        length = run.length;
        if run.kind != MappedKind::Absent {
            return Ok(OriginRun {
                length,
                origin: Some((depth, run.kind)),
            });
        }
    }
    Ok(OriginRun { length, origin: None })
}

/// The origin of a range before and after.
struct Transition {
    before: Origin,
    after: Origin,
}

/// Marks what may differ in `range`.
fn mark(changed: &mut DirtyBitmap, range: Range<u64>, transition: &Transition, kept: &[UnchangedFile<'_>]) {
    let is_zero = |origin: Origin| matches!(origin, None | Some((_, MappedKind::Zero)));
    match (transition.before, transition.after) {
        (was, is) if is_zero(was) && is_zero(is) => {}
        (Some((was_in, was)), Some((is_in, is))) if was_in == is_in && was == is => match is {
            MappedKind::Data { host } => {
                let length = range.end - range.start;
                kept[is_in].for_each_changed(host..host + length, |found| {
                    changed.set(range.start + (found.start - host)..range.start + (found.end - host));
                });
            }
            MappedKind::Compressed(compressed) => {
                let stored = compressed.offset..compressed.offset + compressed.length_bytes;
                kept[is_in].for_each_changed(stored, |_| changed.set(range.clone()));
            }
            MappedKind::Zero | MappedKind::Absent => {}
        },
        _ => changed.set(range),
    }
}
