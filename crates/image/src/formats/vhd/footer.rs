//! The footer, and the whole header of an image.
//!
//! ```text
//! offset  bytes
//! 0       8    "conectix"
//! 8       4    features: 2
//! 12      4    version: 0x00010000
//! 16      8    offset of the header; all ones where the image is fixed
//! 24      4    seconds since 2000-01-01 UTC
//! 28      4    program that made it
//! 32      4    its version
//! 36      4    its system
//! 40      8    size of the disk when it was made
//! 48      8    size of the disk
//! 56      4    cylinders (2), heads, sectors
//! 60      4    2 fixed, 3 dynamic, 4 differencing
//! 64      4    checksum
//! 68      16   UUID
//! 84      1    whether it has a saved state
//! ```

use holdfast_block::{Record, to_usize};

use super::create::CREATOR;
use super::sparse::SparseHeader;
use super::{SECTOR_BYTES, checksum};
use crate::Result;
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::put;
use crate::model::identity::ImageId;
use crate::model::info::{BlockInfo, ImageKind, ParentInfo, USUAL_SECTOR_BYTES};

pub(crate) const FOOTER_BYTES: u64 = 512;
/// Old versions of Virtual PC left out the last byte, which is zero.
pub(crate) const FOOTER_BYTES_SHORT: u64 = 511;
/// A footer as it is stored.
pub(crate) type FooterBytes = [u8; to_usize(FOOTER_BYTES)];
const COOKIE: &[u8] = b"conectix";
pub(super) const AT_CHECKSUM: usize = 64;
pub(super) const AT_ID: usize = 68;
/// The largest geometry that can be said; larger disks say it, too.
const SECTORS_BY_GEOMETRY_MAX: u64 = 65_535 * 16 * 255;
/// Programs whose disks end where their geometry does, as in QEMU.
const BY_GEOMETRY: [&[u8; 4]; 3] = [b"vpc ", b"vs  ", b"qemu"];

/// A footer whose checksum is right.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Footer {
    pub(crate) kind: ImageKind,
    pub(crate) header_offset: u64,
    pub(crate) timestamp: u32,
    pub(crate) creator: [u8; 4],
    pub(crate) original_bytes: u64,
    pub(crate) current_bytes: u64,
    pub(crate) geometry: Geometry,
    pub(crate) id: ImageId,
}

/// Cylinders, heads and sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(super) cylinders: u16,
    pub(super) heads: u8,
    pub(super) sectors: u8,
}

impl Geometry {
    /// As the appendix of the specification computes it.
    pub(crate) fn of(size_bytes: u64) -> Self {
        let total = (size_bytes / SECTOR_BYTES).min(SECTORS_BY_GEOMETRY_MAX);
        let (sectors, heads, tracks) = if total >= 65_535 * 16 * 63 {
            (255, 16, total / 255)
        } else {
            let mut sectors = 17;
            let mut tracks = total / sectors;
            let mut heads = tracks.div_ceil(1024).max(4);
            if tracks >= heads * 1024 || heads > 16 {
                (sectors, heads) = (31, 16);
                tracks = total / sectors;
            }
            if tracks >= heads * 1024 {
                (sectors, heads) = (63, 16);
                tracks = total / sectors;
            }
            (sectors, heads, tracks)
        };
        let byte = |value: u64| u8::try_from(value).unwrap_or(u8::MAX);
        Self {
            cylinders: u16::try_from(tracks / heads).unwrap_or(u16::MAX),
            heads: byte(heads),
            sectors: byte(sectors),
        }
    }

    fn sector_count(self) -> u64 {
        u64::from(self.cylinders) * u64::from(self.heads) * u64::from(self.sectors)
    }
}

impl Footer {
    pub(super) fn parse(bytes: &FooterBytes, at: u64, image: &str) -> Result<Self> {
        let fields = Record::new(bytes);
        let wrong = |field: u64, detail: String| Err(corrupt(image, "footer", at + field, detail));
        if !bytes.starts_with(COOKIE) {
            return wrong(0, "there is none".to_owned());
        }
        let (stored, computed) = (fields.be_u32::<AT_CHECKSUM>(), checksum(bytes, AT_CHECKSUM));
        if stored != computed {
            return wrong(
                64,
                format!("the checksum is {stored:#010x}, and should be {computed:#010x}"),
            );
        }
        let version = fields.be_u32::<12>();
        if version >> 16 != 1 {
            return wrong(12, format!("the version is {version:#010x}"));
        }
        let kind = match fields.be_u32::<60>() {
            2 => ImageKind::Fixed,
            3 => ImageKind::Dynamic,
            4 => ImageKind::Differencing,
            other => return wrong(60, format!("the type is {other}")),
        };
        Ok(Self {
            kind,
            header_offset: fields.be_u64::<16>(),
            timestamp: fields.be_u32::<24>(),
            creator: *fields.field::<28, 4>(),
            original_bytes: fields.be_u64::<40>(),
            current_bytes: fields.be_u64::<48>(),
            geometry: Geometry {
                cylinders: fields.be_u16::<56>(),
                heads: fields.byte::<58>(),
                sectors: fields.byte::<59>(),
            },
            id: ImageId(*fields.field::<AT_ID, 16>()),
        })
    }

    /// Size of the disk. Some programs mean the geometry, and store a size that is larger.
    pub(crate) fn disk_bytes(&self) -> u64 {
        let by_geometry = self.geometry.sector_count();
        let bytes = by_geometry * SECTOR_BYTES;
        if BY_GEOMETRY.contains(&&self.creator)
            && by_geometry != SECTORS_BY_GEOMETRY_MAX
            && (1..=self.current_bytes).contains(&bytes)
        {
            bytes
        } else {
            self.current_bytes
        }
    }

    /// The bytes of a footer that is whole with another size of the disk; what other programs keep in it stays.
    pub(super) fn resized(bytes: &FooterBytes, size_bytes: u64) -> FooterBytes {
        let mut bytes = *bytes;
        let creator = *Record::new(&bytes).field::<28, 4>();
        let geometry = Geometry::of(size_bytes);
        // Who reads the geometry of such a program would take the disk for smaller than it is.
        if BY_GEOMETRY.contains(&&creator) && geometry.sector_count() * SECTOR_BYTES != size_bytes {
            put(&mut bytes, 28, &CREATOR);
        }
        put(&mut bytes, 48, &size_bytes.to_be_bytes());
        put(&mut bytes, 56, &geometry.cylinders.to_be_bytes());
        put(&mut bytes, 58, &[geometry.heads, geometry.sectors]);
        let sum = checksum(&bytes, AT_CHECKSUM);
        put(&mut bytes, AT_CHECKSUM, &sum.to_be_bytes());
        bytes
    }

    /// The footer as it is stored.
    pub(crate) fn to_bytes(&self) -> FooterBytes {
        let mut bytes = [0; to_usize(FOOTER_BYTES)];
        let mut put = |at: usize, field: &[u8]| put(&mut bytes, at, field);
        let kind: u32 = match self.kind {
            ImageKind::Fixed => 2,
            ImageKind::Differencing => 4,
            ImageKind::Dynamic | ImageKind::Stream => 3,
        };
        put(0, COOKIE);
        put(8, &2_u32.to_be_bytes());
        put(12, &0x0001_0000_u32.to_be_bytes());
        put(16, &self.header_offset.to_be_bytes());
        put(24, &self.timestamp.to_be_bytes());
        put(28, &self.creator);
        put(32, &0x000a_0000_u32.to_be_bytes());
        put(36, b"Wi2k");
        put(40, &self.original_bytes.to_be_bytes());
        put(48, &self.current_bytes.to_be_bytes());
        put(56, &self.geometry.cylinders.to_be_bytes());
        put(58, &[self.geometry.heads, self.geometry.sectors]);
        put(60, &kind.to_be_bytes());
        put(AT_ID, &self.id.0);
        let sum = checksum(&bytes, AT_CHECKSUM);
        crate::model::bytes::put(&mut bytes, AT_CHECKSUM, &sum.to_be_bytes());
        bytes
    }
}

fn start_of_footer(file_bytes: u64, is_short: bool) -> u64 {
    file_bytes.saturating_sub(if is_short { FOOTER_BYTES_SHORT } else { FOOTER_BYTES })
}

/// All that an image says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) footer: Footer,
    /// Of all but fixed images.
    pub(crate) sparse: Option<SparseHeader>,
    /// The footer as it stands, with what other programs keep in it.
    pub(crate) footer_bytes: Box<FooterBytes>,
    /// Whether the footer at the end is as it should be; where it is not, its copy counts.
    pub(crate) has_footer_at_end: bool,
    /// Whether that has 511 bytes only.
    pub(crate) is_footer_short: bool,
}

impl Header {
    /// Reads the header of `file`, called `image`.
    pub(crate) fn load(file: &dyn ImageFile, image: &str) -> Result<Self> {
        let file_bytes = file.length_bytes()?;
        if file_bytes < FOOTER_BYTES_SHORT {
            return Err(corrupt(
                image,
                "footer",
                0,
                format!("the file has {file_bytes} bytes, too few for one"),
            ));
        }
        let footer_at = |at: u64| {
            let mut bytes = [0; to_usize(FOOTER_BYTES)];
            file.read_at(&mut bytes, at)?;
            Footer::parse(&bytes, at, image).map(|footer| (footer, Box::new(bytes)))
        };
        let mut at_end = footer_at(file_bytes.saturating_sub(FOOTER_BYTES));
        let mut is_footer_short = false;
        if at_end.is_err()
            && let Ok(short) = footer_at(file_bytes - FOOTER_BYTES_SHORT)
        {
            (at_end, is_footer_short) = (Ok(short), true);
        }
        let has_footer_at_end = at_end.is_ok();
        let (footer, footer_bytes) = match at_end {
            Ok(found) => found,
            // A program that was killed while the image grew; only those that grow have a copy.
            Err(error) => match footer_at(0) {
                Ok(copy) if copy.0.kind != ImageKind::Fixed => copy,
                _ => return Err(error),
            },
        };
        let disk_bytes = footer.disk_bytes();
        if footer.kind == ImageKind::Fixed && disk_bytes > start_of_footer(file_bytes, is_footer_short) {
            return Err(corrupt(
                image,
                "footer",
                48,
                format!("the disk has {disk_bytes} bytes, and the file {file_bytes}"),
            ));
        }
        let sparse = match footer.kind {
            ImageKind::Fixed => None,
            _ => Some(SparseHeader::load(file, file_bytes, &footer, image)?),
        };
        Ok(Self {
            footer,
            sparse,
            footer_bytes,
            has_footer_at_end,
            is_footer_short,
        })
    }

    /// Where the footer at the end begins in a file of `file_bytes`; their end where there is none.
    pub(crate) fn footer_start(&self, file_bytes: u64) -> u64 {
        if self.has_footer_at_end {
            start_of_footer(file_bytes, self.is_footer_short)
        } else {
            file_bytes
        }
    }

    /// What there is to know about it.
    pub(crate) fn describe(&self) -> BlockInfo {
        let sparse = self.sparse.as_ref();
        BlockInfo {
            kind: self.footer.kind,
            block_bytes: sparse.map_or(self.footer.disk_bytes(), |sparse| sparse.block_bytes),
            sector_bytes: USUAL_SECTOR_BYTES,
            id: Some(self.footer.id),
            modification: None,
            parent: sparse
                .filter(|_| self.footer.kind == ImageKind::Differencing)
                .map(|sparse| ParentInfo {
                    id: Some(sparse.parent),
                    modification: None,
                    names: sparse.parent_names.clone(),
                }),
            creator: Some(String::from_utf8_lossy(&self.footer.creator).trim_end().to_owned()),
        }
    }
}
