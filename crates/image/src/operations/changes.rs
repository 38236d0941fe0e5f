//! What changed on a disk, by what changed in the files that it is made of.
//!
//! A file system can say which bytes of an image file differ between two of its snapshots. For a raw image these are the bytes of
//! the disk. For a format they are not: a cluster may be the same and lie elsewhere, or lie where it did and mean something else.
//!
//! So a byte of the disk is called unchanged only where both states read it from the same layer, the same place of its file and in
//! the same way (as it is, or as the same part of the same compressed bytes), and the file has not changed there; or where both read
//! zero without asking a file. Then both states compute the byte in the same way from the same input.
//!
//! Tables are not compared by their bytes: both are read, each through its own file, and what they *say* is compared.

use std::ops::Range;

use holdfast_block::DirtyBitmap;

use crate::chain::ChainLayer;
use crate::model::info::LayerInfo;
use crate::model::mapped_extent::MappedKind;
use crate::operations::image::Image;
use crate::{Error, Format, Result};

/// Which parts of a disk may differ between `before` and `after`, two states of one chain of files.
///
/// `files` says of each file of the chain, the image itself first, where it may differ; each is as large as the file of `after`.
/// A file that both states share, such as a template that nobody writes to, has a bitmap that is clear. The answer has bits of
/// `granularity_bytes`.
///
/// Where the states have another number of files, another format or another form of clusters, where a descriptor names other files, or
/// where an external data file is used, all of the disk counts as changed.
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
        all.map(|((layers, infos), file)| UnchangedFile::new(layers, infos, file))
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
        mark(&mut changed, offset..offset + length, (was.origin, is.origin), &kept);
        offset += length;
    }
    Ok(changed)
}

/// What one layer's file has kept, where both states read it alike.
struct UnchangedFile<'a> {
    changed: &'a DirtyBitmap,
    /// The file became shorter: what was read past its end now was data before.
    is_shorter: bool,
}

impl<'a> UnchangedFile<'a> {
    /// Nothing where places of the two states cannot be compared.
    fn new(
        (old, new): (&ChainLayer, &ChainLayer),
        (old_info, new_info): (&'a LayerInfo, &'a LayerInfo),
        changed: &'a DirtyBitmap,
    ) -> Option<Self> {
        // Which files there are a descriptor says, and it may say something else by now.
        let name = |info: &'a LayerInfo| info.delta.as_ref().map(|delta| &delta.file);
        if name(old_info) != name(new_info) {
            return None;
        }
        let is_alike = match (&old.qcow2, &new.qcow2) {
            // The other files of an image of several are not among those that are asked about.
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

    /// Calls `visit` with the parts of `range` that may have changed.
    fn for_each_changed(&self, range: Range<u64>, mut visit: impl FnMut(Range<u64>)) {
        let size = self.changed.size_bytes();
        let mut offset = range.start;
        while let Some(found) = self.changed.next_dirty(offset).filter(|found| found.start < range.end) {
            visit(found.start..found.end.min(range.end));
            offset = found.end;
        }
        // Past the end of both files both read zero.
        if self.is_shorter && range.end > size {
            visit(range.start.max(size)..range.end);
        }
    }
}

/// The layer that bytes come from, and where in it; [`None`] where no layer has them.
type Origin = Option<(usize, MappedKind)>;

/// A run of bytes that come from one place.
struct OriginRun {
    length: u64,
    origin: Origin,
}

/// Where the bytes at `offset` come from, at most `length_max` of them.
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

/// Marks what may differ of `range`, which comes from one place before and from one place now.
fn mark(changed: &mut DirtyBitmap, range: Range<u64>, origins: (Origin, Origin), kept: &[UnchangedFile<'_>]) {
    let is_zero = |origin: Origin| matches!(origin, None | Some((_, MappedKind::Zero)));
    match origins {
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
