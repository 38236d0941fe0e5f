//! Other runs on the same machine: one at work is not disturbed, and leftovers of a dead one are removed.

use std::time::Duration;

use holdfast_host::qemu::{RunId, drop_idle_files, remove_run, runs_in};
use holdfast_host::qmp::{Monitor, MonitorError};
use holdfast_host::{MachineState, MachineSummary, ProcessInfo, processes_named};
use holdfast_repo::Liveness;

use super::lock::{INSTANT_PATIENCE, MachineLock, Work};
use super::noted_run::MachineWork;
use super::run_journal::{Phase, RunRecord, forget_run, noted_runs};
use super::watchdog::is_watchdog_of;
use crate::job::{Error, Job, Result};

/// How long to wait for the watchdog of a run that has just died, which may be cleaning up.
const WATCHDOG_PATIENCE: Duration = Duration::from_secs(5);
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Makes sure that no other run is at work on the machine, and that no leftovers of a dead one remain.
///
/// # Errors
/// [`holdfast_host::Error::Busy`] if another run is at work on it, or if that cannot be determined.
pub(crate) fn make_way(request: &MachineWork<'_>, summary: &MachineSummary, job: Job<'_>) -> Result<()> {
    // A backup that freezes the machine now is not an obstacle.
    let (journal, now) = (request.journal, (request.now)());
    let _lock = MachineLock::take(journal, summary, Work::Instant, INSTANT_PATIENCE, now, job)?;
    let machine = request.machine.name();
    let monitor = request.machine.monitor();
    let failed = |source| {
        Error::from(holdfast_host::Error::Monitor {
            machine: machine.to_owned(),
            source,
        })
    };
    if let Some(note) = living_note(request, &summary.uuid)? {
        return Err(Error::from(holdfast_host::Error::Busy {
            machine: machine.to_owned(),
            holder: holder(note.run, Some(&note)),
        }));
    }
    for note in dead_notes(request, &summary.uuid)? {
        if is_still_there(monitor, note.run, job).map_err(failed)? {
            job.progress.note(&format!(
                "{machine}: took out of QEMU what a backup that died had left, run {} of process {}",
                note.run, note.process.process
            ));
        }
        // The run's server may exist even if QEMU has no object with the run's name.
        remove_run(monitor, job.clock, note.run).map_err(failed)?;
        let is_needed = note.phase == Phase::Committing || (note.was_running && summary.state == MachineState::Paused);
        if let Some(place) = request.journal.filter(|_| !is_needed) {
            forget_run(&place.folder, note.run)?;
        }
    }
    drop_idle_files(monitor, job.clock).map_err(failed)?;
    match runs_in(monitor).map_err(failed)?.into_iter().next() {
        None => Ok(()),
        Some(run) => Err(Error::from(holdfast_host::Error::Busy {
            machine: machine.to_owned(),
            holder: holder(run, note_of(request, run)?.as_ref()),
        })),
    }
}

/// The notes of runs on the machine whose processes are dead.
fn dead_notes(request: &MachineWork<'_>, uuid: &str) -> Result<Vec<RunRecord>> {
    let Some(place) = request.journal else {
        return Ok(Vec::new());
    };
    let noted = noted_runs(&place.folder)?.into_iter();
    let is_dead = |note: &RunRecord| note.uuid == uuid && note.liveness(request.processes) == Liveness::Dead;
    Ok(noted.filter(is_dead).collect())
}

/// The note of a live run on the machine: it may have nothing in QEMU, but overlays on its disks.
fn living_note(request: &MachineWork<'_>, uuid: &str) -> Result<Option<RunRecord>> {
    let Some(place) = request.journal else {
        return Ok(None);
    };
    let noted = noted_runs(&place.folder)?.into_iter();
    let is_at_work = |note: &RunRecord| note.uuid == uuid && note.liveness(request.processes) == Liveness::Alive;
    Ok(noted.filter(is_at_work).find(|note| note.run != request.run))
}

fn note_of(request: &MachineWork<'_>, run: RunId) -> Result<Option<RunRecord>> {
    let Some(place) = request.journal else {
        return Ok(None);
    };
    Ok(noted_runs(&place.folder)?.into_iter().find(|note| note.run == run))
}

fn holder(run: RunId, note: Option<&RunRecord>) -> String {
    match note {
        Some(note) => format!(
            "another backup of it, process {} on {}, which is {}",
            note.process.process,
            note.process.host,
            note.phase.word()
        ),
        None => format!(
            "another backup of it, run {run}, which is not noted here; if it is dead, holdfast doctor --fix takes out what it left"
        ),
    }
}

/// Whether leftovers of a dead run remain after its watchdog had time to remove them.
fn is_still_there(monitor: &dyn Monitor, run: RunId, job: Job<'_>) -> std::result::Result<bool, MonitorError> {
    let start = job.clock.now();
    while has_watchdog(run) && job.clock.now().saturating_sub(start) < WATCHDOG_PATIENCE {
        if !runs_in(monitor)?.contains(&run) {
            return Ok(false);
        }
        job.clock.sleep(LOOK_INTERVAL);
    }
    Ok(runs_in(monitor)?.contains(&run))
}

/// Whether the watchdog of a run may be alive.
fn has_watchdog(run: RunId) -> bool {
    let is_one = |process: &ProcessInfo| is_watchdog_of(&process.arguments, run);
    // If processes of other users are hidden, it may be alive.
    processes_named("holdfast").is_none_or(|processes_named| processes_named.iter().any(is_one))
}
