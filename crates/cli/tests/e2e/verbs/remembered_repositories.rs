//! The state that a host remembers of a repository: it detects a replaced one, an older state, or a removed password.

use std::fs::{Permissions, rename};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Output;

use crate::program::{stderr, stdout};
use crate::rig::{Rig, assert_code, noise};

fn run_with(rig: &Rig, variable: (&str, &str), code: i32, words: &[&str]) -> Output {
    let output = rig.command(words).env(variable.0, variable.1).output().unwrap();
    assert_code(&output, code, words);
    output
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy_folder(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn an_older_state_of_a_repository_is_refused_until_accepted() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(200_000, 1));
    rig.ok(&["backup", "a.raw", "--machine", "a"]);
    copy_folder(&rig.path("repo"), &rig.path("older"));
    rig.write("a.raw", &noise(200_000, 2));
    rig.ok(&["backup", "a.raw", "--machine", "a"]);
    rig.ok(&["list"]);
    rename(rig.path("repo"), rig.path("newer")).unwrap();
    copy_folder(&rig.path("older"), &rig.path("repo"));
    for _ in 0..2 {
        let text = stderr(&rig.code(3, &["list"]));
        assert!(text.contains("are gone and were not removed"), "{text}");
    }
    let id = rig.json(3, &["list"])["warnings"].to_string();
    let id = id.split("HOLDFAST_ACCEPT_REPOSITORY=").nth(1).unwrap()[..32].to_owned();
    run_with(&rig, ("HOLDFAST_ACCEPT_REPOSITORY", &id), 0, &["list"]);
    rig.ok(&["list"]);
    // A removal by this host causes no warning.
    rig.ok(&["prune", "--keep-last", "1"]);
    rig.ok(&["gc"]);
    rig.ok(&["list"]);
}

/// Another user could move the repository there, or replace it.
#[test]
fn a_repository_in_a_world_writable_folder_is_warned_about() {
    let rig = Rig::empty();
    for (name, mode) in [("open", 0o777), ("sticky", 0o1777), ("closed", 0o755)] {
        let folder = rig.path(name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::set_permissions(&folder, Permissions::from_mode(mode)).unwrap();
        let place = format!("{name}/repo");
        let text = stderr(&rig.run(&["-r", &place, "init", "--no-encryption"]));
        assert_eq!(
            text.contains("other users can write it"),
            name == "open",
            "{name}: {text}"
        );
    }
    let folder = rig.path("sticky");
    let text = stderr(&rig.run(&["-r", "sticky/repo", "list"]));
    assert!(!text.contains("other users"), "{text}");
    std::fs::remove_dir_all(folder.join("repo")).unwrap();
    std::fs::create_dir(folder.join("repo")).unwrap();
    std::fs::set_permissions(folder.join("repo"), Permissions::from_mode(0o1777)).unwrap();
    let text = stderr(&rig.run(&["-r", "sticky/repo", "init", "--no-encryption"]));
    assert!(text.contains("others can change the repository"), "{text}");
}

/// The host that initializes a repository remembers it, also with a relative path to a new folder.
#[test]
fn a_new_repository_is_remembered_from_its_creation() {
    let rig = Rig::new();
    rig.ok(&["list"]);
    for _ in 0..2 {
        for place in ["repo", "./repo"] {
            std::fs::remove_dir_all(rig.path("repo")).unwrap();
            rig.ok(&["-r", place, "init", "--no-encryption"]);
            rig.ok(&["-r", "repo", "list"]);
        }
    }
}

/// Files are copied folder by folder during a backup: first the packs, later the snapshots, which need newer packs.
#[test]
fn a_file_copy_made_during_a_backup_is_recognised() {
    const HINT: &str = "made while the repository was in use";
    let rig = Rig::new();
    let back_up = |seed| {
        rig.write("a.raw", &noise(200_000, seed));
        rig.ok(&["backup", "a.raw", "--machine", "a"]);
    };
    (1..=4).for_each(back_up);
    copy_folder(&rig.path("repo/packs"), &rig.path("copied/packs"));
    back_up(5);
    for folder in rig.names("repo") {
        let (from, to) = (
            rig.path(&format!("repo/{folder}")),
            rig.path(&format!("copied/{folder}")),
        );
        if from.is_file() {
            std::fs::copy(from, to).unwrap();
        } else if folder != "packs" {
            copy_folder(&from, &to);
        }
    }
    let text = stderr(&rig.code(5, &["verify", "-r", "copied"]));
    assert!(text.contains(HINT), "{text}");
    // A missing pack of an older snapshot has another cause.
    for folder in rig.names("copied/packs") {
        std::fs::remove_dir_all(rig.path(&format!("copied/packs/{folder}"))).unwrap();
    }
    let text = stderr(&rig.code(5, &["verify", "-r", "copied"]));
    assert!(!text.contains(HINT), "{text}");
}

#[test]
fn a_replaced_repository_is_refused_until_accepted() {
    let rig = Rig::new();
    rig.ok(&["list"]);
    rename(rig.path("repo"), rig.path("first")).unwrap();
    rig.ok(&["-r", "second", "init", "--no-encryption"]);
    rename(rig.path("second"), rig.path("repo")).unwrap();
    rig.write("a.raw", &noise(200_000, 1));
    let (kind, text) = rig.error(1, &["backup", "a.raw", "--machine", "a"]);
    assert!(
        kind == "refused" && text.contains("not the repository that was here before"),
        "{text}"
    );
    let id = text.split("it is ").nth(1).unwrap()[..32].to_owned();
    let accepted = ("HOLDFAST_ACCEPT_REPOSITORY", id.as_str());
    run_with(&rig, accepted, 0, &["backup", "a.raw", "--machine", "a"]);
    rig.ok(&["list"]);
    // A new repository at the same path is known.
    std::fs::remove_dir_all(rig.path("repo")).unwrap();
    rig.ok(&["init", "--no-encryption"]);
    rig.ok(&["list"]);
}

/// A replaced target would receive the copies, and a repository that is initialized like it would have the keys of an
/// attacker.
#[test]
fn the_other_repository_of_a_copy_is_remembered_as_well() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(200_000, 1));
    rig.ok(&["backup", "a.raw", "--machine", "a"]);
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    let copy = ["copy", "--to", "far", "--all"];
    rig.ok(&copy);
    rename(rig.path("far"), rig.path("first")).unwrap();
    rig.ok(&["init", "--no-encryption", "-r", "other"]);
    rename(rig.path("other"), rig.path("far")).unwrap();
    let like = ["init", "--no-encryption", "-r", "like", "--like", "far"];
    for words in [&copy[..], &["copy", "--to", "far", "--status"], &like] {
        let (kind, text) = rig.error(1, words);
        assert!(
            kind == "refused" && text.contains("not the repository that was here before"),
            "{words:?}: {text}"
        );
    }
    assert!(!rig.path("like").exists());
    std::fs::remove_dir_all(rig.path("far")).unwrap();
    rename(rig.path("first"), rig.path("far")).unwrap();
    rig.ok(&copy);
    rig.ok(&like);
    // A new repository is known by its path, however the path was written.
    std::fs::remove_dir_all(rig.path("far")).unwrap();
    rig.ok(&["init", "--no-encryption", "-r", "far"]);
    rig.ok(&copy);
}

#[test]
fn a_password_of_the_environment_does_not_lock_a_repository_without_one() {
    let rig = Rig::new();
    rig.write("password", b"correct-horse-battery-staple\n");
    let variable = ("HOLDFAST_PASSWORD_FILE", "password");
    let text = stderr(&run_with(&rig, variable, 0, &["list"]));
    assert!(text.contains("has no password"), "{text}");
    run_with(&rig, variable, 0, &["init", "--no-encryption", "-r", "other"]);
    rig.code(1, &["list", "--password-file", "password"]);
    rig.code(
        2,
        &["init", "--no-encryption", "-r", "third", "--password-file", "password"],
    );
    // A repository that was encrypted is not opened when it is unencrypted: the next backup would be stored in plain
    // text.
    std::fs::remove_dir_all(rig.path("other")).unwrap();
    run_with(&rig, variable, 3, &["init", "-r", "other"]);
    run_with(&rig, variable, 3, &["list", "-r", "other"]);
    std::fs::remove_dir_all(rig.path("other")).unwrap();
    rename(rig.path("repo"), rig.path("other")).unwrap();
    let refused = run_with(&rig, variable, 1, &["list", "-r", "other"]);
    assert!(stderr(&refused).contains("without a password"), "{}", stdout(&refused));
}

#[test]
fn a_link_in_place_of_the_pack_folder_is_not_damage() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(200_000, 1));
    rig.ok(&["backup", "a.raw", "--machine", "a"]);
    rename(rig.path("repo/packs"), rig.path("elsewhere")).unwrap();
    std::os::unix::fs::symlink(rig.path("elsewhere"), rig.path("repo/packs")).unwrap();
    for words in [
        &["verify"][..],
        &["scrub"],
        &["repair"],
        &["gc"],
        &["restore", "a", "b.raw"],
        &["backup", "a.raw", "--machine", "a"],
    ] {
        let text = stderr(&rig.code(1, words));
        assert!(
            text.contains("is a link, or no folder") && text.contains("are not followed"),
            "{words:?}: {text}"
        );
    }
}

#[test]
fn a_folder_in_place_of_a_pack_does_not_stop_the_check() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(200_000, 1));
    rig.ok(&["backup", "a.raw", "--machine", "a"]);
    let mut packs = Vec::new();
    for folder in rig.names("repo/packs") {
        packs.extend(
            rig.names(&format!("repo/packs/{folder}"))
                .into_iter()
                .map(|name| format!("repo/packs/{folder}/{name}")),
        );
    }
    packs.sort_by_key(|path| rig.read(path).len());
    let largest = rig.path(packs.last().unwrap());
    std::fs::remove_file(&largest).unwrap();
    std::fs::create_dir(&largest).unwrap();
    for words in [&["verify"][..], &["scrub"], &["repair"]] {
        let text = stdout(&rig.code(5, words));
        assert!(text.contains("missing"), "{words:?}: {text}");
    }
}

#[test]
fn damage_of_a_pack_directory_is_reported_and_loses_nothing() {
    let rig = Rig::new();
    let content = noise(300_000, 1);
    rig.write("a.raw", &content);
    rig.ok(&["backup", "a.raw", "--machine", "a"]);
    for folder in rig.names("repo/packs") {
        for name in rig.names(&format!("repo/packs/{folder}")) {
            let path = format!("repo/packs/{folder}/{name}");
            let mut bytes = rig.read(&path);
            let at = bytes.len() - 100;
            bytes[at] ^= 1;
            std::fs::remove_file(rig.path(&path)).unwrap();
            rig.write(&path, &bytes);
        }
    }
    let text = stderr(&rig.code(3, &["restore", "a", "b.raw"]));
    assert!(text.contains("copy of its directory in the index"), "{text}");
    assert_eq!(rig.read("b.raw")[..content.len()], content);
    rig.code(5, &["verify"]);
    rig.code(5, &["scrub"]);
    rig.run(&["repair"]);
    rig.ok(&["verify"]);
    rig.ok(&["scrub"]);
    rig.ok(&["restore", "a", "c.raw"]);
    assert_eq!(rig.read("c.raw")[..content.len()], content);
}
