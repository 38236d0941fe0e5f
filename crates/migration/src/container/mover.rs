//! The migration of a container.

use std::path::PathBuf;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_engine::{IdleContainer, Job, Relocation, is_left_by_killed_process};
use holdfast_image::ImageId;
use holdfast_live_copy::{CommandFreezer, Freezer as _};

use super::far::{ArrivalState, ContainerRequest, FarContainers, TOKEN_FILE};
use super::move_tools::{ContainerMove, ContainerMoveTools};
use super::report::{ContainerMoveReport, ContainerPhase, ContainerRound};
use super::rounds::{CopiedFiles, Holds};
use crate::error::{Error, Result};
use crate::migration_tools::FormerDisks;

/// How long the other host is asked after its answer was lost.
const PATIENCE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_secs(1);

/// Migrates a container.
///
/// # Errors
/// Unless the error says otherwise, the container is used here as before, and the copies can be continued.
pub fn migrate_container(
    request: &ContainerMove<'_>,
    tools: &ContainerMoveTools<'_>,
    job: Job<'_>,
) -> Result<ContainerMoveReport> {
    request.plan.require_no_obstacles(request.place)?;
    let mut mover = ContainerMover {
        request,
        tools,
        job,
        started: tools.clock.now(),
        since: tools.clock.now(),
        phases: Vec::new(),
        stopped_at: None,
    };
    if request.plan.is_there {
        return mover.finish(Vec::new(), None);
    }
    let files = mover.begin()?;
    if let Some(stopper) = tools.stopper {
        return mover.move_used(files, stopper);
    }
    let idle = IdleContainer::lock(request.place)?;
    mover.move_idle(files, &idle, &[])
}

struct ContainerMover<'a> {
    request: &'a ContainerMove<'a>,
    tools: &'a ContainerMoveTools<'a>,
    job: Job<'a>,
    started: Duration,
    /// Begin of the current phase.
    since: Duration,
    phases: Vec<(ContainerPhase, Duration)>,
    stopped_at: Option<Duration>,
}

impl<'a> ContainerMover<'a> {
    /// Prepares the folder there.
    fn begin(&self) -> Result<CopiedFiles<'a>> {
        let plan = self.request.plan;
        let token = ImageId::random().map_err(holdfast_engine::Error::from)?.to_string();
        let prepared = self.tools.far.prepare(&plan.folder, &plan.id, &token)?;
        let here = std::fs::read_to_string(prepared.staging.join(TOKEN_FILE));
        let is_same_folder = plan
            .folder
            .canonicalize()
            .is_ok_and(|folder| folder == self.request.place.folder);
        if is_same_folder && here.is_ok_and(|here| here == token) {
            return Err(Error::Obstacles {
                machine: self.request.place.folder.display().to_string(),
                obstacles: vec![format!(
                    "both hosts have the same storage at {}: unmount it here, and mount it there",
                    plan.folder.display()
                )],
            });
        }
        Ok(CopiedFiles::new(self.request, self.tools, prepared))
    }

    /// Moves a mounted container.
    fn move_used(&mut self, mut files: CopiedFiles<'a>, stopper: &CommandFreezer) -> Result<ContainerMoveReport> {
        let mut holds = Holds::default();
        self.tools.observer.phase(ContainerPhase::Layers);
        if let Err(error) = files.copy_used(&mut holds, self.job).and_then(|()| self.sync_here()) {
            holds.release(self.request.place, self.job);
            return Err(error);
        }
        self.end(ContainerPhase::Layers);
        self.stopped_at = Some(self.tools.clock.now());
        self.tools.observer.phase(ContainerPhase::Stop);
        let stopped = stopper.freeze().map_err(|error| Error::Stop {
            reason: match error {
                holdfast_live_copy::Error::Command { reason, .. } => reason,
                error => error_text(&error),
            },
        });
        let lifted = self.tools.rate.lift();
        let moved = stopped.and_then(|()| {
            self.end(ContainerPhase::Stop);
            let idle = IdleContainer::lock(self.request.place)?;
            self.move_idle(files, &idle, &holds.ids())
        });
        drop(lifted);
        match moved {
            Ok(report) => {
                if let Err(error) = stopper.leave_frozen() {
                    self.tools.observer.left(&error_text(&error));
                }
                Ok(report)
            }
            // It may be used there.
            Err(error @ Error::ContainerUnresolved { .. }) => {
                stopper.leave_frozen().ok();
                Err(error)
            }
            Err(error) => {
                if let Err(error) = stopper.thaw() {
                    self.tools
                        .observer
                        .left(&format!("the container is not mounted here: {}", error_text(&error)));
                }
                holds.release(self.request.place, self.job);
                Err(error)
            }
        }
    }

    /// Writes out what can be written before the programs are stopped.
    fn sync_here(&self) -> Result<()> {
        let Some(mounted) = &self.request.plan.mounted else {
            return Ok(());
        };
        let failed = |source| holdfast_engine::Error::File {
            action: "sync",
            path: mounted.point.clone(),
            source,
        };
        let folder = std::fs::File::open(&mounted.point).map_err(failed)?;
        rustix::fs::syncfs(&folder).map_err(|error| failed(error.into()))?;
        Ok(())
    }

    /// Moves a container that nothing uses. `holds` are snapshots of this migration.
    fn move_idle(
        &mut self,
        mut files: CopiedFiles<'a>,
        idle: &IdleContainer<'_>,
        holds: &[ImageId],
    ) -> Result<ContainerMoveReport> {
        // By an attempt that was ended before the container was there.
        idle.unmark()?;
        let tree = idle.layers()?.tree().clone();
        let snapshots = tree.snapshots().into_iter();
        let left = snapshots.filter(|(_, entry)| is_left_by_killed_process(entry, self.tools.processes));
        let hidden: Vec<ImageId> = left.map(|(id, _)| id).chain(holds.iter().copied()).collect();
        idle.hide_snapshots(&hidden)?;
        self.copy_rest(&mut files, idle)?;
        let layers = idle.layers()?;
        let expected = files.expected(layers.tree());
        drop(layers);
        files.store_documents(&idle.documents()?)?;
        self.job.interrupt.check().map_err(holdfast_engine::Error::from)?;
        idle.mark(&Relocation {
            target: self.request.plan.address.clone(),
            mount_point: self.request.plan.mount.as_ref().map(|mount| mount.point.clone()),
            transport: self
                .request
                .plan
                .mount
                .as_ref()
                .map_or_else(Default::default, |mount| mount.transport),
        })?;
        let plan = self.request.plan;
        let completed = self.tools.far.complete(&plan.folder, &plan.id, expected);
        let former = match completed {
            Ok(former) => former,
            Err(Error::FarHost { host, reason }) => match self.ask_state() {
                Ok(ArrivalState::Complete) => None,
                Ok(_) => return Err(self.stay(idle, Error::FarHost { host, reason })),
                Err(_) => return Err(self.unresolved(reason)),
            },
            Err(error) => return Err(self.stay(idle, error)),
        };
        self.end(ContainerPhase::Complete);
        if let Err(error) = self.mount_there() {
            return Err(self.take_back(idle, former, error));
        }
        Ok(self.finish_started(files.rounds, former))
    }

    /// Copies what was not copied yet.
    fn copy_rest(&mut self, files: &mut CopiedFiles<'a>, idle: &IdleContainer<'_>) -> Result<()> {
        let start = self.tools.clock.now();
        let deadline = self.stopped_at.map(|stopped_at| stopped_at + self.request.frozen_max);
        let phase = match deadline {
            Some(_) => ContainerPhase::LastPass,
            None => ContainerPhase::Layers,
        };
        self.tools.observer.phase(phase);
        let layers = idle.layers()?;
        let copied = files.copy_layers(&layers, deadline, self.job);
        let is_late = deadline.is_some_and(|deadline| self.tools.clock.now() >= deadline);
        // An interruption of the user ends in the same error as one by the deadline.
        if is_late && !self.job.interrupt.is_requested() {
            return Err(Error::FrozenTooLong {
                machine: self.request.place.folder.display().to_string(),
                attempt_count: 1,
                frozen_max_ms: self.request.frozen_max.as_millis(),
            });
        }
        let [bytes, sent_bytes] = copied?;
        files.rounds.push(ContainerRound {
            bytes,
            sent_bytes,
            paused: Duration::ZERO,
            duration: self.tools.clock.now().saturating_sub(start),
        });
        self.end(phase);
        Ok(())
    }

    fn mount_there(&mut self) -> Result<()> {
        let Some(mount) = &self.request.plan.mount else {
            return Ok(());
        };
        self.tools.observer.phase(ContainerPhase::Mount);
        let request = ContainerRequest::Mount {
            folder: self.request.plan.folder.clone(),
            mount: mount.clone(),
        };
        match self.tools.far.request(&request) {
            // The answer was lost.
            Err(Error::FarHost { .. }) if self.ask_state()? == ArrivalState::InUse => {}
            Err(Error::FarHost { .. }) => (self.tools.reach_far_again)()?.request(&request)?,
            mounted => mounted?,
        }
        self.end(ContainerPhase::Mount);
        Ok(())
    }

    /// The container is used here again. Returns `error`.
    fn stay(&self, idle: &IdleContainer<'_>, error: Error) -> Error {
        match idle.unmark() {
            Ok(()) => error,
            Err(failure) => self.unresolved(error_text(&failure)),
        }
    }

    /// The container is complete there, but cannot be mounted.
    fn take_back(&self, idle: &IdleContainer<'_>, former: Option<PathBuf>, error: Error) -> Error {
        let reverted = self.request(&ContainerRequest::Revert {
            folder: self.request.plan.folder.clone(),
            id: self.request.plan.id.clone(),
            former,
        });
        match reverted {
            Ok(()) => self.stay(idle, error),
            Err(_) => self.unresolved(error_text(&error)),
        }
    }

    fn unresolved(&self, reason: String) -> Error {
        Error::ContainerUnresolved {
            container: self.request.place.folder.clone(),
            target: self.request.plan.address.clone(),
            reason,
        }
    }

    /// Asks for something that may be repeated after a lost connection.
    fn request(&self, request: &ContainerRequest) -> Result<()> {
        match self.tools.far.request(request) {
            Err(Error::FarHost { .. }) => (self.tools.reach_far_again)()?.request(request),
            done => done,
        }
    }

    /// What is there, after an answer was lost.
    fn ask_state(&self) -> Result<ArrivalState> {
        let until = self.tools.clock.now() + PATIENCE;
        loop {
            let state = (self.tools.reach_far_again)().and_then(|far| self.settled_state(&far));
            match state {
                Err(_) if self.tools.clock.now() < until => self.tools.clock.sleep(INTERVAL),
                state => return state,
            }
        }
    }

    /// What is there for good.
    ///
    /// # Errors
    /// The host does not answer, or the process of the lost connection may still give the folder its name.
    fn settled_state(&self, far: &FarContainers) -> Result<ArrivalState> {
        let plan = self.request.plan;
        match far.state(&plan.folder, &plan.id)? {
            state @ (ArrivalState::Complete | ArrivalState::InUse) => return Ok(state),
            ArrivalState::Absent | ArrivalState::Former => {}
        }
        // It gets the lock which that process holds until it has ended.
        far.prepare(&plan.folder, &plan.id, "")?;
        far.state(&plan.folder, &plan.id)
    }

    /// The container is there by an earlier attempt: does what is left to do.
    fn finish(&mut self, rounds: Vec<ContainerRound>, former: Option<PathBuf>) -> Result<ContainerMoveReport> {
        let plan = self.request.plan;
        if self.tools.far.state(&plan.folder, &plan.id)? == ArrivalState::Complete {
            self.mount_there()?;
        }
        Ok(self.finish_started(rounds, former))
    }

    /// The container is mounted there, if it is to be.
    fn finish_started(&mut self, rounds: Vec<ContainerRound>, former: Option<PathBuf>) -> ContainerMoveReport {
        if let Some(command) = self.request.start_command {
            self.tools.observer.phase(ContainerPhase::Start);
            let command = command.to_owned();
            if let Err(error) = self.request(&ContainerRequest::Run { command }) {
                self.tools.observer.left(&format!(
                    "the container is there, but its programs were not started: {}",
                    error_text(&error)
                ));
            }
            self.end(ContainerPhase::Start);
        }
        let now = self.tools.clock.now();
        let stopped = self.stopped_at.map(|stopped_at| now.saturating_sub(stopped_at));
        ContainerMoveReport {
            rounds,
            phases: std::mem::take(&mut self.phases),
            stopped,
            mount_point: self.request.plan.mount.as_ref().map(|mount| mount.point.clone()),
            former: self.keep_or_delete(former),
            duration: now.saturating_sub(self.started),
        }
    }

    /// Deletes a former container there if that is wanted. Returns its folder otherwise.
    fn keep_or_delete(&self, former: Option<PathBuf>) -> Option<PathBuf> {
        let folder = former?;
        if self.request.former == FormerDisks::Keep {
            return Some(folder);
        }
        let deleted = self.request(&ContainerRequest::DeleteFormer {
            folder: folder.clone(),
            id: self.request.plan.id.clone(),
        });
        match deleted {
            Ok(()) => None,
            Err(error) => {
                self.tools.observer.left(&error_text(&error));
                Some(folder)
            }
        }
    }

    fn end(&mut self, phase: ContainerPhase) {
        let now = self.tools.clock.now();
        self.phases.push((phase, now.saturating_sub(self.since)));
        self.since = now;
    }
}
