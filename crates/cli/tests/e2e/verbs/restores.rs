//! Restores: existing files are not lost by mistake, and no partial image is left.

use std::io::Read as _;
use std::process::Stdio;

use crate::program::stderr;
use crate::rig::{Rig, assert_code, noise};

const MIB: usize = 1 << 20;

fn rig_with_snapshot(bytes: &[u8]) -> Rig {
    let rig = Rig::new();
    rig.write("web1.raw", bytes);
    rig.ok(&["backup", "web1.raw"]);
    rig
}

#[test]
fn an_in_place_restore_writes_only_differences() {
    let bytes = noise(4 * MIB + 100, 1);
    let rig = rig_with_snapshot(&bytes);
    let mut other = bytes.clone();
    other[MIB] ^= 1;
    *other.last_mut().unwrap() ^= 1;
    rig.write("target.raw", &other);
    let disk = rig.report(&["restore", "web1", "target.raw", "--in-place"])["disks"][0].clone();
    assert_eq!(disk["written_bytes"], 4096 + 100);
    assert!(rig.read("target.raw") == bytes);
    let again = rig.report(&["restore", "web1", "target.raw", "--in-place"])["disks"][0].clone();
    assert_eq!(
        (again["written_bytes"].as_u64(), again["equal_bytes"].as_u64()),
        (Some(0), Some(bytes.len() as u64))
    );
}

/// A dry run reports what the restore then writes, and leaves every target unchanged.
#[test]
fn a_dry_run_writes_nothing_and_counts_the_same() {
    let bytes = noise(4 * MIB + 100, 3);
    let rig = rig_with_snapshot(&bytes);
    let mut other = bytes.clone();
    other[MIB] ^= 1;
    rig.write("target.raw", &other);
    let counts = |words: &[&str]| {
        let report = rig.report(&[&["restore", "web1"], words].concat());
        let disk = &report["disks"][0];
        let counts = ["written_bytes", "equal_bytes", "zero_bytes"].map(|name| disk[name].as_u64().unwrap());
        (report["dry_run"].as_bool().unwrap(), counts)
    };
    for words in [
        &["target.raw", "--in-place"][..],
        &["target.raw", "--force"],
        &["new.qcow2"],
    ] {
        let (is_dry, planned) = counts(&[words, &["--dry-run"]].concat());
        assert!(is_dry);
        assert!(rig.read("target.raw") == other);
        assert_eq!(rig.names("."), ["repo", "target.raw", "web1.raw"]);
        assert_eq!(counts(words), (false, planned), "{words:?}");
        rig.write("target.raw", &other);
    }
    // A dry run refuses what a restore refuses.
    assert_eq!(
        rig.error(1, &["restore", "web1", "target.raw", "--dry-run"]).0,
        "exists"
    );
    rig.write("small.raw", b"small");
    assert_eq!(
        rig.error(1, &["restore", "web1", "small.raw", "--in-place", "-n"]).0,
        "no-space"
    );
    rig.code(2, &["restore", "web1", "-", "--dry-run"]);
}

/// The snapshot has the configuration beside the disk, which does not count as a disk.
#[test]
fn a_single_disk_is_verified_and_restored_without_its_name() {
    let bytes = noise(MIB, 5);
    let rig = rig_with_snapshot(&bytes);
    rig.code(3, &["export", "web1", "web1.xva"]);
    rig.ok(&["import", "web1.xva", "--machine", "web2"]);
    let disks = rig.report(&["show", "web2"])["snapshot"]["disks"].clone();
    assert!(disks.as_array().unwrap().len() > 1, "{disks}");
    rig.ok(&["verify", "web2", "--against", "web1.raw"]);
    rig.ok(&["restore", "web2", "web2.raw"]);
    assert!(rig.read("web2.raw") == bytes);
}

#[test]
fn an_existing_target_is_kept_without_force() {
    let bytes = noise(20_000, 2);
    let rig = rig_with_snapshot(&bytes);
    rig.write("precious.raw", b"precious");
    let (kind, text) = rig.error(1, &["restore", "web1", "precious.raw"]);
    assert_eq!(kind, "exists");
    assert!(text.contains("--in-place") && text.contains("--force"), "{text}");
    assert_eq!(rig.read("precious.raw"), b"precious");
    let (kind, _) = rig.error(1, &["restore", "web1", "precious.raw", "--in-place"]);
    assert_eq!(kind, "no-space", "the target is too small");
    assert_eq!(rig.read("precious.raw"), b"precious");
    rig.ok(&["restore", "web1", "precious.raw", "--force"]);
    assert!(rig.read("precious.raw") == bytes);
    assert_eq!(rig.names("."), ["precious.raw", "repo", "web1.raw"]);
    let (kind, _) = rig.error(1, &["restore", "web1", "nothing.raw", "--in-place"]);
    assert_eq!(kind, "not-found");
    // One of the files exists in the folder: nothing is written.
    rig.write("many/web1.raw", b"precious");
    assert_eq!(rig.error(1, &["restore", "web1", "many"]).0, "exists");
    assert_eq!(rig.names("many"), ["web1.raw"]);
}

/// An image without a header looks like a raw disk, and restoring into it as raw would make it useless for its machine.
#[test]
fn a_broken_image_is_refused_as_an_in_place_target() {
    let bytes = noise(100 << 10, 4);
    let rig = rig_with_snapshot(&bytes);
    rig.ok(&["restore", "web1", "web1.qcow2"]);
    let whole = rig.read("web1.qcow2");
    let mut broken = whole.clone();
    broken[..512].fill(0xEE);
    rig.write("web1.qcow2", &broken);
    let (kind, text) = rig.error(1, &["restore", "web1", "web1.qcow2", "--in-place"]);
    assert!(kind == "refused" && text.contains("--force instead"), "{kind}: {text}");
    // An image that is marked as corrupt.
    let mut marked = whole;
    marked[79] |= 2;
    rig.write("web1.qcow2", &marked);
    let (_, text) = rig.error(1, &["restore", "web1", "web1.qcow2", "--in-place"]);
    assert!(text.contains("--force instead"), "{text}");
    assert!(rig.read("web1.qcow2") == marked);
    rig.ok(&["restore", "web1", "web1.qcow2", "--force"]);
    rig.ok(&["image", "convert", "web1.qcow2", "out.raw"]);
    assert!(rig.read("out.raw") == bytes);
}

/// Users who could read a restored disk could read data that the repository encrypts.
#[test]
fn restored_disks_are_readable_by_their_owner_only() {
    let rig = rig_with_snapshot(&noise(20_000, 7));
    for target in ["out.raw", "out.qcow2"] {
        rig.ok(&["restore", "web1", target]);
        let mode = std::os::unix::fs::PermissionsExt::mode(&rig.path(target).metadata().unwrap().permissions());
        assert_eq!(mode & 0o777, 0o600, "{target}");
    }
    rig.ok(&["image", "convert", "out.raw", "copy.qcow2"]);
    let mode = std::os::unix::fs::PermissionsExt::mode(&rig.path("copy.qcow2").metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_larger_target_keeps_its_end_with_a_warning() {
    let bytes = noise(20_000, 3);
    let rig = rig_with_snapshot(&bytes);
    rig.write("large.raw", &vec![7; 30_000]);
    let output = rig.code(3, &["restore", "web1", "large.raw", "--in-place"]);
    assert!(stderr(&output).contains("last 10000 bytes"), "{}", stderr(&output));
    let target = rig.read("large.raw");
    assert!(target[..20_000] == bytes && target[20_000..] == [7; 10_000]);
}

#[test]
fn damage_is_reported_and_leaves_no_partial_image() {
    let bytes = noise(3 * MIB, 4);
    let rig = rig_with_snapshot(&bytes);
    let packs = rig.path("repo/packs");
    let mut largest = (0, std::path::PathBuf::new());
    for fan_out in std::fs::read_dir(packs).unwrap() {
        for pack in std::fs::read_dir(fan_out.unwrap().path()).unwrap() {
            let pack = pack.unwrap();
            largest = largest.max((pack.metadata().unwrap().len(), pack.path()));
        }
    }
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&largest.1)
        .unwrap();
    let mut byte = [0];
    rustix::io::pread(&file, &mut byte, largest.0 / 2).unwrap();
    rustix::io::pwrite(&file, &[byte[0] ^ 1], largest.0 / 2).unwrap();

    let (kind, text) = rig.error(5, &["restore", "web1", "out.raw"]);
    assert_eq!(kind, "damage", "{text}");
    assert!(text.contains("packs/"), "the file is named: {text}");
    assert_eq!(rig.names("."), ["repo", "web1.raw"]);
    let (kind, _) = rig.error(5, &["restore", "web1", "web1.raw", "--force"]);
    assert_eq!(kind, "damage");
    assert!(rig.read("web1.raw") == bytes, "the image to be replaced is still there");
    for verb in [&["verify"][..], &["scrub"]] {
        let document = rig.json(5, verb);
        let touched = &document["report"]["findings"][0]["touches"][0];
        assert_eq!(
            (touched["machine"].as_str(), touched["disk"].as_str()),
            (Some("web1"), Some("web1")),
            "{document}"
        );
    }
    assert!(rig.run(&["restore", "web1", "-"]).status.code() == Some(5));

    // A backup stores the data again, and a repair restores the old snapshot.
    assert_eq!(rig.json(5, &["repair", "--dry-run"])["report"]["dry_run"], true);
    rig.json(5, &["repair"]);
    rig.run(&["backup", "web1.raw"]);
    rig.run(&["repair"]);
    rig.ok(&["verify"]);
    rig.ok(&["restore", "web1", "out.raw"]);
    assert!(rig.read("out.raw") == bytes);
}

#[test]
fn an_undamaged_repository_verifies() {
    let rig = rig_with_snapshot(&noise(MIB, 5));
    let report = rig.report(&["verify"]);
    assert_eq!(
        (report["snapshot_count"].as_u64(), report["decoded_bytes"].as_u64()),
        (Some(1), Some(MIB as u64))
    );
    assert_eq!(rig.report(&["scrub"])["damaged_pack_count"], 0);
    rig.write("web1.raw", &noise(MIB, 6));
    let document = rig.json(5, &["verify", "web1", "--against", "web1.raw"]);
    assert_eq!(document["report"]["findings"][0]["kind"], "differs");
    let figures = rig.ok(&["stats"]);
    assert!(figures.contains("1.0 MiB"), "{figures}");
}

/// Regression: reading does not prevent the removal of a snapshot; the missing packs were then reported as damage.
#[test]
fn a_removal_during_a_restore_is_not_reported_as_damage() {
    let rig = rig_with_snapshot(&noise(40 * MIB, 4));
    let snapshots = rig.report(&["list"])["snapshots"].clone();
    let id = snapshots[0]["id"].as_str().unwrap();
    let words = ["restore", "web1", "-"];
    let mut command = rig.command(&words);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    // The restore has begun, and waits until more output is read.
    stdout.read_exact(&mut [0]).unwrap();
    rig.ok(&["forget", id]);
    rig.ok(&["gc"]);
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    assert!(rest.len() < 40 * MIB - 1, "the whole disk was read ahead");
    let output = child.wait_with_output().unwrap();
    assert_code(&output, 1, &words);
    let message = stderr(&output);
    assert!(
        message.contains("there is no snapshot") && !message.contains("missing"),
        "{message}"
    );
}
