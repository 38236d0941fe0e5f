//! Restores that are refused before the first byte, and failing restores that leave nothing behind.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use holdfast_image::{Format, OpenOptions};
use rustix::process::{Pid, Signal, kill_process};

use super::{World, at};
use crate::host::{loop_device, small_file_system};
use crate::rig::{assert_runs, noise};
use holdfast_test_kit::run;

/// Size of incompressible data, so that a restore takes some time.
const LARGE_BYTES: usize = 96 << 20;

/// No refused restore changes anything.
#[test]
fn restores_over_machines_or_images_in_use_are_refused() {
    let world = World::new();
    world.back_up();
    world.lab.virsh(&["destroy", "web1"]);
    let (vda, vdb) = (world.image("web1", 0), world.image("web1", 1));
    let before = (world.files(), std::fs::read(&vdb).unwrap());

    let place = format!("vda={}", vda.display());
    let (kind, text) = world.refused(1, &["--disk", &place]);
    assert!(kind == "exists" && text.contains("web1-a"), "{kind}: {text}");
    let (kind, text) = world.refused(1, &["--disk", "vdx=/tmp/x"]);
    assert!(kind == "not-found" && text.contains("vda, vdb"), "{kind}: {text}");
    let (kind, text) = world.refused(1, &["--storage", "/nonexistent/folder"]);
    assert!(
        kind == "not-found" && text.contains("/nonexistent/folder"),
        "{kind}: {text}"
    );
    let (kind, _) = world.refused(1, &["--name", "web1"]);
    assert_eq!(kind, "exists");
    let (kind, _) = world.refused(1, &["--in-place", "--name", "missing"]);
    assert_eq!(kind, "not-found");

    // Another program has the image open; then a machine uses it, directly or below an overlay.
    for (image, format) in [(&vda, Format::Qcow2), (&vdb, Format::Raw)] {
        let options = OpenOptions {
            format: Some(format),
            ..OpenOptions::default()
        };
        let open = holdfast_image::open_mut(image, &options).unwrap();
        let (kind, text) = world.refused(4, &["--in-place"]);
        assert!(
            kind == "locked" && text.contains(image.to_str().unwrap()),
            "{kind}: {text}"
        );
        drop(open);
    }
    world.lab.define("other", &["qcow2"]);
    let overlay = world.image("other", 0);
    std::fs::remove_file(&overlay).unwrap();
    let words = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    run(
        "qemu-img",
        &[&words[..], &[vdb.to_str().unwrap(), overlay.to_str().unwrap()]].concat(),
    );
    let (kind, text) = world.refused(1, &["--in-place"]);
    assert!(
        kind == "refused" && text.contains("web1-b") && text.contains("machine other"),
        "{kind}: {text}"
    );
    world.lab.virsh(&["undefine", "other"]);
    std::fs::remove_file(overlay).unwrap();

    world.lab.virsh(&["start", "web1"]);
    world.lab.virsh(&["managedsave", "web1"]);
    let (kind, text) = world.refused(1, &["--in-place"]);
    assert!(kind == "refused" && text.contains("saved memory"), "{kind}: {text}");
    world.lab.virsh(&["managedsave-remove", "web1"]);
    assert!(world.files() == before.0 && std::fs::read(&vdb).unwrap() == before.1);
    world.lab.virsh(&[
        "snapshot-create-as",
        "web1",
        "s1",
        "--disk-only",
        "--diskspec",
        "vdb,snapshot=no",
    ]);
    let (kind, text) = world.refused(1, &["--in-place"]);
    assert!(kind == "refused" && text.contains("1 snapshots"), "{kind}: {text}");
}

/// Options for machines are refused with one message about the missing --to-machine, with a target or without.
#[test]
fn machine_options_without_a_machine_are_refused_with_the_same_message() {
    let world = World::new();
    world.back_up();
    let refused = |words: &[&str]| {
        let (kind, text) = world.rig.error(2, &[&["restore", "web1"], words].concat());
        assert_eq!(kind, "usage", "{words:?}: {text}");
        text
    };
    for option in [
        &["--keep-identity"][..],
        &["--start"],
        &["--resume"],
        &["--live"],
        &["--name", "x"],
        &["--storage", "x"],
        &["--disk", "vda=x"],
        &["--configuration", "--in-place"],
    ] {
        for target in [&["x.raw"][..], &[]] {
            let text = refused(&[target, option].concat());
            assert!(text.contains(&format!("{} needs --to-machine", option[0])), "{text}");
        }
    }
    let text = refused(&["x.raw", "--to-machine"]);
    assert!(text.contains("x.raw is another target"), "{text}");
    assert!(refused(&[]).contains("needs a target"));
    for words in [
        &["--to-machine", "--force"][..],
        &["--to-machine", "--keep-identity", "--force"],
    ] {
        assert!(refused(words).contains("--force is about"));
    }
}

/// A named target file is kept unless replacement is requested; a file that a machine uses is always kept.
#[test]
fn a_named_file_is_replaced_only_on_request() {
    let world = World::new();
    world.back_up();
    let path = world.rig.path("there.raw");
    let place = format!("vdb={}", path.display());
    world.rig.write("there.raw", b"something");
    let (kind, _) = world.refused(1, &["--disk", &place]);
    assert_eq!(kind, "exists");
    let used = format!("vdb={}", world.image("web1", 1).display());
    let (kind, _) = world.refused(1, &["--disk", &used, "--force"]);
    assert_eq!(kind, "refused");
    let report = world.restore(&["--disk", &place, "--force"]);
    assert_eq!(report["files"][1]["way"], "replace");
    world.assert_holds("web1-restored");
    assert_eq!(world.image("web1-restored", 1), path);
}

#[test]
fn another_machine_of_the_same_name_is_not_overwritten() {
    let world = World::new();
    world.back_up();
    world.lab.virsh(&["destroy", "web1"]);
    world.lab.virsh(&["undefine", "web1"]);
    world
        .lab
        .virsh(&["define", world.lab.path("domain.xml").to_str().unwrap()]);
    let (kind, text) = world.refused(1, &["--in-place"]);
    assert!(kind == "refused" && text.contains("not the one"), "{kind}: {text}");
    // An explicit name is accepted; but the configuration is not replaced, because it belongs to another machine.
    let uri = world.lab.uri();
    let words = ["restore", "web1", "--to-machine", "--in-place", "--name", "web1"];
    world.rig.json(3, &at(&uri, &words));
    let (kind, _) = world.refused(1, &["--in-place", "--name", "web1", "--configuration"]);
    assert_eq!(kind, "refused");
    world.assert_holds("web1");
}

#[test]
fn missing_space_is_found_before_the_first_byte() {
    let world = World::new();
    world.back_up();
    let Some(small) = small_file_system(&world.rig.path("small"), 12 << 20) else {
        return;
    };
    let (kind, text) = world.refused(1, &["--storage", small.path.to_str().unwrap()]);
    assert!(kind == "no-space" && text.contains("small"), "{kind}: {text}");
    assert_eq!(world.rig.names("small"), ["lost+found"]);
    assert_eq!(world.machines(), ["web1"]);
}

/// A block device is overwritten only on request, and never while a machine or a file system uses it.
#[test]
fn a_disk_is_restored_to_a_named_block_device() {
    let world = World::new();
    world.back_up();
    let Some(device) = loop_device(&world.rig.path("loop"), 8 << 20) else {
        return;
    };
    let place = format!("vdb={}", device.path.display());
    let (kind, text) = world.refused(1, &["--disk", &place]);
    assert!(kind == "exists" && text.contains("--force"), "{kind}: {text}");
    let report = world.restore(&["--disk", &place, "--force", "--start"]);
    assert_eq!(report["files"][1]["way"], "overwrite");
    assert_eq!(report["target_machine"]["is_started"], true);
    assert_eq!(world.image("web1-restored", 1), device.path);
    world.assert_holds("web1-restored");
    let (kind, text) = world.refused(1, &["--disk", &place, "--force"]);
    assert!(kind == "refused" && text.contains("web1-restored"), "{kind}: {text}");

    // In an in-place restore it is treated like any other disk.
    world.lab.virsh(&["destroy", "web1-restored"]);
    let bytes = [9; 4096];
    let opened = File::options().write(true).open(&device.path).unwrap();
    opened.write_all_at(&bytes, 1 << 20).unwrap();
    drop(opened);
    let uri = world.lab.uri();
    let words = [
        "restore",
        "web1",
        "--to-machine",
        "--in-place",
        "--name",
        "web1-restored",
    ];
    let report = world.rig.json(3, &at(&uri, &words))["report"].clone();
    assert_eq!(report["disks"][1]["written_bytes"], 4096);
    world.assert_holds("web1-restored");
    world.lab.virsh(&["undefine", "web1-restored"]);

    // A device that is too small, and one that is in use.
    let small = loop_device(&world.rig.path("small-loop"), 4 << 20).unwrap();
    let place = format!("vdb={}", small.path.display());
    let (kind, _) = world.refused(1, &["--disk", &place, "--force"]);
    assert_eq!(kind, "no-space");
    let mounted = small_file_system(&world.rig.path("mounted"), 16 << 20).unwrap();
    let place = format!("vdb={}", mounted.device().display());
    let (kind, text) = world.refused(1, &["--disk", &place, "--force"]);
    assert!(kind == "io" && text.contains("in use"), "{kind}: {text}");
}

/// A single disk is not restored to a file that a running machine uses.
#[test]
fn the_image_of_a_running_machine_is_not_overwritten() {
    let world = World::new();
    world.back_up();
    let refused = |words: &[&str]| {
        let (kind, text) = world.rig.error(4, words);
        assert!(kind == "locked" && text.contains("web1-"), "{kind}: {text}");
    };
    for (disk, image) in [("web1:vda", "web1-a"), ("web1:vdb", "web1-b")] {
        let path = world.lab.path(image).display().to_string();
        for way in ["--in-place", "--force"] {
            refused(&["restore", disk, &path, way]);
        }
    }
    world.assert_runs_and_is_clean();
    world.lab.virsh(&["destroy", "web1"]);
    world.assert_holds("web1");
    let path = world.lab.path("web1-b").display().to_string();
    world.rig.ok(&["restore", "web1:vdb", &path, "--in-place"]);
    world.rig.ok(&["restore", "web1:vdb", &path, "--force"]);
    world.assert_holds("web1");
}

/// libvirt gives machines private device nodes, whose locks are not visible: the program searches for processes that
/// write to the device.
#[test]
fn a_block_device_open_for_writing_is_not_overwritten() {
    let world = World::new();
    world.back_up();
    let Some(device) = loop_device(&world.rig.path("loop"), 8 << 20) else {
        return;
    };
    let path = device.path.display().to_string();
    let place = format!("vdb={path}");
    let writer = File::options().write(true).open(&device.path).unwrap();
    // Writers are found by their open files; this test is a process other than the program.
    for words in [
        &["restore", "web1:vdb", &path, "--force"][..],
        &at(
            &world.lab.uri(),
            &["restore", "web1", "--to-machine", "--disk", &place, "--force"],
        ),
    ] {
        let (kind, text) = world.rig.error(4, words);
        assert!(
            kind == "locked" && text.contains(&format!("process {}", std::process::id())),
            "{kind}: {text}"
        );
    }
    assert_eq!(world.machines(), ["web1"]);
    drop(writer);
    // A process that only reads the device, like udev, does not matter.
    let reader = File::open(&device.path).unwrap();
    world.rig.ok(&["restore", "web1:vdb", &path, "--force"]);
    drop(reader);
}

/// Only the second disk is damaged in the repository: the first one is written, and removed again.
#[test]
fn a_failed_restore_leaves_nothing() {
    let world = large_world();
    let pack = largest_pack(&world);
    let file = File::options().write(true).open(&pack).unwrap();
    let middle = pack.metadata().unwrap().len() / 2;
    file.write_all_at(&[0x55; 64], middle).unwrap();
    let files = world.files();
    let (kind, text) = world.refused(5, &[]);
    assert_eq!(kind, "damage", "{text}");
    assert_eq!((world.files(), world.machines()), (files, vec!["web1".to_owned()]));
}

/// Killed at random moments: no machine is defined without its disks, and the next run removes the partial files.
#[test]
fn a_killed_restore_leaves_partial_files_that_the_next_one_removes() {
    let world = large_world();
    let (uri, files) = (world.lab.uri(), world.files());
    let mut left_count = 0;
    for _ in 0..3 {
        let words = at(&uri, &["restore", "web1", "--to-machine"]);
        let mut child = world.rig.command(&words).spawn().unwrap();
        let is_partial = |name: &String| name.ends_with(".partial");
        while world.files().iter().filter(|name| is_partial(name)).count() < 2 {
            assert_runs(&mut child);
            std::thread::yield_now();
        }
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        child.wait().unwrap();
        let left: Vec<String> = world.files().into_iter().filter(|name| !files.contains(name)).collect();
        assert!(left.iter().all(is_partial), "{left:?}");
        left_count = left_count.max(left.len());
        assert_eq!(world.machines(), ["web1"]);
    }
    // Each run has removed the leftovers of the previous one.
    assert_eq!(left_count, 2);
    world.restore(&[]);
    assert!(
        world.files().iter().all(|name| !name.contains("partial")),
        "{:?}",
        world.files()
    );
    world.assert_holds("web1-restored");
}

#[test]
fn a_killed_in_place_restore_can_be_repeated() {
    let world = large_world();
    let image = world.image("web1", 1);
    let length = world.disks[1].len();
    let uri = world.lab.uri();
    let mut mixture_count = 0;
    for round in 0..3 {
        File::options()
            .write(true)
            .open(&image)
            .unwrap()
            .write_all_at(&noise(length, 50 + round), 0)
            .unwrap();
        let words = at(&uri, &["restore", "web1", "--to-machine", "--in-place"]);
        let mut child = world.rig.command(&words).spawn().unwrap();
        // The start of a disk is written first, and this disk is the last one.
        let mut start = vec![0; 4096];
        while start != world.disks[1][..4096] && child.try_wait().unwrap().is_none() {
            File::open(&image).unwrap().read_exact_at(&mut start, 0).unwrap();
        }
        kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
        child.wait().unwrap();
        mixture_count += usize::from(std::fs::read(&image).unwrap() != world.disks[1]);
    }
    assert!(mixture_count > 0, "every restore ended before it was killed");
    world.restore(&["--in-place"]);
    world.assert_holds("web1");
}

/// A machine that is shut off, whose second disk takes some time to restore.
fn large_world() -> World {
    let mut world = World::new();
    world.lab.virsh(&["destroy", "web1"]);
    world.disks[1] = noise(LARGE_BYTES, 3);
    let image = world.image("web1", 1);
    File::create(image).unwrap().write_all_at(&world.disks[1], 0).unwrap();
    world.back_up();
    world
}

fn largest_pack(world: &World) -> PathBuf {
    let listed = run(
        "find",
        &[
            world.rig.path("repo").to_str().unwrap(),
            "-type",
            "f",
            "-printf",
            "%s %p\n",
        ],
    );
    let files = listed.lines().filter_map(|line| line.split_once(' '));
    let files = files.map(|(size, path)| (size.parse::<u64>().unwrap(), path));
    PathBuf::from(files.max().unwrap().1)
}
