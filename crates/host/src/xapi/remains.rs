//! What backups leave in a pool: disks that it keeps for the next ones, and snapshots of those that were killed.

use serde_json::json;

use super::machine::Inventory;
use super::record::{Record, Reference};
use super::{Pool, XapiResult, XenSnapshot};

/// Under which key a disk that is kept says what for.
const KEPT: &str = "holdfast-base";

/// A snapshot of a machine, as it stands among all of the pool's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedSnapshot {
    /// The snapshot.
    pub snapshot: XenSnapshot,
    /// The machine that it is of; to nothing, where that is gone.
    pub machine: Reference,
    /// When it was taken, as the pool writes times: `20260102T03:04:05Z`.
    pub time: String,
}

/// A disk that a pool keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptDisk {
    /// The virtual disk image.
    pub reference: Reference,
    /// Its UUID.
    pub uuid: String,
    /// What it is kept for.
    pub purpose: String,
    /// Bytes that it takes in its storage repository, as far as that tells.
    pub used_bytes: u64,
}

impl KeptDisk {
    fn new(record: &Record) -> Option<Self> {
        Some(Self {
            purpose: record.entry("other_config", KEPT)?.to_owned(),
            reference: record.reference.clone(),
            uuid: record.text("uuid").to_owned(),
            // Some storages say -1, which is that they do not know.
            used_bytes: record.number("physical_utilisation").unwrap_or_default(),
        })
    }
}

impl Pool {
    /// The snapshots of all machines whose names begin so.
    pub fn all_snapshots_labelled(&self, prefix: &str) -> XapiResult<Vec<ListedSnapshot>> {
        let records = self.records("VM")?;
        let is_one = |record: &&Record| record.is("is_a_snapshot") && record.text("name_label").starts_with(prefix);
        let records: Vec<&Record> = records.iter().filter(is_one).collect();
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let inventory = Inventory::read(self)?;
        let listed = |record: &Record| {
            Ok(ListedSnapshot {
                snapshot: inventory.snapshot(record)?,
                machine: record.reference("snapshot_of"),
                time: record.text("snapshot_time").to_owned(),
            })
        };
        records.into_iter().map(listed).collect()
    }

    /// Notes that a disk is kept, and for what.
    pub fn mark_kept(&self, disk: &Reference, purpose: &str) -> XapiResult<()> {
        // A key that is there already cannot be added.
        drop(self.call("VDI.remove_from_other_config", &[json!(disk.0), json!(KEPT)]));
        self.call("VDI.add_to_other_config", &[json!(disk.0), json!(KEPT), json!(purpose)])
            .map(drop)
    }

    /// The disks that are kept for anything.
    pub fn kept(&self) -> XapiResult<Vec<KeptDisk>> {
        let records = self.records("VDI")?;
        Ok(records.iter().filter_map(KeptDisk::new).collect())
    }
}
