//! Machines of a pool, their disks, and their snapshots.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::record::{Reference, XapiRecord};
use super::task::reference_in;
use super::{Pool, XapiError, XapiResult};
use crate::hypervisor::machine::{
    BackupMark, Description, DiskKind, DiskSource, MachineDisk, MachineState, MachineSummary,
};

/// Number of retries, and their interval, for the removal of a disk that is in use.
const BUSY_COUNT: u32 = 4;
const BUSY_PAUSE: Duration = Duration::from_millis(500);
/// Limit on the bytes of the records of one machine.
const METADATA_BYTES_MAX: u64 = 64 << 20;

/// A machine of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XenMachine {
    /// The pool's reference to the machine, which is valid while the pool is running.
    pub reference: Reference,
    /// Name, UUID and state.
    pub summary: MachineSummary,
    /// The disks, by position.
    pub disks: Vec<VirtualDisk>,
    /// The tags.
    pub tags: Vec<String>,
}

impl XenMachine {
    /// The description for a backup.
    pub fn describe(&self) -> Description {
        let disk = |disk: &VirtualDisk| MachineDisk {
            target: disk.device.clone(),
            kind: DiskKind::Disk,
            source: DiskSource::Other(format!("{} ({})", disk.label, disk.uuid)),
            format: None,
            is_read_only: disk.is_read_only,
            is_shared: disk.is_shared,
            alias: None,
        };
        Description {
            summary: self.summary.clone(),
            disks: self.disks.iter().map(disk).collect(),
            nvram: None,
            tpm: None,
            has_agent_channel: false,
            mark: BackupMark {
                tags: self.tags.clone(),
                ..BackupMark::default()
            },
        }
    }
}

/// A disk of a machine, or of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtualDisk {
    /// The virtual disk image.
    pub reference: Reference,
    /// The UUID.
    pub uuid: String,
    /// The device name in the machine: `xvda`.
    pub device: String,
    /// The position among the disks of the machine.
    pub position: u32,
    /// The name that the user has given to the disk.
    pub label: String,
    /// The size in bytes.
    pub size_bytes: u64,
    /// Whether changed blocks are tracked.
    pub tracking: Tracking,
    /// The disk of which this is a snapshot.
    pub snapshot_of: Reference,
    /// Whether the machine cannot write the disk.
    pub is_read_only: bool,
    /// Whether other machines may write the disk at the same time.
    pub is_shared: bool,
}

/// Whether changed blocks of a disk are tracked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tracking {
    /// Changes are tracked.
    On,
    /// Changes are not tracked, but could be.
    Off,
    /// The storage repository does not support tracking.
    Impossible,
}

/// A snapshot of a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XenSnapshot {
    /// The snapshot.
    pub reference: Reference,
    /// The UUID.
    pub uuid: String,
    /// The name.
    pub label: String,
    /// The disks.
    pub disks: Vec<VirtualDisk>,
    /// The memory, if it was saved.
    pub memory: Option<VirtualDisk>,
}

/// The related records of a pool.
pub(super) struct Inventory {
    vbds: HashMap<Reference, XapiRecord>,
    vdis: HashMap<Reference, XapiRecord>,
}

fn by_reference(records: Vec<XapiRecord>) -> HashMap<Reference, XapiRecord> {
    records
        .into_iter()
        .map(|record| (record.reference.clone(), record))
        .collect()
}

impl Inventory {
    pub(super) fn read(pool: &Pool) -> XapiResult<Self> {
        Ok(Self {
            vbds: by_reference(pool.records("VBD")?),
            vdis: by_reference(pool.records("VDI")?),
        })
    }

    fn machine(&self, record: &XapiRecord) -> XapiResult<XenMachine> {
        Ok(XenMachine {
            reference: record.reference.clone(),
            summary: MachineSummary {
                name: record.text("name_label").to_owned(),
                uuid: record.text("uuid").to_owned(),
                state: match record.text("power_state") {
                    "Running" => MachineState::Running,
                    "Paused" => MachineState::Paused,
                    "Halted" => MachineState::ShutOff,
                    _ => MachineState::Between,
                },
            },
            disks: self.disks(record)?,
            tags: record.texts("tags"),
        })
    }

    fn disks(&self, record: &XapiRecord) -> XapiResult<Vec<VirtualDisk>> {
        let mut disks = Vec::new();
        for vbd in record.references("VBDs") {
            let Some(vbd) = self.vbds.get(&vbd) else { continue };
            let Some(vdi) = self.vdis.get(&vbd.reference("VDI")) else {
                continue;
            };
            if vbd.text("type") != "Disk" || vbd.is("empty") {
                continue;
            }
            disks.push(Self::disk(vdi, vbd)?);
        }
        disks.sort_by_key(|disk| disk.position);
        Ok(disks)
    }

    fn disk(vdi: &XapiRecord, vbd: &XapiRecord) -> XapiResult<VirtualDisk> {
        Ok(VirtualDisk {
            reference: vdi.reference.clone(),
            uuid: vdi.text("uuid").to_owned(),
            device: device_name(vbd),
            position: position_of(vbd),
            label: vdi.text("name_label").to_owned(),
            size_bytes: vdi.number("virtual_size")?,
            tracking: if vdi.is("cbt_enabled") {
                Tracking::On
            } else if vdi
                .texts("allowed_operations")
                .iter()
                .any(|operation| operation == "enable_cbt")
            {
                Tracking::Off
            } else {
                Tracking::Impossible
            },
            snapshot_of: vdi.reference("snapshot_of"),
            is_read_only: vbd.text("mode") == "RO" || vdi.is("read_only"),
            is_shared: vdi.is("sharable"),
        })
    }
}

fn position_of(vbd: &XapiRecord) -> u32 {
    vbd.text("userdevice").parse().unwrap_or(u32::MAX)
}

/// The device name of a disk. If the machine is not running, it is derived from the position.
fn device_name(vbd: &XapiRecord) -> String {
    let device = vbd.text("device");
    if !device.is_empty() {
        return device.to_owned();
    }
    match vbd.text("userdevice").parse::<u8>() {
        Ok(place @ 0..26) => format!("xvd{}", char::from(b'a' + place)),
        _ => format!("xvd{}", vbd.text("userdevice")),
    }
}

/// Whether a record is a machine of a user: not a template, a snapshot or a control domain.
fn is_machine(record: &XapiRecord) -> bool {
    !record.is("is_a_template") && !record.is("is_a_snapshot") && !record.is("is_control_domain")
}

impl Pool {
    /// All machines, by name.
    pub fn machines(&self) -> XapiResult<Vec<XenMachine>> {
        let inventory = Inventory::read(self)?;
        let records = self.records("VM")?;
        let mut machines = records
            .iter()
            .filter(|record| is_machine(record))
            .map(|record| inventory.machine(record))
            .collect::<XapiResult<Vec<_>>>()?;
        machines.sort_by(|one, other| {
            (&one.summary.name, &one.summary.uuid).cmp(&(&other.summary.name, &other.summary.uuid))
        });
        Ok(machines)
    }

    /// Finds a machine by name or UUID.
    pub fn machine(&self, name: &str) -> XapiResult<XenMachine> {
        let records = self.records_named("VM", name)?;
        let found: Vec<&XapiRecord> = records.iter().filter(|record| is_machine(record)).collect();
        match found[..] {
            [] => Err(XapiError::NoMachine {
                pool: self.title(),
                name: name.to_owned(),
            }),
            [record] => Inventory::read(self)?.machine(record),
            _ => Err(XapiError::SeveralMachines {
                pool: self.title(),
                name: name.to_owned(),
                uuids: found.iter().map(|record| record.text("uuid").to_owned()).collect(),
            }),
        }
    }

    /// Takes a snapshot of the disks.
    pub fn take_snapshot(self: &Arc<Self>, machine: &XenMachine, label: &str) -> XapiResult<XenSnapshot> {
        self.snapshot_by("VM.snapshot", machine, label)
    }

    /// Takes a snapshot of the disks and the memory.
    pub fn take_checkpoint(self: &Arc<Self>, machine: &XenMachine, label: &str) -> XapiResult<XenSnapshot> {
        self.snapshot_by("VM.checkpoint", machine, label)
    }

    fn snapshot_by(
        self: &Arc<Self>,
        method: &'static str,
        machine: &XenMachine,
        label: &str,
    ) -> XapiResult<XenSnapshot> {
        let result = self.run(method, &[json!(machine.reference.0), json!(label)], &mut |_| ())?;
        let reference =
            reference_in(&result).ok_or_else(|| self.invalid_answer(method, "its result has no snapshot"))?;
        self.snapshot(&reference)
    }

    /// Reads a snapshot.
    fn snapshot(&self, reference: &Reference) -> XapiResult<XenSnapshot> {
        let record = self.record("VM", reference)?;
        let inventory = Inventory::read(self)?;
        inventory.snapshot(&record)
    }

    /// The snapshots of a machine whose names have this prefix.
    pub fn snapshots_labelled(&self, machine: &XenMachine, prefix: &str) -> XapiResult<Vec<XenSnapshot>> {
        let record = self.record("VM", &machine.reference)?;
        let inventory = Inventory::read(self)?;
        let mut found = Vec::new();
        for reference in record.references("snapshots") {
            let record = match self.record("VM", &reference) {
                // The snapshot was removed in the meantime.
                Err(error) if error.is_refusal("HANDLE_INVALID") => continue,
                other => other?,
            };
            // A machine that was created from a snapshot may have the snapshot's name.
            if record.is("is_a_snapshot") && record.text("name_label").starts_with(prefix) {
                found.push(inventory.snapshot(&record)?);
            }
        }
        Ok(found)
    }

    /// Removes a snapshot, its memory, and its disks except those in `kept`. The disks are removed first: as long as
    /// one exists, the snapshot refers to it, and it can be found.
    ///
    /// # Errors
    /// A disk cannot be removed. The removal of the other disks was tried, and the snapshot is kept.
    pub fn remove_snapshot(self: &Arc<Self>, snapshot: &XenSnapshot, kept: &[Reference]) -> XapiResult<()> {
        // A disk that is not a snapshot belongs to a user, whatever refers to it. The same is true for snapshot disks
        // that a user attached to a machine, and for memory that a machine uses.
        let used = self.disks_in_use()?;
        let is_removable = |disk: &&VirtualDisk| !disk.snapshot_of.is_null() && !used.contains(&disk.reference);
        let of_disks = snapshot.disks.iter().filter(is_removable);
        let memory = match &snapshot.memory {
            Some(memory) if !self.is_memory_of_another(&memory.reference, snapshot)? => Some(memory),
            _ => None,
        };
        let disks = of_disks.chain(memory);
        let mut first = Ok(());
        for disk in disks.filter(|disk| !kept.contains(&disk.reference)) {
            first = first.and(self.remove_disk_when_free(&disk.reference));
        }
        first?;
        gone(self.run("VM.destroy", &[json!(snapshot.reference.0)], &mut |_| ()))
    }

    fn is_memory_of_another(&self, memory: &Reference, snapshot: &XenSnapshot) -> XapiResult<bool> {
        let others = self.records("VM")?.into_iter();
        let mut others = others.filter(|record| record.reference != snapshot.reference);
        Ok(others.any(|record| record.reference("suspend_VDI") == *memory))
    }

    /// Removes a disk that may still be in use for a moment: the host that served it needs some time after the last
    /// reader has disconnected.
    fn remove_disk_when_free(self: &Arc<Self>, disk: &Reference) -> XapiResult<()> {
        for _ in 0..BUSY_COUNT {
            match self.remove_disk(disk) {
                Err(error) if error.is_refusal("VDI_IN_USE") || error.is_refusal("OTHER_OPERATION_IN_PROGRESS") => {
                    self.retry_context.clock.sleep(BUSY_PAUSE);
                }
                other => return other,
            }
        }
        self.remove_disk(disk)
    }

    /// Removes a disk.
    pub fn remove_disk(self: &Arc<Self>, disk: &Reference) -> XapiResult<()> {
        gone(self.run("VDI.destroy", &[json!(disk.0)], &mut |_| ()))
    }

    /// Enables changed-block tracking of a disk.
    pub fn track_changes(self: &Arc<Self>, disk: &Reference) -> XapiResult<()> {
        self.run("VDI.enable_cbt", &[json!(disk.0)], &mut |_| ()).map(drop)
    }

    /// Deletes the data of a snapshot disk. Its tracking metadata is kept.
    pub fn remove_data(self: &Arc<Self>, disk: &Reference) -> XapiResult<()> {
        self.run("VDI.data_destroy", &[json!(disk.0)], &mut |_| ()).map(drop)
    }

    /// Finds a disk by UUID.
    pub fn disk_of_uuid(&self, uuid: &str) -> XapiResult<Option<XapiRecord>> {
        match self.call_for_reference("VDI.get_by_uuid", &[json!(uuid)]) {
            Ok(reference) => self.record("VDI", &reference).map(Some),
            Err(error) if error.is_refusal("UUID_INVALID") || error.is_refusal("HANDLE_INVALID") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Finds a storage repository by name or UUID; without a name, the pool's default.
    pub fn storage(&self, name: Option<&str>) -> XapiResult<XapiRecord> {
        let mut storages = self.records("SR")?;
        let pools = if name.is_none() {
            self.records("pool")?
        } else {
            Vec::new()
        };
        let default = pools.first().map(|pool| pool.reference("default_SR"));
        let is_wanted = |record: &XapiRecord| match name {
            Some(name) => record.text("name_label") == name || record.text("uuid") == name,
            None => default.as_ref() == Some(&record.reference),
        };
        match storages.iter().position(is_wanted) {
            Some(place) => Ok(storages.swap_remove(place)),
            None => Err(XapiError::NoStorage {
                pool: self.title(),
                name: name.unwrap_or_default().to_owned(),
                present: storages
                    .iter()
                    .filter(|record| record.text("content_type") != "iso")
                    .map(|record| record.text("name_label").to_owned())
                    .collect(),
            }),
        }
    }

    /// The records of a machine or snapshot, as an archive without disks.
    pub fn metadata(self: &Arc<Self>, machine: &Reference) -> XapiResult<Vec<u8>> {
        self.retry_context
            .retry(|| self.download_metadata(machine)?.read_to_end(METADATA_BYTES_MAX))
    }
}

impl Inventory {
    pub(super) fn snapshot(&self, record: &XapiRecord) -> XapiResult<XenSnapshot> {
        let memory = self.vdis.get(&record.reference("suspend_VDI"));
        let memory = memory.map(|vdi| Self::disk(vdi, &XapiRecord::new("VBD", Reference(String::new()), json!({}))));
        Ok(XenSnapshot {
            reference: record.reference.clone(),
            uuid: record.text("uuid").to_owned(),
            label: record.text("name_label").to_owned(),
            disks: self.disks(record)?,
            memory: memory.transpose()?,
        })
    }
}

/// Treats "does not exist any more" as success.
fn gone(result: XapiResult<String>) -> XapiResult<()> {
    match result {
        Err(error) if error.is_refusal("HANDLE_INVALID") => Ok(()),
        other => other.map(drop),
    }
}
