//! What a repair does, in words.

use std::fmt::{Display, Formatter};

/// One thing that a repair does to an image.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum RepairAction {
    /// Refcounts become the uses that were found.
    Refcounts {
        /// Those that were too low: what they count would have been given away while in use.
        raised_count: u64,
        /// Those that were too high: room taken for nothing.
        lowered_count: u64,
    },
    /// All refcounts are written anew, at the end of the file: what is stored of them cannot be used.
    RefcountsRebuilt {
        /// Clusters that are in use.
        cluster_count: u64,
    },
    /// Flags of entries become what the refcounts say.
    CopiedFlags {
        /// How many.
        count: u64,
    },
    /// Bits of entries that mean nothing are cleared.
    ReservedBits {
        /// In how many entries.
        count: u64,
    },
    /// A mark goes that keeps programs from using the image.
    MarkCleared {
        /// Which one.
        mark: &'static str,
    },
    /// A structure is written anew from another one that says the same.
    Rewritten {
        /// Which one.
        what: &'static str,
        /// From what.
        from: &'static str,
    },
    /// Entries of a table become what its copy says.
    FromTwin {
        /// Which table.
        what: &'static str,
        /// How many entries.
        count: u64,
    },
    /// A number in a header becomes what was counted.
    Number {
        /// Which one.
        what: &'static str,
        /// What it was.
        before: u64,
        /// What it will be.
        after: u64,
    },
    /// The changes in the log are made.
    LogReplayed,
    /// The log is emptied, although it has changes: they cannot be read.
    LogGivenUp,
    /// Persistent bitmaps are given up: what they say cannot be read.
    BitmapsGivenUp,
    /// What leads nowhere is given up.
    GivenUp {
        /// What leads nowhere.
        what: &'static str,
        /// How many.
        count: u64,
        /// Bytes of the disk that each tells of.
        unit_bytes: u64,
        /// Where on the disk the first of them begins; nothing where only internal snapshots have it.
        first_disk_offset: Option<u64>,
    },
    /// What several parts of the disk share is copied, so that each has its own.
    Separated {
        /// How many copies.
        count: u64,
        /// Bytes of the disk that each tells of.
        unit_bytes: u64,
        /// Where on the disk the first that gets a copy begins.
        first_disk_offset: u64,
    },
    /// Room at the end of the file that nothing uses is given back.
    Cut {
        /// How much.
        bytes: u64,
    },
}

impl RepairAction {
    /// A short name that stays the same, for programs.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Refcounts { .. } => "refcounts",
            Self::RefcountsRebuilt { .. } => "refcounts-rebuilt",
            Self::CopiedFlags { .. } => "copied-flags",
            Self::ReservedBits { .. } => "reserved-bits",
            Self::MarkCleared { .. } => "mark-cleared",
            Self::Rewritten { .. } => "rewritten",
            Self::FromTwin { .. } => "from-twin",
            Self::Number { .. } => "number",
            Self::LogReplayed => "log-replayed",
            Self::LogGivenUp => "log-given-up",
            Self::BitmapsGivenUp => "bitmaps-given-up",
            Self::GivenUp { .. } => "given-up",
            Self::Separated { .. } => "separated",
            Self::Cut { .. } => "cut",
        }
    }

    /// Whether something is lost by it, or may be: only [`RepairMode::All`](crate::RepairMode::All) does such.
    pub fn loses_data(&self) -> bool {
        matches!(
            self,
            Self::LogGivenUp | Self::BitmapsGivenUp | Self::GivenUp { .. } | Self::Separated { .. }
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
                "refcounts become what was counted: {raised_count} were too low, {lowered_count} too high"
            ),
            Self::RefcountsRebuilt { cluster_count } => write!(
                formatter,
                "refcounts are written anew at the end of the file, for {cluster_count} clusters in use"
            ),
            Self::CopiedFlags { count } => write!(formatter, "{count} copied flags become what the refcounts say"),
            Self::ReservedBits { count } => write!(formatter, "bits that mean nothing are cleared in {count} entries"),
            Self::MarkCleared { mark } => write!(formatter, "the mark that it {mark} goes"),
            Self::Rewritten { what, from } => write!(formatter, "{what} is written anew, from {from}"),
            Self::FromTwin { what, count } => write!(formatter, "{count} entries of {what} become what its copy says"),
            Self::Number { what, before, after } => write!(formatter, "{what} becomes {after}, it was {before}"),
            Self::LogReplayed => formatter.write_str("the changes in the log are made"),
            Self::LogGivenUp => {
                formatter.write_str("the log is emptied: no change in it is whole, and what it had is lost")
            }
            Self::BitmapsGivenUp => formatter
                .write_str("the bitmaps are given up, for they cannot be read: the next backups read the whole disk"),
            Self::GivenUp {
                what,
                count,
                unit_bytes,
                first_disk_offset,
            } => {
                write!(
                    formatter,
                    "{count} {what} that lead nowhere are given up, {unit_bytes} bytes of the disk each, "
                )?;
                match first_disk_offset {
                    Some(offset) => write!(formatter, "the first at disk offset {offset}: ")?,
                    None => formatter.write_str("in internal snapshots only: ")?,
                }
                formatter.write_str("what was there is lost, and reads as zero or as what the image is based on")
            }
            Self::Separated {
                count,
                unit_bytes,
                first_disk_offset,
            } => write!(
                formatter,
                "{count} parts of the disk, {unit_bytes} bytes each, the first at disk offset {first_disk_offset}, get a copy of what they \
                 share with another part: one of both has what belongs to the other, and nothing says which"
            ),
            Self::Cut { bytes } => write!(
                formatter,
                "{bytes} bytes at the end of the file that nothing uses are given back"
            ),
        }
    }
}

/// How far a repair goes. Each mode does what those before it do, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum RepairMode {
    /// Room that is taken for nothing is given back.
    Leaks,
    /// Repairs without a risk to data.
    #[default]
    Safe,
    /// What leads nowhere is given up, and reads as zero afterwards, or as what the image is based on. What two parts of the disk share is
    /// copied for one of them; nothing says which one it belonged to.
    All,
}
