//! `holdfast files restore`: restores files of a guest into a folder.

use std::path::PathBuf;

use holdfast_engine::{
    Execution, GuestAddress, GuestFilesError, RestoredFiles, TargetConflicts, TreeRestoreRequest, restore_tree,
};
use serde::Serialize;

use super::document::{FailureDocument, warn_of};
use super::options::{ReaderArgs, reader_word};
use super::{Located, address_parser, locate};
use crate::args::{Example, Switch as _};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::{Error, advice_on_device};
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `files restore`.
#[derive(Debug, clap::Args)]
pub(crate) struct FilesRestoreArgs {
    /// The snapshot (ID, MACHINE, MACHINE@TIME), and the path of a file or directory
    #[arg(value_name = "SNAPSHOT[:DISK][:VOLUME]:/PATH", value_parser = address_parser())]
    address: GuestAddress,
    /// The folder that receives the file or directory; created if it does not exist
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
    /// Replace existing files
    #[arg(long)]
    force: bool,
    /// Show how much would be restored; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    readers: ReaderArgs,
}

impl Verb for FilesRestoreArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Restore a directory of a guest into a folder",
            line: "holdfast files restore -r /backup/vms web1:/etc/nginx restored",
        },
        Example {
            wish: "Restore a file of a Windows machine as it was at a given time",
            line: "holdfast files restore -r /backup/vms pc7@2026-11-20:2:/Users/anna/plan.xlsx /tmp",
        },
        Example {
            wish: "See how much a volume holds",
            line: "holdfast files restore -r /backup/vms db:vg0/data:/ restored --dry-run",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `files restore`.
#[derive(Debug, Serialize)]
struct FilesTakenOut {
    dry_run: bool,
    id: String,
    machine: String,
    time: String,
    volume: String,
    reader: &'static str,
    target: String,
    file_count: u64,
    directory_count: u64,
    link_count: u64,
    /// Further names of restored files.
    hard_link_count: u64,
    /// Devices, pipes and sockets, which are skipped.
    special_count: u64,
    /// Extended attributes that only root may set.
    skipped_attribute_count: u64,
    /// Extended attributes that the target does not take.
    failed_attribute_count: u64,
    size_bytes: u64,
    failure_count: u64,
    /// The first files that were not restored.
    failures: Vec<FailureDocument>,
    #[serde(skip)]
    exit: Exit,
}

impl FilesTakenOut {
    fn new(located: Located, restored: &RestoredFiles, args: &FilesRestoreArgs) -> Self {
        Self {
            dry_run: args.dry_run,
            id: located.id,
            machine: located.machine,
            time: located.time,
            volume: located.files.volume,
            reader: reader_word(located.files.reader),
            target: args.folder.display().to_string(),
            file_count: restored.file_count,
            directory_count: restored.directory_count,
            link_count: restored.link_count,
            hard_link_count: restored.hard_link_count,
            special_count: restored.special_count,
            skipped_attribute_count: restored.skipped_attribute_count,
            failed_attribute_count: restored.failed_attribute_count,
            size_bytes: restored.bytes,
            failure_count: restored.failure_count,
            failures: restored.failures.iter().map(FailureDocument::from).collect(),
            exit: match (&restored.disk_error, restored.failure_count) {
                (None, 0) => Exit::Ok,
                (None, _) => Exit::Error,
                (Some(error), _) => advice_on_device(error).exit,
            },
        }
    }
}

impl Report for FilesTakenOut {
    fn command(&self) -> &'static str {
        "files restore"
    }

    fn exit(&self) -> Exit {
        self.exit
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let done = if self.dry_run { "would be restored" } else { "restored" };
        page.line(&format!(
            "{}  snapshot {}  volume {}: {}, {}, {} and {} {done} to {}",
            self.machine,
            &self.id[..8],
            self.volume,
            units::counted(self.file_count, "file", "files"),
            units::counted(self.directory_count, "directory", "directories"),
            units::counted(self.link_count, "link", "links"),
            units::bytes(self.size_bytes),
            self.target
        ));
        if self.hard_link_count > 0 {
            page.line(&format!(
                "linked: {}",
                units::counted(self.hard_link_count, "further name of a file", "further names of files")
            ));
        }
        if self.special_count > 0 {
            page.line(&format!(
                "skipped: {}",
                units::counted(
                    self.special_count,
                    "device, pipe or socket",
                    "devices, pipes and sockets"
                )
            ));
        }
        if self.failure_count > 0 {
            page.line(&format!(
                "not restored: {}",
                units::counted(self.failure_count, "file", "files")
            ));
        }
    }
}

fn run(args: &FilesRestoreArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let request = TreeRestoreRequest {
        target: args.folder.clone(),
        conflicts: if args.force {
            TargetConflicts::Replace
        } else {
            TargetConflicts::Keep
        },
        execution: args.dry_run.execution(),
    };
    let (located, restored) = args.readers.with(context, |readers| {
        context.work(1, |job| {
            if args.address.path.is_empty() {
                return Err(GuestFilesError::NoPath.into());
            }
            let mut located = locate(&repository, &args.address, readers, context, job)?;
            let restored = restore_tree(&mut located.files, &request, job)?;
            Ok((located, restored))
        })
    })?;
    warn_of(&restored.failures, context);
    if request.execution == Execution::Execute && restored.special_count > 0 {
        context.console().note("devices, pipes and sockets are not restored");
    }
    if restored.skipped_attribute_count > 0 {
        context.console().note(&format!(
            "{} not restored: only root may set them, or they hold for the guest's kernel only",
            units::counted(
                restored.skipped_attribute_count,
                "extended attribute is",
                "extended attributes are"
            )
        ));
    }
    if let Some(first) = &restored.failed_attribute {
        context.console().warning(&format!(
            "{} not restored, which the target refused: {first}",
            units::counted(
                restored.failed_attribute_count,
                "extended attribute is",
                "extended attributes are"
            )
        ));
    }
    context.report(&FilesTakenOut::new(located, &restored, args))
}
