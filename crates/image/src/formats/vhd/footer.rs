//! Parses and writes the footer.
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

use super::{SECTOR_BYTES, checksum};
use crate::Result;
use crate::error::corrupt;
use crate::model::bytes::put;
use crate::model::identity::ImageId;
use crate::model::info::ImageKind;

pub(crate) const FOOTER_BYTES: u64 = 512;
/// Old versions of Virtual PC left out the last byte, which is zero.
pub(crate) const FOOTER_BYTES_SHORT: u64 = 511;
/// A stored footer.
pub(crate) type FooterBytes = [u8; to_usize(FOOTER_BYTES)];
const COOKIE: &[u8] = b"conectix";
pub(super) const AT_CHECKSUM: usize = 64;
pub(super) const AT_ID: usize = 68;
/// The largest geometry, which larger disks also use.
const SECTORS_BY_GEOMETRY_MAX: u64 = 65_535 * 16 * 255;
/// Programs whose disks end with their geometry, as in QEMU.
const BY_GEOMETRY: [&[u8; 4]; 3] = [b"vpc ", b"vs  ", b"qemu"];

/// A footer with a valid checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Footer {
    pub(crate) kind: ImageKind,
    pub(crate) header_offset: u64,
    pub(crate) timestamp: u32,
    pub(crate) creator: [u8; 4],
    pub(crate) original_bytes: u64,
    pub(crate) current_bytes: u64,
    pub(crate) geometry: ChsGeometry,
    pub(crate) id: ImageId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChsGeometry {
    pub(super) cylinders: u16,
    pub(super) heads: u8,
    pub(super) sectors: u8,
}

impl ChsGeometry {
    /// The geometry of a disk size, by the algorithm in the appendix of the specification.
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
            return wrong(0, "it is missing".to_owned());
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
            geometry: ChsGeometry {
                cylinders: fields.be_u16::<56>(),
                heads: fields.byte::<58>(),
                sectors: fields.byte::<59>(),
            },
            id: ImageId(*fields.field::<AT_ID, 16>()),
        })
    }

    /// Size of the disk. For some programs the geometry takes precedence, and the stored size is larger.
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

    /// Changes the size in a valid footer; fields of other programs remain.
    pub(super) fn resized(bytes: &FooterBytes, size_bytes: u64) -> FooterBytes {
        let mut bytes = *bytes;
        let creator = *Record::new(&bytes).field::<28, 4>();
        let geometry = ChsGeometry::of(size_bytes);
        // A reader that uses the geometry of such a program would see a smaller disk.
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

/// QEMU uses the size in the footer only for programs that it knows; otherwise it uses the geometry, which differs.
pub(crate) const CREATOR: [u8; 4] = *b"win ";
