//! `holdfast image map`: shows where the data of a disk is stored.

use std::path::PathBuf;

use holdfast_block::BlockDevice as _;
use holdfast_image::{Format, MapContent, MapEntry};
use serde::Serialize;

use super::options::{GateArgs, open_whole};
use crate::args::parse_format;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::no_image;
use crate::output::{Column, Page, Report, Table};
use crate::units;

/// Maximum number of extents in one answer: a malicious image must not exhaust memory.
const EXTENT_COUNT_MAX: usize = 1_000_000;

/// Arguments of `image map`.
#[derive(Debug, clap::Args)]
pub(super) struct MapArgs {
    /// The image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Format (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Where on the disk to begin
    #[arg(long, value_name = "OFFSET", value_parser = units::parse_bytes, default_value = "0")]
    start: u64,
    #[command(flatten)]
    gate: GateArgs,
}

impl Verb for MapArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See where the data of a disk is",
            line: "holdfast image map web1.qcow2",
        },
        Example {
            wish: "Print it as JSON",
            line: "holdfast image map web1.qcow2 --json",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `image map`.
#[derive(Debug, Serialize)]
struct Map {
    /// The files of the chain, the image itself first.
    files: Vec<String>,
    extents: Vec<MapExtent>,
    /// The value of `--start` to continue with, if there were too many extents for one answer.
    next_offset: Option<u64>,
}

#[derive(Debug, Serialize)]
struct MapExtent {
    offset: u64,
    length_bytes: u64,
    /// "data", "compressed" or "zero".
    kind: &'static str,
    /// Index in `files`; null where no file holds it.
    file: Option<usize>,
    host_offset: Option<u64>,
}

impl MapExtent {
    /// `firsts` contains for each layer the index of its first file.
    fn new(entry: MapEntry, firsts: &[usize]) -> Self {
        let (kind, part, host_offset) = match entry.content {
            MapContent::Zero => ("zero", 0, None),
            MapContent::Data { file, host_offset } => ("data", file, Some(host_offset)),
            MapContent::Compressed => ("compressed", 0, None),
        };
        Self {
            offset: entry.offset,
            length_bytes: entry.length,
            kind,
            file: entry.depth.and_then(|depth| Some(firsts.get(depth)? + part)),
            host_offset,
        }
    }

    /// Extends this extent by `next` if that continues it, also in its file.
    fn absorb(&mut self, next: &Self) -> bool {
        let continued = self.host_offset.map(|offset| offset + self.length_bytes);
        let fits = self.kind == next.kind && self.file == next.file && continued == next.host_offset;
        if fits {
            self.length_bytes += next.length_bytes;
        }
        fits
    }
}

impl Report for Map {
    fn command(&self) -> &'static str {
        "image map"
    }

    fn human(&self, page: &mut Page) {
        let mut table = Table::new([
            Column::number("OFFSET"),
            Column::number("LENGTH"),
            Column::text("KIND"),
            Column::number("AT"),
            Column::long_text("FILE"),
        ]);
        for extent in &self.extents {
            table.row([
                extent.offset.to_string(),
                extent.length_bytes.to_string(),
                extent.kind.to_owned(),
                extent.host_offset.map(|offset| offset.to_string()).unwrap_or_default(),
                extent
                    .file
                    .and_then(|file| self.files.get(file).cloned())
                    .unwrap_or_default(),
            ]);
        }
        page.table(&table);
    }
}

fn run(args: &MapArgs, context: &Context) -> Result<Exit, Error> {
    if args.format.is_none() {
        no_image::refuse(args.image.as_os_str())?;
    }
    let image = open_whole(&args.image, &args.gate.open_options(args.format)?, context)?;
    let interrupt = context.interrupt()?;
    let (mut files, mut firsts) = (Vec::new(), Vec::new());
    for layer in image.layers() {
        firsts.push(files.len());
        // A Parallels folder is read through its delta.
        let extents = layer.extent_files.iter().filter(|_| layer.delta.is_none());
        let all = std::iter::once(&layer.path).chain(extents);
        files.extend(all.map(|path| path.display().to_string()));
    }
    let mut extents: Vec<MapExtent> = Vec::new();
    let mut offset = args.start;
    let mut next_offset = None;
    while offset < image.size_bytes() {
        interrupt.check()?;
        let entry = image.map_at(offset, u64::MAX).map_err(holdfast_engine::Error::from)?;
        let extent = MapExtent::new(entry, &firsts);
        if !extents.last_mut().is_some_and(|last| last.absorb(&extent)) {
            if extents.len() == EXTENT_COUNT_MAX {
                next_offset = Some(offset);
                let warning = format!("there are more extents; continue with --start {offset}");
                context.console().warning(&warning);
                break;
            }
            extents.push(extent);
        }
        offset += entry.length;
    }
    context.report(&Map {
        files,
        extents,
        next_offset,
    })
}
