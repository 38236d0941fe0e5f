//! Changes the size: grows the L1 table if needed, zeroes data past the old end, then writes the size to the header.

use std::ops::Range;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, to_usize};

use super::geometry::{OFFSET_MASK, POINTER_BYTES};
use super::header::{L1_AT, L1_BYTES_MAX, Qcow2Header, SIZE_AT, load_header};
use super::layer::Qcow2Layer;
use super::state::Qcow2State;
use super::writer::Qcow2Mut;
use super::{bitmap, snapshot};
use crate::file::ImageFile;
use crate::model::bytes::from_words;
use crate::model::qcow2_info::TableLocation;
use crate::{Error, Result};

/// Resizes the disk of the image, which has the backing device `backing`, to `after_bytes`, durably.
pub(crate) fn resize(
    file: &Arc<dyn ImageFile>,
    image: &str,
    backing: Option<&Arc<dyn BlockDevice>>,
    after_bytes: u64,
) -> Result<()> {
    let header = load_header(&**file, image)?;
    let before_bytes = header.size_bytes;
    require_resizable(&**file, &header, image)?;
    let backing_bytes = backing.map_or(0, BlockDevice::size_bytes);
    let layer = |header: Qcow2Header| Qcow2Layer::new(image.into(), header, Arc::clone(file), None, backing.cloned());
    if after_bytes > before_bytes {
        grow_l1(Qcow2State::new(layer(header)?)?, after_bytes)?;
        let mut header = load_header(&**file, image)?;
        header.size_bytes = after_bytes;
        let layer = layer(header)?;
        let ranges = held(&layer, before_bytes..after_bytes, backing_bytes);
        let device = Qcow2Mut::new(layer)?;
        for range in ranges {
            device.write_zeroes(range)?;
        }
        device.flush()?;
        return write_size(&**file, after_bytes);
    }
    // The backing file has no data past the end, so clusters there can be released even in version 2, which has no
    // zero clusters.
    let is_hidden = header.has_zero_clusters();
    let mut layer = layer(header)?;
    layer.backing = layer.backing.filter(|_| is_hidden);
    let ranges = held(&layer, after_bytes..before_bytes, backing_bytes);
    let device = Qcow2Mut::new(layer)?;
    write_size(&**file, after_bytes)?;
    for range in ranges {
        device.release(range)?;
    }
    device.flush()?;
    // Sync the decrements of released clusters, which a flush leaves to the next one.
    Ok(file.sync()?)
}

fn require_resizable(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<()> {
    let detail = if !bitmap::load(file, header, image)?.is_empty() {
        "it has bitmaps, which depend on its size; remove them with qemu-img bitmap --remove first"
    } else if header.version < 3 && !snapshot::load(file, header, image)?.0.is_empty() {
        "it has snapshots that do not store the size of the disk, as in version 2; delete them or convert it first"
    } else {
        return Ok(());
    };
    Err(Error::NotResizable {
        image: image.to_owned(),
        detail: detail.to_owned(),
    })
}

/// The parts of `range` that may have data, according to the L1 table or in the backing device.
fn held(layer: &Qcow2Layer, range: Range<u64>, backing_bytes: u64) -> Vec<Range<u64>> {
    let coverage = layer.header.geometry.l2_coverage_bytes();
    let first = range.start / coverage;
    let mut held: Vec<Range<u64>> = Vec::new();
    for (index, entry) in (first..range.end.div_ceil(coverage)).zip(&layer.mapping.l1[to_usize(first)..]) {
        let start = range.start.max(index * coverage);
        let end = range.end.min((index + 1).saturating_mul(coverage));
        if entry & OFFSET_MASK != 0 {
            held.push(start..end);
        } else if start < backing_bytes {
            held.push(start..end.min(backing_bytes));
        }
    }
    held
}

/// Changes one sector of the header, which is written atomically.
fn write_size(file: &dyn ImageFile, size_bytes: u64) -> Result<()> {
    file.write_at(&size_bytes.to_be_bytes(), SIZE_AT)?;
    Ok(file.sync()?)
}

/// Grows the L1 table for a disk of `size_bytes`, durably.
fn grow_l1(mut state: Qcow2State, size_bytes: u64) -> Result<()> {
    let geometry = state.geometry();
    let old = state.layer.header.l1;
    let entries = geometry.l1_entries_for(size_bytes);
    if entries <= old.entries {
        return Ok(());
    }
    if entries * POINTER_BYTES > L1_BYTES_MAX {
        let bytes_max = u128::from(L1_BYTES_MAX / POINTER_BYTES) * u128::from(geometry.l2_coverage_bytes());
        return Err(Error::InvalidOption {
            option: "size",
            detail: format!(
                "a qcow2 image with clusters of {} bytes supports at most {bytes_max} bytes",
                geometry.cluster_bytes()
            ),
        });
    }
    state.clear_autoclear()?;
    let file = Arc::clone(&state.layer.file);
    let clusters = |entries: u64| geometry.clusters_for(entries * POINTER_BYTES);
    let mut table = state.layer.mapping.l1.clone();
    table.resize(to_usize(entries), 0);
    let is_in_place = clusters(entries) == clusters(old.entries);
    let new = TableLocation {
        offset: if is_in_place {
            old.offset
        } else {
            state.allocator.allocate_row(clusters(entries))?.start
        },
        entries,
    };
    // Includes the rest of the last cluster, whose content is unknown.
    table.resize(to_usize(geometry.offset_of(clusters(entries)) / POINTER_BYTES), 0);
    if is_in_place {
        let added = &table[to_usize(old.entries)..];
        file.write_at(&from_words(added), old.offset + old.entries * POINTER_BYTES)?;
    } else {
        file.write_at(&from_words(&table), new.offset)?;
        state.allocator.protect("l1 table", new.offset, clusters(entries))?;
    }
    // Makes the table and the refcounts of its clusters durable.
    state.commit()?;
    // Twelve bytes in the first sector of the header, which is written atomically.
    let mut field = [0; 12];
    field[..4].copy_from_slice(&u32::try_from(entries).unwrap_or(u32::MAX).to_be_bytes());
    field[4..].copy_from_slice(&new.offset.to_be_bytes());
    file.write_at(&field, L1_AT)?;
    file.sync()?;
    if !is_in_place && old.entries > 0 {
        table.truncate(to_usize(entries));
        state.layer.header.l1 = new;
        state.layer.mapping.l1 = table;
        for number in 0..clusters(old.entries) {
            state.allocator.release_later(old.offset + geometry.offset_of(number));
        }
        state.commit()?;
        file.sync()?;
    }
    Ok(())
}
