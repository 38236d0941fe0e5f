//! `holdfast image convert`: converts an image to another format or to other options.

use std::io::Seek as _;
use std::path::PathBuf;

use holdfast_engine::{
    ConvertReport, ConvertRequest, ConvertSource, StreamForm, VerifyImage, convert, convert_to_stream, plan_convert,
};
use holdfast_image::{Format, Preallocation, Storage};
use serde::Serialize;

use super::options::{GateArgs, NewImageArgs, format_of_name};
use crate::args::parse_format;
use crate::args::{Example, JobArgs, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::context::standard_streams::{PatientInput, StandardOutput, refuse_terminal, standard_input, stopped_or};
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::no_image;
use crate::machines::runs;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `image convert`.
#[derive(Debug, clap::Args)]
pub(super) struct ConvertArgs {
    /// The image to read, with all that it is based on; - for a raw disk from standard input
    #[arg(value_name = "IMAGE")]
    source: PathBuf,
    /// The image to make; or with --force a block device, which gets a raw disk; - for a raw disk, or with --to vmdk a compressed
    /// VMDK, to standard output
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// The format of the image to read (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels), instead of detecting it
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Format of the new image (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: by its name]
    #[arg(long = "to", value_name = "FORMAT", value_parser = parse_format)]
    target_format: Option<Format>,
    /// Read the disk as it was when this internal snapshot was taken
    #[arg(long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Compress the clusters of a qcow2 image; of a VMDK, which then is one for streams, that is read only
    #[arg(short, long)]
    compress: bool,
    /// Compression level [default: depends on the type]
    #[arg(long, value_name = "LEVEL", requires = "compress")]
    compression_level: Option<u32>,
    /// Size of the disk that comes from standard input, as 10G; needed where that is a pipe
    #[arg(long, value_name = "SIZE", value_parser = units::parse_bytes)]
    size: Option<u64>,
    /// Read the new image back and compare it before it gets its name
    #[arg(long)]
    verify: bool,
    /// Open the source, check the target, and show what would be made; write nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    new: NewImageArgs,
    #[command(flatten)]
    gate: GateArgs,
    #[command(flatten)]
    job: JobArgs,
}

impl Verb for ConvertArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Convert a raw disk to qcow2, compressed, and read it back before it counts",
            line: "holdfast image convert --compress --compression zstd --verify web1.raw web1.qcow2",
        },
        Example {
            wish: "Merge an image and all that it is based on into one raw disk",
            line: "holdfast image convert overlay.qcow2 web1.raw",
        },
        Example {
            wish: "Store only the differences from a base image",
            line: "holdfast image convert web1.raw web1.qcow2 --backing base.qcow2",
        },
        Example {
            wish: "Make a disk for Hyper-V of one of VirtualBox",
            line: "holdfast image convert web1.vdi web1.vhdx",
        },
        Example {
            wish: "Make a compressed VMDK of it for VMware, on all cores",
            line: "holdfast image convert --compress web1.qcow2 web1.vmdk",
        },
        Example {
            wish: "Convert a disk from another host",
            line: "ssh old cat /dev/vg/web1 | holdfast image convert - web1.qcow2 --size 20G",
        },
        Example {
            wish: "Write the disk over a logical volume, and read it back",
            line: "holdfast image convert --force --verify web1.qcow2 /dev/vg/web1",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `image convert`.
#[derive(Debug, Serialize)]
struct Converted {
    dry_run: bool,
    target: String,
    format: &'static str,
    size_bytes: u64,
    /// Whether the file system shares the data with the source.
    is_cloned: bool,
    plain_bytes: Option<u64>,
    compressed_bytes: Option<u64>,
    compressed_stored_bytes: Option<u64>,
    zero_bytes: Option<u64>,
    allocated_bytes: Option<u64>,
    is_verified: bool,
    duration_ms: u64,
}

impl Converted {
    fn new(report: &ConvertReport, request: &ConvertRequest) -> Self {
        let filled = report.filled;
        Self {
            dry_run: false,
            target: request.target.display().to_string(),
            format: request.format.name(),
            size_bytes: report.size_bytes,
            is_cloned: filled.is_none(),
            plain_bytes: filled.map(|filled| filled.plain_bytes),
            compressed_bytes: filled.map(|filled| filled.compressed_bytes),
            compressed_stored_bytes: filled.map(|filled| filled.compressed_stored_bytes),
            zero_bytes: filled.map(|filled| filled.zero_bytes),
            allocated_bytes: report.allocated_bytes,
            is_verified: report.verify == VerifyImage::Yes,
            duration_ms: units::millis(report.duration),
        }
    }
}

impl Report for Converted {
    fn command(&self) -> &'static str {
        "image convert"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let mut parts = vec![format!("{} disk", units::bytes(self.size_bytes))];
        parts.extend(
            self.allocated_bytes
                .map(|bytes| format!("{} on the medium", units::bytes(bytes))),
        );
        if self.is_verified {
            parts.push("read back and equal".to_owned());
        }
        let duration = std::time::Duration::from_millis(self.duration_ms);
        parts.push(units::duration(duration));
        parts.extend(units::rate(self.size_bytes, duration).map(units::bytes_per_second));
        page.line(&format!("{}  {}: {}", self.target, self.format, parts.join(", ")));
    }
}

/// Report of `image convert --dry-run`.
#[derive(Debug, Serialize)]
struct ConvertPlanned {
    dry_run: bool,
    target: String,
    format: &'static str,
    size_bytes: u64,
    /// Bytes stored as data in the source; null for a stream.
    data_bytes: Option<u64>,
}

impl Report for ConvertPlanned {
    fn command(&self) -> &'static str {
        "image convert"
    }

    fn human(&self, page: &mut Page) {
        let data = self
            .data_bytes
            .map(|bytes| format!(", {} of data", units::bytes(bytes)));
        page.line(&format!(
            "would write {}  {}: {} disk{}",
            self.target,
            self.format,
            units::bytes(self.size_bytes),
            data.unwrap_or_default()
        ));
    }
}

fn run(args: &ConvertArgs, context: &Context) -> Result<Exit, Error> {
    let format = args.target_format.map_or_else(|| format_of_name(&args.target), Ok)?;
    if args.size.is_some() && args.source.as_os_str() != "-" {
        return Err(Error::usage(
            "--size is for a disk that comes from standard input, and an image says its size itself",
            "remove the option; `holdfast image resize` changes the size of the new image",
        ));
    }
    if args.format.is_none() {
        no_image::refuse(args.source.as_os_str())?;
    }
    if args.target.as_os_str() == "-" {
        return to_stdout(args, format, context);
    }
    args.new
        .check(format, &[("--compress", args.compress && format != Format::Vmdk)])?;
    args.new.check_blocks(format, &[])?;
    if args.compress && args.new.has_data_file() {
        return Err(Error::usage(
            "clusters in a data file cannot be compressed",
            "leave --compress or --data-file out",
        ));
    }
    let storage = if args.compress {
        Storage::Compressed {
            level: args.compression_level,
        }
    } else {
        Storage::Plain
    };
    let request = ConvertRequest {
        open: args.gate.open_options(args.format)?,
        target: args.target.clone(),
        format,
        qcow2: args.new.qcow2(&args.target, Preallocation::Off)?,
        blocks: args.new.blocks(None),
        storage,
        overwrite: args.new.overwrite(),
        verify: if args.verify { VerifyImage::Yes } else { VerifyImage::No },
    };
    let mut stdin = PatientInput::of_standard_input(context)?;
    let source = if args.source.as_os_str() == "-" {
        ConvertSource::Stream {
            size_bytes: size_of_stdin(args)?,
            stream: &mut stdin,
        }
    } else {
        ConvertSource::Image {
            path: args.source.clone(),
            snapshot: args.snapshot.clone(),
        }
    };
    if args.dry_run {
        return plan(source, &request, args, context);
    }
    let _noted = runs::note_places([&*args.target], context);
    let report = context.work(args.job.thread_count(), |job| {
        convert(source, &request, &context.environment(), job)
    })?;
    for note in &report.notes {
        context.console().warning(&note.to_string());
    }
    context.report(&Converted::new(&report, &request))
}

/// Prints the plan.
fn plan(
    source: ConvertSource<'_>,
    request: &ConvertRequest,
    args: &ConvertArgs,
    context: &Context,
) -> Result<Exit, Error> {
    let plan = context.work(args.job.thread_count(), |job| plan_convert(source, request, job))?;
    for note in &plan.notes {
        context.console().warning(&note.to_string());
    }
    context.report(&ConvertPlanned {
        dry_run: true,
        target: request.target.display().to_string(),
        format: plan.format.name(),
        size_bytes: plan.size_bytes,
        data_bytes: plan.data_bytes,
    })
}

/// The size of the disk on standard input: that of the option, or of a redirected file.
fn size_of_stdin(args: &ConvertArgs) -> Result<u64, Error> {
    let refused = [
        ("--verify", args.verify, "it cannot be read a second time"),
        ("--snapshot", args.snapshot.is_some(), "it has none"),
        (
            "--format",
            args.format.is_some_and(|format| format != Format::Raw),
            "other formats than raw cannot be read in one go",
        ),
    ];
    if let Some((option, _, reason)) = refused.iter().find(|(_, is_given, _)| *is_given) {
        return Err(Error::usage(
            format!("{option} does not go with standard input: {reason}"),
            format!("remove {option}, or name an image file"),
        ));
    }
    let file = standard_input()?;
    let metadata = file.metadata().map_err(Error::Stdin)?;
    match (args.size, metadata.is_file()) {
        (Some(size_bytes), _) => Ok(size_bytes),
        (None, true) => {
            let at = (&file).stream_position().map_err(Error::Stdin)?;
            Ok(metadata.len().saturating_sub(at))
        }
        (None, false) => Err(Error::usage(
            "the size of a disk read from a pipe is unknown",
            "set the size with --size, in bytes or as 10G",
        )),
    }
}

/// Writes the disk to standard output, which contains nothing else.
fn to_stdout(args: &ConvertArgs, format: Format, context: &Context) -> Result<Exit, Error> {
    if args.dry_run {
        return Err(Error::usage(
            "--dry-run does not go with standard output: nothing is changed there",
            "remove --dry-run, or name a file",
        ));
    }
    context.output().refuse_json("image convert to standard output")?;
    refuse_terminal()?;
    let is_raw = format == Format::Raw && !args.compress;
    if !(is_raw || format == Format::Vmdk) || args.source.as_os_str() == "-" || args.verify {
        return Err(Error::usage(
            "only a raw disk or a compressed VMDK can be written to standard output, and it cannot be verified there",
            "remove --verify, use no --to but raw or vmdk, and name the image file",
        ));
    }
    let form = match format {
        Format::Vmdk => StreamForm::Vmdk {
            level: args.compression_level,
        },
        _ => StreamForm::Raw,
    };
    args.new.check(format, &[])?;
    args.new.check_blocks(format, &[])?;
    let options = args.gate.open_options(args.format)?;
    let mut stdout = StandardOutput::open(context)?;
    let notes = context.work(args.job.thread_count(), |job| {
        let written = convert_to_stream(&args.source, &options, args.snapshot.as_deref(), &mut stdout, form, job);
        stopped_or(written, job)
    })?;
    for note in &notes {
        context.console().warning(&note.to_string());
    }
    Ok(Exit::Ok.with_warning_count(context.console().warnings().len()))
}
