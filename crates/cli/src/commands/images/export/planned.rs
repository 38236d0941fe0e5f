//! What `holdfast export --dry-run` answers.

use holdfast_engine::ExportPlan;
use serde::Serialize;

use super::kind::ExportKind;
use crate::commands::images::import::{DroppedDocument, list_dropped};
use crate::output::{Column, Page, Report, Table};
use crate::units;

/// Report of `export --dry-run`.
#[derive(Debug, Serialize)]
pub(super) struct ExportPlanned {
    dry_run: bool,
    target: String,
    format: &'static str,
    /// The snapshot; null for a machine that is read directly.
    snapshot: Option<String>,
    machine: String,
    name: String,
    disks: Vec<PlannedDiskDocument>,
    dropped: Vec<DroppedDocument>,
    /// How the machine would be read; null for a snapshot.
    method: Option<&'static str>,
    method_reason: Option<String>,
    /// Bytes of memory from which it would resume; null if it would start afresh.
    memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct PlannedDiskDocument {
    name: String,
    size_bytes: u64,
}

impl ExportPlanned {
    pub(super) fn new(plan: ExportPlan, target: String, kind: ExportKind) -> Self {
        let (method, method_reason) = plan
            .reading
            .map(|reading| (reading.method.word, reading.method.reason))
            .unzip();
        let disks = plan.disks.into_iter().map(|disk| PlannedDiskDocument {
            name: disk.name,
            size_bytes: disk.size_bytes,
        });
        Self {
            dry_run: true,
            target,
            format: kind.word(),
            snapshot: plan.snapshot.map(|snapshot| snapshot.id.to_string()),
            machine: plan.machine,
            name: plan.name,
            disks: disks.collect(),
            dropped: plan.dropped.iter().map(DroppedDocument::from).collect(),
            method,
            method_reason,
            memory_bytes: plan.memory_bytes,
        }
    }
}

impl Report for ExportPlanned {
    fn command(&self) -> &'static str {
        "export"
    }

    fn human(&self, page: &mut Page) {
        let of = match &self.snapshot {
            Some(snapshot) => format!("as of snapshot {}", &snapshot[..8]),
            None => "as it is now".to_owned(),
        };
        page.line(&format!(
            "would export {} {of} to {} ({})",
            self.name, self.target, self.format
        ));
        if let (Some(method), Some(reason)) = (self.method, &self.method_reason) {
            page.line(&format!("  method {method} ({reason})"));
        }
        let mut table = Table::new([Column::long_text("DISK"), Column::number("SIZE")]);
        for disk in &self.disks {
            table.row([disk.name.clone(), units::bytes(disk.size_bytes)]);
        }
        page.table(&table);
        if let Some(bytes) = self.memory_bytes {
            page.line(&format!(
                "it would be suspended there, with {} of memory",
                units::bytes(bytes)
            ));
        }
        list_dropped(&self.dropped, page);
    }
}
