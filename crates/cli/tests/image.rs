//! `holdfast image` with QEMU as the peer: each reads images of the other.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
#![expect(clippy::disallowed_methods, reason = "these tests run both programs from outside")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

const DISK_BYTES: u64 = 8 << 20;

fn holdfast(folder: &TempDir, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_holdfast"));
    command.arg("image").args(words).current_dir(folder.path());
    command.env_clear().stdin(Stdio::null()).output().unwrap()
}

fn code(folder: &TempDir, words: &[&str]) -> i32 {
    holdfast(folder, words).status.code().unwrap()
}

/// Runs the program, which must succeed; returns the report of its JSON document.
fn report(folder: &TempDir, words: &[&str]) -> Value {
    let output = holdfast(folder, &[words, &["--json"]].concat());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(0), "{words:?}: {text}");
    serde_json::from_str::<Value>(&text).unwrap()["report"].clone()
}

fn error_kind(folder: &TempDir, words: &[&str]) -> String {
    let output = holdfast(folder, &[words, &["--json"]].concat());
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    document["error"]["kind"].as_str().unwrap_or_default().to_owned()
}

fn qemu_img(folder: &TempDir, words: &[&str]) {
    let output = Command::new("qemu-img")
        .args(words)
        .current_dir(folder.path())
        .output()
        .expect("these tests need qemu-img (Debian package qemu-utils)");
    assert!(
        output.status.success(),
        "qemu-img {words:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A folder with `disk.raw`: text, random data, written zeroes, and holes.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let disk = File::create(folder.path().join("disk.raw")).unwrap();
    disk.set_len(DISK_BYTES).unwrap();
    disk.write_all_at(&b"the quick brown fox ".repeat(20_000), 0).unwrap();
    let mut state = 1_u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    })
    .take(300_001)
    .collect();
    disk.write_all_at(&noise, 3_000_003).unwrap();
    disk.write_all_at(&vec![0; 200_000], 5_000_000).unwrap();
    disk.write_all_at(b"end", DISK_BYTES - 3).unwrap();
    folder
}

fn names(folder: &TempDir) -> Vec<String> {
    let entries = fs::read_dir(folder.path()).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn qemu_reads_converted_images() {
    let folder = folder();
    for (name, options) in [
        ("plain.qcow2", &["--verify"][..]),
        ("old.qcow2", &["--compat", "0.10"]),
        ("small.qcow2", &["--cluster-size", "4K", "--refcount-bits", "1"]),
        ("zlib.qcow2", &["--compress", "--verify"]),
        (
            "zstd.qcow2",
            &["--compress", "--compression", "zstd", "--compression-level", "5"],
        ),
        ("sub.qcow2", &["--extended-l2", "--cluster-size", "128K"]),
    ] {
        let made = report(&folder, &[&["convert", "disk.raw", name], options].concat());
        assert_eq!(made["size_bytes"], DISK_BYTES, "{made}");
        qemu_img(&folder, &["compare", "-f", "raw", "-F", "qcow2", "disk.raw", name]);
        qemu_img(&folder, &["check", "-f", "qcow2", name]);
        assert_eq!(code(&folder, &["compare", "disk.raw", name]), 0, "{name}");
        assert_eq!(code(&folder, &["check", name]), 0, "{name}");
        report(&folder, &["convert", name, "back.raw", "--force", "--verify"]);
        qemu_img(&folder, &["compare", "-f", "raw", "-F", "raw", "disk.raw", "back.raw"]);
    }
    // The text, 400 000 bytes in seven clusters, compresses to almost nothing; the random data keeps its size.
    let length = |name: &str| fs::metadata(folder.path().join(name)).unwrap().len();
    let (plain, zstd) = (length("plain.qcow2"), length("zstd.qcow2"));
    assert!(zstd + 350_000 < plain, "{plain} bytes became {zstd}");
    assert!(!names(&folder).iter().any(|name| name.ends_with(".partial")));
}

#[test]
fn images_of_other_hypervisors_are_written_and_read() {
    let folder = folder();
    let mut from = "disk.raw";
    // Each image is converted from the previous one.
    for (name, format, options) in [
        ("a.vdi", "vdi", &["--verify"][..]),
        ("b.vhd", "vpc", &["--uuid", "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f"]),
        ("c.vhdx", "vhdx", &[]),
        ("c.vmdk", "vmdk", &["--verify"]),
        ("c.hds", "parallels", &["--to", "parallels"]),
        ("d.qcow2", "qcow2", &[]),
        ("e.vdi", "vdi", &["--fixed"]),
        ("f.vhd", "vpc", &["--fixed"]),
        ("g.vhdx", "vhdx", &["--fixed", "--verify"]),
    ] {
        let made = report(&folder, &[&["convert", from, name], options].concat());
        assert_eq!(made["size_bytes"], DISK_BYTES, "{made}");
        qemu_img(&folder, &["compare", "-f", "raw", "-F", format, "disk.raw", name]);
        assert_eq!(code(&folder, &["compare", "disk.raw", name]), 0, "{name}");
        assert_eq!(code(&folder, &["check", name]), 0, "{name}");
        from = name;
    }
    let info = report(&folder, &["info", "b.vhd"]);
    let blocks = &info["images"][0]["blocks"];
    assert_eq!(blocks["uuid"], "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f", "{info}");
    assert_eq!(
        (&blocks["kind"], &info["images"][0]["format"]),
        (&"dynamic".into(), &"vhd".into())
    );

    for (parent, child) in [
        ("a.vdi", "child.vdi"),
        ("b.vhd", "child.vhd"),
        ("c.vhdx", "child.vhdx"),
        ("c.vmdk", "child.vmdk"),
    ] {
        let made = report(&folder, &["create", child, "--parent", parent]);
        assert_eq!(made["size_bytes"], DISK_BYTES, "{made}");
        assert_eq!(code(&folder, &["compare", "disk.raw", child]), 0, "{child}");
        let info = report(&folder, &["info", "--chain", child]);
        assert_eq!(info["images"][0]["blocks"]["kind"], "differencing", "{info}");
        assert!(info["images"][1]["path"].as_str().unwrap().ends_with(parent), "{info}");
    }
    for words in [
        &["convert", "disk.raw", "x.raw", "--fixed"][..],
        &["convert", "disk.raw", "x.vdi", "--cluster-size", "4K"],
        &["convert", "disk.raw", "x.vdi", "--compress"],
        &["convert", "disk.raw", "x.vhd", "--uuid", "7c0bd2a4"],
        &["create", "x.qcow2", "--parent", "a.vdi"],
        &["convert", "disk.raw", "x.qcow2", "--size", "1G"],
        // Two images with the same identity in a chain.
        &[
            "create",
            "x.vhd",
            "--parent",
            "b.vhd",
            "--uuid",
            "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f",
        ],
        &["identity", "child.vhd", "--set", "7c0bd2a4-0d5e-4f0f-9d2e-5b1c6a7d8e9f"],
        &["create", "x.vhdx", "--parent", "c.vhdx", "--fixed"],
    ] {
        assert_eq!(code(&folder, words), 2, "{words:?}");
    }
    // Children identify a VHDX by its last modification: they are listed, and need no change.
    let shown = report(&folder, &["identity", "c.vhdx"]);
    assert!(
        shown["children"][0].as_str().unwrap().ends_with("child.vhdx"),
        "{shown}"
    );
    let renewed = report(&folder, &["identity", "c.vhdx", "--renew"]);
    assert_eq!(renewed["children"].as_array().unwrap().len(), 0, "{renewed}");
    assert_eq!(code(&folder, &["compare", "disk.raw", "child.vhdx"]), 0);
    // The size is rounded up to whole sectors, and reported.
    fs::write(folder.path().join("odd.raw"), [7; 1000]).unwrap();
    let odd = report(&folder, &["convert", "odd.raw", "odd.vhd"]);
    assert_eq!(odd["size_bytes"], 1024, "{odd}");
    assert_eq!(
        code(&folder, &["create", "x.vhd", "1M", "--parent", "b.vhd"]),
        2,
        "a disk of another size"
    );
    assert_eq!(code(&folder, &["create", "x.vhd", "3T"]), 2, "more than a VHD holds");
    assert!(!names(&folder).iter().any(|name| name.starts_with("x.")));
}

#[test]
fn images_of_qemu_are_read() {
    let folder = folder();
    qemu_img(
        &folder,
        &["convert", "-f", "raw", "-O", "qcow2", "-c", "disk.raw", "peer.qcow2"],
    );
    qemu_img(
        &folder,
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-b",
            "peer.qcow2",
            "-F",
            "qcow2",
            "over.qcow2",
        ],
    );
    assert_eq!(code(&folder, &["compare", "disk.raw", "over.qcow2"]), 0);
    let info = report(&folder, &["info", "--chain", "over.qcow2"]);
    assert_eq!(info["images"].as_array().unwrap().len(), 2, "{info}");
    assert_eq!(info["images"][0]["qcow2"]["backing_file"], "peer.qcow2");
    let alone = report(&folder, &["info", "over.qcow2"]);
    assert_eq!(alone["images"].as_array().unwrap().len(), 1);
}

#[test]
fn a_map_covers_the_disk_and_names_the_files() {
    let folder = folder();
    report(&folder, &["convert", "disk.raw", "disk.qcow2"]);
    for (name, subformat) in [("flat.vmdk", "monolithicFlat"), ("split.vmdk", "twoGbMaxExtentSparse")] {
        let options = format!("subformat={subformat}");
        qemu_img(
            &folder,
            &["convert", "-f", "raw", "-O", "vmdk", "-o", &options, "disk.raw", name],
        );
    }
    let disk = fs::read(folder.path().join("disk.raw")).unwrap();
    for name in ["disk.raw", "disk.qcow2", "flat.vmdk", "split.vmdk"] {
        let map = report(&folder, &["map", name]);
        let files: Vec<Vec<u8>> = map["files"]
            .as_array()
            .unwrap()
            .iter()
            .map(|path| fs::read(folder.path().join(path.as_str().unwrap())).unwrap())
            .collect();
        let mut end = 0;
        for extent in map["extents"].as_array().unwrap() {
            let at = |name: &str| usize::try_from(extent[name].as_u64().unwrap()).unwrap();
            let (offset, length) = (at("offset"), at("length_bytes"));
            assert_eq!(offset, end);
            end += length;
            match extent["kind"].as_str().unwrap() {
                "data" => {
                    let (file, host) = (at("file"), at("host_offset"));
                    assert!(
                        files[file][host..host + length] == disk[offset..end],
                        "{name}: {extent}"
                    );
                }
                _ => assert!(disk[offset..end].iter().all(|byte| *byte == 0), "{name}: {extent}"),
            }
        }
        assert_eq!(end as u64, DISK_BYTES, "{name}");
        let info = report(&folder, &["info", name]);
        let bytes: usize = files.iter().map(Vec::len).sum();
        assert_eq!(info["images"][0]["file_bytes"], bytes, "{info}");
    }
}

#[test]
fn differences_are_found_and_counted() {
    let folder = folder();
    fs::copy(folder.path().join("disk.raw"), folder.path().join("other.raw")).unwrap();
    let other = File::options()
        .write(true)
        .open(folder.path().join("other.raw"))
        .unwrap();
    other.write_all_at(b"XYZ", 4_194_303).unwrap();
    let output = holdfast(&folder, &["compare", "disk.raw", "other.raw", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["report"]["first_difference"], 4_194_303);
    assert_eq!(document["report"]["different_bytes"], 3);
    assert_eq!(document["report"]["different_range_count"], 1);
}

#[test]
fn only_differences_from_the_base_are_stored() {
    let folder = folder();
    report(&folder, &["convert", "disk.raw", "base.qcow2"]);
    let disk = File::options()
        .write(true)
        .open(folder.path().join("disk.raw"))
        .unwrap();
    disk.write_all_at(b"changed", 1 << 20).unwrap();
    disk.write_all_at(&vec![0; 65_536], 0).unwrap();
    let made = report(
        &folder,
        &[
            "convert",
            "disk.raw",
            "over.qcow2",
            "--backing",
            "base.qcow2",
            "--verify",
        ],
    );
    assert_eq!(made["plain_bytes"], 65_536, "{made}");
    qemu_img(
        &folder,
        &["compare", "-f", "raw", "-F", "qcow2", "disk.raw", "over.qcow2"],
    );
    qemu_img(&folder, &["check", "over.qcow2"]);
}

#[test]
fn nothing_is_overwritten_or_left_over() {
    let folder = folder();
    let before = names(&folder);
    fs::create_dir(folder.path().join("sub")).unwrap();
    assert_eq!(error_kind(&folder, &["convert", "disk.raw", "disk.raw"]), "refused");
    assert_eq!(
        error_kind(&folder, &["convert", "disk.raw", "sub", "--force"]),
        "refused"
    );
    assert_eq!(error_kind(&folder, &["convert", "missing", "x.qcow2"]), "io");
    assert_eq!(
        code(&folder, &["convert", "disk.raw", "x.qcow2", "--cluster-size", "3K"]),
        2
    );
    assert_eq!(code(&folder, &["convert", "disk.raw", "x.raw", "--compress"]), 2);
    fs::remove_dir(folder.path().join("sub")).unwrap();
    assert_eq!(names(&folder), before);
    report(&folder, &["create", "x.qcow2", "1M"]);
    assert_eq!(error_kind(&folder, &["convert", "disk.raw", "x.qcow2"]), "exists");
    assert_eq!(
        report(&folder, &["info", "x.qcow2"])["images"][0]["size_bytes"],
        1 << 20
    );
}

#[test]
fn a_full_disk_leaves_nothing() {
    let folder = folder();
    let before = names(&folder);
    // A limit on the file size simulates a full disk; SIGXFSZ is ignored, so that the write fails.
    let output = Command::new("/bin/sh")
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f 100; exec \"$0\" image convert disk.raw new.qcow2",
        ])
        .arg(env!("CARGO_BIN_EXE_holdfast"))
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert_eq!(
        output.status.code(),
        Some(1),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(names(&folder), before);
}

#[test]
fn a_file_elsewhere_is_opened_only_if_allowed() {
    let (folder, elsewhere) = (folder(), tempfile::tempdir().unwrap());
    let secret = elsewhere.path().join("secret.raw");
    fs::copy(folder.path().join("disk.raw"), &secret).unwrap();
    let secret = path_text(&secret);
    qemu_img(
        &folder,
        &["create", "-q", "-f", "qcow2", "-b", secret, "-F", "raw", "evil.qcow2"],
    );
    let convert = ["convert", "evil.qcow2", "copy.raw"];
    assert_eq!(error_kind(&folder, &convert), "refused");
    assert_eq!(names(&folder), ["disk.raw", "evil.qcow2"]);
    report(&folder, &[&convert[..], &["--allow-file", secret]].concat());
    let directory = path_text(elsewhere.path());
    report(
        &folder,
        &[&convert[..], &["--force", "--allow-dir", directory]].concat(),
    );
    assert_eq!(code(&folder, &["compare", "disk.raw", "copy.raw"]), 0);
}

#[test]
fn damage_exits_with_5_and_leaks_with_3() {
    let folder = folder();
    report(&folder, &["convert", "disk.raw", "disk.qcow2"]);
    let image = File::options()
        .read(true)
        .write(true)
        .open(folder.path().join("disk.qcow2"))
        .unwrap();
    let number = |offset: u64| {
        let mut bytes = [0; 8];
        image.read_exact_at(&mut bytes, offset).unwrap();
        u64::from_be_bytes(bytes)
    };
    let (l1, table) = (number(40), number(48));
    let end = image.metadata().unwrap().len();
    image.set_len(end + 65_536).unwrap();
    let block = number(table);
    image
        .write_all_at(&1_u16.to_be_bytes(), block + end.div_ceil(65_536) * 2)
        .unwrap();
    assert_eq!(code(&folder, &["check", "disk.qcow2"]), 3);
    image.write_all_at(&(1_u64 << 40).to_be_bytes(), l1).unwrap();
    assert_eq!(code(&folder, &["check", "disk.qcow2"]), 5);
}

fn path_text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}
