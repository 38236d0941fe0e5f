//! Input of the server from tests, and information about its objects.

use std::path::PathBuf;

/// The hosts that see the storage of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SrPlace {
    /// Shared: both hosts see it.
    #[default]
    Shared,
    /// Local to the slave: the master redirects transfers to the slave.
    OnSlave,
}

/// A disk of a new machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewDisk {
    /// The device name in the guest: `xvda`, `xvdb`, ...
    pub device: String,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// A file with the initial content of the disk; without it the disk reads as zero.
    pub content: Option<PathBuf>,
    /// The storage of the disk.
    pub place: SrPlace,
}

impl NewDisk {
    /// A disk of zeroes on the shared storage.
    pub fn new(device: &str, size_bytes: u64) -> Self {
        Self {
            device: device.to_owned(),
            size_bytes,
            ..Self::default()
        }
    }
}

/// A new machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewVm {
    /// `name_label`.
    pub name: String,
    /// The disks; the machine boots from the first one.
    pub disks: Vec<NewDisk>,
    /// `Running`, `Halted`, `Paused` or `Suspended`; empty means `Halted`.
    pub power_state: String,
}

/// A machine, or a snapshot of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmInfo {
    /// `OpaqueRef:...`
    pub reference: String,
    /// The UUID.
    pub uuid: String,
    /// `name_label`.
    pub name: String,
    /// `Running`, `Halted`, ...
    pub power_state: String,
    /// Whether it is a snapshot.
    pub is_a_snapshot: bool,
    /// The machine of which this is a snapshot, or `OpaqueRef:NULL`.
    pub snapshot_of: String,
}

/// A virtual disk, or a snapshot of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdiInfo {
    /// `OpaqueRef:...`
    pub reference: String,
    /// The UUID.
    pub uuid: String,
    /// `name_label`.
    pub name: String,
    /// `user`, `cbt_metadata`, `suspend`, ...
    pub kind: String,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// Whether it is a snapshot.
    pub is_a_snapshot: bool,
    /// Whether changed blocks are tracked.
    pub cbt_enabled: bool,
    /// The disk of which this is a snapshot, or `OpaqueRef:NULL`.
    pub snapshot_of: String,
}

/// A task that was not destroyed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskInfo {
    /// `OpaqueRef:...`
    pub reference: String,
    /// `name_label`.
    pub name: String,
    /// `pending`, `success`, `failure`, `cancelling` or `cancelled`.
    pub status: String,
    /// The error: a code and its parameters.
    pub error_info: Vec<String>,
}
