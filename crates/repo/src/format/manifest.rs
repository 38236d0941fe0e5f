//! The manifest of a snapshot.
//!
//! A manifest is JSON, sealed like every small object. Unknown fields are ignored, so that later releases can add some;
//! a change that earlier releases must not ignore increments [`FORMAT_VERSION`].

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::format::map::{PageRef, Unit};
use crate::id::{PackId, SnapshotId};
use crate::store::{ObjectKind, ObjectName};

/// Version of the manifest's format that this program writes, and the latest that it reads.
///
/// Version 2 has the fields of version 1, and may refer to packs of version 2.
const FORMAT_VERSION: u32 = 2;

/// Longest manifest that is read.
pub(crate) const MANIFEST_BYTES_MAX: u64 = 16 << 20;

/// Maximum total bytes of a snapshot's disks: no file can be longer, and no sum of offsets overflows.
const DISKS_BYTES_MAX: u64 = i64::MAX.cast_unsigned();

/// A point in time of a machine, stored under the snapshot's id.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    format: u32,
    /// The snapshot.
    pub id: SnapshotId,
    /// The machine.
    pub machine: String,
    /// The point in time, in milliseconds since 1970-01-01 UTC.
    pub time_ms: i64,
    /// Its tags.
    #[serde(default)]
    pub tags: Vec<String>,
    /// The snapshot that it was compared with.
    #[serde(default)]
    pub parent: Option<SnapshotId>,
    /// The host that created it.
    #[serde(default)]
    pub host: String,
    /// The program that created it.
    #[serde(default)]
    pub program: String,
    /// The disks, in the order they were given.
    pub disks: Vec<DiskRecord>,
    /// Bytes of the packs that were written for its data, without maps, index and manifest.
    #[serde(default)]
    pub stored_bytes: u64,
    /// The pack with a copy of this manifest.
    pub(crate) copy: PackId,
    /// Additional notes of the program that created the snapshot.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
}

/// A disk of a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DiskRecord {
    /// Its name within the machine.
    pub name: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// How it was divided into chunks.
    pub content: DiskContent,
    pub(crate) root: Option<PageRef>,
    /// Statistics of the backup.
    pub statistics: DiskStatistics,
    /// Additional notes about the disk: its format, its path.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub notes: BTreeMap<String, String>,
}

/// How a disk was divided into chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DiskContent {
    /// At block boundaries: a disk image.
    Blocks,
    /// At any byte: a stream.
    Stream,
}

impl DiskContent {
    pub(crate) fn unit(self) -> Unit {
        match self {
            Self::Blocks => Unit::Block,
            Self::Stream => Unit::Byte,
        }
    }
}

/// Statistics of a disk's backup, in bytes of the disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatistics {
    /// Bytes read from the source.
    pub read_bytes: u64,
    /// Bytes that are zero, read or not.
    pub zero_bytes: u64,
    /// Bytes equal to the parent's at the same offset.
    pub unchanged_bytes: u64,
    /// Changed bytes that the repository already had, from another offset, time or machine.
    pub known_bytes: u64,
    /// Bytes that were new to the repository.
    pub new_bytes: u64,
}

impl std::ops::AddAssign for DiskStatistics {
    /// Saturates, since the figures in a manifest are not verified.
    fn add_assign(&mut self, other: Self) {
        self.read_bytes = self.read_bytes.saturating_add(other.read_bytes);
        self.zero_bytes = self.zero_bytes.saturating_add(other.zero_bytes);
        self.unchanged_bytes = self.unchanged_bytes.saturating_add(other.unchanged_bytes);
        self.known_bytes = self.known_bytes.saturating_add(other.known_bytes);
        self.new_bytes = self.new_bytes.saturating_add(other.new_bytes);
    }
}

/// The name of a snapshot's object.
pub(crate) fn snapshot_name(snapshot: SnapshotId) -> ObjectName {
    ObjectName::new(ObjectKind::Snapshot, &snapshot.to_string()).expect("hex digits are a name")
}

/// The content of a snapshot's object.
pub(crate) enum SnapshotObject {
    /// The snapshot.
    Committed(Box<Manifest>),
    /// A mark that its writer was considered dead before the commit: the snapshot will never exist.
    Revoked,
}

/// The content of a revoked snapshot's object.
const REVOKED: &[u8] = b"{\"revoked\":true}";

pub(crate) fn encode_revoked() -> &'static [u8] {
    REVOKED
}

impl DiskRecord {
    /// The record of a disk that is stored outside of a repository; the caller knows its location.
    pub fn external(name: String, size_bytes: u64, notes: BTreeMap<String, String>) -> Self {
        Self {
            name,
            size_bytes,
            content: DiskContent::Blocks,
            root: None,
            statistics: DiskStatistics::default(),
            notes,
        }
    }
}

impl Manifest {
    /// The manifest of a point in time that is not stored in a repository. All its disks are
    /// [external](DiskRecord::external).
    pub fn external(machine: String, time_ms: i64) -> Self {
        Self::new(
            SnapshotId::from_bytes([0; 16]),
            machine,
            time_ms,
            PackId::from_bytes([0; 16]),
        )
    }

    pub(crate) fn new(id: SnapshotId, machine: String, time_ms: i64, copy: PackId) -> Self {
        Self {
            format: FORMAT_VERSION,
            id,
            machine,
            time_ms,
            tags: Vec::new(),
            parent: None,
            host: String::new(),
            program: String::new(),
            disks: Vec::new(),
            stored_bytes: 0,
            copy,
            notes: BTreeMap::new(),
        }
    }

    /// The disk with this `name`; without a name, the only disk.
    pub fn disk(&self, name: Option<&str>) -> Result<&DiskRecord> {
        let found = match (name, &self.disks[..]) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(name), disks) => disks.iter().find(|disk| disk.name == name),
        };
        found.ok_or_else(|| Error::NoDisk {
            id: self.id,
            disk: name.unwrap_or_default().to_owned(),
            disks: self.disks.iter().map(|disk| disk.name.clone()).collect(),
        })
    }

    /// Total bytes of all disks.
    pub fn logical_bytes(&self) -> u64 {
        self.disks.iter().map(|disk| disk.size_bytes).sum()
    }

    /// Statistics of the backup of all disks.
    pub fn statistics(&self) -> DiskStatistics {
        let mut sum = DiskStatistics::default();
        self.disks.iter().for_each(|disk| sum += disk.statistics);
        sum
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("a manifest is made of strings and numbers")
    }
}

/// Decodes and checks the unsealed object of `snapshot`.
pub(crate) fn decode_snapshot(bytes: &[u8], snapshot: SnapshotId) -> Result<SnapshotObject> {
    #[derive(Deserialize)]
    struct ManifestVersion {
        format: u32,
    }
    let name = snapshot_name(snapshot);
    if bytes == REVOKED {
        return Ok(SnapshotObject::Revoked);
    }
    let damaged = |error: serde_json::Error| Error::damaged(&name, error.column() as u64, error.to_string());
    let version: ManifestVersion = serde_json::from_slice(bytes).map_err(damaged)?;
    if version.format > FORMAT_VERSION {
        return Err(Error::FutureVersion {
            object: name,
            found: version.format,
            supported: FORMAT_VERSION,
        });
    }
    let manifest: Manifest = serde_json::from_slice(bytes).map_err(damaged)?;
    if manifest.id != snapshot {
        return Err(Error::damaged(
            &name,
            0,
            format!("it is the manifest of snapshot {}", manifest.id),
        ));
    }
    let sizes = manifest.disks.iter().map(|disk| disk.size_bytes);
    let together = sizes.fold(0u64, u64::saturating_add);
    if together > DISKS_BYTES_MAX {
        return Err(Error::damaged(
            &name,
            0,
            format!("its disks have {together} bytes, more than any has"),
        ));
    }
    Ok(SnapshotObject::Committed(Box::new(manifest)))
}

#[cfg(test)]
mod tests {
    use super::{DISKS_BYTES_MAX, DiskContent, DiskRecord, DiskStatistics, Manifest, SnapshotObject, decode_snapshot};
    use crate::id::{PackId, SnapshotId};

    const ID: SnapshotId = SnapshotId::from_bytes([1; 16]);

    fn manifest(sizes: &[u64]) -> Manifest {
        let mut manifest = Manifest::new(ID, "m".to_owned(), 0, PackId::from_bytes([2; 16]));
        manifest.disks = sizes
            .iter()
            .map(|size_bytes| DiskRecord {
                name: "vda".to_owned(),
                size_bytes: *size_bytes,
                content: DiskContent::Blocks,
                root: None,
                statistics: DiskStatistics {
                    new_bytes: u64::MAX,
                    ..DiskStatistics::default()
                },
                notes: std::collections::BTreeMap::new(),
            })
            .collect();
        manifest
    }

    /// Unchecked sums of sizes and statistics would overflow: with a panic, or to a wrong size.
    #[test]
    fn sizes_that_no_disk_has_are_damage_and_figures_saturate() {
        let decode = |sizes: &[u64]| decode_snapshot(&manifest(sizes).encode(), ID);
        for sizes in [&[u64::MAX][..], &[u64::MAX, 1], &[DISKS_BYTES_MAX, 1]] {
            assert!(decode(sizes).is_err_and(|error| error.is_damage()), "{sizes:?}");
        }
        let Ok(SnapshotObject::Committed(largest)) = decode(&[DISKS_BYTES_MAX, 0]) else {
            unreachable!("the largest disk there is");
        };
        assert_eq!(largest.logical_bytes(), DISKS_BYTES_MAX);
        assert_eq!(largest.statistics().new_bytes, u64::MAX);
    }
}
