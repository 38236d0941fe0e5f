//! The request and the report of a verification.

use crate::check::difference::Compare;
use crate::check::finding::Finding;
use crate::format::manifest::Manifest;
use crate::id::SnapshotId;

/// Which snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Selection {
    /// All of them.
    #[default]
    All,
    /// These.
    Some(Vec<SnapshotId>),
}

/// How deep verify looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VerifyDepth {
    /// Manifests, maps and directories; and that every piece of every disk lies inside its frame.
    Structure,
    /// Every frame is read as well, and every print and identity in it is checked.
    Full,
}

/// What to verify, and how.
pub struct VerifyRequest<'a> {
    /// Which snapshots.
    pub snapshots: Selection,
    /// How deep.
    pub depth: VerifyDepth,
    /// A disk that is compared with a device, byte for byte, at any depth.
    pub compare: Option<Compare<'a>>,
    /// Threads that read and check; with none, everything is done by the caller, in a fixed order.
    pub thread_count: usize,
}

/// What verify did and found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// Snapshots whose manifest was read. Those that were removed meanwhile count unless packs of them were missing.
    pub snapshot_count: u64,
    /// Bytes of their disks.
    pub logical_bytes: u64,
    /// Frames that were read and checked.
    pub frame_count: u64,
    /// Their bytes before compression.
    pub decoded_bytes: u64,
    /// Bytes that were compared with a device.
    pub compared_bytes: u64,
    /// What is wrong; at most 4096 things.
    pub findings: Vec<Finding>,
    /// Further things that are wrong.
    pub unlisted_finding_count: u64,
}

impl VerifyReport {
    pub(super) fn count(&mut self, manifests: &[Manifest]) {
        self.snapshot_count = manifests.len() as u64;
        let bytes = manifests.iter().map(Manifest::logical_bytes);
        self.logical_bytes = bytes.fold(0, u64::saturating_add);
    }

    /// Whether everything that was looked at is as it was stored.
    pub fn is_clean(&self) -> bool {
        self.findings.is_empty()
    }
}
