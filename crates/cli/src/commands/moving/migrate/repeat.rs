//! `migrate --repeat`: a machine moves to the other host and back several times, and the times are compared.

use std::num::NonZeroU32;

use serde::Serialize;

use super::super::far::MoveTarget;
use super::MigrateArgs;
use super::other_host::OtherHost;
use super::report::{Migrated, milliseconds};
use super::undo::Returned;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Column, Page, Report, Table};

impl MigrateArgs {
    /// Moves the machine to the host of `target` and back, `count` times.
    pub(super) fn move_repeatedly(
        &self,
        target: &MoveTarget,
        count: NonZeroU32,
        context: &Context,
    ) -> Result<Exit, Error> {
        let (mut there, mut back) = (Vec::new(), Vec::new());
        for number in 1..=count.get() {
            let place = |text: &str| {
                let text = format!("round trip {number} of {count}: {text}");
                context.console().note(&text);
            };
            place("there");
            let other = OtherHost::reach(target, self, context)?;
            there.extend(self.migrate(target, &other, context)?);
            drop(other);
            place("back");
            match self.bring_back(target, context)? {
                Returned::Back { report, .. } => back.push(*report),
                // The other host has shown why.
                Returned::Shown(exit) => {
                    let text = format!("round trip {number} of {count} was not completed");
                    context.console().warning(&text);
                    return Ok(exit);
                }
            }
        }
        context.report(&Repeated::new(&self.machine, target, there, back))
    }
}

/// The report of `migrate --repeat`.
#[derive(Debug, Serialize)]
struct Repeated {
    dry_run: bool,
    machine: String,
    destination: String,
    round_trips: usize,
    times: Vec<RepeatedTime>,
    /// In order: there, back, there, ...
    moves: Vec<Migrated>,
}

/// A time of all moves.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct RepeatedTime {
    /// A phase, `stopped` or `total`.
    time: String,
    there_average_us: u64,
    there_max_us: u64,
    back_average_us: u64,
    back_max_us: u64,
}

impl Repeated {
    fn new(machine: &str, target: &MoveTarget, there: Vec<Migrated>, back: Vec<Migrated>) -> Self {
        let phases = there.first().map_or(&[][..], Migrated::phases);
        let of_phase = phases.iter().map(|phase| {
            let name = phase.phase.clone();
            let time = |report: &Migrated| {
                let mut phases = report.phases().iter();
                phases
                    .find(|other| other.phase == name)
                    .map_or(0, |phase| phase.duration_us)
            };
            RepeatedTime::new(&name, [&there, &back].map(|reports| reports.iter().map(time).collect()))
        });
        let of_whole = [
            RepeatedTime::new(
                "stopped",
                [&there, &back].map(|reports| reports.iter().map(Migrated::stopped_us).collect()),
            ),
            RepeatedTime::new(
                "total",
                [&there, &back].map(|reports| reports.iter().map(Migrated::duration_us).collect()),
            ),
        ];
        Self {
            dry_run: false,
            machine: machine.to_owned(),
            destination: target.to_string(),
            round_trips: back.len(),
            times: of_phase.chain(of_whole).collect(),
            moves: there.into_iter().zip(back).flat_map(<[_; 2]>::from).collect(),
        }
    }
}

impl RepeatedTime {
    fn new(time: &str, micros: [Vec<u64>; 2]) -> Self {
        let average = |micros: &[u64]| micros.iter().sum::<u64>() / (micros.len() as u64).max(1);
        let longest = |micros: &[u64]| micros.iter().copied().max().unwrap_or_default();
        let [there, back] = micros;
        Self {
            time: time.to_owned(),
            there_average_us: average(&there),
            there_max_us: longest(&there),
            back_average_us: average(&back),
            back_max_us: longest(&back),
        }
    }
}

impl Report for Repeated {
    fn command(&self) -> &'static str {
        "migrate"
    }

    fn human(&self, page: &mut Page) {
        page.line(&format!(
            "{} has moved to {} and back; number of round trips: {}",
            self.machine, self.destination, self.round_trips
        ));
        let mut table = Table::new([
            Column::text("TIME"),
            Column::number("THERE"),
            Column::number("LONGEST"),
            Column::number("BACK"),
            Column::number("LONGEST"),
        ]);
        for time in &self.times {
            table.row([
                time.time.clone(),
                milliseconds(time.there_average_us),
                milliseconds(time.there_max_us),
                milliseconds(time.back_average_us),
                milliseconds(time.back_max_us),
            ]);
        }
        page.table(&table);
        page.line("THERE and BACK are averages");
    }
}

#[cfg(test)]
mod tests {
    use super::RepeatedTime;

    #[test]
    fn times_have_an_average_and_a_maximum_for_each_direction() {
        let time = RepeatedTime::new("stopped", [vec![10, 20, 60], vec![5]]);
        let expected = RepeatedTime {
            time: "stopped".to_owned(),
            there_average_us: 30,
            there_max_us: 60,
            back_average_us: 5,
            back_max_us: 5,
        };
        assert_eq!(time, expected);
    }
}
