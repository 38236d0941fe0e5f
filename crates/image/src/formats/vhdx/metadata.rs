//! Parses and writes the metadata region: sizes, identity, and the parent.
//!
//! ```text
//! offset  bytes
//! 0       8    "metadata"
//! 10      2    entries
//! 32      32   each: GUID, offset in the region (4), bytes (4), flags (4): 1 user, 2 of the disk, 4 required
//! ```
//!
//! A parent locator begins with its type (16), 2 reserved bytes, the number of pairs (2), and for each pair the offsets
//! of key and value (4 each) and their lengths (2 each); texts are UTF-16.

use holdfast_block::{Record, to_usize};

use super::header::Region;
use super::{CHUNK_SECTORS, KIB, MIB, guid};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::{le_utf16, put, rows, rows_mut};
use crate::model::identity::ImageId;
use crate::{Error, Result};

const TABLE_BYTES: u64 = 64 * KIB;
const ENTRY_COUNT_MAX: u16 = 2047;
/// Maximum size of an item.
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

/// The validated metadata.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Metadata {
    pub(crate) disk_bytes: u64,
    pub(crate) block_bytes: u64,
    pub(crate) is_fixed: bool,
    pub(crate) has_parent: bool,
    pub(crate) sector_bytes: u64,
    pub(crate) physical_sector_bytes: u64,
    pub(crate) id: ImageId,
    pub(crate) parent: Option<VhdxParent>,
}

/// What a child stores about its parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VhdxParent {
    /// The modification GUID of the parent when the child was created.
    pub(crate) linkage: ImageId,
    /// Its possible paths, converted to paths of this system.
    pub(crate) names: Vec<String>,
}

/// Location of an item in the file.
struct MetadataItem {
    id: ImageId,
    offset: u64,
    length_bytes: u64,
}

impl Metadata {
    pub(super) fn load(file: &dyn ImageFile, region: Region, image: &str) -> Result<Self> {
        let items = items(file, region, image)?;
        let wrong = |detail: String| corrupt(image, "metadata", region.offset, detail);
        let find = |id: ImageId| items.iter().find(|item| item.id == id);
        let missing = |what: &str| wrong(format!("the {what} is missing"));
        let parameters: [u8; 8] = start_of(file, find(FILE_PARAMETERS))?.ok_or_else(|| missing("size of a block"))?;
        let disk_bytes = start_of(file, find(DISK_SIZE))?.ok_or_else(|| missing("size of the disk"))?;
        let sector_bytes = start_of(file, find(LOGICAL_SECTOR))?.ok_or_else(|| missing("size of a sector"))?;
        let id = start_of(file, find(DISK_ID))?.ok_or_else(|| missing("identity of the disk"))?;
        let parameters = Record::new(&parameters);
        let flags = parameters.le_u32::<4>();
        let has_parent = flags & HAS_PARENT != 0;
        let parent = match find(PARENT_LOCATOR) {
            Some(item) if has_parent => Some(parse_locator(&read(file, item)?, image, item.offset)?),
            None if has_parent => return Err(wrong("the parent locator is missing".to_owned())),
            _ => None,
        };
        let metadata = Self {
            disk_bytes: u64::from_le_bytes(disk_bytes),
            block_bytes: parameters.le_u32::<0>().into(),
            is_fixed: flags & LEAVE_ALLOCATED != 0,
            has_parent,
            sector_bytes: u32::from_le_bytes(sector_bytes).into(),
            physical_sector_bytes: start_of(file, find(PHYSICAL_SECTOR))?
                .map_or(512, |bytes| u32::from_le_bytes(bytes).into()),
            id: ImageId::from_guid(id),
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

    /// Blocks of the disk that one sector bitmap block covers.
    pub(crate) fn chunk_blocks(&self) -> u64 {
        CHUNK_SECTORS * self.sector_bytes / self.block_bytes
    }

    pub(crate) fn block_count(&self) -> u64 {
        self.disk_bytes.div_ceil(self.block_bytes)
    }

    /// Entries of the table: one for each block, and after those of each chunk one for its sector bitmap.
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

    /// The entry of the sector bitmap that covers block `index`.
    pub(crate) fn entry_of_bits(&self, index: u64) -> u64 {
        let chunk = index / self.chunk_blocks();
        (chunk + 1) * (self.chunk_blocks() + 1) - 1
    }

    /// The stored region, with the parent locator.
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
        put(&mut bytes, 0, b"metadata");
        put(
            &mut bytes,
            10,
            &u16::try_from(items.len()).unwrap_or(u16::MAX).to_le_bytes(),
        );
        let mut at = TABLE_BYTES;
        for (entry, (id, flags, content)) in rows_mut::<32>(&mut bytes, 32).iter_mut().zip(&items) {
            put(entry, 0, &id.to_guid());
            put(entry, 16, &low(at));
            put(entry, 20, &low(content.len() as u64));
            put(entry, 24, &flags.to_le_bytes());
            at += content.len() as u64;
        }
        bytes.extend(items.into_iter().flat_map(|(_, _, content)| content));
        bytes
    }
}

/// Offset of the item `id` in the file.
pub(super) fn place_of(file: &dyn ImageFile, region: Region, id: ImageId, image: &str) -> Result<u64> {
    let items = items(file, region, image)?;
    let item = items.iter().find(|item| item.id == id);
    item.map(|item| item.offset).ok_or_else(|| {
        let detail = "the size or the identity of the disk is missing";
        corrupt(image, "metadata", region.offset, detail)
    })
}

fn read(file: &dyn ImageFile, item: &MetadataItem) -> Result<Vec<u8>> {
    let mut bytes = vec![0; to_usize(item.length_bytes)];
    file.read_at(&mut bytes, item.offset)?;
    Ok(bytes)
}

/// The first `N` bytes of an item; none if it is missing or shorter.
fn start_of<const N: usize>(file: &dyn ImageFile, item: Option<&MetadataItem>) -> Result<Option<[u8; N]>> {
    let Some(item) = item.filter(|item| item.length_bytes >= N as u64) else {
        return Ok(None);
    };
    let mut bytes = [0; N];
    file.read_at(&mut bytes, item.offset)?;
    Ok(Some(bytes))
}

fn items(file: &dyn ImageFile, region: Region, image: &str) -> Result<Vec<MetadataItem>> {
    let wrong = |detail: String| corrupt(image, "metadata", region.offset, detail);
    let file_bytes = file.length_bytes()?;
    let mut table = vec![0; to_usize(TABLE_BYTES)];
    file.read_at(&mut table, region.offset)?;
    let start = Record::<32>::first_of(&table).filter(|start| start.field::<0, 8>() == b"metadata");
    let count = start.ok_or_else(|| wrong("it is missing".to_owned()))?.le_u16::<10>();
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
    for entry in rows::<32>(&table, 32).iter().take(count.into()) {
        let entry = Record::new(entry);
        let id = ImageId::from_guid(*entry.field::<0, 16>());
        let (offset, length_bytes) = (u64::from(entry.le_u32::<16>()), u64::from(entry.le_u32::<20>()));
        if !known.contains(&id) {
            if entry.le_u32::<24>() & REQUIRED != 0 {
                return Err(Error::UnsupportedFeature {
                    image: image.to_owned(),
                    feature: format!("metadata {id}"),
                    detail: "the image requires support for it; convert it with Hyper-V first".to_owned(),
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
        items.push(MetadataItem {
            id,
            offset: region.offset + offset,
            length_bytes,
        });
    }
    items.sort_by_key(|item: &MetadataItem| item.offset);
    let mut neighbours = items.iter().zip(items.iter().skip(1));
    if let Some((_, second)) = neighbours.find(|(first, second)| first.offset + first.length_bytes > second.offset) {
        return Err(wrong(format!("two items at {}", second.offset - region.offset)));
    }
    Ok(items)
}

fn parse_locator(bytes: &[u8], image: &str, offset: u64) -> Result<VhdxParent> {
    let wrong = |detail: &str| corrupt(image, "parent locator", offset, detail);
    let start = Record::<20>::first_of(bytes)
        .filter(|start| ImageId::from_guid(*start.field::<0, 16>()) == LOCATOR_OF_VHDX)
        .ok_or_else(|| wrong("its type is unknown"))?;
    let (mut linkage, mut names) = (None, Vec::new());
    for entry in rows::<12>(bytes, 20).iter().take(start.le_u16::<18>().into()) {
        let text = |start: u32, length_bytes: u16| -> Result<String> {
            let text = bytes
                .get(start as usize..)
                .and_then(|rest| rest.get(..length_bytes.into()));
            Ok(le_utf16(text.ok_or_else(|| wrong("a text is outside of it"))?))
        };
        let entry = Record::new(entry);
        let key = text(entry.le_u32::<0>(), entry.le_u16::<8>())?;
        let value = text(entry.le_u32::<4>(), entry.le_u16::<10>())?;
        match key.as_str() {
            "parent_linkage" => linkage = value.parse().ok(),
            "relative_path" => names.insert(0, crate::model::windows_path::from_windows(&value)),
            "absolute_win32_path" | "volume_path" => names.push(crate::model::windows_path::from_windows(&value)),
            _ => {}
        }
    }
    names.dedup();
    let linkage = linkage.ok_or_else(|| wrong("the identity of the parent is missing"))?;
    Ok(VhdxParent { linkage, names })
}

fn locator_bytes(parent: &VhdxParent) -> Vec<u8> {
    let linkage = format!("{{{}}}", parent.linkage);
    let mut pairs = vec![("parent_linkage", linkage)];
    if let Some(name) = parent.names.first() {
        let key = if name.starts_with('/') {
            "absolute_win32_path"
        } else {
            "relative_path"
        };
        pairs.push((key, crate::model::windows_path::to_windows(name)));
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
