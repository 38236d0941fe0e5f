//! Checks whether a thin pool has space for another snapshot. A full pool stops every machine that has a disk in it,
//! and is hard to repair.

use super::super::{ProviderError, ProviderResult};
use super::report::{Volume, VolumeKind};

/// Limits on the used data and metadata of a pool, in hundredths of a percent. A snapshot itself uses almost no space
/// in either. Later overwrites of the volume do.
const DATA_MAX: u64 = 9500;
const METADATA_MAX: u64 = 9000;
/// Minimum of free bytes in the metadata area of a volume group. A snapshot takes about one KiB, and up to four KiB
/// with its record.
const DESCRIPTION_BYTES_MIN: u64 = 32 << 10;

/// The error for a volume that cannot have thin snapshots.
pub(super) fn not_thin(volume: &Volume) -> ProviderError {
    let reason = match volume.kind {
        VolumeKind::Pool => "it is a thin pool; name a volume in it".to_owned(),
        _ => format!(
            "it is a volume of LVM that is not in a thin pool ({}), so it cannot have lasting snapshots",
            volume.segment_type
        ),
    };
    ProviderError::Refused {
        action: "make a snapshot of",
        what: volume.full_name(),
        reason,
    }
}

/// Refuses another snapshot of a volume if its pool, or its group, lacks the space.
pub(super) fn check_space(volume: &Volume, pool: Option<&Volume>) -> ProviderResult<()> {
    if volume.kind != VolumeKind::Thin {
        return Err(not_thin(volume));
    }
    let refused = |reason: String| {
        Err(ProviderError::Refused {
            action: "make a snapshot of",
            what: volume.full_name(),
            reason,
        })
    };
    let group = &volume.group;
    if let Some(why) = volume.shared {
        return refused(format!("its volume group {group} is not used: {why}"));
    }
    if volume
        .description_free_bytes
        .is_some_and(|free| free < DESCRIPTION_BYTES_MIN)
    {
        return refused(format!(
            "the metadata of the volume group {group} has no space for another volume; remove some snapshots"
        ));
    }
    let Some(pool) = pool else {
        return refused(format!("its thin pool {group}/{} is not listed", volume.pool));
    };
    let name = pool.full_name();
    if !pool.health.is_empty() {
        return refused(format!(
            "its thin pool {name} has a problem: {}",
            pool.health.replace('_', " ")
        ));
    }
    let shares = [
        ("data", pool.data_basis_points, DATA_MAX, "lvextend -L +SIZE"),
        (
            "metadata",
            pool.metadata_basis_points,
            METADATA_MAX,
            "lvextend --poolmetadatasize +SIZE",
        ),
    ];
    for (what, share, max, remedy) in shares {
        if let Some(share) = share.filter(|share| *share > max) {
            return refused(format!(
                "{}.{:02} % of the {what} of its thin pool {name} are in use, and a pool that is full stops all that write to it; \
                 remove snapshots, or {remedy} {name}",
                share / 100,
                share % 100
            ));
        }
    }
    Ok(())
}
