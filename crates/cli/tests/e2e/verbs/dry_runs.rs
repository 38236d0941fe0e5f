//! Dry runs: they report what the command would do, and change nothing.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use serde_json::{Value, json};

use crate::program::stdout;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

/// Every file and folder of the rig with its content and the time of its last change, without the state about the host,
/// except for runs.
fn content(rig: &Rig) -> BTreeMap<String, (i64, i64, Vec<u8>)> {
    fn collect(folder: &Path, name: &str, found: &mut BTreeMap<String, (i64, i64, Vec<u8>)>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = format!("{name}/{}", entry.file_name().to_str().unwrap());
            let metadata = entry.metadata().unwrap();
            if name == "./state" {
                let runs = entry.path().join("holdfast/runs");
                assert!(!runs.exists(), "a run was recorded");
                continue;
            }
            let bytes = if metadata.is_dir() {
                collect(&entry.path(), &name, found);
                Vec::new()
            } else {
                std::fs::read(entry.path()).unwrap()
            };
            found.insert(name, (metadata.mtime(), metadata.mtime_nsec(), bytes));
        }
    }
    let mut found = BTreeMap::new();
    collect(&rig.path("."), ".", &mut found);
    found
}

/// Runs a command with `--dry-run`, and asserts that nothing has changed. Returns the report, and the text printed
/// without `--json`.
fn planned(rig: &Rig, words: &[&str]) -> (Value, String) {
    planned_with(rig, 0, words)
}

/// The same with this exit code.
fn planned_with(rig: &Rig, code: i32, words: &[&str]) -> (Value, String) {
    let words = [words, &["--dry-run"]].concat();
    let before = content(rig);
    let report = rig.json(code, &words)["report"].clone();
    let text = stdout(&rig.code(code, &words));
    let after = content(rig);
    let names = |content: &BTreeMap<String, _>| content.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&before), names(&after), "{words:?}");
    let changed = before.iter().filter(|(name, found)| after[*name] != **found);
    let changed: Vec<_> = changed.map(|(name, _)| name).collect();
    assert!(changed.is_empty(), "{words:?} has changed {changed:?}");
    assert_eq!(report["dry_run"], true, "{words:?}");
    assert!(text.contains("would "), "{words:?}: {text}");
    (report, text)
}

/// Runs a command with and without `--dry-run`, and asserts that both fail in the same way and change nothing.
fn assert_fails_alike(rig: &Rig, code: i32, words: &[&str]) {
    let before = content(rig);
    let planned = rig.error(code, &[words, &["-n"]].concat());
    assert!(content(rig) == before, "{words:?}");
    assert_eq!(planned.0, rig.error(code, words).0, "{words:?}");
}

fn rig_with_disk() -> Rig {
    let rig = Rig::empty();
    let mut disk = noise(8 * MIB, 1);
    disk[MIB..6 * MIB].fill(0);
    rig.write("web1.raw", &disk);
    rig.ok(&["image", "convert", "web1.raw", "web1.qcow2"]);
    std::fs::remove_dir_all(rig.path("state")).ok();
    rig
}

#[test]
fn image_resize_reports_data_that_would_be_lost() {
    let rig = rig_with_disk();
    let shrink = ["image", "resize", "web1.qcow2", "4M", "--shrink"];
    let (report, text) = planned(&rig, &shrink);
    assert_eq!(report["lost"], json!({"data_bytes": 2 * MIB, "first_offset": 6 * MIB}));
    assert!(
        text.contains("would shrink web1.qcow2 from 8.0 MiB to 4.0 MiB; 2.0 MiB of data beyond the new end would be lost (first at 6.0 MiB)"),
        "{text}"
    );
    let (report, text) = planned(&rig, &["image", "resize", "web1.qcow2", "+8M"]);
    assert_eq!(
        (&report["size_bytes"], &report["lost"]),
        (&json!(16 * MIB), &Value::Null)
    );
    assert!(
        text.contains("would grow web1.qcow2 from 8.0 MiB to 16.0 MiB"),
        "{text}"
    );
    assert_fails_alike(&rig, 1, &["image", "resize", "web1.qcow2", "4M"]);
    assert_fails_alike(&rig, 1, &["image", "resize", "web1.qcow2", "1000001"]);
    assert_fails_alike(&rig, 1, &["image", "resize", "nothing.qcow2", "4M"]);
    rig.ok(&shrink);
}

#[test]
fn dry_runs_create_no_image() {
    let rig = rig_with_disk();
    let (report, _) = planned(&rig, &["image", "create", "new.qcow2", "20G"]);
    assert_eq!(report["size_bytes"], 20_u64 << 30);
    assert_fails_alike(&rig, 1, &["image", "create", "web1.qcow2", "20G"]);
    assert_fails_alike(&rig, 1, &["image", "create", "nowhere/new.qcow2", "20G"]);
    assert_fails_alike(
        &rig,
        2,
        &["image", "create", "new.qcow2", "1G", "--cluster-size", "1000"],
    );
    let (report, text) = planned(&rig, &["image", "convert", "web1.qcow2", "new.vhdx", "--verify"]);
    assert_eq!(report["data_bytes"], 3 * MIB);
    assert!(text.contains("would write new.vhdx"), "{text}");
    planned(&rig, &["image", "convert", "web1.qcow2", "web1.raw", "--force"]);
    assert_fails_alike(&rig, 1, &["image", "convert", "web1.qcow2", "web1.raw"]);
    assert_fails_alike(&rig, 1, &["image", "convert", "web1.qcow2", "web1.qcow2", "--force"]);
    assert_fails_alike(&rig, 2, &["image", "convert", "web1.qcow2", "-"]);
    rig.ok(&["image", "create", "base.vhd", "1M"]);
    rig.ok(&["image", "create", "child.vhd", "--parent", "base.vhd"]);
    std::fs::remove_dir_all(rig.path("state")).ok();
    let (report, text) = planned(&rig, &["image", "identity", "base.vhd", "--renew", "--all-children"]);
    assert_eq!(report["changed"], false);
    assert_eq!(report["children"], json!(["child.vhd"]));
    assert!(text.contains("would become"), "{text}");
    assert_fails_alike(&rig, 1, &["image", "identity", "base.vhd", "--renew"]);
    assert_fails_alike(&rig, 1, &["image", "identity", "web1.raw", "--renew"]);
}

#[test]
fn dry_runs_create_no_key_and_no_repository() {
    let rig = Rig::empty();
    for (name, text) in [
        ("password", "four horses eat soup\n"),
        ("new", "five cows drink tea\n"),
        ("weak", "password\n"),
    ] {
        rig.write(name, text.as_bytes());
        std::fs::set_permissions(rig.path(name), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    }
    let sealed = ["--password-file", "password"];
    let (report, text) = planned(&rig, &[&["init"][..], &sealed].concat());
    assert!(report["id"].is_null() && report["encrypted"] == true);
    assert!(text.contains("would create an encrypted repository in"), "{text}");
    assert_fails_alike(&rig, 1, &["init", "--password-file", "weak"]);
    assert_fails_alike(&rig, 1, &["init", "--no-encryption", "-r", "nowhere/repo"]);
    assert_fails_alike(&rig, 1, &["init", "--no-encryption", "-r", "."]);
    rig.ok(&[&["init"][..], &sealed].concat());
    assert_fails_alike(&rig, 1, &[&["init"][..], &sealed].concat());
    let new = [&sealed[..], &["--new-password-file", "new"]].concat();
    planned(&rig, &[&["key", "add"], &new[..]].concat());
    let (report, _) = planned(&rig, &[&["key", "rotate"], &new[..]].concat());
    let only = report["removed"].as_str().unwrap().to_owned();
    assert_fails_alike(
        &rig,
        1,
        &[&["key", "add"], &sealed[..], &["--new-password-file", "weak"]].concat(),
    );
    assert_fails_alike(&rig, 1, &[&["key", "remove", &only], &sealed[..]].concat());
    rig.ok(&[&["key", "add"], &new[..]].concat());
    let (report, text) = planned(&rig, &[&["key", "remove", &only], &sealed[..]].concat());
    assert_eq!(report["removed"], only);
    assert!(text.contains("would remove key"), "{text}");
    assert_fails_alike(&rig, 1, &[&["key", "remove", "0123456789abcdef"], &sealed[..]].concat());
}

#[test]
fn dry_runs_change_no_snapshot() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(MIB, 1));
    rig.ok(&["backup", "web1.raw"]);
    std::fs::remove_dir_all(rig.path("state/holdfast/runs")).ok();
    planned(&rig, &["protect", "web1"]);
    assert_fails_alike(&rig, 1, &["unprotect", "web1"]);
    assert_fails_alike(&rig, 1, &["protect", "nothing"]);
    rig.ok(&["protect", "web1"]);
    let (_, text) = planned(&rig, &["unprotect", "web1"]);
    assert!(text.contains("would unprotect snapshot"), "{text}");
}

#[test]
fn dry_runs_export_and_import_no_machine() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(MIB, 1));
    rig.ok(&["backup", "web1.raw"]);
    std::fs::remove_dir_all(rig.path("state/holdfast/runs")).ok();
    for target in [
        &["web1.xva"][..],
        &["web1.ova"],
        &["-", "--format", "xva"],
        &["web1", "--format", "dir"],
    ] {
        // The hardware of a machine that was backed up from an image is unknown.
        let (report, _) = planned_with(&rig, 3, &[&["export", "web1"], target].concat());
        assert_eq!(report["disks"], json!([{"name": "web1", "size_bytes": MIB}]));
    }
    assert_fails_alike(&rig, 1, &["export", "web1", "web1.raw", "--format", "xva"]);
    assert_fails_alike(&rig, 1, &["export", "web1", "nowhere/web1.xva"]);
    assert_fails_alike(&rig, 1, &["export", "nothing", "web1.xva"]);
    assert_fails_alike(&rig, 1, &["export", "web1", "repo", "--format", "dir"]);
    rig.code(3, &["export", "web1", "web1.xva"]);
    std::fs::remove_dir_all(rig.path("state/holdfast/runs")).ok();
    let (report, text) = planned(&rig, &["import", "web1.xva", "--machine", "web2"]);
    assert_eq!(report["listed_as"], "web2");
    assert!(text.contains("as a snapshot of web2"), "{text}");
    let (report, _) = planned(&rig, &["import", "web1.xva", "--to", "images"]);
    let path = std::path::Path::new(report["disks"][0]["path"].as_str().unwrap());
    assert_eq!(path.extension().unwrap(), "qcow2");
    assert_fails_alike(&rig, 1, &["import", "web1.xva", "--to", "repo"]);
    assert_fails_alike(&rig, 1, &["import", "web1.raw"]);
}

#[test]
fn dry_runs_push_and_pull_no_template() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(MIB, 1));
    rig.write("b.raw", &noise(MIB, 2));
    let push = ["template", "push", "t", "a.raw", "--unsigned"];
    let (report, text) = planned(&rig, &push);
    let content = report["content"].clone();
    assert!(text.contains("would store t:latest"), "{text}");
    rig.ok(&push);
    std::fs::remove_dir_all(rig.path("state/holdfast/runs")).ok();
    assert_eq!(rig.report(&["template", "show", "t"])["template"]["content"], content);
    assert_fails_alike(&rig, 1, &["template", "push", "t", "b.raw", "--unsigned"]);
    let (report, _) = planned(&rig, &["template", "push", "t", "b.raw", "--unsigned", "--replace"]);
    assert_eq!(report["before"], content);
    planned(&rig, &["template", "tag", "t", "t:two", "--unsigned"]);
    assert_fails_alike(&rig, 1, &["template", "tag", "nothing", "t:two", "--unsigned"]);
    let (report, _) = planned_with(&rig, 3, &["template", "pull", "t", "out.qcow2", "--unsigned"]);
    assert_eq!(report["images"][0]["path"], "out.qcow2");
    assert_fails_alike(&rig, 1, &["template", "pull", "t", "a.raw", "--unsigned"]);
    assert_fails_alike(&rig, 1, &["template", "pull", "t", "out.qcow2"]);
}
