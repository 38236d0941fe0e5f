//! Commits orphaned overlays into their base while the machine runs.
//!
//! If a doctor process dies when a commit is complete, the journal records that, and the next doctor finishes the commit.

use std::path::{Path, PathBuf};

use holdfast_host::qemu::RunId;

use super::chains::{chains_of, is_used, used_images};
use super::{DoctorRequest, EmptiedOverlays, ExaminedMachine};
use crate::capture::qemu::run_of_overlay;
use crate::job::Job;
use crate::machine::overlay_commit::{OverlayCommit, SlowCommit};
use crate::machine::run_journal::{Phase, RunNote, RunRecord};
use crate::restore::machine::is_same;

type TextResult<T> = Result<T, String>;

pub(super) fn commit(
    request: &DoctorRequest<'_>,
    subject: &ExaminedMachine<'_>,
    disk: &str,
    images: &[PathBuf],
    base: &Path,
    job: Job<'_>,
) -> TextResult<String> {
    let overlays = request.overlays.ok_or("libvirt does not manage it")?;
    let description = subject.machine.describe().map_err(|error| error.to_string())?;
    let uuid = &description.summary.uuid;
    // The plan may be outdated: nothing is committed from or into another chain.
    let chain = chains_of(&description, &subject.machine.rights())
        .into_iter()
        .find(|(target, _)| target == disk);
    let planned: Vec<&Path> = images.iter().map(PathBuf::as_path).chain([base]).collect();
    let is_as_planned = chain.is_some_and(|(_, chain)| {
        chain.len() >= planned.len() && chain.iter().zip(&planned).all(|(now, then)| is_same(now, then))
    });
    if !is_as_planned {
        return Err("its images are others than a moment ago".to_owned());
    }
    let note = note(request, subject, uuid)?;
    let commit = OverlayCommit {
        overlays,
        machine: uuid,
        disk,
        rate: None,
        job,
    };
    commit.to_the_end(base, SlowCommit::GiveUp)?;
    if let Some(note) = note {
        note.close().map_err(|error| error.to_string())?;
    }
    let mut words = format!("committed disk {disk} into {}", base.display());
    // The overlay of a backup is useless now, and the guest's next write makes its base newer: nothing would show that
    // the overlay was committed.
    let is_deleted = |path: &&PathBuf| request.emptied == EmptiedOverlays::Delete || run_of_overlay(path).is_some();
    let doomed: Vec<&PathBuf> = images.iter().filter(is_deleted).collect();
    let deleted = delete_unused(request, subject, &doomed)?;
    for path in images {
        let shown = path.display();
        let fate = if deleted.contains(path) {
            format!("; deleted {shown}")
        } else {
            format!("; {shown} stays, and is not used by this machine any more")
        };
        words.push_str(&fate);
    }
    Ok(words)
}

fn note(request: &DoctorRequest<'_>, subject: &ExaminedMachine<'_>, uuid: &str) -> TextResult<Option<RunNote>> {
    let Some(folder) = &request.journal else {
        return Ok(None);
    };
    let record = RunRecord {
        run: RunId((request.new_run)()),
        machine: subject.machine.name().to_owned(),
        uuid: uuid.to_owned(),
        way: subject.way.clone(),
        process: request.process.clone(),
        start_ms: (request.now_ms)(),
        phase: Phase::Committing,
        was_running: true,
        scratch: request.scratch.clone(),
    };
    RunNote::begin(folder, record)
        .map(Some)
        .map_err(|error| error.to_string())
}

/// Deletes files that no machine has in any present chain.
fn delete_unused(
    request: &DoctorRequest<'_>,
    subject: &ExaminedMachine<'_>,
    images: &[&PathBuf],
) -> TextResult<Vec<PathBuf>> {
    if images.is_empty() {
        return Ok(Vec::new());
    }
    let used = used_images(request)?;
    let mut deleted = Vec::new();
    for path in images {
        if is_used(&used, path) {
            continue;
        }
        std::fs::remove_file(path).map_err(|error| {
            let name = subject.machine.name();
            format!("{name} is on its base, but {} is not deleted: {error}", path.display())
        })?;
        deleted.push((*path).clone());
    }
    Ok(deleted)
}
