//! `holdfast image resize`: changes the size of an image.

use std::cmp::Ordering;
use std::path::PathBuf;

use holdfast_image::{Backing, Format, OpenOptions, ResizePlan, Shrink, plan_resize, resize};
use serde::Serialize;

use super::options::{GateArgs, open_and_warn};
use crate::args::parse_format;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `image resize`.
#[derive(Debug, clap::Args)]
pub(super) struct ResizeArgs {
    /// The image; no machine may use it at the same time
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// The new size, as 40G, or with a + how much larger it gets
    #[arg(value_name = "[+]SIZE", value_parser = parse_size)]
    size: Size,
    /// Cut off the end of the disk, and what is in it, where the new size is smaller
    #[arg(long)]
    shrink: bool,
    /// Show what would be changed, and with --shrink how much data would be lost; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Its format [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    gate: GateArgs,
}

impl Verb for ResizeArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Make a disk larger by ten gibibytes",
            line: "holdfast image resize web1.qcow2 +10G",
        },
        Example {
            wish: "Shrink it to the end of the last partition",
            line: "holdfast image resize web1.raw 20G --shrink",
        },
        Example {
            wish: "See first how much data would be cut off, and where it begins",
            line: "holdfast image resize web1.raw 20G --shrink --dry-run",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

#[derive(Debug, Clone, Copy)]
enum Size {
    Whole(u64),
    More(u64),
}

fn parse_size(text: &str) -> Result<Size, String> {
    let parse = |text| units::parse_bytes(text).map_err(|error| error.to_string());
    match text.strip_prefix('+') {
        Some(more) => parse(more).map(Size::More),
        None => parse(text).map(Size::Whole),
    }
}

/// Report of `image resize`.
#[derive(Debug, Serialize)]
struct ResizeDone {
    dry_run: bool,
    path: String,
    format: &'static str,
    before_bytes: u64,
    size_bytes: u64,
    /// Of a dry run: the data past the new end; null if there is none.
    lost: Option<LostDocument>,
}

#[derive(Debug, Serialize)]
struct LostDocument {
    data_bytes: u64,
    first_offset: u64,
}

impl Report for ResizeDone {
    fn command(&self) -> &'static str {
        "image resize"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        if self.dry_run {
            return page.line(&self.plan());
        }
        let (before, now) = (units::bytes(self.before_bytes), units::bytes(self.size_bytes));
        let change = if self.before_bytes == self.size_bytes {
            format!("{now} disk, as before")
        } else if before == now {
            format!("{} bytes of disk, it was {} bytes", self.size_bytes, self.before_bytes)
        } else {
            format!("{now} disk, it was {before}")
        };
        page.line(&format!("{}  {}: {change}", self.path, self.format));
    }
}

impl ResizeDone {
    /// A summary of the change, in one line.
    fn plan(&self) -> String {
        let verb = match self.size_bytes.cmp(&self.before_bytes) {
            Ordering::Less => "shrink",
            Ordering::Greater => "grow",
            Ordering::Equal => return format!("{} has that size already: nothing would be changed", self.path),
        };
        let mut sizes = [self.before_bytes, self.size_bytes].map(units::bytes);
        if sizes[0] == sizes[1] {
            sizes = [self.before_bytes, self.size_bytes].map(|bytes| format!("{bytes} bytes"));
        }
        let lost = match (&self.lost, verb) {
            (Some(lost), _) => format!(
                "; {} of data beyond the new end would be lost (first at {})",
                units::bytes(lost.data_bytes),
                units::bytes(lost.first_offset)
            ),
            (None, "shrink") => "; there is no data beyond the new end".to_owned(),
            (None, _) => String::new(),
        };
        format!("would {verb} {} from {} to {}{lost}", self.path, sizes[0], sizes[1])
    }
}

fn run(args: &ResizeArgs, context: &Context) -> Result<Exit, Error> {
    let options = args.gate.open_options(args.format)?;
    let size_bytes = match args.size {
        Size::Whole(size_bytes) => size_bytes,
        Size::More(more) => {
            let alone = OpenOptions {
                backing: Backing::Ignore,
                ..options.clone()
            };
            let before = open_and_warn(&args.image, &alone, context)?.layers()[0].size_bytes;
            before
                .checked_add(more)
                .ok_or_else(|| Error::usage("no disk is as large as that", "choose a smaller size"))?
        }
    };
    let shrink = if args.shrink { Shrink::Allow } else { Shrink::Refuse };
    let planned = if args.dry_run {
        plan_resize(&args.image, &options, size_bytes, shrink)
    } else {
        resize(&args.image, &options, size_bytes, shrink).map(|report| ResizePlan { report, lost: None })
    };
    let ResizePlan { report: resized, lost } = planned.map_err(holdfast_engine::Error::from)?;
    context.report(&ResizeDone {
        dry_run: args.dry_run,
        lost: lost.map(|lost| LostDocument {
            data_bytes: lost.data_bytes,
            first_offset: lost.first_offset,
        }),
        path: args.image.display().to_string(),
        format: resized.format.name(),
        before_bytes: resized.before_bytes,
        size_bytes: resized.after_bytes,
    })
}
