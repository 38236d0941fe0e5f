//! The reports of `migrate` of a container.

use std::path::Path;

use holdfast_engine::ContainerPlace;
use holdfast_migration::{ContainerMoveReport, ContainerPlan};
use serde::{Deserialize, Serialize};

use super::super::far::MoveTarget;
use super::report::{MovePhaseDocument, ReturnReport, milliseconds};
use crate::output::{Column, Page, Report, Table};
use crate::units;

/// The report of `migrate`. The host that brings a container back sends it to the host that asked for it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct ContainerMigrated {
    dry_run: bool,
    container: String,
    /// The address of its folder at the host that had it; null for this host.
    source: Option<String>,
    /// The address of its folder now; null for this host.
    destination: Option<String>,
    /// Where it is mounted now.
    mounted_on: Option<String>,
    size_bytes: u64,
    sent_bytes: u64,
    rounds: Vec<ContainerRoundDocument>,
    /// The folder of a former container that is kept.
    former: Option<String>,
    /// From the stop of what uses the container until it was started; null if it was not mounted.
    stopped_us: Option<u64>,
    phases: Vec<MovePhaseDocument>,
    duration_ms: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct ContainerRoundDocument {
    bytes: u64,
    sent_bytes: u64,
    paused_us: u64,
    duration_us: u64,
}

impl ContainerMigrated {
    pub(super) fn new(place: &ContainerPlace, plan: &ContainerPlan, report: &ContainerMoveReport) -> Self {
        let rounds = report.rounds.iter().map(|round| ContainerRoundDocument {
            bytes: round.bytes,
            sent_bytes: round.sent_bytes,
            paused_us: units::micros(round.paused),
            duration_us: units::micros(round.duration),
        });
        let phases = report.phases.iter().map(|(phase, duration)| MovePhaseDocument {
            phase: phase.word().to_owned(),
            duration_us: units::micros(*duration),
        });
        Self {
            dry_run: false,
            container: place.folder.display().to_string(),
            source: None,
            destination: Some(plan.address.clone()),
            mounted_on: report.mount_point.as_ref().map(|point| point.display().to_string()),
            size_bytes: plan.size_bytes,
            sent_bytes: report.sent_bytes(),
            rounds: rounds.collect(),
            former: report.former.as_ref().map(|folder| folder.display().to_string()),
            stopped_us: report.stopped.map(units::micros),
            phases: phases.collect(),
            duration_ms: units::millis(report.duration),
        }
    }
}

impl ReturnReport for ContainerMigrated {
    fn returned_from(self, source: &MoveTarget) -> Self {
        Self {
            source: Some(source.address_of(Path::new(&self.container))),
            destination: None,
            ..self
        }
    }
}

impl Report for ContainerMigrated {
    fn command(&self) -> &'static str {
        "migrate"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let place = |address: &Option<String>| address.as_ref().map_or("here".to_owned(), |host| format!("at {host}"));
        let mounted = match &self.mounted_on {
            Some(point) => format!(", mounted on {point}"),
            None => String::new(),
        };
        page.line(&format!(
            "{} is {}{mounted}; {} its files are kept, and it cannot be mounted",
            self.container,
            place(&self.destination),
            place(&self.source)
        ));
        let mut table = Table::new([
            Column::text("ROUND"),
            Column::number("BYTES"),
            Column::number("SENT"),
            Column::number("TIME"),
        ]);
        for (number, round) in self.rounds.iter().enumerate() {
            let is_last = number + 1 == self.rounds.len();
            let name = match number {
                0 => "first".to_owned(),
                _ if is_last => "last".to_owned(),
                _ => number.to_string(),
            };
            table.row([
                name,
                units::bytes(round.bytes),
                units::bytes(round.sent_bytes),
                milliseconds(round.duration_us),
            ]);
        }
        page.table(&table);
        let mut table = Table::new([Column::text("PHASE"), Column::number("TIME")]);
        for phase in &self.phases {
            table.row([phase.phase.clone(), milliseconds(phase.duration_us)]);
        }
        page.table(&table);
        if let Some(stopped_us) = self.stopped_us {
            page.line(&format!("stopped for {}", milliseconds(stopped_us)));
        }
        if let Some(former) = &self.former {
            page.line(&format!("the former container there is now {former}"));
        }
    }
}

/// The report of `migrate --dry-run`.
#[derive(Debug, Serialize)]
pub(super) struct ContainerMigrationPlanned {
    dry_run: bool,
    container: String,
    destination: String,
    /// Where it will be mounted.
    mounted_on: Option<String>,
    size_bytes: u64,
    /// Bytes that its layers take.
    file_bytes: u64,
    layers: usize,
    obstacles: Vec<String>,
    notes: Vec<String>,
}

impl ContainerMigrationPlanned {
    pub(super) fn new(place: &ContainerPlace, plan: &ContainerPlan) -> Self {
        Self {
            dry_run: true,
            container: place.folder.display().to_string(),
            destination: plan.address.clone(),
            mounted_on: plan.mount.as_ref().map(|mount| mount.point.display().to_string()),
            size_bytes: plan.size_bytes,
            file_bytes: plan.file_bytes,
            layers: plan.layer_count,
            obstacles: plan.obstacles.clone(),
            notes: plan.notes.clone(),
        }
    }
}

impl Report for ContainerMigrationPlanned {
    fn command(&self) -> &'static str {
        "migrate"
    }

    fn human(&self, page: &mut Page) {
        let mounted = match &self.mounted_on {
            Some(point) => format!(", and mount it on {point}"),
            None => String::new(),
        };
        page.line(&format!(
            "would migrate {} to {}{mounted}: {} in {}",
            self.container,
            self.destination,
            units::bytes(self.file_bytes),
            units::counted(self.layers as u64, "layer", "layers")
        ));
        for obstacle in &self.obstacles {
            page.line(&format!("it cannot be migrated: {obstacle}"));
        }
        for note in &self.notes {
            page.line(&format!("note: {note}"));
        }
    }
}
