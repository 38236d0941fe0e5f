//! The note of a backup in the journal of runs, from before the first change to QEMU until none is left.

use holdfast_host::qemu::{RunId, runs_in};
use holdfast_host::qmp::QmpCommand;
use holdfast_host::{Description, Machine, MachineState};

use super::MachineReadRequest;
use crate::job::Job;
use crate::machine::run_journal::{Phase, RunNote, RunRecord};

/// A backup with its note. If the note cannot be written, a warning says so, and only the watchdog protects the
/// machine.
pub(super) struct NotedRun<'a> {
    request: &'a MachineReadRequest<'a>,
    job: Job<'a>,
    was_running: bool,
    note: Option<RunNote>,
}

impl<'a> NotedRun<'a> {
    pub(super) fn begin(request: &'a MachineReadRequest<'a>, description: &Description, job: Job<'a>) -> Self {
        let was_running = description.summary.state == MachineState::Running;
        let mut noted = Self {
            request,
            job,
            was_running,
            note: None,
        };
        if let Some(place) = &request.capture.journal {
            let record = RunRecord {
                run: RunId(request.capture.run),
                machine: description.summary.name.clone(),
                uuid: description.summary.uuid.clone(),
                way: place.way.clone(),
                process: place.process.clone(),
                start_ms: (request.capture.now)().as_millisecond(),
                phase: Phase::Preparing,
                was_running,
                scratch: request.scratch.clone(),
            };
            noted.note = noted.heed(RunNote::begin(&place.folder, record));
        }
        noted
    }

    /// Freezes the machine; the frozen disks are read next.
    pub(super) fn freezing<T>(mut self, freeze: impl FnOnce() -> crate::Result<T>) -> crate::Result<(T, Self)> {
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

    /// Notes that the backup enters this phase.
    pub(super) fn phase(&mut self, phase: Phase) {
        let written = self.note.as_mut().map(|note| note.phase(phase));
        self.heed(written.unwrap_or(Ok(())));
    }

    /// Ends the backup, successful or not. The note is kept if something is left, or if the machine is still paused by
    /// Holdfast.
    pub(super) fn end(mut self) {
        let Some(note) = self.note.take() else { return };
        if self.is_clean() {
            self.heed(note.close());
        }
    }

    fn is_clean(&self) -> bool {
        // The run's objects in QEMU have ended with it.
        if is_off(self.request.machine) {
            return true;
        }
        let monitor = self.request.machine.monitor();
        let status = monitor.execute(&QmpCommand::new("query-status", serde_json::Value::Null));
        let runs = status.is_ok_and(|status| status["running"] == true);
        let is_left = !matches!(runs_in(monitor), Ok(left) if !left.contains(&RunId(self.request.capture.run)));
        (runs || !self.was_running) && !is_left
    }

    fn heed<T>(&self, result: crate::Result<T>) -> Option<T> {
        result
            .map_err(|error| {
                let message = format!("{}: not noted for holdfast doctor: {error}", self.request.capture.name);
                self.job.progress.note(&message);
            })
            .ok()
    }
}

/// Whether a machine was switched off, has crashed, or no longer exists.
pub(super) fn is_off(machine: &dyn Machine) -> bool {
    machine.ended().is_some()
}
