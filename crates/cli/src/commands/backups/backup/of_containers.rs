//! `holdfast backup` of containers.

use std::ffi::OsString;
use std::path::PathBuf;

use holdfast_engine::{
    Consistency, ContainerBackupRequest, ContainerPlace, SnapshotOptions, back_up_container, plan_container_backup,
};
use holdfast_repo::Repository;

use super::BackupArgs;
use super::planned::Turn;
use crate::context::Context;
use crate::errors::Error;
use crate::machines::guests::QuiesceWhen;
use crate::machines::runs;

/// The hypervisor address of containers, for called programs.
const HYPERVISOR: &str = "container:";

/// The containers in these folders; options that do not apply to them are an error.
pub(super) fn choose(folders: &[PathBuf], args: &BackupArgs, context: &Context) -> Result<Vec<ContainerPlace>, Error> {
    if !folders.is_empty() {
        args.machines.refuse_options_of_containers()?;
    }
    let runtime = context.runtime_folder();
    let mut places: Vec<ContainerPlace> = Vec::new();
    for folder in folders {
        let place = ContainerPlace::find(folder, &runtime)?;
        if !places.contains(&place) {
            places.push(place);
        }
    }
    Ok(places)
}

/// Backs up one of the containers.
pub(super) fn back_up(
    place: &ContainerPlace,
    args: &BackupArgs,
    snapshot: &SnapshotOptions,
    repository: &Repository,
    context: &Context,
) -> Result<Turn, Error> {
    let word = format!("container:{}", place.folder.display());
    let folder_name = place.folder.file_name().unwrap_or_default().to_string_lossy();
    let name = args.listed(&folder_name, &word)?;
    let way = [OsString::from(&word)];
    let _noted = runs::note_places([place.folder.join("container.json").as_path()], context);
    let request = ContainerBackupRequest {
        place: place.clone(),
        capture: args.capture_options(name, HYPERVISOR, &way, context)?,
        consistency: match args.machines.reading.quiesce {
            QuiesceWhen::Try => Consistency::Automatic,
            QuiesceWhen::Require => Consistency::Frozen,
            QuiesceWhen::Off => Consistency::Crash,
        },
        bytes_per_second: args.machines.reading.limits.limits().bytes_per_second,
    };
    context.work(args.job.thread_count(), |job| {
        if args.dry_run {
            let plan = plan_container_backup(repository, request, snapshot.clone(), job)?;
            return Ok(Turn::Planned(plan.into()));
        }
        let report = back_up_container(repository, request, snapshot.clone(), job)?;
        Ok(Turn::BackedUp(Box::new(report.into())))
    })
}
