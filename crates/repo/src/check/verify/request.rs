//! The request and the report of a verification.

use crate::check::difference::Compare;
use crate::check::finding::Finding;
use crate::format::manifest::Manifest;
use crate::id::SnapshotId;

/// The snapshots to verify.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Selection {
    /// All of them.
    #[default]
    All,
    /// These.
    Some(Vec<SnapshotId>),
}

/// How thoroughly verify checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyDepth {
    /// Manifests, maps and directories; and that every piece of every disk is within its frame.
    Structure,
    /// Also reads every frame, and checks every print and chunk id in it.
    Full,
}

/// Options of a verification.
pub struct VerifyRequest<'a> {
    /// The snapshots.
    pub snapshots: Selection,
    /// The depth.
    pub depth: VerifyDepth,
    /// A disk to compare with a device, byte for byte, at any depth.
    pub compare: Option<Compare<'a>>,
    /// Number of threads that read and check; with 0 the caller does everything, in a fixed order.
    pub thread_count: usize,
}

/// The result of a verification.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Number of snapshots whose manifest was read. Those that were removed meanwhile are included unless packs of
    /// them were missing.
    pub snapshot_count: u64,
    /// Bytes of their disks.
    pub logical_bytes: u64,
    /// Number of frames that were read and checked.
    pub frame_count: u64,
    /// Their bytes before compression.
    pub decoded_bytes: u64,
    /// Bytes that were compared with a device.
    pub compared_bytes: u64,
    /// The problems; at most 4096.
    pub findings: Vec<Finding>,
    /// Number of problems that are not listed.
    pub unlisted_finding_count: u64,
}

impl VerifyReport {
    pub(super) fn count(&mut self, manifests: &[Manifest]) {
        self.snapshot_count = manifests.len() as u64;
        let bytes = manifests.iter().map(Manifest::logical_bytes);
        self.logical_bytes = bytes.fold(0, u64::saturating_add);
    }

    /// Whether everything that was checked is as it was stored.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}
