//! `holdfast image create`: creates an empty image.

use std::path::PathBuf;

use holdfast_engine::{CreateImageReport, CreateImageRequest, Execution, create_image, plan_image};
use holdfast_image::{Format, Preallocation};
use serde::Serialize;

use super::options::{GateArgs, NewImageArgs, format_of_name};
use crate::args::parse_format;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::runs;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `image create`.
#[derive(Debug, clap::Args)]
pub(super) struct CreateArgs {
    /// The image to make
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Size of the disk (10G) [default: that of the backing file or parent]
    #[arg(value_name = "SIZE", value_parser = units::parse_bytes, required_unless_present_any = ["backing", "parent"])]
    size: Option<u64>,
    /// Format (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: by its name]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Allocate all tables of a qcow2 image now
    #[arg(long)]
    preallocate_metadata: bool,
    /// The image that the new one, a VDI, VHD, VHDX or VMDK, is to differ from: of the same format and size
    #[arg(long, value_name = "IMAGE", conflicts_with = "fixed")]
    parent: Option<PathBuf>,
    /// Check everything, and show what would be made; make nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    new: NewImageArgs,
    #[command(flatten)]
    gate: GateArgs,
}

impl Verb for CreateArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Make an empty disk",
            line: "holdfast image create web1.qcow2 20G",
        },
        Example {
            wish: "Make an overlay, as large as the image below it",
            line: "holdfast image create overlay.qcow2 --backing web1.qcow2 --extended-l2 --cluster-size 128K",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `image create`.
#[derive(Debug, Serialize)]
struct Created {
    dry_run: bool,
    path: String,
    format: &'static str,
    size_bytes: u64,
}

impl Created {
    fn new(report: &CreateImageReport, execution: Execution) -> Self {
        Self {
            dry_run: execution == Execution::DryRun,
            path: report.path.display().to_string(),
            format: report.format.name(),
            size_bytes: report.size_bytes,
        }
    }
}

impl Report for Created {
    fn command(&self) -> &'static str {
        "image create"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        let would = if self.dry_run { "would create " } else { "" };
        page.line(&format!(
            "{would}{}  {}: {} disk",
            self.path,
            self.format,
            units::bytes(self.size_bytes)
        ));
    }
}

fn run(args: &CreateArgs, context: &Context) -> Result<Exit, Error> {
    let format = args.format.map_or_else(|| format_of_name(&args.image), Ok)?;
    args.new
        .check(format, &[("--preallocate-metadata", args.preallocate_metadata)])?;
    args.new.check_blocks(format, &[("--parent", args.parent.is_some())])?;
    let preallocation = if args.preallocate_metadata {
        Preallocation::Metadata
    } else {
        Preallocation::Off
    };
    let request = CreateImageRequest {
        path: args.image.clone(),
        format,
        size_bytes: args.size,
        qcow2: args.new.qcow2(&args.image, preallocation)?,
        blocks: args.new.blocks(args.parent.clone()),
        overwrite: args.new.overwrite(),
        backing: args.gate.open_options(None)?,
    };
    if args.dry_run {
        return context.report(&Created::new(&plan_image(&request)?, Execution::DryRun));
    }
    let _noted = runs::note_places([&*args.image], context);
    let report = create_image(&request, &context.environment())?;
    context.report(&Created::new(&report, Execution::Execute))
}
