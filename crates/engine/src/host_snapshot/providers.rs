//! The providers of host snapshots on this host.

use std::path::PathBuf;
use std::sync::Arc;

use holdfast_block::Clock;
use holdfast_host::Tools;
use holdfast_host::provider::{Btrfs, Dataset, Lvm, Provider, ProviderKind, Reflink, Zfs};
use holdfast_repo::ProcessIdentity;

use crate::machine::run_journal::written_process;

/// The providers of a host.
pub struct Providers {
    zfs: Zfs,
    btrfs: Btrfs,
    reflink: Reflink,
    lvm: Lvm,
    /// The process that makes host snapshots with these providers.
    pub(super) maker: Option<ProcessIdentity>,
}

/// Folder of the locks between users of LVM on this host. It is fixed because all of them must use the same.
const LVM_LOCKS: &str = "/run/holdfast";

impl Providers {
    /// The providers that use `tools`. Snapshots are mounted below `views` for reading.
    pub fn new(tools: &Arc<dyn Tools>, views: PathBuf, clock: Arc<dyn Clock>) -> Self {
        Self {
            zfs: Zfs::new(Arc::clone(tools), views, Arc::clone(&clock)),
            btrfs: Btrfs::new(Arc::clone(tools)),
            reflink: Reflink::default(),
            lvm: Lvm::new(Arc::clone(tools), LVM_LOCKS.into(), clock),
            maker: None,
        }
    }

    /// Records the process that makes snapshots, so that they are recognized as incomplete if it is killed.
    #[must_use]
    pub fn made_by(self, maker: ProcessIdentity) -> Self {
        Self {
            zfs: self.zfs.made_by(written_process(&maker).to_string()),
            maker: Some(maker),
            ..self
        }
    }

    /// The provider of this kind.
    pub fn of(&self, kind: ProviderKind) -> &dyn Provider {
        match kind {
            ProviderKind::Zfs => &self.zfs,
            ProviderKind::Btrfs => &self.btrfs,
            ProviderKind::Reflink => &self.reflink,
            ProviderKind::Lvm => &self.lvm,
        }
    }

    /// ZFS.
    pub fn zfs(&self) -> &Zfs {
        &self.zfs
    }

    /// LVM.
    pub fn lvm(&self) -> &Lvm {
        &self.lvm
    }

    /// The provider of a dataset.
    pub fn of_dataset(&self, dataset: &Dataset) -> &dyn Provider {
        self.of(dataset.provider)
    }
}
