//! The plan of an export.

use holdfast_hardware::Untranslated;
use holdfast_repo::Manifest;

use crate::capture::plan::BackupPlan;

/// Plan of an export.
#[derive(Debug)]
pub struct ExportPlan {
    /// The snapshot; none for a machine in its present state.
    pub snapshot: Option<Manifest>,
    /// How the machine would be read; none for a snapshot.
    pub reading: Option<BackupPlan>,
    /// The original name of the machine.
    pub machine: String,
    /// The name of the machine in the export.
    pub name: String,
    /// Its disks.
    pub disks: Vec<PlannedExportDisk>,
    /// Settings that the target does not support; for a machine in its present state they are known only when it is read.
    pub dropped: Vec<Untranslated>,
    /// Bytes of the memory from which the machine would resume; none if it would boot.
    pub memory_bytes: Option<u64>,
}

/// A disk in the plan.
#[derive(Debug)]
pub struct PlannedExportDisk {
    /// Its name.
    pub name: String,
    /// Its size.
    pub size_bytes: u64,
}
