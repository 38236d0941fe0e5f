//! How a job reports its progress.
//!
//! A job is a sequence of phases. Each phase counts bytes or items up to a total that may become known late. The job
//! reports events; the listener decides what to draw, log or ignore.

use std::fmt;

/// What a phase counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Items: packs, chunks, snapshots.
    Items,
}

/// What a job waits for most of its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bottleneck {
    /// Reading: the disk or image that bytes come from.
    Source,
    /// Hashing, compression and encryption.
    Cpu,
    /// Reading from or writing to the repository.
    Repository,
    /// Writing: the image or disk that bytes go to.
    Target,
}

impl Bottleneck {
    /// The word for it in machine-readable output; it never changes.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Cpu => "cpu",
            Self::Repository => "repository",
            Self::Target => "target",
        }
    }
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Source => "the source",
            Self::Cpu => "hashing and compressing",
            Self::Repository => "the repository",
            Self::Target => "the target",
        })
    }
}

/// Listens to the events of a job.
///
/// Jobs call these methods from any number of threads. [`advance`](Self::advance) is called for every step of a few kilobytes:
/// implementations must be fast and must not block a job for drawing. Messages are complete sentences in the style of
/// errors (lower case, no full stop).
pub trait Progress: Send + Sync {
    /// A phase called `name` ("reading vda", "checking packs") starts at 0 of an unknown total; the previous phase has ended.
    fn phase(&self, name: &str, unit: Unit);

    /// The current phase will count up to `total`. May be called again when a better total is known.
    fn total(&self, total: u64);

    /// The current phase has done `amount` more.
    fn advance(&self, amount: u64);

    /// The following phases are about one of several machines, disks or snapshots: number `number` of `count`, from 1.
    /// A `count` of 1 means that they are about the whole job.
    fn part(&self, _number: usize, _count: usize) {}

    /// Reports information for the user: why a full read was necessary, which method was chosen.
    fn note(&self, message: &str);

    /// Reports a problem that the user should act on although the job continues. The job then ends as "finished with warnings".
    fn warning(&self, message: &str);

    /// Reports what the job has recently waited for most.
    fn bottleneck(&self, bottleneck: Bottleneck);
}

/// A listener that ignores everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn phase(&self, _name: &str, _unit: Unit) {}
    fn total(&self, _total: u64) {}
    fn advance(&self, _amount: u64) {}
    fn note(&self, _message: &str) {}
    fn warning(&self, _message: &str) {}
    fn bottleneck(&self, _bottleneck: Bottleneck) {}
}
