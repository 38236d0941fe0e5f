//! What host snapshots are made of, and what follows from that for the machines in them.

use holdfast_host::Description;
use holdfast_host::provider::HostSnapshotScope;

/// What a request for host snapshots is about.
#[derive(Clone, Copy)]
pub enum Subject<'a> {
    /// Machines, each with all of its disks: if a machine has other disks by now, the snapshot fails.
    Machines,
    /// Datasets, with the machines in them, which may change. The function finds running machines with disks in the given datasets.
    Datasets(&'a dyn Fn(&[HostSnapshotScope]) -> Vec<Description>),
}

/// Which disks of a machine its host snapshots have to contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskCoverage {
    AllDisks,
    SomeDisks,
}

impl Subject<'_> {
    pub(super) fn coverage(&self) -> DiskCoverage {
        match self {
            Self::Machines => DiskCoverage::AllDisks,
            Self::Datasets(_) => DiskCoverage::SomeDisks,
        }
    }
}

/// How the host snapshots of a name are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CutMode {
    /// All are of one point in time, whatever the guests write.
    AtOnce,
    /// One after another: they are of one point in time only if the guests are stopped.
    InTurn,
}
