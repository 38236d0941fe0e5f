//! Reads a machine from host snapshots of its disks: it is paused while they are created, and its QEMU is not changed.
//!
//! The host snapshots are kept, with a hold, until the next backup that is compared with them has been committed. The
//! file system then knows which bytes of an image have changed, without a bitmap of the hypervisor: the same location
//! in two existing host snapshots holds the same bytes (`holdfast_host::changed_blocks`). The repository's snapshot
//! notes the name and identity of the host snapshot for each disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_block::DirtyBitmap;
use holdfast_host::provider::{DatasetPath, HostSnapshot, HostSnapshotName, Provider, ProviderKind, View};
use holdfast_host::qemu::Pause;
use holdfast_host::{Description, MachineDisk};
use holdfast_repo::{Manifest, Repository};
use jiff::Timestamp;

use super::changes::{Changes, ReadAll, check_spots};
use super::disk_format::format_of;
use super::supervisor::Load;
use super::{HeldMachine, MachineReading, Method, PointOfDisks, QemuCapture, ReadyDisk, notes_of};
use crate::host_snapshot::compare_images::{TwoStates, ZfsDifference, below, options_in_view};
use crate::host_snapshot::places::image_path;
use crate::host_snapshot::record::SetId;
use crate::host_snapshot::{
    GuestRequest, HostSnapshotReport, HostSnapshotRequest, NamedSnapshotSet, Subject, places_of, take_host_snapshots,
};
use crate::image::source::OpenSource;
use crate::job::{Error, Result};
use crate::machine::hooks::{Downtime, HookEvent};
use crate::machine::state::streams::FirmwareState;
use crate::machine::watchdog::Guard;
use crate::notes::{NOTE_FORMAT, NOTE_HOST_SNAPSHOT, NOTE_HOST_SNAPSHOT_IDENTITY, NOTE_HOST_SNAPSHOT_PATH};
use crate::restore::machine::chain_of;

/// The tag of holds on host snapshots.
const TAG: &str = "holdfast";

/// Host snapshots that are read, and the places of the disks in them.
struct HeldSnapshots {
    name: String,
    /// By the name of the disk in the machine.
    places: BTreeMap<String, DatasetPath>,
    /// One for each dataset.
    snapshots: Vec<HostSnapshot>,
    views: Vec<View>,
    /// The live folders of the datasets; none for volumes.
    today: Vec<Option<PathBuf>>,
}

/// A machine whose disks are in host snapshots.
pub(crate) struct HeldByHostSnapshots {
    cut: HeldSnapshots,
    report: HostSnapshotReport,
    time: Timestamp,
    beside: Result<FirmwareState>,
    guard: Guard,
    reason: String,
}

/// The outcome of a backup from host snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackupOutcome {
    Stored,
    Failed,
}

/// Why host snapshots of all disks of a machine are not possible; none if they are.
pub(super) fn no_host_snapshot(description: &Description, taken: &[MachineDisk], run: u32) -> Option<String> {
    let places = places_of(description, &chosen(taken), run);
    if let Some((disk, why)) = places.nowhere.first() {
        return Some(format!("disk {disk}: {why}"));
    }
    // Only the image itself is cloned, and its base images are looked for beside it.
    let is_cloned = |disk: &&MachineDisk| {
        let place = places.disks.iter().find(|(target, _)| *target == disk.target);
        place.is_some_and(|(_, place)| place.dataset.provider == ProviderKind::Reflink)
    };
    let mut cloned = taken.iter().filter(is_cloned);
    let based = cloned.find(|disk| chain_of(image_path(disk), disk.format.as_deref()).len() > 1)?;
    Some(format!(
        "disk {}: its image is based on another one, which a clone of it does not find",
        based.target
    ))
}

fn chosen(taken: &[MachineDisk]) -> holdfast_host::DiskChoice {
    holdfast_host::DiskChoice {
        include: taken.iter().map(|disk| disk.target.clone()).collect(),
        exclude: Vec::new(),
    }
}

impl QemuCapture<'_> {
    pub(super) fn freeze_host_snapshots(&self, reason: String) -> Result<HeldMachine<'_>> {
        let state = self.description.summary.state;
        let mut guard = self.hooks_guard()?;
        guard.owes(&[HookEvent::PostThaw, HookEvent::JobAbort])?;
        let (mut time, mut beside) = (None, Ok(FirmwareState::default()));
        let prepared = self.hooks.pre_freeze(state);
        let made = prepared.and_then(|()| {
            self.cut(&mut || {
                time = Some((self.request.capture.now)());
                beside = self.read_beside();
            })
        });
        let guest = made.as_ref().ok().and_then(|(_, report)| report.guests.first());
        let held_up = guest.map_or_else(Downtime::default, |guest| Downtime {
            frozen: guest.quiesced.frozen(),
            paused: guest.paused.unwrap_or_default(),
        });
        self.hooks.post_thaw(state, Some(held_up));
        guard.owes(&[HookEvent::JobAbort])?;
        let (cut, report) = made?;
        Ok(HeldMachine::HostSnapshots(Box::new(HeldByHostSnapshots {
            cut,
            time: time.unwrap_or(report.time),
            beside,
            guard,
            reason,
            report,
        })))
    }

    pub(super) fn read_host_snapshots(&self, held: &mut HeldByHostSnapshots) -> Result<MachineReading> {
        let beside = std::mem::replace(&mut held.beside, Ok(FirmwareState::default()))?;
        let (cut, report) = (&held.cut, &held.report);
        let (consistency, quiesced, paused) = match report.guests.first() {
            Some(guest) => (guest.consistency(), guest.quiesced.clone(), guest.paused),
            None => ("crash", super::Quiesced::NotNeeded, None),
        };
        let opened = self.open_views(cut)?;
        let disks = self.taken.iter().zip(&opened).map(|(disk, source)| ReadyDisk {
            target: disk.target.clone(),
            device: &*source.device,
            changes: self.changes_since_parent(disk, source, cut),
            notes: cut.notes_of(disk),
        });
        let point = PointOfDisks {
            disks: &disks.collect::<Vec<_>>(),
            rest: beside.rest(None, self.job.progress),
            time: held.time,
            method: Method::Snapshot,
            consistency,
        };
        let pace = self.pace();
        let stored = self.store(point, &pace)?;
        let pause = Pause {
            total: paused.unwrap_or_default(),
            cut: report.cut,
            ..Pause::default()
        };
        Ok(MachineReading {
            pause: self.pause_of_running(pause),
            quiesced,
            load: Load {
                waited: pace.waited(stored.duration),
                ..Load::default()
            },
            compared: stored.compared,
            ..self.reading(Method::Snapshot, &held.reason, consistency)
        })
    }

    pub(super) fn release_host_snapshots(&self, held: HeldByHostSnapshots, read: &Result<MachineReading>) {
        let outcome = match read {
            Ok(_) => BackupOutcome::Stored,
            Err(_) => BackupOutcome::Failed,
        };
        self.clear_up(held.cut, outcome);
        held.guard.done();
    }

    /// A watchdog that calls the hooks, if there are any.
    fn hooks_guard(&self) -> Result<Guard> {
        let command = self.request.watchdog.as_deref();
        Guard::start(command.filter(|_| !self.request.capture.hooks.programs.is_empty()))
    }

    /// The prefix of the names of this machine's host snapshots for this repository: everything before the run's
    /// number.
    fn prefix(&self) -> String {
        let kept_in = self
            .sink
            .history()
            .map(|before| before.repository.config().id.to_string());
        // Without history, a number is used that no repository has.
        let repository = kept_in.unwrap_or_else(|| "00000000".to_owned());
        let uuid = &self.description.summary.uuid;
        let digits = |text: &str| -> String { text.chars().filter(char::is_ascii_hexdigit).take(8).collect() };
        format!("holdfast-backup-{}-{}-", digits(&repository), digits(uuid))
    }

    /// Creates the host snapshots; `within` is called at the point in time.
    fn cut(&self, within: &mut dyn FnMut()) -> Result<(HeldSnapshots, HostSnapshotReport)> {
        let providers = self.request.providers;
        let places = places_of(&self.description, &chosen(&self.taken), self.request.capture.run);
        let name = format!("{}{:08x}", self.prefix(), self.request.capture.run);
        let wanted = places.wanted();
        let request = HostSnapshotRequest {
            providers,
            cuts: vec![NamedSnapshotSet {
                name: name.clone(),
                wanted: wanted.clone(),
            }],
            guests: vec![GuestRequest {
                machine: self.request.machine,
                description: self.description.clone(),
                quiesce: self.request.quiesce,
                places: crate::MachinePlaces::default(),
                has_to_stop: self.description.nvram.is_some() || self.description.tpm.is_some(),
                memory: None,
                watchdog: self.request.watchdog.clone(),
                journal: self.request.capture.journal.clone(),
                run: self.request.capture.run,
            }],
            subject: Subject::Machines,
            now: self.request.capture.now,
            program: self.request.capture.program.clone(),
            set: SetId(u64::from(self.request.capture.run)),
            states: None,
        };
        let report = take_host_snapshots(&request, within, self.job)?;
        let mut cut = HeldSnapshots {
            name,
            places: places.disks.into_iter().collect(),
            snapshots: Vec::new(),
            views: Vec::new(),
            today: Vec::new(),
        };
        let opened = report.snapshots.iter().try_for_each(|name| {
            let provider = providers.of_dataset(&name.dataset);
            provider.hold(name, TAG)?;
            cut.snapshots.extend(found(provider, name)?);
            let label = format!("{:08x}-{}", self.request.capture.run, cut.views.len());
            cut.views.push(provider.view(name, &label)?);
            let state = provider.dataset(&name.dataset.name)?;
            cut.today.push(state.folder.filter(|_| !state.is_volume));
            Ok::<(), Error>(())
        });
        match opened {
            Ok(()) => Ok((cut, report)),
            Err(error) => {
                self.clear_up(cut, BackupOutcome::Failed);
                Err(error)
            }
        }
    }

    fn open_views(&self, cut: &HeldSnapshots) -> Result<Vec<OpenSource>> {
        let open = |disk: &MachineDisk| {
            let path = cut.path_of(disk).ok_or_else(|| Error::NoImageFile {
                disk: disk.target.clone(),
                place: "nowhere".to_owned(),
            })?;
            let format = format_of(disk, &path)?;
            let root = cut.root_of(disk).unwrap_or(&path);
            let mut options = options_in_view(Some(format), root, cut.today_of(disk));
            options.allow.extend_from_slice(&self.request.capture.allowed);
            // These bases are allowed because the machine itself reads them. If the configured format is not qcow2, the
            // guest writes all bytes of the image, so they could name any file as a base.
            if disk.format.as_deref() == Some("qcow2") {
                let bases = chain_of(image_path(disk), disk.format.as_deref()).into_iter().skip(1);
                options.allow.extend(bases.filter(|base| base.exists()));
            }
            OpenSource::open_with(&path, &options)
        };
        self.taken.iter().map(open).collect()
    }

    /// The changes since the previous snapshot, if the file system reports them and they pass the spot checks.
    fn changes_since_parent(&self, disk: &MachineDisk, now: &OpenSource, cut: &HeldSnapshots) -> Changes {
        let changed = self.changed_between(disk, now, cut).and_then(|changed| {
            let (repository, parent) = self.parent()?;
            let seed = u64::from(self.request.capture.run);
            // A parent that cannot be read is reported when it is used.
            let Ok(before) = repository.open_disk(parent.id, Some(&disk.target)) else {
                return Ok(changed);
            };
            let checked = check_spots(&*now.device, &changed, &before, seed);
            checked.map_err(|found| match found {
                ReadAll::SpotCheck { offset } => {
                    ReadAll::NotComparable(format!("offset {offset} is said to be unchanged, and is not"))
                }
                other => other,
            })?;
            Ok(changed)
        });
        changed.map_or_else(Changes::Unknown, Changes::Between)
    }

    fn changed_between(
        &self,
        disk: &MachineDisk,
        now: &OpenSource,
        cut: &HeldSnapshots,
    ) -> std::result::Result<DirtyBitmap, ReadAll> {
        let (_, parent) = self.parent()?;
        let before = parent.disk(Some(&disk.target)).map_err(|_| ReadAll::NewDisk)?;
        let note = |key: &str| before.notes.get(key).ok_or(ReadAll::NoHostSnapshotThen);
        let (name, identity) = (note(NOTE_HOST_SNAPSHOT)?, note(NOTE_HOST_SNAPSHOT_IDENTITY)?);
        let size_bytes = now.device.size_bytes();
        if before.size_bytes != size_bytes {
            return Err(ReadAll::Resized {
                before_bytes: before.size_bytes,
                now_bytes: size_bytes,
            });
        }
        let place = cut.places.get(&disk.target).ok_or(ReadAll::NoHostSnapshotThen)?;
        // The host snapshots may contain another image, too.
        let was_on = Path::new(note(NOTE_HOST_SNAPSHOT_PATH)?);
        if was_on != place.path || before.notes.get(NOTE_FORMAT) != disk.format.as_ref() {
            return Err(ReadAll::OtherImage);
        }
        let gone = || ReadAll::HostSnapshotGone { name: name.clone() };
        let then = HostSnapshotName {
            name: name.rsplit_once('@').ok_or_else(gone)?.1.to_owned(),
            dataset: place.dataset.clone(),
        };
        if then.to_string() != *name {
            return Err(ReadAll::NotComparable("the disk is in another dataset now".to_owned()));
        }
        let provider = self.request.providers.of_dataset(&then.dataset);
        let known = found(provider, &then).ok().flatten();
        known
            .filter(|snapshot| snapshot.identity == *identity)
            .ok_or_else(gone)?;
        let label = format!("{:08x}-then", self.request.capture.run);
        let view = provider
            .view(&then, &label)
            .map_err(|error| ReadAll::NotComparable(error.to_string()))?;
        let new = cut.path_of(disk).ok_or_else(gone)?;
        let newer = &cut.snapshot_of(disk).ok_or_else(gone)?.name;
        let old = below(view.path(), &place.path);
        let states = TwoStates {
            format: disk.format.as_deref(),
            images: (&old, &new),
            roots: (view.path(), cut.root_of(disk).ok_or_else(gone)?),
            today: cut.today_of(disk),
            size_bytes,
        };
        let changed = match then.dataset.provider {
            ProviderKind::Btrfs | ProviderKind::Reflink => states.changed(),
            ProviderKind::Zfs => {
                let sent = ZfsDifference {
                    zfs: self.request.providers.zfs(),
                    older: &then,
                    newer,
                };
                let ask = |old: &Path, new: &Path| sent.ranges(old, new);
                sent.is_worth_it(now).and_then(|()| states.changed_by(&ask))
            }
            ProviderKind::Lvm => {
                let lvm = self.request.providers.lvm();
                let ask = |_: &Path, _: &Path| lvm.changes(&then, newer).map_err(|error| error.to_string());
                states.changed_by(&ask)
            }
        };
        changed.map_err(ReadAll::NotComparable)
    }

    /// The snapshot to compare with, and its repository.
    fn parent(&self) -> std::result::Result<(&Repository, &Manifest), ReadAll> {
        let history = self.sink.history().ok_or(ReadAll::NoParent)?;
        Ok((history.repository, history.parent.ok_or(ReadAll::NoParent)?))
    }

    /// Cleans up: only the host snapshots of the newest snapshot are kept. What cannot be removed now is removed by the
    /// next backup.
    fn clear_up(&self, mut cut: HeldSnapshots, outcome: BackupOutcome) {
        // A host snapshot with an open view cannot be removed.
        cut.views.clear();
        let (prefix, has_history) = (self.prefix(), self.sink.history().is_some());
        for place in cut.places.values() {
            let provider = self.request.providers.of_dataset(&place.dataset);
            let present = provider.snapshots(&place.dataset.name).unwrap_or_default();
            let own = present
                .into_iter()
                .filter(|snapshot| snapshot.name.name.starts_with(&prefix));
            for snapshot in own {
                let is_new = snapshot.name.name == cut.name;
                // Host snapshots are kept only if a later backup is compared with them. After a failed backup these are
                // the previous ones.
                let is_compared_next = match outcome {
                    BackupOutcome::Stored => is_new,
                    BackupOutcome::Failed => !is_new,
                };
                if !(has_history && is_compared_next) {
                    self.remove(provider, &snapshot);
                }
            }
        }
    }

    fn remove(&self, provider: &dyn Provider, snapshot: &HostSnapshot) {
        if snapshot.hold_count > 0 {
            // If another program holds the snapshot, the next step fails and reports that.
            provider.release(&snapshot.name, TAG).ok();
        }
        if let Err(error) = provider.destroy_this(snapshot) {
            self.job.progress.note(&format!("{error}; the next backup tries again"));
        }
    }
}

fn found(provider: &dyn Provider, name: &HostSnapshotName) -> Result<Option<HostSnapshot>> {
    let present = provider.snapshots(&name.dataset.name)?;
    Ok(present.into_iter().find(|snapshot| snapshot.name == *name))
}

impl HeldSnapshots {
    fn index_of(&self, disk: &MachineDisk) -> Option<usize> {
        let dataset = &self.places.get(&disk.target)?.dataset;
        let mut all = self.snapshots.iter();
        all.position(|snapshot| snapshot.name.dataset == *dataset)
    }

    fn root_of(&self, disk: &MachineDisk) -> Option<&Path> {
        Some(self.views.get(self.index_of(disk)?)?.path())
    }

    fn today_of(&self, disk: &MachineDisk) -> Option<&Path> {
        self.today.get(self.index_of(disk)?)?.as_deref()
    }

    fn path_of(&self, disk: &MachineDisk) -> Option<PathBuf> {
        Some(below(self.root_of(disk)?, &self.places.get(&disk.target)?.path))
    }

    /// The host snapshot that contains a disk.
    fn snapshot_of(&self, disk: &MachineDisk) -> Option<&HostSnapshot> {
        self.snapshots.get(self.index_of(disk)?)
    }

    fn notes_of(&self, disk: &MachineDisk) -> BTreeMap<String, String> {
        let mut notes = notes_of(disk);
        if let Some(snapshot) = self.snapshot_of(disk) {
            notes.insert(NOTE_HOST_SNAPSHOT.to_owned(), snapshot.name.to_string());
            notes.insert(NOTE_HOST_SNAPSHOT_IDENTITY.to_owned(), snapshot.identity.clone());
            let place = self.places.get(&disk.target).and_then(|place| place.path.to_str());
            notes.extend(place.map(|path| (NOTE_HOST_SNAPSHOT_PATH.to_owned(), path.to_owned())));
        }
        notes
    }
}
