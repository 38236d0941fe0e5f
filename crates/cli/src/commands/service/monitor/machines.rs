//! `monitor machines`: checks whether machines have a recent snapshot in a repository.

use std::collections::BTreeMap;

use holdfast_block::{error_messages, error_text};
use holdfast_engine::{ListRequest, SKEW_MS, list, time_of};
use holdfast_policy::sanoid::Level;
use holdfast_policy::{Glob, Span};
use jiff::Timestamp;
use serde::Serialize;

use crate::args::{Example, SharedOptions};
use crate::commands::verb::Verb;
use crate::context::Context;
use crate::errors::Error;
use crate::exit::Exit;
use crate::output::{Page, Report};
use crate::process::time;

/// Arguments of `monitor machines`.
#[derive(Debug, clap::Args)]
pub(super) struct MonitorMachinesArgs {
    /// Names of machines, which must exist, or patterns ('web*') [default: all with a snapshot]
    #[arg(value_name = "MACHINE", value_parser = Glob::parse)]
    machines: Vec<Glob>,
    /// How old the newest snapshot of a machine may be: 26h, 2d
    #[arg(long, value_name = "SPAN")]
    within: Span,
    /// Leave out machines that match; may be repeated
    #[arg(long, value_name = "PATTERN", value_parser = Glob::parse)]
    exclude_machine: Vec<Glob>,
}

impl Verb for MonitorMachinesArgs {
    const EXAMPLES: &'static [Example] = &[Example {
        wish: "Report machines without a backup for more than a day",
        line: "holdfast monitor machines -r /backup/vms --within 26h",
    }];
    const UNUSED: &'static [SharedOptions] = &[SharedOptions::Progress];

    fn run(&self, context: &Context) -> Result<Exit, Error> {
        Ok(run(self, context))
    }
}

/// Report of `monitor machines`.
#[derive(Debug, Serialize)]
struct MachinesChecked {
    line: String,
    machines: Vec<MonitoredMachine>,
    #[serde(skip)]
    level: Level,
}

#[derive(Debug, Serialize)]
struct MonitoredMachine {
    machine: String,
    /// The time of its newest snapshot; null if there is none.
    newest: Option<String>,
    is_fresh: bool,
    /// Number of machines with this name.
    machine_count: usize,
}

/// The machines with one name.
#[derive(Debug, Default)]
struct OfName {
    /// The newest snapshot of each machine.
    newest: Vec<Timestamp>,
}

impl Report for MachinesChecked {
    fn command(&self) -> &'static str {
        "monitor machines"
    }

    fn exit(&self) -> Exit {
        Exit::Check(self.level)
    }

    fn human(&self, page: &mut Page) {
        page.line(&self.line);
    }
}

fn run(args: &MonitorMachinesArgs, context: &Context) -> Exit {
    let checked = check(args, context).unwrap_or_else(|error| MachinesChecked {
        line: format!("{}: {}", Level::Unknown.word(), error_text(&error)),
        machines: Vec::new(),
        level: Level::Unknown,
    });
    context.report(&checked).unwrap_or_else(|error| {
        context.console().error(&error_messages(&error), None);
        Exit::Check(Level::Unknown)
    })
}

fn check(args: &MonitorMachinesArgs, context: &Context) -> Result<MachinesChecked, Error> {
    let repository = context.open_repository()?;
    let listed = list(
        &repository,
        &ListRequest {
            machines: Vec::new(),
            tags: Vec::new(),
        },
    )?;
    let now = time::now();
    let mut future: Vec<(&str, Timestamp)> = Vec::new();
    let mut of_machine: BTreeMap<(&str, Option<usize>), Timestamp> = BTreeMap::new();
    for snapshot in &listed.snapshots {
        let time = time_of(snapshot);
        if time.as_millisecond() > now.as_millisecond().saturating_add(SKEW_MS) {
            future.push((&snapshot.machine, time));
            continue;
        }
        let key = (snapshot.machine.as_str(), listed.named.place(snapshot));
        let known = of_machine.entry(key).or_insert(time);
        *known = time.max(*known);
    }
    let mut newest: BTreeMap<String, OfName> = BTreeMap::new();
    for ((name, _), time) in of_machine {
        newest.entry(name.to_owned()).or_default().newest.push(time);
    }
    let oldest = args.within.before(&now.to_zoned(context.zone().clone()));
    let checked = judge(args, &newest, oldest, listed.damaged.len());
    let is_meant = |name: &str| {
        let matches = |globs: &[Glob]| globs.iter().any(|glob| glob.matches(name));
        (args.machines.is_empty() || matches(&args.machines)) && !matches(&args.exclude_machine)
    };
    future.retain(|(name, _)| is_meant(name));
    let checked = with_future(checked, &future);
    Ok(match listed.lost.first() {
        Some(lost) => with_loss(checked, &lost.to_string(), listed.lost.len()),
        None => checked,
    })
}

/// Adds a warning about snapshots with a time in the future, which are ignored.
fn with_future(checked: MachinesChecked, future: &[(&str, Timestamp)]) -> MachinesChecked {
    let Some((machine, time)) = future.first() else {
        return checked;
    };
    let more = match future.len() - 1 {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    warned(
        checked,
        &format!("{machine} has a snapshot of the future, of {time}{more}: a clock is or was wrong"),
    )
}

/// Adds the loss of snapshots.
fn with_loss(checked: MachinesChecked, first: &str, count: usize) -> MachinesChecked {
    warned(checked, &format!("{count} snapshots are lost: {first}"))
}

/// Raises the level to at least a warning.
fn warned(checked: MachinesChecked, warning: &str) -> MachinesChecked {
    let level = match checked.level {
        Level::Ok => Level::Warning,
        other => other,
    };
    let what = checked.line.split_once(": ").map_or("", |(_, what)| what);
    MachinesChecked {
        line: format!("{}: {what}; {warning}", level.word()),
        level,
        ..checked
    }
}

/// Names that the command line selects. A name without a wildcard is checked even if it has no snapshots.
fn names_to_check(args: &MonitorMachinesArgs, newest: &BTreeMap<String, OfName>) -> Vec<String> {
    let is_excluded = |name: &str| args.exclude_machine.iter().any(|glob| glob.matches(name));
    let is_meant = |name: &str| args.machines.is_empty() || args.machines.iter().any(|glob| glob.matches(name));
    let named = args
        .machines
        .iter()
        .map(ToString::to_string)
        .filter(|text| !Glob::is_one(text));
    let mut names: Vec<String> = newest
        .keys()
        .filter(|name| is_meant(name))
        .cloned()
        .chain(named)
        .collect();
    names.retain(|name| !is_excluded(name));
    names.sort();
    names.dedup();
    names
}

/// The result for machines with these newest snapshots.
fn judge(
    args: &MonitorMachinesArgs,
    newest: &BTreeMap<String, OfName>,
    oldest: Timestamp,
    damaged_count: usize,
) -> MachinesChecked {
    let machine = |name: String| {
        let of_name = newest.get(&name).map_or(&[][..], |of_name| &of_name.newest);
        let time = of_name.iter().max();
        MonitoredMachine {
            newest: time.map(ToString::to_string),
            is_fresh: time.is_some_and(|time| *time >= oldest),
            machine_count: of_name.len(),
            machine: name,
        }
    };
    let machines: Vec<MonitoredMachine> = names_to_check(args, newest).into_iter().map(machine).collect();
    let old = machines
        .iter()
        .filter(|machine| !machine.is_fresh)
        .map(|machine| match &machine.newest {
            Some(newest) => format!("{} (newest of {newest})", machine.machine),
            None => format!("{} (none at all)", machine.machine),
        });
    let old: Vec<String> = old.collect();
    let shared = machines.iter().filter(|machine| machine.machine_count > 1);
    let shared: Vec<String> = shared.map(|machine| said_of_shared(machine, newest, oldest)).collect();
    let (level, what) = match (&old[..], damaged_count) {
        _ if machines.is_empty() => (
            Level::Critical,
            "there is no snapshot of any selected machine".to_owned(),
        ),
        ([_, ..], _) => {
            let what = format!("no snapshot within {} of {}", args.within, old.join(", "));
            (Level::Critical, what)
        }
        ([], 0) if !shared.is_empty() => (Level::Warning, shared.join("; ")),
        ([], 0) => {
            let count = machines.len();
            (
                Level::Ok,
                format!("{count} machines have snapshots within {}", args.within),
            )
        }
        ([], count) => (
            Level::Warning,
            format!("{count} snapshots cannot be read, and their machines are unknown"),
        ),
    };
    MachinesChecked {
        line: format!("{}: {what}", level.word()),
        machines,
        level,
    }
}

/// The warning for a name that several machines have: the newest snapshot of one hides that another is not backed
/// up any more.
fn said_of_shared(machine: &MonitoredMachine, newest: &BTreeMap<String, OfName>, oldest: Timestamp) -> String {
    let times = newest.get(&machine.machine).map_or(&[][..], |of_name| &of_name.newest);
    let old: Vec<String> = times
        .iter()
        .filter(|time| **time < oldest)
        .map(ToString::to_string)
        .collect();
    let (name, count) = (&machine.machine, machine.machine_count);
    match &old[..] {
        [] => format!("{name} is the name of {count} machines"),
        old => format!(
            "{name} is the name of {count} machines, {} of them without a fresh snapshot (newest of {})",
            old.len(),
            old.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use holdfast_policy::Glob;
    use holdfast_policy::sanoid::Level;

    use super::{MonitorMachinesArgs, OfName, judge, with_future};

    fn line(machines: &[&str], excluded: &[&str], damaged_count: usize) -> (Level, String) {
        let globs = |texts: &[&str]| texts.iter().map(|text| Glob::parse(text).unwrap()).collect();
        let args = MonitorMachinesArgs {
            machines: globs(machines),
            within: "26h".parse().unwrap(),
            exclude_machine: globs(excluded),
        };
        let times = [
            ("web1", "2026-11-20T10:00:00Z"),
            ("web2", "2026-11-20T12:00:00Z"),
            ("db", "2026-11-20T12:00:00Z"),
            ("twice", "2026-11-20T12:00:00Z"),
            ("twice", "2026-11-19T12:00:00Z"),
        ];
        let mut newest: BTreeMap<String, OfName> = BTreeMap::new();
        for (name, time) in times
            .into_iter()
            .filter(|(name, _)| *name != "twice" || machines == ["twice"])
        {
            let of_name = newest.entry(name.to_owned()).or_default();
            of_name.newest.push(time.parse().unwrap());
        }
        let checked = judge(&args, &newest, "2026-11-20T11:00:00Z".parse().unwrap(), damaged_count);
        (checked.level, checked.line)
    }

    #[test]
    fn a_machine_without_a_fresh_snapshot_is_critical() {
        let old = "CRITICAL: no snapshot within 26h of web1 (newest of 2026-11-20T10:00:00Z)";
        assert_eq!(line(&[], &[], 0), (Level::Critical, old.to_owned()));
        assert_eq!(line(&["web*"], &[], 3), (Level::Critical, old.to_owned()));
        let fine = "OK: 2 machines have snapshots within 26h";
        assert_eq!(line(&[], &["*1"], 0), (Level::Ok, fine.to_owned()));
        assert_eq!(line(&["db"], &[], 1).0, Level::Warning);
        assert_eq!(
            line(&["db", "gone"], &[], 0).1,
            "CRITICAL: no snapshot within 26h of gone (none at all)"
        );
        assert_eq!(line(&["x*"], &[], 0).0, Level::Critical);
    }

    #[test]
    fn a_snapshot_of_the_future_is_a_warning() {
        let args = MonitorMachinesArgs {
            machines: Vec::new(),
            within: "26h".parse().unwrap(),
            exclude_machine: Vec::new(),
        };
        let time = |text: &str| text.parse().unwrap();
        let newest = BTreeMap::from([(
            "web".to_owned(),
            OfName {
                newest: vec![time("2026-11-20T12:00:00Z")],
            },
        )]);
        let checked = judge(&args, &newest, time("2026-11-20T11:00:00Z"), 0);
        let checked = with_future(checked, &[("web", time("2036-11-20T12:00:00Z"))]);
        assert_eq!(checked.level, Level::Warning);
        assert!(
            checked
                .line
                .starts_with("WARNING: 1 machines have snapshots within 26h; web has a snapshot of the future")
        );
    }

    #[test]
    fn a_machine_is_not_hidden_by_another_one_of_its_name() {
        let said = "WARNING: twice is the name of 2 machines, 1 of them without a fresh snapshot (newest of 2026-11-19T12:00:00Z)";
        assert_eq!(line(&["twice"], &[], 0), (Level::Warning, said.to_owned()));
    }
}
