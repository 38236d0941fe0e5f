//! `docs/json.md` compared with real documents: every field of every verb is described, and no others.

use std::collections::{BTreeMap, BTreeSet};

use holdfast_cli::commands::verb_paths;
use holdfast_test_kit::json_schema::{unknown_fields, violations};
use serde_json::{Value, json};

use crate::rig::{Rig, noise, schema};

const TEXT: &str = include_str!("../../../../docs/json.md");

/// Words between backticks.
fn quoted(text: &str) -> BTreeSet<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The sections about reports, by heading.
fn sections() -> Vec<(&'static str, &'static str)> {
    let (_, reports) = TEXT.split_once("\n## Reports\n").unwrap();
    reports
        .split("\n### ")
        .skip(1)
        .map(|section| section.split_once('\n').unwrap())
        .collect()
}

/// The fields that the first column of a section's table describes.
fn described(section: &str) -> BTreeSet<String> {
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    rows.flat_map(|row| quoted(row.split('|').nth(1).unwrap())).collect()
}

/// Names of all fields at any depth, except those of maps with arbitrary keys.
fn fields(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| fields(value, found)),
        Value::Object(values) => {
            for (name, value) in values {
                found.insert(name.clone());
                fields(value, found);
            }
        }
        _ => {}
    }
}

/// Reports of every verb that has one, with all optional fields.
fn reports() -> BTreeMap<&'static str, Vec<Value>> {
    let rig = Rig::empty();
    let mut reports: BTreeMap<&'static str, Vec<Value>> = BTreeMap::new();
    let mut add = |verb: &'static str, code: i32, words: &[&str]| {
        let words: Vec<&str> = verb.split(' ').chain(words.iter().copied()).collect();
        let report = rig.json(code, &words)["report"].clone();
        reports.entry(verb).or_default().push(report);
    };
    add("version", 0, &["--verbose"]);
    rig.write("password", b"four horses eat soup\n");
    rig.write("new-password", b"five cows drink tea\n");
    for name in ["password", "new-password"] {
        std::fs::set_permissions(rig.path(name), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
    let sealed = ["-r", "sealed", "--password-file", "password"];
    add("init", 0, &[&sealed[..], &["--paper-key"]].concat());
    add("key list", 0, &sealed);
    add("key paper", 0, &sealed);
    add(
        "key add",
        0,
        &[&sealed[..], &["--new-password-file", "new-password"]].concat(),
    );
    add("init", 0, &["--no-encryption"]);
    rig.write("a.raw", &noise(50_000, 1));
    add("backup", 0, &["a.raw"]);
    rig.write("a.raw", &noise(50_000, 2));
    add("backup", 0, &["a.raw"]);
    add("backup", 0, &["--dry-run", "a.raw"]);
    add("list", 0, &[]);
    add("show", 0, &["a"]);
    let old = rig.report(&["list"])["snapshots"][0]["id"].as_str().unwrap().to_owned();
    add("diff", 0, &[&old, "a"]);
    add("restore", 0, &["a", "out.raw"]);
    add("container create", 0, &["box", "4M", "--filesystem", "none"]);
    add("backup", 0, &["container:box"]);
    add("restore", 0, &["box", "--to-container", "box2"]);
    add("verify", 5, &["a", "--against", "new-password"]);
    add("verify", 0, &[]);
    add("scrub", 0, &[]);
    add("stats", 0, &[]);
    add("repair", 0, &["--dry-run"]);
    add("protect", 0, &["a"]);
    add("unprotect", 0, &["a"]);
    add("prune", 0, &["--keep-last", "1", "--dry-run"]);
    add("prune", 0, &["--keep-last", "1", "--simulate", "--days", "3"]);
    let newest = rig.report(&["list"])["snapshots"][1]["id"].as_str().unwrap().to_owned();
    std::fs::remove_file(rig.path(&format!("repo/snapshots/{old}"))).unwrap();
    add("list", 5, &[]);
    add("forget", 0, &[&old, &newest, "--dry-run"]);
    add("gc", 0, &["--accept-loss", &old]);
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    add("copy", 0, &["--to", "far", "--all"]);
    add("copy", 0, &["--to", "far", "--status"]);
    add("template push", 0, &["t", "a.raw", "--unsigned"]);
    add("template tag", 0, &["t", "t:two", "--unsigned"]);
    add("template list", 0, &[]);
    add("template show", 0, &["t"]);
    add("template pull", 3, &["t", "t.raw", "--unsigned"]);
    add("template remove", 0, &["t", "--all"]);
    add("gc", 0, &["--dry-run"]);
    add("gc", 0, &[]);
    add("image convert", 0, &["a.raw", "a.qcow2"]);
    add("image create", 0, &["b.qcow2", "1M"]);
    rig.ok(&["image", "create", "b.vdi", "1M"]);
    rig.ok(&["image", "create", "b.vhd", "1M"]);
    add("clone", 0, &["b.vdi", "c.vdi"]);
    add("image identity", 0, &["b.vdi", "--renew", "--all-children"]);
    add("image resize", 0, &["b.qcow2", "2M"]);
    add("image resize", 0, &["a.qcow2", "4096", "--shrink", "--dry-run"]);
    add("image convert", 0, &["a.qcow2", "d.raw", "--dry-run"]);
    add("image info", 0, &["a.qcow2"]);
    add("image map", 0, &["a.qcow2"]);
    add("image check", 0, &["a.qcow2"]);
    let whole = std::fs::read(rig.path("b.vhd")).unwrap();
    rig.write("b.vhd", &whole[..whole.len() - 1]);
    add("image check", 3, &["b.vhd", "--repair", "--dry-run"]);
    add("image check", 0, &["b.vhd", "--repair"]);
    add("image compare", 1, &["a.raw", "b.qcow2"]);
    rig.write("sanoid.conf", b"[tank]\nhourly = 3\nuse_template = gone\n");
    add("config check", 3, &["sanoid.conf"]);
    add("config show", 3, &["sanoid.conf", "--effective"]);
    for check in ["monitor snapshots", "monitor health", "monitor capacity"] {
        add(check, 3, &["nowhere.conf"]);
    }
    std::fs::create_dir(rig.path("pages")).unwrap();
    add("man", 0, &["pages"]);
    reports_of_machines(&mut reports);
    reports
}

/// Reports of verbs that need machines, pools or other hosts.
fn reports_of_machines(reports: &mut BTreeMap<&'static str, Vec<Value>>) {
    reports
        .entry("backup")
        .or_default()
        .push(crate::machines::report_of_machines());
    reports.insert("machines", vec![crate::machines::report_of_listing()]);
    reports.insert("doctor", vec![crate::machines::report_of_doctor()]);
    for (verb, report) in crate::machines::reports_of_host_snapshots() {
        reports.entry(verb).or_default().push(report);
    }
    reports.insert("replicate", crate::replication::reports());
    reports.insert("live-copy", crate::live_copies::reports());
    reports.insert("migrate", crate::migrations::reports());
    let of_others = crate::verbs::exchanges::reports().into_iter();
    for (verb, report) in of_others
        .chain(crate::verbs::virtualbox::reports())
        .chain(crate::verbs::guest_files::reports())
        .chain(crate::verbs::pools::reports())
    {
        reports.entry(verb).or_default().push(report);
    }
    for (verb, report) in crate::schedules::reports_of_schedules() {
        reports.entry(verb).or_default().push(report);
    }
    reports.insert("cron", crate::machines::reports_of_policies());
    reports.insert("resume", vec![crate::machines::report_of_resume()]);
    reports
        .entry("restore")
        .or_default()
        .extend(crate::machines::reports_of_machine_restores());
}

#[test]
fn documented_fields_match_the_reports() {
    let shared: BTreeSet<String> = sections()
        .iter()
        .filter(|(heading, _)| heading.ends_with("in reports"))
        .flat_map(|(_, section)| quoted(section))
        .collect();
    let reports = reports();
    check_schema(&reports);
    let mut seen_verbs = BTreeSet::new();
    for (heading, section) in sections() {
        let mut found = BTreeSet::new();
        for verb in quoted(heading) {
            let sample = reports.get(verb.as_str());
            sample
                .into_iter()
                .flatten()
                .for_each(|report| fields(report, &mut found));
            seen_verbs.insert(verb);
        }
        if found.is_empty() {
            continue;
        }
        let words = quoted(section);
        let undescribed: Vec<_> = found
            .iter()
            .filter(|name| !words.contains(*name) && !shared.contains(*name))
            .collect();
        assert!(undescribed.is_empty(), "{heading}: {undescribed:?} are not described");
        let invented: Vec<_> = described(section)
            .into_iter()
            .filter(|name| !found.contains(name))
            .collect();
        assert!(
            invented.is_empty(),
            "{heading}: {invented:?} are described, but are in no report"
        );
    }
    let undescribed: Vec<_> = reports.keys().filter(|verb| !seen_verbs.contains(**verb)).collect();
    assert!(undescribed.is_empty(), "no section for {undescribed:?}");
}

/// Asserts that the schema knows every field of the reports: an unknown field would not be checked.
fn check_schema(reports: &BTreeMap<&'static str, Vec<Value>>) {
    for (verb, samples) in reports {
        let of_verb = &schema()["$defs"][verb.replace(' ', "-")];
        assert!(of_verb.is_object(), "docs/json.schema.json has nothing about {verb}");
        for sample in samples {
            let unknown = unknown_fields(schema(), of_verb, sample);
            assert!(unknown.is_empty(), "docs/json.schema.json of {verb} lacks {unknown:?}");
            let found = violations(
                &json!({"$ref": format!("#/$defs/{}", verb.replace(' ', "-")), "$defs": schema()["$defs"]}),
                sample,
            );
            assert!(found.is_empty(), "{verb}: {found:#?}");
        }
    }
}

/// Every verb with a report has a section in the documentation.
#[test]
fn every_verb_has_a_section() {
    for verb in verb_paths() {
        let is_group = verb_paths().iter().any(|other| other.starts_with(&format!("{verb} ")));
        assert!(
            is_group || TEXT.contains(&format!("`{verb}`")),
            "docs/json.md has nothing about {verb}"
        );
    }
}
