//! Where the bytes of a disk are: which file of the chain, and where in it.

use holdfast_block::{BlockDevice as _, ExtentKind};

use crate::Result;
use crate::chain::ChainLayer;
use crate::run::RunKind;

/// A run of bytes of a disk that come from one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapEntry {
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// The layer that decides about them, 0 being the image itself; [`None`] where no layer holds them.
    pub depth: Option<usize>,
    /// What they are.
    pub content: MapContent,
}

/// What a run of bytes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MapContent {
    /// Reads as zero, and takes no space.
    Zero,
    /// Stored as it is, beginning at `host_offset` of one of the layer's files (of its data file, where a qcow2 has one).
    Data {
        /// Which one: 0 is the file of the layer itself, others are its [`extent_files`](crate::LayerInfo::extent_files), from 1 on.
        file: usize,
        /// Offset in that file.
        host_offset: u64,
    },
    /// Stored compressed.
    Compressed,
}

pub(crate) fn map_at(layers: &[ChainLayer], offset: u64, length_bytes_max: u64) -> Result<MapEntry> {
    let top = &layers[0].device;
    let mut length = length_bytes_max.min(top.size_bytes().saturating_sub(offset));
    top.check_bounds(offset, length.max(1))?;
    for (depth, layer) in layers.iter().enumerate() {
        let held = layer.alone.size_bytes().saturating_sub(offset);
        if held == 0 {
            break;
        }
        let asked = length.min(held);
        let (found, content) = if let Some(layer) = &layer.layered {
            let run = layer.run(offset, asked)?;
            let content = match run.kind {
                RunKind::Absent => None,
                RunKind::Zero => Some(MapContent::Zero),
                RunKind::Data { host } => {
                    layer.check_there(host, run.length)?;
                    let (file, host_offset) = layer.place_of(host);
                    Some(MapContent::Data { file, host_offset })
                }
                RunKind::Compressed(compressed) => {
                    // Whether bytes are missing that the file does not have is known by decompressing it.
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
