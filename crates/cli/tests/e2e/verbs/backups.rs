//! Backups of single disks: restores return every source, size and name unchanged.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::Stdio;

use serde_json::Value;

use crate::host::{system, text};
use crate::program::stderr;
use crate::rig::{Rig, assert_code, noise};

const MIB: usize = 1 << 20;

#[test]
fn disks_of_every_size_are_restored() {
    let rig = Rig::new();
    let sizes = [0, 1, 511, 4096, 4097, 3 * MIB + 77];
    let names: Vec<String> = sizes.iter().map(|size| format!("d{size}.raw")).collect();
    for (name, size) in names.iter().zip(sizes) {
        rig.write(name, &noise(size, size as u64));
    }
    let mut words = vec!["backup", "--machine", "sizes"];
    words.extend(names.iter().map(String::as_str));
    let report = rig.report(&words);
    assert_eq!(report["snapshot"]["disks"].as_array().unwrap().len(), sizes.len());
    assert_eq!(report["snapshot"]["machine"], "sizes");
    std::fs::create_dir(rig.path("out")).unwrap();
    rig.ok(&["restore", "sizes", "out"]);
    for name in &names {
        assert!(rig.read(name) == rig.read(&format!("out/{name}")), "{name}");
    }
    assert_eq!(rig.names("out").len(), sizes.len());
    let listed = rig.ok(&["list"]);
    assert!(listed.contains("sizes") && listed.contains("3.0 MiB"), "{listed}");
    let shown = rig.ok(&["show", "sizes:d4097"]);
    assert!(shown.contains("4,097 bytes") && !shown.contains("d4096"), "{shown}");
}

#[test]
fn holes_are_not_read_and_restored_as_holes() {
    let rig = Rig::new();
    let file = File::create(rig.path("web1.img")).unwrap();
    file.set_len(512 << 20).unwrap();
    rustix::io::pwrite(&file, &noise(MIB, 1), 300 << 20).unwrap();
    let report = rig.report(&["backup", "web1.img"]);
    assert_eq!(report["read_bytes"], MIB);
    assert_eq!(report["snapshot"]["machine"], "web1");
    let again = rig.report(&["backup", "web1.img"]);
    assert_eq!(again["changed_bytes"], 0);
    rig.ok(&["restore", "web1", "out.raw"]);
    let (source, restored) = (
        std::fs::metadata(rig.path("web1.img")).unwrap(),
        std::fs::metadata(rig.path("out.raw")).unwrap(),
    );
    assert_eq!(restored.len(), source.len());
    assert!(restored.blocks() <= source.blocks() + 64, "{}", restored.blocks());
    let verified = rig.report(&["verify", "web1", "--against", "out.raw"]);
    assert_eq!(verified["compared_bytes"], 512 << 20);
}

#[test]
fn a_stream_is_backed_up_and_restored() {
    let rig = Rig::new();
    let bytes = noise(5 * MIB + 3, 2);
    assert_code(&rig.run_with(&["backup", "-m", "st", "memory=-"], &bytes), 0, &[]);
    assert!(rig.code(0, &["restore", "st:memory", "-"]).stdout == bytes);
    assert_code(&rig.run_with(&["backup", "-m", "none", "-"], b""), 0, &[]);
    assert_eq!(rig.code(0, &["restore", "none", "-"]).stdout, b"");
    let (kind, _) = rig.error(2, &["backup", "-"]);
    assert_eq!(kind, "usage", "a stream has no name of its own");
    let (kind, _) = rig.error(2, &["backup", "-m", "x", "a=-", "b=-"]);
    assert_eq!(kind, "usage");
}

/// A backup of a restored qcow2 image has the same disk.
#[test]
fn a_restored_qcow2_image_can_be_backed_up() {
    let rig = Rig::new();
    let mut bytes = vec![0; 10 * MIB];
    bytes[2 * MIB..4 * MIB].copy_from_slice(&noise(2 * MIB, 3));
    rig.write("web1.raw", &bytes);
    rig.ok(&["backup", "web1.raw"]);
    rig.ok(&["restore", "web1", "web1.qcow2"]);
    assert!(rig.read("web1.qcow2").starts_with(b"QFI\xfb"));
    let report = rig.report(&["backup", "--machine", "other", "web1.qcow2"]);
    assert_eq!(report["snapshot"]["disks"][0]["notes"]["format"], "qcow2");
    assert_eq!(report["snapshot"]["disks"][0]["size_bytes"], bytes.len());
    assert_eq!(report["snapshot"]["disks"][0]["new_bytes"], 0, "all chunks were known");
    rig.ok(&["restore", "other", "out.raw"]);
    assert!(rig.read("out.raw") == bytes);
    // An in-place restore into the image.
    bytes[3 * MIB] ^= 1;
    rig.write("web1.raw", &bytes);
    rig.ok(&["backup", "web1.raw"]);
    let restored = rig.report(&["restore", "web1", "web1.qcow2", "--in-place"]);
    assert_eq!(restored["disks"][0]["written_bytes"], 4096);
    rig.ok(&["verify", "web1", "--against", "web1.qcow2"]);
}

/// A guest that owns a raw disk can write a qcow2 header into it that names any file of the host.
#[test]
fn a_raw_disk_with_an_image_header_stays_raw() {
    let rig = Rig::new();
    rig.write("web1.img", &noise(MIB, 4));
    rig.ok(&["backup", "web1.img"]);
    rig.ok(&["restore", "web1", "evil.qcow2"]);
    rig.write("web1.img", &rig.read("evil.qcow2"));
    let (kind, text) = rig.error(1, &["backup", "web1.img"]);
    assert_eq!(kind, "refused", "{text}");
    let report = rig.report(&["backup", "web1.img", "--format", "raw"]);
    assert_eq!(report["snapshot"]["disks"][0]["notes"]["format"], "raw");
    rig.ok(&["restore", "web1", "same.img"]);
    assert!(rig.read("same.img") == rig.read("web1.img"));
}

#[test]
fn two_images_of_one_name_are_warned_about() {
    let rig = Rig::new();
    rig.write("a/disk.raw", &noise(9000, 5));
    rig.write("b/disk.raw", &noise(9000, 6));
    rig.ok(&["backup", "a/disk.raw"]);
    let output = rig.code(3, &["backup", "b/disk.raw"]);
    let message = stderr(&output);
    assert!(
        message.contains("/a/disk.raw") && message.contains("/b/disk.raw") && message.contains("--machine"),
        "{message}"
    );
    rig.ok(&["backup", "b/disk.raw"]);
    let both = rig.report(&["backup", "--machine", "both", "a/disk.raw", "b/disk.raw"]);
    assert_eq!(both["snapshot"]["disks"][0]["name"], "disk");
    assert_eq!(both["snapshot"]["disks"][1]["name"], "disk-2");
}

/// The program reads disks in order: when it reads its standard input, it has read the file before.
#[test]
fn a_disk_that_is_written_while_it_is_read_gives_a_warning() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(MIB, 7));
    let words = ["backup", "web1.raw", "late=-"];
    let mut child = rig.command(&words).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&noise(2 * MIB, 8)).unwrap();
    let file = File::options().write(true).open(rig.path("web1.raw")).unwrap();
    rustix::io::pwrite(&file, b"written by the guest", 5000).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_code(&output, 3, &words);
    assert!(
        stderr(&output).contains("changed while it was read"),
        "{}",
        stderr(&output)
    );
    assert_eq!(rig.snapshot_count(), 1);
}

#[test]
fn the_remaining_data_of_a_shrinking_disk_is_stored() {
    let rig = Rig::new();
    let bytes = noise(8 * MIB, 9);
    rig.write("web1.raw", &bytes);
    let words = ["backup", "--machine", "web1", "early=-", "web1.raw"];
    let mut child = rig.command(&words).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&noise(2 * MIB, 8)).unwrap();
    let file = File::options().write(true).open(rig.path("web1.raw")).unwrap();
    file.set_len(5_000_000).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert_code(&output, 3, &words);
    rig.ok(&["restore", "web1:web1", "out.raw"]);
    let restored = rig.read("out.raw");
    assert_eq!(restored.len(), bytes.len());
    assert!(restored[..5_000_000] == bytes[..5_000_000]);
    assert!(restored[5_000_000..].iter().all(|byte| *byte == 0));
}

#[test]
fn diff_names_the_ranges_that_changed() {
    let rig = Rig::new();
    let mut bytes = noise(3 * MIB, 10);
    rig.write("web1.raw", &bytes);
    rig.ok(&["backup", "web1.raw"]);
    let first = rig.report(&["list"])["snapshots"][0]["id"].as_str().unwrap().to_owned();
    bytes[MIB] ^= 1;
    bytes[MIB + 4096..MIB + 9000].fill(7);
    bytes[2 * MIB + 5] ^= 1;
    rig.write("web1.raw", &bytes);
    rig.ok(&["backup", "web1.raw"]);
    let disk = rig.report(&["diff", &first, "web1"])["disks"][0].clone();
    assert_eq!(disk["changed_bytes"], 4 * 4096);
    assert_eq!(disk["ranges"], serde_json::json!([[MIB, 3 * 4096], [2 * MIB, 4096]]));
    let text = rig.ok(&["diff", &first, "web1:web1", "--ranges"]);
    assert!(
        text.contains("web1 1048576 12288") && text.contains("16.0 KiB"),
        "{text}"
    );
    assert_eq!(rig.report(&["diff", "web1", "web1"])["disks"][0]["range_count"], 0);
}

/// A slow stream is reported as the bottleneck.
#[test]
fn a_slow_source_is_the_bottleneck() {
    let rig = Rig::new();
    let mut child = rig
        .command(&["backup", "-m", "slow", "-", "--json"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // Slow enough for the source to be the bottleneck on a busy host, too.
    for seed in 0..15 {
        std::io::Write::write_all(&mut stdin, &noise(10_000, seed)).unwrap();
        holdfast_block::Clock::sleep(
            &holdfast_block::SystemClock::new(),
            std::time::Duration::from_millis(400),
        );
    }
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["report"]["bottleneck"], "source", "{document}");
}

/// Statistics count the bytes of the disk, not those of its last block.
#[test]
fn changed_bytes_do_not_exceed_the_size_of_the_disk() {
    let rig = Rig::new();
    for (size, old, new) in [(1_usize, 1_u8, 2_u8), (5000, 1, 2), (5000, 1, 0)] {
        let machine = format!("m{size}-{new}");
        let mut bytes = noise(size, 3);
        for last in [old, new] {
            *bytes.last_mut().unwrap() = last;
            bytes[4096.min(size - 1)..].fill(last);
            rig.write("disk.raw", &bytes);
            rig.ok(&["backup", "-m", &machine, "disk.raw"]);
        }
        let snapshots = rig.report(&["list", &machine])["snapshots"].clone();
        let ids: Vec<&str> = (0..2).map(|number| snapshots[number]["id"].as_str().unwrap()).collect();
        let counted = |number: usize, name: &str| snapshots[number]["disks"][0][name].as_u64().unwrap();
        let all = ["zero_bytes", "unchanged_bytes", "known_bytes", "new_bytes"];
        for number in 0..2 {
            let sum: u64 = all.iter().map(|name| counted(number, name)).sum();
            assert_eq!(sum, size as u64, "{snapshots}");
        }
        let changed = rig.report(&["diff", ids[0], ids[1]])["disks"][0]["changed_bytes"]
            .as_u64()
            .unwrap();
        assert_eq!(changed, if size == 1 { 1 } else { 904 });
    }
    let stats = rig.report(&["stats"]);
    assert!(
        stats["data_bytes"].as_u64() <= stats["logical_bytes"].as_u64(),
        "{stats}"
    );
}

#[test]
fn a_dry_run_reports_the_data_to_read_and_stores_nothing() {
    let rig = Rig::new();
    rig.write("web1.raw", &noise(3 * MIB, 1));
    let sparse = File::create(rig.path("data.raw")).unwrap();
    sparse.set_len(64 << 20).unwrap();
    let words = [
        "backup",
        "--dry-run",
        "--machine",
        "web1",
        "vda=web1.raw",
        "vdb=data.raw",
    ];
    let objects = || system("find", &[text(&rig.path("repo")), "-type", "f"]).unwrap();
    let before = objects();
    let report = rig.report(&words);
    assert_eq!(report["dry_run"], true);
    let machine = &report["machines"][0];
    assert_eq!(
        (&machine["machine"], &machine["parent"]),
        (&"web1".into(), &Value::Null)
    );
    let disks = machine["disks"].as_array().unwrap();
    assert_eq!((&disks[0]["name"], &disks[1]["name"]), (&"vda".into(), &"vdb".into()));
    assert_eq!(disks[0]["read_bytes"], 3 * MIB);
    assert_eq!(
        (&disks[1]["size_bytes"], &disks[1]["read_bytes"]),
        (&(64 << 20).into(), &0.into())
    );
    assert_eq!(objects(), before);
    // With a parent, the dry run names it. A dry run refuses what a backup refuses.
    rig.ok(&["backup", "--machine", "web1", "vda=web1.raw"]);
    let id = rig.report(&["list"])["snapshots"][0]["id"].clone();
    assert_eq!(rig.report(&words)["machines"][0]["parent"], id);
    let page = rig.ok(&words);
    assert!(page.contains("would back up web1") && page.contains("vdb"), "{page}");
    rig.code(1, &["backup", "--dry-run", "missing.raw"]);
    assert_eq!(rig.snapshot_count(), 1);
}
