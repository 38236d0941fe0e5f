//! Whether the file system of a container is frozen.

use holdfast_engine::{Consistency, TakenSnapshot};

use crate::context::Context;

/// Options for a snapshot of a mounted container.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct FreezeArgs {
    /// Take no snapshot if the file system cannot be frozen
    #[arg(long, conflicts_with = "no_freeze")]
    require_freeze: bool,
    /// Do not freeze the file system: the snapshot is the disk as after a power failure
    #[arg(long)]
    no_freeze: bool,
}

impl FreezeArgs {
    pub(crate) fn consistency(&self) -> Consistency {
        match (self.require_freeze, self.no_freeze) {
            (true, _) => Consistency::Frozen,
            (_, true) => Consistency::Crash,
            _ => Consistency::Automatic,
        }
    }
}

/// Warns of a file system that was not frozen, or that may still be frozen.
pub(crate) fn warn_of_freeze(taken: &TakenSnapshot, context: &Context) {
    if let Some(reason) = &taken.not_frozen {
        context.console().warning(&format!(
            "the file system was not frozen ({reason}): the snapshot is the disk as after a power failure"
        ));
    }
    if let Some(reason) = &taken.thaw_failure {
        context.console().warning(&format!(
            "the file system may still be frozen ({reason}): fsfreeze --unfreeze on its mount point thaws it"
        ));
    }
}
