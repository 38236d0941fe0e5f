//! The machines that are frozen or paused while host snapshots are cut, each with its own watchdog.

use std::ffi::OsString;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use holdfast_host::provider::ProviderResult;
use holdfast_host::qemu::RunId;
use holdfast_host::qemu::memory::Memory;
use holdfast_host::qmp::{QmpCommand, wake_with_retries};
use holdfast_host::{Description, Machine, MachineState};
use jiff::Timestamp;
use serde_json::Value;

use super::MachinePlaces;
use super::guest_report::GuestReport;
use super::subject::{CutMode, DiskCoverage};
use crate::job::{Job, Result};
use crate::machine::quiesce::{
    AgentAccess, AgentCheck, FREEZE_DEADLINE, FreezeState, Guest, Quiesce, Quiesced, RunState,
};
use crate::machine::run_journal::{JournalPlace, Phase, RunNote, RunRecord};
use crate::machine::state::memory::MemoryOptions;
use crate::machine::watchdog::Guard;

/// A pause takes milliseconds; after this time the watchdog ends it.
pub(super) const PAUSE_DEADLINE: Duration = Duration::from_secs(10);
/// Machines that are frozen or paused at the same time.
const AT_ONCE: usize = 64;

/// A machine to freeze or pause.
pub struct GuestRequest<'a> {
    /// The machine, at its hypervisor.
    pub machine: &'a dyn Machine,
    /// Its description.
    pub description: Description,
    /// Whether its file systems are frozen.
    pub quiesce: Quiesce,
    /// Where its disks are.
    pub places: MachinePlaces,
    /// Whether it is paused in any case, because more than its disks belongs to the point in time.
    pub has_to_stop: bool,
    /// How its memory is captured; none if it is not. Only one machine's memory can be captured.
    pub memory: Option<MemoryOptions>,
    /// The command that starts the watchdog of its run.
    pub watchdog: Option<Vec<OsString>>,
    /// Where its run is noted for the cleanup after a kill; none if it is not noted.
    pub journal: Option<JournalPlace>,
    /// A random number that identifies the run.
    pub run: u32,
}

/// When the providers made the snapshots, and how long that took.
#[derive(Default)]
pub(super) struct GuestPoint {
    pub(super) time: Timestamp,
    pub(super) cut: Duration,
}

/// The machines of a request, each with a watchdog.
pub(super) struct Sessions<'a> {
    all: Vec<Session<'a>>,
    mode: CutMode,
    coverage: DiskCoverage,
    job: Job<'a>,
}

/// Result of a point in time.
pub(super) struct FrozenGuests {
    /// Result of the providers.
    pub(super) made: ProviderResult<()>,
    /// What happened to the machines, in the order of the request.
    pub(super) guests: Vec<GuestReport>,
    /// The memory of one machine, if requested.
    pub(super) memory: Option<Memory>,
}

/// A machine with its watchdog.
pub(super) struct Session<'a> {
    pub(super) guest: &'a GuestRequest<'a>,
    pub(super) guard: Guard,
    note: Option<RunNote>,
    asked: Option<AgentCheck>,
    quiescence: Option<FreezeState>,
    pub(super) stopped: Option<Duration>,
    pub(super) report: GuestReport,
    failure: Option<crate::Error>,
    /// It runs and has a watchdog: only such a machine is frozen or paused.
    is_watched: bool,
}

impl<'a> Sessions<'a> {
    /// Starts watchdogs and notes the runs; nothing is changed yet.
    pub(super) fn begin(
        guests: &'a [GuestRequest<'a>],
        time: Timestamp,
        mode: CutMode,
        coverage: DiskCoverage,
        job: Job<'a>,
    ) -> Result<Self> {
        let mut all = Vec::new();
        for chunk in guests.chunks(AT_ONCE) {
            // Each watchdog has to connect before it is ready.
            let begun: Vec<Result<Session<'a>>> = std::thread::scope(|scope| {
                let begun: Vec<_> = chunk
                    .iter()
                    .map(|guest| scope.spawn(move || Session::begin(guest, time, job)))
                    .collect();
                begun
                    .into_iter()
                    .map(|one| one.join().expect("it does not panic"))
                    .collect()
            });
            for (one, guest) in begun.into_iter().zip(chunk) {
                let can_do_without = guest.quiesce != Quiesce::Require
                    && !guest.has_to_stop
                    && mode == CutMode::AtOnce
                    && guest.memory.is_none();
                all.push(match one {
                    Ok(session) => session,
                    // A machine that cannot be queried must not prevent the point in time of the others.
                    Err(error) if can_do_without => Session::left_alone(guest, &error, job),
                    Err(error) => return Err(error),
                });
            }
        }
        Ok(Self {
            all,
            mode,
            coverage,
            job,
        })
    }

    /// Freezes or pauses the machines, calls `cut` with their expected reports, then resumes and thaws them.
    ///
    /// A machine whose memory is captured pauses at the end of the capture; the others are frozen or paused only then.
    pub(super) fn hold_still(
        mut self,
        cut: &mut dyn FnMut(&[GuestReport]) -> ProviderResult<()>,
    ) -> Result<FrozenGuests> {
        let job = self.job;
        let with_memory = self.all.iter().position(|session| session.wishes_memory().is_some());
        let (mut made, mut memory) = (None, None);
        if let Some(index) = with_memory {
            let mut session = self.all.remove(index);
            let wish = session.wishes_memory().expect("it was chosen by that").clone();
            let before = session.report.clone();
            let sent = session.send_memory(&wish, job, &mut || {
                made = self.cut_still(&mut |reports| {
                    let mut all = reports.to_vec();
                    all.insert(index, before.clone());
                    cut(&all)
                });
            });
            match sent {
                Ok(sent) => memory = Some(sent),
                Err(error) => session.failure = Some(error),
            }
            self.all.insert(index, session);
        } else {
            made = self.cut_still(cut);
        }
        let (mode, coverage) = (self.mode, self.coverage);
        self.at_once(|session| session.look_again(mode, coverage, job));
        let mut failure = None;
        let mut guests = Vec::new();
        for session in self.all {
            let (report, failed) = session.end();
            guests.push(report);
            failure = failure.or(failed);
        }
        match (failure, made) {
            (None, Some(made)) => Ok(FrozenGuests { made, guests, memory }),
            (Some(error), _) => Err(error),
            (None, None) => unreachable!("what was not cut has failed"),
        }
    }

    /// Freezes and pauses, cuts if that succeeded, then resumes.
    fn cut_still(&mut self, cut: &mut dyn FnMut(&[GuestReport]) -> ProviderResult<()>) -> Option<ProviderResult<()>> {
        let (job, mode) = (self.job, self.mode);
        self.at_once(Session::ask);
        if !self.has_failed() {
            // The machines share this time: the first frozen machine waits for the last.
            let until = job.clock.now() + FREEZE_DEADLINE;
            self.at_once(|session| session.freeze(until, job));
        }
        if !self.has_failed() {
            self.at_once(|session| session.stop(mode, job));
        }
        let made = if self.has_failed() {
            None
        } else {
            let reports: Vec<GuestReport> = self.all.iter().map(Session::expected_report).collect();
            Some(cut(&reports))
        };
        self.at_once(|session| session.resume_and_thaw(job));
        made
    }

    fn has_failed(&self) -> bool {
        self.all.iter().any(|session| session.failure.is_some())
    }

    /// A slow machine keeps one thread busy, and does not delay the others.
    fn at_once(&mut self, work: impl Fn(&mut Session<'a>) + Sync) {
        let thread_count = self.all.len().min(AT_ONCE);
        let waiting = Mutex::new(self.all.iter_mut());
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
        std::thread::scope(|scope| {
            for _ in 0..thread_count {
                scope.spawn(|| {
                    while let Some(session) = next() {
                        work(session);
                    }
                });
            }
        });
    }
}

impl<'a> Session<'a> {
    fn begin(guest: &'a GuestRequest<'a>, time: Timestamp, job: Job<'a>) -> Result<Self> {
        let summary = &guest.description.summary;
        let runs = summary.state == MachineState::Running;
        let guard = Guard::start(guest.watchdog.as_deref().filter(|_| runs))?;
        let begin = |place: &JournalPlace| {
            let record = RunRecord {
                run: RunId(guest.run),
                machine: summary.name.clone(),
                uuid: summary.uuid.clone(),
                way: place.way.clone(),
                process: place.process.clone(),
                start_ms: time.as_millisecond(),
                phase: Phase::Freezing,
                was_running: runs,
                scratch: std::path::PathBuf::new(),
            };
            let noted = RunNote::begin(&place.folder, record);
            noted
                .map_err(|error| {
                    let message = format!("{}: not noted for holdfast doctor: {error}", summary.name);
                    job.progress.note(&message);
                })
                .ok()
        };
        let place = guest.journal.as_ref().filter(|_| runs);
        Ok(Self {
            guard,
            note: place.and_then(begin),
            asked: None,
            quiescence: None,
            stopped: None,
            failure: None,
            is_watched: runs,
            report: GuestReport {
                name: summary.name.clone(),
                uuid: summary.uuid.clone(),
                state: summary.state,
                quiesced: Quiesced::NotNeeded,
                paused: None,
                memory_bytes: None,
            },
            guest,
        })
    }

    /// A machine that is neither frozen nor paused, because it has no watchdog.
    fn left_alone(guest: &'a GuestRequest<'a>, error: &crate::Error, job: Job<'a>) -> Self {
        let summary = &guest.description.summary;
        job.progress.warning(&format!(
            "{} is not frozen for this: {error}; the snapshot is as after a power cut",
            summary.name
        ));
        Self {
            guest,
            guard: Guard::absent(),
            note: None,
            asked: None,
            quiescence: None,
            stopped: None,
            failure: None,
            is_watched: false,
            report: GuestReport {
                name: summary.name.clone(),
                uuid: summary.uuid.clone(),
                state: summary.state,
                quiesced: Quiesced::Failed(error.to_string()),
                paused: None,
                memory_bytes: None,
            },
        }
    }

    fn shown(&self) -> Guest<'a> {
        Guest {
            machine: self.guest.machine,
            shown: &self.guest.description.summary.name,
            quiesce: self.guest.quiesce,
        }
    }

    /// How its memory is to be captured; none for a machine that is shut off.
    fn wishes_memory(&self) -> Option<&MemoryOptions> {
        let has_memory = matches!(self.report.state, MachineState::Running | MachineState::Paused);
        self.guest.memory.as_ref().filter(|_| has_memory)
    }

    pub(super) fn runs(&self) -> bool {
        self.report.state == MachineState::Running
    }

    /// Asks the guest agent whether the file systems can be frozen.
    fn ask(&mut self) {
        if !self.is_watched {
            return;
        }
        match AgentCheck::of(self.shown(), AgentAccess::of(&self.guest.description)) {
            Ok(asked) => self.asked = Some(asked),
            Err(error) => self.failure = Some(error),
        }
    }

    fn freeze(&mut self, until: Duration, job: Job<'a>) {
        if let Some(asked) = self.asked.take() {
            let (quiescence, failure) = asked.freeze(self.shown(), until, &mut self.guard, job);
            self.quiescence = Some(quiescence);
            self.failure = failure;
        }
    }

    /// Pauses the machine if required. Frozen file systems do not cover everything that a guest writes to: swap,
    /// databases on raw disks, the boot partition. A machine that another process has paused is left alone.
    fn stop(&mut self, mode: CutMode, job: Job<'a>) {
        let has_to_stop = self.guest.has_to_stop || mode == CutMode::InTurn;
        if !self.is_watched || !has_to_stop {
            return;
        }
        match self.execute("query-status") {
            Ok(status) if status["running"] == true => {}
            Ok(_) => return,
            // Its state is unknown, so its disks could be of several points in time.
            Err(error) => {
                self.failure = Some(error);
                return;
            }
        }
        let stopped = self
            .guard
            .about_to_pause(PAUSE_DEADLINE)
            .and_then(|()| self.execute("stop"));
        self.stopped = Some(job.clock.now());
        self.failure = stopped.err();
    }

    fn execute(&self, command: &'static str) -> Result<Value> {
        let monitor = self.guest.machine.monitor();
        let answer = monitor.execute(&QmpCommand::new(command, Value::Null));
        Ok(answer.map_err(|source| holdfast_host::Error::Monitor {
            machine: self.report.name.clone(),
            source,
        })?)
    }

    /// The report for a machine while it is frozen or paused.
    fn expected_report(&self) -> GuestReport {
        let quiesced = match &self.quiescence {
            Some(FreezeState::Frozen {
                file_system_count,
                freeze,
                ..
            }) => Quiesced::Yes {
                file_system_count: *file_system_count,
                freeze: *freeze,
                frozen: Duration::ZERO,
            },
            Some(FreezeState::Not(quiesced) | FreezeState::HalfFrozen(quiesced)) => quiesced.clone(),
            None => self.report.quiesced.clone(),
        };
        GuestReport {
            quiesced,
            ..self.report.clone()
        }
    }

    /// Resumes and thaws the machine.
    fn resume_and_thaw(&mut self, job: Job<'a>) {
        if let Some(stopped) = self.stopped {
            if self.failure.is_none() && self.is_running() {
                self.failure = Some(self.was_torn("it was resumed before its disks were cut"));
            }
            let resumed = self.execute("cont").or_else(|_| {
                wake_with_retries(self.guest.machine.monitor(), job.clock).ok();
                self.execute("cont")
            });
            self.report.paused = Some(job.clock.now().saturating_sub(stopped));
            if let Err(error) = resumed
                && !self.is_off()
            {
                job.progress.warning(&format!(
                    "{} does not run on: {error}; the watchdog tries on",
                    self.report.name
                ));
                self.failure.get_or_insert(error);
            }
        }
        let state = if !self.runs() || self.is_running() {
            RunState::Restored
        } else {
            RunState::StillPaused
        };
        if let Some(quiescence) = self.quiescence.take() {
            let was_frozen = matches!(quiescence, FreezeState::Frozen { .. });
            self.report.quiesced = quiescence.end(self.shown(), &mut self.guard, state, job);
            if let (true, Quiesce::Require, Quiesced::Failed(reason)) =
                (was_frozen, self.guest.quiesce, &self.report.quiesced)
            {
                // A guest that did not stay frozen until the end has no usable snapshot.
                let reason = reason.clone();
                self.fail(&reason);
            }
        }
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Marks the machine as failed: it has no point in time.
    pub(super) fn fail(&mut self, why: &str) {
        let failure = self.was_torn(why);
        self.failure.get_or_insert(failure);
    }

    /// The error for disks that are of several points in time, or not what was requested.
    fn was_torn(&self, why: &str) -> crate::Error {
        crate::Error::from(holdfast_host::Error::Refused {
            action: "make one instant of",
            machine: self.report.name.clone(),
            reason: why.to_owned(),
        })
    }

    /// Whether it was switched off or has crashed: its disks are still of one point in time.
    fn is_off(&self) -> bool {
        self.guest.machine.ended().is_some()
    }

    pub(super) fn is_running(&self) -> bool {
        self.execute("query-status")
            .is_ok_and(|status| status["running"] == true)
    }

    /// Ends the session and removes its traces; the watchdog resumes the machine if it is still paused.
    fn end(mut self) -> (GuestReport, Option<crate::Error>) {
        if self.stopped.is_some() && !self.is_running() && !self.is_off() {
            self.guard.about_to_pause(PAUSE_DEADLINE).ok();
            self.guard.hand_over();
        } else if self.guard.has_the_rest() {
            // The guest may still be frozen: the note stays for `holdfast doctor`.
            self.guard.done();
        } else {
            self.guard.done();
            self.note.take().map(RunNote::close);
        }
        (self.report, self.failure)
    }
}
