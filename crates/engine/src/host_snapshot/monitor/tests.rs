//! Checks when ZFS gives invalid answers, or none.

use std::sync::Arc;

use holdfast_block::SystemClock;
use holdfast_host::{Answer, ToolError, Tools};
use holdfast_policy::sanoid::{Check, Level, SanoidConfig};
use jiff::Timestamp;

use super::{MonitorRequest, check_capacity, check_health, check_snapshots, monitor};
use crate::host_snapshot::Providers;

const POLICY: &str = "[tank/vm]\nrecursive = yes\nhourly = 1\ndaily = 0\nmonthly = 0\nprocess_children_only = yes\n";
const DATASETS: &str = "tank\ttype\tfilesystem\t-\ntank/vm\ttype\tfilesystem\t-\ntank/vm/a\ttype\tfilesystem\t-\n";
const SNAPSHOTS: &str = "tank/vm/a@autosnap_x_hourly\tcreation\t1000\t-\ntank/vm/a@autosnap_x_hourly\tused\t7\t-\n";
const LIST: &str = "tank\t1T\t4%\tONLINE\t1T\n";
const ROOM: &str = "tank\t1000\t40\t960\n";
const STATUS: &str = "  pool: tank\n state: ONLINE\nconfig:\n\n\tNAME  STATE  READ WRITE CKSUM\n\
    \ttank  ONLINE  0  0  0\n\t  sda  ONLINE  0  0  0\n\nerrors: No known data errors\n";

/// A ZFS with scripted answers or errors.
#[derive(Clone, Copy)]
struct World {
    datasets: Result<&'static str, &'static str>,
    snapshots: Result<&'static str, &'static str>,
    list: Result<&'static str, &'static str>,
    status: Result<&'static str, &'static str>,
}

const VALID: World = World {
    datasets: Ok(DATASETS),
    snapshots: Ok(SNAPSHOTS),
    list: Ok(LIST),
    status: Ok(STATUS),
};

impl Tools for World {
    fn ask(&self, program: &str, words: &[&str]) -> Result<Answer, ToolError> {
        let answer = match (program, words) {
            ("zfs", ["version"]) => Ok("zfs-2.1.11\n"),
            ("zfs", words) if words.contains(&"snapshot") && words.ends_with(&["tank/vm/a"]) => self.snapshots,
            ("zfs", words) if words.contains(&"snapshot") => Ok(""),
            ("zfs", _) => self.datasets,
            ("zpool", ["list", "-Hp", ..]) => self.list.map(|_| ROOM),
            ("zpool", ["list", ..]) => self.list,
            ("zpool", ["status", "tank"]) => self.status,
            _ => panic!("{program} {words:?}"),
        };
        Ok(Answer {
            is_success: answer.is_ok(),
            output: answer.unwrap_or_default().to_owned(),
            stderr: answer.err().unwrap_or_default().to_owned(),
        })
    }
}

fn with<T>(world: World, policy: &str, now: i64, ask: impl Fn(&MonitorRequest<'_>) -> T) -> T {
    let tools: Arc<dyn Tools> = Arc::new(world);
    let config = SanoidConfig::parse(policy).unwrap();
    ask(&MonitorRequest {
        providers: &Providers::new(&tools, "/run/views".into(), Arc::new(SystemClock::new())),
        config: &config,
        now: Timestamp::from_second(now).unwrap(),
    })
}

#[test]
fn a_good_state_is_reported_as_ok() {
    let line_of = |ask: fn(&MonitorRequest<'_>) -> Check| with(VALID, POLICY, 1060, ask).line;
    assert_eq!(
        line_of(check_snapshots),
        "OK: all monitored datasets (tank/vm/a) have fresh snapshots"
    );
    assert_eq!(
        line_of(check_health),
        "OK ZPOOL tank : ONLINE {Size:1T Free:1T Cap:4%} "
    );
    assert_eq!(line_of(check_capacity), "OK ZPOOL tank : 4%");
    let late = with(VALID, POLICY, 1000 + 6 * 3600 + 1, check_snapshots);
    let line = "CRIT: tank/vm/a newest hourly snapshot is 6h 0m 1s old (should be < 6h 0m 0s)";
    assert_eq!((late.level, &late.line[..]), (Level::Critical, line));
}

#[test]
fn the_report_has_the_numbers_of_zfs() {
    let report = with(VALID, POLICY, 1060, monitor);
    assert_eq!(report.pools[0].room.unwrap().allocated_bytes, 40);
    let dataset = &report.datasets[1];
    assert_eq!((&dataset.dataset[..], dataset.is_fresh), ("tank/vm/a", Some(true)));
    let hourly = &dataset.types[0];
    assert_eq!((hourly.count, hourly.used_bytes), (1, 7));
    assert_eq!(hourly.newest.unwrap().as_second(), 1000);
    assert_eq!(report.datasets[0].is_fresh, None);
    // A missing dataset has no fresh snapshot; if ZFS does not answer, freshness is unknown.
    let policy = format!("{POLICY}[gone]\n");
    let without_snapshots = World {
        snapshots: Err("no"),
        ..VALID
    };
    let datasets = with(without_snapshots, &policy, 1060, monitor).datasets;
    let fresh: Vec<_> = datasets.iter().map(|one| (&one.dataset[..], one.is_fresh)).collect();
    assert_eq!(fresh, [("gone", Some(false)), ("tank/vm", None)]);
}

/// Answers that are empty, truncated, unrelated or errors.
fn invalid_answers(valid_answer: &'static str) -> Vec<Result<&'static str, &'static str>> {
    let mut answers = vec![
        Ok(""),
        Ok("\n"),
        Ok("no pools available\n"),
        Ok("\u{0}\u{1b}[2J\u{fffd}\t\t\t\t\n"),
        Err("internal error: failed to initialize ZFS library"),
        Err("Please make sure that the zfs-fuse daemon is running."),
        Err("cannot open 'tank': pool I/O is currently suspended"),
        Err(""),
    ];
    answers.extend(
        (1..valid_answer.len())
            .filter(|end| !valid_answer[..*end].ends_with('\n'))
            .map(|end| Ok(&valid_answer[..end])),
    );
    answers
}

#[test]
fn missing_and_invalid_answers_are_never_ok() {
    let assert_unknown = |world, ask: fn(&MonitorRequest<'_>) -> Check, answer: Result<&str, &str>| {
        let check = with(world, POLICY, 1060, ask);
        assert_eq!(check.level, Level::Unknown, "{answer:?}: {}", check.line);
        assert!(
            check.line.starts_with("UNKNOWN") && !check.line.contains('\n'),
            "{}",
            check.line
        );
    };
    for datasets in invalid_answers(DATASETS) {
        assert_unknown(World { datasets, ..VALID }, check_snapshots, datasets);
    }
    for snapshots in invalid_answers(SNAPSHOTS) {
        // Without a snapshot of the right name in the answer, there is no fresh snapshot.
        let check = with(World { snapshots, ..VALID }, POLICY, 1060, check_snapshots);
        assert!(check.level >= Level::Unknown, "{snapshots:?}: {}", check.line);
    }
    for list in invalid_answers(LIST) {
        assert_unknown(World { list, ..VALID }, check_health, list);
        assert_unknown(World { list, ..VALID }, check_capacity, list);
    }
    for status in invalid_answers(STATUS) {
        // The text after the devices is not parsed.
        if status.is_ok_and(|status| status.contains("\n\nerrors")) && status.is_ok_and(|text| text.ends_with('\n')) {
            continue;
        }
        assert_unknown(World { status, ..VALID }, check_health, status);
    }
    let without_snapshots = World {
        snapshots: Err("no"),
        ..VALID
    };
    assert_unknown(without_snapshots, check_snapshots, without_snapshots.snapshots);
}

#[test]
fn known_problems_are_reported_beside_unknown_states() {
    let policy = format!(
        "{POLICY}[tank]\nhourly = 1\ndaily = 0\nmonthly = 0\n[gone/vm]\nprocess_children_only = yes\nrecursive = yes\n"
    );
    let without_snapshots = World {
        snapshots: Err("no"),
        ..VALID
    };
    let check = with(without_snapshots, &policy, 1060, check_snapshots);
    let line = "CRIT: tank has no hourly snapshots at all!, UNKNOWN: gone/vm: there is no such dataset, and nothing below it, \
                tank/vm/a: cannot inspect tank/vm/a: no";
    assert_eq!((check.level, &check.line[..]), (Level::Critical, line));
}

#[test]
fn an_empty_policy_and_a_missing_pool_are_not_ok() {
    for ask in [check_snapshots, check_health, check_capacity] {
        assert_eq!(with(VALID, "# nothing\n", 1060, ask).level, Level::Unknown);
    }
    let list = Err("cannot open 'tank': no such pool");
    for ask in [check_health, check_capacity] {
        let check = with(World { list, ..VALID }, POLICY, 1060, ask);
        let line = "CRITICAL ZPOOL {tank} does not exist and/or is not responding!";
        assert_eq!((check.level, &check.line[..]), (Level::Critical, line));
    }
    let faulted = World {
        list: Ok("tank\t-\t-\tFAULTED\t-\n"),
        status: Err("no"),
        ..VALID
    };
    let check = with(faulted, POLICY, 1060, check_health);
    let line = "*** CRITICAL *** CRITICAL ZPOOL tank : FAULTED {Size:- Free:- Cap:-} ";
    assert_eq!((check.level, &check.line[..]), (Level::Critical, line));
}
