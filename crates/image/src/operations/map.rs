//! Maps offsets of a disk to the file of the chain, and the offset in it, that stores them.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use holdfast_block::{BlockDevice as _, ExtentKind};

use crate::Result;
use crate::chain::ChainLayer;
use crate::model::mapped_extent::MappedKind;

/// A range of the disk that is stored in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapEntry {
    /// First byte on the disk.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// The layer that stores it, 0 being the image itself; [`None`] if no layer does.
    pub depth: Option<usize>,
    /// How it is stored.
    pub content: MapContent,
}

/// How a range is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapContent {
    /// Reads as zero and takes no space.
    Zero,
    /// Stored uncompressed, from `host_offset` on of one of the layer's files (the data file, if a qcow2 has one).
    Data {
        /// Index of the file: 0 is the file of the layer itself, from 1 on its
        /// [`extent_files`](crate::LayerInfo::extent_files).
        file: usize,
        /// Offset in that file.
        host_offset: u64,
    },
    /// Stored compressed.
    Compressed,
}

pub(crate) fn map_at(layers: &[ChainLayer], offset: u64, length_bytes_max: u64) -> Result<MapEntry> {
    let mut length = length_bytes_max;
    if let Some(top) = layers.first() {
        length = length.min(top.device.size_bytes().saturating_sub(offset));
        top.device.check_bounds(offset, length.max(1))?;
    }
    for (depth, layer) in layers.iter().enumerate() {
        let held = layer.alone.size_bytes().saturating_sub(offset);
        if held == 0 {
            break;
        }
        let asked = length.min(held);
        let (found, content) = if let Some(layer) = &layer.layered {
            let run = layer.run(offset, asked)?;
            let content = match run.kind {
                MappedKind::Absent => None,
                MappedKind::Zero => Some(MapContent::Zero),
                MappedKind::Data { host } => {
                    layer.check_there(host, run.length)?;
                    let (file, host_offset) = layer.place_of(host);
                    Some(MapContent::Data { file, host_offset })
                }
                MappedKind::Compressed(compressed) => {
                    // Whether truncated data is incomplete shows only when it is decompressed.
                    if layer.check_there(compressed.offset, compressed.length_bytes).is_err() {
                        layer.read_compressed(&mut [0], offset, compressed)?;
                    }
                    Some(MapContent::Compressed)
                }
            };
            (run.length, content)
        } else {
            let list = layer.alone.extents(offset..offset + asked, 1)?;
            let content = match list.as_slice().first().map(|extent| extent.kind) {
                Some(ExtentKind::Data) | None => MapContent::Data {
                    file: 0,
                    host_offset: offset,
                },
                Some(ExtentKind::Zero | ExtentKind::Absent) => MapContent::Zero,
            };
            (list.end() - offset, Some(content))
        };
        length = found;
        if let Some(content) = content {
            return Ok(MapEntry {
                offset,
                length,
                depth: Some(depth),
                content,
            });
        }
    }
    Ok(MapEntry {
        offset,
        length,
        depth: None,
        content: MapContent::Zero,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use holdfast_block::{BlockDevice, ExtentKind, ExtentList, Result as DeviceResult};

    use super::{MapContent, map_at};
    use crate::chain::ChainLayer;

    /// A raw disk without holes.
    struct Full(u64);

    impl BlockDevice for Full {
        fn size_bytes(&self) -> u64 {
            self.0
        }

        fn read_at(&self, buffer: &mut [u8], _offset: u64) -> DeviceResult<()> {
            buffer.fill(1);
            Ok(())
        }

        fn extents(&self, range: std::ops::Range<u64>, extent_count_max: usize) -> DeviceResult<ExtentList> {
            let mut list = ExtentList::new(range.start, extent_count_max);
            list.push(range.end - range.start, ExtentKind::Data);
            Ok(list)
        }
    }

    /// Only a VMDK encodes several files in one offset; an offset in a large raw disk must not be decoded in
    /// this way.
    #[test]
    fn large_raw_offsets_map_to_the_first_file() {
        let size = 7 << 60;
        let device: Arc<dyn BlockDevice> = Arc::new(Full(size));
        let layer = ChainLayer {
            device: Arc::clone(&device),
            alone: device,
            layered: None,
            qcow2: None,
        };
        for offset in [0, 1 << 50, 6 << 60, size - 512] {
            let entry = map_at(std::slice::from_ref(&layer), offset, u64::MAX).unwrap();
            let content = MapContent::Data {
                file: 0,
                host_offset: offset,
            };
            assert_eq!(
                (entry.offset, entry.length, entry.content),
                (offset, size - offset, content)
            );
        }
    }
}
