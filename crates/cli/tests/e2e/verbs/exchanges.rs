//! Machines in archives of other hypervisors, and packed streams.

use std::process::Stdio;
use std::time::Duration;

use holdfast_block::{Clock as _, SeededRandom, SystemClock};

use crate::host::{system, text};
use crate::program::stderr;
use crate::rig::{Rig, noise};

const MIB: usize = 1 << 20;

/// A repository with a machine with two disks: one with data and zeroes, and an almost empty one with an odd size.
fn rig_with_machine() -> (Rig, [Vec<u8>; 2]) {
    let rig = Rig::new();
    let mut first = noise(9 * MIB, 11);
    let mut random = SeededRandom::new(12);
    for _ in 0..8 {
        let at = usize::try_from(random.below(9 * MIB as u64 - 600_000)).unwrap();
        first[at..at + 600_000].fill(0);
    }
    first[2 * MIB..5 * MIB].fill(0);
    let mut second = vec![0; 6 * MIB + 700];
    second[4 * MIB + 5..4 * MIB + 9].fill(7);
    rig.write("a.raw", &first);
    rig.write("b.raw", &second);
    rig.ok(&["backup", "--machine", "web1", "vda=a.raw", "vdb=b.raw"]);
    (rig, [first, second])
}

/// Exports the machine, with a warning, because only its disks are known.
fn exported(rig: &Rig, name: &str) -> serde_json::Value {
    rig.json(3, &["export", "web1", name])["report"].clone()
}

/// Reports of `import`, `export` and `archive`.
pub(crate) fn reports() -> Vec<(&'static str, serde_json::Value)> {
    let (rig, _) = rig_with_machine();
    vec![
        ("export", exported(&rig, "web1.xva.gz")),
        ("archive info", rig.report(&["archive", "info", "web1.xva.gz"])),
        ("archive check", rig.report(&["archive", "check", "web1.xva.gz"])),
        ("import", rig.report(&["import", "web1.xva.gz", "--machine", "again"])),
        ("import", rig.report(&["import", "web1.xva.gz", "--to", "made"])),
    ]
}

#[test]
fn an_exported_archive_is_readable_by_others_and_importable() {
    let (rig, disks) = rig_with_machine();
    let reader = rig.path("xva_reader.py");
    rig.write("xva_reader.py", include_bytes!("xva_reader.py"));
    for (number, name) in ["web1.xva", "web1.xva.gz", "web1.xva.zst"].iter().enumerate() {
        let report = exported(&rig, name);
        assert_eq!(report["disks"][0]["name"], "vda", "{report}");
        let ids: Vec<&str> = report["disks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|disk| disk["key"].as_str().unwrap())
            .collect();
        // gzip and zstd unpack it, and an independent reader finds the disks in it.
        let plain = rig.path("plain.xva");
        let unpack = ["cat", "gzip -dc", "zstd -dc"][number];
        let line = format!("{unpack} < '{}' > '{}'", text(&rig.path(name)), text(&plain));
        system("/bin/sh", &["-c", &line]).unwrap();
        let folder = format!("found{number}");
        std::fs::create_dir(rig.path(&folder)).unwrap();
        system(
            "/usr/bin/python3",
            &[text(&reader), text(&plain), text(&rig.path(&folder))],
        )
        .unwrap();
        for (id, bytes) in ids.iter().zip(&disks) {
            assert!(rig.read(&format!("{folder}/{id}")) == *bytes, "{name}: {id}");
        }
        let checked = rig.report(&["archive", "check", name]);
        assert_eq!(checked["archive"], "XVA");
        assert_eq!(checked["index_block_count"].is_null(), number == 0, "{checked}");

        let machine = format!("copy{number}");
        let output = rig.run_with(&["import", "-", "--machine", &machine], &rig.read(name));
        assert!(output.status.success(), "{}", stderr(&output));
        for (disk, bytes) in ["sda", "sdb"].iter().zip(&disks) {
            let output = rig.run(&["restore", &format!("{machine}:{disk}"), "-"]);
            assert!(
                output.status.success() && output.stdout == *bytes,
                "{name}: {disk}: {}",
                stderr(&output)
            );
        }
        let made = format!("made{number}");
        let report = rig.report(&["import", name, "--to", &made, "--format", "raw"]);
        assert_eq!(report["machine"]["name"], "web1");
        for (disk, bytes) in ["sda", "sdb"].iter().zip(&disks) {
            assert!(rig.read(&format!("{made}/{disk}.raw")) == *bytes, "{name}: {disk}");
        }
        assert_eq!(
            rig.names(&made),
            ["domain.xml", "original-ova.xml", "sda.raw", "sdb.raw"]
        );
    }
    // An export to a pipe is identical.
    let output = rig.run(&["export", "web1", "-", "--format", "xva"]);
    let found = rig.run_with(&["archive", "check", "-"], &output.stdout);
    assert!(found.status.success(), "{}", stderr(&found));
}

/// Other programs read the exported disk, and Holdfast reads packages of other programs.
#[test]
fn packages_are_exchanged_with_qemu_and_tar() {
    let (rig, disks) = rig_with_machine();
    let report = exported(&rig, "web1.ova");
    assert_eq!(report["disks"][1]["key"], "web1-disk2.vmdk", "{report}");
    let output = rig.run(&["export", "web1", "-", "--format", "ova"]);
    rig.write("piped.ova", &output.stdout);
    for (name, folder) in [("web1.ova", "out1"), ("piped.ova", "out2")] {
        std::fs::create_dir(rig.path(folder)).unwrap();
        let line = format!(
            "cd '{}' && tar xf '{}' && for number in 1 2; do qemu-img convert -O raw web1-disk$number.vmdk $number.raw || exit; \
             done; sed -n 's/^SHA256(\\(.*\\))= \\(.*\\)/\\2  \\1/p' web1.mf | sha256sum -c --quiet",
            text(&rig.path(folder)),
            text(&rig.path(name))
        );
        system("/bin/sh", &["-c", &line]).unwrap();
        for (number, bytes) in ["1.raw", "2.raw"].iter().zip(&disks) {
            // A disk of VMware consists of whole sectors.
            let found = rig.read(&format!("{folder}/{number}"));
            assert!(
                found[..bytes.len()] == *bytes && found.len() == bytes.len().next_multiple_of(512),
                "{name} {number}"
            );
        }
        let checked = rig.report(&["archive", "check", name]);
        assert_eq!(checked["archive"], "OVA");
        let machine = format!("from-{folder}");
        rig.ok(&["import", name, "--machine", &machine]);
        for (disk, bytes) in ["sda", "sdb"].iter().zip(&disks) {
            let output = rig.run(&["restore", &format!("{machine}:{disk}"), "-"]);
            assert!(
                output.stdout[..bytes.len()] == *bytes,
                "{name}: {disk}: {}",
                stderr(&output)
            );
        }
    }
    // A package with images of qemu-img, and without a manifest.
    let line = format!(
        "cd '{}' && for number in 1 2; do qemu-img convert -O vmdk -o subformat=streamOptimized $number.raw web1-disk$number.vmdk; done && \
         tar cf ../other.ova web1.ovf web1-disk1.vmdk web1-disk2.vmdk",
        text(&rig.path("out1"))
    );
    system("/bin/sh", &["-c", &line]).unwrap();
    let output = rig.run_with(&["import", "-", "--to", "other"], &rig.read("other.ova"));
    assert!(output.status.success(), "{}", stderr(&output));
    for (disk, bytes) in ["sda", "sdb"].iter().zip(&disks) {
        let output = rig.run(&["image", "convert", &format!("other/{disk}.qcow2"), "-"]);
        assert!(output.stdout[..bytes.len()] == *bytes, "{disk}: {}", stderr(&output));
    }
    assert_eq!(
        rig.names("other"),
        ["domain.xml", "original-web1.ovf", "sda.qcow2", "sdb.qcow2"]
    );
}

/// Appliances may have empty disks, names with `./`, and file lengths as capacities (Oracle); some VMDKs have unordered
/// grains.
#[test]
fn packages_with_deviations_of_other_programs_are_imported() {
    let rig = Rig::new();
    let mut bytes = noise(3 * MIB, 21);
    bytes.resize(20 * MIB, 0);
    bytes[15 * MIB] = 7;
    rig.write("d.raw", &bytes);
    rig.write("package.py", include_bytes!("package.py"));
    let line = format!(
        "cd '{}' && qemu-img convert -O vmdk -o subformat=streamOptimized d.raw d.vmdk && python3 package.py",
        text(&rig.path(""))
    );
    system("/bin/sh", &["-c", &line]).unwrap();
    let report = rig.report(&["import", "blank.ova", "--to", "blank", "--format", "raw"]);
    let disk = |number: usize, field: &str| report["disks"][number][field].clone();
    assert_eq!(
        (disk(0, "is_blank"), disk(1, "is_blank")),
        (false.into(), true.into()),
        "{report}"
    );
    assert_eq!(disk(1, "size_bytes"), 30 * MIB, "{report}");
    assert!(rig.read("blank/sda.raw") == bytes && rig.read("blank/sdb.raw") == vec![0; 30 * MIB]);
    let xml = String::from_utf8(rig.read("blank/domain.xml")).unwrap();
    assert!(xml.contains("sdb.raw"), "{xml}");
    rig.ok(&["import", "blank.ova", "--machine", "blank"]);
    assert!(rig.run(&["restore", "blank:sdb", "-"]).stdout == vec![0; 30 * MIB]);
    let info = rig.report(&["archive", "info", "blank.ova"]);
    assert_eq!(info["disks"][1]["is_blank"], true, "{info}");
    let checked = rig.report(&["archive", "check", "blank.ova"]);
    assert_eq!(checked["disks"][1]["is_blank"], true, "{checked}");

    let message = rig.code(3, &["import", "oracle.ova", "--to", "oracle", "--format", "raw"]);
    assert!(
        stderr(&message).contains("20971520 bytes by its image"),
        "{}",
        stderr(&message)
    );
    assert!(rig.read("oracle/sda.raw") == bytes);
    rig.code(3, &["import", "oracle.ova", "--machine", "oracle"]);
    assert!(rig.run(&["restore", "oracle:sda", "-"]).stdout == bytes);
    rig.code(3, &["archive", "check", "oracle.ova"]);

    // A stream with unordered grains is read a second time from a file, and refused from a pipe.
    rig.ok(&["archive", "check", "back.ova"]);
    rig.ok(&["import", "back.ova", "--to", "back", "--format", "raw"]);
    assert!(rig.read("back/sda.raw") == bytes);
    rig.ok(&["import", "back.ova", "--machine", "back"]);
    assert!(rig.run(&["restore", "back:sda", "-"]).stdout == bytes);
    let piped = rig.run_with(&["import", "-", "--to", "piped"], &rig.read("back.ova"));
    assert_eq!(piped.status.code(), Some(1), "{}", stderr(&piped));
    assert!(!rig.path("piped").exists());
}

#[test]
fn backups_of_proxmox_are_exported_and_imported() {
    let (rig, disks) = rig_with_machine();
    for (number, name) in ["web1.vma", "web1.vma.zst", "web1.vma.gz"].iter().enumerate() {
        let report = exported(&rig, name);
        assert_eq!(report["format"], "vma", "{report}");
        let checked = rig.report(&["archive", "check", name]);
        assert_eq!(checked["archive"], "VMA");
        let machine = format!("copy{number}");
        let output = rig.run_with(&["import", "-", "--machine", &machine], &rig.read(name));
        assert!(output.status.success(), "{}", stderr(&output));
        for (disk, bytes) in ["sda", "sdb"].iter().zip(&disks) {
            let output = rig.run(&["restore", &format!("{machine}:{disk}"), "-"]);
            let found = output.stdout.get(..bytes.len());
            assert!(
                output.status.success() && found == Some(&bytes[..]),
                "{name}: {disk}: {}",
                stderr(&output)
            );
        }
        let whole = rig.read(name);
        let output = rig.run_with(&["import", "-", "--machine", "cut"], &whole[..whole.len() * 2 / 3]);
        assert_eq!(output.status.code(), Some(5), "{name}: {}", stderr(&output));
    }
}

/// An interrupt does not wait for input that never comes.
#[test]
fn an_import_from_a_silent_pipe_is_stopped_at_once() {
    let (rig, _) = rig_with_machine();
    for words in [
        &["import", "-"][..],
        &["archive", "check", "-"],
        &["archive", "info", "-"],
        &["compress", "--gzip"],
        &["compress", "-d"],
        &["backup", "--machine", "streamed", "vda=-"],
        &["image", "convert", "-", "made.raw", "--size", "64M"],
    ] {
        let mut child = rig
            .command(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let silent = child.stdin.take();
        // By now the program handles the signal; an earlier signal also ends it.
        SystemClock::new().sleep(Duration::from_millis(700));
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
        let start = SystemClock::new();
        let status = child.wait().unwrap();
        assert!(
            matches!(status.code(), None | Some(130)) && start.now() < Duration::from_secs(20),
            "{words:?}: {status}"
        );
        drop(silent);
    }
}

/// The leftovers of a killed import do not block another one.
#[test]
fn an_import_can_be_repeated_after_a_kill() {
    let (rig, _) = rig_with_machine();
    exported(&rig, "web1.xva");
    rig.write("made/.sda.qcow2.0123abcd.partial", b"half");
    rig.ok(&["import", "web1.xva", "--to", "made"]);
    assert_eq!(
        rig.names("made"),
        ["domain.xml", "original-ova.xml", "sda.qcow2", "sdb.qcow2"]
    );
}

/// A repeated import stores only the metadata of its snapshot.
#[test]
fn a_repeated_import_stores_hardly_any_data() {
    let (rig, _) = rig_with_machine();
    exported(&rig, "web1.xva");
    rig.ok(&["import", "web1.xva", "--machine", "again"]);
    let report = rig.report(&["import", "web1.xva", "--machine", "again"]);
    assert!(report["stored_bytes"].as_u64().unwrap() < 100_000, "{report}");
}

#[test]
fn a_damaged_archive_leaves_nothing() {
    let (rig, _) = rig_with_machine();
    exported(&rig, "web1.xva");
    exported(&rig, "web1.xva.zst");
    let snapshots = rig.snapshot_count();
    let before = rig.names(".");
    for name in ["web1.xva", "web1.xva.zst"] {
        let whole = rig.read(name);
        let mut changed = whole.clone();
        changed[whole.len() / 2] ^= 1;
        // The last variant only lacks bytes after the disks.
        for bytes in [&changed[..], &whole[..whole.len() / 3], &whole[..whole.len() - 700]] {
            if bytes.len() + 700 == whole.len() && name != "web1.xva" {
                continue;
            }
            for words in [
                &["import", "-", "--machine", "again"][..],
                &["import", "-", "--to", "made"],
                &["archive", "check", "-"],
            ] {
                let output = rig.run_with(words, bytes);
                assert_eq!(output.status.code(), Some(5), "{name} {words:?}: {}", stderr(&output));
            }
        }
    }
    assert_eq!(rig.snapshot_count(), snapshots);
    assert_eq!(rig.names("."), before);
}

#[test]
fn contradictory_commands_are_refused_with_a_reason() {
    let (rig, _) = rig_with_machine();
    exported(&rig, "web1.xva");
    for (code, words, expected) in [
        (1, &["import", "a.raw"][..], "is not a known machine archive"),
        (2, &["export", "web1", "web1.tar"], "does not select a format"),
        (2, &["export", "web1", "x.xva", "--level", "9"], "is not compressed"),
        (2, &["export", "web1", "x.xva.zst", "--gzip"], "the name means zstd"),
        (1, &["export", "web1", "x.xva", "--exclude", "vdz"], "it has vda, vdb"),
        (2, &["export", "web1:vda", "web1.xva"], "names a disk"),
        (
            2,
            &["export", "web1", "made", "--format", "dir", "--gzip"],
            "does not go with",
        ),
        (2, &["export", "web1", "x.xva.gz", "--level", "99"], "level"),
        (1, &["export", "web1", "web1.xva"], "exists"),
        (
            1,
            &["import", "web1.xva", "--to", "repo"],
            "already exists and is not empty",
        ),
        (
            2,
            &["import", "web1.xva", "--to", "made", "--format", "vdi", "--compress"],
            "not compressed",
        ),
    ] {
        let (_, text) = rig.error(code, words);
        assert!(text.contains(expected), "{words:?}: {text}");
    }
    assert!(
        !rig.names(".")
            .iter()
            .any(|name| name.contains("made") || name.contains("partial"))
    );
}
