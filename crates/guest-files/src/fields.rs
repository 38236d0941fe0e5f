//! Numbers and ranges of a stored structure; reading past its end is an error.

#![deny(clippy::indexing_slicing, reason = "the bytes come from a guest")]

use crate::{Error, Result};

/// The bytes of a structure.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fields<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Fields<'a> {
    /// `what` names the structure in errors.
    pub(crate) fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { bytes, what }
    }

    pub(crate) fn bytes(&self, at: usize, length: usize) -> Result<&'a [u8]> {
        let end = at.checked_add(length);
        end.and_then(|end| self.bytes.get(at..end)).ok_or_else(|| {
            Error::damaged(
                self.what,
                format!("{length} bytes at {at} reach past its end at {}", self.bytes.len()),
            )
        })
    }

    fn array<const N: usize>(&self, at: usize) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(at, N)?);
        Ok(array)
    }

    pub(crate) fn u8(&self, at: usize) -> Result<u8> {
        Ok(u8::from_le_bytes(self.array(at)?))
    }

    pub(crate) fn u16(&self, at: usize) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array(at)?))
    }

    pub(crate) fn u32(&self, at: usize) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(at)?))
    }

    pub(crate) fn u64(&self, at: usize) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(at)?))
    }

    pub(crate) fn be_u16(&self, at: usize) -> Result<u16> {
        Ok(u16::from_be_bytes(self.array(at)?))
    }

    pub(crate) fn be_u64(&self, at: usize) -> Result<u64> {
        Ok(u64::from_be_bytes(self.array(at)?))
    }

    pub(crate) fn be_u32(&self, at: usize) -> Result<u32> {
        Ok(u32::from_be_bytes(self.array(at)?))
    }

    /// The structure without its first `at` bytes.
    pub(crate) fn from(&self, at: usize) -> Result<Self> {
        let bytes = self.bytes(at, self.bytes.len().saturating_sub(at))?;
        Ok(Self { bytes, ..*self })
    }

    pub(crate) fn as_slice(&self) -> &'a [u8] {
        self.bytes
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// An error about this structure.
    pub(crate) fn damaged(&self, detail: impl Into<String>) -> Error {
        Error::damaged(self.what, detail)
    }
}

/// UTF-16 (little-endian) as UTF-8. An unpaired surrogate becomes three bytes, as in WTF-8: every name has one spelling.
pub(crate) fn utf8_of_utf16(bytes: &[u8]) -> Vec<u8> {
    let units = bytes.chunks_exact(2).map(|pair| match *pair {
        [low, high] => u16::from_le_bytes([low, high]),
        _ => 0,
    });
    let mut text = Vec::with_capacity(bytes.len());
    for unit in char::decode_utf16(units) {
        match unit {
            Ok(letter) => text.extend_from_slice(letter.encode_utf8(&mut [0; 4]).as_bytes()),
            Err(error) => {
                let unit = error.unpaired_surrogate();
                let [high, low] = unit.to_be_bytes();
                let low6 = low & 0x3f;
                let middle6 = ((high & 0x0f) << 2) | (low >> 6);
                text.extend_from_slice(&[0xe0 | (high >> 4), 0x80 | middle6, 0x80 | low6]);
            }
        }
    }
    text
}

/// A text that ends at the first zero byte, without trailing spaces; none if nothing is left.
pub(crate) fn label_of(bytes: &[u8]) -> Option<String> {
    let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text).trim_end().to_owned();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::{Fields, label_of, utf8_of_utf16};

    #[test]
    fn nothing_is_read_past_the_end() {
        let fields = Fields::new("header", &[1, 2, 3]);
        assert_eq!(fields.u16(1).unwrap(), 0x0302);
        assert!(fields.u16(2).is_err());
        assert!(fields.bytes(usize::MAX, 2).is_err());
        assert!(fields.from(4).is_err());
        assert_eq!(fields.from(3).unwrap().len(), 0);
    }

    #[test]
    fn names_keep_unpaired_surrogates() {
        assert_eq!(utf8_of_utf16(&[0xe4, 0]), "ä".as_bytes());
        assert_eq!(utf8_of_utf16(&[0x3d, 0xd8, 0, 0xde]), "😀".as_bytes());
        assert_eq!(utf8_of_utf16(&[0x3d, 0xd8]), [0xed, 0xa0, 0xbd]);
    }

    #[test]
    fn labels_end_at_the_first_zero() {
        assert_eq!(label_of(b"DATA  \0junk").as_deref(), Some("DATA"));
        assert_eq!(label_of(&[0; 16]), None);
    }
}
