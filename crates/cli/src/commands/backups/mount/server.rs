//! `holdfast mount-server`: the process that serves the files of mounted snapshots. `mount` starts it.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use holdfast_block::error_text;
use holdfast_engine::{MountContent, MountRequest, MountedContent, SnapshotName, find_snapshot, list};
use holdfast_host::fuse_mount::MountReaders;
use holdfast_repo::{Manifest, Repository};
use holdfast_serve::fuse::MountEvents;

use super::{MountArgs, Mounted};
use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::server_process::{ServerStart, received_key, report_ready, start_server};
use crate::errors::{Error, Kind};
use crate::exit::Exit;
use crate::output::Console;
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
    /// Allow all users of this host to read the files
    #[arg(long)]
    allow_other: bool,
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
        let options = Options {
            folder: &self.folder,
            readers: readers(self.allow_other),
        };
        let mut left = Ok(());
        serve(repository, content, &options, context, &mut |_| left = leave())?;
        left?;
        Ok(Exit::Ok)
    }
}

/// Where the errors of a server in the background go.
const NO_LOG: &str = "/dev/null";

/// Reports that the files can be read, and detaches from the terminal.
fn leave() -> Result<(), Error> {
    let log = || report_ready(File::options().write(true).open(NO_LOG)?);
    log().map_err(|source| Error::File {
        action: "write",
        path: NO_LOG.into(),
        source,
    })
}

fn readers(allow_other: bool) -> MountReaders {
    if allow_other {
        MountReaders::Everyone
    } else {
        MountReaders::Owner
    }
}

struct Options<'a> {
    folder: &'a Path,
    readers: MountReaders,
}

fn serve(
    repository: Repository,
    content: MountContent,
    options: &Options<'_>,
    context: &Context,
    ready: &mut dyn FnMut(&MountedContent),
) -> Result<(), Error> {
    let request = MountRequest {
        content,
        source: format!("holdfast:{}", context.location()?.path().display()),
        folder: options.folder.to_owned(),
        readers: options.readers,
        zone: context.zone().clone(),
        describe,
        events: Arc::new(ReadErrors(context.shared_console())),
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

/// Prints errors of reads as warnings.
struct ReadErrors(Arc<Console>);

impl MountEvents for ReadErrors {
    fn open_failed(&self, file: &str, error: &std::io::Error) {
        self.0.warning(&format!("{file}: {}", error_text(error)));
    }

    fn read_failed(&self, file: &str, error: &holdfast_block::Error) {
        self.0.warning(&format!("{file}: {}", error_text(error)));
    }
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
    let options = Options {
        folder,
        readers: readers(args.allow_other),
    };
    let mut printed = Ok(Exit::Ok);
    let repository = context.open_repository()?;
    serve(repository, content, &options, context, &mut |mounted| {
        printed = context.report(&report(mounted, folder));
    })?;
    Ok(printed?.with_warning_count(context.console().warnings().len()))
}

/// Starts a process that serves the files, and returns when they can be read.
pub(super) fn in_background(
    content: &MountContent,
    folder: &Path,
    args: &MountArgs,
    context: &Context,
) -> Result<Exit, Error> {
    let location = context.location()?;
    let repository = context.open_repository()?;
    let mounted = count(&repository, content, context)?;
    let mut words: Vec<OsString> = vec!["mount-server".into(), "--folder".into(), folder.into()];
    words.extend(["--repository".into(), absolute(location.path())?.into()]);
    if let (MountContent::Snapshot(name), Some(id)) = (content, mounted.snapshot) {
        // The id stays that of the snapshot that was found, also if a newer one is made meanwhile.
        let disk = name.disk.as_ref().map(|disk| format!(":{disk}")).unwrap_or_default();
        words.extend(["--snapshot".into(), format!("{id}{disk}").into()]);
    }
    if args.allow_other {
        words.push("--allow-other".into());
    }
    if context.output().format() == crate::output::Format::Json {
        words.push("--json".into());
    }
    let started = start_server(&words, &repository, &**context.clock());
    let started = started.map_err(|source| Error::File {
        action: "start a process for",
        path: folder.to_owned(),
        source,
    })?;
    match started {
        ServerStart::Ready => context.report(&report(&mounted, folder)),
        ServerStart::Ended { exit, output } => {
            // The server has reported its error.
            let text: Vec<u8> = output
                .into_iter()
                .flat_map(|line| OsString::from(line + "\n").into_vec())
                .collect();
            context.output().data(&text)?;
            Ok(exit)
        }
        ServerStart::Silent => Err(Error::refused(
            Kind::Io,
            format!("the process that serves {} does not answer", folder.display()),
            "try again with --foreground, which prints what it does",
        )),
    }
}

fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|source| Error::File {
        action: "look at",
        path: path.to_owned(),
        source,
    })
}

/// What will be mounted. Errors of names are reported before the server is started.
fn count(repository: &Repository, content: &MountContent, context: &Context) -> Result<MountedContent, Error> {
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
            snapshot_count: list(repository, &holdfast_engine::ListRequest::default())?
                .snapshots
                .len(),
            snapshot: None,
        }),
    }
}
