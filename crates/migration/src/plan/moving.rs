//! Which form a machine has on its way: the content of its disks, or its files with what its hypervisor keeps in them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use holdfast_host::domain_xml::with_moved_files;
use holdfast_host::{Description, MachineHistory, MachineState, SnapshotDescription};

use super::files::plan_files;
use super::places::{DiskPlaces, PlannedDisk, plan_disks};
use super::{DiskArrival, Findings, PlanRequest, unreadable};
use crate::error::Result;
use crate::far::FormerDisk;
use crate::image_file::ImageFile;

/// What moves.
pub(super) struct Moving {
    pub(super) disks: Vec<PlannedDisk>,
    /// Images that nothing may write while files move.
    pub(super) images: Vec<ImageFile>,
    /// The new paths of files that move as they are.
    pub(super) files: BTreeMap<PathBuf, PathBuf>,
    /// With the new paths.
    pub(super) history: MachineHistory,
    /// What the machine had there before.
    pub(super) former: Vec<FormerDisk>,
}

impl Moving {
    /// The disks of a machine go to `folder`; with their files as they are, if its hypervisor has snapshots or checkpoints of it.
    pub(super) fn find(
        request: &PlanRequest<'_>,
        description: &Description,
        folder: &Path,
        findings: &mut Findings,
    ) -> Result<Self> {
        let summary = &description.summary;
        // libvirt does not move a running machine with snapshots.
        let history = match summary.state {
            MachineState::Running => MachineHistory::default(),
            _ => request.hypervisor.history(&summary.uuid)?,
        };
        let former = if history.is_empty() {
            request.far.former_disks(&summary.uuid)?
        } else {
            request.far.former_files(&summary.uuid)?
        };
        let places = DiskPlaces {
            machine: &summary.name,
            folder,
            former: &former,
            seeds: &request.seeds,
            arrival: request.arrival,
            is_free: &|path| match request.arrival {
                DiskArrival::BeforeStart => request.far.is_free(path),
                DiskArrival::AfterStart { .. } => request.far.is_free_for_overlay(path),
            },
        };
        if !history.is_empty() {
            let moving = Self::with_history(description, &history, &places, findings)?;
            return Ok(Self { former, ..moving });
        }
        Ok(Self {
            disks: plan_disks(request.machine, description, &places, findings)?,
            images: Vec::new(),
            files: BTreeMap::new(),
            history,
            former,
        })
    }

    fn with_history(
        description: &Description,
        history: &MachineHistory,
        places: &DiskPlaces<'_>,
        findings: &mut Findings,
    ) -> Result<Self> {
        let planned = plan_files(description, history, places, findings)?;
        let moved =
            |text: &str| with_moved_files(text, &planned.moved).map_err(|detail| unreadable(description, detail));
        let snapshots = history.snapshots.iter().map(|snapshot| {
            Ok(SnapshotDescription {
                text: moved(&snapshot.text)?,
                is_current: snapshot.is_current,
            })
        });
        let history = MachineHistory {
            snapshots: snapshots.collect::<Result<_>>()?,
            checkpoints: history
                .checkpoints
                .iter()
                .map(|text| moved(text))
                .collect::<Result<_>>()?,
        };
        findings.notes.push(history_note(&history));
        Ok(Self {
            disks: planned.disks,
            images: planned.images,
            files: planned.moved,
            history,
            former: Vec::new(),
        })
    }
}

fn history_note(history: &MachineHistory) -> String {
    let counts = [
        (history.snapshots.len(), "snapshot"),
        (history.checkpoints.len(), "checkpoint"),
    ];
    let counted = counts.into_iter().filter(|(count, _)| *count > 0);
    let texts: Vec<String> = counted
        .map(|(count, what)| format!("{count} {what}{}", if count == 1 { "" } else { "s" }))
        .collect();
    format!("it moves with {}, so its files keep their formats", texts.join(" and "))
}

#[cfg(test)]
mod tests {
    use holdfast_host::{MachineHistory, SnapshotDescription};

    use super::history_note;

    #[test]
    fn a_note_counts_what_a_machine_has() {
        let snapshot = SnapshotDescription {
            text: String::new(),
            is_current: false,
        };
        let history = |snapshot_count, checkpoint_count| MachineHistory {
            snapshots: vec![snapshot.clone(); snapshot_count],
            checkpoints: vec![String::new(); checkpoint_count],
        };
        assert!(history_note(&history(1, 0)).starts_with("it moves with 1 snapshot, "));
        assert!(history_note(&history(2, 3)).starts_with("it moves with 2 snapshots and 3 checkpoints, "));
    }
}
