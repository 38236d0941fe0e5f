//! An opened VMDK.

use std::ops::Range;
use std::path::PathBuf;

use super::SECTOR_BYTES;
use super::descriptor::{Descriptor, NO_PARENT};
use super::tables::{OpenedVmdk, VmdkExtentKind};
use crate::model::info::{BlockInfo, ImageKind, ParentInfo, USUAL_SECTOR_BYTES};

pub(crate) struct Vmdk {
    pub(crate) descriptor: Descriptor,
    pub(crate) text: DescriptorPlace,
    pub(crate) opened: OpenedVmdk,
    /// The extent files other than the file with the descriptor.
    pub(crate) extent_files: Vec<PathBuf>,
}

impl Vmdk {
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.opened.parts.last().map_or(0, |part| part.start + part.length)
    }

    pub(crate) fn describe(&self) -> BlockInfo {
        let grain = self.opened.parts.iter().find_map(|part| match &part.kind {
            VmdkExtentKind::Sparse { extent, .. } => Some(extent),
            _ => None,
        });
        BlockInfo {
            kind: match (&self.descriptor.parent, grain) {
                (Some(_), _) => ImageKind::Differencing,
                (None, None) => ImageKind::Fixed,
                (None, Some(extent)) if extent.is_compressed => ImageKind::Stream,
                (None, Some(_)) => ImageKind::Dynamic,
            },
            block_bytes: grain.map_or(SECTOR_BYTES, |extent| extent.grain_bytes),
            sector_bytes: USUAL_SECTOR_BYTES,
            id: self.descriptor.id,
            modification: Some(format!("{:08x}", self.descriptor.content_id)),
            parent: self.descriptor.parent.as_ref().map(|(content_id, hint)| ParentInfo {
                id: self.descriptor.parent_id,
                modification: (*content_id != NO_PARENT).then(|| format!("{content_id:08x}")),
                names: Some(hint.clone()).filter(|hint| !hint.is_empty()).into_iter().collect(),
            }),
            creator: None,
        }
    }
}

/// Where the descriptor's text is stored.
#[derive(Debug, Clone)]
pub(crate) enum DescriptorPlace {
    /// In this range of the first extent.
    Inside(Range<u64>),
    /// In a file of its own.
    WholeFile,
}
