//! `backup` of a VirtualBox machine.

use std::time::Duration;

use holdfast_hardware::virtualbox::UNKNOWN_CONTROLLER;
use holdfast_hardware::{Machine, Untranslated};
use holdfast_host::{Decision, Description, MachineState, MachineSummary};
use holdfast_repo::Repository;
use jiff::Timestamp;

use super::chain::{Admission, open_disk};
use super::frozen::{HoldingSnapshot, delete_left};
use super::instant::{ChosenDisk, VirtualBoxCapture, VirtualBoxPoint};
use super::machine::{Condition, LoadedSettings, targets};
use super::media::chain_of;
use super::of;
use super::request::{VirtualBoxBackup, VirtualBoxMemory, VirtualBoxMethod, VirtualBoxReading};
use super::unchanged::ChangeCheck;
use crate::capture::foreign_machine::AttachedDisk;
use crate::capture::plan::{BackupPlan, PlannedCapture, PlannedMethod, PlannedRead};
use crate::capture::snapshot::SnapshotOptions;
use crate::capture::{
    Capture, CaptureOptions, MachineBackupReport, PreparedMachine, Steps, capture_into, plan_capture,
};
use crate::job::error::VirtualBoxError;
use crate::job::{Error, Job, Result, Unit};
use crate::machine::lock::place_digits;

/// Why a whole disk is read.
const NO_RECORD: &str = "VirtualBox keeps no record of what a machine writes";
/// Why a disk of a running machine is left out if snapshots do not redirect its writes.
const NO_INSTANT: &str = "a snapshot of VirtualBox leaves such a disk alone, and the machine runs";

/// Backs up a VirtualBox machine.
///
/// # Errors
/// After any error a machine that was running still runs, and the VirtualBox snapshot is deleted.
pub fn back_up_virtualbox(
    repository: &Repository,
    request: VirtualBoxBackup<'_>,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<MachineBackupReport<VirtualBoxReading>> {
    capture_into(repository, request, snapshot, job)
}

/// Plans a backup of a VirtualBox machine.
pub fn plan_virtualbox_backup(
    repository: &Repository,
    request: VirtualBoxBackup<'_>,
    snapshot: SnapshotOptions,
    job: Job<'_>,
) -> Result<BackupPlan> {
    plan_capture(repository, request, snapshot, job)
}

impl Capture for VirtualBoxBackup<'_> {
    type Found = MachineSummary;
    type Prepared<'c>
        = VirtualBoxCapture<'c>
    where
        Self: 'c;
    type Reading = VirtualBoxReading;

    fn options(&self) -> &CaptureOptions<'_> {
        &self.capture
    }

    fn find(&self) -> Result<MachineSummary> {
        Ok(self.machine.describe()?.summary)
    }

    fn summary(found: &MachineSummary) -> &MachineSummary {
        found
    }

    fn prepare<'c>(self, _found: MachineSummary, steps: Steps<'c>) -> Result<VirtualBoxCapture<'c>>
    where
        Self: 'c,
    {
        let (machine, job) = (self.machine, steps.job);
        let mut said = machine.read()?;
        let place = place_digits(self.capture.journal.as_ref());
        let snapshots = &said.settings.snapshots;
        if steps.is_locked
            && let Some(manager) = machine.place().manager()
            && !delete_left(manager, machine, snapshots, Some(&place), job.progress).is_empty()
        {
            said = machine.read()?;
        }
        // A disk at an unknown controller is not backed up.
        let disks = |dropped: &&Untranslated| dropped.what.starts_with(UNKNOWN_CONTROLLER);
        for dropped in said.dropped.iter().filter(disks) {
            let message = format!("{}: {} is left out: {}", machine.name(), dropped.what, dropped.why);
            job.progress.warning(&message);
        }
        Ok(VirtualBoxCapture {
            condition: machine.condition(&said)?,
            request: self,
            said,
            sink: steps.sink,
            hooks: steps.hooks,
            job,
        })
    }
}

/// A machine whose images do not change.
pub(crate) enum HeldVirtualBox<'h> {
    /// It is off.
    Off,
    /// It runs, and a VirtualBox snapshot holds what is read.
    Frozen {
        frozen: HoldingSnapshot<'h>,
        time: Timestamp,
        taken_in: Duration,
    },
}

impl PreparedMachine for VirtualBoxCapture<'_> {
    type Held<'h>
        = HeldVirtualBox<'h>
    where
        Self: 'h;
    type Reading = VirtualBoxReading;

    fn plan(&self) -> Result<PlannedCapture> {
        let is_off = self.is_off()?;
        let opened = self.open(&self.said.machine, &self.said)?;
        let disks = opened.taken.iter().map(|disk| {
            Ok(PlannedRead {
                name: disk.attached.target.clone(),
                size_bytes: Some(disk.source.device.size_bytes()),
                read_bytes: Some(disk.source.allocated_bytes()?),
                reason: Some(NO_RECORD.to_owned()),
            })
        });
        let way = if is_off {
            VirtualBoxMethod::Images
        } else {
            VirtualBoxMethod::Snapshot {
                taken_in: Duration::ZERO,
            }
        };
        Ok(PlannedCapture {
            method: PlannedMethod {
                word: way.word(),
                reason: self.reason(),
            },
            disks: disks.collect::<Result<_>>()?,
            left_out: opened.left_out,
        })
    }

    fn freeze(&self) -> Result<HeldVirtualBox<'_>> {
        if self.is_off()? {
            return Ok(HeldVirtualBox::Off);
        }
        self.freeze_active()
    }

    fn read<'h>(&'h self, held: &mut HeldVirtualBox<'h>) -> Result<VirtualBoxReading> {
        match held {
            HeldVirtualBox::Off => self.read_images(),
            HeldVirtualBox::Frozen { frozen, time, taken_in } => self.read_frozen(frozen, *time, *taken_in),
        }
    }

    fn release<'h>(&'h self, held: HeldVirtualBox<'h>, read: Result<VirtualBoxReading>) -> Result<VirtualBoxReading> {
        let remains = match held {
            HeldVirtualBox::Off => None,
            // A snapshot that could not be deleted causes a warning: what was read is valid all the same.
            HeldVirtualBox::Frozen { frozen, .. } => frozen.end(),
        };
        read.map(|reading| VirtualBoxReading { remains, ..reading })
    }

    /// After an interruption, errors of streams are less useful than the interruption itself.
    fn explain(&self, error: Error) -> Error {
        self.job.interrupt.check().err().map_or(error, Error::from)
    }

    fn consistency(reading: &VirtualBoxReading) -> &str {
        reading.consistency
    }
}

/// The disks of a machine, as they were chosen.
pub(super) struct OpenedDisks {
    pub(super) taken: Vec<ChosenDisk>,
    /// Those that are left out, and why.
    pub(super) left_out: Vec<(String, String)>,
}

impl VirtualBoxCapture<'_> {
    /// Whether the machine is off.
    ///
    /// # Errors
    /// The machine is not off, and VirtualBox cannot take a snapshot of it.
    fn is_off(&self) -> Result<bool> {
        let machine = self.request.machine;
        match (self.condition.state(), &self.condition) {
            (MachineState::ShutOff, _) => Ok(true),
            (_, Condition::UsedBy(process)) => Err(of(VirtualBoxError::InUse {
                machine: machine.name().to_owned(),
                process: process.pid,
                program: process.arguments.first().cloned().unwrap_or_default(),
                why_not: match machine.place().manager() {
                    Some(_) => "does not know it",
                    None => "is not there",
                },
            })),
            (MachineState::Running | MachineState::Paused, _) => Ok(false),
            (_, Condition::Reported(state)) => Err(of(VirtualBoxError::State {
                machine: machine.name().to_owned(),
                word: state.word().to_owned(),
            })),
            _ => Err(Error::MachineBetween {
                machine: machine.name().to_owned(),
            }),
        }
    }

    /// The reason for the method.
    fn reason(&self) -> String {
        match self.condition.state() {
            MachineState::ShutOff if self.said.settings.state_file.is_some() => "it is saved".to_owned(),
            state => format!("it is {state}"),
        }
    }

    /// Reads a machine that is off: as long as nothing changes, its images are of one point in time.
    fn read_images(&self) -> Result<VirtualBoxReading> {
        let (machine, said) = (self.request.machine, &self.said);
        if let Condition::Unused { is_certain } = self.condition {
            self.job.progress.note(&format!(
                "VBoxManage cannot be asked whether {} runs: no process {} its images open for writing, so it is taken to be off",
                machine.name(),
                if is_certain { "has" } else { "that can be seen has" }
            ));
        }
        let opened = self.open(&said.machine, said)?;
        let memory = self.saved_memory(said)?;
        let is_saved = said.settings.state_file.is_some();
        let instant = VirtualBoxPoint {
            text: &said.text,
            machine: &said.machine,
            time: (self.request.capture.now)(),
            way: VirtualBoxMethod::Images,
            reason: self.reason(),
            nvram: said.settings.nvram.as_deref(),
            memory,
            consistency: match (memory, is_saved) {
                (Some(_), _) => "memory",
                (None, true) => "crash",
                (None, false) => "shut off",
            },
        };
        let check: ChangeCheck<'_> = Box::new(|| self.check_unchanged(&opened.taken));
        self.store(instant, &opened, check)
    }

    /// The file with the memory of a saved machine. Without it the machine starts from its disks, as after a crash.
    fn saved_memory<'s>(&self, said: &'s LoadedSettings) -> Result<Option<&'s str>> {
        let machine = self.request.machine;
        let Some(file) = said.settings.state_file.as_deref() else {
            return Ok(None);
        };
        let admission = Admission::new(machine, &self.request.capture.allowed);
        if self.beside(Some(file), &admission)?.is_some() {
            return Ok(Some(file));
        }
        self.job.progress.warning(&format!(
            "{} is saved, but the file with its memory is missing: {}; its disks are stored as after a crash",
            machine.name(),
            machine.file(file).display()
        ));
        Ok(None)
    }

    /// Takes a snapshot of a machine that runs or is paused.
    fn freeze_active(&self) -> Result<HeldVirtualBox<'_>> {
        let machine = self.request.machine;
        let manager = machine.place().manager().ok_or_else(|| {
            of(VirtualBoxError::NoManager {
                what: "a machine that runs",
            })
        })?;
        // Unreadable disks are found before the machine is disturbed.
        drop(self.open(&self.said.machine, &self.said)?);
        let state = self.condition.state();
        let start = self.job.clock.now();
        self.job
            .progress
            .phase(&format!("taking a snapshot of {}", machine.name()), Unit::Items);
        let frozen = self.hooks.pre_freeze(state).and_then(|()| {
            let place = place_digits(self.request.capture.journal.as_ref());
            let run = self.request.capture.run;
            HoldingSnapshot::take(manager, machine, &place, run, state, self.job.progress)
        });
        let taken_in = self.job.clock.now().saturating_sub(start);
        let time = (self.request.capture.now)();
        self.hooks.post_thaw(state, None);
        let frozen = frozen?;
        Ok(HeldVirtualBox::Frozen { frozen, time, taken_in })
    }

    fn read_frozen(
        &self,
        frozen: &HoldingSnapshot<'_>,
        time: Timestamp,
        taken_in: Duration,
    ) -> Result<VirtualBoxReading> {
        let (machine, before) = (self.request.machine, &self.said);
        self.job.interrupt.check()?;
        let said = machine.read()?;
        let then = machine.read_at(&said, frozen.snapshot())?;
        let images = |machine: &Machine| machine.disks.iter().map(|disk| disk.key.clone()).collect::<Vec<_>>();
        if images(&then) != images(&before.machine) {
            return Err(Error::from(holdfast_host::Error::Busy {
                machine: machine.name().to_owned(),
                holder: "another program that has attached other images to it just now".to_owned(),
            }));
        }
        let opened = self.open(&then, &said)?;
        let kept = said
            .settings
            .snapshots
            .iter()
            .find(|snapshot| snapshot.uuid == frozen.snapshot());
        let memory = kept.and_then(|snapshot| snapshot.state_file.as_deref());
        let memory = memory.filter(|_| self.request.memory == VirtualBoxMemory::Store);
        let instant = VirtualBoxPoint {
            text: &before.text,
            machine: &before.machine,
            time,
            way: VirtualBoxMethod::Snapshot { taken_in },
            reason: self.reason(),
            nvram: kept
                .and_then(|snapshot| snapshot.nvram.as_deref())
                .or(before.settings.nvram.as_deref()),
            memory,
            consistency: if memory.is_some() { "memory" } else { "crash" },
        };
        let check: ChangeCheck<'_> = Box::new(|| self.check_files(&opened.taken));
        self.store(instant, &opened, check)
    }

    /// Opens the chosen disks, with the images of `machine`; also returns why others are left out.
    fn open(&self, machine: &Machine, said: &LoadedSettings) -> Result<OpenedDisks> {
        let owner = self.request.machine;
        let description = owner.description(machine, said, &self.condition);
        self.check_choice(&description)?;
        let admission = Admission::new(owner, &self.request.capture.allowed);
        let (mut taken, mut left_out) = (Vec::new(), Vec::new());
        let decisions = description.decide(&self.request.capture.choice);
        let disks = machine.disks.iter().zip(targets(machine)).zip(decisions);
        for (number, ((disk, target), decision)) in disks.enumerate() {
            if let Some(why) = self.why_not(decision, said, &disk.key) {
                left_out.push((target, why));
                continue;
            }
            let source = open_disk(owner, said, &target, &disk.key, &admission)?;
            source.warn_of_inconsistencies(self.job.progress)?;
            taken.push(ChosenDisk {
                attached: AttachedDisk {
                    number,
                    target,
                    key: disk.key.clone(),
                    label: disk.label.clone(),
                    is_blank: false,
                },
                source,
            });
        }
        if taken.is_empty() {
            let machine = owner.name().to_owned();
            return Err(if left_out.iter().any(|(_, why)| why == NO_INSTANT) {
                of(VirtualBoxError::NoInstant { machine })
            } else {
                Error::NoDisks { machine }
            });
        }
        Ok(OpenedDisks { taken, left_out })
    }

    fn check_choice(&self, description: &Description) -> Result<()> {
        let unknown = description.unknown(&self.request.capture.choice);
        if unknown.is_empty() {
            return Ok(());
        }
        Err(Error::NoSuchDisk {
            machine: description.summary.name.clone(),
            disks: unknown.into_iter().map(str::to_owned).collect(),
            present: description.disks.iter().map(|disk| disk.target.clone()).collect(),
        })
    }

    /// Why a disk is left out.
    fn why_not(&self, decision: Decision, said: &LoadedSettings, key: &str) -> Option<String> {
        match decision {
            Decision::Leave(why) => Some(why),
            // A disk that snapshots do not cover is inconsistent, even if the user names it.
            Decision::Take if self.condition.state() != MachineState::ShutOff => chain_of(&said.media, key)
                .last()
                .filter(|base| !base.kind.has_snapshots())
                .map(|_| NO_INSTANT.to_owned()),
            Decision::Take => None,
        }
    }

    /// Checks that the machine was not started and its images were not written.
    fn check_unchanged(&self, taken: &[ChosenDisk]) -> Result<()> {
        self.check_files(taken)?;
        let machine = self.request.machine;
        let now = machine.condition(&machine.read()?)?;
        match (&now, &self.condition) {
            (Condition::Unused { .. }, Condition::Unused { .. }) => Ok(()),
            (now, before) if now == before => Ok(()),
            _ => Err(self.changed(format!("it was off, and is {}", now.state()))),
        }
    }

    fn check_files(&self, taken: &[ChosenDisk]) -> Result<()> {
        for disk in taken {
            if let Some((path, change)) = disk.source.changes()?.first() {
                return Err(self.changed(format!("{} ({change})", path.display())));
            }
        }
        Ok(())
    }

    fn changed(&self, detail: String) -> Error {
        of(VirtualBoxError::Changed {
            machine: self.request.machine.name().to_owned(),
            detail,
        })
    }
}
