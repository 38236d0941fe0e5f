//! `holdfast image convert`: an image becomes one of another format or of other options.

use std::path::PathBuf;

use holdfast_engine::{ConvertReport, ConvertRequest, VerifyImage, convert};
use holdfast_image::{Format, Preallocation, Storage};
use serde::Serialize;

use super::options::{GateArgs, NewImageArgs, format_of_name};
use crate::args::{Example, JobArgs};
use crate::commands::backup::parse_format;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `image convert`.
#[derive(Debug, clap::Args)]
pub(super) struct ConvertArgs {
    /// The image to read, with all that it is based on
    #[arg(value_name = "IMAGE")]
    source: PathBuf,
    /// The image to make; or with --force a block device, which gets a raw disk
    #[arg(value_name = "TARGET")]
    target: PathBuf,
    /// The format of the image to read (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels), where its content is not to decide
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// The format of the new image (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels); what its name says where not given
    #[arg(long = "to", value_name = "FORMAT", value_parser = parse_format)]
    target_format: Option<Format>,
    /// Read the disk as it was when this internal snapshot was taken
    #[arg(long, value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Compress the clusters of a qcow2 image
    #[arg(short, long)]
    compress: bool,
    /// How hard; a good default where not given
    #[arg(long, value_name = "LEVEL", requires = "compress")]
    compression_level: Option<u32>,
    /// Read the new image back and compare it before it gets its name
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    new: NewImageArgs,
    #[command(flatten)]
    gate: GateArgs,
    #[command(flatten)]
    job: JobArgs,
}

/// What a person may want of it.
pub(super) const EXAMPLES: &[Example] = &[
    Example {
        wish: "Convert a raw disk to qcow2, compressed, and read it back before it counts",
        line: "holdfast image convert --compress --compression zstd --verify web1.raw web1.qcow2",
    },
    Example {
        wish: "Merge an image and all that it is based on into one raw disk",
        line: "holdfast image convert overlay.qcow2 web1.raw",
    },
    Example {
        wish: "Keep only what differs from a base image",
        line: "holdfast image convert web1.raw web1.qcow2 --backing base.qcow2",
    },
    Example {
        wish: "Make a disk for Hyper-V of one of VirtualBox",
        line: "holdfast image convert web1.vdi web1.vhdx",
    },
    Example {
        wish: "Write the disk over a logical volume, and read it back",
        line: "holdfast image convert --force --verify web1.qcow2 /dev/vg/web1",
    },
];

/// What `image convert` answers.
#[derive(Debug, Serialize)]
struct Converted {
    target: String,
    format: &'static str,
    size_bytes: u64,
    /// Whether the file system shares the bytes with the source.
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

/// Converts an image.
pub(super) fn run(args: &ConvertArgs, context: &Context) -> Result<Exit, Error> {
    let format = args.target_format.unwrap_or_else(|| format_of_name(&args.target));
    args.new.check(format, &[("--compress", args.compress)])?;
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
        source: args.source.clone(),
        open: args.gate.open_options(args.format)?,
        snapshot: args.snapshot.clone(),
        target: args.target.clone(),
        format,
        qcow2: args.new.qcow2(&args.target, Preallocation::Off)?,
        blocks: args.new.blocks(None),
        storage,
        overwrite: args.new.overwrite(),
        verify: if args.verify { VerifyImage::Yes } else { VerifyImage::No },
    };
    let report = context.work(args.job.thread_count(), |job| {
        convert(&request, &context.surroundings(), job)
    })?;
    for note in &report.notes {
        context.console().warning(&note.to_string());
    }
    context.report(&Converted::new(&report, &request))
}
