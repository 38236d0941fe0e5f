//! Little-endian fields of a payload.

#![deny(clippy::indexing_slicing)]

use std::time::Duration;

use crate::{Error, Result};

/// Reads the fields of a payload from front to back.
pub(crate) struct FieldReader<'a> {
    bytes: &'a [u8],
    message: &'static str,
}

impl<'a> FieldReader<'a> {
    /// `message` is the name for errors.
    pub(crate) fn new(bytes: &'a [u8], message: &'static str) -> Self {
        Self { bytes, message }
    }

    pub(crate) fn malformed(&self, detail: &'static str) -> Error {
        Error::Malformed {
            message: self.message,
            detail,
        }
    }

    pub(crate) fn array<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH]> {
        let (field, rest) = self
            .bytes
            .split_first_chunk()
            .ok_or(self.malformed("it is too short"))?;
        self.bytes = rest;
        Ok(*field)
    }

    pub(crate) fn u8(&mut self) -> Result<u8> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    pub(crate) fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// A time in nanoseconds.
    pub(crate) fn duration(&mut self) -> Result<Duration> {
        self.u64().map(Duration::from_nanos)
    }

    pub(crate) fn bytes(&mut self, length: usize) -> Result<&'a [u8]> {
        let (field, rest) = self
            .bytes
            .split_at_checked(length)
            .ok_or(self.malformed("it is too short"))?;
        self.bytes = rest;
        Ok(field)
    }

    /// A text with its length in 16 bits before it.
    pub(crate) fn text(&mut self) -> Result<String> {
        let length = self.u16()?;
        let bytes = self.bytes(usize::from(length))?;
        String::from_utf8(bytes.to_vec()).map_err(|_| self.malformed("a text is not UTF-8"))
    }

    /// All remaining bytes.
    pub(crate) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.bytes)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Refuses further bytes.
    pub(crate) fn finish(self) -> Result<()> {
        if self.bytes.is_empty() {
            Ok(())
        } else {
            Err(self.malformed("it is too long"))
        }
    }
}

/// Appends fields to a payload.
pub(crate) struct FieldWriter<'a>(pub(crate) &'a mut Vec<u8>);

impl FieldWriter<'_> {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(crate) fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }

    /// A time in nanoseconds; longer than 584 years counts as 584 years.
    pub(crate) fn duration(&mut self, value: Duration) {
        self.u64(u64::try_from(value.as_nanos()).unwrap_or(u64::MAX));
    }

    pub(crate) fn bytes(&mut self, value: &[u8]) {
        self.0.extend_from_slice(value);
    }

    /// A text with its length; what exceeds 65535 bytes is cut off.
    pub(crate) fn text(&mut self, value: &str) {
        let mut end = value.len().min(usize::from(u16::MAX));
        while !value.is_char_boundary(end) {
            end -= 1;
        }
        let value = value.get(..end).unwrap_or_default();
        self.u16(u16::try_from(value.len()).expect("it was cut off"));
        self.bytes(value.as_bytes());
    }
}
