//! What a backup would do, found out without changing anything.

use holdfast_host::MachineState;
use holdfast_repo::Manifest;

use crate::job::MachineName;

/// A backup that is not made.
#[derive(Debug)]
pub struct BackupPlan {
    /// The name that the snapshot would be listed under.
    pub name: MachineName,
    /// What the machine is doing; none of images.
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

/// A method, and why it would be used.
#[derive(Debug)]
pub struct PlannedMethod {
    /// A word for scripts.
    pub word: &'static str,
    /// The reason, in words.
    pub reason: String,
}

/// A disk that would be read.
#[derive(Debug)]
pub struct PlannedRead {
    /// Its name in the snapshot.
    pub name: String,
    /// Its size; none of a stream.
    pub size_bytes: Option<u64>,
    /// Bytes that would be read, about; none where only the backup finds out.
    pub read_bytes: Option<u64>,
    /// Why all of it would be read; none where only changes would be.
    pub reason: Option<String>,
}

/// What a machine with its disks chosen would be read as.
pub(crate) struct PlannedCapture {
    pub(crate) method: PlannedMethod,
    pub(crate) disks: Vec<PlannedRead>,
    pub(crate) left_out: Vec<(String, String)>,
}
