//! `holdfast container info` and `snapshots`.

use holdfast_engine::{ContainerState, Relocation, container_state};
use holdfast_image::{ContainerTree, ImageId, MEMORY_PROPERTY, SnapshotEntry};
use jiff::Timestamp;
use serde::Serialize;

use super::ContainerArg;
use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Table};
use crate::process::time;
use crate::units;

/// Arguments of `container info`.
#[derive(Debug, clap::Args)]
pub(super) struct InfoArgs {
    #[command(flatten)]
    container: ContainerArg,
}

/// Arguments of `container snapshots`.
#[derive(Debug, clap::Args)]
pub(super) struct SnapshotsArgs {
    #[command(flatten)]
    container: ContainerArg,
}

/// A snapshot in a report.
#[derive(Debug, Serialize)]
struct ContainerSnapshotDocument {
    id: String,
    name: Option<String>,
    /// The snapshot below it.
    parent: Option<String>,
    created: Option<String>,
    comment: String,
    /// Whether it has the memory of processes.
    has_memory: bool,
    /// Whether the current state is based on it.
    is_current: bool,
    #[serde(skip)]
    time: String,
}

fn documents(tree: &ContainerTree, context: &Context) -> Vec<ContainerSnapshotDocument> {
    let snapshots = tree.snapshots();
    let is_visible = |id: &ImageId| snapshots.iter().any(|(known, _)| known == id);
    let current: Vec<ImageId> = tree.chain_of(tree.top()).iter().map(|layer| layer.id).collect();
    let document = |(id, entry): &(ImageId, SnapshotEntry)| {
        let below = tree.chain_of(*id).into_iter().skip(1).map(|layer| layer.id);
        let created = entry
            .created_s
            .and_then(|seconds| Timestamp::from_second(i64::try_from(seconds).ok()?).ok());
        ContainerSnapshotDocument {
            id: id.to_string(),
            name: entry.name.clone(),
            parent: below.into_iter().find(is_visible).map(|parent| tree.name_of(parent)),
            created: created.map(|created| created.to_string()),
            comment: entry.comment.clone(),
            has_memory: entry.properties.contains_key(MEMORY_PROPERTY),
            is_current: current.contains(id),
            time: created.map_or_else(String::new, |created| time::local(created, context.zone())),
        }
    };
    snapshots.iter().map(document).collect()
}

fn show_snapshots(snapshots: &[ContainerSnapshotDocument], page: &mut Page) {
    let mut table = Table::new([
        Column::long_text("SNAPSHOT"),
        Column::text("TIME"),
        Column::long_text("BASED ON"),
        Column::text("CURRENT"),
        Column::text("MEMORY"),
        Column::long_text("COMMENT"),
    ]);
    for snapshot in snapshots {
        table.row([
            snapshot.name.clone().unwrap_or_else(|| snapshot.id.clone()),
            snapshot.time.clone(),
            snapshot.parent.clone().unwrap_or_default(),
            if snapshot.is_current { "yes" } else { "" }.to_owned(),
            if snapshot.has_memory { "yes" } else { "" }.to_owned(),
            snapshot.comment.clone(),
        ]);
    }
    page.table(&table);
}

impl Verb for SnapshotsArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "List the snapshots of a container",
        line: "holdfast container snapshots /srv/web1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let tree = ContainerTree::open(&place.folder).map_err(holdfast_engine::Error::from)?;
        context.report(&ContainerSnapshotsListed {
            container: place.folder.display().to_string(),
            snapshots: documents(&tree, context),
        })
    }
}

/// Report of `container snapshots`.
#[derive(Debug, Serialize)]
struct ContainerSnapshotsListed {
    container: String,
    snapshots: Vec<ContainerSnapshotDocument>,
}

impl Report for ContainerSnapshotsListed {
    fn command(&self) -> &'static str {
        "container snapshots"
    }

    fn human(&self, page: &mut Page) {
        if self.snapshots.is_empty() {
            page.line("no snapshots yet");
        } else {
            show_snapshots(&self.snapshots, page);
        }
    }
}

impl Verb for InfoArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Show a container",
        line: "holdfast container info /srv/web1",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Repository, SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        let place = self.container.place(context)?;
        let state = container_state(&place)?;
        context.report(&ContainerShown::new(
            &state,
            Relocation::of(&place)?.map(|relocation| relocation.target),
            place.folder.display().to_string(),
            context,
        ))
    }
}

/// Report of `container info`.
#[derive(Debug, Serialize)]
struct ContainerShown {
    container: String,
    id: String,
    size_bytes: u64,
    allocated_bytes: u64,
    filesystem: Option<String>,
    source: Option<String>,
    /// The address of its folder at the host to which it was migrated.
    migrated_to: Option<String>,
    is_used: bool,
    mount_points: Vec<String>,
    merge_pending: bool,
    growth_pending: bool,
    layers: Vec<LayerDocument>,
    snapshots: Vec<ContainerSnapshotDocument>,
    traffic: Option<TrafficDocument>,
}

/// A layer in a report.
#[derive(Debug, Serialize)]
struct LayerDocument {
    file: String,
    format: &'static str,
    /// The snapshot; none for the current state and for deleted snapshots.
    snapshot: Option<String>,
    is_top: bool,
    file_bytes: u64,
    allocated_bytes: Option<u64>,
}

/// Requests since the server of a mounted container began.
#[derive(Debug, Serialize)]
struct TrafficDocument {
    read_count: u64,
    read_bytes: u64,
    write_count: u64,
    write_bytes: u64,
    flush_count: u64,
}

impl ContainerShown {
    fn new(state: &ContainerState, migrated_to: Option<String>, container: String, context: &Context) -> Self {
        let tree = &state.chain.tree;
        let layers: Vec<LayerDocument> = state
            .chain
            .layers
            .iter()
            .map(|status| LayerDocument {
                file: status.path.display().to_string(),
                format: status.layer.format.name(),
                snapshot: (status.layer.id != tree.top() && !tree.is_hidden(status.layer.id))
                    .then(|| tree.name_of(status.layer.id)),
                is_top: status.layer.id == tree.top(),
                file_bytes: status.file_bytes,
                allocated_bytes: status.allocated_bytes,
            })
            .collect();
        Self {
            container,
            id: tree.id().to_string(),
            size_bytes: state.chain.size_bytes,
            allocated_bytes: layers.iter().filter_map(|layer| layer.allocated_bytes).sum(),
            filesystem: tree.properties().get("filesystem").cloned(),
            source: tree.properties().get("source").cloned(),
            migrated_to,
            is_used: state.is_used,
            mount_points: state
                .mount_points
                .iter()
                .map(|point| point.display().to_string())
                .collect(),
            merge_pending: tree.is_collapse_pending(),
            growth_pending: tree.properties().contains_key("filesystem.grow"),
            layers,
            snapshots: documents(tree, context),
            traffic: state.traffic.map(|traffic| TrafficDocument {
                read_count: traffic.read_count,
                read_bytes: traffic.read_bytes,
                write_count: traffic.write_count,
                write_bytes: traffic.write_bytes,
                flush_count: traffic.flush_count,
            }),
        }
    }
}

impl Report for ContainerShown {
    fn command(&self) -> &'static str {
        "container info"
    }

    fn human(&self, page: &mut Page) {
        let mut fields = vec![
            ("container", self.container.clone()),
            ("id", self.id.clone()),
            ("disk", units::bytes(self.size_bytes)),
            ("stored", units::bytes(self.allocated_bytes)),
        ];
        fields.extend(self.filesystem.clone().map(|kind| ("file system", kind)));
        fields.extend(self.source.clone().map(|source| ("source", source)));
        fields.extend(self.migrated_to.clone().map(|target| ("migrated to", target)));
        let used = match (&self.mount_points[..], self.is_used) {
            ([], false) => "no".to_owned(),
            ([], true) => "yes".to_owned(),
            (points, _) => points.join(", "),
        };
        fields.push(("mounted", used));
        if self.merge_pending {
            fields.push(("pending", "layers of deleted snapshots are to be merged".to_owned()));
        }
        if self.growth_pending {
            fields.push(("pending", "the file system grows with the next mount".to_owned()));
        }
        if let Some(traffic) = &self.traffic {
            fields.push((
                "requests",
                format!(
                    "{} reads, {}; {} writes, {}; {} flushes",
                    traffic.read_count,
                    units::bytes(traffic.read_bytes),
                    traffic.write_count,
                    units::bytes(traffic.write_bytes),
                    traffic.flush_count
                ),
            ));
        }
        page.fields(&fields);
        page.gap();
        let mut table = Table::new([
            Column::long_text("LAYER"),
            Column::text("FORMAT"),
            Column::number("STORED"),
            Column::long_text("SNAPSHOT"),
        ]);
        for layer in &self.layers {
            let file = std::path::Path::new(&layer.file).file_name().unwrap_or_default();
            table.row([
                file.to_string_lossy().into_owned(),
                layer.format.to_owned(),
                layer.allocated_bytes.map_or_else(String::new, units::bytes),
                match &layer.snapshot {
                    Some(name) => name.clone(),
                    None if layer.is_top => "(current)".to_owned(),
                    None => "(deleted)".to_owned(),
                },
            ]);
        }
        page.table(&table);
        if !self.snapshots.is_empty() {
            page.gap();
            show_snapshots(&self.snapshots, page);
        }
    }
}
