//! `backup` of a machine of XenServer or XCP-ng: all its disks at one point in time, by a snapshot of its pool.
//!
//! 1. Leftover snapshots of killed backups are removed.
//! 2. The pool takes a snapshot, which is removed in any case ([`instant`]).
//! 3. The changes of each disk since the previous snapshot are known from changed-block tracking, or from a disk that
//!    the pool has kept ([`way`]).
//! 4. The disks are read by NBD or as streams ([`streams`]), and stored like those of any other machine.
//! 5. Only then are the disks that this run was compared with released, and those for the next run marked.

mod instant;
mod memory;
mod namesake;
mod planning;
mod since;
mod streams;
mod transfer_mode;
mod way;

use std::collections::BTreeMap;
use std::io::Cursor;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use holdfast_archive::{ArchiveReader as _, XvaReader};
use holdfast_hardware::{DiskKind, Machine, Platform, Translated, Untranslated, adapt, xen};
use holdfast_host::xapi::{Pool, Reference, Tracking, VirtualDisk, XenMachine};
use holdfast_host::{DiskChoice, MachineState, MachineSummary};
use holdfast_image::Format;
use holdfast_repo::Repository;

use super::foreign_machine::Domain;
use super::foreign_machine::{AttachedDisk, DomainOptions, domain_xml};
use super::plan::{BackupPlan, PlannedCapture};
use super::sink::SnapshotSink;
use super::snapshot::SnapshotOptions;
use super::store::{DiskToStore, MachineToStore, OtherToStore, store_machine};
use super::{Capture, CaptureOptions, MachineBackupReport, PreparedMachine, Steps, capture_into, plan_capture};
use crate::job::rate_limit::RateLimit;
use crate::job::{Error, Job, Result, Unit};
use crate::machine::hooks::HookCalls;
use crate::notes::{
    NOTE_CONSISTENCY, NOTE_FORMAT, NOTE_LABEL, NOTE_METHOD, NOTE_POOL, NOTE_UUID, NOTE_XEN_BASE, NOTE_XEN_DISK,
    NOTE_XEN_SUSPENDED_DISK, STREAM_DOMAIN, STREAM_XEN_MEMORY, STREAM_XEN_RECORDS, STREAM_XEN_SUSPENDED_RECORDS,
};

use crate::job::error::XenBackupError;
use instant::PoolSnapshot;
pub(crate) use instant::{LABEL, is_of_run, prefix as snapshot_prefix, remove_left};
use since::SinceDevice;
pub use transfer_mode::XenTransfer;
pub use way::XenChange;
use way::{OpenedXenDisks, open_disks};

/// The mark of disks that are kept for backups of a machine to a repository.
fn purpose(repository: &str, machine: &str) -> String {
    format!("{repository}/{machine}")
}

/// The repository and the machine in such a mark.
pub(crate) fn purpose_of(text: &str) -> Option<(&str, &str)> {
    text.split_once('/')
}

/// What to back up.
pub struct XenBackupRequest<'a> {
    /// The pool.
    pub pool: Arc<Pool>,
    /// The name or UUID of the machine in the pool.
    pub machine: String,
    /// Options that all hypervisors share.
    pub capture: CaptureOptions<'a>,
    /// The method; none for the best one that the pool supports.
    pub way: Option<XenTransfer>,
    /// Whether the pool keeps what the next backup is compared with.
    pub keeps_base: bool,
    /// Whether its memory is stored.
    pub with_memory: bool,
    /// Options for the libvirt configuration.
    pub domain: Domain,
    /// The maximum rate of reading, in bytes per second.
    pub bytes_per_second: Option<NonZeroU64>,
    /// The maximum number of simultaneous connections to one disk: a load on the host that serves it.
    pub connection_count_max: usize,
}

/// How a machine of a pool was read.
#[derive(Debug)]
pub struct XenReading {
    /// How each disk was read.
    pub disks: Vec<XenDiskReport>,
    /// Disks that were left out, and why.
    pub left_out: Vec<(String, String)>,
    /// Settings that libvirt cannot express.
    pub dropped: Vec<Untranslated>,
    /// How long the pool took for its snapshot. The machine is paused for a part of that.
    pub snapshot_duration: Duration,
    /// The size of its memory in the snapshot, in bytes.
    pub memory_bytes: Option<u64>,
    /// "memory", "crash" or "shut off".
    pub consistency: &'static str,
    /// How long reading waited for the rate limit.
    pub waited: Duration,
    /// Whether the pool's snapshot could not be removed.
    pub has_remains: bool,
}

/// How a disk was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct XenDiskReport {
    /// Its name in the snapshot.
    pub name: String,
    /// Its device name in the machine.
    pub device: String,
    /// The name that its owner gave it.
    pub label: String,
    /// The method.
    pub way: XenTransfer,
    /// Which part of it was read.
    pub change: XenChange,
}

/// A disk that is backed up.
struct ChosenXenDisk {
    /// Its name in the snapshot: `vda`.
    target: String,
    live: VirtualDisk,
}

/// A machine with its disks chosen.
pub(crate) struct XenCapture<'a> {
    request: XenBackupRequest<'a>,
    machine: XenMachine,
    taken: Vec<ChosenXenDisk>,
    left_out: Vec<(String, String)>,
    records: Vec<u8>,
    translated: Translated<String>,
    sink: &'a dyn SnapshotSink,
    hooks: &'a HookCalls<'a>,
    job: Job<'a>,
}

/// Backs up a machine of a pool.
pub fn back_up_xen(
    repository: &Repository,
    request: XenBackupRequest<'_>,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<MachineBackupReport<XenReading>> {
    capture_into(repository, request, snapshot, job)
}

/// Plans a backup of a machine of a pool.
pub fn plan_xen_backup(
    repository: &Repository,
    request: XenBackupRequest<'_>,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<BackupPlan> {
    plan_capture(repository, request, snapshot, job)
}

impl Capture for XenBackupRequest<'_> {
    type Found = XenMachine;
    type Prepared<'c>
        = XenCapture<'c>
    where
        Self: 'c;
    type Reading = XenReading;

    fn options(&self) -> &CaptureOptions<'_> {
        &self.capture
    }

    fn find(&self) -> Result<XenMachine> {
        Ok(self.pool.machine(&self.machine)?)
    }

    fn summary(found: &XenMachine) -> &MachineSummary {
        &found.summary
    }

    fn prepare<'c>(self, machine: XenMachine, steps: Steps<'c>) -> Result<XenCapture<'c>>
    where
        Self: 'c,
    {
        let (disks, left_out) = decide(&machine, &self.capture.choice)?;
        let records = self.pool.metadata(&machine.reference)?;
        let (records, described) = described(&records)?;
        let (taken, attached) = attach(&described.value, disks);
        let wish = DomainOptions {
            domain_type: &self.domain.domain_type,
            network: &self.domain.network,
            folder: None,
            format: Format::Qcow2,
        };
        let mut translated = domain_xml(&described.value, &attached, &wish);
        translated.dropped.splice(0..0, described.dropped);
        if steps.is_locked {
            instant::clear_up(&self, &machine, steps.job)?;
        }
        Ok(XenCapture {
            request: self,
            machine,
            taken,
            left_out,
            records,
            translated,
            sink: steps.sink,
            hooks: steps.hooks,
            job: steps.job,
        })
    }
}

/// The chosen disks, and the others with the reason.
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
            "it is not among the included disks"
        } else if disk.is_shared {
            "other machines can write to it, so it has no point in time of this machine"
        } else if disk.is_read_only {
            "it is read-only"
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

/// The machine, as described by the records in an archive without disks; also returns these records.
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

/// The disks' names in the snapshot, and their positions in the machine.
fn attach(machine: &Machine, disks: Vec<VirtualDisk>) -> (Vec<ChosenXenDisk>, Vec<AttachedDisk>) {
    let there = adapt(machine, Platform::Qemu).value;
    let targets = there.targets();
    let (mut taken, mut attached) = (Vec::new(), Vec::new());
    for live in disks {
        let place = there
            .disks
            .iter()
            .position(|disk| disk.kind == DiskKind::Disk && disk.position == live.position);
        let target = place.map_or_else(|| live.device.clone(), |place| targets[place].clone());
        if let Some(place) = place {
            attached.push(AttachedDisk {
                number: taken.len(),
                target: target.clone(),
                key: there.disks[place].key.clone(),
                label: live.label.clone(),
                is_blank: false,
            });
        }
        taken.push(ChosenXenDisk { target, live });
    }
    (taken, attached)
}

/// A machine held by a snapshot of its pool.
pub(crate) struct HeldXen<'h> {
    instant: PoolSnapshot<'h>,
    way: XenTransfer,
}

impl PreparedMachine for XenCapture<'_> {
    type Held<'h>
        = HeldXen<'h>
    where
        Self: 'h;
    type Reading = XenReading;

    fn plan(&self) -> Result<PlannedCapture> {
        self.plan_reading()
    }

    fn freeze(&self) -> Result<HeldXen<'_>> {
        self.sink
            .history()
            .and_then(|history| history.newest)
            .inspect(|newest| self.warn_of_another_pool(newest));
        let way = way::choose(&self.request, &self.taken, self.job)?;
        way::track_changes(&self.request, &self.taken, way, self.job)?;
        let state = self.machine.summary.state;
        let instant = self
            .hooks
            .pre_freeze(state)
            .and_then(|()| PoolSnapshot::take(&self.request, &self.machine, self.job));
        self.hooks.post_thaw(state, None);
        Ok(HeldXen { instant: instant?, way })
    }

    fn read<'h>(&'h self, held: &mut HeldXen<'h>) -> Result<XenReading> {
        self.refuse_changed(&held.instant)?;
        self.store(&held.instant, held.way)
    }

    fn release<'h>(&'h self, held: HeldXen<'h>, read: Result<XenReading>) -> Result<XenReading> {
        let HeldXen { mut instant, way } = held;
        let keeps_base = self.request.keeps_base;
        let kept = match &read {
            Ok(_) if keeps_base => instant.keep(&self.bases(&instant, way), way, &self.mark(), self.job),
            _ => false,
        };
        instant.remove(self.job);
        let mut reading = read?;
        if kept || !keeps_base {
            instant.remove_older_or_warn(&self.mark(), self.job);
        }
        reading.has_remains = instant.has_remains();
        Ok(reading)
    }

    /// After an interruption, errors of requests are less useful than the interruption itself.
    fn explain(&self, error: Error) -> Error {
        self.job.interrupt.check().err().map_or(error, Error::from)
    }

    fn consistency(reading: &XenReading) -> &str {
        reading.consistency
    }
}

impl XenCapture<'_> {
    /// Fails if the machine has changed between its description and the snapshot.
    fn refuse_changed(&self, instant: &PoolSnapshot<'_>) -> Result<()> {
        match instant.disk_beside(&self.machine.disks) {
            None => Ok(()),
            Some(disk) => Err(XenBackupError::DiskChanged {
                machine: self.machine.summary.name.clone(),
                device: disk.device.clone(),
            }
            .into()),
        }
    }

    /// The mark of disks that are kept for this repository and machine.
    fn mark(&self) -> String {
        let history = self.sink.history();
        let repository = history.map(|history| history.repository.config().id.to_string());
        purpose(&repository.unwrap_or_default(), &self.machine.summary.uuid)
    }

    /// The base for the next backup of a disk. With NBD it is useful only if changes are tracked.
    fn base<'i>(
        &self,
        taken: &ChosenXenDisk,
        instant: &'i PoolSnapshot<'_>,
        way: XenTransfer,
    ) -> Option<&'i VirtualDisk> {
        let snapshot = instant.snapshot_of(&taken.live).filter(|_| self.request.keeps_base);
        snapshot.filter(|disk| match way {
            XenTransfer::Nbd => disk.tracking == Tracking::On,
            XenTransfer::Vhd => true,
            XenTransfer::Raw => false,
        })
    }

    fn bases(&self, instant: &PoolSnapshot<'_>, way: XenTransfer) -> Vec<Reference> {
        let bases = self.taken.iter().filter_map(|taken| self.base(taken, instant, way));
        bases.map(|disk| disk.reference.clone()).collect()
    }

    fn store(&self, instant: &PoolSnapshot<'_>, way: XenTransfer) -> Result<XenReading> {
        let (request, job) = (&self.request, self.job);
        let suspended = self.suspended(instant)?;
        let OpenedXenDisks { disks, streams } =
            open_disks(self.sink.history(), request, &self.taken, instant, way, job)?;
        let to_store = self.taken.iter().zip(&disks).map(|(taken, disk)| DiskToStore {
            name: taken.target.clone(),
            device: &*disk.device,
            changed: disk.changed.as_ref(),
            notes: self.notes_of(taken, instant, way),
        });
        let (memory, memory_bytes) = instant.memory().unzip();
        let xml = self.translated.value.clone().into_bytes();
        // Its first byte is returned only when all disks were read to their ends.
        let domain = OtherToStore::stream(STREAM_DOMAIN, streams.behind(xml));
        let records = OtherToStore::stream(STREAM_XEN_RECORDS, Cursor::new(self.records.clone()));
        let suspended =
            suspended.map(|records| OtherToStore::stream(STREAM_XEN_SUSPENDED_RECORDS, Cursor::new(records)));
        let memory = memory.map(|memory| OtherToStore::stream(STREAM_XEN_MEMORY, memory));
        let total = disks
            .iter()
            .map(|disk| disk.change.read_bytes(disk.device.size_bytes()));
        let machine = MachineToStore {
            time: instant.time(),
            notes: self.notes(),
            disks: to_store.collect(),
            others: [domain, records].into_iter().chain(suspended).chain(memory).collect(),
            total_bytes: Some(total.sum()),
        };
        let pace = RateLimit::new(request.bytes_per_second, job);
        job.progress.phase(&self.sink.phase(&request.capture.name), Unit::Bytes);
        let duration = store_machine(self.sink, machine, &pace, job)?;
        let reports = self.taken.iter().zip(&disks).map(|(taken, disk)| XenDiskReport {
            name: taken.target.clone(),
            device: taken.live.device.clone(),
            label: taken.live.label.clone(),
            way: disk.way,
            change: disk.change.clone(),
        });
        Ok(XenReading {
            disks: reports.collect(),
            left_out: self.left_out.clone(),
            dropped: self.translated.dropped.clone(),
            snapshot_duration: instant.duration(),
            memory_bytes,
            consistency: self.consistency_of_state(),
            waited: pace.waited(duration),
            has_remains: false,
        })
    }

    fn consistency_of_state(&self) -> &'static str {
        match (self.request.with_memory, self.machine.summary.state) {
            (true, _) => "memory",
            (_, MachineState::ShutOff) => "shut off",
            _ => "crash",
        }
    }

    fn notes(&self) -> BTreeMap<String, String> {
        let notes = [
            (NOTE_UUID, self.machine.summary.uuid.clone()),
            (NOTE_METHOD, "xen".to_owned()),
            (NOTE_CONSISTENCY, self.consistency_of_state().to_owned()),
            (NOTE_POOL, self.request.pool.title()),
        ];
        notes.map(|(key, value)| (key.to_owned(), value)).into()
    }

    fn notes_of(
        &self,
        taken: &ChosenXenDisk,
        instant: &PoolSnapshot<'_>,
        way: XenTransfer,
    ) -> BTreeMap<String, String> {
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
