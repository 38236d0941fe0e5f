//! `holdfast container delete`, `merge`, `resize` and `trim`.

use holdfast_engine::{
    ContainerPlace, Growth, SnapshotDeletion, delete_snapshots, fold_layers, grow_container, is_kept_for_backup,
    trim_container,
};
use holdfast_image::ContainerTree;
use serde::Serialize;

use super::{ContainerArg, container_tools};
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::units;

/// Arguments of `container delete`.
#[derive(Debug, clap::Args)]
pub(super) struct DeleteArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// Snapshots: names or ids
    #[arg(value_name = "SNAPSHOT", required = true)]
    snapshots: Vec<String>,
    /// Show what would be deleted; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for DeleteArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Delete a snapshot; the container may be mounted",
        line: "holdfast container delete /srv/web1 before-upgrade",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        delete(&place, &self.snapshots, self.dry_run, "container delete", context)
    }
}

fn tree_of(place: &ContainerPlace) -> Result<ContainerTree, Error> {
    ContainerTree::open(&place.folder).map_err(|error| holdfast_engine::Error::from(error).into())
}

fn delete(
    place: &ContainerPlace,
    names: &[String],
    dry_run: bool,
    command: &'static str,
    context: &Context,
) -> Result<Exit, Error> {
    let tree = tree_of(place)?;
    let mut found = Vec::new();
    for name in names {
        let id = tree.find_snapshot(name).map_err(holdfast_engine::Error::from)?;
        found.push(tree.name_of(id));
    }
    let done = if dry_run {
        SnapshotDeletion::default()
    } else if found.is_empty() {
        context.work(1, |job| fold_layers(place, job))?
    } else {
        context.work(1, |job| delete_snapshots(place, names, job))?
    };
    context.report(&SnapshotsDeleted {
        command,
        dry_run,
        container: place.folder.display().to_string(),
        snapshots: found,
        merged_count: done.merged_count,
        removed_count: done.removed_count,
    })
}

/// Report of `container delete` and `container merge`.
#[derive(Debug, Serialize)]
struct SnapshotsDeleted {
    #[serde(skip)]
    command: &'static str,
    dry_run: bool,
    container: String,
    snapshots: Vec<String>,
    merged_count: usize,
    removed_count: usize,
}

impl Report for SnapshotsDeleted {
    fn command(&self) -> &'static str {
        self.command
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn human(&self, page: &mut Page) {
        if self.snapshots.is_empty() && self.merged_count + self.removed_count == 0 {
            page.line(&format!("{}: there is nothing to merge", self.container));
            return;
        }
        let names = self.snapshots.join(", ");
        if self.dry_run {
            page.line(&format!("would delete {names} of {}", self.container));
            return;
        }
        let what = if names.is_empty() {
            String::new()
        } else {
            format!("{names} deleted; ")
        };
        page.line(&format!(
            "{}: {what}{} merged, {} removed",
            self.container,
            units::counted(self.merged_count as u64, "layer", "layers"),
            units::count(self.removed_count as u64)
        ));
    }
}

/// Arguments of `container merge`.
#[derive(Debug, clap::Args)]
pub(super) struct MergeArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// Delete all snapshots before this one; it stays
    #[arg(long, value_name = "SNAPSHOT", conflicts_with = "all")]
    before: Option<String>,
    /// Delete all snapshots that the current state is based on
    #[arg(long)]
    all: bool,
    /// Show what would be deleted; change nothing
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Verb for MergeArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "Keep the current state only",
            line: "holdfast container merge /srv/web1 --all",
        },
        Example {
            wish: "Keep a snapshot and everything after it",
            line: "holdfast container merge /srv/web1 --before monday",
        },
        Example {
            wish: "Continue an interrupted deletion",
            line: "holdfast container merge /srv/web1",
        },
    ];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let tree = tree_of(&place)?;
        let top = match &self.before {
            Some(name) => Some(tree.find_snapshot(name).map_err(holdfast_engine::Error::from)?),
            None => self.all.then_some(tree.top()),
        };
        let visible = tree.snapshots();
        // Without its snapshot, the next backup would read everything.
        let is_visible = |id| {
            visible
                .iter()
                .any(|(known, entry)| *known == id && !is_kept_for_backup(entry))
        };
        let names: Vec<String> = top.map_or_else(Vec::new, |top| {
            let below = tree.chain_of(top).into_iter().skip(1).map(|layer| layer.id);
            below.filter(|id| is_visible(*id)).map(|id| id.to_string()).collect()
        });
        delete(&place, &names, self.dry_run, "container merge", context)
    }
}

/// Arguments of `container resize`.
#[derive(Debug, clap::Args)]
pub(super) struct ResizeContainerArgs {
    #[command(flatten)]
    container: ContainerArg,
    /// The new size of the disk (40G); it can only grow
    #[arg(value_name = "SIZE", value_parser = units::parse_disk_bytes)]
    size: u64,
}

impl Verb for ResizeContainerArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Grow a container to 40 GiB; it may be mounted",
        line: "holdfast container resize /srv/web1 40G",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let tools = container_tools(context);
        let growth = context.work(1, |job| grow_container(&place, self.size, &tools, job))?;
        context.report(&ContainerResized {
            container: place.folder.display().to_string(),
            size_bytes: self.size,
            at_next_mount: growth == Growth::AtNextMount,
        })
    }
}

/// Report of `container resize`.
#[derive(Debug, Serialize)]
struct ContainerResized {
    container: String,
    size_bytes: u64,
    /// Whether the file system grows when the container is mounted.
    at_next_mount: bool,
}

impl Report for ContainerResized {
    fn command(&self) -> &'static str {
        "container resize"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let when = if self.at_next_mount {
            "; its file system grows with the next mount"
        } else {
            ""
        };
        page.line(&format!(
            "{} has {}{when}",
            self.container,
            units::bytes(self.size_bytes)
        ));
    }
}

/// Arguments of `container trim`.
#[derive(Debug, clap::Args)]
pub(super) struct TrimArgs {
    #[command(flatten)]
    container: ContainerArg,
}

impl Verb for TrimArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Free the space of deleted files",
        line: "holdfast container trim /srv/web1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let trimmed_bytes = trim_container(&place)?;
        context.report(&Trimmed {
            container: place.folder.display().to_string(),
            trimmed_bytes,
        })
    }
}

/// Report of `container trim`.
#[derive(Debug, Serialize)]
struct Trimmed {
    container: String,
    trimmed_bytes: u64,
}

impl Report for Trimmed {
    fn command(&self) -> &'static str {
        "container trim"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!(
            "{}: {} are not used by the file system",
            self.container,
            units::bytes(self.trimmed_bytes)
        ));
    }
}
