//! A file system that is full or read-only: a clear error, no partial files, and no damage.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::symlink;

use crate::host::{SmallFileSystem, small_file_system};
use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;
const FILE_SYSTEM_BYTES: u64 = 64 << 20;

/// A rig whose repository is on a small file system, mounted at `small`. The file system is the second value, so that
/// it is unmounted before the folder is deleted.
fn rig_on_small_file_system() -> Option<(Rig, SmallFileSystem)> {
    let rig = Rig::empty();
    let small = small_file_system(&rig.path("small"), FILE_SYSTEM_BYTES)?;
    std::fs::create_dir(rig.path("small/repo")).unwrap();
    symlink(rig.path("small/repo"), rig.path("repo")).unwrap();
    rig.ok(&["init", "--no-encryption"]);
    Some((rig, small))
}

/// Uses all free space, to the last block.
fn fill(rig: &Rig) {
    for (name, length) in [("filler", 1 << 16), ("filler-2", 512)] {
        let mut file = File::create(rig.path("small").join(name)).unwrap();
        while file.write_all(&vec![1; length]).is_ok() {}
    }
}

fn empty(rig: &Rig) {
    for name in ["filler", "filler-2"] {
        std::fs::remove_file(rig.path("small").join(name)).unwrap();
    }
}

fn assert_no_space(rig: &Rig, words: &[&str], says: &[&str]) {
    let (kind, text) = rig.error(1, words);
    assert_eq!(kind, "no-space", "{words:?}: {text}");
    for part in says {
        assert!(text.contains(part), "{words:?}: {part:?} is missing: {text}");
    }
}

fn id_of(rig: &Rig, machine: &str) -> String {
    let report = rig.report(&["show", machine]);
    report["snapshot"]["id"].as_str().unwrap().to_owned()
}

/// The error of a failed export names the target and a remedy: for a file, a pipe, and a temporary file.
#[test]
fn a_failed_export_names_the_full_target() {
    let Some((rig, _small)) = rig_on_small_file_system() else {
        return;
    };
    rig.write("a.raw", &noise(24 * MIB, 7));
    rig.ok(&["backup", "a.raw", "--machine", "web1"]);
    std::fs::create_dir(rig.path("small/tmp")).unwrap();
    fill(&rig);
    for kind in ["xva", "ova", "vma"] {
        let target = format!("small/web1.{kind}");
        let (_, text) = rig.error(1, &["export", "web1", &target]);
        assert!(text.contains(&format!("write {target}")), "{text}");
        assert!(!text.contains("offset") && !text.contains("--in-place"), "{text}");
        assert_no_space(&rig, &["export", "web1", &target], &["free space"]);
        assert!(!rig.path(&target).exists());
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut command = rig.command(&["export", "web1", "-", "--format", kind]);
        let output = command.stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let text = stderr(&output);
        assert!(
            text.contains("write to standard output") && text.contains("free space"),
            "{text}"
        );
    }
    // A package is written to a pipe by way of a temporary file.
    let mut command = rig.command(&["export", "web1", "-", "--format", "ova"]);
    let output = command.env("TMPDIR", rig.path("small/tmp")).output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("small/tmp") && text.contains("set TMPDIR"), "{text}");
    assert!(rig.names("small/tmp").is_empty());
    // An existing target.
    rig.write("web1.xva", b"");
    let (kind, text) = rig.error(1, &["export", "web1", "web1.xva"]);
    assert!(
        kind == "exists" && text.contains("--force") && !text.contains("--in-place"),
        "{text}"
    );
}

#[test]
fn a_full_disk_leaves_no_partial_file_and_damages_nothing() {
    let Some((rig, _small)) = rig_on_small_file_system() else {
        return;
    };
    for (name, length) in [("a", 16), ("b", 60), ("c", 3)] {
        rig.write(&format!("{name}.raw"), &noise(length * MIB, length as u64));
    }
    rig.ok(&["backup", "a.raw"]);
    assert_no_space(&rig, &["backup", "b.raw"], &["repo", "holdfast gc"]);
    assert_eq!(rig.snapshot_count(), 1);
    assert_eq!((rig.names("repo/writers"), rig.names("repo/tmp")), (vec![], vec![]));
    rig.ok(&["verify"]);
    rig.ok(&["backup", "c.raw"]);

    let before = rig.names("small");
    for target in ["small/b.qcow2", "small/b.raw"] {
        assert_no_space(&rig, &["image", "convert", "b.raw", target], &[target, "free space"]);
        assert_eq!(rig.names("small"), before, "no partial file of {target} is left");
    }
    fill(&rig);
    let before = rig.names("small");
    for target in ["small/a.raw", "small/a.qcow2"] {
        assert_no_space(&rig, &["restore", "a", target], &[target, "free space"]);
        assert_eq!(rig.names("small"), before, "no partial file of {target} is left");
    }
    assert_no_space(&rig, &["backup", "-m", "d", "b.raw"], &["repo", "holdfast gc"]);
    assert_eq!(rig.snapshot_count(), 2);
    rig.ok(&["verify"]);
    rig.ok(&["scrub"]);
    rig.ok(&["restore", "a", "a-again.raw"]);
    assert!(rig.read("a-again.raw") == rig.read("a.raw"));

    // The repository itself frees space.
    rig.ok(&["forget", &id_of(&rig, "c")]);
    let report = rig.report(&["gc"]);
    assert!(
        report["done"]["freed_bytes"].as_u64().unwrap() > 3 * MIB as u64,
        "{report}"
    );
    rig.ok(&["verify"]);
    rig.write("c.raw", &noise(MIB, 99));
    rig.ok(&["backup", "c.raw"]);
    rig.ok(&["restore", "c", "c-again.raw"]);
    assert!(rig.read("c-again.raw") == rig.read("c.raw"));
    empty(&rig);
    rig.ok(&["scrub"]);
}

/// Partly used packs are rewritten, which needs space.
#[test]
fn gc_on_a_full_disk_frees_what_it_can_and_loses_nothing() {
    let Some((rig, _small)) = rig_on_small_file_system() else {
        return;
    };
    let mut bytes = noise(24 * MIB, 1);
    rig.write("a.raw", &bytes);
    rig.ok(&["backup", "a.raw"]);
    let first = id_of(&rig, "a");
    bytes[..14 * MIB].copy_from_slice(&noise(14 * MIB, 2));
    rig.write("a.raw", &bytes);
    rig.ok(&["backup", "a.raw"]);
    fill(&rig);
    rig.ok(&["forget", &first]);
    let output = rig.run(&["gc"]);
    match output.status.code() {
        Some(0) => {}
        Some(1) => assert!(stderr(&output).contains("--repack-below 0"), "{}", stderr(&output)),
        code => panic!("{code:?}: {}", stderr(&output)),
    }
    rig.ok(&["verify"]);
    rig.ok(&["gc", "--repack-below", "0"]);
    empty(&rig);
    rig.ok(&["gc"]);
    // gc may have deleted segments of the index to get space; a backup writes them again.
    rig.ok(&["backup", "a.raw"]);
    rig.ok(&["scrub"]);
    let stored = rig.report(&["stats"])["stored_bytes"].as_u64().unwrap();
    assert!(stored < 30 * MIB as u64, "{stored} bytes are left");
    rig.ok(&["restore", "a", "out.raw"]);
    assert!(rig.read("out.raw") == bytes);
}

#[test]
fn a_read_only_repository_can_be_read() {
    let Some((rig, small)) = rig_on_small_file_system() else {
        return;
    };
    let bytes = noise(2 * MIB, 1);
    rig.write("a.raw", &bytes);
    rig.ok(&["backup", "a.raw"]);
    small.remount("ro");
    for words in [
        &["list"][..],
        &["show", "a"],
        &["verify"],
        &["scrub"],
        &["stats"],
        &["gc", "--dry-run"],
        &["key", "list"],
        &["restore", "a", "out.raw"],
    ] {
        rig.ok(words);
    }
    assert!(rig.read("out.raw") == bytes);
    for words in [
        &["backup", "a.raw"][..],
        &["gc"],
        &["forget", &id_of(&rig, "a")],
        &["protect", "a"],
    ] {
        let (kind, text) = rig.error(1, words);
        assert_eq!(kind, "permission", "{words:?}: {text}");
        assert!(text.contains("read-only") && text.contains("repo"), "{words:?}: {text}");
        assert!(text.contains("can still be read"), "{words:?}: {text}");
    }
    small.remount("rw");
    rig.ok(&["backup", "a.raw"]);
}
