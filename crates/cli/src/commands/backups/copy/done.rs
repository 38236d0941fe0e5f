//! The report of `holdfast copy`.

use std::time::Duration;

use holdfast_block::error_text;
use holdfast_engine::{CopiedSnapshot, CopyOutcome, CopyReport, Execution, time_of};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Serialize;

use crate::exit::Exit;
use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;
use crate::units;

/// Report of `copy`.
#[derive(Debug, Serialize)]
pub(super) struct CopyDone {
    dry_run: bool,
    to: String,
    /// Whether both repositories compute the same chunk ids.
    alike: bool,
    snapshots: Vec<SnapshotRow>,
    /// Why other snapshots could not be read.
    damaged: Vec<String>,
    copied_count: u64,
    present_count: u64,
    removed_count: u64,
    gone_count: u64,
    failed_count: u64,
    read_bytes: u64,
    stored_bytes: u64,
    duration_ms: u64,
    #[serde(skip)]
    exit: Exit,
    #[serde(skip)]
    zone: TimeZone,
}

/// A snapshot to copy.
#[derive(Debug, Serialize)]
struct SnapshotRow {
    id: String,
    machine: String,
    /// The point in time, in UTC.
    time: String,
    #[serde(skip)]
    instant: Timestamp,
    outcome: &'static str,
    /// The id of the copy.
    copy: Option<String>,
    read_bytes: u64,
    new_bytes: u64,
    stored_bytes: u64,
    reason: Option<String>,
}

impl From<&CopiedSnapshot> for SnapshotRow {
    fn from(copied: &CopiedSnapshot) -> Self {
        let row = Self {
            id: copied.snapshot.id.to_string(),
            machine: copied.snapshot.machine.clone(),
            time: time_of(&copied.snapshot).to_string(),
            instant: time_of(&copied.snapshot),
            outcome: "",
            copy: None,
            read_bytes: 0,
            new_bytes: 0,
            stored_bytes: 0,
            reason: None,
        };
        match &copied.outcome {
            CopyOutcome::Copied {
                id,
                read_bytes,
                new_bytes,
                stored_bytes,
            } => Self {
                outcome: "copied",
                copy: Some(id.to_string()),
                read_bytes: *read_bytes,
                new_bytes: *new_bytes,
                stored_bytes: *stored_bytes,
                ..row
            },
            CopyOutcome::Planned(survey) => Self {
                outcome: "planned",
                read_bytes: survey.read_bytes,
                new_bytes: survey.new_bytes,
                ..row
            },
            CopyOutcome::Present(id) => Self {
                outcome: "present",
                copy: Some(id.to_string()),
                ..row
            },
            CopyOutcome::Removed => Self {
                outcome: "removed",
                ..row
            },
            CopyOutcome::Gone => Self { outcome: "gone", ..row },
            CopyOutcome::Failed(error) => Self {
                outcome: "failed",
                reason: Some(error_text(error)),
                ..row
            },
        }
    }
}

impl CopyDone {
    pub(super) fn new(report: &CopyReport, execution: Execution, to: String, zone: &TimeZone) -> Self {
        let rows: Vec<SnapshotRow> = report.snapshots.iter().map(SnapshotRow::from).collect();
        let count = |outcomes: &[&str]| {
            let of_these = rows.iter().filter(|row| outcomes.contains(&row.outcome));
            of_these.count() as u64
        };
        let sum = |bytes: fn(&SnapshotRow) -> u64| rows.iter().map(bytes).fold(0, u64::saturating_add);
        let failures = report.snapshots.iter().filter_map(|copied| match &copied.outcome {
            CopyOutcome::Failed(error) => Some(error),
            _ => None,
        });
        let is_damage = !report.damaged.is_empty() || failures.clone().any(holdfast_repo::Error::is_damage);
        let exit = if is_damage {
            Exit::Damage
        } else if failures.count() > 0 {
            Exit::Error
        } else if count(&["gone"]) > 0 {
            Exit::Warnings
        } else {
            Exit::Ok
        };
        Self {
            dry_run: execution == Execution::DryRun,
            to,
            alike: report.is_alike,
            copied_count: count(&["copied", "planned"]),
            present_count: count(&["present"]),
            removed_count: count(&["removed"]),
            gone_count: count(&["gone"]),
            failed_count: count(&["failed"]),
            read_bytes: sum(|row| row.read_bytes),
            stored_bytes: sum(|row| row.stored_bytes),
            snapshots: rows,
            damaged: report.damaged.iter().map(ToString::to_string).collect(),
            duration_ms: units::millis(report.duration),
            exit,
            zone: zone.clone(),
        }
    }

    /// The table for users; snapshots that need no copy are only counted.
    fn table(&self) -> Option<Table> {
        let mut table = Table::new([
            Column::text("SNAPSHOT"),
            Column::long_text("MACHINE"),
            Column::text("TIME"),
            Column::number("READ"),
            Column::number("NEW"),
            Column::text(if self.dry_run { "OUTCOME" } else { "COPY" }),
        ]);
        let mut is_empty = true;
        for row in &self.snapshots {
            let (style, outcome) = match row.outcome {
                "present" | "removed" => continue,
                "copied" => (Style::Good, row.copy.as_deref().map_or("", |id| &id[..8])),
                "gone" => (Style::Warning, "gone"),
                "failed" => (Style::Bad, "failed"),
                _ => (Style::Plain, "to be copied"),
            };
            is_empty = false;
            let cells = [
                row.id[..8].to_owned(),
                row.machine.clone(),
                time::local(row.instant, &self.zone),
                units::bytes(row.read_bytes),
                units::bytes(row.new_bytes),
            ];
            let plain = cells.map(|cell| (Style::Plain, cell));
            table.styled_row(plain.into_iter().chain([(style, outcome.to_owned())]));
        }
        (!is_empty).then_some(table)
    }
}

impl Report for CopyDone {
    fn command(&self) -> &'static str {
        "copy"
    }

    fn is_confirmation(&self) -> bool {
        !self.dry_run
    }

    fn exit(&self) -> Exit {
        self.exit
    }

    fn human(&self, page: &mut Page) {
        if let Some(table) = self.table() {
            page.table(&table);
        }
        for row in &self.snapshots {
            let name = format!("{} of {}", &row.id[..8], row.machine);
            if let Some(reason) = &row.reason {
                page.styled(Style::Bad, &format!("{name} was not copied: {reason}"));
            } else if row.outcome == "gone" {
                page.styled(
                    Style::Warning,
                    &format!("{name} was not copied: it was removed here meanwhile"),
                );
            }
        }
        for damaged in &self.damaged {
            page.styled(Style::Bad, &format!("damaged: {damaged}"));
        }
        page.line(&self.summary());
    }
}

impl CopyDone {
    fn summary(&self) -> String {
        let copied = units::counted(self.copied_count, "snapshot", "snapshots");
        let mut parts = if self.dry_run {
            vec![format!(
                "would copy {copied} to {}: about {} to read",
                self.to,
                units::bytes(self.read_bytes)
            )]
        } else {
            vec![
                format!("copied {copied} to {}: {} read", self.to, units::bytes(self.read_bytes)),
                format!("{} stored", units::bytes(self.stored_bytes)),
                units::duration(Duration::from_millis(self.duration_ms)),
            ]
        };
        for (count, what) in [
            (self.present_count, "there already"),
            (self.removed_count, "removed there before, which --again brings back"),
            (self.failed_count, "failed"),
        ] {
            if count > 0 {
                parts.push(format!("{} {what}", units::count(count)));
            }
        }
        parts.join(", ")
    }
}
