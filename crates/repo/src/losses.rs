//! Losses: snapshots and packs that are missing without a record of their removal.

use std::fmt;

use crate::id::{PackId, SnapshotId};

/// A snapshot that is missing without a record of its removal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostSnapshot {
    /// The snapshot.
    pub id: SnapshotId,
    /// Its machine.
    pub machine: String,
    /// Its point in time, in milliseconds since 1970-01-01 UTC.
    pub time_ms: i64,
    /// Its point in time, in milliseconds since 1970-01-01 UTC.
    pub copy: PackId,
}

impl fmt::Display for LostSnapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, machine, copy, .. } = self;
        write!(
            f,
            "snapshot {id} of {machine} is missing although it was not removed; pack {copy} has a copy of its manifest"
        )
    }
}

/// Something that is missing but should exist.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// A snapshot was lost.
    Snapshot(LostSnapshot),
    /// A pack that no visible snapshot needs, but that is unreadable, so it may contain the copy of a lost manifest.
    Unreadable {
        /// The pack.
        pack: PackId,
        /// Why it is unreadable.
        reason: String,
    },
    /// A missing pack that snapshots need, and whose content repair has not searched for.
    Pack(PackId),
    /// The configuration is missing: the repository was copied incompletely, or lost more than this.
    Config,
    /// There are packs, but no record of the snapshots they belong to.
    Unexplained(Vec<PackId>),
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Snapshot(lost) => lost.fmt(f),
            Self::Unreadable { pack, reason } => write!(
                f,
                "pack {pack} cannot be read, and may have the copy of a lost manifest ({reason})"
            ),
            Self::Pack(pack) => write!(f, "pack {pack} is missing, and snapshots need it"),
            Self::Config => f.write_str("the configuration of the repository is missing"),
            Self::Unexplained(packs) => write!(
                f,
                "there are {} packs, no snapshot, and no record that one was removed",
                packs.len()
            ),
        }
    }
}

/// Describes losses in one sentence.
pub(crate) fn describe(losses: &[Loss]) -> String {
    let named: Vec<String> = losses.iter().take(NAMED_COUNT_MAX).map(ToString::to_string).collect();
    match losses.len() - named.len() {
        0 => named.join("; "),
        others => format!("{}; and {others} more", named.join("; ")),
    }
}

/// Number of losses that a message lists; more are only counted.
pub(crate) const NAMED_COUNT_MAX: usize = 8;
