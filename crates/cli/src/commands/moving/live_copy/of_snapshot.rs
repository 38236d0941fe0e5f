//! A disk of a snapshot of a repository.

use holdfast_engine::{SnapshotName, open_snapshot_disk};
use holdfast_live_copy::StillSource;

use super::super::copy_target::CopyTarget;
use super::report::CopiedFrom;
use super::{LiveCopyArgs, NamedSource};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;

impl LiveCopyArgs {
    /// Copies a disk of a snapshot.
    pub(super) fn copy_snapshot(&self, target: &CopyTarget, context: &Context) -> Result<Exit, Error> {
        if self.format.is_some() || self.freezing.freeze_command.is_some() {
            return Err(Error::usage(
                "--format and --freeze-command do not apply to a snapshot, which has the content of a disk",
                "remove the option",
            ));
        }
        let name = self.source.to_string_lossy().parse::<SnapshotName>();
        let name =
            name.map_err(|error| Error::usage(error.to_string(), "holdfast list shows the snapshots of a repository"))?;
        let repository = context.open_repository()?;
        let disk = context.work(1, |job| open_snapshot_disk(&repository, &name, context.zone(), job))?;
        let id = disk.snapshot.id.to_string();
        let named = NamedSource {
            shown: format!("{}:{} of snapshot {}", disk.snapshot.machine, disk.name, &id[..8]),
            identity: format!("{id}:{}", disk.name).into_bytes(),
        };
        self.copy(
            &StillSource::new(&disk.device),
            target,
            &named,
            CopiedFrom::AtRest,
            context,
        )
    }
}
