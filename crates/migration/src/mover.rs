//! Directs a migration: events come in, and each is answered by the next steps.

mod end;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver as Inbox, RecvTimeoutError, Sender as Outbox};
use std::sync::{Arc, Mutex};
use std::thread::Scope;
use std::time::Duration;

use holdfast_block::error_text;
use holdfast_engine::{Interrupted, Job, Unit};
use holdfast_host::{ConfigurationLanguage, MigrationRequest, Switchover};
use holdfast_live_copy::{CopyDirector, LiftedRate, MachineHandover, SenderState};

use crate::disks::{DiskCopies, MachineStop, MoveEvent, MoveOutcome};
use crate::error::{Error, Result};
use crate::far::FarRequest;
use crate::memory_receiver::{MemoryDestination, SwitchoverDecision};
use crate::memory_relay::MemoryRelay;
use crate::memory_watch::{MemoryWatch, guest_speed};
use crate::migration_tools::RunningTools;
use crate::move_watch::{verify, wait_for_stop};
use crate::plan::MigrationPlan;
use crate::post_copy::PullSource;
use crate::report::{MigrationPhase, MigrationReport, PhaseClock, moved_disks};

/// Interval of looking for an interrupt.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// How long the receivers may take to answer that they own the disks, which takes milliseconds unless one of them has ended.
const HANDOVER_PATIENCE: Duration = Duration::from_secs(10);

/// How far a migration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The disks are copied.
    Disks,
    /// The memory is sent.
    Memory,
    /// The machine is stopped since this time.
    Stopped { since: Duration },
    /// The same, and the disks are being handed over since this time.
    HandingOver { since: Duration },
    /// The relay is open: the hypervisor decides where the machine runs.
    Opened,
    /// The stream was broken: the hypervisor resumes the machine here.
    Breaking { reason: BreakReason },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BreakReason {
    /// The machine was stopped for too long.
    Late,
    /// The migration ends.
    GivingUp,
}

/// What directs a migration, and the copies of its disks.
pub(crate) struct MoveSetup<'s, 'e, 'a> {
    pub(crate) plan: &'e MigrationPlan,
    pub(crate) tools: &'e RunningTools<'a>,
    pub(crate) job: Job<'e>,
    pub(crate) scope: &'s Scope<'s, 'e>,
    /// The socket here that ssh forwards to the hypervisor there.
    pub(crate) hypervisor: &'e Path,
    /// The socket here that ssh forwards to the socket for the memory there.
    pub(crate) onward: &'e Path,
    pub(crate) events: Outbox<MoveEvent>,
    /// Of the copies; none if the disks are pulled.
    pub(crate) directors: &'e [CopyDirector],
    /// The disks that are pulled.
    pub(crate) source: Option<&'e PullSource>,
}

pub(crate) struct Mover<'s, 'e, 'a> {
    plan: &'e MigrationPlan,
    tools: &'e RunningTools<'a>,
    job: Job<'e>,
    scope: &'s Scope<'s, 'e>,
    hypervisor: &'e Path,
    onward: &'e Path,
    events: Outbox<MoveEvent>,
    copies: DiskCopies<'e>,
    source: Option<&'e PullSource>,
    stage: Stage,
    relay: Option<MemoryRelay>,
    memory: Option<MemoryWatch>,
    /// Of this attempt.
    switchover: Arc<SwitchoverDecision>,
    attempt_count: u32,
    times: PhaseClock,
    /// Whether the hypervisor here has given the images up that are pulled.
    is_released: bool,
    /// Whether the other host has compared the files.
    is_verified: bool,
    /// Why it refuses the files; the machine cannot be handed over.
    unverified: Option<Error>,
    /// While the machine is stopped.
    lifted: Option<LiftedRate<'e>>,
    /// Ends the thread that watches the machine.
    watch_end: Arc<AtomicBool>,
}

impl<'s, 'e, 'a> Mover<'s, 'e, 'a> {
    pub(crate) fn new(setup: MoveSetup<'s, 'e, 'a>) -> Self {
        Self {
            plan: setup.plan,
            tools: setup.tools,
            job: setup.job,
            scope: setup.scope,
            hypervisor: setup.hypervisor,
            onward: setup.onward,
            events: setup.events,
            copies: DiskCopies::new(setup.directors),
            source: setup.source,
            stage: Stage::Disks,
            relay: None,
            memory: None,
            switchover: Arc::default(),
            attempt_count: 0,
            times: PhaseClock::begin(setup.tools.common.clock.now()),
            is_released: false,
            is_verified: false,
            unverified: None,
            lifted: None,
            watch_end: Arc::default(),
        }
    }

    /// Moves the machine. When this returns, the copies know how it has ended.
    pub(crate) fn run(mut self, inbox: &Inbox<MoveEvent>, outcome: &MoveOutcome) -> Result<MigrationReport> {
        // Other threads wait for this one. A fault here must not leave the machine stopped.
        let directed = catch_unwind(AssertUnwindSafe(|| self.direct(inbox)));
        if !matches!(directed, Ok(Ok(_))) {
            outcome.set(MachineHandover::Failed);
            self.give_up();
        }
        match directed.unwrap_or_else(|panic| resume_unwind(panic)) {
            Ok(memory_bytes) => {
                outcome.set(MachineHandover::Completed);
                let tools = &self.tools.common;
                if let Some(error) = self.copies.wait_for_ends(inbox, &*tools.clock) {
                    tools.observer.left(&error_text(&error));
                }
                Ok(self.report(memory_bytes))
            }
            Err(error) => Err(error),
        }
    }

    /// Directs the migration until the machine runs there. Returns the bytes of its memory.
    fn direct(&mut self, inbox: &Inbox<MoveEvent>) -> Result<u64> {
        if self.plan.disks.is_empty() || self.source.is_some() {
            self.begin_memory()?;
        } else {
            self.tools.common.observer.phase(MigrationPhase::Disks);
            self.job.progress.phase("copying the disks", Unit::Bytes);
            let sizes = self.plan.disks.iter().map(|disk| disk.size_bytes);
            self.job.progress.total(sizes.sum());
        }
        loop {
            let now = self.tools.common.clock.now();
            let patience = match self.stage {
                Stage::Stopped { since } => (since + self.tools.frozen_max).saturating_sub(now).min(LOOK_INTERVAL),
                _ => LOOK_INTERVAL,
            };
            match inbox.recv_timeout(patience) {
                Ok(event) => {
                    if let Some(memory_bytes) = self.handle(event)? {
                        return Ok(memory_bytes);
                    }
                }
                Err(RecvTimeoutError::Timeout) => self.look_at_memory()?,
                Err(RecvTimeoutError::Disconnected) => unreachable!("this thread holds a sender"),
            }
            self.keep_promise()?;
            self.heed_interrupt()?;
        }
    }

    /// Not while the machine is stopped: an output that blocks would extend that time.
    fn look_at_memory(&mut self) -> Result<()> {
        match &mut self.memory {
            Some(memory) if self.stage == Stage::Memory => memory.look(self.plan, self.tools, self.job.progress),
            _ => Ok(()),
        }
    }

    fn handle(&mut self, event: MoveEvent) -> Result<Option<u64>> {
        match event {
            MoveEvent::State { disk, state } => {
                self.copies.note_state(disk, state);
                if self.is_handing_over() && state == SenderState::Armed {
                    self.copies.seal_again(disk);
                }
                self.advance()?;
            }
            MoveEvent::Sealed { disk, note } => {
                self.copies.note_seal(disk, note);
                if self.is_handing_over() {
                    self.copies.confirm(disk);
                }
                self.permit_switchover();
                self.hand_over();
            }
            MoveEvent::Thawed if matches!(self.stage, Stage::Memory | Stage::Stopped { .. }) => {
                self.break_stream(BreakReason::Late);
            }
            MoveEvent::Stopped(stop) if self.stage == Stage::Memory => self.note_stop(stop)?,
            MoveEvent::Thawed | MoveEvent::Stopped(_) => {}
            // A thread of an earlier attempt was slow: what it has seen does not hold any more.
            MoveEvent::Released { attempt, .. } | MoveEvent::Verified { attempt, .. }
                if attempt != self.attempt_count => {}
            MoveEvent::Released { result: Ok(()), .. } => {
                self.is_released = true;
                self.hand_over();
                self.advance()?;
            }
            MoveEvent::Verified { result: Ok(()), .. } => {
                self.is_verified = true;
                self.unverified = None;
                self.hand_over();
                self.advance()?;
            }
            // QEMU there may open its disks later.
            MoveEvent::Verified {
                result: Err(error @ Error::Refused { .. }),
                ..
            } => self.unverified = Some(error),
            MoveEvent::Verified { result: Err(error), .. } | MoveEvent::Released { result: Err(error), .. } => {
                return Err(error);
            }
            MoveEvent::Started => self.times.end(MigrationPhase::Start, self.tools.common.clock.now()),
            MoveEvent::MemoryEnded(Ok(())) => return Ok(Some(self.moved())),
            MoveEvent::MemoryEnded(Err(error)) => return self.not_moved(error),
            MoveEvent::Ended { disk, result } => match *result {
                Ok(report) => self.copies.note_end(disk, report),
                Err(source) => {
                    return Err(Error::Disk {
                        disk: self.plan.disks[disk].target.clone(),
                        source: Box::new(source),
                    });
                }
            },
        }
        Ok(None)
    }

    fn note_stop(&mut self, stop: MachineStop) -> Result<()> {
        let since = match stop {
            MachineStop::WhileRunning { ran_at } => ran_at,
            MachineStop::WhilePaused { state } => {
                return Err(Error::Paused {
                    machine: self.plan.machine.clone(),
                    state,
                });
            }
        };
        self.lifted = Some(self.tools.common.rate.lift());
        self.times.end(MigrationPhase::Memory, since);
        self.stage = Stage::Stopped { since };
        self.copies.request_freeze();
        self.permit_switchover();
        self.await_release();
        if self.plan.disks.is_empty() {
            self.stage = Stage::HandingOver {
                since: self.tools.common.clock.now(),
            };
            self.advance()?;
        }
        Ok(())
    }

    /// The hypervisor may give up the disks when nothing more is read from them. Those that are pulled are read afterwards.
    fn permit_switchover(&self) {
        if matches!(self.stage, Stage::Stopped { .. }) && self.copies.are_sealed() {
            self.switchover.decide(Switchover::Continue);
        }
    }

    /// Hands the disks over when all are sealed, in the files that the hypervisor there has open.
    fn hand_over(&mut self) {
        let is_released = self.source.is_none() || self.is_released;
        if matches!(self.stage, Stage::Stopped { .. }) && self.is_verified && self.copies.are_sealed() && is_released {
            self.stage = Stage::HandingOver {
                since: self.tools.common.clock.now(),
            };
            self.copies.confirm_all();
        }
    }

    /// Takes the steps that the states of the copies permit.
    fn advance(&mut self) -> Result<()> {
        match self.stage {
            Stage::Disks if self.copies.are_armed() => self.begin_memory(),
            Stage::HandingOver { .. } if self.copies.are_owned_there() => {
                self.times.end(MigrationPhase::Seal, self.tools.common.clock.now());
                if let Some(relay) = &self.relay {
                    relay.open();
                }
                self.stage = Stage::Opened;
                self.await_start();
                self.tools.common.observer.phase(MigrationPhase::Start);
                self.job.progress.phase("waiting for the hypervisors", Unit::Items);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn begin_memory(&mut self) -> Result<()> {
        let tools = self.tools;
        if self.source.is_none() {
            self.times.end(MigrationPhase::Disks, tools.common.clock.now());
        }
        tools.common.observer.phase(MigrationPhase::Memory);
        self.attempt_count += 1;
        self.is_verified = self.plan.disks.is_empty();
        self.is_released = false;
        let paths: Vec<PathBuf> = self.plan.disks.iter().map(|disk| disk.path.clone()).collect();
        tools.common.far.ask(&match self.source {
            Some(_) => FarRequest::MakeOverlays {
                disks: self.plan.overlays(),
            },
            None => FarRequest::NameDisks { paths: paths.clone() },
        })?;
        let relay = MemoryRelay::listen(&tools.relay_socket, self.onward, Arc::clone(&tools.common.rate));
        let relay = relay.map_err(|source| Error::Relay {
            path: tools.relay_socket.clone(),
            source,
        })?;
        self.relay = Some(relay);
        self.memory = Some(MemoryWatch::begin(self.plan, tools, self.job.progress)?);
        self.stage = Stage::Memory;
        let plan = self.plan;
        let events = self.events.clone();
        let guest_speed = guest_speed(tools.throttle);
        let destination = match plan.language {
            ConfigurationLanguage::DomainXml => format!("qemu+unix:///system?socket={}", self.hypervisor.display()),
            ConfigurationLanguage::CommandLine => tools.common.pull.destination.clone(),
        };
        self.switchover = Arc::default();
        let receiver = MemoryDestination {
            plan,
            tools: &tools.common,
            socket: &tools.memory_socket,
            decision: Arc::clone(&self.switchover),
            events: Mutex::new(events.clone()),
        };
        self.scope.spawn(move || {
            let moved = tools.hypervisor.migrate(
                &plan.uuid,
                &MigrationRequest {
                    destination: &destination,
                    memory_socket: &tools.relay_socket,
                    configuration: &plan.configuration,
                    kept_configuration: &plan.kept_configuration,
                    guest_speed,
                    receiver: &receiver,
                },
            );
            events.send(MoveEvent::MemoryEnded(moved)).ok();
        });
        self.watch(paths);
        Ok(())
    }

    /// Waits, in other threads, until the machine is stopped, and until the other host has these files open.
    fn watch(&mut self, paths: Vec<PathBuf>) {
        let tools = self.tools;
        self.watch_end = Arc::default();
        let (events, end) = (self.events.clone(), Arc::clone(&self.watch_end));
        self.scope.spawn(move || {
            if let Some(stop) = wait_for_stop(tools, &end) {
                events.send(MoveEvent::Stopped(stop)).ok();
            }
        });
        if !self.is_verified {
            let (events, end) = (self.events.clone(), Arc::clone(&self.watch_end));
            let (uuid, attempt) = (self.plan.uuid.clone(), self.attempt_count);
            self.scope.spawn(move || {
                verify(tools, &uuid, &paths, &end, |result| {
                    events.send(MoveEvent::Verified { attempt, result }).ok();
                });
            });
        }
    }

    /// Asks the other host when the machine runs. libvirt reports the end only when it has ended the process here.
    fn await_start(&self) {
        if self.plan.language == ConfigurationLanguage::CommandLine {
            // The machine is started by a request.
            return;
        }
        let (events, tools, uuid) = (self.events.clone(), self.tools, self.plan.uuid.clone());
        self.scope.spawn(move || {
            if tools.common.far.ask(&FarRequest::AwaitStart { uuid }).is_ok() {
                events.send(MoveEvent::Started).ok();
            }
        });
    }

    /// The machine is resumed here, if it is stopped.
    fn break_stream(&mut self, reason: BreakReason) {
        self.watch_end.store(true, Ordering::Release);
        // Before the guest runs: a copy would take its writes for a fault of the tracker.
        self.copies.revoke_freeze();
        self.lifted = None;
        self.switchover.decide(Switchover::Cancel);
        if let Some(relay) = &self.relay {
            relay.break_off();
        }
        self.stage = Stage::Breaking { reason };
    }

    fn is_handing_over(&self) -> bool {
        matches!(self.stage, Stage::HandingOver { .. })
    }

    /// Waits, in another thread, until the hypervisor here has given up the images that are pulled.
    fn await_release(&self) {
        if let Some(source) = self.source {
            let (events, end) = (self.events.clone(), Arc::clone(&self.watch_end));
            let attempt = self.attempt_count;
            self.scope.spawn(move || match source.wait_for_release(&end) {
                Ok(false) => {}
                released => {
                    let result = released.map(drop);
                    events.send(MoveEvent::Released { attempt, result }).ok();
                }
            });
        }
    }

    /// Until the relay is open, the machine can be resumed here.
    fn keep_promise(&mut self) -> Result<()> {
        let now = self.tools.common.clock.now();
        match self.stage {
            Stage::Stopped { since } if now.saturating_sub(since) > self.tools.frozen_max => {
                self.break_stream(BreakReason::Late);
                self.tools.common.observer.stopped_too_long(now.saturating_sub(since));
                Ok(())
            }
            Stage::HandingOver { since } if now.saturating_sub(since) > HANDOVER_PATIENCE => {
                Err(Error::NotHandedOver {
                    machine: self.plan.machine.clone(),
                    host: self.tools.common.far.host().to_owned(),
                })
            }
            _ => Ok(()),
        }
    }

    fn frozen_too_long(&self) -> Error {
        Error::FrozenTooLong {
            machine: self.plan.machine.clone(),
            attempt_count: self.attempt_count,
            frozen_max_ms: self.tools.frozen_max.as_millis(),
        }
    }

    fn heed_interrupt(&mut self) -> Result<()> {
        let is_decided = matches!(self.stage, Stage::HandingOver { .. } | Stage::Opened);
        if self.job.interrupt.is_requested() && !is_decided {
            return Err(holdfast_engine::Error::from(Interrupted).into());
        }
        Ok(())
    }

    fn report(self, memory_bytes: u64) -> MigrationReport {
        let stopped = self
            .times
            .times
            .iter()
            .filter(|time| matches!(time.phase, MigrationPhase::Seal | MigrationPhase::Start));
        let stopped = stopped.map(|time| time.duration).sum();
        MigrationReport {
            disks: moved_disks(self.plan, self.copies.into_reports()),
            memory_bytes,
            phases: self.times.times,
            stopped,
            attempt_count: self.attempt_count,
            ..MigrationReport::default()
        }
    }
}
