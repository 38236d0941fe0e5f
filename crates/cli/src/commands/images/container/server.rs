//! The processes that `holdfast container mount` starts.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::{
    ContainerMount, ContainerWorkerRequest, MountedDisk, MountedSnapshot, ServeUntil, SnapshotServeRequest,
    serve_container, serve_freezer,
};
use holdfast_host::{HandedProcess, LineProcess};

use super::mount_args::{MountContainerArgs, TransportArg};
use super::{ContainerArg, container_tools};
use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::mounts::{leave_stderr, leave_terminal};
use crate::context::server_process::leave_group;
use crate::errors::Error;
use crate::exit::Exit;

/// Arguments of `container mount-server`.
#[derive(Debug, clap::Args)]
pub(super) struct ContainerServerArgs {
    #[command(flatten)]
    mount: MountContainerArgs,
}

impl Verb for ContainerServerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The command container mount starts it",
        line: "holdfast container mount-server /srv/web1 /mnt/web1",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        leave_group();
        let mut left = Ok(());
        serve_container_mount(&self.mount, &self.mount.folder, context, &mut || {
            left = leave_terminal();
        })?;
        left?;
        Ok(Exit::Ok)
    }
}

/// Mounts a container until it is unmounted.
pub(super) fn serve_container_mount(
    args: &MountContainerArgs,
    folder: &Path,
    context: &Context,
    ready: &mut dyn FnMut(),
) -> Result<(), Error> {
    let tools = container_tools(context);
    let request = args.request(folder, context)?;
    let mount = ContainerMount::open(&request, &tools)?;
    let program = std::env::current_exe().map_err(|source| Error::File {
        action: "find",
        path: "/proc/self/exe".into(),
        source,
    })?;
    let launch = |predecessor_count: u32, device: OwnedFd, log: OwnedFd| {
        let mut words: Vec<OsString> = vec!["container".into(), "mount-worker".into()];
        words.extend([request.place.folder.clone().into(), mount.disk_folder().into()]);
        words.extend(["--predecessors".into(), predecessor_count.to_string().into()]);
        words.extend(args.through.words().iter().map(OsString::from));
        if !args.options.foreground {
            words.push("--background".into());
        }
        HandedProcess::start(&program.clone().into(), &words, device, log)
    };
    context.work(1, |job| mount.supervise(context.mount_events(), &launch, job, ready))
}

/// Arguments of `container mount-worker`.
#[derive(Debug, clap::Args)]
pub(super) struct ContainerWorkerArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// The mount point of the disk
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Number of workers that have ended
    #[arg(long, value_name = "COUNT", default_value = "0")]
    predecessors: u32,
    /// What makes a block device of the disk
    #[arg(long, value_name = "WHAT", value_enum, default_value_t)]
    through: TransportArg,
    /// Detach from standard error when the disk can be used
    #[arg(long)]
    background: bool,
}

impl Verb for ContainerWorkerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The command container mount-server starts it",
        line: "holdfast container mount-worker /srv/web1 /run/holdfast-container-1/disk",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        leave_group();
        let handed = |file: &dyn AsFd| file.as_fd().try_clone_to_owned().map_err(Error::Stdin);
        let request = ContainerWorkerRequest {
            place: self.container.place(context)?,
            disk_folder: self.folder.clone(),
            predecessor_count: self.predecessors,
            transport: self.through.transport(),
            device: handed(&std::io::stdin())?,
            log: handed(&std::io::stdout())?.into(),
            events: context.mount_events(),
            freezer: &|point: &Path| {
                let program = std::env::current_exe()?;
                let words: Vec<OsString> = vec!["container".into(), "freezer".into(), point.into()];
                LineProcess::start(&program.into(), &words)
            },
            tools: Box::new(container_tools(context)),
            clock: Arc::clone(context.clock()),
        };
        let mut left = Ok(());
        let mut ready = || {
            if self.background {
                left = leave_stderr();
            }
        };
        context.work(1, |job| serve_container(request, job, &mut ready))?;
        left?;
        Ok(Exit::Ok)
    }
}

/// Arguments of `container snapshot-server`.
#[derive(Debug, clap::Args)]
pub(super) struct SnapshotServerArgs {
    #[command(flatten)]
    mount: MountContainerArgs,
    /// End when no block device uses the disk any more
    #[arg(long)]
    until_detached: bool,
}

impl Verb for SnapshotServerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The command container mount --snapshot starts it",
        line: "holdfast container snapshot-server /srv/web1 /mnt/yesterday --snapshot yesterday",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        leave_group();
        let until = if self.until_detached {
            ServeUntil::Detached
        } else {
            ServeUntil::Unmounted
        };
        let mut left = Ok(());
        serve_snapshot(&self.mount, &self.mount.folder, until, context, &mut || {
            left = leave_terminal();
        })?;
        left?;
        Ok(Exit::Ok)
    }
}

/// Serves the disk of a snapshot as a raw file.
pub(super) fn serve_snapshot(
    args: &MountContainerArgs,
    folder: &Path,
    until: ServeUntil,
    context: &Context,
    ready: &mut dyn FnMut(),
) -> Result<(), Error> {
    let place = args.container.place(context)?;
    let snapshot = args.snapshot.as_deref().unwrap_or_default();
    let opened = MountedSnapshot::open(&place, snapshot, MountedDisk::File)?;
    let request = SnapshotServeRequest {
        name: format!("{}@{snapshot}", place.folder.display()),
        folder: folder.to_owned(),
        readers: args.readers(),
        until,
        events: context.mount_events(),
    };
    context.work(1, |job| opened.serve(&request, job, ready))
}

/// Arguments of `container freezer`.
#[derive(Debug, clap::Args)]
pub(super) struct FreezerArgs {
    /// The mount point of the file system
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

impl Verb for FreezerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The server of a container starts it for each snapshot",
        line: "holdfast container freezer /mnt/web1",
    }];

    fn run(&self, _: &Context) -> Result<Exit, Error> {
        leave_group();
        serve_freezer(
            &self.folder,
            &mut std::io::stdin().lock(),
            &mut std::io::stdout().lock(),
        )?;
        Ok(Exit::Ok)
    }
}
