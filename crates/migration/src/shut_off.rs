//! The migration of a machine that is shut off: its disks are copied, and it is defined there.

use std::sync::mpsc::{Receiver as Inbox, RecvTimeoutError, channel};
use std::time::Duration;

use holdfast_block::{BlockDevice, error_text};
use holdfast_engine::{Interrupted, Job, StoppedTpm, Unit};
use holdfast_image::Image;
use holdfast_live_copy::{
    ConvergenceOptions, CopyDirector, MachineHandover, SenderState, StillSource, ThrottlePolicy, Unconverged,
};

use crate::complete::complete;
use crate::disk_copy::{DiskRun, copy_disk};
use crate::disks::{DiskCopies, MoveEvent, MoveOutcome};
use crate::error::{Error, Result};
use crate::far::{FarRequest, TpmContent};
use crate::image_file::ImageFile;
use crate::migration_tools::MigrationTools;
use crate::plan::{MigrationPlan, PlannedDisk};
use crate::report::{MigrationPhase, MigrationReport, PhaseClock, moved_disks};

const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Nothing waits for the disks of a machine that is shut off.
const FROZEN_MAX: Duration = Duration::from_secs(3600);
/// Attempts to seal the disks. Only a lost connection ends one.
const ATTEMPT_COUNT_MAX: u32 = 1000;

/// Moves a machine that is shut off. None of its disks is handed over before all are complete.
///
/// # Errors
/// The machine is still here. The copies of the disks can be continued.
pub fn migrate_shut_off(plan: &MigrationPlan, tools: &MigrationTools<'_>, job: Job<'_>) -> Result<MigrationReport> {
    plan.require_no_obstacles()?;
    let locked = plan.images.iter().map(ImageFile::open_at_rest);
    let _locked: Vec<Image> = locked.collect::<Result<_>>()?;
    let devices = plan.disks.iter().map(PlannedDisk::open);
    let devices: Vec<Box<dyn BlockDevice>> = devices.collect::<Result<_>>()?;
    let sources: Vec<StillSource<'_>> = devices.iter().map(|device| StillSource::new(device)).collect();
    let directors: Vec<CopyDirector> = plan.disks.iter().map(|_| CopyDirector::default()).collect();
    let outcome = MoveOutcome::default();
    let (events, inbox) = channel();
    let started = tools.clock.now();
    let mut report = std::thread::scope(|scope| {
        for (disk, source) in sources.iter().enumerate() {
            let (events, outcome, director) = (events.clone(), &outcome, &directors[disk]);
            scope.spawn(move || {
                let run = DiskRun {
                    disk,
                    source,
                    convergence: ConvergenceOptions {
                        frozen_max: FROZEN_MAX,
                        other_frozen: Duration::ZERO,
                        throttle: ThrottlePolicy::Never,
                        unconverged: Unconverged::GiveUp,
                    },
                    attempt_count_max: ATTEMPT_COUNT_MAX,
                    outcome,
                    director,
                };
                let result = Box::new(copy_disk(plan, tools, &run, &events, job));
                events.send(MoveEvent::Ended { disk, result }).ok();
            });
        }
        let mover = ShutOffMover {
            plan,
            tools,
            job,
            copies: DiskCopies::new(&directors),
            step: Step::Copying,
            times: PhaseClock::begin(started),
        };
        mover.run(&inbox, &outcome)
    })?;
    complete(plan, tools);
    report.duration = tools.clock.now().saturating_sub(started);
    Ok(report)
}

/// How far the copies are, which take the same steps together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// They are sent.
    Copying,
    /// They are sealed.
    Sealing,
    /// They are handed over.
    HandingOver,
}

struct ShutOffMover<'a> {
    plan: &'a MigrationPlan,
    tools: &'a MigrationTools<'a>,
    job: Job<'a>,
    copies: DiskCopies<'a>,
    step: Step,
    times: PhaseClock,
}

impl ShutOffMover<'_> {
    fn run(mut self, inbox: &Inbox<MoveEvent>, outcome: &MoveOutcome) -> Result<MigrationReport> {
        let moved = self.copy(inbox).and_then(|()| self.define());
        match moved {
            Ok(()) => {
                outcome.set(MachineHandover::Completed);
                if let Some(error) = self.copies.wait_for_ends(inbox, &*self.tools.clock) {
                    self.tools.observer.left(&error_text(&error));
                }
                Ok(MigrationReport {
                    disks: moved_disks(self.plan, self.copies.into_reports()),
                    phases: self.times.times,
                    attempt_count: 1,
                    ..MigrationReport::default()
                })
            }
            Err(error) => {
                outcome.set(MachineHandover::Failed);
                self.copies.revoke_freeze();
                self.copies.cancel();
                Err(error)
            }
        }
    }

    /// Copies all disks, and hands them over.
    fn copy(&mut self, inbox: &Inbox<MoveEvent>) -> Result<()> {
        self.tools.observer.phase(MigrationPhase::Disks);
        self.job.progress.phase("copying the disks", Unit::Bytes);
        self.job
            .progress
            .total(self.plan.disks.iter().map(|disk| disk.size_bytes).sum());
        while !self.are_handed_over() {
            match inbox.recv_timeout(LOOK_INTERVAL) {
                Ok(event) => self.handle(event)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => unreachable!("the caller holds a sender"),
            }
            if self.job.interrupt.is_requested() && self.step != Step::HandingOver {
                return Err(holdfast_engine::Error::from(Interrupted).into());
            }
        }
        self.times.end(MigrationPhase::Disks, self.tools.clock.now());
        Ok(())
    }

    fn are_handed_over(&self) -> bool {
        self.plan.disks.is_empty() || (self.step == Step::HandingOver && self.copies.are_owned_there())
    }

    fn handle(&mut self, event: MoveEvent) -> Result<()> {
        match event {
            MoveEvent::State { disk, state } => {
                self.copies.note_state(disk, state);
                match self.step {
                    Step::Copying if self.copies.are_armed() => {
                        self.step = Step::Sealing;
                        self.copies.request_freeze();
                    }
                    Step::HandingOver if state == SenderState::Armed => self.copies.seal_again(disk),
                    // A connection was lost: all seals are given up, until this copy has caught up.
                    Step::Sealing if state == SenderState::Resumable => {
                        self.step = Step::Copying;
                        self.copies.revoke_freeze();
                    }
                    _ => {}
                }
            }
            MoveEvent::Sealed { disk, note } => {
                self.copies.note_seal(disk, note);
                match self.step {
                    Step::HandingOver => self.copies.confirm(disk),
                    Step::Sealing if self.copies.are_sealed() => {
                        self.step = Step::HandingOver;
                        self.copies.confirm_all();
                    }
                    _ => {}
                }
            }
            MoveEvent::Ended { disk, result } => match *result {
                Ok(report) => self.copies.note_end(disk, report),
                Err(source) => {
                    return Err(Error::Disk {
                        disk: self.plan.disks[disk].target.clone(),
                        source: Box::new(source),
                    });
                }
            },
            _ => {}
        }
        Ok(())
    }

    fn define(&mut self) -> Result<()> {
        let machine = self.tools.control.machine(&self.plan.uuid);
        let machine = machine.map_err(holdfast_engine::Error::from)?;
        let tpm = StoppedTpm::read(&*machine, &*self.tools.clock);
        let tpm = tpm.map_err(|reason| Error::TpmState {
            machine: self.plan.machine.clone(),
            reason,
        })?;
        self.tools.far.ask(&FarRequest::Define {
            uuid: self.plan.uuid.clone(),
            configuration: self.plan.kept_configuration.clone(),
            history: self.plan.history.clone(),
            tpm: tpm.as_ref().map(TpmContent::of),
        })?;
        self.times.end(MigrationPhase::Define, self.tools.clock.now());
        Ok(())
    }
}
