//! Compares every decision with that of the real sanoid: random policies and random snapshots, at random times and on
//! days with clock changes. The program is Debian's, unchanged; stand-ins answer for `zfs`, `zpool`, `ps` and the
//! clock.

#![allow(
    clippy::disallowed_methods,
    reason = "a test makes its own world, and runs the other program in it"
)]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use holdfast_policy::sanoid::{SanoidConfig, SnapshotType, TypedSnapshot, freshness, snapshot_name};
use holdfast_policy::{TimeZone, Timestamp};
use holdfast_sanoid_runner::Sanoid;
use holdfast_test_kit::write_program;

use crate::random::Random;

const CASE_COUNT: u64 = 240;
/// The monitor is compared in one of this many cases.
const MONITORED_EVERY: u64 = 4;
const DATASETS: [&str; 7] = [
    "tank",
    "tank/a",
    "tank/a/b",
    "tank/a/b/c",
    "tank/ab",
    "tank/c",
    "tank/c/d",
];
const ZONES: [&str; 7] = [
    "UTC",
    "Europe/Berlin",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "America/St_Johns",
];

/// The input of a decision.
struct Case {
    configuration: String,
    zone: TimeZone,
    zone_name: &'static str,
    now: Timestamp,
    snapshots: Vec<(&'static str, TypedSnapshot)>,
    pool_used_percent: u8,
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let zone_name = random.of(&ZONES);
        let zone = TimeZone::get(zone_name).unwrap();
        let now = random.time(&zone);
        Self {
            configuration: some_configuration(&mut random),
            snapshots: some_snapshots(&mut random, now),
            pool_used_percent: u8::try_from(random.below(100)).unwrap(),
            zone,
            zone_name,
            now,
        }
    }
}

fn some_settings(random: &mut Random, text: &mut String) {
    let keys: [(&str, u64, &[&str]); 24] = [
        ("frequently", 30, &["0", "2", "4"]),
        ("hourly", 50, &["0", "1", "2", "5"]),
        ("daily", 50, &["0", "1", "3"]),
        ("weekly", 50, &["0", "1", "3"]),
        ("monthly", 50, &["0", "1", "3"]),
        ("yearly", 50, &["0", "1", "2"]),
        ("frequent_period", 20, &["1", "7", "20", "30", "60"]),
        ("hourly_min", 30, &["0", "15", "45", "59"]),
        ("daily_hour", 30, &["0", "1", "2", "3", "12"]),
        ("daily_min", 30, &["0", "30"]),
        ("weekly_wday", 30, &["0", "2", "5", "6", "7"]),
        ("weekly_hour", 20, &["0", "2", "13"]),
        ("monthly_mday", 20, &["5", "15", "28"]),
        ("monthly_hour", 20, &["2", "23"]),
        ("yearly_mon", 20, &["3", "7", "12"]),
        ("yearly_mday", 20, &["10", "28"]),
        ("yearly_hour", 10, &["2"]),
        ("autosnap", 20, &["0", "yes", "No"]),
        ("autoprune", 20, &["off", "on", "TRUE"]),
        ("prune_defer", 15, &["0", "30", "60"]),
        ("monitor", 15, &["no", "yes"]),
        ("hourly_crit", 15, &["120", "5h", "0"]),
        ("daily_warn", 15, &["2d", "30", "0"]),
        ("weekly_crit", 15, &["9", "2w"]),
    ];
    for (key, percent, values) in keys {
        if random.chance(percent) {
            writeln!(text, "\t{key} = {}", random.of(values)).unwrap();
        }
    }
    for key in ["monitor_dont_warn", "monitor_dont_crit"] {
        if random.chance(10) {
            writeln!(text, "{key}=yes").unwrap();
        }
    }
}

fn some_configuration(random: &mut Random) -> String {
    let mut text = String::from("# made by a test\n");
    let mut sections: Vec<&str> = DATASETS.into_iter().filter(|_| random.chance(45)).collect();
    if random.chance(30) {
        sections.reverse();
    }
    for section in sections {
        writeln!(text, "[{section}]").unwrap();
        if random.chance(50) {
            let templates = random.of(&["one", "one,two", "two , one", "default", "none"]);
            writeln!(text, "use_template = {templates}").unwrap();
        }
        if random.chance(40) {
            writeln!(text, "recursive = {}", random.of(&["yes", "yes", "zfs", "no", "1"])).unwrap();
        }
        for key in ["process_children_only", "skip_children"] {
            if random.chance(12) {
                writeln!(text, "{key} = {}", random.of(&["yes", "no"])).unwrap();
            }
        }
        if random.chance(60) {
            some_settings(random, &mut text);
        }
    }
    for template in ["default", "one", "two"] {
        if template != "default" || random.chance(40) {
            writeln!(text, "[template_{template}]").unwrap();
            some_settings(random, &mut text);
        }
    }
    text
}

/// Snapshots whose ages are around whole periods, and exact multiples of them.
fn some_snapshots(random: &mut Random, now: Timestamp) -> Vec<(&'static str, TypedSnapshot)> {
    let mut snapshots = Vec::new();
    for dataset in DATASETS {
        let mut ages = BTreeSet::new();
        for (kind, period_seconds) in SnapshotType::ALL
            .into_iter()
            .zip([31_557_600, 2_678_400, 604_800, 86_400, 3600, 900])
        {
            if random.chance(20) {
                continue;
            }
            for _ in 0..random.below(7) {
                let whole = random.below(6) * period_seconds;
                let part = if random.chance(30) {
                    0
                } else {
                    random.below(period_seconds)
                };
                let age = i64::try_from(whole + part).unwrap();
                if !ages.insert(age) {
                    continue;
                }
                let time = Timestamp::from_second(now.as_second() - age).unwrap();
                let name = format!("autosnap_{}_{kind}", ages.len());
                snapshots.push((dataset, TypedSnapshot::new(&name, time).unwrap()));
            }
        }
    }
    snapshots
}

/// The actions as lines: "take tank@autosnap_..., with all below", "remove tank@...".
fn ours(case: &Case) -> BTreeSet<String> {
    let datasets = DATASETS.map(str::to_owned);
    let config = SanoidConfig::parse(&case.configuration).unwrap_or_else(|errors| panic!("{errors:?}"));
    let now = case.now.to_zoned(case.zone.clone());
    let mut lines = BTreeSet::new();
    for policy in config.resolve(&datasets).datasets {
        let dataset = &policy.dataset;
        let below = if policy.is_tree() { ", with all below" } else { "" };
        for kind in policy.due(|kind| newest(case, dataset, kind), &now) {
            lines.insert(format!("take {dataset}@{}{below}", snapshot_name(&now, kind)));
        }
        let own = case.snapshots.iter().filter(|(other, _)| other == dataset);
        let own: Vec<TypedSnapshot> = own.map(|(_, snapshot)| snapshot.clone()).collect();
        for expired in policy.expired(&own, case.pool_used_percent, case.now) {
            lines.insert(format!("remove {dataset}@{}", expired.snapshot.name));
        }
    }
    lines
}

fn newest(case: &Case, dataset: &str, kind: SnapshotType) -> Option<Timestamp> {
    let snapshots = case.snapshots.iter();
    let of_kind = snapshots.filter(|(other, snapshot)| *other == dataset && snapshot.kind == kind);
    of_kind.map(|(_, snapshot)| snapshot.time).max()
}

/// The environment of the real program.
struct World {
    folder: tempfile::TempDir,
    program: Sanoid,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let world = Self {
            program: Sanoid::start(&folder.path().join("bin")),
            folder,
        };
        let snapshots = world.path("snapshots");
        let datasets = DATASETS.join("\n");
        world.add_program(
            "zfs",
            &format!(
                "case $* in\n\
                 'get -Hrpt snapshot creation'*) cat '{}' ;;\n\
                 'list -o name -t filesystem,volume -Hr '*) for last; do :; done; printf '{datasets}\\n' | grep -E \"^$last(/|\\$)\" ;;\n\
                 *) echo \"zfs: $*: not known\" >&2; exit 2 ;;\nesac",
                snapshots.display()
            ),
        );
        world.add_program("zpool", &format!("cat '{}'", world.path("capacity").display()));
        world.add_program("ps", "");
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn add_program(&self, name: &str, text: &str) {
        let folder = self.path("bin");
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(name);
        write_program(&path, &format!("#!/bin/sh\n{text}\n"));
    }

    /// Runs the real program; returns its output and its exit code.
    fn sanoid(&mut self, case: &Case, words: &[&str]) -> (String, i32) {
        for folder in ["cache", "run"] {
            fs::remove_dir_all(self.path(folder)).ok();
        }
        let mut listed = String::new();
        for (dataset, snapshot) in &case.snapshots {
            writeln!(
                listed,
                "{dataset}@{}\tcreation\t{}\t-",
                snapshot.name,
                snapshot.time.as_second()
            )
            .unwrap();
            // A snapshot that sanoid did not take must be ignored.
            writeln!(
                listed,
                "{dataset}@syncoid_{}\tcreation\t{}\t-",
                snapshot.name,
                snapshot.time.as_second()
            )
            .unwrap();
        }
        fs::write(self.path("snapshots"), listed).unwrap();
        fs::write(self.path("capacity"), format!("{}%\n", case.pool_used_percent)).unwrap();
        fs::create_dir_all(self.path("etc")).unwrap();
        fs::write(self.path("etc/sanoid.conf"), &case.configuration).unwrap();
        let argument = |name: &str, folder: &str| format!("--{name}={}", self.path(folder).display());
        let mut line = vec![
            format!("TZ={}", case.zone_name),
            format!("FIXED_TIME={}", case.now.as_second()),
            argument("configdir", "etc"),
            argument("cache-dir", "cache"),
            argument("run-dir", "run"),
        ];
        line.extend(words.iter().map(|word| (*word).to_owned()));
        let run = self.program.run(&line);
        assert!(
            run.code < 3,
            "{}\n{}\n{}",
            run.output,
            run.complaints,
            case.configuration
        );
        (run.output, run.code)
    }

    fn theirs(&mut self, case: &Case) -> BTreeSet<String> {
        let words = ["--readonly", "--verbose", "--take-snapshots", "--prune-snapshots"];
        let (message, code) = self.sanoid(case, &words);
        assert_eq!(code, 0, "{message}");
        let lines = message.lines().filter_map(|line| {
            let taken = line.strip_prefix("taking snapshot ");
            let taken = taken.map(|taken| format!("take {}", taken.replace(" (zfs recursive)", ", with all below")));
            let removed = line
                .strip_prefix("INFO: pruning ")
                .and_then(|rest| rest.strip_suffix(" ... "));
            taken.or_else(|| {
                removed
                    .filter(|name| name.contains('@'))
                    .map(|name| format!("remove {name}"))
            })
        });
        lines.collect()
    }
}

/// Compares the cases of these seeds; returns how many snapshots were taken and how many removed.
fn compare(seeds: impl Iterator<Item = u64>) -> (usize, usize) {
    let mut world = World::new();
    let (mut taken_count, mut removed_count) = (0, 0);
    for seed in seeds {
        let case = Case::new(seed);
        let (ours, theirs) = (ours(&case), world.theirs(&case));
        let at = case.now.to_zoned(case.zone.clone());
        assert!(
            ours == theirs,
            "seed {seed}, at {at}\nonly ours: {:#?}\nonly theirs: {:#?}\n{}",
            ours.difference(&theirs).collect::<Vec<_>>(),
            theirs.difference(&ours).collect::<Vec<_>>(),
            case.configuration
        );
        let taken = ours.iter().filter(|line| line.starts_with("take")).count();
        taken_count += taken;
        removed_count += ours.len() - taken;
        if seed % MONITORED_EVERY == 0 {
            let (message, code) = world.sanoid(&case, &["--monitor-snapshots"]);
            let config = SanoidConfig::parse(&case.configuration).unwrap();
            let datasets = config.resolve(&DATASETS.map(str::to_owned)).datasets;
            let ours = freshness(&datasets, |dataset, kind| newest(&case, dataset, kind), case.now);
            let ours = (ours.line.as_str(), i32::from(ours.level.code()));
            assert_eq!(ours, (message.trim_end(), code), "seed {seed}, at {at}");
        }
    }
    (taken_count, removed_count)
}

#[test]
fn every_decision_equals_that_of_sanoid() {
    let half = CASE_COUNT / 2;
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| compare(0..half));
        let second = scope.spawn(move || compare(half..CASE_COUNT));
        (first.join().unwrap(), second.join().unwrap())
    });
    let (taken_count, removed_count) = (first.0 + second.0, first.1 + second.1);
    // The cases must contain enough actions to be meaningful.
    assert!(
        taken_count > 500 && removed_count > 500,
        "{taken_count} taken, {removed_count} removed"
    );
}
