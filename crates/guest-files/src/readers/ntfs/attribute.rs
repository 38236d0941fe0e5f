//! Attributes of files, as they are stored in records.

use crate::Result;
use crate::fields::Fields;

/// An attribute, or a part of one that is spread over records.
#[derive(Debug, Clone)]
pub(super) struct Attribute {
    pub(super) kind: u32,
    pub(super) name: Vec<u8>,
    pub(super) bytes: Vec<u8>,
}

impl Attribute {
    pub(super) fn fields(&self) -> Fields<'_> {
        Fields::new("NTFS attribute", &self.bytes)
    }

    pub(super) fn is_resident(&self) -> Result<bool> {
        Ok(self.fields().u8(8)? == 0)
    }

    /// The value of an attribute that is stored in its record.
    pub(super) fn resident_value(&self) -> Result<&[u8]> {
        let fields = self.fields();
        let (length, at) = (fields.u32(0x10)? as usize, usize::from(fields.u16(0x14)?));
        fields.bytes(at, length)
    }

    /// Length of the value; known to the first part of an attribute only.
    pub(super) fn size_bytes(&self) -> Result<u64> {
        if self.is_resident()? {
            Ok(u64::from(self.fields().u32(0x10)?))
        } else {
            self.fields().u64(0x30)
        }
    }

    /// The first cluster of the value that this part describes.
    pub(super) fn first_cluster(&self) -> Result<u64> {
        if self.is_resident()? {
            Ok(0)
        } else {
            self.fields().u64(0x10)
        }
    }
}
