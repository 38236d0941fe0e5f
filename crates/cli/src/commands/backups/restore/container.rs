//! `holdfast restore` of a container: to a container, a directory or an archive.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use holdfast_engine::{ContainerFiles, ContainerTarget, ContentCounts, ContentLoss, RestoredDisk, StoredContainer};
use holdfast_image::Format;
use holdfast_repo::Repository;
use serde::Serialize;

use super::{RestoreArgs, RestoredDiskDocument};
use crate::commands::backups::mount::serve_snapshot_in_background;
use crate::context::Context;
use crate::context::mounts::started;
use crate::context::standard_streams::{StandardOutput, refuse_terminal, stopped_or};
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::output::{Page, Report};
use crate::units;

/// Options of `restore` that are about containers.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options for containers")]
pub(super) struct ContainerRestoreArgs {
    /// Restore a container to this new folder; --format parallels chooses the format of its layers
    #[arg(long = "to-container", id = "to_container", value_name = "FOLDER", conflicts_with_all = ["target", "to_machine", "to_directory", "to_tar"])]
    container: Option<PathBuf>,
    /// Restore the files of a container to this folder, which is new or empty (as root)
    ///
    /// The kernel of this host mounts the file system in the snapshot, read-only. Use it for snapshots of containers
    /// that you trust; holdfast files restore reads any file system without the kernel.
    #[arg(long = "to-directory", id = "to_directory", value_name = "FOLDER", conflicts_with_all = ["target", "to_machine", "to_tar"])]
    directory: Option<PathBuf>,
    /// Write the files of a container to this new archive, or to standard output with `-` (as root)
    ///
    /// The kernel of this host mounts the file system in the snapshot, as with --to-directory.
    #[arg(long = "to-tar", id = "to_tar", value_name = "FILE", conflicts_with_all = ["target", "to_machine"])]
    tar: Option<PathBuf>,
}

/// Where a container is restored.
#[derive(Clone, Copy)]
pub(super) enum ContainerPlaceArg<'a> {
    Container(&'a Path),
    Directory(&'a Path),
    Tar(&'a Path),
}

impl ContainerRestoreArgs {
    pub(super) fn target(&self) -> Option<ContainerPlaceArg<'_>> {
        let container = self.container.as_deref().map(ContainerPlaceArg::Container);
        let directory = self.directory.as_deref().map(ContainerPlaceArg::Directory);
        container
            .or(directory)
            .or_else(|| self.tar.as_deref().map(ContainerPlaceArg::Tar))
    }
}

pub(super) fn run(args: &RestoreArgs, target: ContainerPlaceArg<'_>, context: &Context) -> Result<Exit, Error> {
    check(args, target)?;
    if matches!(target, ContainerPlaceArg::Tar(path) if is_stdout(path)) {
        context.output().refuse_json("restore to standard output")?;
    }
    let repository = context.open_repository()?;
    let zone = context.zone().clone();
    let stored = context.work(1, |job| StoredContainer::find(&repository, &args.snapshot, &zone, job))?;
    let serve = |folder: &Path, disk: &str| serve_disk(&repository, disk, folder, context);
    let files = ContainerFiles {
        runtime: context.runtime_folder(),
        serve: &serve,
    };
    let threads = args.job.thread_count();
    let document = |kind, target: &Path, format: Option<Format>| {
        let container = ContainerTargetDocument {
            kind,
            target: target.display().to_string(),
            size_bytes: stored.size_bytes(),
            format: format.map(Format::name),
            files: None,
        };
        ContainerRestored {
            dry_run: args.dry_run,
            ..ContainerRestored::new(&stored, container)
        }
    };
    let start = context.clock().now();
    let duration = || context.clock().now().saturating_sub(start);
    match target {
        ContainerPlaceArg::Container(folder) => {
            let target = ContainerTarget {
                folder: absolute(folder)?,
                format: args.format,
            };
            let document = document("container", &target.folder, Some(stored.format_of(&target)));
            if args.dry_run {
                refuse_existing(&target.folder)?;
                return context.report(&document);
            }
            let _noted = runs::note_places([target.folder.as_path()], context);
            let restored = context.work(threads, |job| stored.restore_container(&repository, &target, job))?;
            context.report(&document.with_disk(&restored, duration()))
        }
        ContainerPlaceArg::Directory(folder) => {
            let document = document("directory", folder, None);
            if args.dry_run {
                return context.report(&document);
            }
            let report = context.work(threads, |job| {
                stored.restore_directory(&repository, folder, &files, job)
            })?;
            warn_of_losses(&report.losses, report.loss_count, context);
            context.report(&document.with_files(report.counts, report.loss_count, duration()))
        }
        ContainerPlaceArg::Tar(path) if is_stdout(path) => to_stdout(&stored, &repository, &files, args, context),
        ContainerPlaceArg::Tar(path) => {
            let document = document("tar", path, None);
            if args.dry_run {
                refuse_existing(path)?;
                return context.report(&document);
            }
            let report = to_archive(&stored, &repository, path, &files, args, context)?;
            warn_of_losses(&report.losses, report.loss_count, context);
            context.report(&document.with_files(report.counts, report.loss_count, duration()))
        }
    }
}

/// Starts a process that serves a disk of the repository in a folder, and waits until it does.
fn serve_disk(
    repository: &Repository,
    disk: &str,
    folder: &Path,
    context: &Context,
) -> Result<(), holdfast_engine::Error> {
    started(serve_snapshot_in_background(repository, disk, folder, context))
}

fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

fn to_stdout(
    stored: &StoredContainer,
    repository: &Repository,
    files: &ContainerFiles<'_>,
    args: &RestoreArgs,
    context: &Context,
) -> Result<Exit, Error> {
    let mut output = StandardOutput::open(context)?;
    let report = context.work(args.job.thread_count(), |job| {
        stopped_or(stored.restore_tar(repository, &mut output, files, job), job)
    })?;
    warn_of_losses(&report.losses, report.loss_count, context);
    // Standard output contains only the archive.
    Ok(Exit::Ok.with_warning_count(context.console().warnings().len()))
}

/// Writes an archive, which is deleted if it is not complete.
fn to_archive(
    stored: &StoredContainer,
    repository: &Repository,
    path: &Path,
    files: &ContainerFiles<'_>,
    args: &RestoreArgs,
    context: &Context,
) -> Result<holdfast_engine::PackReport, Error> {
    let failed = |action: &'static str| {
        move |source| Error::File {
            action,
            path: path.to_owned(),
            source,
        }
    };
    let mut file = File::create_new(path).map_err(failed("create"))?;
    let packed = context.work(args.job.thread_count(), |job| {
        stored.restore_tar(repository, &mut file, files, job)
    });
    let synced = packed.and_then(|report| {
        file.flush().and_then(|()| file.sync_all()).map_err(failed("write"))?;
        Ok(report)
    });
    if synced.is_err() {
        std::fs::remove_file(path).ok();
    }
    synced
}

/// Reports options that make no sense for the target.
fn check(args: &RestoreArgs, target: ContainerPlaceArg<'_>) -> Result<(), Error> {
    let is_stream = matches!(target, ContainerPlaceArg::Tar(path) if is_stdout(path));
    let wrong = [
        (args.in_place, "--in-place"),
        (args.force, "--force"),
        (args.snapshot.disk.is_some(), ":DISK"),
        (is_stream && args.dry_run, "--dry-run"),
        (
            args.format.is_some() && !matches!(target, ContainerPlaceArg::Container(_)),
            "--format",
        ),
    ];
    let option = wrong.into_iter().find(|(is_given, _)| *is_given).map(|(_, name)| name);
    if let Some(option) = option.or_else(|| args.machine.out_of_place()) {
        return Err(Error::usage(
            format!("{option} does not go with a restore to a container, a directory or an archive"),
            "remove the option",
        ));
    }
    if args
        .format
        .is_some_and(|format| ![Format::Qcow2, Format::Parallels].contains(&format))
    {
        return Err(Error::usage(
            "the layers of a container are qcow2 or parallels",
            "choose one of the two",
        ));
    }
    if is_stream {
        refuse_terminal()?;
    }
    Ok(())
}

fn absolute(path: &Path) -> Result<PathBuf, Error> {
    std::path::absolute(path).map_err(|source| Error::File {
        action: "look at",
        path: path.to_owned(),
        source,
    })
}

fn refuse_existing(path: &Path) -> Result<(), Error> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    Err(Error::File {
        action: "create",
        path: path.to_owned(),
        source: std::io::ErrorKind::AlreadyExists.into(),
    })
}

/// Most losses that are shown.
const LOSSES_SHOWN: usize = 20;

fn warn_of_losses(losses: &[ContentLoss], loss_count: u64, context: &Context) {
    for loss in losses.iter().take(LOSSES_SHOWN) {
        context.console().warning(&format!("{}: {}", loss.path, loss.reason));
    }
    let rest = loss_count.saturating_sub(losses.len().min(LOSSES_SHOWN) as u64);
    if rest > 0 {
        context
            .console()
            .warning(&format!("{} more were not carried", units::count(rest)));
    }
}

/// Report of `restore` to a container, a directory or an archive.
#[derive(Debug, Serialize)]
struct ContainerRestored {
    dry_run: bool,
    id: String,
    machine: String,
    time: String,
    /// The disk that was written; none for files.
    disks: Vec<RestoredDiskDocument>,
    duration_ms: u64,
    container: ContainerTargetDocument,
}

#[derive(Debug, Serialize)]
struct ContainerTargetDocument {
    /// "container", "directory" or "tar".
    kind: &'static str,
    target: String,
    size_bytes: u64,
    /// The format of the layers; null for files.
    format: Option<&'static str>,
    /// What was restored; null for a container and a dry run.
    files: Option<FilesDocument>,
}

#[derive(Debug, Serialize)]
struct FilesDocument {
    file_count: u64,
    directory_count: u64,
    link_count: u64,
    data_bytes: u64,
    /// Files and attributes that were not carried.
    loss_count: u64,
}

impl ContainerRestored {
    fn new(stored: &StoredContainer, container: ContainerTargetDocument) -> Self {
        Self {
            dry_run: false,
            id: stored.snapshot.id.to_string(),
            machine: stored.snapshot.machine.clone(),
            time: holdfast_engine::time_of(&stored.snapshot).to_string(),
            disks: Vec::new(),
            duration_ms: 0,
            container,
        }
    }

    fn with_disk(self, disk: &RestoredDisk, duration: Duration) -> Self {
        Self {
            disks: vec![disk.into()],
            duration_ms: units::millis(duration),
            ..self
        }
    }

    fn with_files(mut self, counts: ContentCounts, loss_count: u64, duration: Duration) -> Self {
        self.duration_ms = units::millis(duration);
        self.container.files = Some(FilesDocument {
            file_count: counts.file_count,
            directory_count: counts.directory_count,
            link_count: counts.link_count + counts.hard_link_count,
            data_bytes: counts.data_bytes,
            loss_count,
        });
        self
    }
}

impl Report for ContainerRestored {
    fn command(&self) -> &'static str {
        "restore"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let container = &self.container;
        let what = match (&container.files, container.format, self.disks.first()) {
            (Some(files), ..) => format!(
                "{}, {}",
                units::counted(files.file_count, "file", "files"),
                units::bytes(files.data_bytes)
            ),
            (None, Some(format), Some(disk)) => format!(
                "{} disk of {format} layers, {} written",
                units::bytes(container.size_bytes),
                units::bytes(disk.written_bytes)
            ),
            (None, Some(format), None) => format!("{} disk of {format} layers", units::bytes(container.size_bytes)),
            (None, None, _) => "the files of its file system".to_owned(),
        };
        let would = if self.dry_run { "would restore" } else { "restored" };
        page.line(&format!(
            "{}  snapshot {}  {would} to {}: {what}",
            self.machine,
            &self.id[..8],
            container.target
        ));
    }
}
