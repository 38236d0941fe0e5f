//! The label of a physical volume, and the descriptions of its volume group.
//!
//! | place | content |
//! |---|---|
//! | one of the first four sectors | `LABELONE`, number of the sector, CRC from byte 20 on, offset of the next part, `LVM2 001` |
//! | there | identity (32 bytes), size, data areas, metadata areas; each list of pairs (offset, length) ends with zeroes |
//! | metadata area | CRC from byte 4 on, magic, version, start, length, places of texts (offset, length, CRC, flags) |
//!
//! The rest of a metadata area after its header of 512 bytes is a ring of texts: a text that reaches the end continues
//! after the header.

use holdfast_block::BlockDevice;

use super::super::checksum::crc32;
use super::super::read_up_to;
use crate::fields::Fields;
use crate::{Error, Result};

const SECTOR_BYTES: u64 = 512;
const CRC_SEED: u32 = 0xf597_a6cf;
const AREA_MAGIC: &[u8] = b" LVM2 x[5A%r0N*>";
/// Pairs in one list: LVM writes one or two.
const AREA_COUNT_MAX: usize = 16;
const TEXT_BYTES_MAX: u64 = 8 << 20;
/// The text is left over, and must not be used.
const FLAG_IGNORED: u32 = 1;

/// A physical volume.
pub(super) struct PhysicalVolume {
    /// 32 characters.
    pub(super) identity: String,
    /// Metadata areas.
    areas: Vec<MetadataArea>,
}

#[derive(Clone, Copy)]
struct MetadataArea {
    offset: u64,
}

/// Reads the label of a device.
pub(super) fn read(device: &dyn BlockDevice) -> Result<PhysicalVolume> {
    for sector in 0..4 {
        let bytes = read_up_to(device, sector * SECTOR_BYTES, SECTOR_BYTES)?;
        let fields = Fields::new("LVM label", &bytes);
        if bytes.starts_with(b"LABELONE") && fields.u64(8)? == sector {
            return of_label(fields);
        }
    }
    Err(Error::damaged("LVM label", "it is in none of the first four sectors"))
}

fn of_label(fields: Fields<'_>) -> Result<PhysicalVolume> {
    if crc32(CRC_SEED, fields.from(20)?.as_slice()) != fields.u32(16)? {
        return Err(fields.damaged("its checksum differs"));
    }
    let header = fields.from(fields.u32(20)? as usize)?;
    let identity = header.bytes(0, 32)?.to_vec();
    let identity = String::from_utf8(identity).map_err(|_| header.damaged("its identity is no text"))?;
    let mut at = 40;
    // Data areas: the description of the group has their start.
    for _ in 0..AREA_COUNT_MAX {
        let offset = header.u64(at)?;
        at += 16;
        if offset == 0 {
            break;
        }
    }
    let mut areas = Vec::new();
    for _ in 0..AREA_COUNT_MAX {
        let offset = header.u64(at)?;
        at += 16;
        if offset == 0 {
            break;
        }
        areas.push(MetadataArea { offset });
    }
    Ok(PhysicalVolume { identity, areas })
}

/// The current texts of all metadata areas. An area that is damaged has none: another physical volume may have it.
pub(super) fn texts(device: &dyn BlockDevice, physical: &PhysicalVolume) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for area in &physical.areas {
        match text_of(device, *area) {
            Ok(text) => texts.extend(text),
            Err(Error::Device(error)) => return Err(error.into()),
            Err(_) => {}
        }
    }
    Ok(texts)
}

fn text_of(device: &dyn BlockDevice, area: MetadataArea) -> Result<Option<String>> {
    let bytes = read_up_to(device, area.offset, SECTOR_BYTES)?;
    let header = Fields::new("LVM metadata area", &bytes);
    if header.bytes(4, 16)? != AREA_MAGIC || crc32(CRC_SEED, header.from(4)?.as_slice()) != header.u32(0)? {
        return Err(header.damaged("its checksum differs"));
    }
    let (start, size) = (header.u64(24)?, header.u64(32)?);
    let (offset, length) = (header.u64(40)?, header.u64(48)?);
    let (checksum, flags) = (header.u32(56)?, header.u32(60)?);
    if offset == 0 || flags & FLAG_IGNORED != 0 {
        return Ok(None);
    }
    if size <= SECTOR_BYTES
        || offset < SECTOR_BYTES
        || offset >= size
        || length > (size - SECTOR_BYTES).min(TEXT_BYTES_MAX)
    {
        return Err(header.damaged("its text does not lie inside"));
    }
    let first = length.min(size - offset);
    let ranges = [(offset, first), (SECTOR_BYTES, length - first)];
    let mut text = Vec::new();
    for (offset, length) in ranges {
        let at = start
            .checked_add(offset)
            .ok_or_else(|| header.damaged("it is past the end of the disk"))?;
        text.extend(read_up_to(device, at, length)?);
    }
    if text.len() as u64 != length || crc32(CRC_SEED, &text) != checksum {
        return Err(header.damaged("the checksum of its text differs"));
    }
    // The text ends with a zero byte.
    while text.last() == Some(&0) {
        text.pop();
    }
    String::from_utf8(text)
        .map(Some)
        .map_err(|_| header.damaged("its text is not UTF-8"))
}
