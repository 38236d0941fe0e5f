//! A machine of a pool that resumes where it was: its memory, and the pool's records of that point in time.

use std::sync::Arc;

use holdfast_archive::XvaDisk;
use holdfast_block::BlockDevice;
use holdfast_hardware::xen::{self, SuspendedMachine};
use holdfast_repo::{DiskRecord, Manifest, Repository};

use crate::job::Result;
use crate::job::error::ExchangeError;
use crate::notes::{
    NOTE_XEN_SUSPENDED_DISK, STREAM_XEN_MEMORY, STREAM_XEN_RECORDS, STREAM_XEN_SUSPENDED_RECORDS, is_memory, note,
};
use crate::restore::small_stream::bytes_of;

/// The memory and records from which a machine resumes.
pub(super) struct Suspended {
    /// The records of the pool, without the identity of the original machine.
    records: String,
    machine: SuspendedMachine,
    memory: Arc<dyn BlockDevice>,
    /// For each disk, its id in the records and its name in the snapshot.
    disks: Vec<(String, String)>,
}

impl Suspended {
    /// Reads memory and records; the machine gets the name `name`, if given.
    ///
    /// # Errors
    /// The snapshot lacks something that the machine needs to resume, or a needed part is excluded.
    pub(super) fn read(
        repository: &Repository,
        snapshot: &Manifest,
        name: Option<&str>,
        left_out: &[String],
    ) -> Result<Self> {
        let record = |name: &str| snapshot.disks.iter().find(|record| record.name == name);
        let memory = record(STREAM_XEN_MEMORY).ok_or_else(|| ExchangeError::NoMemory {
            snapshot: snapshot.id.to_string(),
            is_of_qemu: snapshot.disks.iter().any(is_memory),
        })?;
        let Some((suspended, original)) = record(STREAM_XEN_SUSPENDED_RECORDS).zip(record(STREAM_XEN_RECORDS)) else {
            return Err(ExchangeError::NoSuspendedRecords {
                snapshot: snapshot.id.to_string(),
            }
            .into());
        };
        let text = |record| bytes_of(repository, record).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        let records = xen::suspended_machine(&text(suspended)?, &text(original)?, name)?;
        let machine = SuspendedMachine::read(&records)?;
        check_size(machine.memory.size_bytes, memory)?;
        let mut disks = Vec::new();
        for disk in &machine.disks {
            let is_it = |record: &&DiskRecord| note(&record.notes, NOTE_XEN_SUSPENDED_DISK) == Some(&disk.uuid);
            let known = snapshot.disks.iter().find(is_it);
            let Some(record) = known.filter(|record| !left_out.contains(&record.name)) else {
                return Err(ExchangeError::DiskOfMemory {
                    disk: known.map_or_else(
                        || format!("{} ({})", disk.device, disk.label),
                        |record| record.name.clone(),
                    ),
                    is_left_out: known.is_some(),
                }
                .into());
            };
            check_size(disk.disk.size_bytes, record)?;
            disks.push((disk.disk.id.clone(), record.name.clone()));
        }
        Ok(Self {
            records,
            memory: Arc::new(repository.device_checking_prints(memory)),
            machine,
            disks,
        })
    }

    /// The XML text at the start of the archive.
    pub(super) fn records(&self) -> &str {
        &self.records
    }

    /// Name and requirements of the machine.
    pub(super) fn machine(&self) -> &SuspendedMachine {
        &self.machine
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        self.machine.memory.size_bytes
    }

    /// The disk with its memory.
    pub(super) fn memory(&self) -> XvaDisk<'static> {
        XvaDisk {
            id: self.machine.memory.id.clone(),
            device: Arc::clone(&self.memory),
        }
    }

    /// For each disk, its id in the records and its name in the snapshot.
    pub(super) fn disks(&self) -> &[(String, String)] {
        &self.disks
    }
}

/// Refuses a disk whose size differs from the records: it would be read beyond its end, or not completely.
fn check_size(said_bytes: u64, record: &DiskRecord) -> Result<()> {
    if said_bytes == record.size_bytes {
        return Ok(());
    }
    Err(ExchangeError::SizeOfMemory {
        name: record.name.clone(),
        said_bytes,
        size_bytes: record.size_bytes,
    }
    .into())
}
