//! `holdfast list`: lists snapshots.

use holdfast_engine::{ListReport, ListRequest, NOTE_CONSISTENCY, disk_count, list, time_of};
use holdfast_policy::Glob;
use serde::Serialize;

use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::snapshot::{ListedSnapshot, SnapshotDocument, changed_bytes};
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;
use crate::units;

/// Arguments of `list`.
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    /// Only snapshots of these machines, by name or pattern ('web*')
    #[arg(value_name = "MACHINE", value_parser = Glob::parse)]
    machines: Vec<Glob>,
    /// Only snapshots with this tag; with several, those that have all of them
    #[arg(short, long = "tag", value_name = "TAG")]
    tags: Vec<String>,
}

impl Verb for ListArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "List all snapshots",
            line: "holdfast list --repository /backup/vms",
        },
        Example {
            wish: "List those of one machine, for a script",
            line: "holdfast list -r /backup/vms web1 --json",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `list`.
#[derive(Debug, Serialize)]
struct SnapshotsListed {
    snapshots: Vec<ListedSnapshot>,
    /// Names that several machines have.
    shared_names: Vec<SharedName>,
    /// Why other snapshots could not be read.
    damaged: Vec<String>,
    /// Snapshots that disappeared without having been removed by Holdfast.
    lost: Vec<String>,
    /// Each snapshot's row.
    #[serde(skip)]
    rows: Vec<[String; 9]>,
    /// Whether a filter was given.
    #[serde(skip)]
    is_filtered: bool,
}

/// A name that several machines have.
#[derive(Debug, Serialize)]
struct SharedName {
    machine: String,
    machine_count: usize,
}

impl Report for SnapshotsListed {
    fn command(&self) -> &'static str {
        "list"
    }

    fn exit(&self) -> Exit {
        if self.damaged.is_empty() && self.lost.is_empty() {
            Exit::Ok
        } else {
            Exit::Damage
        }
    }

    fn human(&self, page: &mut Page) {
        if self.rows.is_empty() {
            page.line(if self.is_filtered {
                "no snapshot matches all of that"
            } else {
                "no snapshots yet"
            });
        } else {
            let mut table = Table::new([
                Column::text("SNAPSHOT"),
                Column::long_text("MACHINE"),
                Column::text("TIME"),
                Column::number("DISKS"),
                Column::number("SIZE"),
                Column::number("CHANGED"),
                Column::text("CONSISTENCY"),
                Column::text("PROTECTED"),
                Column::long_text("TAGS"),
            ]);
            for row in &self.rows {
                table.row(row.clone());
            }
            page.table(&table);
        }
        for shared in &self.shared_names {
            page.styled(
                Style::Warning,
                &format!(
                    "{} is the name of {} machines: name their snapshots by id",
                    shared.machine, shared.machine_count
                ),
            );
        }
        for damaged in &self.damaged {
            page.styled(Style::Bad, &format!("damaged: {damaged}"));
        }
        for lost in &self.lost {
            page.styled(Style::Bad, &format!("lost: {lost}"));
        }
    }
}

fn run(args: &ListArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let request = ListRequest {
        machines: args.machines.clone(),
        tags: args.tags.clone(),
    };
    let ListReport {
        snapshots,
        protected,
        damaged,
        lost,
        named,
    } = list(&repository, &request)?;
    let rows = snapshots.iter().map(|snapshot| {
        [
            snapshot.id.short(),
            match named.distinction(snapshot) {
                Some(distinction) => format!("{} ({distinction})", snapshot.machine),
                None => snapshot.machine.clone(),
            },
            time::local(time_of(snapshot), context.zone()),
            units::count(disk_count(snapshot)),
            units::bytes(snapshot.logical_bytes()),
            units::bytes(changed_bytes(&snapshot.statistics())),
            snapshot.notes.get(NOTE_CONSISTENCY).cloned().unwrap_or_default(),
            if protected.contains(&snapshot.id) { "yes" } else { "" }.to_owned(),
            snapshot.tags.join(", "),
        ]
    });
    let documents = snapshots.iter().map(|snapshot| ListedSnapshot {
        snapshot: SnapshotDocument::from(snapshot),
        is_protected: protected.contains(&snapshot.id),
    });
    let is_shown = |name: &str| snapshots.iter().any(|snapshot| snapshot.machine == name);
    let shared_names = named.shared().filter(|(name, _)| is_shown(name));
    let shared_names = shared_names.map(|(name, machine_count)| SharedName {
        machine: name.to_owned(),
        machine_count,
    });
    context.report(&SnapshotsListed {
        rows: rows.collect(),
        is_filtered: !(args.machines.is_empty() && args.tags.is_empty()),
        snapshots: documents.collect(),
        shared_names: shared_names.collect(),
        damaged: damaged.iter().map(ToString::to_string).collect(),
        lost: lost.iter().map(ToString::to_string).collect(),
    })
}
