//! `holdfast restore --to-machine --live`: starts the machine immediately and fills its images while it runs.

use std::path::Path;
use std::time::Duration;

use holdfast_engine::{
    FillOptions, FillRate, InstantRestore, MachineRestorePlan, MachineRestoreReport, Started, restore_instantly,
};
use holdfast_host::Libvirt;
use holdfast_repo::Repository;

use super::done::{LiveDocument, MachineRestored};
use crate::commands::backups::live_server::launch;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::units;

/// The restore and its options.
pub(super) struct Live<'a> {
    pub(super) repository: &'a Repository,
    pub(super) hypervisor: &'a Libvirt,
    pub(super) storage: Option<&'a Path>,
    /// The rate at which its disks are filled.
    pub(super) rate: FillRate,
    /// Time of the user's request.
    pub(super) since: Duration,
}

impl Live<'_> {
    /// Carries out the plan as a live restore.
    pub(super) fn run(&self, plan: &MachineRestorePlan, context: &Context) -> Result<Exit, Error> {
        let location = context.location()?;
        let path = std::path::absolute(location.path()).map_err(|source| Error::File {
            action: "find",
            path: location.path().to_owned(),
            source,
        })?;
        let fill = FillOptions {
            launch: &|instant| launch(instant, self.repository),
            rate: self.rate,
        };
        let request = InstantRestore {
            repository: self.repository,
            location: &path,
            plan,
            storage: self.storage,
            fill: &fill,
            since: self.since,
            places: runs::places(context),
        };
        let report = context.work(1, |job| {
            restore_instantly(&request, self.hypervisor, &context.environment(), job)
        })?;
        let live = LiveDocument {
            runs_after_ms: units::millis(report.runs_after.unwrap_or_default()),
            fill_ms: units::millis(report.fill_duration),
        };
        let whole = MachineRestoreReport {
            disks: Vec::new(),
            started: Started::Yes,
            duration: context.clock().now().saturating_sub(self.since),
        };
        context.report(&MachineRestored::new(plan, Some(&whole)).with_live(live))
    }
}
