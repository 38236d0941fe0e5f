//! A disk that is being uploaded.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use crate::failure::Answer;
use crate::pool::Pool;

/// A disk that is written to, while others may read it.
pub(crate) struct Target<'a> {
    pool: &'a Pool,
    vdi: String,
    file: Arc<File>,
    pub(crate) size_bytes: u64,
}

impl<'a> Target<'a> {
    pub(crate) fn new(pool: &'a Pool, vdi: &str) -> Answer<Self> {
        let state = pool.state();
        let disk = state.disk(vdi)?;
        Ok(Self {
            pool,
            vdi: vdi.to_owned(),
            file: disk.file()?,
            size_bytes: disk.size_bytes,
        })
    }

    /// Writes `bytes` at `offset`, with change tracking.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let end = offset + bytes.len() as u64;
        if end > self.size_bytes {
            return Err(io::Error::other("write past the end of the disk"));
        }
        self.file.write_all_at(bytes, offset)?;
        if let Ok(disk) = self.pool.state().disk_mut(&self.vdi) {
            disk.touch(offset, end);
        }
        Ok(())
    }
}
