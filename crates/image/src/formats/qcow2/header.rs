//! The header: the first cluster of the file.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `QFI\xfb` |
//! | 4 | 4 | version, 2 or 3 |
//! | 8 | 8 | offset of the backing file's name, 0 for none |
//! | 16 | 4 | length of that name |
//! | 20 | 4 | log2 of the cluster size |
//! | 24 | 8 | size of the disk in bytes |
//! | 32 | 4 | encryption method |
//! | 36 | 4 | entries of the L1 table |
//! | 40 | 8 | offset of the L1 table |
//! | 48 | 8 | offset of the refcount table |
//! | 56 | 4 | clusters of the refcount table |
//! | 60 | 4 | number of snapshots |
//! | 64 | 8 | offset of the snapshot table |
//! | 72 | 8 | incompatible features (version 3, as all that follows) |
//! | 80 | 8 | compatible features |
//! | 88 | 8 | autoclear features |
//! | 96 | 4 | log2 of the width of refcounts in bits |
//! | 100 | 4 | length of the header |
//! | 104 | 1 | compression type |
//!
//! The header extensions follow, then the backing file's name, all within the first cluster.

#![deny(clippy::indexing_slicing)]
#![cfg_attr(not(test), deny(clippy::string_slice))]

use holdfast_block::{Record, to_usize};

use super::features::{
    AUTOCLEAR_RAW_DATA_FILE, EXTENSION_END, Extension, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_DATA_FILE,
    INCOMPATIBLE_EXTENDED_L2, refuse_encryption, refuse_unknown,
};
use super::geometry::{L2Kind, POINTER_BYTES, Qcow2Geometry};
use crate::error::corrupt;
use crate::file::ImageFile;
use crate::model::bytes::rows;
use crate::model::format::HEAD_BYTES;
use crate::model::qcow2_info::TableLocation;
use crate::{Compression, Error, Result};

pub(crate) const MAGIC: u32 = 0x5146_49fb;
const HEADER_BYTES_V2: u32 = 72;
const HEADER_BYTES_V3: u32 = 112;
const HEADER_BYTES_V3_MIN: u32 = 104;
/// The fields of all versions.
type Fields<'a> = Record<'a, { HEADER_BYTES_V2 as usize }>;
/// The same, with the additional fields of version 3.
type FieldsV3<'a> = Record<'a, { HEADER_BYTES_V3_MIN as usize }>;
/// Offsets of the fields that a writer changes in place.
pub(crate) const SIZE_AT: u64 = 24;
pub(crate) const L1_AT: u64 = 36;
pub(crate) const REFCOUNT_TABLE_AT: u64 = 48;
pub(crate) const INCOMPATIBLE_AT: u64 = 72;
pub(crate) const AUTOCLEAR_AT: u64 = 88;

/// QEMU's limits, which no valid image exceeds.
pub(crate) const L1_BYTES_MAX: u64 = 32 << 20;
pub(crate) const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
const BACKING_NAME_BYTES_MAX: u32 = 1023;

/// A validated header: consistent with itself and the file, and supported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Qcow2Header {
    pub(crate) version: u32,
    pub(crate) size_bytes: u64,
    pub(crate) geometry: Qcow2Geometry,
    pub(crate) backing_name: Option<String>,
    pub(crate) l1: TableLocation,
    pub(crate) refcount_table_offset: u64,
    pub(crate) refcount_table_clusters: u64,
    pub(crate) snapshot_count: u32,
    pub(crate) snapshot_table_offset: u64,
    pub(crate) incompatible: u64,
    pub(crate) compatible: u64,
    pub(crate) autoclear: u64,
    pub(crate) compression: Compression,
    pub(crate) extensions: Vec<Extension>,
}

impl Qcow2Header {
    /// Parses a header from `head`, the first cluster of a file of `file_bytes`, or less if the file is shorter.
    pub(crate) fn parse(head: &[u8], file_bytes: u64, image: &str) -> Result<Self> {
        let damaged = |offset: u64, detail: String| corrupt(image, "header", offset, detail);
        let cluster_bits = cluster_bits_of(head, image)?;
        let cut_off = || damaged(0, format!("cut off after {} bytes", head.len()));
        let fields = Fields::first_of(head).ok_or_else(cut_off)?;
        let version = fields.be_u32::<4>();
        let v3 = match version {
            2 => None,
            _ => Some(FieldsV3::first_of(head).ok_or_else(cut_off)?),
        };
        let header_bytes = v3.map_or(HEADER_BYTES_V2, FieldsV3::be_u32::<100>);
        if version == 3 && (header_bytes < HEADER_BYTES_V3_MIN || !header_bytes.is_multiple_of(8)) {
            return Err(damaged(100, format!("header length {header_bytes}")));
        }
        if header_bytes as usize > head.len() {
            return Err(damaged(
                100,
                format!("header of {header_bytes} bytes in a file of {}", head.len()),
            ));
        }
        let incompatible = v3.map_or(0, FieldsV3::be_u64::<72>);
        let backing_offset = fields.be_u64::<8>();
        let extensions = parse_extensions(head, header_bytes, backing_offset);
        let extensions = extensions.map_err(|(at, detail)| damaged(at, detail))?;
        refuse_unknown(incompatible, &extensions, image)?;
        refuse_encryption(fields.be_u32::<32>(), image)?;
        let refcount_order = v3.map_or(4, FieldsV3::be_u32::<96>);
        if refcount_order > 6 {
            return Err(damaged(96, format!("refcounts have 2^{refcount_order} bits")));
        }
        let l2_kind = if incompatible & INCOMPATIBLE_EXTENDED_L2 == 0 {
            L2Kind::Standard
        } else {
            L2Kind::Extended
        };
        if l2_kind == L2Kind::Extended && cluster_bits < 14 {
            return Err(damaged(
                20,
                "extended L2 entries need clusters of 16 KiB or more".to_owned(),
            ));
        }
        let header = Self {
            version,
            size_bytes: fields.be_u64::<24>(),
            geometry: Qcow2Geometry {
                cluster_bits,
                refcount_order,
                l2_kind,
            },
            backing_name: parse_backing_name(head, backing_offset, fields.be_u32::<16>(), image)?,
            l1: TableLocation {
                offset: fields.be_u64::<40>(),
                entries: u64::from(fields.be_u32::<36>()),
            },
            refcount_table_offset: fields.be_u64::<48>(),
            refcount_table_clusters: u64::from(fields.be_u32::<56>()),
            snapshot_count: fields.be_u32::<60>(),
            snapshot_table_offset: fields.be_u64::<64>(),
            incompatible,
            compatible: v3.map_or(0, FieldsV3::be_u64::<80>),
            autoclear: v3.map_or(0, FieldsV3::be_u64::<88>),
            compression: parse_compression(compression_field(head, header_bytes), incompatible, image)?,
            extensions,
        };
        header.check_size(image)?;
        header.check_l1(header.l1, header.size_bytes, file_bytes, image)?;
        Ok(header)
    }

    fn check_size(&self, image: &str) -> Result<()> {
        if i64::try_from(self.size_bytes).is_err() {
            return Err(corrupt(
                image,
                "header",
                24,
                format!("disk of {} bytes", self.size_bytes),
            ));
        }
        Ok(())
    }

    /// Checks that an L1 table is inside the file and maps a disk of `size_bytes`.
    pub(crate) fn check_l1(&self, l1: TableLocation, size_bytes: u64, file_bytes: u64, image: &str) -> Result<()> {
        let damaged = |detail: String| corrupt(image, "l1 table", l1.offset, detail);
        let table_bytes = l1.entries * POINTER_BYTES;
        if table_bytes > L1_BYTES_MAX {
            return Err(damaged(format!("{} entries", l1.entries)));
        }
        let needed = self.geometry.l1_entries_for(size_bytes);
        if l1.entries < needed {
            return Err(damaged(format!(
                "it has {} entries, but the disk needs {needed}",
                l1.entries
            )));
        }
        if l1.entries > 0 && (l1.offset == 0 || !self.geometry.is_aligned(l1.offset)) {
            return Err(damaged("not at the start of a cluster".to_owned()));
        }
        // A new image of QEMU ends right after the last entry, in the middle of a cluster.
        match l1.offset.checked_add(table_bytes) {
            Some(end) if end <= file_bytes || table_bytes == 0 => Ok(()),
            _ => Err(damaged(format!(
                "its {table_bytes} bytes extend past the end of the file ({file_bytes} bytes)"
            ))),
        }
    }

    pub(crate) fn extension(&self, kind: u32) -> Option<&[u8]> {
        let found = self.extensions.iter().find(|extension| extension.kind == kind)?;
        Some(&found.data)
    }

    /// The text of an extension with a name.
    pub(crate) fn extension_text(&self, kind: u32, image: &str) -> Result<Option<String>> {
        let Some(data) = self.extension(kind) else {
            return Ok(None);
        };
        match String::from_utf8(data.to_vec()) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(corrupt(
                image,
                "header extension",
                0,
                "a name that is not UTF-8".to_owned(),
            )),
        }
    }

    pub(crate) fn has_data_file(&self) -> bool {
        self.incompatible & INCOMPATIBLE_DATA_FILE != 0
    }

    /// Whether the external data file is a raw image of the disk.
    pub(crate) fn is_data_file_raw(&self) -> bool {
        self.has_data_file() && self.autoclear & AUTOCLEAR_RAW_DATA_FILE != 0
    }

    /// Whether clusters can be marked as zero.
    pub(crate) fn has_zero_clusters(&self) -> bool {
        self.version >= 3
    }

    /// The encoded header for a new image; fails if it exceeds a cluster.
    pub(crate) fn encode(&self) -> Result<Vec<u8>> {
        let header_bytes = if self.version == 2 {
            HEADER_BYTES_V2
        } else {
            HEADER_BYTES_V3
        };
        let mut extensions = Vec::new();
        for extension in &self.extensions {
            extensions.extend(extension.kind.to_be_bytes());
            extensions.extend(u32::try_from(extension.data.len()).unwrap_or(u32::MAX).to_be_bytes());
            extensions.extend(&extension.data);
            extensions.resize(extensions.len().next_multiple_of(8), 0);
        }
        extensions.extend([0; 8]);
        let name = self.backing_name.as_deref().unwrap_or_default();
        let name_at = u64::from(header_bytes) + extensions.len() as u64;
        let name_bytes = u32::try_from(name.len()).unwrap_or(u32::MAX);
        if name_bytes > BACKING_NAME_BYTES_MAX || name_at + u64::from(name_bytes) > self.geometry.cluster_bytes() {
            return Err(Error::InvalidOption {
                option: "backing file",
                detail: format!("a name of {name_bytes} bytes does not fit into the header cluster"),
            });
        }
        let mut head = Vec::new();
        head.extend(MAGIC.to_be_bytes());
        head.extend(self.version.to_be_bytes());
        head.extend(if name.is_empty() { 0 } else { name_at }.to_be_bytes());
        head.extend(name_bytes.to_be_bytes());
        head.extend(self.geometry.cluster_bits.to_be_bytes());
        head.extend(self.size_bytes.to_be_bytes());
        head.extend(0u32.to_be_bytes());
        head.extend(u32::try_from(self.l1.entries).expect("bounded by 32 MiB").to_be_bytes());
        head.extend(self.l1.offset.to_be_bytes());
        head.extend(self.refcount_table_offset.to_be_bytes());
        let table_clusters = u32::try_from(self.refcount_table_clusters).expect("bounded by 8 MiB");
        head.extend(table_clusters.to_be_bytes());
        head.extend(self.snapshot_count.to_be_bytes());
        head.extend(self.snapshot_table_offset.to_be_bytes());
        if self.version >= 3 {
            head.extend(self.incompatible.to_be_bytes());
            head.extend(self.compatible.to_be_bytes());
            head.extend(self.autoclear.to_be_bytes());
            head.extend(self.geometry.refcount_order.to_be_bytes());
            head.extend(HEADER_BYTES_V3.to_be_bytes());
            head.push(match self.compression {
                Compression::Zlib => 0,
                Compression::Zstd => 1,
            });
            head.extend([0; 7]);
        }
        assert_eq!(
            head.len(),
            header_bytes as usize,
            "the fields above are the table of this module"
        );
        head.extend(extensions);
        head.extend(name.as_bytes());
        Ok(head)
    }
}

/// Checks magic number and version; returns log2 of the cluster size, so that the caller can read the whole first
/// cluster.
pub(crate) fn cluster_bits_of(head: &[u8], image: &str) -> Result<u32> {
    let fields = Fields::first_of(head).filter(|fields| fields.be_u32::<0>() == MAGIC);
    let fields = fields.ok_or_else(|| corrupt(image, "header", 0, "no qcow2 magic number"))?;
    let version = fields.be_u32::<4>();
    if !(2..=3).contains(&version) {
        return Err(Error::UnsupportedFeature {
            image: image.to_owned(),
            feature: format!("qcow2 version {version}"),
            detail: "only versions 2 and 3 are supported".to_owned(),
        });
    }
    if version == 3 && head.len() < HEADER_BYTES_V3_MIN as usize {
        return Err(corrupt(
            image,
            "header",
            0,
            format!("cut off after {} bytes", head.len()),
        ));
    }
    let cluster_bits = fields.be_u32::<20>();
    if (9..=21).contains(&cluster_bits) {
        Ok(cluster_bits)
    } else {
        Err(corrupt(
            image,
            "header",
            20,
            format!("clusters of 2^{cluster_bits} bytes"),
        ))
    }
}

fn parse_extensions(head: &[u8], header_bytes: u32, backing_offset: u64) -> Result<Vec<Extension>, (u64, String)> {
    let end = match usize::try_from(backing_offset) {
        Ok(0) | Err(_) => head.len(),
        Ok(offset) => offset.min(head.len()),
    };
    let mut extensions = Vec::new();
    let mut at = header_bytes as usize;
    while at + 8 <= end {
        let Some([kind, length]) = rows(head, at).first_chunk() else {
            break;
        };
        let (kind, length) = (u32::from_be_bytes(*kind), u32::from_be_bytes(*length) as usize);
        if kind == EXTENSION_END {
            break;
        }
        let start = at + 8;
        if length > end - start {
            return Err((
                at as u64,
                format!("extension {kind:#010x} of {length} bytes does not fit"),
            ));
        }
        extensions.push(Extension {
            kind,
            data: head.get(start..start + length).unwrap_or_default().to_vec(),
        });
        at = start + length.next_multiple_of(8);
    }
    Ok(extensions)
}

fn parse_backing_name(head: &[u8], offset: u64, length: u32, image: &str) -> Result<Option<String>> {
    if offset == 0 || length == 0 {
        return Ok(None);
    }
    let damaged = |detail: String| corrupt(image, "backing file name", offset, detail);
    if length > BACKING_NAME_BYTES_MAX {
        return Err(damaged(format!("{length} bytes long")));
    }
    let bytes = usize::try_from(offset)
        .ok()
        .and_then(|start| head.get(start..start.checked_add(length as usize)?))
        .ok_or_else(|| damaged("outside the first cluster".to_owned()))?;
    match String::from_utf8(bytes.to_vec()) {
        Ok(name) => Ok(Some(name)),
        Err(_) => Err(damaged("not UTF-8".to_owned())),
    }
}

/// The compression type; 0 if the header is too short for it.
fn compression_field(head: &[u8], header_bytes: u32) -> u8 {
    let header = head.get(..header_bytes as usize);
    let field = header.and_then(|header| header.get(HEADER_BYTES_V3_MIN as usize));
    field.copied().unwrap_or_default()
}

fn parse_compression(field: u8, incompatible: u64, image: &str) -> Result<Compression> {
    let compression = match field {
        0 => Compression::Zlib,
        1 => Compression::Zstd,
        other => {
            return Err(Error::UnsupportedFeature {
                image: image.to_owned(),
                feature: format!("compression type {other}"),
                detail: "only zlib (0) and zstd (1) are supported".to_owned(),
            });
        }
    };
    let is_flagged = incompatible & INCOMPATIBLE_COMPRESSION != 0;
    if is_flagged == (compression == Compression::Zlib) {
        return Err(corrupt(
            image,
            "header",
            104,
            "compression type and its feature bit contradict each other",
        ));
    }
    Ok(compression)
}

/// What the first cluster `head` of an image with a backing file begins with if that file is called `name`.
///
/// # Errors
/// The image has no backing file, or the name does not fit.
pub(crate) fn with_backing_name(head: &[u8], name: &str) -> Result<Vec<u8>> {
    let refused = |detail: String| Error::InvalidOption {
        option: "backing file",
        detail,
    };
    let fields = Fields::first_of(head).ok_or_else(|| refused("the image has no header".to_owned()))?;
    let (start, old_bytes) = (fields.be_u64::<8>(), fields.be_u32::<16>());
    let new_bytes = u32::try_from(name.len()).unwrap_or(u32::MAX);
    if start < u64::from(HEADER_BYTES_V2) || old_bytes == 0 {
        return Err(refused("the image has none".to_owned()));
    }
    let place = |bytes: u32| {
        let end = start.checked_add(u64::from(bytes))?;
        Some(to_usize(start)..to_usize(end)).filter(|place| place.end <= head.len())
    };
    let (Some(old), Some(new)) = (place(old_bytes), place(new_bytes)) else {
        return Err(refused(format!(
            "a name of {new_bytes} bytes does not fit into the header cluster"
        )));
    };
    if new_bytes == 0 || new_bytes > BACKING_NAME_BYTES_MAX {
        return Err(refused(format!(
            "a name has 1 to {BACKING_NAME_BYTES_MAX} bytes, not {new_bytes}"
        )));
    }
    let mut changed = head.get(..old.end.max(new.end)).unwrap_or_default().to_vec();
    for (range, content) in [
        (old, &vec![0; old_bytes as usize][..]),
        (new, name.as_bytes()),
        (16..20, &new_bytes.to_be_bytes()),
    ] {
        if let Some(part) = changed.get_mut(range) {
            part.copy_from_slice(content);
        }
    }
    Ok(changed)
}

/// Reads and validates the header of a qcow2 file.
pub(crate) fn load_header(file: &dyn ImageFile, image: &str) -> Result<Qcow2Header> {
    let file_bytes = file.length_bytes()?;
    let mut start = vec![0; to_usize(file_bytes.min(HEAD_BYTES))];
    file.read_at(&mut start, 0)?;
    let cluster_bytes = 1u64 << cluster_bits_of(&start, image)?;
    let mut head = vec![0; to_usize(file_bytes.min(cluster_bytes))];
    file.read_at(&mut head, 0)?;
    Qcow2Header::parse(&head, file_bytes, image)
}

#[cfg(test)]
mod tests {
    use super::{L2Kind, Qcow2Header};
    use crate::formats::qcow2::features::Extension;
    use crate::formats::qcow2::features::feature_names;
    use crate::formats::qcow2::geometry::Qcow2Geometry;
    use crate::model::qcow2_info::TableLocation;
    use crate::{Compression, Error};

    fn header() -> Qcow2Header {
        Qcow2Header {
            version: 3,
            size_bytes: 1 << 30,
            geometry: Qcow2Geometry {
                cluster_bits: 16,
                refcount_order: 4,
                l2_kind: L2Kind::Standard,
            },
            backing_name: Some("base.qcow2".to_owned()),
            l1: TableLocation {
                offset: 0x30000,
                entries: 2,
            },
            refcount_table_offset: 0x10000,
            refcount_table_clusters: 1,
            snapshot_count: 0,
            snapshot_table_offset: 0,
            incompatible: 0,
            compatible: 1,
            autoclear: 0,
            compression: Compression::Zlib,
            extensions: vec![
                feature_names(),
                Extension {
                    kind: 0x1234_5678,
                    data: vec![1, 2, 3],
                },
            ],
        }
    }

    #[test]
    fn encoded_header_is_parsed() {
        let mut expected = header();
        for version in [2, 3] {
            expected.version = version;
            expected.compatible = u64::from(version == 3);
            let head = expected.encode().unwrap();
            assert_eq!(Qcow2Header::parse(&head, 1 << 20, "test").unwrap(), expected);
        }
    }

    #[test]
    fn unknown_feature_is_refused_by_its_name() {
        let mut unknown_features = header();
        unknown_features.incompatible = 1 << 9 | 1 << 40;
        let mut row = vec![0, 9];
        row.extend(b"time travel");
        row.resize(48, 0);
        unknown_features.extensions[0].data.extend(row);
        let error = Qcow2Header::parse(&unknown_features.encode().unwrap(), 1 << 20, "test").unwrap_err();
        let Error::UnsupportedFeature { feature, .. } = error else {
            panic!("{error}");
        };
        assert_eq!(feature, "time travel, unknown feature bit 40");
    }

    #[test]
    fn tables_must_lie_in_the_file() {
        let mut large = header();
        large.l1.entries = 100_000;
        assert!(
            Qcow2Header::parse(&large.encode().unwrap(), 1 << 18, "test")
                .unwrap_err()
                .is_corrupt()
        );
        large.l1 = TableLocation {
            offset: !0xffff,
            entries: 2,
        };
        assert!(
            Qcow2Header::parse(&large.encode().unwrap(), 1 << 18, "test")
                .unwrap_err()
                .is_corrupt()
        );
    }
}
