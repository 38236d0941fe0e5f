//! Machines that move with the snapshots and checkpoints of their hypervisor.

use std::path::{Path, PathBuf};

use holdfast_test_kit::libvirt::LibvirtLab;
use holdfast_test_kit::run;

use super::two_hosts::TwoHosts;

/// The content of a disk, read by QEMU.
pub(super) fn content(image: &Path, raw: &Path) -> Vec<u8> {
    let words = ["convert", "-O", "raw", image.to_str().unwrap(), raw.to_str().unwrap()];
    run("qemu-img", &words);
    std::fs::read(raw).unwrap()
}

pub(super) fn write(image: &Path, pattern: u8) {
    let command = format!("write -P {pattern} 40M 1M");
    run("qemu-io", &["-f", "qcow2", "-c", &command, image.to_str().unwrap()]);
}

pub(super) fn names(lab: &LibvirtLab, list: &str) -> Vec<String> {
    let listed = lab.virsh(&[list, "web1", "--name", "--topological"]);
    listed.split_whitespace().map(str::to_owned).collect()
}

fn disk_of(lab: &LibvirtLab) -> PathBuf {
    let listed = lab.virsh(&["domblklist", "--inactive", "web1"]);
    let line = listed.lines().find(|line| line.trim().starts_with("vda")).unwrap();
    line.trim().split_once(' ').unwrap().1.trim().into()
}

fn bitmaps(image: &Path) -> String {
    let info = run("qemu-img", &["info", "--output=json", image.to_str().unwrap()]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    info["format-specific"]["data"]["bitmaps"].to_string()
}

#[test]
fn a_machine_moves_with_its_snapshots_and_back() {
    let Some(hosts) = TwoHosts::new() else { return };
    let raw = hosts.rig.path("content.raw");
    let (here, there) = (&hosts.here, &hosts.there);
    here.virsh(&["destroy", "web1"]);
    write(&hosts.image, 1);
    here.virsh(&["snapshot-create-as", "web1", "first"]);
    let first = content(&hosts.image, &raw);
    write(&hosts.image, 2);
    here.virsh(&["snapshot-create-as", "web1", "second"]);
    write(&hosts.image, 3);
    let last = content(&hosts.image, &raw);

    let plan = hosts.moved(&["--dry-run"]);
    assert_eq!(plan["obstacles"], serde_json::json!([]), "{plan}");
    assert!(
        plan["notes"].to_string().contains("it moves with 2 snapshots,"),
        "{plan}"
    );
    hosts.moved(&[]);
    assert_eq!(hosts.states(), ["shut off", "shut off"]);
    let image = there.path("images/web1.qcow2");
    assert_eq!(disk_of(there), image);
    assert_eq!(names(there, "snapshot-list"), ["first", "second"]);
    assert_eq!(there.virsh(&["snapshot-current", "web1", "--name"]).trim(), "second");
    assert!(content(&image, &raw) == last);
    there.virsh(&["snapshot-revert", "web1", "first"]);
    assert!(content(&image, &raw) == first);

    // It returns to the host that has its former files and snapshots.
    there.virsh(&["snapshot-delete", "web1", "second"]);
    there.virsh(&["snapshot-create-as", "web1", "third"]);
    let back = hosts.moved(&["--undo", "--delete-former"]);
    let sent_bytes = back["disks"][0]["sent_bytes"].as_u64().unwrap();
    assert!(sent_bytes < 8 << 20, "{back}");
    let image = hosts.image.with_file_name("web1-2.qcow2");
    assert_eq!(disk_of(here), image);
    assert_eq!(names(here, "snapshot-list"), ["first", "third"]);
    assert!(content(&image, &raw) == first);
    assert!(!hosts.image.exists());
}

/// Saved memory stays where it is, and would be resumed with the wrong disks.
#[test]
fn a_machine_moves_with_its_checkpoints_but_not_with_saved_memory() {
    let Some(hosts) = TwoHosts::new() else { return };
    let obstacles = |hosts: &TwoHosts| hosts.moved(&["--dry-run"])["obstacles"].to_string();
    hosts
        .here
        .virsh(&["checkpoint-create-as", "web1", "c1", "--diskspec", "vda"]);
    let found = obstacles(&hosts);
    assert!(found.contains("has checkpoints of it"), "{found}");
    hosts.here.virsh(&["managedsave", "web1"]);
    let found = obstacles(&hosts);
    assert!(found.contains("its memory was saved"), "{found}");
    hosts.here.virsh(&["managedsave-remove", "web1"]);
    hosts.moved(&[]);
    let image = hosts.there.path("images/web1.qcow2");
    assert_eq!(disk_of(&hosts.there), image);
    assert_eq!(names(&hosts.there, "checkpoint-list"), ["c1"]);
    let recorded = bitmaps(&image);
    assert!(
        recorded.contains("c1") && recorded == bitmaps(&hosts.image),
        "{recorded}"
    );
    // The bitmap is used there.
    hosts.there.virsh(&["start", "web1"]);
    let described = hosts.there.virsh(&["checkpoint-dumpxml", "--size", "web1", "c1"]);
    assert!(described.contains("size="), "{described}");

    let hosts = hosts.turned();
    hosts.here.virsh(&["destroy", "web1"]);
    hosts.there.virsh(&["start", "web1"]);
    hosts.there.virsh(&["managedsave", "web1"]);
    let found = obstacles(&hosts);
    assert!(found.contains("the memory of web1 was saved there"), "{found}");
}

/// External snapshots: each image names the one below by its path.
#[test]
fn a_machine_moves_with_a_chain_of_images_in_several_folders() {
    let Some(hosts) = TwoHosts::new() else { return };
    let raw = hosts.rig.path("content.raw");
    let (here, there) = (&hosts.here, &hosts.there);
    here.virsh(&["destroy", "web1"]);
    let folder = here.path("overlays");
    std::fs::create_dir(&folder).unwrap();
    let overlay = |name: &str| folder.join(name);
    let snapshot = |name: &str, file: &Path| {
        let spec = format!("vda,file={}", file.display());
        let words = ["snapshot-create-as", "web1", name, "--disk-only", "--diskspec"];
        here.virsh(&[&words[..], &[&spec]].concat());
    };
    // The first overlay is called like the image.
    snapshot("outer", &overlay("web1.qcow2"));
    write(&overlay("web1.qcow2"), 4);
    snapshot("inner", &overlay("web1.inner"));
    write(&overlay("web1.inner"), 5);
    let expected = content(&overlay("web1.inner"), &raw);

    hosts.moved(&[]);
    let hidden = [&hosts.image, &folder];
    for path in hidden {
        std::fs::rename(path, path.with_extension("hidden")).unwrap();
    }
    let moved = disk_of(there);
    assert_eq!(moved, there.path("images/web1.inner"));
    assert!(content(&moved, &raw) == expected);
    assert_eq!(names(there, "snapshot-list"), ["outer", "inner"]);
    let described = there.virsh(&["snapshot-dumpxml", "web1", "inner"]);
    assert!(!described.contains(folder.to_str().unwrap()), "{described}");
    assert_eq!(hosts.names_there(), ["web1-base.qcow2", "web1.inner", "web1.qcow2"]);
    // libvirt finds the whole chain there.
    there.virsh(&["start", "web1"]);
    hosts.console.wait_for_more(20);
    hosts.console.assert_no_mismatch();
}

/// A file that moves as it is has a seed that is a file, too.
#[test]
fn a_seed_of_the_user_is_compared_with_the_bytes_of_a_file() {
    let Some(hosts) = TwoHosts::new() else { return };
    hosts.here.virsh(&["destroy", "web1"]);
    hosts.here.virsh(&["snapshot-create-as", "web1", "first"]);
    let replica = hosts.there.path("replica.qcow2");
    std::fs::copy(&hosts.image, &replica).unwrap();
    write(&hosts.image, 7);
    let expected = content(&hosts.image, &hosts.rig.path("content.raw"));
    let report = hosts.moved(&["--seed", &format!("vda={}", replica.display())]);
    let sent_bytes = report["disks"][0]["sent_bytes"].as_u64().unwrap();
    assert!((1 << 20..3 << 20).contains(&sent_bytes), "{report}");
    let image = hosts.there.path("images/web1.qcow2");
    assert!(content(&image, &hosts.rig.path("content.raw")) == expected);
}
