//! The header of dynamic and differencing images.
//!
//! ```text
//! offset  bytes
//! 0       8    "cxsparse"
//! 8       8    all ones
//! 16      8    offset of the table
//! 24      4    version: 0x00010000
//! 28      4    entries of the table
//! 32      4    bytes of a block
//! 36      4    checksum
//! 40      16   UUID of the parent
//! 56      4    when the parent was changed, seconds since 2000-01-01 UTC
//! 64      512  name of the parent, UTF-16
//! 576     192  eight places where the parent may be: code, sectors of room, bytes, 0, offset
//! ```

use holdfast_block::{Record, to_usize};

use super::footer::Footer;
use super::{SECTOR_BYTES, checksum, locator};
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::put;
use crate::model::identity::ImageId;

pub(crate) const HEADER_BYTES: u64 = 1024;
const COOKIE: &[u8] = b"cxsparse";
pub(super) const AT_ENTRY_COUNT: usize = 28;
pub(super) const AT_CHECKSUM: usize = 36;
pub(super) const AT_PARENT: usize = 40;
const AT_NAME: usize = 64;
const NAME_BYTES: usize = 512;
pub(crate) const AT_LOCATORS: usize = 576;
const LOCATORS_BYTES: usize = 192;
/// A stored header.
pub(super) type SparseBytes = [u8; to_usize(HEADER_BYTES)];

/// A header that was validated against its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SparseHeader {
    pub(crate) offset: u64,
    pub(crate) table_offset: u64,
    pub(crate) entry_count: u64,
    pub(crate) block_bytes: u64,
    pub(crate) parent: ImageId,
    pub(crate) parent_timestamp: u32,
    /// Possible paths of the parent, the most likely first.
    pub(crate) parent_names: Vec<String>,
    /// End of the data of XenServer that follows the table; end of the table if there is none.
    pub(crate) tables_end: u64,
}

impl SparseHeader {
    pub(crate) fn load(file: &dyn ImageFile, file_bytes: u64, footer: &Footer, image: &str) -> Result<Self> {
        let offset = footer.header_offset;
        let wrong = |field: u64, detail: String| Err(corrupt(image, "header", offset.saturating_add(field), detail));
        if offset.checked_add(HEADER_BYTES).is_none_or(|end| end > file_bytes) {
            return wrong(0, "past the end of the file".to_owned());
        }
        let mut bytes = [0; to_usize(HEADER_BYTES)];
        file.read_at(&mut bytes, offset)?;
        let mut header = Self::parse(&bytes, footer, image)?;
        let table_end = header.tables_end;
        if table_end > file_bytes {
            let detail = format!(
                "the table of {} entries begins at {}",
                header.entry_count, header.table_offset
            );
            return wrong(16, detail);
        }
        let fields = Record::new(&bytes);
        let (locators, name) = (
            fields.field::<AT_LOCATORS, LOCATORS_BYTES>(),
            fields.field::<AT_NAME, NAME_BYTES>(),
        );
        header.parent_names = locator::names(file, locators, name)?;
        header.tables_end = end_of_batmap(file, table_end)?;
        Ok(header)
    }

    /// Parses the header alone, without resolving the locators or looking for data after the table.
    pub(super) fn parse(bytes: &SparseBytes, footer: &Footer, image: &str) -> Result<Self> {
        let offset = footer.header_offset;
        let wrong = |field: u64, detail: String| Err(corrupt(image, "header", offset.saturating_add(field), detail));
        if !bytes.starts_with(COOKIE) {
            return wrong(0, "it is missing".to_owned());
        }
        let fields = Record::new(bytes);
        let (stored, computed) = (fields.be_u32::<AT_CHECKSUM>(), checksum(bytes, AT_CHECKSUM));
        if stored != computed {
            return wrong(
                36,
                format!("the checksum is {stored:#010x}, and should be {computed:#010x}"),
            );
        }
        let table_offset = fields.be_u64::<16>();
        let entry_count = u64::from(fields.be_u32::<AT_ENTRY_COUNT>());
        let block_bytes = u64::from(fields.be_u32::<32>());
        if !block_bytes.is_power_of_two() || !(4096..=256 << 20).contains(&block_bytes) {
            return wrong(32, format!("a block has {block_bytes} bytes"));
        }
        let needed = footer.disk_bytes().div_ceil(block_bytes);
        if entry_count < needed {
            return wrong(
                28,
                format!("the table has {entry_count} entries, but the disk needs {needed}"),
            );
        }
        let table_end = table_offset.checked_add(entry_count * 4);
        let Some(tables_end) = table_end.filter(|_| table_offset.is_multiple_of(SECTOR_BYTES)) else {
            return wrong(
                16,
                format!("the table of {entry_count} entries begins at {table_offset}"),
            );
        };
        Ok(Self {
            offset,
            table_offset,
            entry_count,
            block_bytes,
            parent: ImageId(*fields.field::<AT_PARENT, 16>()),
            parent_timestamp: fields.be_u32::<56>(),
            parent_names: Vec::new(),
            tables_end,
        })
    }

    /// Offset of the entry of block `index`.
    pub(crate) fn entry_offset(&self, index: u64) -> u64 {
        self.table_offset + index * 4
    }

    /// Bytes of the bitmap before a block.
    pub(crate) fn bitmap_bytes(&self) -> u64 {
        (self.block_bytes / SECTOR_BYTES)
            .div_ceil(8)
            .next_multiple_of(SECTOR_BYTES)
    }

    /// The stored form, with `name` and `locators` of the parent.
    pub(crate) fn to_bytes(&self, name: &str, locators: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; to_usize(HEADER_BYTES)];
        let mut put = |at: usize, field: &[u8]| put(&mut bytes, at, field);
        let low = |value: u64| u32::try_from(value).unwrap_or(u32::MAX).to_be_bytes();
        put(0, COOKIE);
        put(8, &[0xff; 8]);
        put(16, &self.table_offset.to_be_bytes());
        put(24, &0x0001_0000_u32.to_be_bytes());
        put(28, &low(self.entry_count));
        put(32, &low(self.block_bytes));
        put(AT_PARENT, &self.parent.0);
        put(56, &self.parent_timestamp.to_be_bytes());
        let name: Vec<u8> = name
            .encode_utf16()
            .take(NAME_BYTES / 2 - 1)
            .flat_map(u16::to_be_bytes)
            .collect();
        put(AT_NAME, &name);
        put(AT_LOCATORS, locators);
        let sum = checksum(&bytes, AT_CHECKSUM);
        crate::model::bytes::put(&mut bytes, AT_CHECKSUM, &sum.to_be_bytes());
        bytes
    }
}

/// XenServer stores a map after the table that lists complete blocks. It is not needed, but must not be overwritten.
fn end_of_batmap(file: &dyn ImageFile, table_end: u64) -> Result<u64> {
    let at = table_end.next_multiple_of(SECTOR_BYTES);
    let mut bytes = [0; 24];
    file.read_at(&mut bytes, at)?;
    if !bytes.starts_with(b"tdbatmap") {
        return Ok(table_end);
    }
    let fields = Record::new(&bytes);
    let end = u64::from(fields.be_u32::<16>())
        .checked_mul(SECTOR_BYTES)
        .and_then(|length| fields.be_u64::<8>().checked_add(length));
    Ok(end
        .unwrap_or(table_end)
        .clamp(at + SECTOR_BYTES, file.length_bytes()?.max(at + SECTOR_BYTES)))
}
