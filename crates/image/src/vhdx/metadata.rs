//! The metadata region: sizes, identity, and the parent.
//!
//! ```text
//! offset  bytes
//! 0       8    "metadata"
//! 10      2    entries
//! 32      32   each: GUID, offset in the region (4), bytes (4), flags (4): 1 user, 2 of the disk, 4 required
//! ```
//!
//! A locator of the parent begins with its type (16), 2 bytes, the number of pairs (2), and for each the offsets of key and value (4 each)
//! and their bytes (2 each); texts are UTF-16.

use holdfast_block::to_usize;

use super::header::Region;
use super::{CHUNK_SECTORS, KIB, MIB, guid, guid_at, u16_at, u32_at, u64_at};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::identity::ImageId;
use crate::{Error, Result};

const TABLE_BYTES: u64 = 64 * KIB;
const ENTRY_COUNT_MAX: u16 = 2047;
/// An item is not larger.
const ITEM_BYTES_MAX: u64 = MIB;
const FILE_PARAMETERS: ImageId = guid(0xcaa1_6737_fa36_4d43_b3b6_33f0_aa44_e76b);
pub(super) const DISK_SIZE: ImageId = guid(0x2fa5_4224_cd1b_4876_b211_5dbe_d83b_f4b8);
pub(super) const DISK_ID: ImageId = guid(0xbeca_12ab_b2e6_4523_93ef_c309_e000_c746);
const LOGICAL_SECTOR: ImageId = guid(0x8141_bf1d_a96f_4709_ba47_f233_a8fa_ab5f);
const PHYSICAL_SECTOR: ImageId = guid(0xcda3_48c7_445d_4471_9cc9_e988_5251_c556);
const PARENT_LOCATOR: ImageId = guid(0xa8d3_5f2d_b30b_454d_abf7_d3d8_4834_ab0c);
const LOCATOR_OF_VHDX: ImageId = guid(0xb04a_efb7_d19e_4a81_b789_25b8_e944_5913);
const LEAVE_ALLOCATED: u32 = 1;
const HAS_PARENT: u32 = 2;
/// 64 TiB.
pub(super) const DISK_BYTES_MAX: u64 = 64 << 40;
const REQUIRED: u32 = 4;
const OF_DISK: u32 = 2;

/// What the metadata says, checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) disk_bytes: u64,
    pub(crate) block_bytes: u64,
    pub(crate) is_fixed: bool,
    pub(crate) has_parent: bool,
    pub(crate) sector_bytes: u64,
    pub(crate) physical_sector_bytes: u64,
    pub(crate) id: ImageId,
    pub(crate) parent: Option<Parent>,
}

/// What an image says of its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parent {
    /// What the parent's last modification was.
    pub(crate) linkage: ImageId,
    /// Where it may be, as this system writes paths.
    pub(crate) names: Vec<String>,
}

/// Where an item is in the file.
struct Item {
    id: ImageId,
    offset: u64,
    length_bytes: u64,
}

impl Metadata {
    pub(super) fn load(file: &dyn ImageFile, region: Region, image: &str) -> Result<Self> {
        let items = items(file, region, image)?;
        let wrong = |detail: String| corrupt(image, "metadata", region.offset, detail);
        let find = |id: ImageId| items.iter().find(|item| item.id == id);
        let bytes_of = |id: ImageId, what: &str, least: u64| -> Result<Vec<u8>> {
            let item = find(id).filter(|item| item.length_bytes >= least);
            let item = item.ok_or_else(|| wrong(format!("it does not say the {what}")))?;
            read(file, item)
        };
        let parameters = bytes_of(FILE_PARAMETERS, "size of a block", 8)?;
        let flags = u32_at(&parameters, 4);
        let has_parent = flags & HAS_PARENT != 0;
        let parent = match find(PARENT_LOCATOR) {
            Some(item) if has_parent => Some(parse_locator(&read(file, item)?, image, item.offset)?),
            None if has_parent => return Err(wrong("it does not say where the parent is".to_owned())),
            _ => None,
        };
        let metadata = Self {
            disk_bytes: u64_at(&bytes_of(DISK_SIZE, "size of the disk", 8)?, 0),
            block_bytes: u32_at(&parameters, 0).into(),
            is_fixed: flags & LEAVE_ALLOCATED != 0,
            has_parent,
            sector_bytes: u32_at(&bytes_of(LOGICAL_SECTOR, "size of a sector", 4)?, 0).into(),
            physical_sector_bytes: match find(PHYSICAL_SECTOR) {
                Some(item) if item.length_bytes >= 4 => u32_at(&read(file, item)?, 0).into(),
                _ => 512,
            },
            id: guid_at(&bytes_of(DISK_ID, "identity of the disk", 16)?, 0),
            parent,
        };
        metadata.check(image, region.offset)?;
        Ok(metadata)
    }

    fn check(&self, image: &str, offset: u64) -> Result<()> {
        let wrong = |detail: String| Err(corrupt(image, "metadata", offset, detail));
        if !self.block_bytes.is_power_of_two() || !(MIB..=256 * MIB).contains(&self.block_bytes) {
            return wrong(format!("a block has {} bytes", self.block_bytes));
        }
        if !matches!(self.sector_bytes, 512 | 4096) {
            return wrong(format!("a sector has {} bytes", self.sector_bytes));
        }
        if self.disk_bytes == 0
            || self.disk_bytes > DISK_BYTES_MAX
            || !self.disk_bytes.is_multiple_of(self.sector_bytes)
        {
            return wrong(format!("the disk has {} bytes", self.disk_bytes));
        }
        Ok(())
    }

    /// Blocks that one block of bits tells of.
    pub(crate) fn chunk_blocks(&self) -> u64 {
        CHUNK_SECTORS * self.sector_bytes / self.block_bytes
    }

    /// Blocks of the disk.
    pub(crate) fn block_count(&self) -> u64 {
        self.disk_bytes.div_ceil(self.block_bytes)
    }

    /// Entries of the table: one for each block, and behind those of each chunk one for its bits.
    pub(crate) fn entry_count(&self) -> u64 {
        let blocks = self.block_count();
        if self.has_parent {
            blocks.div_ceil(self.chunk_blocks()) * (self.chunk_blocks() + 1)
        } else {
            blocks + blocks.saturating_sub(1) / self.chunk_blocks()
        }
    }

    /// The entry of block `index`.
    pub(crate) fn entry_of(&self, index: u64) -> u64 {
        index + index / self.chunk_blocks()
    }

    /// The entry of the bits of the chunk that has block `index`.
    pub(crate) fn entry_of_bits(&self, index: u64) -> u64 {
        let chunk = index / self.chunk_blocks();
        (chunk + 1) * (self.chunk_blocks() + 1) - 1
    }

    /// The region as it is stored, with the locator of a parent.
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut flags = 0;
        if self.is_fixed {
            flags |= LEAVE_ALLOCATED;
        }
        if self.has_parent {
            flags |= HAS_PARENT;
        }
        let low = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let parameters = [low(self.block_bytes), u32::to_le_bytes(flags)].concat();
        let of_disk = REQUIRED | OF_DISK;
        let mut items = vec![
            (FILE_PARAMETERS, REQUIRED, parameters),
            (DISK_SIZE, of_disk, self.disk_bytes.to_le_bytes().to_vec()),
            (DISK_ID, of_disk, self.id.to_guid().to_vec()),
            (LOGICAL_SECTOR, of_disk, low(self.sector_bytes).to_vec()),
            (PHYSICAL_SECTOR, of_disk, low(self.physical_sector_bytes).to_vec()),
        ];
        items.extend(
            self.parent
                .as_ref()
                .map(|parent| (PARENT_LOCATOR, REQUIRED, locator_bytes(parent))),
        );
        let mut bytes = vec![0; to_usize(TABLE_BYTES)];
        bytes[..8].copy_from_slice(b"metadata");
        bytes[10..12].copy_from_slice(&u16::try_from(items.len()).unwrap_or(u16::MAX).to_le_bytes());
        for (index, (id, flags, content)) in items.iter().enumerate() {
            let at = bytes.len() as u64;
            let entry = &mut bytes[32 + index * 32..64 + index * 32];
            entry[..16].copy_from_slice(&id.to_guid());
            entry[16..20].copy_from_slice(&low(at));
            entry[20..24].copy_from_slice(&low(content.len() as u64));
            entry[24..28].copy_from_slice(&flags.to_le_bytes());
            bytes.extend_from_slice(content);
        }
        bytes
    }
}

/// Where the item `id` is, in bytes of the file.
pub(super) fn place_of(file: &dyn ImageFile, region: Region, id: ImageId, image: &str) -> Result<u64> {
    let items = items(file, region, image)?;
    let item = items.iter().find(|item| item.id == id);
    item.map(|item| item.offset).ok_or_else(|| {
        let detail = "it does not say the size or the identity of the disk";
        corrupt(image, "metadata", region.offset, detail)
    })
}

fn read(file: &dyn ImageFile, item: &Item) -> Result<Vec<u8>> {
    let mut bytes = vec![0; to_usize(item.length_bytes)];
    file.read_at(&mut bytes, item.offset)?;
    Ok(bytes)
}

fn items(file: &dyn ImageFile, region: Region, image: &str) -> Result<Vec<Item>> {
    let wrong = |detail: String| corrupt(image, "metadata", region.offset, detail);
    let file_bytes = file.length_bytes()?;
    let mut table = vec![0; to_usize(TABLE_BYTES)];
    file.read_at(&mut table, region.offset)?;
    if !table.starts_with(b"metadata") {
        return Err(wrong("there is none".to_owned()));
    }
    let count = u16_at(&table, 10);
    if count > ENTRY_COUNT_MAX {
        return Err(wrong(format!("{count} entries")));
    }
    let known = [
        FILE_PARAMETERS,
        DISK_SIZE,
        DISK_ID,
        LOGICAL_SECTOR,
        PHYSICAL_SECTOR,
        PARENT_LOCATOR,
    ];
    let mut items = Vec::new();
    for entry in table[32..].chunks_exact(32).take(count.into()) {
        let id = guid_at(entry, 0);
        let (offset, length_bytes) = (u64::from(u32_at(entry, 16)), u64::from(u32_at(entry, 20)));
        if !known.contains(&id) {
            if u32_at(entry, 24) & REQUIRED != 0 {
                return Err(Error::UnsupportedFeature {
                    image: image.to_owned(),
                    feature: format!("metadata {id}"),
                    detail: "the image says that it cannot be read without; let Hyper-V convert it".to_owned(),
                });
            }
            continue;
        }
        let end = region.offset.saturating_add(offset + length_bytes);
        if offset < TABLE_BYTES
            || length_bytes > ITEM_BYTES_MAX
            || offset + length_bytes > region.length_bytes
            || end > file_bytes
        {
            return Err(wrong(format!("an item of {length_bytes} bytes at {offset}")));
        }
        items.push(Item {
            id,
            offset: region.offset + offset,
            length_bytes,
        });
    }
    items.sort_by_key(|item: &Item| item.offset);
    if let Some(pair) = items
        .windows(2)
        .find(|pair| pair[0].offset + pair[0].length_bytes > pair[1].offset)
    {
        return Err(wrong(format!("two items at {}", pair[1].offset - region.offset)));
    }
    Ok(items)
}

fn parse_locator(bytes: &[u8], image: &str, offset: u64) -> Result<Parent> {
    let wrong = |detail: &str| corrupt(image, "parent locator", offset, detail);
    if bytes.len() < 20 || guid_at(bytes, 0) != LOCATOR_OF_VHDX {
        return Err(wrong("it is of a kind that is not known"));
    }
    let (mut linkage, mut names) = (None, Vec::new());
    for entry in bytes[20..].chunks_exact(12).take(u16_at(bytes, 18).into()) {
        let text = |at: usize, length: usize| -> Result<String> {
            let start = u32_at(entry, at) as usize;
            let slice = bytes.get(start..start + usize::from(u16_at(entry, length)));
            let slice = slice.ok_or_else(|| wrong("a text lies outside of it"))?;
            let units: Vec<u16> = slice
                .chunks_exact(2)
                .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
                .collect();
            Ok(String::from_utf16_lossy(&units))
        };
        let (key, value) = (text(0, 8)?, text(4, 10)?);
        match key.as_str() {
            "parent_linkage" => linkage = value.parse().ok(),
            "relative_path" => names.insert(0, crate::windows_path::from_windows(&value)),
            "absolute_win32_path" | "volume_path" => names.push(crate::windows_path::from_windows(&value)),
            _ => {}
        }
    }
    names.dedup();
    let linkage = linkage.ok_or_else(|| wrong("it does not say which the parent is"))?;
    Ok(Parent { linkage, names })
}

fn locator_bytes(parent: &Parent) -> Vec<u8> {
    let linkage = format!("{{{}}}", parent.linkage);
    let mut pairs = vec![("parent_linkage", linkage)];
    if let Some(name) = parent.names.first() {
        let key = if name.starts_with('/') {
            "absolute_win32_path"
        } else {
            "relative_path"
        };
        pairs.push((key, crate::windows_path::to_windows(name)));
    }
    let mut bytes = LOCATOR_OF_VHDX.to_guid().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(u16::try_from(pairs.len()).unwrap_or(u16::MAX).to_le_bytes());
    let mut texts: Vec<u8> = Vec::new();
    let start = 20 + pairs.len() * 12;
    for (key, value) in &pairs {
        let mut put = |text: &str| {
            let at = start + texts.len();
            texts.extend(text.encode_utf16().flat_map(u16::to_le_bytes));
            (at, start + texts.len() - at)
        };
        let ((key_at, key_bytes), (value_at, value_bytes)) = (put(key), put(value));
        for at in [key_at, value_at] {
            bytes.extend(u32::try_from(at).unwrap_or(u32::MAX).to_le_bytes());
        }
        for length in [key_bytes, value_bytes] {
            bytes.extend(u16::try_from(length).unwrap_or(u16::MAX).to_le_bytes());
        }
    }
    bytes.extend(texts);
    bytes
}
