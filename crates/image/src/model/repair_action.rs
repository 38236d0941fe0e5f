//! The actions of a repair, and their text.

use std::fmt::{Display, Formatter};

/// One action of a repair.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RepairAction {
    /// Correct refcounts to the number of references found.
    Refcounts {
        /// Refcounts that were too low: the cluster could have been reused while in use.
        raised_count: u64,
        /// Refcounts that were too high: leaked clusters.
        lowered_count: u64,
    },
    /// Write all refcounts anew at the end of the file, because the stored ones are unusable.
    RefcountsRebuilt {
        /// Clusters in use.
        cluster_count: u64,
    },
    /// Correct the copied flags of entries to match the refcounts.
    CopiedFlags {
        /// How many entries.
        count: u64,
    },
    /// Clear reserved bits of entries.
    ReservedBits {
        /// How many entries.
        count: u64,
    },
    /// Clear a mark that keeps programs from using the image.
    MarkCleared {
        /// Which mark.
        mark: &'static str,
    },
    /// Write a structure anew from its redundant copy.
    Rewritten {
        /// Which structure.
        what: &'static str,
        /// The copy.
        from: &'static str,
    },
    /// Restore entries of a table from its redundant copy.
    FromSecondCopy {
        /// Which table.
        what: &'static str,
        /// How many entries.
        count: u64,
    },
    /// Correct a number in a header to the counted value.
    Number {
        /// Which number.
        what: &'static str,
        /// The value before.
        before: u64,
        /// The value after.
        after: u64,
    },
    /// Apply the changes in the log.
    LogReplayed,
    /// Discard the log, whose changes are unreadable.
    LogDiscarded,
    /// Discard unreadable persistent bitmaps.
    BitmapsDiscarded,
    /// Discard invalid entries.
    EntriesDiscarded {
        /// What the entries are.
        what: &'static str,
        /// How many.
        count: u64,
        /// Bytes of the disk for each entry.
        unit_bytes: u64,
        /// Disk offset of the first one; none if only internal snapshots are affected.
        first_disk_offset: Option<u64>,
    },
    /// Copy clusters that several ranges of the disk share, so that each range has its own.
    Separated {
        /// How many copies.
        count: u64,
        /// Bytes of the disk for each copy.
        unit_bytes: u64,
        /// Disk offset of the first range that gets a copy.
        first_disk_offset: u64,
    },
    /// Truncate unused space at the end of the file.
    Truncated {
        /// How many bytes.
        bytes: u64,
    },
}

impl RepairAction {
    /// A stable identifier for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Refcounts { .. } => "refcounts",
            Self::RefcountsRebuilt { .. } => "refcounts-rebuilt",
            Self::CopiedFlags { .. } => "copied-flags",
            Self::ReservedBits { .. } => "reserved-bits",
            Self::MarkCleared { .. } => "mark-cleared",
            Self::Rewritten { .. } => "rewritten",
            Self::FromSecondCopy { .. } => "from-second-copy",
            Self::Number { .. } => "number",
            Self::LogReplayed => "log-replayed",
            Self::LogDiscarded => "log-discarded",
            Self::BitmapsDiscarded => "bitmaps-discarded",
            Self::EntriesDiscarded { .. } => "entries-discarded",
            Self::Separated { .. } => "separated",
            Self::Truncated { .. } => "truncated",
        }
    }

    /// Whether it loses data, or may lose it: only [`RepairMode::All`](crate::RepairMode::All) does that.
    pub fn loses_data(&self) -> bool {
        matches!(
            self,
            Self::LogDiscarded | Self::BitmapsDiscarded | Self::EntriesDiscarded { .. } | Self::Separated { .. }
        )
    }
}

impl Display for RepairAction {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Refcounts {
                raised_count,
                lowered_count,
            } => write!(
                formatter,
                "refcounts corrected: {raised_count} were too low, {lowered_count} too high"
            ),
            Self::RefcountsRebuilt { cluster_count } => write!(
                formatter,
                "refcounts rebuilt at the end of the file, for {cluster_count} clusters in use"
            ),
            Self::CopiedFlags { count } => write!(formatter, "{count} copied flags corrected"),
            Self::ReservedBits { count } => write!(formatter, "reserved bits cleared in {count} entries"),
            Self::MarkCleared { mark } => write!(formatter, "mark cleared that it {mark}"),
            Self::Rewritten { what, from } => write!(formatter, "{what} restored from {from}"),
            Self::FromSecondCopy { what, count } => {
                write!(formatter, "{count} entries of {what} restored from its copy")
            }
            Self::Number { what, before, after } => write!(formatter, "{what} changed from {before} to {after}"),
            Self::LogReplayed => formatter.write_str("log replayed"),
            Self::LogDiscarded => formatter.write_str("log discarded: it has no valid entry, and its changes are lost"),
            Self::BitmapsDiscarded => {
                formatter.write_str("unreadable bitmaps discarded: the next backups read the whole disk")
            }
            Self::EntriesDiscarded {
                what,
                count,
                unit_bytes,
                first_disk_offset,
            } => {
                write!(
                    formatter,
                    "{count} unreadable {what} discarded, {unit_bytes} bytes of the disk each, "
                )?;
                match first_disk_offset {
                    Some(offset) => write!(formatter, "the first at disk offset {offset}: ")?,
                    None => formatter.write_str("in internal snapshots only: ")?,
                }
                formatter.write_str("their data is lost, and reads as zero or from the backing file")
            }
            Self::Separated {
                count,
                unit_bytes,
                first_disk_offset,
            } => write!(
                formatter,
                "{count} ranges of the disk, {unit_bytes} bytes each, the first at disk offset {first_disk_offset}, copied because \
                 they shared storage with another range: one of both has wrong data, and it is unknown which"
            ),
            Self::Truncated { bytes } => write!(formatter, "{bytes} unused bytes at the end of the file freed"),
        }
    }
}

/// How far a repair goes. Each mode includes those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum RepairMode {
    /// Free leaked space.
    Leaks,
    /// Repairs that risk no data.
    #[default]
    Safe,
    /// Also discard invalid entries: their ranges then read as zero, or from the backing file. Clusters that two
    /// ranges of the disk share are copied for one of them; which one owned the data is unknown.
    All,
}
