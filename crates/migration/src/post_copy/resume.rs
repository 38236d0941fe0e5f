//! Continues to serve the disks of a machine that has moved, after an interruption.

use std::path::PathBuf;

use holdfast_engine::{Job, PullNote, PullRecord};
use holdfast_host::MachineState;
use holdfast_host::domain_xml::PulledDisk;

use super::pull::{PulledMachine, pull};
use super::source::{ImageUse, PullSource};
use crate::complete::{ArrivedMachine, complete_arrived, obsolete_files};
use crate::error::{Error, Result};
use crate::far::{FarRequest, FarState, Pulling, PullingDisk};
use crate::image_file::ImageFile;
use crate::migration_tools::MigrationTools;
use crate::report::{MigrationPhase, MigrationReport, PhaseClock};

/// A pull that was continued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResumedPull {
    /// The state of the machine there.
    pub state: MachineState,
    /// The disks, and how long it took.
    pub report: MigrationReport,
}

/// Whether the machine is at the other host, and not only a definition that it had there before.
fn has_moved(note: &PullNote, found: &Pulling, tools: &MigrationTools<'_>) -> Result<bool> {
    // Without stamps, its images were not given up.
    if note.stamps.is_none() || found.state == FarState::Absent {
        return Ok(false);
    }
    if found.state != FarState::ShutOff || !found.disks.is_empty() {
        return Ok(true);
    }
    let defined = tools.far.former_disks(&note.record.uuid)?;
    let is_defined = |path: &PathBuf| defined.iter().any(|disk| disk.path == *path);
    Ok(note.record.disks.iter().any(|disk| is_defined(&disk.path_there)))
}

/// Lets the other host pull what is missing of the disks of the machine that `note` describes. Returns none if the machine has not
/// moved there; then the record is deleted.
///
/// # Errors
/// The disks here have changed, or cannot be served, or the machine is at another host.
pub fn resume_pull(note: PullNote, tools: &MigrationTools<'_>, job: Job<'_>) -> Result<Option<ResumedPull>> {
    let record = note.record.clone();
    let started = tools.clock.now();
    let found = tools.far.pulling(&FarRequest::PullState {
        uuid: record.uuid.clone(),
    })?;
    if !has_moved(&note, &found, tools)? {
        if note.stamps.is_some() && record.destination != tools.pull.destination {
            return Err(Error::ElsewherePulled {
                machine: record.machine,
                destination: record.destination,
                record: note.path().to_owned(),
            });
        }
        note.forget()?;
        return Ok(None);
    }
    let arrived = ArrivedMachine {
        uuid: &record.uuid,
        state: found.state,
        starts_with_host: true,
        obsolete_files: Vec::new(),
    };
    // The command may have been killed before it did this.
    let is_unfinished =
        tools.control.autostart(&record.uuid)? && complete_arrived(arrived.clone(), tools.far, tools).is_err();
    let images = images_of(&record, &found.disks)?;
    tools.observer.phase(MigrationPhase::Pull);
    let source = PullSource::start(images, ImageUse::AtRest, note, tools)?;
    let configuration = tools.control.kept_configuration(&record.uuid)?;
    let machine = PulledMachine {
        name: &record.machine,
        uuid: &record.uuid,
        configuration: &configuration,
        obsolete_files: obsolete_files(&record.former_files, tools),
        unfinished: is_unfinished.then_some(arrived),
    };
    let pulled = pull(&machine, &source, tools, job)?;
    let mut times = PhaseClock::begin(started);
    times.end(MigrationPhase::Pull, tools.clock.now());
    let report = MigrationReport {
        pulled,
        phases: times.times,
        duration: tools.clock.now().saturating_sub(started),
        ..MigrationReport::default()
    };
    // A machine whose disks were not complete runs when they are.
    let state = match found.state {
        FarState::ShutOff if found.disks.is_empty() => MachineState::ShutOff,
        _ => MachineState::Running,
    };
    Ok(Some(ResumedPull { state, report }))
}

/// The images here of disks that are not complete there.
fn images_of(record: &PullRecord, disks: &[PullingDisk]) -> Result<Vec<(PulledDisk, ImageFile)>> {
    let images = disks.iter().map(|disk| {
        let recorded = record.disks.iter().find(|recorded| recorded.disk == disk.disk);
        let recorded = recorded.ok_or_else(|| Error::SourceChanged {
            machine: record.machine.clone(),
            disk: disk.disk.clone(),
            reason: "the record of the move does not have it".to_owned(),
        })?;
        let pulled = PulledDisk {
            target: disk.disk.clone(),
            path: disk.path.clone(),
            socket: disk.socket.clone(),
            export: disk.export.clone(),
        };
        let image = ImageFile {
            path: recorded.path.clone(),
            format: recorded.format.clone(),
        };
        Ok((pulled, image))
    });
    images.collect()
}
