//! Records of the master file table, and their attributes.
//!
//! The last two bytes of every sector of a record are replaced by a number that is the same in all of them: a record
//! that was written in part is found. The original bytes are in a list after the header.

use std::collections::BTreeSet;
use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use super::attribute::Attribute;
use super::stream::AttributeStream;
use super::{Geometry, kind};
use crate::fields::Fields;
use crate::{Error, Result};

/// Bits of the number of a record in a reference; the other 16 are the count of its uses.
pub(super) const NUMBER_BITS: u32 = 48;
pub(super) const NUMBER_MASK: u64 = (1 << NUMBER_BITS) - 1;

const FLAG_IN_USE: u16 = 1;
const FLAG_DIRECTORY: u16 = 2;
const KIND_END: u32 = u32::MAX;
/// An attribute list takes at most 256 KiB, of entries of at least 32 bytes.
const LIST_BYTES_MAX: usize = 256 << 10;

/// Replaces the numbers at the ends of sectors by the original bytes; an error if one is not the expected one.
pub(super) fn restore_sector_ends(bytes: &mut [u8], magic: &[u8], what: &'static str) -> Result<()> {
    let (numbers, stride) = {
        let fields = Fields::new(what, bytes);
        if fields.bytes(0, 4)? != magic {
            return Err(fields.damaged("its signature is missing"));
        }
        let (at, count) = (usize::from(fields.u16(4)?), usize::from(fields.u16(6)?));
        let sectors = count.saturating_sub(1);
        let stride = bytes.len().checked_div(sectors).unwrap_or(0);
        if stride < 512 || stride * sectors != bytes.len() {
            return Err(fields.damaged(format!("{count} numbers of sectors")));
        }
        (fields.bytes(at, count * 2)?.to_vec(), stride)
    };
    let (expected, originals) = numbers.split_at(2);
    for (sector, original) in bytes.chunks_exact_mut(stride).zip(originals.chunks_exact(2)) {
        let Some(end) = sector.len().checked_sub(2).and_then(|at| sector.get_mut(at..)) else {
            continue;
        };
        if end != expected {
            return Err(Error::damaged(what, "it was written only in part"));
        }
        end.copy_from_slice(original);
    }
    Ok(())
}

/// A file: its record, and the attributes in all its records.
#[derive(Debug, Clone)]
pub(super) struct FileRecord {
    pub(super) number: u64,
    pub(super) use_count: u16,
    pub(super) is_directory: bool,
    attributes: Vec<Attribute>,
}

impl FileRecord {
    /// The parts of an attribute, ordered by their clusters; empty if there is none. The name is UTF-8.
    pub(super) fn attributes_of(&self, kind: u32, name: &[u8]) -> Vec<Attribute> {
        let is_meant = |attribute: &&Attribute| attribute.kind == kind && attribute.name == name;
        let mut parts: Vec<Attribute> = self.attributes.iter().filter(is_meant).cloned().collect();
        parts.sort_by_key(|part| part.first_cluster().unwrap_or(u64::MAX));
        parts
    }

    fn standard_information(&self) -> Result<&[u8]> {
        let attribute = self
            .attributes
            .iter()
            .find(|attribute| attribute.kind == kind::STANDARD_INFORMATION);
        match attribute {
            Some(attribute) if attribute.is_resident()? => attribute.resident_value(),
            _ => Err(Error::damaged(
                "NTFS record",
                format!("{} has no standard information", self.number),
            )),
        }
    }

    /// The time of the last change, in units of 100 ns since 1601.
    pub(super) fn modified_ticks(&self) -> Result<u64> {
        Fields::new("NTFS standard information", self.standard_information()?).u64(8)
    }

    /// Flags such as hidden and system.
    pub(super) fn file_flags(&self) -> Result<u32> {
        Fields::new("NTFS standard information", self.standard_information()?).u32(0x20)
    }
}

/// One record, parsed alone.
struct SingleRecord {
    use_count: u16,
    flags: u16,
    base: u64,
    attributes: Vec<Attribute>,
}

/// The master file table.
pub(super) struct RecordTable {
    device: Arc<dyn BlockDevice>,
    geometry: Geometry,
    stream: AttributeStream,
}

impl RecordTable {
    /// Reads the description of the table from its first record. The table can be spread over records that lie in it:
    /// each part is read with the parts before it.
    pub(super) fn open(device: Arc<dyn BlockDevice>, geometry: Geometry) -> Result<Self> {
        let start = geometry.table_start.checked_mul(geometry.cluster_bytes);
        let start = start.ok_or_else(|| Error::damaged("NTFS boot sector", "the MFT is past the end"))?;
        let mut bytes = vec![0; to_usize(geometry.record_bytes)];
        device.read_at(&mut bytes, start)?;
        let first = parse(bytes)?;
        let is_data = |attribute: &&Attribute| attribute.kind == kind::DATA && attribute.name.is_empty();
        let mut parts: Vec<Attribute> = first.attributes.iter().filter(is_data).cloned().collect();
        let mut table = Self {
            stream: AttributeStream::of_prefix(&parts, geometry)?,
            device,
            geometry,
        };
        for entry in table.list_of(&first)? {
            if entry.kind != kind::DATA || entry.record == 0 {
                continue;
            }
            let record = table.single(entry.record)?;
            parts.extend(record.attributes.iter().filter(is_data).cloned());
            parts.sort_by_key(|part| part.first_cluster().unwrap_or(u64::MAX));
            parts.dedup_by_key(|part| part.first_cluster().unwrap_or(u64::MAX));
            table.stream = AttributeStream::of_prefix(&parts, geometry)?;
        }
        table.stream = AttributeStream::new(&parts, geometry)?;
        Ok(table)
    }

    /// The file whose base record has this number.
    pub(super) fn read(&self, number: u64) -> Result<FileRecord> {
        let base = self.single(number)?;
        if base.base != 0 {
            return Err(Error::damaged(
                "NTFS record",
                format!("{number} is a part of another file"),
            ));
        }
        let mut attributes = base.attributes.clone();
        let list = self.list_of(&base)?;
        let mut seen = BTreeSet::from([number]);
        for entry in list {
            if !seen.insert(entry.record) {
                continue;
            }
            let part = self.single(entry.record)?;
            if part.base & NUMBER_MASK != number {
                return Err(Error::damaged(
                    "NTFS record",
                    format!("{} is no part of {number}", entry.record),
                ));
            }
            attributes.extend(part.attributes);
        }
        Ok(FileRecord {
            number,
            use_count: base.use_count,
            is_directory: base.flags & FLAG_DIRECTORY != 0,
            attributes,
        })
    }

    fn single(&self, number: u64) -> Result<SingleRecord> {
        let record_bytes = self.geometry.record_bytes;
        let offset = number.checked_mul(record_bytes);
        let end = offset.and_then(|offset| offset.checked_add(record_bytes));
        let (Some(offset), Some(end)) = (offset, end) else {
            return Err(Error::damaged("NTFS record", format!("{number} does not exist")));
        };
        if end > self.stream.size_bytes() {
            return Err(Error::damaged("NTFS record", format!("{number} does not exist")));
        }
        let bytes = self.stream.bytes(&*self.device, offset, to_usize(record_bytes))?;
        let record = parse(bytes).map_err(|error| match error {
            Error::Damaged { what, detail } => Error::Damaged {
                what,
                detail: format!("number {number}: {detail}"),
            },
            other => other,
        })?;
        if record.flags & FLAG_IN_USE == 0 {
            return Err(Error::damaged("NTFS record", format!("{number} is not in use")));
        }
        Ok(record)
    }

    /// The attribute list of a file with more than one record.
    fn list_of(&self, base: &SingleRecord) -> Result<Vec<ListEntry>> {
        let is_list = |attribute: &&Attribute| attribute.kind == kind::ATTRIBUTE_LIST;
        let parts: Vec<Attribute> = base.attributes.iter().filter(is_list).cloned().collect();
        if parts.is_empty() {
            return Ok(Vec::new());
        }
        let stream = AttributeStream::new(&parts, self.geometry)?;
        if stream.size_bytes() > LIST_BYTES_MAX as u64 {
            return Err(Error::damaged("NTFS attribute list", "it is too long"));
        }
        let bytes = stream.bytes(&*self.device, 0, to_usize(stream.size_bytes()))?;
        let fields = Fields::new("NTFS attribute list", &bytes);
        let mut entries = Vec::new();
        let mut at = 0;
        while at + 0x1a <= bytes.len() {
            let entry = fields.from(at)?;
            let length = usize::from(entry.u16(4)?);
            if length < 0x1a {
                return Err(fields.damaged(format!("an entry of {length} bytes")));
            }
            entries.push(ListEntry {
                kind: entry.u32(0)?,
                record: entry.u64(0x10)? & NUMBER_MASK,
            });
            at += length;
        }
        Ok(entries)
    }
}

/// A line of an attribute list: which record has an attribute.
struct ListEntry {
    kind: u32,
    record: u64,
}

fn parse(mut bytes: Vec<u8>) -> Result<SingleRecord> {
    restore_sector_ends(&mut bytes, b"FILE", "NTFS record")?;
    let fields = Fields::new("NTFS record", &bytes);
    let used = (fields.u32(0x18)? as usize).min(bytes.len());
    let mut at = usize::from(fields.u16(0x14)?);
    let mut attributes = Vec::new();
    while at + 4 <= used {
        let kind = fields.u32(at)?;
        if kind == KIND_END {
            break;
        }
        let length = fields.u32(at + 4)? as usize;
        if length < 0x18 || !length.is_multiple_of(8) {
            return Err(fields.damaged(format!("an attribute of {length} bytes")));
        }
        let attribute = Fields::new("NTFS attribute", fields.bytes(at, length)?);
        let name_length = usize::from(attribute.u8(9)?) * 2;
        let name = attribute.bytes(usize::from(attribute.u16(0xa)?), name_length)?;
        attributes.push(Attribute {
            kind,
            name: crate::fields::utf8_of_utf16(name),
            bytes: attribute.as_slice().to_vec(),
        });
        at += length;
    }
    Ok(SingleRecord {
        use_count: fields.u16(0x10)?,
        flags: fields.u16(0x16)?,
        base: fields.u64(0x20)?,
        attributes,
    })
}
