//! The note of work on a running machine in the journal of runs, from before the first change to QEMU until none is left.

use std::path::Path;

use holdfast_host::qemu::{RunId, runs_in};
use holdfast_host::qmp::QmpCommand;
use holdfast_host::{Description, Machine, MachineState};
use holdfast_repo::Processes;
use jiff::Timestamp;

use super::run_journal::{JournalPlace, Phase, RunNote, RunRecord};
use crate::job::Job;

/// Work on a running machine.
pub(crate) struct MachineWork<'a> {
    pub(crate) machine: &'a dyn Machine,
    /// The name of the machine in messages.
    pub(crate) shown: String,
    pub(crate) run: RunId,
    /// None if the run is not noted.
    pub(crate) journal: Option<&'a JournalPlace>,
    pub(crate) now: &'a (dyn Fn() -> Timestamp + Sync),
    /// The folder of scratch files.
    pub(crate) scratch: &'a Path,
    pub(crate) processes: &'a dyn Processes,
}

/// A run with its note. If the note cannot be written, a warning says so, and only the watchdog protects the machine.
pub(crate) struct NotedRun<'a> {
    machine: &'a dyn Machine,
    shown: String,
    run: RunId,
    job: Job<'a>,
    was_running: bool,
    note: Option<RunNote>,
}

impl<'a> NotedRun<'a> {
    pub(crate) fn begin(
        machine: &'a dyn Machine,
        work: &MachineWork<'_>,
        description: &Description,
        job: Job<'a>,
    ) -> Self {
        let was_running = description.summary.state == MachineState::Running;
        let mut noted = Self {
            machine,
            shown: work.shown.clone(),
            run: work.run,
            job,
            was_running,
            note: None,
        };
        if let Some(place) = work.journal {
            let record = RunRecord {
                run: work.run,
                machine: description.summary.name.clone(),
                uuid: description.summary.uuid.clone(),
                way: place.way.clone(),
                process: place.process.clone(),
                start_ms: (work.now)().as_millisecond(),
                phase: Phase::Preparing,
                was_running,
                scratch: work.scratch.to_owned(),
            };
            noted.note = noted.heed(RunNote::begin(&place.folder, record));
        }
        noted
    }

    /// Freezes the machine; the frozen disks are read next.
    pub(crate) fn freezing<T>(mut self, freeze: impl FnOnce() -> crate::Result<T>) -> crate::Result<(T, Self)> {
        self.phase(Phase::Freezing);
        match freeze() {
            Ok(frozen) => {
                self.phase(Phase::Reading);
                Ok((frozen, self))
            }
            Err(error) => {
                self.end();
                Err(error)
            }
        }
    }

    /// Notes that the run enters this phase.
    pub(crate) fn phase(&mut self, phase: Phase) {
        let written = self.note.as_mut().map(|note| note.phase(phase));
        self.heed(written.unwrap_or(Ok(())));
    }

    /// Ends the run, successful or not. The note is kept if something is left, or if the machine is still paused by
    /// Holdfast.
    pub(crate) fn end(mut self) {
        let Some(note) = self.note.take() else { return };
        if self.is_clean() {
            self.heed(note.close());
        }
    }

    fn is_clean(&self) -> bool {
        // The run's objects in QEMU have ended with it.
        if is_off(self.machine) {
            return true;
        }
        let monitor = self.machine.monitor();
        let status = monitor.execute(&QmpCommand::new("query-status", serde_json::Value::Null));
        let runs = status.is_ok_and(|status| status["running"] == true);
        let is_left = !matches!(runs_in(monitor), Ok(left) if !left.contains(&self.run));
        (runs || !self.was_running) && !is_left
    }

    fn heed<T>(&self, result: crate::Result<T>) -> Option<T> {
        result
            .map_err(|error| {
                let message = format!("{}: not noted for holdfast doctor: {error}", self.shown);
                self.job.progress.note(&message);
            })
            .ok()
    }
}

/// Whether a machine was switched off, has crashed, or no longer exists.
pub(crate) fn is_off(machine: &dyn Machine) -> bool {
    machine.ended().is_some()
}
