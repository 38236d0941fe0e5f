//! `holdfast archive`: inspects machine archives and packed streams, without a repository.

use std::io::Read;
use std::path::{Path, PathBuf};

use holdfast_archive::{Error as ArchiveError, PackedFile, Packing, StreamImages};
use holdfast_block::BlockDevice as _;
use holdfast_engine::{
    CheckedArchive, CheckedDisk, Domain, Job, check_archive, check_packed, check_stream, open_import, open_packed,
    read_packed, wants_stored_images,
};
use serde::Serialize;

use crate::args::{Example, JobArgs, SharedOptions, VerbEntry};
use crate::commands::images::compress;
use crate::commands::images::import::{ArchivedMachine, read_archive};
use crate::commands::verb::{Verb, VerbSet, verbs};
use crate::context::Context;
use crate::context::standard_streams::{StandardOutput, refuse_terminal, stopped_or};
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Table};
use crate::units;

/// Arguments of `archive`.
#[derive(Debug, clap::Args)]
pub(crate) struct ArchiveArgs {
    #[command(subcommand)]
    verb: ArchiveVerb,
}

verbs! {
    enum ArchiveVerb {
        /// Show the machine in an archive
        "info" => ArchiveInfo(ArchiveInfoArgs),
        /// Read a machine archive, or any gzip, zstd or xz stream, to its end and check its checksums
        "check" => Check(ArchiveCheckArgs),
        /// Write a part of a compressed stream to standard output
        "read" => Read(ReadArgs),
    }
}

impl Verb for ArchiveArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See whether an archive is whole",
        line: "holdfast archive check web1.xva.zst",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];
    const BELOW: &'static [VerbEntry] = ArchiveVerb::TABLE;

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        self.verb.run(context)
    }
}

impl Verb for ArchiveInfoArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "See the machine in an archive, and what libvirt would not keep of it",
        line: "holdfast archive info web1.xva.zst",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        info(self, context)
    }
}

impl Verb for ArchiveCheckArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Read an archive back, on all cores",
            line: "holdfast archive check web1.xva.zst",
        },
        Example {
            wish: "Check one while it is copied",
            line: "tee /mnt/usb/web1.xva.gz < web1.xva.gz | holdfast archive check -",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        check(self, context)
    }
}

impl Verb for ReadArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Look at 512 bytes in the middle of a packed disk",
        line: "holdfast archive read disk.raw.zst --offset 10G --length 512 | hexdump -C",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Json];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        read(self, context)
    }
}

/// Arguments of `archive info`.
#[derive(Debug, clap::Args)]
struct ArchiveInfoArgs {
    /// The archive, or - for standard input
    #[arg(value_name = "ARCHIVE")]
    archive: PathBuf,
}

/// Arguments of `archive check`.
#[derive(Debug, clap::Args)]
struct ArchiveCheckArgs {
    /// The archive, or a file that is packed by gzip, zstd or xz; - for an archive from standard input
    #[arg(value_name = "ARCHIVE")]
    archive: PathBuf,
    #[command(flatten)]
    job: JobArgs,
}

/// Arguments of `archive read`.
#[derive(Debug, clap::Args)]
struct ReadArgs {
    /// A file that holdfast compress or holdfast export has compressed
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Offset in the uncompressed stream
    #[arg(long, value_name = "OFFSET", value_parser = units::parse_bytes, default_value = "0")]
    offset: u64,
    /// Number of bytes [default: to the end]
    #[arg(long, value_name = "LENGTH", value_parser = units::parse_bytes)]
    length: Option<u64>,
    #[command(flatten)]
    job: JobArgs,
}

/// Report of `archive info`.
#[derive(Debug, Serialize)]
struct ArchiveInfo {
    #[serde(flatten)]
    what: ArchivedMachine,
    /// Number of blocks in the index; none if there is no index.
    index_block_count: Option<u64>,
    #[serde(skip)]
    name: String,
}

impl Report for ArchiveInfo {
    fn command(&self) -> &'static str {
        "archive info"
    }

    fn human(&self, page: &mut Page) {
        page.line(&self.name);
        self.what.body(page);
        if let Some(count) = self.index_block_count {
            page.line(&format!(
                "  can be read at any place: its index has {}",
                units::counted(count, "block", "blocks")
            ));
        }
    }
}

fn info(args: &ArchiveInfoArgs, context: &Context) -> Result<Exit, Error> {
    let domain = Domain {
        domain_type: "kvm".to_owned(),
        network: "default".to_owned(),
    };
    let imported = read_archive(&args.archive, context, 1, |stream, images, job| {
        Ok(open_import(stream, images, domain.clone(), job)?.look())
    })?;
    context.report(&ArchiveInfo {
        name: imported.machine.name.clone(),
        what: ArchivedMachine::new(&imported),
        index_block_count: index_of(&args.archive),
    })
}

/// Number of blocks in a file's index, if it has a readable one.
fn index_of(path: &Path) -> Option<u64> {
    let file = Some(path).filter(|path| path.is_file()).map(open_packed)?;
    Some(file.ok()?.index().entries().len() as u64)
}

/// Report of `archive check`.
#[derive(Debug, Serialize)]
struct ArchiveChecked {
    /// The kind of archive; none for a packed stream that is no machine archive.
    archive: Option<&'static str>,
    packing: &'static str,
    /// Blocks that were compared with the index; none if there is no index.
    index_block_count: Option<u64>,
    archive_bytes: u64,
    disks: Vec<ArchiveDisk>,
    duration_ms: u64,
    #[serde(skip)]
    path: String,
}

#[derive(Debug, Serialize)]
struct ArchiveDisk {
    key: String,
    size_bytes: u64,
    data_bytes: u64,
    /// Whether the archive describes it as empty, and has no file for it.
    is_blank: bool,
}

impl Report for ArchiveChecked {
    fn command(&self) -> &'static str {
        "archive check"
    }

    fn human(&self, page: &mut Page) {
        let duration = std::time::Duration::from_millis(self.duration_ms);
        let mut parts = vec![format!("{} read", units::bytes(self.archive_bytes))];
        parts.extend(
            self.index_block_count
                .map(|count| format!("{} as the index says", units::counted(count, "block", "blocks"))),
        );
        parts.push(units::duration(duration));
        parts.extend(units::rate(self.archive_bytes, duration).map(units::bytes_per_second));
        let what = self.archive.unwrap_or("packed stream");
        page.line(&format!("{}  {what}: whole, {}", self.path, parts.join(", ")));
        if self.disks.is_empty() {
            return;
        }
        let mut table = Table::new([
            Column::long_text("DISK"),
            Column::number("SIZE"),
            Column::number("DATA"),
        ]);
        for disk in &self.disks {
            let data = if disk.is_blank {
                "blank".to_owned()
            } else {
                units::bytes(disk.data_bytes)
            };
            table.row([disk.key.clone(), units::bytes(disk.size_bytes), data]);
        }
        page.table(&table);
    }
}

fn check(args: &ArchiveCheckArgs, context: &Context) -> Result<Exit, Error> {
    let start = context.clock().now();
    let packed = if args.archive.is_file() {
        match open_packed(&args.archive) {
            Ok(file) => Some(file),
            Err(error) if is_without_index(&error) => None,
            Err(error) => return Err(error.into()),
        }
    } else {
        None
    };
    let thread_count = args.job.thread_count();
    let (packing, checked) = match &packed {
        None => {
            let stream = compress::input(Some(&args.archive), context)?;
            // Standard input cannot be read a second time.
            let again = args.archive.is_file().then_some(&args.archive);
            let again = again.map(|path| compress::input(Some(path), context)).transpose()?;
            context.work(thread_count, |job| check_unindexed(stream, again, job))?
        }
        Some(file) => {
            let checked = context.work(thread_count, |job| check_indexed(file, job))?;
            (file.packing(), checked)
        }
    };
    let disk = |disk: &CheckedDisk| ArchiveDisk {
        key: disk.key.clone(),
        size_bytes: disk.size_bytes,
        data_bytes: disk.data_bytes,
        is_blank: disk.is_blank,
    };
    let length = match (&packed, &checked) {
        (Some(file), _) => Some(file.index().packed_bytes()),
        (None, Some(checked)) => Some(checked.read_bytes),
        (None, None) => args.archive.metadata().ok().map(|metadata| metadata.len()),
    };
    context.report(&ArchiveChecked {
        archive: checked.as_ref().map(|checked| checked.kind.name()),
        packing: packing.name(),
        index_block_count: packed.as_ref().map(|file| file.index().entries().len() as u64),
        archive_bytes: length.unwrap_or_default(),
        disks: checked.iter().flat_map(|checked| &checked.disks).map(disk).collect(),
        duration_ms: units::millis(context.clock().now().saturating_sub(start)),
        path: args.archive.display().to_string(),
    })
}

/// Reads the file once: compares each block with the index, and the content with the checksums of the archive if it is
/// one.
fn check_indexed(file: &PackedFile, job: Job<'_>) -> holdfast_engine::Result<Option<CheckedArchive>> {
    let threads = compress::threads(job.thread_count, None).count;
    let attempt = |images| check_archive(Box::new(file.stream(threads)), images, job);
    let checked = match attempt(StreamImages::Streamed) {
        Err(error) if wants_stored_images(&error) => attempt(StreamImages::Spooled),
        checked => checked,
    };
    match checked {
        Err(error) if is_no_archive(&error) => check_packed(file, job).map(|_| None),
        checked => checked.map(Some),
    }
}

/// Reads a file without an index: a machine archive, or else a packed stream, which is then read `again` from
/// the start.
fn check_unindexed(
    stream: Box<dyn Read + Send>,
    again: Option<Box<dyn Read + Send>>,
    job: Job<'_>,
) -> holdfast_engine::Result<(Packing, Option<CheckedArchive>)> {
    match check_archive(stream, StreamImages::Streamed, job) {
        Err(error) if wants_stored_images(&error) => {
            let Some(again) = again else { return Err(error) };
            let checked = check_archive(again, StreamImages::Spooled, job)?;
            Ok((checked.packing, Some(checked)))
        }
        Err(error) if is_no_archive(&error) => match again.map(|stream| check_stream(stream, job)).transpose()? {
            Some(Some(packing)) => Ok((packing, None)),
            _ => Err(error),
        },
        checked => checked.map(|checked| (checked.packing, Some(checked))),
    }
}

fn is_without_index(error: &holdfast_engine::Error) -> bool {
    matches!(
        error,
        holdfast_engine::Error::Archive(ArchiveError::NoIndex | ArchiveError::Unsupported { .. })
    )
}

/// Whether the error means that the packed content is no machine archive.
fn is_no_archive(error: &holdfast_engine::Error) -> bool {
    matches!(
        error,
        holdfast_engine::Error::Archive(ArchiveError::Unknown { .. } | ArchiveError::CutOff { offset: 0, .. })
    )
}

fn read(args: &ReadArgs, context: &Context) -> Result<Exit, Error> {
    context.output().refuse_json("archive read")?;
    refuse_terminal()?;
    let file = open_packed(&args.file)?;
    let size_bytes = file.size_bytes();
    let end = args
        .length
        .map_or(Some(size_bytes), |length| args.offset.checked_add(length));
    let end = end
        .filter(|end| *end <= size_bytes && args.offset <= *end)
        .ok_or_else(|| {
            Error::usage(
                format!("the stream in {} has {size_bytes} bytes", args.file.display()),
                "choose --offset and --length within it",
            )
        })?;
    let mut stdout = StandardOutput::open(context)?;
    context.work(args.job.thread_count(), |job| {
        stopped_or(read_packed(&file, args.offset..end, &mut stdout, job), job)
    })?;
    Ok(Exit::Ok)
}
