//! What an export would make.

use holdfast_hardware::Untranslated;
use holdfast_repo::Manifest;

use crate::capture::plan::BackupPlan;

/// What an export would make.
#[derive(Debug)]
pub struct ExportPlan {
    /// The snapshot; none of a machine as it is now.
    pub snapshot: Option<Manifest>,
    /// How the machine would be read; none of a snapshot.
    pub reading: Option<BackupPlan>,
    /// What the machine is called here.
    pub machine: String,
    /// What it would be called there.
    pub name: String,
    /// Its disks.
    pub disks: Vec<PlannedExportDisk>,
    /// What has no meaning there; of a machine as it is now that is known only when it is read.
    pub dropped: Vec<Untranslated>,
    /// Bytes of the memory that it would go on from; none where it would start.
    pub memory_bytes: Option<u64>,
}

/// A disk that would be exported.
#[derive(Debug)]
pub struct PlannedExportDisk {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
}
