//! `holdfast image identity`: shows or changes the UUID by which hypervisors and children identify an image.

use std::path::PathBuf;

use holdfast_image::{
    Backing, DiskDescriptor, Format, ImageId, LayerInfo, NewIdentity, OpenOptions, UnnamedChildren, children_in_folder,
    plan_identity, set_identity,
};
use serde::Serialize;

use super::options::{GateArgs, open_and_warn, parse_id};
use crate::args::parse_format;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};

/// Arguments of `image identity`.
#[derive(Debug, clap::Args)]
pub(super) struct IdentityArgs {
    /// The image
    #[arg(value_name = "IMAGE")]
    image: PathBuf,
    /// Give it a new one, of random bits
    #[arg(long, conflicts_with = "set")]
    renew: bool,
    /// Give it this one
    #[arg(long, value_name = "UUID", value_parser = parse_id)]
    set: Option<ImageId>,
    /// An image that differs from it and is to know it by that; may be repeated
    #[arg(long = "child", value_name = "IMAGE")]
    children: Vec<PathBuf>,
    /// Also change all images beside it, and in the folder Snapshots, that differ from it
    #[arg(long)]
    all_children: bool,
    /// Show which images would be changed; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Its format [default: detected]
    #[arg(long, value_name = "FORMAT", value_parser = parse_format)]
    format: Option<Format>,
    #[command(flatten)]
    gate: GateArgs,
}

impl Verb for IdentityArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Make a copy of a disk usable in VirtualBox beside the original",
            line: "holdfast image identity copy.vdi --renew",
        },
        Example {
            wish: "Change the identity of an image that others depend on",
            line: "holdfast image identity base.vhd --renew --all-children",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `image identity`.
#[derive(Debug, Serialize)]
struct Identity {
    dry_run: bool,
    path: String,
    format: &'static str,
    id: Option<String>,
    before: Option<String>,
    modification: Option<String>,
    parent_id: Option<String>,
    parent_modification: Option<String>,
    children: Vec<String>,
    changed: bool,
}

impl Report for Identity {
    fn command(&self) -> &'static str {
        "image identity"
    }

    fn human(&self, page: &mut Page) {
        let id = self.id.as_deref().unwrap_or("none");
        let would = if self.dry_run { "would become " } else { "" };
        page.line(&format!("{}  {}: {would}{id}", self.path, self.format));
        if let (true, Some(before)) = (self.dry_run, &self.before) {
            page.line(&format!("  it is {before}"));
        }
        if let (true, Some(before)) = (self.changed, &self.before) {
            page.line(&format!("  it was {before}"));
        }
        if self.changed && self.id.is_none() {
            page.line("  the disk has none of its own; those of its deltas are new");
        }
        if let Some(modification) = &self.modification {
            page.line(&format!("  last modified as {modification}"));
        }
        match (&self.parent_id, &self.parent_modification) {
            (Some(id), _) => page.line(&format!("  differs from {id}")),
            (None, Some(modification)) => page.line(&format!("  differs from one last modified as {modification}")),
            (None, None) => {}
        }
        for child in &self.children {
            let did = match (self.changed, self.dry_run) {
                (true, _) => "changed too",
                (false, true) => "would be changed too",
                (false, false) => "differs from it",
            };
            page.line(&format!("  {child}: {did}"));
        }
    }
}

fn run(args: &IdentityArgs, context: &Context) -> Result<Exit, Error> {
    let options = OpenOptions {
        backing: Backing::Ignore,
        ..args.gate.open_options(args.format)?
    };
    let wanted = match (args.renew, args.set) {
        (true, _) => Some(ImageId::random().map_err(holdfast_engine::Error::from)?),
        (false, id) => id,
    };
    let change = match wanted {
        Some(id) => {
            let wish = NewIdentity {
                id,
                children: args.children.clone(),
                unnamed_children: if args.all_children {
                    UnnamedChildren::Change
                } else {
                    UnnamedChildren::Refuse
                },
                name: None,
            };
            let change = if args.dry_run {
                plan_identity(&args.image, &options, &wish)
            } else {
                set_identity(&args.image, &options, &wish)
            };
            Some(change.map_err(holdfast_engine::Error::from)?)
        }
        None if args.children.is_empty() && !args.all_children => None,
        None => {
            return Err(Error::usage(
                "children are changed only with the image",
                "add --renew or --set",
            ));
        }
    };
    let is_plan = args.dry_run && change.is_some();
    let image = open_and_warn(&args.image, &options, context)?;
    let layer = &image.layers()[0];
    let blocks = layer.blocks.as_ref();
    let parent = blocks.and_then(|blocks| blocks.parent.as_ref());
    let children = match &change {
        Some(change) => change.children.clone(),
        None => children_in_folder(&args.image, &options).map_err(holdfast_engine::Error::from)?,
    };
    context.report(&Identity {
        dry_run: is_plan,
        path: args.image.display().to_string(),
        format: layer.format.name(),
        id: match &change {
            Some(change) if is_plan => change.after.map(|id| id.to_string()),
            _ => id_of(layer)?.map(|id| id.to_string()),
        },
        before: change
            .as_ref()
            .and_then(|change| change.before)
            .map(|id| id.to_string()),
        modification: blocks.and_then(|blocks| blocks.modification.clone()),
        parent_id: parent.and_then(|parent| parent.id).map(|id| id.to_string()),
        parent_modification: parent.and_then(|parent| parent.modification.clone()),
        children: children.iter().map(|child| child.display().to_string()).collect(),
        changed: change.is_some() && !is_plan,
    })
}

/// The id of an image; that of a Parallels disk is in its descriptor, and its deltas have other ids.
fn id_of(layer: &LayerInfo) -> Result<Option<ImageId>, Error> {
    match &layer.delta {
        Some(delta) => {
            let descriptor = DiskDescriptor::load(&delta.descriptor).map_err(holdfast_engine::Error::from)?;
            Ok(descriptor.id())
        }
        None => Ok(layer.blocks.as_ref().and_then(|blocks| blocks.id)),
    }
}
