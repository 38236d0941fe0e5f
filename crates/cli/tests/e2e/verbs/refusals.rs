//! Refused commands: the error has the reason and the advice.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt as _;
use std::path::Path;

use holdfast_test_kit::copy_program;

use crate::program::stderr;
use crate::rig::{Rig, assert_code, noise};

#[test]
fn a_missing_repository_is_distinguished_from_other_content() {
    let rig = Rig::empty();
    assert_eq!(rig.error(1, &["list"]).0, "no-such-repository");
    std::fs::create_dir(rig.path("repo")).unwrap();
    let (kind, text) = rig.error(1, &["list"]);
    assert_eq!(kind, "no-such-repository");
    assert!(text.contains("holdfast init"), "{text}");
    rig.write("repo/holiday.jpg", b"x");
    assert_eq!(rig.error(1, &["init", "--no-encryption"]).0, "exists");
    assert_eq!(rig.names("repo"), ["holiday.jpg"]);
    assert_eq!(rig.error(2, &["list", "-r", "s3:bucket"]).0, "unsupported");
    let rig = Rig::new();
    assert_eq!(rig.error(1, &["init", "--no-encryption"]).0, "exists");
    let location = format!("file://{}", rig.path("repo").display());
    assert_eq!(rig.json(0, &["list", "-r", &location])["status"], "ok");
}

/// Ignoring an option would be dangerous if it says that nothing must be changed.
#[test]
fn machine_options_are_refused_for_a_restore_to_a_file() {
    let rig = Rig::new();
    rig.write("a.raw", &noise(5000, 1));
    rig.ok(&["backup", "a.raw"]);
    rig.write("b.raw", &noise(5000, 2));
    for option in [
        "--start",
        "--live",
        "--resume",
        "--keep-identity",
        "--name=x",
        "--connect=test:///default",
    ] {
        let output = rig.code(2, &["restore", "a", "b.raw", "--in-place", option]);
        let name = option.split('=').next().unwrap();
        assert!(stderr(&output).contains(name), "{}", stderr(&output));
    }
    assert!(rig.read("b.raw") == noise(5000, 2));
}

#[test]
fn unknown_names_are_reported_with_similar_ones() {
    let rig = Rig::new();
    assert_eq!(rig.error(1, &["show", "web1"]).0, "not-found");
    rig.write("web1.raw", b"x");
    rig.ok(&["backup", "web1.raw"]);
    let (kind, text) = rig.error(1, &["restore", "wbe1", "out.raw"]);
    assert_eq!(kind, "not-found");
    assert!(text.contains("web1"), "{text}");
    let (kind, text) = rig.error(1, &["restore", "web1:vdb", "out.raw"]);
    assert_eq!(kind, "not-found");
    assert!(text.contains("web1"), "{text}");
    assert_eq!(rig.error(1, &["backup", "nothing.raw"]).0, "io");
    assert_eq!(rig.names("."), ["repo", "web1.raw"]);
    assert_eq!(rig.snapshot_count(), 1);
}

pub(super) fn open_to_all(path: &Path) {
    let is_folder = path.is_dir();
    let mode = if is_folder { 0o755 } else { 0o644 };
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    if is_folder {
        for entry in std::fs::read_dir(path).unwrap() {
            open_to_all(&entry.unwrap().path());
        }
    }
}

/// Root can write everywhere, so a test that runs as root starts the program as the user nobody.
#[test]
fn a_repository_without_write_permission_can_be_read() {
    const NOBODY: u32 = 65_534;
    let rig = Rig::new();
    let bytes = noise(50_000, 1);
    rig.write("web1.raw", &bytes);
    rig.ok(&["backup", "web1.raw"]);
    open_to_all(&rig.path("."));
    copy_program(Path::new(env!("CARGO_BIN_EXE_holdfast")), &rig.path("program"));
    if !rustix::process::geteuid().is_root() {
        for folder in ["repo", "repo/snapshots", "repo/writers", "repo/tmp", "repo/index"] {
            std::fs::set_permissions(rig.path(folder), PermissionsExt::from_mode(0o555)).unwrap();
        }
    }
    let run = |words: &[&str]| {
        #[expect(clippy::disallowed_methods, reason = "the program runs as another user")]
        let mut command = std::process::Command::new(rig.path("program"));
        command
            .args(words)
            .env_clear()
            .env("HOLDFAST_REPOSITORY", rig.path("repo"));
        command.current_dir(rig.path("."));
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.output().unwrap()
    };
    assert_code(&run(&["list"]), 0, &["list"]);
    let restored = run(&["restore", "web1", "-"]);
    assert_code(&restored, 0, &["restore"]);
    assert!(restored.stdout == bytes);
    assert_code(&run(&["verify"]), 0, &["verify"]);
    let refused = run(&["backup", "web1.raw"]);
    assert_code(&refused, 1, &["backup"]);
    assert!(stderr(&refused).contains("not permitted"), "{}", stderr(&refused));
}

/// "No such file" without the name would mislead the user.
#[test]
fn a_missing_backing_file_is_reported_with_its_image() {
    let rig = Rig::new();
    assert!(rig.ok(&["list"]).contains("no snapshots yet"));
    rig.ok(&["image", "create", "base.qcow2", "1M"]);
    rig.ok(&["image", "create", "over.qcow2", "--backing", "base.qcow2"]);
    std::fs::remove_file(rig.path("base.qcow2")).unwrap();
    for words in [
        &["backup", "over.qcow2"][..],
        &["image", "convert", "over.qcow2", "x.raw"],
    ] {
        let (kind, text) = rig.error(1, words);
        assert_eq!(kind, "io");
        assert!(
            text.contains("on which over.qcow2 is based") && text.contains("base.qcow2"),
            "{text}"
        );
    }
}

/// A file with the name of another type would be stored as a disk that no machine could read.
#[test]
fn archives_and_settings_are_refused_as_images() {
    let rig = Rig::new();
    for (name, hint) in [
        ("lab.vbox", "vbox:"),
        ("web1.ova", "holdfast import"),
        ("web1.XVA.zst", "holdfast import"),
        ("web1.vma.lzo", "holdfast import"),
    ] {
        rig.write(name, b"something");
        let (kind, message) = rig.error(2, &["backup", name]);
        assert!(kind == "usage" && message.contains(hint), "{message}");
    }
    rig.ok(&["backup", "web1.ova", "--format", "raw"]);
}
