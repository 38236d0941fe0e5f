//! Content of the files of a mounted snapshot.

use std::sync::Arc;

use holdfast_block::{BlockDeviceMut as _, MemoryDevice};
use holdfast_repo::{DiskRecord, Repository, SnapshotId};
use holdfast_serve::fuse::FileContent;
use holdfast_serve::nbd::ExportDevice;

/// A disk or a stream of a snapshot.
pub(super) struct RecordContent {
    pub(super) repository: Arc<Repository>,
    pub(super) snapshot: SnapshotId,
    pub(super) record: DiskRecord,
}

impl FileContent for RecordContent {
    fn size_bytes(&self) -> u64 {
        self.record.size_bytes
    }

    fn identity(&self) -> String {
        format!("{}:{}", self.snapshot.short(), self.record.name)
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        Ok(ExportDevice::ReadOnly(Arc::new(self.repository.device(&self.record))))
    }
}

/// A text.
pub(super) struct TextContent {
    pub(super) identity: String,
    pub(super) text: Vec<u8>,
}

impl FileContent for TextContent {
    fn size_bytes(&self) -> u64 {
        self.text.len() as u64
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn open(&self) -> std::io::Result<ExportDevice> {
        let device = MemoryDevice::new(self.size_bytes());
        device.write_at(&self.text, 0).map_err(std::io::Error::other)?;
        Ok(ExportDevice::ReadOnly(Arc::new(device)))
    }
}
