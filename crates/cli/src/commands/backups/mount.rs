//! `holdfast mount` and `holdfast unmount`: snapshots as folders. Snapshots of a repository are served over FUSE, host
//! snapshots are mounted by their file system.

mod server;

pub(super) use server::serve_snapshot_in_background;

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_block::Clock as _;
use holdfast_engine::{MountContent, SnapshotName, is_mounted_from_container};
use holdfast_host::fuse_mount::{is_fuse_mount, unmount_unused_fuse};
use holdfast_host::provider::{self, Mounts};
use holdfast_host::{ProcessInfo, processes_named};
use serde::Serialize;

pub(super) use self::server::MountServerArgs;
use crate::args::{Example, MountOptionArgs, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::mounts::{empty_mount_point, mount_point};
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::datasets;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `mount`.
#[derive(Debug, clap::Args)]
#[command(allow_missing_positional = true)]
pub(crate) struct MountArgs {
    /// A snapshot (ID, MACHINE, MACHINE@TIME, with :DISK one of its disks), or a host snapshot (DATASET@NAME); without
    /// it, all snapshots of the repository
    #[arg(value_name = "SNAPSHOT")]
    snapshot: Option<OsString>,
    /// An empty folder
    #[arg(value_name = "FOLDER", required = true)]
    folder: PathBuf,
    #[command(flatten)]
    options: MountOptionArgs,
}

/// Arguments of `unmount`.
#[derive(Debug, clap::Args)]
pub(crate) struct UnmountArgs {
    /// The folder where snapshots are mounted
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

impl Verb for MountArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Browse all snapshots of a repository",
            line: "holdfast mount -r /backup/vms /mnt",
        },
        Example {
            wish: "Show the disks of the newest snapshot of a machine as files",
            line: "holdfast mount -r /backup/vms web1 /mnt",
        },
        Example {
            wish: "Look at images in a host snapshot",
            line: "holdfast mount tank/vm@before-update /mnt",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        mount(self, context)
    }
}

impl Verb for UnmountArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Unmount it",
        line: "holdfast unmount /mnt",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        unmount(self, context)
    }
}

/// Report of both verbs.
#[derive(Debug, Serialize)]
struct Mounted {
    #[serde(skip)]
    command: &'static str,
    /// The host snapshot, or the id of the snapshot; null if all snapshots of a repository are mounted, and for
    /// `unmount`.
    snapshot: Option<String>,
    /// The number of mounted snapshots; null for host snapshots and for `unmount`.
    snapshot_count: Option<u64>,
    folder: String,
}

impl Report for Mounted {
    fn command(&self) -> &'static str {
        self.command
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let folder = &self.folder;
        match (&self.snapshot, self.snapshot_count) {
            (Some(snapshot), _) => page.line(&format!("{snapshot} is mounted at {folder}, read-only")),
            (None, Some(1)) => page.line(&format!("1 snapshot is mounted at {folder}, read-only")),
            (None, Some(count)) => {
                let count = units::count(count);
                page.line(&format!("{count} snapshots are mounted at {folder}, read-only"));
            }
            (None, None) => page.line(&format!("nothing is mounted at {folder} any more")),
        }
    }
}

/// What a word means.
enum MountSource {
    Repository(MountContent),
    HostSnapshot(OsString),
}

/// Whether a word is the name of a host snapshot. No machine has a name with a slash or a colon; `tank@daily` is a host
/// snapshot unless a repository is named.
fn is_host_snapshot(word: &OsStr, context: &Context) -> bool {
    let text = word.to_string_lossy();
    let Some((dataset, name)) = text.split_once('@') else {
        return false;
    };
    if dataset.contains(['/', ':']) {
        return true;
    }
    let is_snapshot = text.parse::<SnapshotName>().is_ok();
    !context.is_repository_named() && (name.is_empty() || !is_snapshot)
}

fn source(word: Option<&OsString>, context: &Context) -> Result<MountSource, Error> {
    let Some(word) = word else {
        return Ok(MountSource::Repository(MountContent::Repository));
    };
    if is_host_snapshot(word, context) {
        return Ok(MountSource::HostSnapshot(word.clone()));
    }
    let name = word.to_string_lossy().parse::<SnapshotName>();
    let name =
        name.map_err(|error| Error::usage(error.to_string(), "holdfast list shows the snapshots of a repository"))?;
    Ok(MountSource::Repository(MountContent::Snapshot(name)))
}

fn mount(args: &MountArgs, context: &Context) -> Result<Exit, Error> {
    let source = source(args.snapshot.as_ref(), context)?;
    let folder = empty_mount_point(&args.folder)?;
    match source {
        MountSource::HostSnapshot(word) => {
            check_host_options(args)?;
            mount_host_snapshot(&word, &folder, context)
        }
        MountSource::Repository(content) if args.options.foreground => {
            server::in_foreground(content, &folder, args, context)
        }
        MountSource::Repository(content) => server::in_background(&content, &folder, args, context),
    }
}

/// The kernel mounts host snapshots, so these options have no meaning.
fn check_host_options(args: &MountArgs) -> Result<(), Error> {
    let option = match (args.options.allow_other, args.options.foreground) {
        (true, _) => "--allow-other",
        (_, true) => "--foreground",
        (false, false) => return Ok(()),
    };
    Err(Error::usage(
        format!("{option} is for snapshots of a repository, and this is a host snapshot"),
        "remove the option",
    ))
}

fn mount_host_snapshot(word: &OsStr, folder: &Path, context: &Context) -> Result<Exit, Error> {
    let snapshot = datasets::parse_snapshot(word)?;
    let (tools, providers) = (datasets::tools(context), datasets::providers(context));
    let owner = providers.of_dataset(&snapshot.dataset);
    provider::mount(&*tools, owner, providers.zfs(), &snapshot, folder).map_err(holdfast_engine::Error::from)?;
    context.report(&Mounted {
        command: "mount",
        snapshot: Some(snapshot.to_string()),
        snapshot_count: None,
        folder: folder.display().to_string(),
    })
}

fn unmount(args: &UnmountArgs, context: &Context) -> Result<Exit, Error> {
    let folder = mount_point(&args.folder)?;
    let mounts = Mounts::read().map_err(holdfast_engine::Error::from)?;
    if is_fuse_mount(&folder, &mounts) {
        flush(&folder)?;
        unmount_unused_fuse(&folder, &**context.clock()).map_err(holdfast_engine::Error::from)?;
        wait_for_server(&folder, context);
    } else if is_mounted_from_container(&folder, &context.runtime_folder(), &mounts) {
        return Err(Error::usage(
            format!("the file system of a container is mounted on {}", folder.display()),
            "holdfast container unmount CONTAINER|DIR",
        ));
    } else {
        let (tools, providers) = (datasets::tools(context), datasets::providers(context));
        provider::unmount(&*tools, providers.zfs(), &**context.clock(), &folder)
            .map_err(holdfast_engine::Error::from)?;
    }
    context.report(&Mounted {
        command: "unmount",
        snapshot: None,
        snapshot_count: None,
        folder: folder.display().to_string(),
    })
}

/// Makes the writes to a mounted image durable. After the folder is unmounted, no program would notice an error.
///
/// The files of a server that has ended cannot be flushed.
fn flush(folder: &Path) -> Result<(), Error> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries {
        let is_writable = entry
            .metadata()
            .is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o200 != 0);
        if !is_writable {
            continue;
        }
        let path = entry.path();
        let flushed = File::open(&path).and_then(|file| file.sync_all());
        flushed.map_err(|source| Error::File {
            action: "flush",
            path,
            source,
        })?;
    }
    Ok(())
}

/// The name of this program as a file.
const PROGRAM_NAME: &str = "holdfast";
/// How long the server may take to close the image.
const SERVER_PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the server in the background has ended, so that another program can use the image.
fn wait_for_server(folder: &Path, context: &Context) {
    let is_server = |process: &ProcessInfo| {
        let words = &process.arguments;
        words.iter().any(|word| word == "mount-server") && words.iter().any(|word| Path::new(word) == folder)
    };
    let is_running = || processes_named(PROGRAM_NAME).is_some_and(|all| all.iter().any(is_server));
    let deadline = context.clock().now() + SERVER_PATIENCE;
    while is_running() && context.clock().now() < deadline {
        context.clock().sleep(Duration::from_millis(20));
    }
}
