//! A sequential input: it is read once from start to end and counts its offset.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use std::io::{ErrorKind, Read};

use holdfast_block::to_usize;

use crate::error::corrupt;
use crate::{Error, Result};

const SECTOR_BYTES: u64 = 512;
/// Buffer size for skipped bytes.
pub(crate) const SKIP_BYTES: u64 = 64 << 10;

/// A stream with its current offset.
pub(crate) struct ForwardReader<R> {
    pub(crate) reader: R,
    /// The name for errors.
    pub(crate) image: String,
    pub(crate) at: u64,
}

impl<R: Read> ForwardReader<R> {
    /// Reads until `buffer` is full or the stream ends; returns the number of bytes read.
    pub(crate) fn read_up_to(&mut self, buffer: &mut [u8]) -> Result<usize> {
        let mut count = 0;
        while count < buffer.len() {
            match self.reader.read(buffer.get_mut(count..).unwrap_or_default()) {
                Ok(0) => break,
                Ok(more) => count += more,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(holdfast_block::Error::io("read", self.at + count as u64, error).into()),
            }
        }
        self.at += count as u64;
        Ok(count)
    }

    /// Fills `buffer`; if the stream ends earlier, the error says that it is truncated in `what`.
    pub(crate) fn read(&mut self, buffer: &mut [u8], what: &'static str) -> Result<()> {
        let count = self.read_up_to(buffer)?;
        if count < buffer.len() {
            return Err(self.cut_off(what));
        }
        Ok(())
    }

    /// The next sector; none if the stream ends before its end.
    pub(crate) fn sector(&mut self, what: &'static str) -> Result<Option<[u8; to_usize(SECTOR_BYTES)]>> {
        let mut sector = [0; to_usize(SECTOR_BYTES)];
        match self.read_up_to(&mut sector)? {
            0 => Ok(None),
            count if count == sector.len() => Ok(Some(sector)),
            _ => Err(self.cut_off(what)),
        }
    }

    /// Skips to `offset`.
    pub(crate) fn skip_to(&mut self, offset: u64, what: &'static str) -> Result<()> {
        let mut buffer = vec![0; to_usize(SKIP_BYTES.min(offset.saturating_sub(self.at)))];
        while self.at < offset {
            let length = to_usize(SKIP_BYTES.min(offset - self.at));
            self.read(buffer.get_mut(..length).unwrap_or_default(), what)?;
        }
        Ok(())
    }

    /// Reads and discards the rest; returns the offset of the first byte that is not zero. Stops after `length_max`
    /// bytes.
    pub(crate) fn drain(&mut self, length_max: u64) -> Result<Option<u64>> {
        let mut buffer = vec![0; to_usize(SKIP_BYTES)];
        let start = self.at;
        loop {
            let before = self.at;
            let count = self.read_up_to(&mut buffer)?;
            if let Some(found) = buffer.iter().take(count).position(|byte| *byte != 0) {
                return Ok(Some(before + found as u64));
            }
            if count < buffer.len() {
                return Ok(None);
            }
            if self.at - start > length_max {
                return Ok(Some(self.at));
            }
        }
    }

    /// The error of a truncated stream.
    pub(crate) fn cut_off(&self, what: &'static str) -> Error {
        corrupt(&self.image, what, self.at, "it was cut off: the stream ends here")
    }

    pub(crate) fn not_in_order(&self, detail: impl Into<String>) -> Error {
        Error::NotInOrder {
            image: self.image.clone(),
            detail: detail.into(),
        }
    }

    pub(crate) fn unsupported(&self, feature: &str, detail: &str) -> Error {
        Error::UnsupportedFeature {
            image: self.image.clone(),
            feature: feature.to_owned(),
            detail: detail.to_owned(),
        }
    }
}
