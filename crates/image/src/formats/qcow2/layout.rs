//! Lays out the first clusters of a new image.

use holdfast_block::to_usize;

use super::features::{
    AUTOCLEAR_RAW_DATA_FILE, COMPATIBLE_LAZY_REFCOUNTS, EXTENSION_BACKING_FORMAT, EXTENSION_DATA_FILE, Extension,
    INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_EXTENDED_L2, feature_names,
};
use super::geometry::{L2Kind, POINTER_BYTES, Qcow2Geometry};
use super::header::{L1_BYTES_MAX, Qcow2Header, REFCOUNT_TABLE_BYTES_MAX};
use super::refcount::{clusters_for, set};
use crate::file::ImageFile;
use crate::model::bytes::from_words;
use crate::model::create_options::{CreateOptions, DataFileKind, Preallocation, Qcow2Options};
use crate::model::qcow2_info::TableLocation;
use crate::{Compression, Error, Format, Result};

fn invalid(option: &'static str, detail: impl Into<String>) -> Error {
    Error::InvalidOption {
        option,
        detail: detail.into(),
    }
}

/// The header of a new image, without the places of its tables; fails if options are inconsistent.
pub(crate) fn new_header(options: &CreateOptions) -> Result<Qcow2Header> {
    let qcow2 = &options.qcow2;
    let geometry = geometry_of(qcow2)?;
    check_version_2(qcow2)?;
    check_places(qcow2)?;
    let l1_entries = geometry.l1_entries_for(options.size_bytes);
    if i64::try_from(options.size_bytes).is_err() || l1_entries * POINTER_BYTES > L1_BYTES_MAX {
        let detail = format!(
            "{} bytes are too many for clusters of {}",
            options.size_bytes, qcow2.cluster_bytes
        );
        return Err(invalid("size", detail));
    }
    let flag = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
    let is_raw = qcow2
        .data_file
        .as_ref()
        .is_some_and(|data| data.kind == DataFileKind::Raw);
    let header = Qcow2Header {
        version: qcow2.version,
        size_bytes: options.size_bytes,
        geometry,
        backing_name: qcow2.backing.as_ref().map(|backing| backing.name.clone()),
        l1: TableLocation {
            offset: 0,
            entries: l1_entries,
        },
        refcount_table_offset: 0,
        refcount_table_clusters: 0,
        snapshot_count: 0,
        snapshot_table_offset: 0,
        incompatible: flag(qcow2.data_file.is_some(), INCOMPATIBLE_DATA_FILE)
            | flag(qcow2.compression != Compression::Zlib, INCOMPATIBLE_COMPRESSION)
            | flag(qcow2.extended_l2, INCOMPATIBLE_EXTENDED_L2),
        compatible: flag(qcow2.lazy_refcounts, COMPATIBLE_LAZY_REFCOUNTS),
        autoclear: flag(is_raw, AUTOCLEAR_RAW_DATA_FILE),
        compression: qcow2.compression,
        extensions: extensions_of(qcow2),
    };
    header.encode()?;
    Ok(header)
}

fn geometry_of(options: &Qcow2Options) -> Result<Qcow2Geometry> {
    let bytes = options.cluster_bytes;
    if !bytes.is_power_of_two() || !(512..=2 << 20).contains(&bytes) {
        return Err(invalid(
            "cluster size",
            format!("{bytes} is not a power of two between 512 and 2 MiB"),
        ));
    }
    let bits = options.refcount_bits;
    if !bits.is_power_of_two() || bits > 64 {
        return Err(invalid(
            "refcount bits",
            format!("{bits} is not 1, 2, 4, 8, 16, 32 or 64"),
        ));
    }
    if options.extended_l2 && bytes < 16_384 {
        return Err(invalid("extended l2", "subclusters need clusters of 16 KiB or more"));
    }
    Ok(Qcow2Geometry {
        cluster_bits: bytes.trailing_zeros(),
        refcount_order: bits.trailing_zeros(),
        l2_kind: if options.extended_l2 {
            L2Kind::Extended
        } else {
            L2Kind::Standard
        },
    })
}

fn check_version_2(options: &Qcow2Options) -> Result<()> {
    match options.version {
        3 => return Ok(()),
        2 => {}
        other => return Err(invalid("version", format!("{other} is neither 2 nor 3"))),
    }
    let needs_3 = [
        ("compression", options.compression != Compression::Zlib),
        ("extended l2", options.extended_l2),
        ("lazy refcounts", options.lazy_refcounts),
        ("refcount bits", options.refcount_bits != 16),
        ("data file", options.data_file.is_some()),
    ];
    match needs_3.into_iter().find(|(_, is_needed)| *is_needed) {
        Some((option, _)) => Err(invalid(option, "needs version 3")),
        None => Ok(()),
    }
}

fn check_places(options: &Qcow2Options) -> Result<()> {
    if let Some(backing) = &options.backing {
        if !matches!(backing.format, Format::Raw | Format::Qcow2) {
            return Err(invalid(
                "backing file",
                format!(
                    "it is a {} image, but must be raw or qcow2: convert it first",
                    backing.format
                ),
            ));
        }
        if backing.name.is_empty() {
            return Err(invalid("backing file", "the name is empty"));
        }
        if options.preallocation == Preallocation::Metadata {
            return Err(invalid(
                "preallocation",
                "allocated clusters would hide the backing file",
            ));
        }
    }
    match &options.data_file {
        Some(data) if data.name.is_empty() => Err(invalid("data file", "the name is empty")),
        Some(data) if data.kind == DataFileKind::Raw && options.backing.is_some() => Err(invalid(
            "data file",
            "a raw data file contains the whole disk, so the image cannot have a backing file",
        )),
        _ => Ok(()),
    }
}

fn extensions_of(options: &Qcow2Options) -> Vec<Extension> {
    let mut extensions = Vec::new();
    if let Some(backing) = &options.backing {
        let data = backing.format.qemu_name().as_bytes().to_vec();
        extensions.push(Extension {
            kind: EXTENSION_BACKING_FORMAT,
            data,
        });
    }
    if let Some(data) = &options.data_file {
        let data = data.name.as_bytes().to_vec();
        extensions.push(Extension {
            kind: EXTENSION_DATA_FILE,
            data,
        });
    }
    // Clusters of 512 bytes have no space for the feature names, which are optional.
    if options.version >= 3 && options.cluster_bytes >= 4096 {
        extensions.push(feature_names());
    }
    extensions
}

/// Writes the tables of an empty image, then its header: until then the file is no valid image.
pub(crate) fn write_empty(file: &dyn ImageFile, mut header: Qcow2Header) -> Result<()> {
    let geometry = header.geometry;
    let cluster_bytes = geometry.cluster_bytes();
    let l1_clusters = geometry.clusters_for(header.l1.entries * POINTER_BYTES);
    let (table_clusters, block_clusters) = clusters_for(geometry, 1 + l1_clusters);
    if geometry.offset_of(table_clusters) > REFCOUNT_TABLE_BYTES_MAX.max(cluster_bytes) {
        return Err(invalid("refcount bits", "the refcount table would be too large"));
    }
    let total = 1 + table_clusters + block_clusters + l1_clusters;
    header.refcount_table_offset = cluster_bytes;
    header.refcount_table_clusters = table_clusters;
    header.l1.offset = geometry.offset_of(total - l1_clusters);
    file.set_length(geometry.offset_of(total))?;
    let blocks: Vec<u64> = (0..block_clusters)
        .map(|number| geometry.offset_of(1 + table_clusters + number))
        .collect();
    file.write_at(&from_words(&blocks), header.refcount_table_offset)?;
    let entries = geometry.refcount_block_entries();
    for (number, offset) in (0u64..).zip(&blocks) {
        let mut block = vec![0; to_usize(cluster_bytes)];
        for within in 0..total.saturating_sub(number * entries).min(entries) {
            set(&mut block, within, geometry.refcount_order, 1);
        }
        file.write_at(&block, *offset)?;
    }
    file.sync()?;
    file.write_at(&header.encode()?, 0)?;
    Ok(file.sync()?)
}
