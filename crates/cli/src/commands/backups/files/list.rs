//! `holdfast files ls`: lists volumes, or the files of a directory.

use holdfast_engine::{GuestAddress, WalkDepth, WalkReport, open_guest_volumes, walk_files};
use serde::Serialize;

use super::document::{FailureDocument, FileDocument, LineDetail, VolumeDocument, line, walk_exit, warn_of};
use super::options::{ReaderArgs, reader_word};
use super::{Located, address_parser, locate};
use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Format, Page, Report, Table};
use crate::units;

/// Arguments of `files ls`.
#[derive(Debug, clap::Args)]
pub(crate) struct FilesListArgs {
    /// The snapshot (ID, MACHINE, MACHINE@TIME), and a path in one of its volumes
    #[arg(value_name = "SNAPSHOT[:DISK][:VOLUME][:/PATH]", value_parser = address_parser())]
    address: GuestAddress,
    /// Show permissions, owners, sizes and times
    #[arg(short = 'l', long)]
    long: bool,
    /// List everything below the directory
    #[arg(short = 'R', long)]
    recursive: bool,
    #[command(flatten)]
    readers: ReaderArgs,
}

impl Verb for FilesListArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "List the volumes of the newest snapshot of a machine",
            line: "holdfast files ls -r /backup/vms web1",
        },
        Example {
            wish: "List a directory, with details",
            line: "holdfast files ls -r /backup/vms web1:/etc -l",
        },
        Example {
            wish: "List a directory of the second partition, as it was at a given time",
            line: "holdfast files ls -r /backup/vms web1@2026-11-20T12:00:vda:2:/var/log",
        },
        Example {
            wish: "List all files of a logical volume",
            line: "holdfast files ls -r /backup/vms db:vg0/data:/ --recursive",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        if self.address.has_no_path()
            && let Some(exit) = list_volumes(self, context)?
        {
            return Ok(exit);
        }
        list_files(self, context)
    }
}

/// Report of `files ls`.
#[derive(Debug, Serialize)]
struct FilesListed {
    id: String,
    machine: String,
    time: String,
    /// Volumes of the snapshot, if no path is named.
    volumes: Option<Vec<VolumeDocument>>,
    /// The volume with the path.
    volume: Option<String>,
    /// What read it.
    reader: Option<&'static str>,
    files: Option<Vec<FileDocument>>,
    unreadable: Vec<FailureDocument>,
    #[serde(skip)]
    exit: Exit,
}

impl Report for FilesListed {
    fn command(&self) -> &'static str {
        "files ls"
    }

    fn exit(&self) -> Exit {
        self.exit
    }

    fn human(&self, page: &mut Page) {
        let mut table = Table::new([
            Column::text("VOLUME"),
            Column::text("DISK"),
            Column::text("CONTENT"),
            Column::number("SIZE"),
            Column::text("LABEL"),
            Column::text("READABLE"),
        ]);
        for volume in self.volumes.iter().flatten() {
            let readable = match (volume.reader, &volume.reason) {
                (Some("appliance"), _) => "by the appliance".to_owned(),
                (Some(_), _) => "yes".to_owned(),
                (None, Some(reason)) => format!("no: {reason}"),
                (None, None) => "no".to_owned(),
            };
            table.row([
                volume.name.clone(),
                volume.disks.join(" "),
                volume.content.to_owned(),
                units::bytes(volume.size_bytes),
                volume.label.clone().unwrap_or_default(),
                readable,
            ]);
        }
        page.table(&table);
    }
}

/// Lists the volumes of an address; none if it names the root directory of a volume.
fn list_volumes(args: &FilesListArgs, context: &Context) -> Result<Option<Exit>, Error> {
    let repository = context.open_repository()?;
    let report = args.readers.with(context, |readers| {
        context.work(1, |job| {
            let mut volumes = open_guest_volumes(&repository, &args.address, context.zone(), readers, job)?;
            if volumes.has_volume() && !args.address.path.is_empty() {
                return Ok(None);
            }
            // A name that no volume has is an error.
            if volumes.has_volume() && volumes.volumes().is_empty() {
                volumes.locate(b"/", job)?;
            }
            volumes.look_into_arrays(job)?;
            let snapshot = volumes.snapshot();
            let listed = volumes.volumes().into_iter();
            Ok(Some(FilesListed {
                id: snapshot.id.to_string(),
                machine: snapshot.machine.clone(),
                time: holdfast_engine::time_of(snapshot).to_string(),
                volumes: Some(
                    listed
                        .map(|volume| VolumeDocument::new(volume, readers.choice))
                        .collect(),
                ),
                volume: None,
                reader: None,
                files: None,
                unreadable: Vec::new(),
                exit: Exit::Ok,
            }))
        })
    })?;
    report.map(|report| context.report(&report)).transpose()
}

fn list_files(args: &FilesListArgs, context: &Context) -> Result<Exit, Error> {
    let depth = if args.recursive {
        WalkDepth::Tree
    } else {
        WalkDepth::Entries
    };
    let detail = if args.long { LineDetail::Long } else { LineDetail::Name };
    show_files(args, context, depth, &mut |located, files| {
        if files == Shown::Document {
            return None;
        }
        // The entries of a directory are listed by name, and a tree by path.
        let folder = match (depth, located.files.found.names.as_slice()) {
            (WalkDepth::Tree, _) => Vec::new(),
            (WalkDepth::Entries, names) => {
                let is_directory = located.files.found.metadata.kind == holdfast_guest_files::FileKind::Directory;
                let names = if is_directory {
                    names
                } else {
                    names.split_last().map_or(names, |(_, names)| names)
                };
                names
                    .iter()
                    .fold(Vec::new(), |path, name| [&path[..], b"/", name].concat())
            }
        };
        let prefix = [&folder[..], b"/"].concat();
        let zone = context.zone().clone();
        Some(Box::new(move |file| {
            let prefix: &[u8] = if depth == WalkDepth::Entries { &prefix } else { b"" };
            line(file, prefix, detail, &zone)
        }))
    })
}

/// Where files are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shown {
    Lines,
    Document,
}

type LineOf = Box<dyn Fn(&holdfast_engine::WalkedFile) -> String>;

/// Walks the files of an address: each becomes a line at once, or an entry of the document.
fn show_files(
    args: &FilesListArgs,
    context: &Context,
    depth: WalkDepth,
    lines: &mut dyn FnMut(&Located, Shown) -> Option<LineOf>,
) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let is_json = context.output().format() == Format::Json;
    let shown = if is_json { Shown::Document } else { Shown::Lines };
    let mut documents = Vec::new();
    let mut printed = Ok(());
    let (mut located, walked) = args.readers.with(context, |readers| {
        context.work(1, |job| {
            let mut located = locate(&repository, &args.address, readers, context, job)?;
            let line_of = lines(&located, shown);
            let walked = walk_files(&mut located.files, depth, job, &mut |file| {
                match &line_of {
                    None => documents.push(FileDocument::from(&file)),
                    Some(line_of) if printed.is_ok() => printed = context.output().data(line_of(&file).as_bytes()),
                    Some(_) => {}
                }
                Ok(())
            })?;
            Ok((located, walked))
        })
    })?;
    printed?;
    finish(context, &mut located, documents, &walked, shown)
}

fn finish(
    context: &Context,
    located: &mut Located,
    documents: Vec<FileDocument>,
    walked: &WalkReport,
    shown: Shown,
) -> Result<Exit, Error> {
    warn_of(&walked.unreadable, context);
    if shown == Shown::Lines {
        return Ok(walk_exit(walked).with_warning_count(context.console().warnings().len()));
    }
    context.report(&FilesListed {
        id: located.id.clone(),
        machine: located.machine.clone(),
        time: located.time.clone(),
        volumes: None,
        volume: Some(located.files.volume.clone()),
        reader: Some(reader_word(located.files.reader)),
        files: Some(documents),
        unreadable: walked.unreadable.iter().map(FailureDocument::from).collect(),
        exit: walk_exit(walked),
    })
}
