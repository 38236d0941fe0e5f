//! Parses the output of `lvs --reportformat json`.

use std::collections::BTreeSet;

use serde::Deserialize;

use super::super::{ProviderError, ProviderResult};
use super::names::Tags;

/// The requested fields: numbers in bytes, times in seconds since 1970-01-01 UTC.
pub(super) const FIELDS: [&str; 9] = [
    "--reportformat",
    "json",
    "--units",
    "b",
    "--nosuffix",
    "--config",
    "report{time_format=\"%s\"}",
    "--options",
    "vg_name,lv_name,lv_uuid,segtype,lv_size,pool_lv,origin,lv_time,lv_tags,lv_permissions,lv_active,lv_skip_activation,\
     lv_path,data_percent,metadata_percent,lv_health_status,thin_id,chunk_size,vg_lock_type,vg_clustered,vg_exported,\
     vg_mda_free",
];

#[derive(Deserialize)]
struct LvReport {
    report: Vec<Section>,
}

#[derive(Deserialize)]
struct Section {
    #[serde(default)]
    lv: Vec<Row>,
}

/// A logical volume in the report. All values are strings, and empty if unknown.
#[derive(Deserialize)]
struct Row {
    vg_name: String,
    lv_name: String,
    lv_uuid: String,
    segtype: String,
    lv_size: String,
    pool_lv: String,
    origin: String,
    lv_time: String,
    lv_tags: String,
    lv_permissions: String,
    lv_active: String,
    lv_skip_activation: String,
    lv_path: String,
    data_percent: String,
    metadata_percent: String,
    lv_health_status: String,
    thin_id: String,
    chunk_size: String,
    vg_lock_type: String,
    vg_clustered: String,
    vg_exported: String,
    vg_mda_free: String,
}

/// The kind of a logical volume, as far as it matters for host snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VolumeKind {
    /// A volume in a thin pool.
    Thin,
    /// A thin pool.
    Pool,
    /// Any other volume.
    Other,
}

#[derive(Debug, Clone)]
pub(super) struct Volume {
    pub(super) group: String,
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) kind: VolumeKind,
    /// LVM's segment type.
    pub(super) segment_type: String,
    pub(super) size_bytes: u64,
    pub(super) pool: String,
    /// The origin of a thin snapshot; empty if the origin was removed.
    pub(super) origin: String,
    pub(super) time_s: i64,
    pub(super) tags: Tags,
    pub(super) is_read_only: bool,
    pub(super) is_active: bool,
    pub(super) skips_activation: bool,
    /// The device, if the volume is active.
    pub(super) path: String,
    /// The mapped part of a volume, or the used part of a pool, in hundredths of a percent; none if the volume is not
    /// active.
    pub(super) data_basis_points: Option<u64>,
    pub(super) metadata_basis_points: Option<u64>,
    /// LVM's description of a problem; empty if there is none.
    pub(super) health: String,
    pub(super) thin_id: Option<u64>,
    pub(super) chunk_bytes: Option<u64>,
    /// Why the volume group is not exclusive to this host; none if it is exclusive.
    pub(super) shared: Option<&'static str>,
    /// Free bytes in the metadata area of the volume group.
    pub(super) description_free_bytes: Option<u64>,
}

impl Volume {
    /// The full name, as an argument.
    pub(super) fn full_name(&self) -> String {
        format!("{}/{}", self.group, self.name)
    }

    /// Mapped bytes of a volume, or used bytes of a pool, with the precision of LVM's report: a ten-thousandth.
    pub(super) fn data_bytes(&self) -> Option<u64> {
        let parts = u128::from(self.size_bytes) * u128::from(self.data_basis_points?) / 10_000;
        u64::try_from(parts).ok()
    }
}

/// The volumes in an answer. A volume with several segments is listed several times, but thin volumes and pools have
/// only one segment.
pub(super) fn parse(answer: &str) -> ProviderResult<Vec<Volume>> {
    let invalid = |detail: String| ProviderError::Invalid { program: LVS, detail };
    let answer: LvReport = serde_json::from_str(answer).map_err(|error| invalid(error.to_string()))?;
    let rows = answer.report.into_iter().flat_map(|section| section.lv);
    let volumes: Vec<Volume> = rows
        .map(|row| volume(row).map_err(invalid))
        .collect::<ProviderResult<_>>()?;
    let mut seen = BTreeSet::new();
    for volume in volumes.iter().filter(|volume| volume.kind != VolumeKind::Other) {
        if !seen.insert((&volume.group, &volume.name)) {
            return Err(invalid(format!("{} is listed twice", volume.full_name())));
        }
    }
    Ok(volumes)
}

fn volume(row: Row) -> Result<Volume, String> {
    let number = |text: &str| text.parse::<u64>().ok();
    let full = format!("{}/{}", row.vg_name, row.lv_name);
    let size_bytes = number(&row.lv_size).ok_or_else(|| format!("{full} has no size"))?;
    let time_s = row
        .lv_time
        .parse()
        .map_err(|_| format!("{full} has no valid creation time"))?;
    let shared = if !row.vg_lock_type.is_empty() && row.vg_lock_type != "none" {
        Some("several hosts share it (lvmlockd)")
    } else if !row.vg_clustered.is_empty() {
        Some("it belongs to a cluster")
    } else if !row.vg_exported.is_empty() {
        Some("it is exported")
    } else {
        None
    };
    Ok(Volume {
        kind: match &row.segtype[..] {
            "thin" => VolumeKind::Thin,
            "thin-pool" => VolumeKind::Pool,
            _ => VolumeKind::Other,
        },
        tags: Tags::parse(&row.lv_tags),
        is_read_only: row.lv_permissions == "read-only",
        is_active: row.lv_active == "active",
        skips_activation: !row.lv_skip_activation.is_empty(),
        data_basis_points: basis_points(&row.data_percent),
        metadata_basis_points: basis_points(&row.metadata_percent),
        thin_id: number(&row.thin_id),
        chunk_bytes: number(&row.chunk_size).filter(|bytes| *bytes > 0),
        description_free_bytes: number(&row.vg_mda_free),
        group: row.vg_name,
        name: row.lv_name,
        uuid: row.lv_uuid,
        segment_type: row.segtype,
        size_bytes,
        pool: row.pool_lv,
        origin: row.origin,
        time_s,
        path: row.lv_path,
        health: row.lv_health_status,
        shared,
    })
}

/// Parses `11.72` to hundredths of a percent; none for values above 100 percent.
fn basis_points(text: &str) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let part = format!("{part:0<2}");
    let part: u64 = part.get(..2)?.parse().ok()?;
    let points = whole.parse::<u64>().ok()?.checked_mul(100)?.checked_add(part)?;
    (points <= 10_000).then_some(points)
}

pub(crate) const LVS: &str = "lvs";

#[cfg(test)]
mod tests {
    use super::basis_points;

    #[test]
    fn percentages_are_parsed_to_the_hundredth() {
        assert_eq!(basis_points("11.72"), Some(1172));
        assert_eq!(basis_points("0.00"), Some(0));
        assert_eq!(basis_points("100.00"), Some(10_000));
        assert_eq!(basis_points("7"), Some(700));
        for other in ["", "-1", "100.01", "a.b", "18446744073709551615.00"] {
            assert_eq!(basis_points(other), None, "{other}");
        }
    }
}
