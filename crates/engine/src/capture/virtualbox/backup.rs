//! `backup` of a machine of VirtualBox, as a story.

use std::time::Duration;

use holdfast_hardware::virtualbox::UNKNOWN_CONTROLLER;
use holdfast_hardware::{Dropped, Machine};
use holdfast_host::{Decision, Description, MachineState, MachineSummary};
use holdfast_repo::Repository;
use jiff::Timestamp;

use super::chain::{Admission, open_disk};
use super::frozen::{Frozen, delete_left};
use super::instant::{Backup, Instant, Taken};
use super::machine::{Condition, Said, targets};
use super::media::chain_of;
use super::of;
use super::request::{VirtualBoxBackup, VirtualBoxMemory, VirtualBoxReport, VirtualBoxWay};
use super::unchanged::Check;
use crate::capture::foreign_machine::Attached;
use crate::capture::images::choose_parent;
use crate::job::error::VirtualBoxError;
use crate::job::{Error, Job, Result, Unit};
use crate::machine::hooks::{HookCalls, of_snapshot};
use crate::machine::lock::{MachineLock, Work, place_digits};
use crate::repository::calendar::Calendar;
use crate::repository::name_conflict::{Claim, Claimant};
use crate::repository::open::snapshots;

/// Why a disk of a machine that runs is left out whose writes go to the image whatever snapshots there are.
const NO_INSTANT: &str = "a snapshot of VirtualBox leaves such a disk alone, and the machine runs";

/// Backs up a machine of VirtualBox.
///
/// # Errors
/// A machine that is harmed by nothing: whatever goes wrong, it runs on if it was running, and a snapshot of VirtualBox's that was taken is
/// deleted again.
pub fn back_up_virtualbox(
    repository: &Repository,
    request: VirtualBoxBackup<'_>,
    job: Job<'_>,
) -> Result<VirtualBoxReport> {
    let machine = request.machine;
    let unasked = MachineSummary {
        name: machine.name().to_owned(),
        uuid: machine.uuid().to_owned(),
        state: MachineState::Between,
    };
    let (journal, patience) = (request.journal.as_ref(), (Work::Backup, request.patience));
    let _lock = MachineLock::take(journal, &unasked, patience, (request.now)(), job)?;
    let summary = machine.describe()?.summary;
    let (hooks, listed) = (request.hooks.clone(), request.name.to_string());
    let calls = HookCalls::new(&hooks, &listed, &summary, request.run, job);
    calls.around(
        || back_up_locked(repository, request, &calls, job),
        |report| of_snapshot(&report.backup.snapshot),
    )
}

fn back_up_locked(
    repository: &Repository,
    request: VirtualBoxBackup<'_>,
    hooks: &HookCalls<'_>,
    job: Job<'_>,
) -> Result<VirtualBoxReport> {
    let machine = request.machine;
    let mut said = machine.read()?;
    let place = place_digits(request.journal.as_ref());
    let of_place = (&said.settings.snapshots[..], Some(&place[..]));
    if let Some(manager) = machine.place().manager()
        && !delete_left(manager, machine, of_place, job.progress).is_empty()
    {
        said = machine.read()?;
    }
    // A disk among it is not backed up.
    let disks = |dropped: &&Dropped| dropped.what.starts_with(UNKNOWN_CONTROLLER);
    for dropped in said.dropped.iter().filter(disks) {
        let message = format!("{}: {} is left out: {}", machine.name(), dropped.what, dropped.why);
        job.progress.warning(&message);
    }
    let condition = machine.condition(&said)?;
    let manifests = snapshots(repository, job.progress)?;
    let claim = Claim {
        name: request.name.as_str(),
        claimant: Claimant::Machine(machine.uuid()),
        continuation: request.continuation,
    };
    let calendar = Calendar::new(repository, &request.zone, job.progress);
    let granted = claim.check(&manifests, calendar, job.progress)?;
    let parent = choose_parent(&request.parent, calendar, &manifests, &granted)?;
    job.interrupt.check()?;
    let backup = Backup {
        repository,
        request,
        parent,
        note: granted.note,
        condition,
        hooks,
        job,
    };
    match (backup.condition.state(), &backup.condition) {
        (MachineState::ShutOff, _) => backup.read_images(&said),
        (_, Condition::UsedBy(living)) => Err(of(VirtualBoxError::InUse {
            machine: machine.name().to_owned(),
            process: living.process,
            program: living.words.first().cloned().unwrap_or_default(),
            why_not: match machine.place().manager() {
                Some(_) => "does not know it",
                None => "is not there",
            },
        })),
        (MachineState::Running | MachineState::Paused, _) => backup.read_frozen(&said),
        (_, Condition::Told(state)) => Err(of(VirtualBoxError::State {
            machine: machine.name().to_owned(),
            word: state.word().to_owned(),
        })),
        _ => Err(Error::MachineBetween {
            machine: machine.name().to_owned(),
        }),
    }
}

/// The disks of a machine, as they were chosen.
struct Opened {
    taken: Vec<Taken>,
    /// Those that are left out, and why.
    left_out: Vec<(String, String)>,
}

impl Backup<'_> {
    /// A machine that is off: as long as nothing changes, its images are of one instant.
    fn read_images(&self, said: &Said) -> Result<VirtualBoxReport> {
        let machine = self.request.machine;
        if let Condition::Unused { is_certain } = self.condition {
            self.job.progress.note(&format!(
                "VBoxManage cannot be asked whether {} runs: no process {} its images open for writing, so it is taken to be off",
                machine.name(),
                if is_certain { "has" } else { "that can be seen has" }
            ));
        }
        let Opened { taken, left_out } = self.open(&said.machine, said)?;
        let memory = self.saved_memory(said)?;
        let time = (self.request.now)();
        let check: Check<'_> = Box::new(|| self.check_unchanged(&taken));
        let instant = Instant {
            text: &said.text,
            machine: &said.machine,
            time,
            way: VirtualBoxWay::Images,
            nvram: said.settings.nvram.as_deref(),
            memory,
            consistency: match (memory, &said.settings.state_file) {
                (Some(_), _) => "memory",
                (None, Some(_)) => "crash",
                (None, None) => "shut off",
            },
        };
        let stored = self.store(&instant, &taken, check)?;
        let reason = if said.settings.state_file.is_some() {
            "it is saved"
        } else {
            "it is shut off"
        };
        Ok(VirtualBoxReport {
            way: VirtualBoxWay::Images,
            reason: reason.to_owned(),
            left_out,
            ..stored.report(taken)
        })
    }

    /// The file with the memory of a machine that is saved. Without it the machine starts from its disks, as after a crash.
    fn saved_memory<'s>(&self, said: &'s Said) -> Result<Option<&'s str>> {
        let machine = self.request.machine;
        let Some(file) = said.settings.state_file.as_deref() else {
            return Ok(None);
        };
        let admission = Admission::new(machine, &self.request.allowed);
        if self.beside(Some(file), &admission)?.is_some() {
            return Ok(Some(file));
        }
        self.job.progress.warning(&format!(
            "{} is saved, and the file with its memory is not there: {}; its disks are stored as after a crash",
            machine.name(),
            machine.file(file).display()
        ));
        Ok(None)
    }

    /// A machine that runs: a snapshot holds what is read.
    fn read_frozen(&self, before: &Said) -> Result<VirtualBoxReport> {
        let machine = self.request.machine;
        let manager = machine.place().manager().ok_or_else(|| {
            of(VirtualBoxError::NoManager {
                what: "a machine that runs",
            })
        })?;
        // What cannot be read at all is found out before the machine is disturbed.
        drop(self.open(&before.machine, before)?);
        let state = self.condition.state();
        let start = self.job.clock.now();
        self.job
            .progress
            .phase(&format!("taking a snapshot of {}", machine.name()), Unit::Items);
        let frozen = self.hooks.pre_freeze(state).and_then(|()| {
            let place = place_digits(self.request.journal.as_ref());
            Frozen::take(manager, machine, (&place, self.request.run, state), self.job.progress)
        });
        let taken_in = self.job.clock.now().saturating_sub(start);
        let time = (self.request.now)();
        self.hooks.post_thaw(state, None);
        let frozen = frozen?;
        let stored = self.store_frozen(before, &frozen, (time, taken_in));
        // A snapshot that stays is told as a warning; what was read is good all the same.
        let remains = frozen.end();
        Ok(VirtualBoxReport { remains, ..stored? })
    }

    fn store_frozen(
        &self,
        before: &Said,
        frozen: &Frozen<'_>,
        (time, taken_in): (Timestamp, Duration),
    ) -> Result<VirtualBoxReport> {
        let machine = self.request.machine;
        self.job.interrupt.check()?;
        let said = machine.read()?;
        let then = machine.read_at(&said, frozen.snapshot())?;
        let images = |machine: &Machine| machine.disks.iter().map(|disk| disk.key.clone()).collect::<Vec<_>>();
        if images(&then) != images(&before.machine) {
            return Err(Error::from(holdfast_host::Error::Busy {
                machine: machine.name().to_owned(),
                holder: "somebody who has put it onto other images just now".to_owned(),
            }));
        }
        let Opened { taken, left_out } = self.open(&then, &said)?;
        let kept = said
            .settings
            .snapshots
            .iter()
            .find(|snapshot| snapshot.uuid == frozen.snapshot());
        let memory = kept.and_then(|snapshot| snapshot.state_file.as_deref());
        let memory = memory.filter(|_| self.request.memory == VirtualBoxMemory::Store);
        let way = VirtualBoxWay::Snapshot { taken_in };
        let instant = Instant {
            text: &before.text,
            machine: &before.machine,
            time,
            way,
            nvram: kept
                .and_then(|snapshot| snapshot.nvram.as_deref())
                .or(before.settings.nvram.as_deref()),
            memory,
            consistency: if memory.is_some() { "memory" } else { "crash" },
        };
        let check: Check<'_> = Box::new(|| self.check_files(&taken));
        let stored = self.store(&instant, &taken, check)?;
        let state = self.condition.state();
        Ok(VirtualBoxReport {
            way,
            reason: format!("it is {state}"),
            left_out,
            ..stored.report(taken)
        })
    }

    /// Opens the disks that are wanted, with the images that `machine` has; why others are left out.
    fn open(&self, machine: &Machine, said: &Said) -> Result<Opened> {
        let owner = self.request.machine;
        let description = owner.description(machine, said, &self.condition);
        self.check_choice(&description)?;
        let admission = Admission::new(owner, &self.request.allowed);
        let (mut taken, mut left_out) = (Vec::new(), Vec::new());
        let decisions = description.decide(&self.request.choice);
        let disks = machine.disks.iter().zip(targets(machine)).zip(decisions);
        for (number, ((disk, target), decision)) in disks.enumerate() {
            if let Some(why) = self.why_not(decision, said, &disk.key) {
                left_out.push((target, why));
                continue;
            }
            let source = open_disk(owner, said, (&target, &disk.key), &admission)?;
            source.tell_of_contradictions(self.job.progress)?;
            taken.push(Taken {
                attached: Attached {
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
        Ok(Opened { taken, left_out })
    }

    fn check_choice(&self, description: &Description) -> Result<()> {
        let unknown = description.unknown(&self.request.choice);
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
    fn why_not(&self, decision: Decision, said: &Said, key: &str) -> Option<String> {
        match decision {
            Decision::Leave(why) => Some(why),
            // Nobody who asks for it by name gets what is written while it is read.
            Decision::Take if self.condition.state() != MachineState::ShutOff => chain_of(&said.media, key)
                .last()
                .filter(|base| !base.kind.has_snapshots())
                .map(|_| NO_INSTANT.to_owned()),
            Decision::Take => None,
        }
    }

    /// Nobody has started the machine meanwhile, nor written its images.
    fn check_unchanged(&self, taken: &[Taken]) -> Result<()> {
        self.check_files(taken)?;
        let machine = self.request.machine;
        let now = machine.condition(&machine.read()?)?;
        match (&now, &self.condition) {
            (Condition::Unused { .. }, Condition::Unused { .. }) => Ok(()),
            (now, before) if now == before => Ok(()),
            _ => Err(self.changed(format!("it was off, and is {}", now.state()))),
        }
    }

    fn check_files(&self, taken: &[Taken]) -> Result<()> {
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
