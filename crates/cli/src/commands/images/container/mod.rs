//! `holdfast container`: a disk in a folder, mounted with its file system, with snapshots while it is used.

mod change;
mod check;
mod clone;
mod create;
pub(crate) mod freeze_args;
mod info;
mod mount;
mod mount_args;
mod resume;
mod runtime_args;
mod server;
mod snapshot;
mod switch;
mod template_source;

pub(crate) use mount::start_mount;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use holdfast_engine::ContainerPlace;
use holdfast_host::LocalTools;

use crate::args::{Example, SharedOptions, VerbEntry};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::process::time;

/// Arguments of `container`.
#[derive(Debug, clap::Args)]
pub(crate) struct ContainerArgs {
    #[command(subcommand)]
    verb: ContainerVerb,
}

verbs! {
    enum ContainerVerb {
        /// Create a container with a file system
        "create" => Create(create::CreateContainerArgs),
        /// Mount the file system of a container
        "mount" => Mount(mount_args::MountContainerArgs),
        /// Unmount a container, and wait until everything is written
        "unmount" => Unmount(mount::UnmountContainerArgs),
        /// Take a snapshot, also while the container is used
        "snapshot" => Snapshot(snapshot::ContainerSnapshotArgs),
        /// List the snapshots of a container
        "snapshots" => Snapshots(info::SnapshotsArgs),
        /// Go back to a snapshot
        "switch" => Switch(switch::SwitchArgs),
        /// Make a new container of a snapshot, or of the current state
        "clone" => Clone(clone::CloneContainerArgs),
        /// Start the processes of a snapshot with memory, after a switch to it
        "resume" => Resume(resume::ResumeContainerArgs),
        /// Delete snapshots; their data is merged into the layers above, also while the container is used
        "delete" => Delete(change::DeleteArgs),
        /// Delete all snapshots, or those between two, and merge their layers
        "merge" => Merge(change::MergeArgs),
        /// Grow the disk of a container and its file system, also while it is used
        "resize" => Resize(change::ResizeContainerArgs),
        /// Give space that the file system does not use back to the host
        "trim" => Trim(change::TrimArgs),
        /// Show a container: its disk, layers, snapshots and mounts
        "info" => Info(info::InfoArgs),
        /// Check the layers of a container
        "check" => Check(check::CheckArgs),
    }
    internal {
        /// Hold what a mounted container needs
        "mount-server" => MountServer(server::ContainerServerArgs),
        /// Serve the disk of a mounted container
        "mount-worker" => MountWorker(server::ContainerWorkerArgs),
        /// Freeze the file system of a container for its server
        "freezer" => Freezer(server::FreezerArgs),
        /// Serve a mounted snapshot of a container
        "snapshot-server" => SnapshotServer(server::SnapshotServerArgs),
    }
}

impl Verb for ContainerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Create a container of 20 GiB, and mount it",
        line: "holdfast container create /srv/web1 20G",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];
    const BELOW: &'static [VerbEntry] = ContainerVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

/// The container that a verb is about.
#[derive(Debug, Clone, clap::Args)]
pub(super) struct ContainerArg {
    /// The folder of the container
    #[arg(value_name = "CONTAINER")]
    container: PathBuf,
}

impl ContainerArg {
    fn place(&self, context: &Context) -> Result<ContainerPlace, Error> {
        Ok(ContainerPlace::find(&self.container, &context.runtime_folder())?)
    }
}

/// How long `mkfs`, or the growth of a file system, may take.
const TOOL_TIME_OUT: Duration = Duration::from_secs(3600);

fn container_tools(context: &Context) -> LocalTools {
    LocalTools::new(Arc::clone(context.clock()), TOOL_TIME_OUT)
}

/// The current time in seconds since 1970.
pub(crate) fn now_s() -> u64 {
    u64::try_from(time::now().as_second()).unwrap_or(0)
}
