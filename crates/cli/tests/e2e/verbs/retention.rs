//! Removal of snapshots: planned, with reasons, and never more than planned.

use crate::rig::{Rig, noise};

fn rig_of_four_days() -> Rig {
    let rig = Rig::new();
    for day in 1..=4u64 {
        let mut bytes = noise(200_000, 1);
        bytes[100_000..150_000].copy_from_slice(&noise(50_000, day));
        rig.write("web1.raw", &bytes);
        let time = format!("2026-01-0{day}T12:00:00Z");
        rig.ok(&["backup", "web1.raw", "--time", &time, "--tag", &format!("day{day}")]);
    }
    rig
}

fn tags(rig: &Rig) -> Vec<String> {
    let report = rig.report(&["list"]);
    let snapshots = report["snapshots"].as_array().unwrap();
    snapshots
        .iter()
        .map(|snapshot| snapshot["tags"][0].as_str().unwrap().to_owned())
        .collect()
}

#[test]
fn prune_follows_the_rules_and_a_dry_run_removes_nothing() {
    let rig = rig_of_four_days();
    assert_eq!(rig.report(&["prune"])["removed_count"], 0, "without rules all are kept");
    let plan = rig.ok(&["prune", "--keep-daily", "2", "--dry-run"]);
    assert!(plan.contains("would remove 2 snapshots and keep 2"), "{plan}");
    assert_eq!(tags(&rig).len(), 4);
    rig.ok(&["protect", "web1@2026-01-01"]);
    let listed = rig.report(&["list"])["snapshots"].clone();
    let is_protected = listed.as_array().unwrap().iter().map(|one| &one["is_protected"]);
    assert_eq!(is_protected.collect::<Vec<_>>(), [true, false, false, false]);
    assert_eq!(
        rig.report(&["show", "web1@2026-01-01"])["snapshot"]["is_protected"],
        true
    );
    assert_eq!(rig.report(&["show", "web1"])["snapshot"]["is_protected"], false);
    let report = rig.report(&["prune", "--keep-daily", "2"]);
    assert_eq!(
        (report["removed_count"].as_u64(), report["kept_count"].as_u64()),
        (Some(1), Some(3))
    );
    assert_eq!(tags(&rig), ["day1", "day3", "day4"]);
    assert_eq!(rig.error(1, &["forget", "web1@2026-01-01"]).0, "refused");
    rig.ok(&["unprotect", "web1@2026-01-01"]);
    assert_eq!(rig.error(1, &["prune", "other", "--keep-last", "1"]).0, "not-found");
    rig.ok(&["forget", "web1@2026-01-01"]);
    assert_eq!(tags(&rig), ["day3", "day4"]);
    let before = rig.report(&["gc", "--dry-run"]);
    assert_eq!(before["dry_run"], true);
    rig.ok(&["gc", "--repack-below", "100"]);
    rig.ok(&["verify"]);
    rig.ok(&["restore", "web1", "out.raw"]);
    assert!(rig.read("out.raw") == rig.read("web1.raw"));
}

/// "Newest" means another snapshot tomorrow: a script that uses it for forget would delete the whole history.
#[test]
fn forget_takes_exact_names_only() {
    let rig = rig_of_four_days();
    for name in ["web1", "latest", "web1@latest"] {
        assert_eq!(rig.error(1, &["forget", name]).0, "refused", "{name}");
    }
    let id = rig.report(&["list"])["snapshots"][1]["id"].as_str().unwrap().to_owned();
    assert_eq!(rig.error(1, &["forget", &id[..8], "web1"]).0, "refused");
    assert_eq!(tags(&rig).len(), 4, "with one wrong name nothing is removed");
    rig.ok(&["forget", &id[..8], "--dry-run"]);
    assert_eq!(tags(&rig).len(), 4);
    rig.ok(&["forget", &id[..8]]);
    assert_eq!(tags(&rig), ["day1", "day3", "day4"]);
    assert_eq!(rig.error(1, &["show", &id]).0, "not-found");
}

/// The content is unknown: only the full id selects the snapshot.
#[test]
fn a_lost_snapshot_is_forgotten_only_by_its_full_id() {
    let rig = rig_of_four_days();
    let report = rig.report(&["list"]);
    let id = |number: usize| report["snapshots"][number]["id"].as_str().unwrap().to_owned();
    let (lost, damaged) = (id(1), id(2));
    let object = |id: &str| format!("repo/snapshots/{id}");
    std::fs::remove_file(rig.path(&object(&lost))).unwrap();
    let mut bytes = rig.read(&object(&damaged));
    bytes[40] ^= 1;
    rig.write(&object(&damaged), &bytes);
    assert_eq!(rig.error(1, &["forget", &lost[..8]]).0, "not-found");
    assert_eq!(rig.error(1, &["forget", &"0".repeat(32)]).0, "not-found");
    // The damaged snapshot causes a warning whenever the snapshots are read.
    let plan = rig.code(3, &["forget", "--dry-run", &lost, &damaged]);
    let plan = String::from_utf8(plan.stdout).unwrap();
    assert!(
        plan.contains(&format!("would remove snapshot {lost}, which is lost")),
        "{plan}"
    );
    let done = rig.json(3, &["forget", &lost, &damaged]);
    assert_eq!(done["report"]["unreadable"], serde_json::json!([lost, damaged]));
    rig.ok(&["gc"]);
    rig.ok(&["scrub"]);
    assert_eq!(tags(&rig), ["day1", "day4"]);
}

/// Rules can be simulated before a repository exists; a named repository is not opened.
#[test]
fn prune_simulates_without_a_repository() {
    let rules = ["prune", "--simulate", "--days", "10", "--keep-daily", "3"];
    let rig = Rig::new();
    let shown = rig.ok(&rules);
    assert!(
        shown.contains("keeps 3 of 10 snapshots, and has at most 4 at once"),
        "{shown}"
    );
    assert!(shown.contains("(daily; --every sets it)"), "{shown}");
    assert!(shown.lines().any(|line| line.starts_with("daily 3/3  ")), "{shown}");
    let named = ["-r", "/nonexistent/repository", "--every", "00/12:00 UTC"];
    let report = rig.report(&[&rules[..], &named].concat());
    assert_eq!(report["every"], "*-*-* 00/12:00:00 UTC");
    assert_eq!(report["points"].as_array().unwrap().len(), 3);
    assert_eq!(report["history"].as_array().unwrap().len(), 10);
    let too_many = [&rules[..], &["--every", "*:*:*"]].concat();
    let (kind, text) = rig.error(2, &too_many);
    assert_eq!(kind, "usage");
    assert!(text.contains("in 10 days is more than 200000 snapshots"), "{text}");
    for word in ["web1", "--dry-run"] {
        let refused = rig.run(&[&rules[..], &[word]].concat());
        assert_eq!(refused.status.code(), Some(2), "{word}");
    }
}
