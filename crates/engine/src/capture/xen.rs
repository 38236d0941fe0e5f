//! `backup` of a machine of XenServer or XCP-ng: one instant of all its disks, by a snapshot that its pool takes.
//!
//! 1. The pool says what the machine is; what is left out is said, with the reason. Snapshots that a killed backup has left are removed.
//! 2. The pool takes a snapshot. From here on it is removed whatever happens ([`instant`]).
//! 3. For each disk: what changed since the snapshot before is known from changed-block tracking, or from a disk that the pool has kept since ([`way`]).
//! 4. The disks are read by NBD, or come as streams ([`streams`]), and are stored as those of any other machine.
//! 5. Only then is what this run compared with let go, and what the next one compares with marked.

mod instant;
mod memory;
mod namesake;
mod since;
mod streams;
mod transfer_mode;
mod way;

use std::collections::BTreeMap;
use std::io::{Cursor, Read};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use holdfast_archive::{ArchiveReader as _, XvaReader};
use holdfast_block::BlockDevice;
use holdfast_hardware::{DiskKind, Dropped, Machine, Place, Translated, adapt, xen};
use holdfast_host::xapi::{Pool, Reference, Tracking, VirtualDisk, XenMachine};
use holdfast_host::{DiskChoice, MachineSummary};
use holdfast_image::Format;
use holdfast_repo::{Manifest, Repository};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::foreign_machine::Domain;
use super::foreign_machine::{Attached, DomainWish, domain_xml};
use super::foreign_store::{DiskToStore, MachineToStore, store_machine};
use super::images::{ParentChoice, choose_parent};
use crate::BackupReport;
use crate::job::rate_limit::{Pace, PacedDevice};
use crate::job::{Error, Job, MachineName, Result};
use crate::machine::lock::{MachineLock, Work};
use crate::machine::run_journal::JournalPlace;
use crate::notes::{
    NOTE_CONSISTENCY, NOTE_FORMAT, NOTE_LABEL, NOTE_METHOD, NOTE_POOL, NOTE_UUID, NOTE_XEN_BASE, NOTE_XEN_DISK,
    NOTE_XEN_SUSPENDED_DISK, STREAM_DOMAIN, STREAM_XEN_MEMORY, STREAM_XEN_RECORDS, STREAM_XEN_SUSPENDED_RECORDS,
};
use crate::repository::calendar::Calendar;
use crate::repository::name_conflict::{Claim, Claimant, Continuation, Granted};
use crate::repository::open::snapshots;

use crate::job::error::XenBackupError;
use instant::Instant;
pub(crate) use instant::{LABEL, is_of_run, prefix as snapshot_prefix, remove_left};
use since::SinceDevice;
pub use transfer_mode::XenWay;
pub use way::XenChange;
use way::{Opened, open_disks};

/// What disks are kept for that belong to backups of a machine to a repository.
fn purpose(repository: &str, machine: &str) -> String {
    format!("{repository}/{machine}")
}

/// The repository and the machine that disks are kept for.
pub(crate) fn purpose_of(text: &str) -> Option<(&str, &str)> {
    text.split_once('/')
}

/// What to back up.
pub struct XenBackupRequest<'a> {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The name or UUID of the machine there.
    pub machine: String,
    /// What its snapshots are listed under; its own name where not given.
    pub name: Option<MachineName>,
    /// Which of its disks: by device (`xvda`).
    pub choice: DiskChoice,
    /// How its disks are read; the best way that the pool offers where nobody asks for one.
    pub way: Option<XenWay>,
    /// Whether the pool keeps what the next backup is compared with.
    pub keeps_base: bool,
    /// Whether its memory is taken, too.
    pub with_memory: bool,
    /// What to compare with.
    pub parent: ParentChoice,
    /// Whether the snapshots that the name has may be of another machine.
    pub continuation: Continuation,
    /// Words to find the snapshot by.
    pub tags: Vec<String>,
    /// Tells the time of day; asked at the instant.
    pub now: &'a dyn Fn() -> Timestamp,
    /// The host that backs up.
    pub host: String,
    /// The program that backs up.
    pub program: String,
    /// In which times of a parent's name are meant.
    pub zone: TimeZone,
    /// How libvirt is to have the machine.
    pub domain: Domain,
    /// Bytes that are read each second, at most.
    pub bytes_per_second: Option<NonZeroU64>,
    /// Connections to one disk at a time, at most: what the host that serves them has to bear.
    pub connection_count_max: usize,
    /// Where locks are.
    pub journal: Option<JournalPlace>,
    /// How long another backup of the machine is waited for.
    pub patience: Duration,
    /// A random number, which names the snapshot.
    pub run: u32,
}

/// A machine that was backed up.
#[derive(Debug)]
pub struct XenBackupReport {
    /// The snapshot.
    pub backup: BackupReport,
    /// Each disk: how it was read.
    pub disks: Vec<XenDiskReport>,
    /// Disks that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// What has no meaning for libvirt.
    pub dropped: Vec<Dropped>,
    /// How long the pool took for its snapshot. The machine stands still for a part of that.
    pub snapshot_duration: Duration,
    /// Bytes of its memory, where that was taken.
    pub memory_bytes: Option<u64>,
    /// Whether the snapshot could not be removed.
    pub has_remains: bool,
}

/// How a disk was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XenDiskReport {
    /// Its name in the snapshot.
    pub name: String,
    /// What it is called in the machine.
    pub device: String,
    /// What its owner calls it.
    pub label: String,
    /// How it came.
    pub way: XenWay,
    /// What of it.
    pub change: XenChange,
}

/// A disk that is backed up.
struct Taken {
    /// Its name in the snapshot: `vda`.
    target: String,
    live: VirtualDisk,
}

/// A machine on its way.
struct XenBackup<'a> {
    repository: &'a Repository,
    request: XenBackupRequest<'a>,
    machine: XenMachine,
    name: MachineName,
    taken: Vec<Taken>,
    left_out: Vec<(String, String)>,
    records: Vec<u8>,
    translated: Translated<String>,
    job: Job<'a>,
}

/// Backs up a machine of a pool.
pub fn back_up_xen(repository: &Repository, request: XenBackupRequest<'_>, job: Job<'_>) -> Result<XenBackupReport> {
    let summary = request.pool.machine(&request.machine)?.summary;
    let lock = lock(&request, &summary, job)?;
    // It may have changed while it was waited for.
    let machine = request.pool.machine(&summary.uuid)?;
    let name = match &request.name {
        Some(name) => name.clone(),
        None => MachineName::new(machine.summary.name.as_str()).map_err(|source| XenBackupError::Name {
            name: machine.summary.name.clone(),
            source,
        })?,
    };
    let (disks, left_out) = decide(&machine, &request.choice)?;
    let records = request.pool.metadata(&machine.reference)?;
    let (records, described) = described(&records)?;
    let (taken, attached) = attach(&described.value, disks);
    let wish = DomainWish {
        domain_type: &request.domain.domain_type,
        network: &request.domain.network,
        folder: None,
        format: Format::Qcow2,
    };
    let mut translated = domain_xml(&described.value, &attached, &wish);
    translated.dropped.splice(0..0, described.dropped);
    // Without a lock, what is there may belong to somebody at work.
    if lock.is_some() {
        instant::clear_up(&request, &machine, job)?;
    }
    let backup = XenBackup {
        repository,
        request,
        machine,
        name,
        taken,
        left_out,
        records,
        translated,
        job,
    };
    backup.run()
}

fn lock(request: &XenBackupRequest<'_>, summary: &MachineSummary, job: Job<'_>) -> Result<Option<MachineLock>> {
    let how = (Work::Backup, request.patience);
    MachineLock::take(request.journal.as_ref(), summary, how, (request.now)(), job)
}

/// The disks that are backed up, and the others with the reason.
#[expect(clippy::type_complexity, reason = "two lists")]
fn decide(machine: &XenMachine, choice: &DiskChoice) -> Result<(Vec<VirtualDisk>, Vec<(String, String)>)> {
    let is_called = |disk: &VirtualDisk, name: &String| [&disk.device, &disk.uuid, &disk.label].contains(&name);
    let named = choice.include.iter().chain(&choice.exclude);
    let unknown: Vec<String> = named
        .filter(|name| !machine.disks.iter().any(|disk| is_called(disk, name)))
        .cloned()
        .collect();
    if !unknown.is_empty() {
        return Err(Error::NoSuchDisk {
            machine: machine.summary.name.clone(),
            disks: unknown,
            present: machine.disks.iter().map(|disk| disk.device.clone()).collect(),
        });
    }
    let (mut taken, mut left_out) = (Vec::new(), Vec::new());
    for disk in &machine.disks {
        let is_in = |list: &[String]| list.iter().any(|name| is_called(disk, name));
        let reason = if is_in(&choice.exclude) {
            "it is excluded"
        } else if is_in(&choice.include) {
            taken.push(disk.clone());
            continue;
        } else if !choice.include.is_empty() {
            "others are included"
        } else if disk.is_shared {
            "other machines write to it too, so it has no instant of this machine"
        } else if disk.is_read_only {
            "the machine cannot write it"
        } else {
            taken.push(disk.clone());
            continue;
        };
        left_out.push((disk.device.clone(), reason.to_owned()));
    }
    if taken.is_empty() && !machine.disks.is_empty() {
        return Err(Error::NoDisks {
            machine: machine.summary.name.clone(),
        });
    }
    Ok((taken, left_out))
}

/// The machine, as the records in an archive without disks describe it; and these records.
fn described(archive: &[u8]) -> Result<(Vec<u8>, Translated<Machine>)> {
    let records = records_in(archive)?;
    let machine = xen::read(&String::from_utf8_lossy(&records))?;
    Ok((records, machine))
}

/// The records in an archive without disks.
fn records_in(archive: &[u8]) -> Result<Vec<u8>> {
    let reader = XvaReader::open(archive)?;
    let records = reader.documents().first().map(|document| document.content.clone());
    Ok(records.unwrap_or_default())
}

/// Names for the disks in the snapshot, and where the machine has them.
fn attach(machine: &Machine, disks: Vec<VirtualDisk>) -> (Vec<Taken>, Vec<Attached>) {
    let there = adapt(machine, Place::Qemu).value;
    let targets = there.targets();
    let (mut taken, mut attached) = (Vec::new(), Vec::new());
    for live in disks {
        let place = there
            .disks
            .iter()
            .position(|disk| disk.kind == DiskKind::Disk && disk.position == live.position);
        let target = place.map_or_else(|| live.device.clone(), |place| targets[place].clone());
        if let Some(place) = place {
            attached.push(Attached {
                number: taken.len(),
                target: target.clone(),
                key: there.disks[place].key.clone(),
                label: live.label.clone(),
                is_blank: false,
            });
        }
        taken.push(Taken { target, live });
    }
    (taken, attached)
}

impl XenBackup<'_> {
    fn run(self) -> Result<XenBackupReport> {
        let manifests = snapshots(self.repository, self.job.progress)?;
        let claim = Claim {
            name: self.name.as_str(),
            claimant: Claimant::Machine(&self.machine.summary.uuid),
            continuation: self.request.continuation,
        };
        let calendar = Calendar::new(self.repository, &self.request.zone, self.job.progress);
        let granted = claim.check(&manifests, calendar, self.job.progress)?;
        granted
            .newest(calendar)
            .inspect(|newest| self.tell_of_another_pool(newest));
        let choice = &self.request.parent;
        let parent = choose_parent(choice, calendar, &manifests, &granted)?;
        self.job.interrupt.check()?;
        let way = way::choose(&self.request, &self.taken, self.job)?;
        let mut instant = Instant::take(&self.request, &self.machine, self.job)?;
        // That somebody wanted it to end is more than what it ended by.
        let stopped = |error| self.job.interrupt.check().err().map_or(error, Error::from);
        let stored = self
            .refuse_changed(&instant)
            .and_then(|()| self.store(&instant, (parent, &granted), way))
            .map_err(stopped);
        let kept = match &stored {
            Ok(_) if self.request.keeps_base => instant.keep(&self.bases(&instant, way), way, &self.mark(), self.job),
            _ => false,
        };
        instant.remove(self.job);
        let (backup, disks, memory_bytes) = stored?;
        if kept || !self.request.keeps_base {
            instant.let_go_of_older(&self.mark(), self.job);
        }
        Ok(XenBackupReport {
            backup,
            disks,
            memory_bytes,
            snapshot_duration: instant.duration(),
            has_remains: instant.has_remains(),
            left_out: self.left_out,
            dropped: self.translated.dropped,
        })
    }

    /// What the pool said of the machine has to be what it has taken a snapshot of.
    fn refuse_changed(&self, instant: &Instant<'_>) -> Result<()> {
        match instant.disk_beside(&self.machine.disks) {
            None => Ok(()),
            Some(disk) => Err(XenBackupError::DiskChanged {
                machine: self.machine.summary.name.clone(),
                device: disk.device.clone(),
            }
            .into()),
        }
    }

    /// What disks that are kept for this repository and machine are marked with.
    fn mark(&self) -> String {
        purpose(&self.repository.config().id.to_string(), &self.machine.summary.uuid)
    }

    /// What the next backup of a disk is compared with. By way of NBD that is of use only where changes are tracked.
    fn base<'i>(&self, taken: &Taken, instant: &'i Instant<'_>, way: XenWay) -> Option<&'i VirtualDisk> {
        let snapshot = instant.snapshot_of(&taken.live).filter(|_| self.request.keeps_base);
        snapshot.filter(|disk| match way {
            XenWay::Nbd => disk.tracking == Tracking::On,
            XenWay::Vhd => true,
            XenWay::Raw => false,
        })
    }

    fn bases(&self, instant: &Instant<'_>, way: XenWay) -> Vec<Reference> {
        let bases = self.taken.iter().filter_map(|taken| self.base(taken, instant, way));
        bases.map(|disk| disk.reference.clone()).collect()
    }

    fn store(
        &self,
        instant: &Instant<'_>,
        (parent, granted): (Option<&Manifest>, &Granted<'_>),
        way: XenWay,
    ) -> Result<(BackupReport, Vec<XenDiskReport>, Option<u64>)> {
        let (request, job) = (&self.request, self.job);
        let suspended = self.suspended(instant)?;
        let Opened { disks, streams } =
            open_disks(self.repository, request, (&self.taken, instant), (parent, way), job)?;
        let pace = Pace::new(request.bytes_per_second, job);
        let paced: Vec<PacedDevice<'_, &dyn BlockDevice>> = disks
            .iter()
            .map(|disk| PacedDevice {
                inner: &*disk.device,
                pace: &pace,
            })
            .collect();
        let total = disks
            .iter()
            .map(|disk| disk.change.read_bytes(disk.device.size_bytes()));
        job.progress.total(total.sum());
        let to_store = self
            .taken
            .iter()
            .zip(&disks)
            .zip(&paced)
            .map(|((taken, disk), device)| DiskToStore {
                name: taken.target.clone(),
                device,
                changed: disk.changed.as_ref(),
                notes: self.notes_of(taken, instant, way),
            });
        let mut memory = instant.memory();
        let memory_bytes = memory.as_ref().map(|(_, bytes)| *bytes);
        let mut texts: Vec<(String, Box<dyn Read + Send + '_>)> = Vec::new();
        let xml = self.translated.value.clone().into_bytes();
        // The first of them is given when all disks have come to their ends.
        texts.push((STREAM_DOMAIN.to_owned(), Box::new(streams.behind(xml))));
        let records = Cursor::new(self.records.clone());
        texts.push((STREAM_XEN_RECORDS.to_owned(), Box::new(records)));
        if let Some(records) = suspended {
            texts.push((STREAM_XEN_SUSPENDED_RECORDS.to_owned(), Box::new(Cursor::new(records))));
        }
        if let Some((reader, _)) = memory.take() {
            texts.push((STREAM_XEN_MEMORY.to_owned(), reader));
        }
        let machine = MachineToStore {
            name: self.name.clone(),
            doing: "backing up",
            parent,
            tags: request.tags.clone(),
            time: instant.time(),
            host: request.host.clone(),
            program: request.program.clone(),
            notes: self.notes(granted),
            disks: to_store.collect(),
            streams: texts,
        };
        let backup = store_machine(self.repository, machine, job)?;
        let reports = self.taken.iter().zip(&disks).map(|(taken, disk)| XenDiskReport {
            name: taken.target.clone(),
            device: taken.live.device.clone(),
            label: taken.live.label.clone(),
            way: disk.way,
            change: disk.change.clone(),
        });
        Ok((backup, reports.collect(), memory_bytes))
    }

    fn notes(&self, granted: &Granted<'_>) -> BTreeMap<String, String> {
        let consistency = match (self.request.with_memory, self.machine.summary.state) {
            (true, _) => "memory",
            (_, holdfast_host::MachineState::ShutOff) => "shut off",
            _ => "crash",
        };
        let notes = [
            (NOTE_UUID, self.machine.summary.uuid.clone()),
            (NOTE_METHOD, "xen".to_owned()),
            (NOTE_CONSISTENCY, consistency.to_owned()),
            (NOTE_POOL, self.request.pool.title()),
        ];
        let notes = notes.into_iter().map(|(key, value)| (key.to_owned(), value));
        notes.chain(granted.note.clone()).collect()
    }

    fn notes_of(&self, taken: &Taken, instant: &Instant<'_>, way: XenWay) -> BTreeMap<String, String> {
        let mut notes = BTreeMap::from([
            (NOTE_FORMAT.to_owned(), Format::Qcow2.name().to_owned()),
            (NOTE_XEN_DISK.to_owned(), taken.live.uuid.clone()),
        ]);
        if let Some(base) = self.base(taken, instant, way) {
            notes.insert(NOTE_XEN_BASE.to_owned(), base.uuid.clone());
        }
        if self.request.with_memory
            && let Some(disk) = instant.snapshot_of(&taken.live)
        {
            notes.insert(NOTE_XEN_SUSPENDED_DISK.to_owned(), disk.uuid.clone());
        }
        if !taken.live.label.is_empty() {
            notes.insert(NOTE_LABEL.to_owned(), taken.live.label.clone());
        }
        notes
    }
}
