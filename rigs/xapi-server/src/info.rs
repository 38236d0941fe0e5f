//! What a test gives to the server, and what it asks about it.

use std::path::PathBuf;

/// Which hosts see the storage that a disk is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SrPlace {
    /// Shared: both.
    #[default]
    Shared,
    /// Local to the slave: the master redirects transfers to it.
    OnSlave,
}

/// A disk of a machine to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewDisk {
    /// The place at which the guest sees it: `xvda`, `xvdb`, ...
    pub device: String,
    /// Bytes of the disk.
    pub size_bytes: u64,
    /// A file whose bytes the disk begins with; without it the disk reads as zero.
    pub content: Option<PathBuf>,
    /// Where it is stored.
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

/// A machine to be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NewVm {
    /// `name_label`.
    pub name: String,
    /// Its disks, the first of which it boots from.
    pub disks: Vec<NewDisk>,
    /// `Running`, `Halted`, `Paused` or `Suspended`; empty means `Halted`.
    pub power_state: String,
}

/// A machine, or a snapshot of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmInfo {
    /// `OpaqueRef:...`
    pub reference: String,
    /// Its uuid.
    pub uuid: String,
    /// `name_label`.
    pub name: String,
    /// `Running`, `Halted`, ...
    pub power_state: String,
    /// Whether it is a snapshot.
    pub is_a_snapshot: bool,
    /// The machine that it is a snapshot of, or `OpaqueRef:NULL`.
    pub snapshot_of: String,
}

/// A virtual disk, or a snapshot of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VdiInfo {
    /// `OpaqueRef:...`
    pub reference: String,
    /// Its uuid.
    pub uuid: String,
    /// `name_label`.
    pub name: String,
    /// `user`, `cbt_metadata`, `suspend`, ...
    pub kind: String,
    /// Bytes of the disk.
    pub size_bytes: u64,
    /// Whether it is a snapshot.
    pub is_a_snapshot: bool,
    /// Whether changed blocks are tracked.
    pub cbt_enabled: bool,
    /// The disk that it is a snapshot of, or `OpaqueRef:NULL`.
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
    /// What went wrong: a code and what it speaks of.
    pub error_info: Vec<String>,
}
