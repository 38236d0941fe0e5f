//! An opened image: its headers and metadata, with its log applied.

use std::sync::Arc;

use holdfast_block::Record;

use super::header::{Region, SIGNATURE, VhdxHeader, load_regions};
use super::log::ReplayedFile;
use super::metadata::{DISK_ID, DISK_SIZE, Metadata};
use crate::Result;
use crate::error::corrupt;
use crate::file::{Access, ImageFile};
use crate::model::bytes::le_utf16;
use crate::model::info::{BlockInfo, ImageKind, ParentInfo};

/// Header, regions and metadata of an image, and its file with the log applied.
pub(crate) struct OpenedVhdx {
    pub(crate) header: VhdxHeader,
    pub(crate) bat: Region,
    pub(crate) metadata: Metadata,
    /// Offset of the disk's identity in the metadata.
    pub(crate) id_at: u64,
    /// Offset of the disk's size in the metadata.
    pub(crate) size_at: u64,
    pub(crate) creator: String,
    pub(crate) file: Arc<dyn ImageFile>,
    /// Whether the log had pending changes: the image was not closed.
    pub(crate) has_log: bool,
}

impl OpenedVhdx {
    /// Opens the image in `file`. Its log is replayed in memory; with write access, in the file.
    pub(crate) fn load(file: Arc<dyn ImageFile>, access: Access, image: &str) -> Result<Self> {
        let mut start = [0; 520];
        file.read_at(&mut start, 0)?;
        if !start.starts_with(SIGNATURE) {
            return Err(corrupt(image, "file identifier", 0, "it is missing"));
        }
        let creator = le_utf16(Record::new(&start).field::<8, 512>());
        let mut header = VhdxHeader::load(&*file, image)?;
        let mut replayed = ReplayedFile::load(Arc::clone(&file), &header, image)?;
        let has_log = replayed.is_some();
        if access.is_write()
            && let Some(replayed) = replayed.take()
        {
            replayed.store(&mut header, image)?;
        }
        let file = replayed.map_or(file, |replayed| Arc::new(replayed) as Arc<dyn ImageFile>);
        let (bat, region) = load_regions(&*file, image)?;
        let metadata = Metadata::load(&*file, region, image)?;
        let id_at = super::metadata::place_of(&*file, region, DISK_ID, image)?;
        let size_at = super::metadata::place_of(&*file, region, DISK_SIZE, image)?;
        let needed = metadata.entry_count() * 8;
        if needed > bat.length_bytes || bat.offset + needed > file.length_bytes()? {
            return Err(corrupt(
                image,
                "region table",
                bat.offset,
                format!(
                    "the block allocation table has {} bytes, but needs {needed}",
                    bat.length_bytes
                ),
            ));
        }
        Ok(Self {
            header,
            bat,
            metadata,
            id_at,
            size_at,
            creator,
            file,
            has_log,
        })
    }

    pub(crate) fn describe(&self) -> BlockInfo {
        BlockInfo {
            kind: match (self.metadata.has_parent, self.metadata.is_fixed) {
                (true, _) => ImageKind::Differencing,
                (false, true) => ImageKind::Fixed,
                (false, false) => ImageKind::Dynamic,
            },
            block_bytes: self.metadata.block_bytes,
            sector_bytes: self.metadata.sector_bytes,
            id: Some(self.metadata.id),
            modification: Some(self.header.data_write.to_string()),
            parent: self.metadata.parent.as_ref().map(|parent| ParentInfo {
                id: None,
                modification: Some(parent.linkage.to_string()),
                names: parent.names.clone(),
            }),
            creator: Some(self.creator.clone()).filter(|creator| !creator.is_empty()),
        }
    }
}
