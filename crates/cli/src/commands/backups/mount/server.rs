//! `holdfast mount-server`: the process that serves the files of mounted snapshots. `mount` starts it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_engine::{
    ListRequest, MountContent, MountRequest, MountedContent, SnapshotName, find_snapshot, list, paper_key,
};
use holdfast_repo::{Manifest, Repository};

use super::{MountArgs, Mounted};
use crate::args::{Example, MountOptionArgs};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::mounts::leave_terminal;
use crate::context::server_process::received_key;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::snapshot::SnapshotDocument;

/// Arguments of `mount-server`.
#[derive(Debug, clap::Args)]
pub(crate) struct MountServerArgs {
    /// The snapshot; without it, all snapshots
    #[arg(long, value_name = "SNAPSHOT")]
    snapshot: Option<SnapshotName>,
    /// The mount point
    #[arg(long, value_name = "FOLDER")]
    folder: PathBuf,
    #[command(flatten)]
    options: MountOptionArgs,
}

impl Verb for MountServerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "The command mount starts it",
        line: "holdfast mount-server -r /backup/vms --folder /mnt",
    }];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let location = context.location()?;
        let key = received_key("the command mount")?;
        let repository = context.open_by_key(&location, &key)?;
        drop(key);
        let content = self
            .snapshot
            .clone()
            .map_or(MountContent::Repository, MountContent::Snapshot);
        let mut left = Ok(());
        let mut ready = |_: &MountedContent| left = leave_terminal();
        serve(repository, content, &self.folder, self.options, context, &mut ready)?;
        left?;
        Ok(Exit::Ok)
    }
}

fn serve(
    repository: Repository,
    content: MountContent,
    folder: &Path,
    options: MountOptionArgs,
    context: &Context,
    ready: &mut dyn FnMut(&MountedContent),
) -> Result<(), Error> {
    let request = MountRequest {
        content,
        place: context.mount_place(context.location()?.path(), folder, options),
        zone: context.zone().clone(),
        describe,
    };
    let repository = Arc::new(repository);
    context.work(1, |job| holdfast_engine::mount(&repository, &request, job, ready))
}

/// The content of `snapshot.json`.
fn describe(manifest: &Manifest) -> Vec<u8> {
    let document = SnapshotDocument::from(manifest);
    let mut text = serde_json::to_vec_pretty(&document).expect("a document is made of texts and numbers");
    text.push(b'\n');
    text
}

fn report(mounted: &MountedContent, folder: &Path) -> Mounted {
    Mounted {
        command: "mount",
        snapshot: mounted.snapshot.map(|id| id.short()),
        snapshot_count: Some(mounted.snapshot_count as u64),
        folder: folder.display().to_string(),
    }
}

/// Serves the files until they are unmounted, or until Ctrl-C.
pub(super) fn in_foreground(
    content: MountContent,
    folder: &Path,
    args: &MountArgs,
    context: &Context,
) -> Result<Exit, Error> {
    let mut printed = Ok(Exit::Ok);
    let repository = context.open_repository()?;
    serve(repository, content, folder, args.options, context, &mut |mounted| {
        printed = context.report(&report(mounted, folder));
    })?;
    Ok(printed?.with_warning_count(context.console().warnings().len()))
}

/// Starts a process that serves the files of `snapshot`, an id with or without a disk, in `folder`, and returns when they
/// can be read. Returns an exit if it has ended; it has reported its error.
pub(in crate::commands::backups) fn serve_snapshot_in_background(
    repository: &Repository,
    snapshot: &str,
    folder: &Path,
    context: &Context,
) -> Result<Option<Exit>, Error> {
    let mut words = server_words(folder, context)?;
    words.extend(["--snapshot".into(), snapshot.into()]);
    context.serve_in_background(words, folder, Some(paper_key(repository).text()))
}

fn server_words(folder: &Path, context: &Context) -> Result<Vec<OsString>, Error> {
    let location = context.location()?;
    let path = std::path::absolute(location.path()).map_err(|source| Error::File {
        action: "look at",
        path: location.path().to_owned(),
        source,
    })?;
    let mut words: Vec<OsString> = vec!["mount-server".into(), "--folder".into(), folder.into()];
    words.extend(["--repository".into(), path.into()]);
    Ok(words)
}

/// Starts a process that serves the files, and returns when they can be read.
pub(super) fn in_background(
    content: &MountContent,
    folder: &Path,
    args: &MountArgs,
    context: &Context,
) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let mounted = find(&repository, content, context)?;
    let mut words = server_words(folder, context)?;
    if let (MountContent::Snapshot(name), Some(id)) = (content, mounted.snapshot) {
        // The id stays that of the snapshot that was found, also if a newer one is made meanwhile.
        let disk = name.disk.as_ref().map(|disk| format!(":{disk}")).unwrap_or_default();
        words.extend(["--snapshot".into(), format!("{id}{disk}").into()]);
    }
    if args.options.allow_other {
        words.push("--allow-other".into());
    }
    let key = paper_key(&repository);
    match context.serve_in_background(words, folder, Some(key.text()))? {
        None => context.report(&report(&mounted, folder)),
        Some(exit) => Ok(exit),
    }
}

/// What will be mounted. Errors of names are reported before the server is started.
fn find(repository: &Repository, content: &MountContent, context: &Context) -> Result<MountedContent, Error> {
    match content {
        MountContent::Snapshot(name) => {
            let progress = context.progress();
            let manifest = find_snapshot(repository, &name.snapshot, context.zone(), &*progress)?;
            if let Some(disk) = &name.disk {
                manifest
                    .disk(Some(disk.as_str()))
                    .map_err(holdfast_engine::Error::from)?;
            }
            Ok(MountedContent {
                snapshot_count: 1,
                snapshot: Some(manifest.id),
            })
        }
        MountContent::Repository => Ok(MountedContent {
            snapshot_count: list(repository, &ListRequest::default())?.snapshots.len(),
            snapshot: None,
        }),
    }
}
