//! How a job reports its progress.
//!
//! A job is a sequence of phases; each phase counts up bytes or items, to a total that may become known late. The job
//! reports events; the listener decides what to draw, log or ignore.

use std::fmt;

/// What a phase counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Things: packs, chunks, snapshots.
    Items,
}

/// What a job waits for most of its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bottleneck {
    /// Reading: the disk or image that bytes come from.
    Source,
    /// Hashing, compressing, encrypting.
    Cpu,
    /// The repository, which takes bytes or gives them.
    Repository,
    /// Writing: the image or disk that bytes go to.
    Target,
}

impl Bottleneck {
    /// The word for it in documents: it never changes.
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
/// Jobs call from any number of threads. [`advance`](Self::advance) is called for every step of a few kilobytes:
/// implementers make it cheap, and never block a job to draw something. Messages are complete sentences in the style of
/// errors (lower case, no full stop).
pub trait Progress: Send + Sync {
    /// A phase called `name` ("reading vda", "checking packs") starts at 0 of an unknown total; the one before has ended.
    fn phase(&self, name: &str, unit: Unit);

    /// The current phase will count up to `total`; it may be called again when more is known.
    fn total(&self, total: u64);

    /// The current phase has done `amount` more.
    fn advance(&self, amount: u64);

    /// The phases from now on are about one of several machines, disks or snapshots: the `number`-th, from 1, of `count`. With
    /// a `count` of 1 they are about all of it.
    fn part(&self, _number: usize, _count: usize) {}

    /// Something a person may want to know: why a full read was necessary, which way was chosen.
    fn note(&self, message: &str);

    /// Something a person should act on, though the job goes on; it makes the job "finished with warnings".
    fn warning(&self, message: &str);

    /// What the job has waited for most, lately.
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
