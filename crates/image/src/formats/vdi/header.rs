//! Parses and validates the header.

use holdfast_block::{Record, to_usize};

use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::put;
use crate::model::identity::ImageId;
use crate::model::info::{BlockInfo, ImageKind, ParentInfo, USUAL_SECTOR_BYTES};
use crate::{Error, Result};

pub(crate) const HEADER_BYTES: u64 = 512;
const VERSION: u32 = 0x0001_0001;
const SIGNATURE: u32 = 0xbeda_107f;
const TEXT: &[u8] = b"<<< Holdfast Virtual Disk Image >>>\n";
/// From offset 72 to the end, as in VirtualBox.
const OWN_HEADER_BYTES: u32 = 400;

const AT_KIND: usize = 0x4c;
const AT_MAP: usize = 0x154;
const AT_DATA: usize = 0x158;
const AT_SECTOR: usize = 0x168;
pub(super) const AT_DISK: usize = 0x170;
const AT_BLOCK: usize = 0x178;
const AT_EXTRA: usize = 0x17c;
pub(super) const AT_BLOCKS: usize = 0x180;
pub(super) const AT_STORED: usize = 0x184;
pub(super) const AT_ID: usize = 0x188;
pub(super) const AT_MODIFICATION: usize = 0x198;
pub(super) const AT_PARENT: usize = 0x1a8;
pub(super) const AT_PARENT_MODIFICATION: usize = 0x1b8;
const AT_GUEST_SECTOR: usize = 0x1d4;

/// No real disk has a larger map: with blocks of 1 MiB it would be a disk of 16 PiB.
const BLOCK_COUNT_MAX: u64 = ZERO_AND_FREE as u64;
/// Block numbers from here on have a special meaning.
const ZERO_AND_FREE: u32 = super::ZERO;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VdiKind {
    Dynamic,
    Fixed,
    Differencing,
}

/// A header that was validated against its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VdiHeader {
    pub(crate) kind: VdiKind,
    pub(crate) map_offset: u64,
    pub(crate) data_offset: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) block_bytes: u64,
    pub(crate) sector_bytes: u64,
    /// Bytes before the data of each block.
    pub(crate) extra_bytes: u64,
    pub(crate) block_count: u64,
    /// As stored; may be wrong.
    pub(crate) stored_count: u32,
    pub(crate) id: ImageId,
    pub(crate) modification: ImageId,
    pub(crate) parent: ImageId,
    pub(crate) parent_modification: ImageId,
    /// The program that created it: the text at the start.
    pub(crate) creator: String,
}

type Stored<'a> = Record<'a, { to_usize(HEADER_BYTES) }>;

impl VdiHeader {
    /// Reads the header of `file`; errors call it `image`.
    pub(crate) fn load(file: &dyn ImageFile, image: &str) -> Result<Self> {
        let mut bytes = [0; to_usize(HEADER_BYTES)];
        let file_bytes = file.length_bytes()?;
        if file_bytes < HEADER_BYTES {
            return Err(corrupt(
                image,
                "header",
                0,
                format!("the file has {file_bytes} bytes, too few for a header"),
            ));
        }
        file.read_at(&mut bytes, 0)?;
        let header = Self::parse(Record::new(&bytes), image)?;
        let map_end = header.map_offset + header.block_count * 4;
        if map_end > file_bytes {
            return Err(corrupt(
                image,
                "header",
                AT_MAP as u64,
                format!("the block map ends at {map_end}, the file at {file_bytes}"),
            ));
        }
        Ok(header)
    }

    fn parse(stored: Stored<'_>, image: &str) -> Result<Self> {
        let wrong = |at: usize, detail: String| Err(corrupt(image, "header", at as u64, detail));
        let signature = stored.le_u32::<0x40>();
        if signature != SIGNATURE {
            return wrong(0x40, format!("the signature is {signature:#x}"));
        }
        let version = stored.le_u32::<0x44>();
        if version != VERSION {
            return Err(Error::UnsupportedFeature {
                image: image.to_owned(),
                feature: format!("version {}.{} of VDI", version >> 16, version & 0xffff),
                detail: "clone it with VirtualBox, which has written version 1.1 since 2007".to_owned(),
            });
        }
        let kind = match stored.le_u32::<AT_KIND>() {
            1 => VdiKind::Dynamic,
            2 => VdiKind::Fixed,
            4 => VdiKind::Differencing,
            3 => {
                return Err(Error::UnsupportedFeature {
                    image: image.to_owned(),
                    feature: "an undo image".to_owned(),
                    detail: "clone it with VirtualBox, which has not written such images since version 1".to_owned(),
                });
            }
            other => return wrong(AT_KIND, format!("the type is {other}")),
        };
        let text = stored.field::<0, 0x40>().split(|byte| matches!(byte, 0 | b'\n')).next();
        let header = Self {
            kind,
            map_offset: stored.le_u32::<AT_MAP>().into(),
            data_offset: stored.le_u32::<AT_DATA>().into(),
            disk_bytes: stored.le_u64::<AT_DISK>(),
            block_bytes: stored.le_u32::<AT_BLOCK>().into(),
            sector_bytes: match stored.le_u32::<AT_SECTOR>() {
                4096 => 4096,
                _ => USUAL_SECTOR_BYTES,
            },
            extra_bytes: stored.le_u32::<AT_EXTRA>().into(),
            block_count: stored.le_u32::<AT_BLOCKS>().into(),
            stored_count: stored.le_u32::<AT_STORED>(),
            id: ImageId::from_guid(*stored.field::<AT_ID, 16>()),
            modification: ImageId::from_guid(*stored.field::<AT_MODIFICATION, 16>()),
            parent: ImageId::from_guid(*stored.field::<AT_PARENT, 16>()),
            parent_modification: ImageId::from_guid(*stored.field::<AT_PARENT_MODIFICATION, 16>()),
            creator: String::from_utf8_lossy(text.unwrap_or_default()).into_owned(),
        };
        header.check(image)?;
        Ok(header)
    }

    fn check(&self, image: &str) -> Result<()> {
        let wrong = |at: usize, detail: String| Err(corrupt(image, "header", at as u64, detail));
        if !self.block_bytes.is_power_of_two() || !(4096..=1 << 30).contains(&self.block_bytes) {
            return wrong(AT_BLOCK, format!("a block has {} bytes", self.block_bytes));
        }
        if self.extra_bytes > self.block_bytes {
            return wrong(AT_EXTRA, format!("{} bytes before each block", self.extra_bytes));
        }
        let needed = self.disk_bytes.div_ceil(self.block_bytes);
        if self.block_count < needed || self.block_count > BLOCK_COUNT_MAX {
            return wrong(
                AT_BLOCKS,
                format!("it has {} blocks, but the disk needs {needed}", self.block_count),
            );
        }
        if self.map_offset < HEADER_BYTES || !self.map_offset.is_multiple_of(4) {
            return wrong(AT_MAP, format!("the block map begins at {}", self.map_offset));
        }
        if self.data_offset < self.map_offset + self.block_count * 4 || !self.data_offset.is_multiple_of(512) {
            return wrong(AT_DATA, format!("the blocks begin at {}", self.data_offset));
        }
        if self.kind == VdiKind::Differencing && self.parent.is_nil() {
            return wrong(AT_PARENT, "a differencing image without a parent".to_owned());
        }
        Ok(())
    }

    pub(crate) fn describe(&self) -> BlockInfo {
        BlockInfo {
            kind: match self.kind {
                VdiKind::Dynamic => ImageKind::Dynamic,
                VdiKind::Fixed => ImageKind::Fixed,
                VdiKind::Differencing => ImageKind::Differencing,
            },
            block_bytes: self.block_bytes,
            sector_bytes: self.sector_bytes,
            id: Some(self.id),
            modification: Some(self.modification.to_string()),
            parent: (self.kind == VdiKind::Differencing).then(|| ParentInfo {
                id: Some(self.parent),
                modification: Some(self.parent_modification.to_string()),
                names: Vec::new(),
            }),
            creator: Some(self.creator.clone()),
        }
    }

    /// Offset of the data of stored block `number`.
    pub(crate) fn host(&self, number: u32) -> u64 {
        self.data_offset + u64::from(number) * self.stride() + self.extra_bytes
    }

    /// Distance of stored blocks in bytes.
    pub(crate) fn stride(&self) -> u64 {
        self.block_bytes + self.extra_bytes
    }

    /// Offset of the entry of block `index`.
    pub(crate) fn entry_offset(&self, index: u64) -> u64 {
        self.map_offset + index * 4
    }

    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(HEADER_BYTES)];
        let mut put = |at: usize, field: &[u8]| put(&mut bytes, at, field);
        let low = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes();
        let kind: u32 = match self.kind {
            VdiKind::Dynamic => 1,
            VdiKind::Fixed => 2,
            VdiKind::Differencing => 4,
        };
        put(0, TEXT);
        put(0x40, &SIGNATURE.to_le_bytes());
        put(0x44, &VERSION.to_le_bytes());
        put(0x48, &OWN_HEADER_BYTES.to_le_bytes());
        put(AT_KIND, &kind.to_le_bytes());
        put(AT_MAP, &low(self.map_offset));
        put(AT_DATA, &low(self.data_offset));
        put(AT_SECTOR, &low(self.sector_bytes));
        put(AT_DISK, &self.disk_bytes.to_le_bytes());
        put(AT_BLOCK, &low(self.block_bytes));
        put(AT_EXTRA, &low(self.extra_bytes));
        put(AT_BLOCKS, &low(self.block_count));
        put(AT_STORED, &self.stored_count.to_le_bytes());
        put(AT_ID, &self.id.to_guid());
        put(AT_MODIFICATION, &self.modification.to_guid());
        put(AT_PARENT, &self.parent.to_guid());
        put(AT_PARENT_MODIFICATION, &self.parent_modification.to_guid());
        put(AT_GUEST_SECTOR, &low(self.sector_bytes));
        bytes
    }
}
