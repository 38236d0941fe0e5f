//! Plans an export: everything that is known before the disks are read is checked, and nothing is written.

use std::path::PathBuf;

use super::planned::{ExportPlan, PlannedExportDisk};
use super::suspended::Suspended;
use super::{ExportFrom, ExportRequest, ExportTarget, Exported, content, now, taken};
use crate::files::atomic_file::{Existing, NewFile};
use crate::files::block_target::Overwrite;
use crate::image::new_folder::NewFolder;
use crate::job::{Error, Job, Result};
use crate::repository::open::find_snapshot;

/// Plans an export.
///
/// # Errors
/// Those of [`export`](super::export) before it reads a disk.
pub fn plan_export(from: ExportFrom<'_>, request: ExportRequest, job: Job<'_>) -> Result<ExportPlan> {
    let xva = request.target.xva();
    let is_folder = matches!(request.target, ExportTarget::Folder { .. });
    check_target(request.target)?;
    let (repository, reference, zone, left_out) = match from {
        ExportFrom::Snapshot {
            repository,
            reference,
            zone,
            left_out,
        } => (repository, reference, zone, left_out),
        ExportFrom::Now(reading) => return now::plan(*reading, request.name, job),
    };
    let snapshot = find_snapshot(repository, &reference, &zone, job.progress)?;
    let planned = content::of_snapshot(repository, &snapshot, &left_out, xva, request.name.as_deref())
        .and_then(|content| Exported::new(content, request.name.clone(), job));
    let mut exported = planned.map_err(|error| error.unless_removed(repository, snapshot.id))?;
    if !is_folder {
        exported.dropped.splice(0..0, std::mem::take(&mut exported.lost));
    }
    let disks = exported.disks.iter().map(|disk| PlannedExportDisk {
        name: disk.name.clone(),
        size_bytes: disk.device.size_bytes(),
    });
    Ok(ExportPlan {
        reading: None,
        machine: snapshot.machine.clone(),
        disks: disks.collect(),
        memory_bytes: exported.suspended.as_ref().map(Suspended::memory_bytes),
        name: exported.machine.name,
        dropped: exported.dropped,
        snapshot: Some(snapshot),
    })
}

fn check_target(target: ExportTarget) -> Result<()> {
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(|source| Error::File {
            action: "find",
            path,
            source,
        })
    };
    match target {
        ExportTarget::Stream(..) => Ok(()),
        ExportTarget::File { path, overwrite, .. } => {
            let existing = match overwrite {
                Overwrite::Refuse => Existing::Keep,
                Overwrite::Replace => Existing::Replace,
            };
            NewFile::check(&path, existing).map_err(taken)
        }
        ExportTarget::Folder { path, .. } => NewFolder::check(&path),
        ExportTarget::VirtualBox { path, .. } => NewFolder::check(&absolute(path)?),
    }
}
