//! The reports of `migrate`.

use holdfast_host::MachineState;
use holdfast_migration::{MigrationPlan, MigrationReport};
use serde::{Deserialize, Serialize};

use super::super::far::MoveTarget;
use crate::output::{Column, Page, Report, Table};
use crate::units;

/// A report of something that has come back.
pub(super) trait ReturnReport {
    /// The same report, of something that has come to this host from `source`.
    fn returned_from(self, source: &MoveTarget) -> Self;
}

/// The report of `migrate`. The host that brings a machine back sends it to the host that asked for it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Migrated {
    dry_run: bool,
    machine: String,
    /// The address of the host that had the machine; null for this host.
    source: Option<String>,
    /// The address of the host that has it now; null for this host.
    destination: Option<String>,
    /// `running` or `shut-off`.
    state: String,
    /// Those that were copied.
    disks: Vec<MovedDiskDocument>,
    /// Those that were pulled while it ran at its destination.
    pulled_disks: Vec<PulledDiskDocument>,
    memory_bytes: u64,
    attempts: u32,
    /// From the stop of the machine until its hypervisor has reported that it runs there.
    stopped_us: u64,
    phases: Vec<MovePhaseDocument>,
    duration_ms: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct MovedDiskDocument {
    disk: String,
    path: String,
    size_bytes: u64,
    /// Bytes over the connection.
    sent_bytes: u64,
    /// What these would be without compression.
    uncompressed_bytes: u64,
    /// Number of rounds after the first pass.
    rounds: usize,
    last_bytes: u64,
    last_pass_us: u64,
    seal_us: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct PulledDiskDocument {
    disk: String,
    path: String,
    size_bytes: u64,
    /// What the destination has read.
    read_bytes: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct MovePhaseDocument {
    pub(super) phase: String,
    pub(super) duration_us: u64,
}

impl Migrated {
    /// The machine was in this state before.
    pub(super) fn new(machine: &str, state: MachineState, target: &MoveTarget, report: &MigrationReport) -> Self {
        let pulled = report.pulled.iter().map(|disk| PulledDiskDocument {
            disk: disk.target.clone(),
            path: disk.path.display().to_string(),
            size_bytes: disk.size_bytes,
            read_bytes: disk.read_bytes,
        });
        let disks = report.disks.iter().map(|disk| MovedDiskDocument {
            disk: disk.target.clone(),
            path: disk.path.display().to_string(),
            size_bytes: disk.copy.size_bytes,
            sent_bytes: disk.copy.sent_bytes,
            uncompressed_bytes: disk.copy.plain_bytes,
            rounds: disk.copy.rounds.len().saturating_sub(1),
            last_bytes: disk.copy.handover.last_bytes,
            last_pass_us: units::micros(disk.copy.handover.last_pass),
            seal_us: units::micros(disk.copy.handover.seal),
        });
        let phases = report.phases.iter().map(|time| MovePhaseDocument {
            phase: time.phase.word().to_owned(),
            duration_us: units::micros(time.duration),
        });
        Self {
            dry_run: false,
            machine: machine.to_owned(),
            source: None,
            destination: Some(target.to_string()),
            state: state_word(state).to_owned(),
            disks: disks.collect(),
            pulled_disks: pulled.collect(),
            memory_bytes: report.memory_bytes,
            attempts: report.attempt_count,
            stopped_us: units::micros(report.stopped),
            phases: phases.collect(),
            duration_ms: units::millis(report.duration),
        }
    }

    /// From the stop of the machine until it ran at its destination.
    pub(super) fn stopped_us(&self) -> u64 {
        self.stopped_us
    }

    pub(super) fn duration_us(&self) -> u64 {
        self.duration_ms * 1000
    }

    pub(super) fn phases(&self) -> &[MovePhaseDocument] {
        &self.phases
    }
}

impl Migrated {
    fn copied_table(&self) -> Table {
        let mut table = Table::new([
            Column::text("DISK"),
            Column::number("SIZE"),
            Column::number("DATA"),
            Column::number("SENT"),
            Column::number("ROUNDS"),
            Column::number("LAST"),
            Column::number("LAST PASS"),
            Column::number("SEAL"),
            Column::text("PATH"),
        ]);
        for disk in &self.disks {
            table.row([
                disk.disk.clone(),
                units::bytes(disk.size_bytes),
                units::bytes(disk.uncompressed_bytes),
                units::bytes(disk.sent_bytes),
                disk.rounds.to_string(),
                units::bytes(disk.last_bytes),
                milliseconds(disk.last_pass_us),
                milliseconds(disk.seal_us),
                disk.path.clone(),
            ]);
        }
        table
    }

    fn pulled_table(&self) -> Table {
        let mut table = Table::new([
            Column::text("DISK"),
            Column::number("SIZE"),
            Column::number("READ"),
            Column::text("PATH"),
        ]);
        for disk in &self.pulled_disks {
            table.row([
                disk.disk.clone(),
                units::bytes(disk.size_bytes),
                units::bytes(disk.read_bytes),
                disk.path.clone(),
            ]);
        }
        table
    }
}

impl ReturnReport for Migrated {
    fn returned_from(self, source: &MoveTarget) -> Self {
        Self {
            source: Some(source.to_string()),
            destination: None,
            ..self
        }
    }
}

impl Report for Migrated {
    fn command(&self) -> &'static str {
        "migrate"
    }

    fn is_confirmation(&self) -> bool {
        true
    }

    fn human(&self, page: &mut Page) {
        let runs = self.state == RUNNING;
        let (there, here) = if runs {
            ("runs", "is shut off")
        } else {
            ("is defined", "is still defined")
        };
        let place = |address: &Option<String>| address.as_ref().map_or("here".to_owned(), |host| format!("at {host}"));
        page.line(&format!(
            "{} {there} {}; {} it {here}, and its disks are kept",
            self.machine,
            place(&self.destination),
            place(&self.source)
        ));
        if !self.disks.is_empty() || self.pulled_disks.is_empty() {
            page.table(&self.copied_table());
        }
        if !self.pulled_disks.is_empty() {
            page.table(&self.pulled_table());
        }
        let mut table = Table::new([Column::text("PHASE"), Column::number("TIME")]);
        for phase in &self.phases {
            table.row([phase.phase.clone(), milliseconds(phase.duration_us)]);
        }
        page.table(&table);
        if runs && self.attempts > 0 {
            page.line(&format!(
                "stopped for {}; {} of memory sent",
                milliseconds(self.stopped_us),
                units::bytes(self.memory_bytes)
            ));
        }
    }
}

const RUNNING: &str = "running";

fn state_word(state: MachineState) -> &'static str {
    match state {
        MachineState::Running => RUNNING,
        MachineState::Paused => "paused",
        MachineState::ShutOff => "shut-off",
        MachineState::Between => "between",
    }
}

#[expect(clippy::cast_precision_loss, reason = "a time for people")]
pub(super) fn milliseconds(micros: u64) -> String {
    format!("{:.1} ms", micros as f64 / 1000.0)
}

/// The report of `migrate --dry-run`.
#[derive(Debug, Serialize)]
pub(super) struct MigrationPlanned {
    dry_run: bool,
    machine: String,
    destination: String,
    state: &'static str,
    disks: Vec<MovingDiskDocument>,
    obstacles: Vec<String>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct MovingDiskDocument {
    disk: String,
    path: String,
    size_bytes: u64,
    /// An image there with similar content; null if there is none.
    seed: Option<String>,
}

impl MigrationPlanned {
    pub(super) fn new(plan: &MigrationPlan, target: &MoveTarget) -> Self {
        let disks = plan.disks.iter().map(|disk| MovingDiskDocument {
            disk: disk.target.clone(),
            path: disk.path.display().to_string(),
            size_bytes: disk.size_bytes,
            seed: disk.seed.as_ref().map(|seed| seed.path.display().to_string()),
        });
        Self {
            dry_run: true,
            machine: plan.machine.clone(),
            destination: target.to_string(),
            state: state_word(plan.state),
            disks: disks.collect(),
            obstacles: plan.obstacles.clone(),
            notes: plan.notes.clone(),
        }
    }
}

impl Report for MigrationPlanned {
    fn command(&self) -> &'static str {
        "migrate"
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!("would migrate {} to {}", self.machine, self.destination));
        let mut table = Table::new([
            Column::text("DISK"),
            Column::number("SIZE"),
            Column::text("PATH"),
            Column::text("SEED"),
        ]);
        for disk in &self.disks {
            table.row([
                disk.disk.clone(),
                units::bytes(disk.size_bytes),
                disk.path.clone(),
                disk.seed.clone().unwrap_or_else(|| "-".to_owned()),
            ]);
        }
        page.table(&table);
        for obstacle in &self.obstacles {
            page.line(&format!("it cannot be migrated: {obstacle}"));
        }
        for note in &self.notes {
            page.line(&format!("note: {note}"));
        }
    }
}
