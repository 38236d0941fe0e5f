//! Parses and writes headers and region tables.

use holdfast_block::{Record, to_usize};

use super::{KIB, MIB, checksum, guid, is_sealed, seal};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::{put, rows, rows_mut};
use crate::model::identity::ImageId;
use crate::{Error, Result};

pub(super) const SIGNATURE: &[u8] = b"vhdxfile";
const HEADER_BYTES: u64 = 4 * KIB;
const FIRST_REGION_OFFSET: u64 = 192 * KIB;
const REGION_OFFSETS: [u64; 2] = [FIRST_REGION_OFFSET, 256 * KIB];
const REGION_TABLE_BYTES: u64 = 64 * KIB;
/// Limit of the format.
const REGION_COUNT_MAX: u32 = 2047;
pub(super) const REGION_BAT: ImageId = guid(0x2dc2_7766_f623_4200_9d64_115e_9bfd_4a08);
pub(super) const REGION_METADATA: ImageId = guid(0x8b7c_a206_4790_4b9a_b8fe_575f_050f_886e);

/// Which of the two headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeaderSlot {
    First,
    Second,
}

impl HeaderSlot {
    const BOTH: [Self; 2] = [Self::First, Self::Second];

    const fn offset(self) -> u64 {
        match self {
            Self::First => 64 * KIB,
            Self::Second => 128 * KIB,
        }
    }

    const fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

/// One of the two headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct VhdxHeader {
    pub(crate) slot: HeaderSlot,
    pub(crate) sequence: u64,
    pub(crate) file_write: ImageId,
    pub(crate) data_write: ImageId,
    pub(crate) log: ImageId,
    pub(crate) log_bytes: u32,
    pub(crate) log_offset: u64,
}

/// Location of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Region {
    pub(crate) offset: u64,
    pub(crate) length_bytes: u64,
}

impl VhdxHeader {
    fn parse(bytes: &[u8; to_usize(HEADER_BYTES)], slot: HeaderSlot) -> std::result::Result<Self, String> {
        let stored = Record::new(bytes);
        if !bytes.starts_with(b"head") {
            return Err("it is missing".to_owned());
        }
        if stored.le_u32::<4>() != checksum(bytes) {
            return Err("the checksum is wrong".to_owned());
        }
        if stored.le_u16::<66>() != 1 {
            return Err(format!("the version is {}", stored.le_u16::<66>()));
        }
        Ok(Self {
            slot,
            sequence: stored.le_u64::<8>(),
            file_write: ImageId::from_guid(*stored.field::<16, 16>()),
            data_write: ImageId::from_guid(*stored.field::<32, 16>()),
            log: ImageId::from_guid(*stored.field::<48, 16>()),
            log_bytes: stored.le_u32::<68>(),
            log_offset: stored.le_u64::<72>(),
        })
    }

    /// Loads the current header.
    pub(super) fn load(file: &dyn ImageFile, image: &str) -> Result<Self> {
        let mut found: Vec<Self> = Vec::new();
        let mut reason = String::new();
        for slot in HeaderSlot::BOTH {
            let mut bytes = [0; to_usize(HEADER_BYTES)];
            file.read_at(&mut bytes, slot.offset())?;
            match Self::parse(&bytes, slot) {
                Ok(header) => found.push(header),
                Err(error) => reason = error,
            }
        }
        let newest = found.into_iter().max_by_key(|header| header.sequence);
        newest.ok_or_else(|| corrupt(image, "header", HeaderSlot::First.offset(), reason))
    }

    /// The stored form, with its offset.
    pub(super) fn to_bytes(self) -> (u64, Vec<u8>) {
        let mut bytes = vec![0; to_usize(HEADER_BYTES)];
        let mut put = |at: usize, field: &[u8]| put(&mut bytes, at, field);
        put(0, b"head");
        put(8, &self.sequence.to_le_bytes());
        put(16, &self.file_write.to_guid());
        put(32, &self.data_write.to_guid());
        put(48, &self.log.to_guid());
        put(66, &1_u16.to_le_bytes());
        put(68, &self.log_bytes.to_le_bytes());
        put(72, &self.log_offset.to_le_bytes());
        seal(&mut bytes);
        (self.slot.offset(), bytes)
    }

    /// Writes the header over the older one, durably; until then the other one is current.
    ///
    /// # Errors
    /// The sequence number is the maximum: the next header would count as the older one.
    pub(super) fn store_next(&mut self, file: &dyn ImageFile, image: &str) -> Result<()> {
        self.sequence = self.sequence.checked_add(1).ok_or_else(|| Error::NotWritable {
            image: image.to_owned(),
            detail: "its header has reached the maximum sequence number; convert it to a new image".to_owned(),
        })?;
        self.slot = self.slot.other();
        let (offset, bytes) = self.to_bytes();
        file.write_at(&bytes, offset)?;
        Ok(file.sync()?)
    }
}

/// The block allocation table and the metadata region, from the first valid region table.
pub(super) fn load_regions(file: &dyn ImageFile, image: &str) -> Result<(Region, Region)> {
    let mut last = None;
    for offset in REGION_OFFSETS {
        let mut bytes = vec![0; to_usize(REGION_TABLE_BYTES)];
        file.read_at(&mut bytes, offset)?;
        match parse_regions(&bytes, offset, image) {
            Ok(regions) => return Ok(regions),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| corrupt(image, "region table", FIRST_REGION_OFFSET, "it is missing")))
}

fn parse_regions(bytes: &[u8], offset: u64, image: &str) -> Result<(Region, Region)> {
    let wrong = |detail: String| corrupt(image, "region table", offset, detail);
    if !bytes.starts_with(b"regi") {
        return Err(wrong("it is missing".to_owned()));
    }
    let Some(start) = Record::<16>::first_of(bytes).filter(|_| is_sealed(bytes, *b"regi")) else {
        return Err(wrong("the checksum is wrong".to_owned()));
    };
    let count = start.le_u32::<8>();
    if count > REGION_COUNT_MAX {
        return Err(wrong(format!("{count} regions")));
    }
    let (mut bat, mut metadata) = (None, None);
    for entry in rows::<32>(bytes, 16).iter().take(count as usize) {
        let entry = Record::new(entry);
        let region = Region {
            offset: entry.le_u64::<16>(),
            length_bytes: entry.le_u32::<24>().into(),
        };
        let is_required = entry.le_u32::<28>() & 1 == 1;
        if region.offset < MIB || !region.offset.is_multiple_of(MIB) || region.offset > i64::MAX as u64 {
            return Err(wrong(format!("a region begins at {}", region.offset)));
        }
        match ImageId::from_guid(*entry.field::<0, 16>()) {
            REGION_BAT => bat = Some(region),
            REGION_METADATA => metadata = Some(region),
            other if is_required => {
                return Err(Error::UnsupportedFeature {
                    image: image.to_owned(),
                    feature: format!("a region {other}"),
                    detail: "the image requires support for it; convert it with Hyper-V first".to_owned(),
                });
            }
            _ => {}
        }
    }
    match (bat, metadata) {
        (Some(bat), Some(metadata)) => Ok((bat, metadata)),
        _ => Err(wrong(
            "the block allocation table or the metadata is missing".to_owned(),
        )),
    }
}

/// A structure that an image stores twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RedundantStructure {
    Header,
    Regions,
}

/// The structures with a damaged copy, or with copies that differ.
pub(super) fn broken_copies(file: &dyn ImageFile) -> Result<Vec<RedundantStructure>> {
    let mut broken = Vec::new();
    for slot in HeaderSlot::BOTH {
        let mut bytes = [0; to_usize(HEADER_BYTES)];
        file.read_at(&mut bytes, slot.offset())?;
        if VhdxHeader::parse(&bytes, slot).is_err() {
            broken.push(RedundantStructure::Header);
        }
    }
    let [(_, first), (_, second)] = load_region_tables(file)?;
    if first != second {
        broken.push(RedundantStructure::Regions);
    }
    Ok(broken)
}

type RegionTable = (u64, Vec<u8>);

fn load_region_tables(file: &dyn ImageFile) -> Result<[RegionTable; 2]> {
    let mut tables = REGION_OFFSETS.map(|offset| (offset, vec![0; to_usize(REGION_TABLE_BYTES)]));
    for (offset, bytes) in &mut tables {
        file.read_at(bytes, *offset)?;
    }
    Ok(tables)
}

/// Copies the valid region table (the first one if both are) over the other. Returns it; none if both are damaged.
fn equal_regions(file: &dyn ImageFile) -> Result<Option<Vec<u8>>> {
    let tables = load_region_tables(file)?;
    let whole = tables.iter().find(|(_, bytes)| is_sealed(bytes, *b"regi"));
    let Some((first, bytes)) = whole else { return Ok(None) };
    for (offset, found) in &tables {
        if offset != first && found != bytes {
            file.write_at(bytes, *offset)?;
            file.sync()?;
        }
    }
    Ok(Some(bytes.clone()))
}

/// Repairs the damaged region table; false if both are damaged.
pub(super) fn repair_regions(file: &dyn ImageFile) -> Result<bool> {
    Ok(equal_regions(file)?.is_some())
}

/// Sets the location of a region in both region tables, one after the other; durable when this returns.
pub(super) fn move_region(file: &dyn ImageFile, id: ImageId, region: Region) -> Result<()> {
    let Some(mut bytes) = equal_regions(file)? else {
        return Ok(());
    };
    let count = Record::<16>::first_of(&bytes).map_or(0, |start| start.le_u32::<8>().min(REGION_COUNT_MAX));
    for entry in rows_mut::<32>(&mut bytes, 16).iter_mut().take(count as usize) {
        if ImageId::from_guid(*Record::new(entry).field::<0, 16>()) == id {
            put(entry, 16, &region.offset.to_le_bytes());
            let length = u32::try_from(region.length_bytes).unwrap_or(u32::MAX);
            put(entry, 24, &length.to_le_bytes());
        }
    }
    seal(&mut bytes);
    // Both are valid here; while one is written, the other one stays valid.
    for offset in REGION_OFFSETS {
        file.write_at(&bytes, offset)?;
        file.sync()?;
    }
    Ok(())
}

/// Writes the file identifier and both region tables of a new image.
pub(super) fn write_start(file: &dyn ImageFile, bat: Region, metadata: Region) -> Result<()> {
    let mut start = SIGNATURE.to_vec();
    start.extend("Holdfast".encode_utf16().flat_map(u16::to_le_bytes));
    let mut bytes = vec![0; to_usize(REGION_TABLE_BYTES)];
    put(&mut bytes, 0, b"regi");
    put(&mut bytes, 8, &2_u32.to_le_bytes());
    let regions = [(REGION_BAT, bat), (REGION_METADATA, metadata)];
    for (entry, (id, region)) in rows_mut::<32>(&mut bytes, 16).iter_mut().zip(regions) {
        put(entry, 0, &id.to_guid());
        put(entry, 16, &region.offset.to_le_bytes());
        let length = u32::try_from(region.length_bytes).unwrap_or(u32::MAX);
        put(entry, 24, &length.to_le_bytes());
        put(entry, 28, &1_u32.to_le_bytes());
    }
    seal(&mut bytes);
    for offset in REGION_OFFSETS {
        file.write_at(&bytes, offset)?;
    }
    // The identifier is written last: without it the file is not a valid image.
    file.sync()?;
    file.write_at(&start, 0)?;
    Ok(file.sync()?)
}
