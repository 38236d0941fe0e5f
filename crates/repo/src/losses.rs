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
    /// Its instant, in milliseconds since 1970-01-01 UTC.
    pub time_ms: i64,
    /// The pack with the copy of its manifest.
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

/// Something that is not there and should be.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loss {
    /// A snapshot was lost.
    Snapshot(LostSnapshot),
    /// No snapshot that can be seen needs this pack. It cannot be read, so the copy of a lost manifest may be in it.
    Unreadable {
        /// The pack.
        pack: PackId,
        /// Why it cannot be read.
        reason: String,
    },
    /// Snapshots need a pack that does not exist, and repair has not looked for what it held.
    Pack(PackId),
    /// The configuration is missing: the repository was not copied as a whole, or lost more than this.
    Config,
    /// There are packs, and nothing that says what they were for.
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

/// Joins what was lost into one sentence.
pub(crate) fn describe(losses: &[Loss]) -> String {
    let named: Vec<String> = losses.iter().take(NAMED_COUNT_MAX).map(ToString::to_string).collect();
    match losses.len() - named.len() {
        0 => named.join("; "),
        others => format!("{}; and {others} more", named.join("; ")),
    }
}

/// Losses that a message names; the others are counted.
pub(crate) const NAMED_COUNT_MAX: usize = 8;
