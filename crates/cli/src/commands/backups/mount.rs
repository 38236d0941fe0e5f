//! `holdfast mount` and `holdfast unmount`: mount and unmount host snapshots.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use holdfast_host::provider;
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::machines::datasets;
use crate::output::{Page, Report};

/// Arguments of `mount`.
#[derive(Debug, clap::Args)]
pub(crate) struct MountArgs {
    /// The host snapshot: tank/vm@NAME, btrfs:/srv/vms@NAME
    #[arg(value_name = "DATASET@NAME")]
    snapshot: OsString,
    /// An empty folder
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

/// Arguments of `unmount`.
#[derive(Debug, clap::Args)]
pub(crate) struct UnmountArgs {
    /// The folder where a host snapshot is mounted
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

impl Verb for MountArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Look at images in a host snapshot",
        line: "holdfast mount tank/vm@before-update /mnt",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

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
    snapshot: Option<String>,
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
        match &self.snapshot {
            Some(snapshot) => page.line(&format!("{snapshot} is mounted at {}, read-only", self.folder)),
            None => page.line(&format!("nothing is mounted at {} any more", self.folder)),
        }
    }
}

/// The absolute path of an empty folder, without symbolic links and dots.
fn folder(path: &Path) -> Result<PathBuf, Error> {
    let failed = |source| Error::File {
        action: "look at",
        path: path.to_owned(),
        source,
    };
    path.canonicalize().map_err(failed)
}

/// Returns an error for a snapshot of a repository. Other backup programs can mount those, so the hint says how to
/// read it instead.
fn refuse_of_repository(word: &OsStr, context: &Context) -> Result<(), Error> {
    let text = word.to_string_lossy();
    let kind = match (context.is_repository_named(), text.contains('@')) {
        (false, true) => return Ok(()),
        (false, false) => Kind::NotFound,
        (true, _) => Kind::Unsupported,
    };
    Err(Error::refused(
        kind,
        format!("{text} is not the name of a host snapshot, and snapshots of a repository cannot be mounted"),
        "open their disks with 'holdfast serve nbd', or write them to files with 'holdfast restore'; host snapshots are named DATASET@NAME: \
         'holdfast host list' shows them",
    ))
}

fn mount(args: &MountArgs, context: &Context) -> Result<Exit, Error> {
    refuse_of_repository(&args.snapshot, context)?;
    let snapshot = datasets::parse_snapshot(&args.snapshot)?;
    let folder = folder(&args.folder)?;
    let is_empty = std::fs::read_dir(&folder).is_ok_and(|mut entries| entries.next().is_none());
    if !is_empty {
        return Err(Error::refused(
            Kind::Exists,
            format!("{} is not empty", folder.display()),
            "choose an empty folder: a mount would hide what is in this one",
        ));
    }
    let (tools, providers) = (datasets::tools(context), datasets::providers(context));
    let owner = providers.of_dataset(&snapshot.dataset);
    provider::mount(&*tools, owner, providers.zfs(), &snapshot, &folder).map_err(holdfast_engine::Error::from)?;
    context.report(&Mounted {
        command: "mount",
        snapshot: Some(snapshot.to_string()),
        folder: folder.display().to_string(),
    })
}

fn unmount(args: &UnmountArgs, context: &Context) -> Result<Exit, Error> {
    let folder = folder(&args.folder)?;
    let (tools, providers) = (datasets::tools(context), datasets::providers(context));
    provider::unmount(&*tools, providers.zfs(), &folder).map_err(holdfast_engine::Error::from)?;
    context.report(&Mounted {
        command: "unmount",
        snapshot: None,
        folder: folder.display().to_string(),
    })
}
