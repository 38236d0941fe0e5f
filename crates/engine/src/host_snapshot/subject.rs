//! What host snapshots are made of, and what follows from that for the machines in them.

use holdfast_host::Description;
use holdfast_host::provider::HostSnapshotScope;

/// What host snapshots are about.
#[derive(Clone, Copy)]
pub enum Subject<'a> {
    /// Machines, each with all of its disks: where one has others by now, there is no snapshot.
    Machines,
    /// Datasets, with the machines in them: these come and go. The function finds those that run and have disks in what was wanted.
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

/// How the host snapshots of a name come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CutMode {
    /// All are of one point in time, whatever the guests write.
    AtOnce,
    /// One after another: they are of one point in time only if the guests are stopped.
    InTurn,
}
