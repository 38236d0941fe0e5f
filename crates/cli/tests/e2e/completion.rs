//! Completions for a shell.

use crate::rig::{Rig, noise};

/// The answer about files, and the completions.
fn offered(rig: &Rig, words: &[&str]) -> (String, Vec<String>) {
    let line: Vec<&str> = ["complete", "--", "holdfast"].iter().chain(words).copied().collect();
    answer(&rig.ok(&line))
}

fn answer(text: &str) -> (String, Vec<String>) {
    let mut lines = text.lines();
    let files = lines.next().unwrap().to_owned();
    let words = lines.map(|line| line.split('\t').next().unwrap().to_owned());
    (files, words.collect())
}

fn words(rig: &Rig, words: &[&str]) -> Vec<String> {
    offered(rig, words).1
}

#[test]
fn verbs_and_options_are_offered_and_internal_ones_are_not() {
    let rig = Rig::empty();
    let verbs = words(&rig, &[""]);
    assert!(verbs.contains(&"backup".to_owned()), "{verbs:?}");
    for internal in ["live-server", "files-reader", "watchdog", "peer", "complete"] {
        assert!(!verbs.contains(&internal.to_owned()), "{internal}");
    }
    assert_eq!(words(&rig, &["ba"]), ["backup"]);
    assert_eq!(words(&rig, &["image", "co"]), ["compare", "convert"]);
    assert_eq!(words(&rig, &["help", "image", "inf"]), ["info"]);
    assert_eq!(words(&rig, &["list", "--rep"]), ["--repository"]);
    assert_eq!(words(&rig, &["image", "info", "--rep"]), [""; 0]);
    assert_eq!(words(&rig, &["list", "--color=n"]), ["--color=never"]);
    assert_eq!(words(&rig, &["live-se"]), [""; 0]);
}

#[test]
fn names_in_the_repository_are_offered() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(4096, 1));
    rig.write("db1.raw", &noise(4096, 2));
    rig.ok(&["backup", "web1.raw", "--machine", "web1", "--tag", "nightly"]);
    rig.ok(&["backup", "db1.raw", "--machine", "db1"]);
    let id = rig.report(&["list", "web1"])["snapshots"][0]["id"]
        .as_str()
        .unwrap()
        .to_owned();
    assert_eq!(words(&rig, &["list", ""]), ["db1", "web1"]);
    assert_eq!(words(&rig, &["list", "--tag", ""]), ["nightly"]);
    assert_eq!(words(&rig, &["backup", "x.raw", "--machine", "w"]), ["web1"]);
    assert_eq!(words(&rig, &["show", "we"]), ["web1"]);
    assert_eq!(words(&rig, &["show", &id[..4]]), [&id[..8]]);
    let times = words(&rig, &["show", "web1@"]);
    assert_eq!(times[0], "web1@latest");
    // The completed time names the snapshot.
    assert_eq!(rig.report(&["show", &times[1]])["snapshot"]["id"], id.as_str());
    assert_eq!(words(&rig, &["restore", "web1:"]), ["web1:web1"]);
    // The same words as one line, as bash passes it.
    let line = rig.ok(&["complete", "--line", "sudo x; holdfast restore 'web1@la"]);
    assert_eq!(answer(&line).1, ["web1@latest"]);
}

#[test]
fn an_encrypted_repository_is_opened_only_without_a_prompt() {
    let rig = Rig::empty();
    rig.write("password", b"four horses eat soup\n");
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(rig.path("password"), private).unwrap();
    rig.ok(&["init", "--password-file", "password"]);
    rig.write("web1.raw", &noise(4096, 1));
    rig.ok(&["backup", "web1.raw", "--machine", "web1", "--password-file", "password"]);
    assert_eq!(words(&rig, &["list", ""]), [""; 0]);
    assert_eq!(words(&rig, &["list", "--password-file", "password", ""]), ["web1"]);
    assert_eq!(
        words(&rig, &["list", "--password-command", "cat password", ""]),
        [""; 0]
    );
}

#[test]
fn names_of_a_configuration_are_offered_and_files_where_they_fit() {
    let rig = Rig::empty();
    rig.write(
        "holdfast.toml",
        b"version = 1\n[repositories.vms]\npath = \"/backup/vms\"\n[jobs.nightly]\ndo = \"backup\"\nrepository = \"vms\"\nall = true\n",
    );
    assert_eq!(words(&rig, &["run", "--config", "holdfast.toml", ""]), ["nightly"]);
    let config = rig.path("holdfast.toml");
    let mut command = rig.command(&["complete", "--", "holdfast", "list", "-r", ""]);
    let output = command.env("HOLDFAST_CONFIG", config).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(answer(&text), ("folders".to_owned(), vec!["vms".to_owned()]));
    assert_eq!(offered(&rig, &["image", "info", ""]).0, "files");
    assert_eq!(offered(&rig, &["restore", "web1", ""]).0, "files");
    assert_eq!(offered(&rig, &["list", ""]).0, "none");
}
