//! Plans of backups; making one changes nothing.

use holdfast_host::MachineState;
use holdfast_repo::Manifest;

use crate::job::MachineName;

/// The plan of a backup.
#[derive(Debug)]
pub struct BackupPlan {
    /// The name that the snapshot would be listed under.
    pub name: MachineName,
    /// The state of the machine; none for images.
    pub state: Option<MachineState>,
    /// The snapshot that it would be compared with.
    pub parent: Option<Manifest>,
    /// How the disks would be read.
    pub method: PlannedMethod,
    /// The disks that would be read.
    pub disks: Vec<PlannedRead>,
    /// Disks that would be left out, and why.
    pub left_out: Vec<(String, String)>,
}

/// A method, and the reason for it.
#[derive(Debug)]
pub struct PlannedMethod {
    /// The keyword in machine-readable output.
    pub word: &'static str,
    /// The reason as text.
    pub reason: String,
}

/// A disk that would be read.
#[derive(Debug)]
pub struct PlannedRead {
    /// Its name in the snapshot.
    pub name: String,
    /// Its size; none for a stream.
    pub size_bytes: Option<u64>,
    /// Approximate number of bytes that would be read; none if that is known only during the backup.
    pub read_bytes: Option<u64>,
    /// Why the whole disk would be read; none if only changes would be.
    pub reason: Option<String>,
}

/// What would be read of a machine with chosen disks.
pub(crate) struct PlannedCapture {
    pub(crate) method: PlannedMethod,
    pub(crate) disks: Vec<PlannedRead>,
    pub(crate) left_out: Vec<(String, String)>,
}
