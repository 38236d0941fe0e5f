//! Describes an image without its data.

use super::features::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA_FILE, COMPATIBLE_LAZY_REFCOUNTS, EXTENSION_BACKING_FORMAT,
    EXTENSION_DATA_FILE, INCOMPATIBLE_COMPRESSION, INCOMPATIBLE_CORRUPT, INCOMPATIBLE_DATA_FILE, INCOMPATIBLE_DIRTY,
    INCOMPATIBLE_EXTENDED_L2,
};
use super::header::Qcow2Header;
use super::{bitmap, snapshot};
use crate::Result;
use crate::file::ImageFile;
use crate::model::qcow2_info::{Feature, Qcow2Info};

const INCOMPATIBLE: [(u64, Feature); 5] = [
    (INCOMPATIBLE_DIRTY, Feature::Dirty),
    (INCOMPATIBLE_CORRUPT, Feature::Corrupt),
    (INCOMPATIBLE_DATA_FILE, Feature::ExternalDataFile),
    (INCOMPATIBLE_COMPRESSION, Feature::CompressionType),
    (INCOMPATIBLE_EXTENDED_L2, Feature::ExtendedL2),
];
const COMPATIBLE: [(u64, Feature); 1] = [(COMPATIBLE_LAZY_REFCOUNTS, Feature::LazyRefcounts)];
const AUTOCLEAR: [(u64, Feature); 2] = [
    (AUTOCLEAR_BITMAPS, Feature::Bitmaps),
    (AUTOCLEAR_RAW_DATA_FILE, Feature::RawDataFile),
];

pub(crate) fn describe(file: &dyn ImageFile, header: &Qcow2Header, image: &str) -> Result<Qcow2Info> {
    let (snapshots, _) = snapshot::load(file, header, image)?;
    let bitmaps = bitmap::load(file, header, image)?;
    Ok(Qcow2Info {
        version: header.version,
        cluster_bytes: header.geometry.cluster_bytes(),
        refcount_bits: 1 << header.geometry.refcount_order,
        compression: header.compression,
        features: features_of(header),
        backing_file: header.backing_name.clone(),
        backing_format: header.extension_text(EXTENSION_BACKING_FORMAT, image)?,
        data_file: header.extension_text(EXTENSION_DATA_FILE, image)?,
        snapshots,
        bitmaps,
    })
}

fn features_of(header: &Qcow2Header) -> Vec<Feature> {
    let set = |word: u64, table: &'static [(u64, Feature)]| {
        table
            .iter()
            .filter(move |(bit, _)| word & bit != 0)
            .map(|(_, feature)| *feature)
    };
    set(header.incompatible, &INCOMPATIBLE)
        .chain(set(header.compatible, &COMPATIBLE))
        .chain(set(header.autoclear, &AUTOCLEAR))
        .collect()
}
