//! Reads and writes, with or without the page cache.

use std::os::unix::fs::FileExt;

use super::open::OpenFile;
use crate::{Error, Result};

impl OpenFile {
    pub(super) fn read(&self, buffer: &mut [u8], offset: u64) -> Result<()> {
        let done = self
            .direct
            .read(&self.file, buffer, offset)
            .map_err(|error| Error::io("read", offset, error))?;
        if done < buffer.len() {
            return Err(self.shrunk(offset + done as u64));
        }
        Ok(())
    }

    pub(super) fn write(&self, data: &[u8], offset: u64) -> Result<()> {
        let written = self.direct.write(&self.file, data, offset);
        written.map(drop).map_err(|error| Error::io("write", offset, error))
    }

    pub(super) fn write_buffered(&self, data: &[u8], offset: u64) -> Result<()> {
        self.file
            .write_all_at(data, offset)
            .map_err(|error| Error::io("write", offset, error))
    }

    /// The error for missing bytes at `offset`.
    pub(super) fn shrunk(&self, offset: u64) -> Error {
        match self.file.metadata() {
            Ok(metadata) => Error::Shrunk {
                offset,
                size_bytes: self.size_bytes,
                actual_size_bytes: metadata.len(),
            },
            Err(error) => Error::io("look for the size", offset, error),
        }
    }
}
