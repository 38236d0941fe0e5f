//! `holdfast show`: shows all information about a snapshot.

use holdfast_engine::{MachineIdentity, NOTE_FORMAT, NOTE_PATH, SnapshotName, show, time_of};
use serde::Serialize;

use crate::args::Example;
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::snapshot::{DiskDocument, ListedSnapshot, SnapshotDocument, changed_bytes};
use crate::output::{Page, Report};
use crate::process::time;
use crate::units;

/// Arguments of `show`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// The snapshot (ID, MACHINE, MACHINE@TIME); with :DISK one of its disks
    #[arg(value_name = "SNAPSHOT[:DISK]")]
    snapshot: SnapshotName,
}

impl Verb for ShowArgs {
    const EXAMPLES: &'static [Example] = &[
        Example {
            wish: "See what the newest snapshot of a machine holds",
            line: "holdfast show -r /backup/vms web1",
        },
        Example {
            wish: "See one disk of a snapshot",
            line: "holdfast show -r /backup/vms 3f2a9c1e:vda",
        },
    ];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        run(self, context)
    }
}

/// Report of `show`.
#[derive(Debug, Serialize)]
struct SnapshotShown {
    snapshot: ListedSnapshot,
    /// The UUID of its machine; null if it has none.
    uuid: Option<String>,
    /// The number of other machines with the same name.
    namesake_count: u64,
    #[serde(skip)]
    identity: String,
    #[serde(skip)]
    time_local: String,
}

impl Report for SnapshotShown {
    fn command(&self) -> &'static str {
        "show"
    }

    fn human(&self, page: &mut Page) {
        let snapshot = &self.snapshot.snapshot;
        page.line(&format!("snapshot {}", snapshot.id));
        let or_none = |text: String| if text.is_empty() { "none".to_owned() } else { text };
        page.fields(&[
            ("machine", snapshot.machine.clone()),
            (
                "identity",
                match self.namesake_count {
                    0 => self.identity.clone(),
                    1 => format!("{}; another machine has this name", self.identity),
                    count => format!("{}; {count} other machines have this name", self.identity),
                },
            ),
            ("time", self.time_local.clone()),
            ("tags", or_none(snapshot.tags.join(", "))),
            ("consistency", or_none(snapshot.consistency.clone().unwrap_or_default())),
            ("read by", or_none(snapshot.method.clone().unwrap_or_default())),
            (
                "protected",
                if self.snapshot.is_protected { "yes" } else { "no" }.to_owned(),
            ),
            ("compared with", or_none(snapshot.parent.clone().unwrap_or_default())),
            ("copy of", or_none(snapshot.origin.clone().unwrap_or_default())),
            ("written by", format!("{} on {}", snapshot.program, snapshot.host)),
        ]);
        for disk in &snapshot.disks {
            page.gap();
            show_disk(disk, page);
        }
    }
}

fn show_disk(disk: &DiskDocument, page: &mut Page) {
    page.line(&format!("disk {}", disk.name));
    let statistics = &disk.statistics;
    let mut fields = vec![(
        "size",
        format!(
            "{} ({} bytes)",
            units::bytes(disk.size_bytes),
            units::count(disk.size_bytes)
        ),
    )];
    if let Some(path) = disk.notes.get(NOTE_PATH) {
        fields.push(("was at", path.clone()));
    }
    if let Some(format) = disk.notes.get(NOTE_FORMAT) {
        fields.push(("format", format.clone()));
    }
    fields.extend([
        ("read", units::bytes(statistics.read_bytes)),
        ("zero", units::bytes(statistics.zero_bytes)),
        ("unchanged", units::bytes(statistics.unchanged_bytes)),
        (
            "changed",
            format!(
                "{}, of which {} were new to the repository",
                units::bytes(changed_bytes(statistics)),
                units::bytes(statistics.new_bytes)
            ),
        ),
    ]);
    page.fields(&fields);
}

fn run(args: &ShowArgs, context: &Context) -> Result<Exit, Error> {
    let repository = context.open_repository()?;
    let progress = context.progress();
    let report = show(&repository, &args.snapshot, context.zone(), &*progress)?;
    drop(progress);
    let mut snapshot = SnapshotDocument::from(&report.snapshot);
    if let Some(disk) = &report.disk {
        snapshot.disks.retain(|other| other.name == disk.as_str());
    }
    context.report(&SnapshotShown {
        snapshot: ListedSnapshot {
            snapshot,
            is_protected: report.is_protected,
        },
        uuid: match &report.identity {
            MachineIdentity::Uuid(uuid) => Some(uuid.clone()),
            MachineIdentity::Unidentified | MachineIdentity::Images => None,
        },
        namesake_count: report.namesake_count as u64,
        identity: report.identity.to_string(),
        time_local: time::local(time_of(&report.snapshot), context.zone()),
    })
}
