//! Shows what happens while a machine is migrated.

use std::time::Duration;

use holdfast_host::MachineState;
use holdfast_live_copy::{CopyWarning, Forecast};
use holdfast_migration::{CopyEvents, MigrationObserver, MigrationPhase, MigrationPlan};

use super::super::live_copy::events::{RoundDisplay, round_text, warning_text};
use crate::context::Context;
use crate::output::Console;
use crate::units;

/// Prints what happens.
pub(super) struct ShownMove<'a> {
    console: &'a Console,
    targets: Vec<String>,
    rounds: RoundDisplay,
    /// Whether the disks are pulled there.
    are_pulled: bool,
}

impl<'a> ShownMove<'a> {
    pub(super) fn new(plan: &MigrationPlan, context: &'a Context) -> Self {
        Self {
            targets: plan.disks.iter().map(|disk| disk.target.clone()).collect(),
            rounds: match plan.state {
                MachineState::Running => RoundDisplay::Shown,
                _ => RoundDisplay::Hidden,
            },
            are_pulled: plan.is_pulled(),
            console: context.console(),
        }
    }

    /// For disks that are pulled after their machine has moved.
    pub(super) fn of_pull(context: &'a Context) -> Self {
        Self {
            console: context.console(),
            targets: Vec::new(),
            rounds: RoundDisplay::Hidden,
            are_pulled: true,
        }
    }

    fn target(&self, disk: usize) -> &str {
        self.targets.get(disk).map_or("", String::as_str)
    }
}

impl CopyEvents for ShownMove<'_> {
    fn round(&self, disk: usize, forecast: &Forecast) {
        if self.rounds == RoundDisplay::Hidden {
            return;
        }
        self.console
            .note(&format!("{}: {}", self.target(disk), round_text(forecast)));
    }

    fn warning(&self, disk: usize, warning: CopyWarning) {
        self.console
            .warning(&format!("{}: {}", self.target(disk), warning_text(warning)));
    }
}

impl MigrationObserver for ShownMove<'_> {
    fn phase(&self, phase: MigrationPhase) {
        self.console.note(match phase {
            MigrationPhase::Disks => "copying the disks",
            MigrationPhase::Memory if self.are_pulled => "sending the memory",
            MigrationPhase::Memory => "sending the memory; the disks continue",
            MigrationPhase::Pull => {
                "the machine is there, and its disks are pulled: it needs this host until they are complete"
            }
            MigrationPhase::Start if self.are_pulled => "the machine starts there",
            MigrationPhase::Seal | MigrationPhase::Start | MigrationPhase::End | MigrationPhase::Define => {
                "the disks are complete there"
            }
        });
    }

    fn stopped_too_long(&self, stopped: Duration) {
        self.console.warning(&format!(
            "the machine was stopped for {}, longer than permitted, and runs here again; the migration continues",
            units::duration(stopped)
        ));
    }

    fn guest_slowed(&self, percent: u64) {
        self.console.warning(&format!(
            "the guest changes its memory faster than it can be sent; its processors are slowed by {percent} %"
        ));
    }

    fn left(&self, reason: &str) {
        self.console.warning(reason);
    }
}
