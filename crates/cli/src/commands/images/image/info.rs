//! `holdfast image info`: shows the properties of an image without reading its data.

use std::path::PathBuf;

use holdfast_image::{
    Backing, BitmapState, BlockInfo, DeltaInfo, Format, FormatSource, LayerInfo, OpenOptions, Qcow2Info, Recording,
    USUAL_SECTOR_BYTES,
};
use serde::Serialize;

use super::options::{GateArgs, open_and_warn};
use crate::args::parse_format;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::machines::no_image;
use crate::output::{Page, Report, Style};
use crate::units;

/// Arguments of `image info`.
#[derive(Debug, clap::Args)]
pub(super) struct ImageInfoArgs {
    /// The image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Format (raw, qcow2, vdi, vhd, vhdx, vmdk, parallels) [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    /// Also show the images that it is based on
    #[arg(long)]
    chain: bool,
    #[command(flatten)]
    gate: GateArgs,
}

impl Verb for ImageInfoArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See what an image is",
            line: "holdfast image info web1.qcow2",
        },
        Example {
            wish: "See all images that it is based on, wherever below a folder they are",
            line: "holdfast image info --chain --allow-dir /var/lib/libvirt web1.qcow2",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `image info`.
#[derive(Debug, Serialize)]
struct ImageFileInfo {
    /// The image itself, and with `--chain` its backing files or parents.
    images: Vec<ImageInfo>,
    /// Whether the file of one of them is truncated.
    #[serde(skip)]
    is_cut_off: bool,
}

#[derive(Debug, Serialize)]
struct ImageInfo {
    path: String,
    format: &'static str,
    /// "caller", "overlay" or "content".
    format_source: &'static str,
    size_bytes: u64,
    file_bytes: u64,
    allocated_bytes: Option<u64>,
    qcow2: Option<Qcow2>,
    blocks: Option<Blocks>,
    delta: Option<Delta>,
}

/// Properties from the descriptor of a Parallels disk.
#[derive(Debug, Serialize)]
struct Delta {
    descriptor: String,
    file: String,
    /// All other deltas of the disk; only for its top.
    snapshots: Vec<OtherDelta>,
}

#[derive(Debug, Serialize)]
struct OtherDelta {
    uuid: String,
    parent: Option<String>,
    file: String,
}

/// Properties of VDI, VHD and VHDX images.
#[derive(Debug, Serialize)]
struct Blocks {
    /// "dynamic", "fixed" or "differencing".
    kind: &'static str,
    block_bytes: u64,
    sector_bytes: u64,
    uuid: Option<String>,
    modification: Option<String>,
    parent: Option<Parent>,
    creator: Option<String>,
}

#[derive(Debug, Serialize)]
struct Parent {
    uuid: Option<String>,
    modification: Option<String>,
    names: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Qcow2 {
    compat: &'static str,
    cluster_bytes: u64,
    refcount_bits: u32,
    compression: &'static str,
    features: Vec<&'static str>,
    backing_file: Option<String>,
    backing_format: Option<String>,
    data_file: Option<String>,
    snapshots: Vec<Snapshot>,
    bitmaps: Vec<Bitmap>,
}

#[derive(Debug, Serialize)]
struct Snapshot {
    id: String,
    name: String,
    time: Option<String>,
}

#[derive(Debug, Serialize)]
struct Bitmap {
    name: String,
    granularity_bytes: u64,
    is_valid: bool,
    is_recording: bool,
}

impl From<&LayerInfo> for ImageInfo {
    fn from(layer: &LayerInfo) -> Self {
        Self {
            path: layer.path.display().to_string(),
            format: layer.format.name(),
            format_source: match layer.format_source {
                FormatSource::Caller => "caller",
                FormatSource::Overlay => "overlay",
                FormatSource::Content => "content",
            },
            size_bytes: layer.size_bytes,
            file_bytes: layer.file_bytes,
            allocated_bytes: layer.allocated_bytes,
            qcow2: layer.qcow2.as_ref().map(Qcow2::from),
            blocks: layer.blocks.as_ref().map(Blocks::from),
            delta: layer.delta.as_ref().map(Delta::from),
        }
    }
}

impl From<&DeltaInfo> for Delta {
    fn from(info: &DeltaInfo) -> Self {
        let other = |delta: &holdfast_image::Delta| OtherDelta {
            uuid: delta.id.to_string(),
            parent: delta.parent.map(|parent| parent.to_string()),
            file: delta.file.clone(),
        };
        Self {
            descriptor: info.descriptor.display().to_string(),
            file: info.file.clone(),
            snapshots: info.snapshots.iter().map(other).collect(),
        }
    }
}

impl From<&BlockInfo> for Blocks {
    fn from(info: &BlockInfo) -> Self {
        Self {
            kind: info.kind.name(),
            block_bytes: info.block_bytes,
            sector_bytes: info.sector_bytes,
            uuid: info.id.map(|id| id.to_string()),
            modification: info.modification.clone(),
            parent: info.parent.as_ref().map(|parent| Parent {
                uuid: parent.id.map(|id| id.to_string()),
                modification: parent.modification.clone(),
                names: parent.names.clone(),
            }),
            creator: info.creator.clone(),
        }
    }
}

impl From<&Qcow2Info> for Qcow2 {
    fn from(info: &Qcow2Info) -> Self {
        let snapshot = |snapshot: &holdfast_image::InternalSnapshot| Snapshot {
            id: snapshot.id.clone(),
            name: snapshot.name.clone(),
            time: jiff::Timestamp::from_second(snapshot.created_seconds.into())
                .ok()
                .map(|time| time.to_string()),
        };
        Self {
            compat: if info.version == 2 { "0.10" } else { "1.1" },
            cluster_bytes: info.cluster_bytes,
            refcount_bits: info.refcount_bits,
            compression: info.compression.name(),
            features: info.features.iter().map(|feature| feature.name()).collect(),
            backing_file: info.backing_file.clone(),
            backing_format: info.backing_format.clone(),
            data_file: info.data_file.clone(),
            snapshots: info.snapshots.iter().map(snapshot).collect(),
            bitmaps: info
                .bitmaps
                .iter()
                .map(|bitmap| Bitmap {
                    name: bitmap.name.clone(),
                    granularity_bytes: bitmap.granularity_bytes,
                    is_valid: bitmap.state == BitmapState::Valid,
                    is_recording: bitmap.recording == Recording::Enabled,
                })
                .collect(),
        }
    }
}

impl Report for ImageFileInfo {
    fn command(&self) -> &'static str {
        "image info"
    }

    fn exit(&self) -> Exit {
        if self.is_cut_off { Exit::Damage } else { Exit::Ok }
    }

    fn human(&self, page: &mut Page) {
        for (index, image) in self.images.iter().enumerate() {
            if index > 0 {
                page.gap();
            }
            page.styled(Style::Heading, &image.path);
            let guessed = match image.format_source {
                "content" => " (by its content)",
                _ => "",
            };
            let mut fields = vec![
                ("format", format!("{}{guessed}", image.format)),
                ("disk", exactly(image.size_bytes)),
                ("file", exactly(image.file_bytes)),
            ];
            fields.extend(image.allocated_bytes.map(|bytes| ("on medium", exactly(bytes))));
            page.fields(&fields);
            if let Some(qcow2) = &image.qcow2 {
                qcow2.human(page);
            }
            if let Some(blocks) = &image.blocks {
                blocks.human(page);
            }
            if let Some(delta) = &image.delta {
                delta.human(page);
            }
        }
    }
}

impl Blocks {
    fn human(&self, page: &mut Page) {
        let mut fields = vec![("kind", self.kind.to_owned())];
        if self.kind != "fixed" {
            fields.push(("blocks", units::bytes(self.block_bytes)));
        }
        if self.sector_bytes != USUAL_SECTOR_BYTES {
            fields.push(("sectors", format!("{} bytes", self.sector_bytes)));
        }
        fields.extend(self.uuid.iter().map(|uuid| ("uuid", uuid.clone())));
        if let Some(parent) = &self.parent {
            let of = parent.uuid.iter().chain(&parent.names).cloned();
            fields.push(("parent", of.collect::<Vec<_>>().join(", ")));
        }
        fields.extend(self.creator.iter().map(|creator| ("made by", creator.clone())));
        page.fields(&fields);
    }
}

impl Delta {
    fn human(&self, page: &mut Page) {
        let mut fields = vec![("descriptor", self.descriptor.clone())];
        for snapshot in &self.snapshots {
            let of = snapshot
                .parent
                .as_ref()
                .map(|parent| format!(", differs from {parent}"));
            fields.push((
                "snapshot",
                format!("{} in {}{}", snapshot.uuid, snapshot.file, of.unwrap_or_default()),
            ));
        }
        page.fields(&fields);
    }
}

impl Qcow2 {
    fn human(&self, page: &mut Page) {
        let mut fields = vec![
            ("compat", self.compat.to_owned()),
            ("clusters", units::bytes(self.cluster_bytes)),
            ("refcounts", format!("{} bits", self.refcount_bits)),
            ("compression", self.compression.to_owned()),
        ];
        if !self.features.is_empty() {
            fields.push(("features", self.features.join(", ")));
        }
        if let Some(backing) = &self.backing_file {
            let format = self.backing_format.as_deref().unwrap_or("format not written down");
            fields.push(("backing file", format!("{backing} ({format})")));
        }
        fields.extend(self.data_file.iter().map(|file| ("data file", file.clone())));
        for snapshot in &self.snapshots {
            let time = snapshot.time.as_deref().unwrap_or("at an unknown time");
            fields.push(("snapshot", format!("{} {:?}, {time}", snapshot.id, snapshot.name)));
        }
        for bitmap in &self.bitmaps {
            let state = match (bitmap.is_valid, bitmap.is_recording) {
                (false, _) => "misses writes, of no use",
                (true, true) => "recording",
                (true, false) => "not recording",
            };
            let grain = units::bytes(bitmap.granularity_bytes);
            fields.push(("bitmap", format!("{:?}, a bit for {grain}, {state}", bitmap.name)));
        }
        page.fields(&fields);
    }
}

fn exactly(bytes: u64) -> String {
    format!("{} ({bytes} bytes)", units::bytes(bytes))
}

fn run(args: &ImageInfoArgs, context: &Context) -> Result<Exit, Error> {
    if args.format.is_none() {
        no_image::refuse(args.image.as_os_str())?;
    }
    let backing = if args.chain { Backing::Follow } else { Backing::Ignore };
    let options = OpenOptions {
        backing,
        ..args.gate.open_options(args.format)?
    };
    let image = open_and_warn(&args.image, &options, context)?;
    let cut_off = holdfast_image::cut_off_files(&args.image, &options).map_err(holdfast_engine::Error::from)?;
    for path in &cut_off {
        let warning = format!(
            "{} was cut off: the file ends before the end of the data that its tables refer to",
            path.display()
        );
        context.console().warning(&warning);
    }
    context.report(&ImageFileInfo {
        is_cut_off: !cut_off.is_empty(),
        images: image.layers().iter().map(ImageInfo::from).collect(),
    })
}
