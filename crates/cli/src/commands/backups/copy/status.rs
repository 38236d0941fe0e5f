//! The report of `holdfast copy --status`: differences between two repositories.

use holdfast_engine::{CopyStatus, MachineCopyStatus};
use jiff::Timestamp;
use jiff::tz::TimeZone;
use serde::Serialize;

use crate::output::{Column, Page, Report, Style, Table};
use crate::process::time;
use crate::units;

/// Report of `copy --status`.
#[derive(Debug, Serialize)]
pub(super) struct Compared {
    to: String,
    machines: Vec<CopyStatusMachine>,
    #[serde(skip)]
    zone: TimeZone,
}

/// A machine in two repositories.
#[derive(Debug, Serialize)]
struct CopyStatusMachine {
    machine: String,
    /// Distinguishes the machine from others with the same name.
    distinction: Option<String>,
    newest_here: Option<String>,
    here_count: u64,
    newest_there: Option<String>,
    there_count: u64,
    newest_common: Option<String>,
    missing_count: u64,
    removed_count: u64,
    behind_ms: Option<u64>,
    /// How far the copy is behind, in words.
    #[serde(skip)]
    behind: (Style, String),
    /// The newest snapshot in each of the two repositories.
    #[serde(skip)]
    newest: [Option<Timestamp>; 2],
}

impl From<MachineCopyStatus> for CopyStatusMachine {
    fn from(status: MachineCopyStatus) -> Self {
        let behind = match status.behind() {
            _ if status.here_count == 0 => (Style::Plain, "not here".to_owned()),
            None => (Style::Warning, "all".to_owned()),
            Some(time) if time.is_zero() => (Style::Good, "no".to_owned()),
            Some(time) => (Style::Warning, units::duration(time)),
        };
        let text = |instant: Option<Timestamp>| instant.map(|instant| instant.to_string());
        Self {
            behind_ms: status.behind().map(units::millis),
            behind,
            machine: status.machine,
            distinction: status.distinction.as_ref().map(ToString::to_string),
            newest: [status.newest_here, status.newest_there],
            newest_here: text(status.newest_here),
            here_count: status.here_count,
            newest_there: text(status.newest_there),
            there_count: status.there_count,
            newest_common: text(status.newest_common),
            missing_count: status.missing_count,
            removed_count: status.removed_count,
        }
    }
}

impl Compared {
    pub(super) fn new(status: CopyStatus, to: String, zone: &TimeZone) -> Self {
        Self {
            to,
            machines: status.machines.into_iter().map(CopyStatusMachine::from).collect(),
            zone: zone.clone(),
        }
    }
}

impl Report for Compared {
    fn command(&self) -> &'static str {
        "copy"
    }

    fn human(&self, page: &mut Page) {
        if self.machines.is_empty() {
            page.line("there is no such snapshot on either side");
            return;
        }
        let mut table = Table::new([
            Column::long_text("MACHINE"),
            Column::text("NEWEST HERE"),
            Column::number("HERE"),
            Column::text("NEWEST THERE"),
            Column::number("THERE"),
            Column::number("MISSING"),
            Column::number("REMOVED"),
            Column::text("BEHIND"),
        ]);
        let local = |instant: Option<Timestamp>| instant.map(|instant| time::local(instant, &self.zone));
        for machine in &self.machines {
            let [newest_here, newest_there] = machine.newest;
            let cells = [
                match &machine.distinction {
                    Some(distinction) => format!("{} ({distinction})", machine.machine),
                    None => machine.machine.clone(),
                },
                local(newest_here).unwrap_or_default(),
                units::count(machine.here_count),
                local(newest_there).unwrap_or_default(),
                units::count(machine.there_count),
                units::count(machine.missing_count),
                units::count(machine.removed_count),
            ];
            let plain = cells.map(|cell| (Style::Plain, cell));
            table.styled_row(plain.into_iter().chain([machine.behind.clone()]));
        }
        page.table(&table);
    }
}
