//! Objects that backups leave in a pool: base disks for the next backups, and snapshots of killed runs.
//!
//! A base disk is marked in its `other_config`, which XAPI copies to every clone, copy and snapshot of the disk
//! (`xapi_vdi.ml`). So the mark also contains the disk's own UUID. A disk with the mark of another disk belongs to a
//! user and is not changed.

use std::collections::{HashMap, HashSet};

use serde_json::json;

use super::machine::Inventory;
use super::record::{Reference, XapiRecord};
use super::{Pool, XapiResult, XenSnapshot};

/// The key of `other_config` with the purpose of a base disk.
const KEPT: &str = "holdfast-base";
/// The key with the disk's own UUID. Base disks of older versions lack it.
const KEPT_SELF: &str = "holdfast-base-of";

/// A snapshot of a machine, in a list of all snapshots of the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedSnapshot {
    /// The snapshot.
    pub snapshot: XenSnapshot,
    /// The machine; the null reference if the machine was removed.
    pub machine: Reference,
    /// The time of the snapshot in the pool's format: `20260102T03:04:05Z`.
    pub time: String,
}

/// A disk that a pool keeps as the base of the next incremental backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseDisk {
    /// The virtual disk image.
    pub reference: Reference,
    /// The UUID.
    pub uuid: String,
    /// The purpose for which the disk is kept.
    pub purpose: String,
    /// Bytes that the disk uses in its storage repository, if the repository reports them.
    pub used_bytes: u64,
}

impl BaseDisk {
    fn new(record: &XapiRecord, all: &PoolRecords<'_>) -> Option<Self> {
        let is_removable = || record.is("is_a_snapshot") && all.has_own_mark(record) && !all.is_used(&record.reference);
        Some(Self {
            purpose: record.entry("other_config", KEPT)?.to_owned(),
            reference: record.reference.clone(),
            uuid: record.text("uuid").to_owned(),
            // Some storage repositories report -1 for unknown.
            used_bytes: record.number("physical_utilisation").unwrap_or_default(),
        })
        .filter(|_| is_removable())
    }
}

/// Whether a snapshot has the name pattern of backups: `holdfast HOST PLACE RUN`, with eight digits for the run. A
/// user's snapshot may have the same prefix.
fn is_name_of_run(name: &str) -> bool {
    let words: Vec<&str> = name.split(' ').collect();
    let is_digits = |word: &str| word.len() == 8 && word.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    matches!(words[..], ["holdfast", _, _, run] if is_digits(run))
}

/// The records that decide whether a marked disk is in use.
struct PoolRecords<'a> {
    disks: HashMap<&'a Reference, &'a XapiRecord>,
    used: HashSet<Reference>,
}

impl PoolRecords<'_> {
    /// Whether a marked disk is the disk that was marked, and not a clone or copy of it.
    fn has_own_mark(&self, record: &XapiRecord) -> bool {
        if let Some(uuid) = record.entry("other_config", KEPT_SELF) {
            return uuid == record.text("uuid");
        }
        // The active disk of a machine is never marked by Holdfast. A user's copy of a base disk has the mark, and so
        // has a snapshot of that copy.
        let origin = self.disks.get(&record.reference("snapshot_of"));
        let purpose = |record: &XapiRecord| record.entry("other_config", KEPT).map(str::to_owned);
        // If the origin was removed, this cannot be determined.
        origin.is_some_and(|origin| purpose(origin) != purpose(record))
    }

    fn is_used(&self, disk: &Reference) -> bool {
        self.used.contains(disk)
    }
}

impl Pool {
    /// The snapshots of all machines whose names have this prefix.
    pub fn all_snapshots_labelled(&self, prefix: &str) -> XapiResult<Vec<ListedSnapshot>> {
        let records = self.records("VM")?;
        let is_one = |record: &&XapiRecord| record.is("is_a_snapshot") && record.text("name_label").starts_with(prefix);
        let records: Vec<&XapiRecord> = records.iter().filter(is_one).collect();
        if records.is_empty() {
            return Ok(Vec::new());
        }
        let inventory = Inventory::read(self)?;
        let listed = |record: &XapiRecord| {
            Ok(ListedSnapshot {
                snapshot: inventory.snapshot(record)?,
                machine: record.reference("snapshot_of"),
                time: record.text("snapshot_time").to_owned(),
            })
        };
        records.into_iter().map(listed).collect()
    }

    /// Marks a disk as a base disk, with its purpose.
    pub fn mark_base(&self, disk: &Reference, purpose: &str) -> XapiResult<()> {
        let uuid = self.record("VDI", disk)?.text("uuid").to_owned();
        for key in [KEPT, KEPT_SELF] {
            // An existing key cannot be added again.
            drop(self.call("VDI.remove_from_other_config", &[json!(disk.0), json!(key)]));
        }
        // The disk's own UUID is set first: a mark without it is treated as the mark of an older version.
        for (key, value) in [(KEPT_SELF, uuid.as_str()), (KEPT, purpose)] {
            self.call("VDI.add_to_other_config", &[json!(disk.0), json!(key), json!(value)])?;
        }
        Ok(())
    }

    /// All base disks that are not used for another purpose.
    pub fn base_disks(&self) -> XapiResult<Vec<BaseDisk>> {
        let records = self.records("VDI")?;
        if !records
            .iter()
            .any(|record| record.entry("other_config", KEPT).is_some())
        {
            return Ok(Vec::new());
        }
        let all = PoolRecords {
            disks: records.iter().map(|record| (&record.reference, record)).collect(),
            used: self.disks_in_use()?,
        };
        Ok(records
            .iter()
            .filter_map(|record| BaseDisk::new(record, &all))
            .collect())
    }

    /// The disks of machines, and of snapshots that Holdfast did not create, running or not. The control domains of
    /// hosts (`is_control_domain`) have disks that they serve to readers, and do not count.
    pub(super) fn disks_in_use(&self) -> XapiResult<HashSet<Reference>> {
        let is_snapshot_of_run =
            |record: &XapiRecord| record.is("is_a_snapshot") && is_name_of_run(record.text("name_label"));
        let machines = self.records("VM")?;
        let others = machines
            .iter()
            .filter(|record| !record.is("is_control_domain") && !is_snapshot_of_run(record));
        let others: HashSet<Reference> = others.map(|record| record.reference.clone()).collect();
        let attached = self.records("VBD")?;
        let attached = attached
            .iter()
            .filter(|record| others.contains(&record.reference("VM")));
        Ok(attached.map(|record| record.reference("VDI")).collect())
    }
}
