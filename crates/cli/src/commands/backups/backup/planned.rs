//! What `holdfast backup --dry-run` answers.

use holdfast_engine::{BackupPlan, PlannedRead};
use serde::Serialize;

use super::machines_done::{Failed, LeftOut, MachineDone};
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::units;

/// The result of a machine.
pub(super) enum Turn {
    BackedUp(Box<MachineDone>),
    Planned(PlannedDocument),
}

/// Report of `backup --dry-run`.
#[derive(Debug, Serialize)]
pub(super) struct BackupsPlanned {
    dry_run: bool,
    machines: Vec<PlannedDocument>,
    failed: Vec<Failed>,
    left_out_machines: Vec<LeftOut>,
}

/// A machine that would be backed up.
#[derive(Debug, Serialize)]
pub(super) struct PlannedDocument {
    machine: String,
    /// Null for images.
    state: Option<String>,
    /// The id of the snapshot to compare with.
    parent: Option<String>,
    method: &'static str,
    method_reason: String,
    disks: Vec<PlannedDisk>,
    left_out: Vec<LeftOut>,
}

#[derive(Debug, Serialize)]
struct PlannedDisk {
    name: String,
    size_bytes: Option<u64>,
    read_bytes: Option<u64>,
    reason: Option<String>,
}

impl From<BackupPlan> for PlannedDocument {
    fn from(plan: BackupPlan) -> Self {
        let left_out = plan.left_out.into_iter();
        Self {
            machine: plan.name.to_string(),
            state: plan.state.map(|state| state.to_string()),
            parent: plan.parent.map(|parent| parent.id.to_string()),
            method: plan.method.word,
            method_reason: plan.method.reason,
            disks: plan.disks.into_iter().map(PlannedDisk::from).collect(),
            left_out: left_out.map(|(name, reason)| LeftOut::new(name, reason)).collect(),
        }
    }
}

impl From<PlannedRead> for PlannedDisk {
    fn from(disk: PlannedRead) -> Self {
        Self {
            name: disk.name,
            size_bytes: disk.size_bytes,
            read_bytes: disk.read_bytes,
            reason: disk.reason,
        }
    }
}

impl BackupsPlanned {
    pub(super) fn new(machines: Vec<PlannedDocument>, failed: Vec<Failed>, left_out_machines: Vec<LeftOut>) -> Self {
        Self {
            dry_run: true,
            machines,
            failed,
            left_out_machines,
        }
    }
}

impl PlannedDocument {
    fn human(&self, page: &mut Page) {
        let state = self.state.as_ref().map(|state| format!(", which is {state}"));
        let compared = match &self.parent {
            Some(parent) => format!("compare it with snapshot {}", &parent[..8]),
            None => "compare it with no snapshot".to_owned(),
        };
        page.line(&format!(
            "would back up {}{}, and {compared}",
            self.machine,
            state.unwrap_or_default()
        ));
        page.line(&format!("  method {} ({})", self.method, self.method_reason));
        let mut table = Table::new([
            Column::long_text("DISK"),
            Column::number("SIZE"),
            Column::number("READ"),
            Column::long_text("REASON TO READ ALL"),
        ]);
        let bytes = |bytes: Option<u64>, unknown: &str| bytes.map_or_else(|| unknown.to_owned(), units::bytes);
        for disk in &self.disks {
            table.row([
                disk.name.clone(),
                bytes(disk.size_bytes, "-"),
                bytes(disk.read_bytes, "changes"),
                disk.reason.clone().unwrap_or_else(|| "-".to_owned()),
            ]);
        }
        page.table(&table);
        for disk in &self.left_out {
            page.line(&format!("  {}: left out: {}", disk.name, disk.reason));
        }
    }
}

impl Report for BackupsPlanned {
    fn command(&self) -> &'static str {
        "backup"
    }

    fn exit(&self) -> Exit {
        if self.failed.is_empty() { Exit::Ok } else { Exit::Error }
    }

    fn human(&self, page: &mut Page) {
        for machine in &self.machines {
            machine.human(page);
        }
        for machine in &self.left_out_machines {
            page.line(&format!("{}: left out: {}", machine.name, machine.reason));
        }
        if !self.failed.is_empty() {
            let names: Vec<&str> = self.failed.iter().map(|failed| &failed.machine[..]).collect();
            page.styled(Style::Bad, &format!("could not be backed up: {}", names.join(", ")));
        }
    }
}
