//! The image chain of a disk changes between two backups: restores are correct, and a disk is read completely only if
//! its changes are unknown.

use std::path::{Path, PathBuf};

use holdfast_host::DiskSource;
use holdfast_host::qemu::disks;
use holdfast_host::qmp::QmpCommand;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use super::{World, at};
use crate::host::{system, text};
use holdfast_test_kit::libvirt::LibvirtLab;

/// The reason for a bitmap that was cleared, or that was created later.
const BEGUN_ANEW: &str = "does not go back to the snapshot before";
pub(super) const GONE: &str = "is gone";

impl World {
    /// The top image of a disk.
    pub(super) fn top_image(&self, disk: usize) -> PathBuf {
        match &self.machine().describe().unwrap().disks[disk].source {
            DiskSource::File(path) => path.clone(),
            other => panic!("{other:?}"),
        }
    }

    pub(super) fn qmp(&self, command: &'static str, arguments: Value) -> Result<Value, String> {
        let answer = self.machine().monitor().execute(&QmpCommand::new(command, arguments));
        answer.map_err(|error| error.to_string())
    }

    /// The node of a disk, and its bitmaps that Holdfast created.
    pub(super) fn bitmaps_on(&self, disk: usize) -> (String, Vec<String>) {
        let found = disks(self.machine().monitor()).unwrap().swap_remove(disk);
        let names = found.bitmaps.into_iter().map(|bitmap| bitmap.name);
        (found.node, names.filter(|name| name.starts_with("holdfast-")).collect())
    }

    pub(super) fn snapshot_outside(&self, name: &str, words: &[&str]) {
        let all = [&["snapshot-create-as", "web1", name, "--disk-only", "--atomic"], words].concat();
        self.lab.virsh(&all);
    }

    pub(super) fn stop(&self) {
        self.lab.virsh(&["destroy", "web1", "--graceful"]);
    }

    pub(super) fn start(&self) {
        self.lab.virsh(&["start", "web1"]);
    }

    /// Flushes the writes of the guest.
    pub(super) fn flush(&self, disk: usize) {
        let line = format!("qemu-io -d /machine/peripheral/virtio-disk{disk}/virtio-backend flush");
        self.qmp("human-monitor-command", json!({ "command-line": line }))
            .unwrap();
    }

    /// Flushes the writes of the guest and kills QEMU, which saves nothing.
    pub(super) fn kill(&self) {
        for disk in 0..2 {
            self.flush(disk);
        }
        let folder = self.lab.path("libvirt");
        let found = system("find", &[text(&folder), "-name", "web1.pid"]).unwrap();
        let pid = std::fs::read_to_string(found.lines().next().unwrap()).unwrap();
        kill_process(Pid::from_raw(pid.trim().parse().unwrap()).unwrap(), Signal::KILL).unwrap();
        while self.lab.virsh(&["domstate", "web1"]).trim() != "shut off" {
            std::thread::yield_now();
        }
    }

    /// Gives a disk of the machine, which is shut off, another image.
    pub(super) fn put(&self, disk: usize, image: &Path, format: &str) {
        let configuration = self.lab.virsh(&["dumpxml", "web1", "--inactive"]);
        let before = format!("'{}'", self.top_image(disk).display());
        let at = configuration.find(&before).unwrap();
        let start = configuration[..at].rfind("<driver").unwrap();
        let target = at + configuration[at..].find("<target").unwrap();
        // The backing file of the old image is removed from the configuration.
        let source = format!("<source file='{}'/>", image.display());
        let described = format!("<driver name='qemu' type='{format}'/>{source}");
        let configuration = [&configuration[..start], &described, &configuration[target..]].concat();
        self.lab.define_xml(&configuration);
    }

    /// The images of a disk of a running machine, the top first.
    pub(super) fn images_below(&self, disk: usize) -> Vec<PathBuf> {
        let top = self.top_image(disk);
        let words = ["info", "-U", "--backing-chain", "--output=json", text(&top)];
        let chain: Value = serde_json::from_str(&system("qemu-img", &words).unwrap()).unwrap();
        let files = chain.as_array().unwrap().iter();
        files.map(|layer| layer["filename"].as_str().unwrap().into()).collect()
    }

    /// Backs up, and asserts that the snapshot is correct. Returns the reasons why disks were read completely.
    pub(super) fn back_up_rightly(&self, what: &str) -> [Option<String>; 2] {
        self.back_up_rightly_with(what, &[])
    }

    pub(super) fn back_up_rightly_with(&self, what: &str, options: &[&str]) -> [Option<String>; 2] {
        let uri = self.lab.uri();
        let report = self.rig.report(&at(&uri, &[&["backup", "web1"], options].concat()));
        let disks = &report["machines"][0]["disks"];
        let reasons = [0, 1].map(|disk| disks[disk]["reason"].as_str().map(str::to_owned));
        self.assert_snapshot_is_right(&format!("{what}, {options:?}, {reasons:?}"));
        reasons
    }

    /// A hook that runs virsh with these arguments at an event.
    fn hook(&self, event: &str, words: &str) -> PathBuf {
        let uri = self.lab.uri();
        let script = format!("#!/bin/sh\n[ $1 != {event} ] || exec virsh -q -c '{uri}' {words}\n");
        self.rig.write_program("hook", &script)
    }

    fn assert_incremental(&self, what: &str) {
        assert_eq!(self.back_up_rightly(what), [None, None], "{what}");
    }

    fn assert_in_full(&self, what: &str, reason: &str) {
        let [first, _] = self.back_up_rightly(what);
        let message = first.unwrap_or_else(|| panic!("{what}: a disk was not read completely"));
        assert!(message.contains(reason), "{what}: {message}");
    }
}

/// Each write has a different offset, so that any lost write is noticed.
struct Places(usize);

impl Places {
    fn write(&mut self, world: &mut World) {
        for disk in [0, 1] {
            self.0 += 1;
            let byte = u8::try_from(100 + self.0 % 100).unwrap();
            world.write(disk, byte, self.0 % 120 * 65_536 + 512, 4096);
        }
    }
}

#[test]
fn writes_before_a_snapshot_of_another_program_are_in_the_next_backup() {
    let mut world = World::new();
    let mut places = Places(0);
    world.back_up();
    for (round, words) in [&[][..], &["--no-metadata"]].into_iter().enumerate() {
        places.write(&mut world);
        world.snapshot_outside(&format!("s{round}"), words);
        places.write(&mut world);
        world.assert_incremental(&format!("snapshot {words:?}"));
        world.assert_incremental("nothing was written");
    }
    // Several layers at once, one of which is committed.
    for round in 0..3 {
        places.write(&mut world);
        world.snapshot_outside(&format!("t{round}"), &["--no-metadata"]);
    }
    places.write(&mut world);
    for disk in &["vda", "vdb"] {
        let images = world.images_below(usize::from(*disk == "vdb"));
        let (base, top) = (text(&images[2]), text(&images[1]));
        world
            .lab
            .virsh(&["blockcommit", "web1", disk, "--base", base, "--top", top, "--wait"]);
    }
    world.assert_incremental("three snapshots, and the middle one committed");
    places.write(&mut world);
    world.snapshot_outside("u", &["--no-metadata"]);
    world.stop();
    world.start();
    places.write(&mut world);
    world.assert_incremental("a snapshot, and the machine switched off and on");
    world.assert_runs_and_is_clean();
}

#[test]
fn commits_pulls_and_copies_keep_all_changes() {
    let mut world = World::new();
    let mut places = Places(0);
    world.back_up();
    places.write(&mut world);
    world.snapshot_outside("s1", &["--no-metadata"]);
    places.write(&mut world);
    for disk in ["vda", "vdb"] {
        world
            .lab
            .virsh(&["blockcommit", "web1", disk, "--active", "--pivot", "--wait"]);
    }
    places.write(&mut world);
    world.assert_incremental("committed");
    places.write(&mut world);
    world.snapshot_outside("s2", &["--no-metadata"]);
    world.back_up_rightly("on the overlay");
    places.write(&mut world);
    world
        .lab
        .virsh(&["blockcommit", "web1", "vda", "--active", "--pivot", "--wait"]);
    places.write(&mut world);
    world.back_up_rightly("the overlay of the snapshot before is committed");
    places.write(&mut world);
    world.snapshot_outside("s3", &["--no-metadata"]);
    places.write(&mut world);
    world.lab.virsh(&["blockpull", "web1", "vda", "--wait"]);
    places.write(&mut world);
    world.back_up_rightly("pulled");
    places.write(&mut world);
    let copy = world.lab.path("copy");
    let words = [
        "blockcopy",
        "web1",
        "vda",
        text(&copy),
        "--format",
        "qcow2",
        "--transient-job",
    ];
    world.lab.virsh(&[&words[..], &["--wait", "--pivot"]].concat());
    places.write(&mut world);
    world.back_up_rightly("copied");
    places.write(&mut world);
    world.lab.virsh(&["managedsave", "web1"]);
    world.start();
    places.write(&mut world);
    world.back_up_rightly("saved");
    world.assert_runs_and_is_clean();
}

#[test]
fn images_exchanged_or_copied_while_the_machine_is_off_are_detected() {
    let mut world = World::new();
    let mut places = Places(0);
    let path = |world: &World, name: &str| world.lab.path(name);
    // Both disks are qcow2, and have bitmaps of the same run.
    world.stop();
    let second = path(&world, "second");
    system(
        "qemu-img",
        &["convert", "-O", "qcow2", text(&world.top_image(1)), text(&second)],
    )
    .unwrap();
    world.put(1, &second, "qcow2");
    world.start();
    world.back_up();
    places.write(&mut world);
    world.stop();
    let (first, second) = (world.top_image(0), world.top_image(1));
    let beside = path(&world, "beside");
    for (from, to) in [(&first, &beside), (&second, &first), (&beside, &second)] {
        std::fs::rename(from, to).unwrap();
    }
    world.disks.swap(0, 1);
    world.start();
    world.assert_in_full("exchanged", GONE);

    // A copy with its bitmaps is equivalent to the image; the bitmap of a copied overlay begins with the overlay.
    places.write(&mut world);
    world.stop();
    let copy = path(&world, "copied");
    let convert = ["convert", "-O", "qcow2", "--bitmaps"];
    let convert =
        |from: &Path, to: &Path| system("qemu-img", &[&convert[..], &[text(from), text(to)]].concat()).unwrap();
    convert(&world.top_image(0), &copy);
    world.put(0, &copy, "qcow2");
    world.start();
    places.write(&mut world);
    world.assert_incremental("a copy with its bitmaps");
    places.write(&mut world);
    world.snapshot_outside("s1", &["--no-metadata"]);
    places.write(&mut world);
    world.stop();
    let flat = path(&world, "flat");
    convert(&world.top_image(0), &flat);
    world.put(0, &flat, "qcow2");
    world.start();
    world.assert_in_full("a copy of an overlay with its bitmaps", BEGUN_ANEW);

    // The image gets another backing file.
    places.write(&mut world);
    world.snapshot_outside("s2", &["--no-metadata"]);
    world.assert_incremental("a snapshot");
    world.stop();
    let top = world.top_image(0);
    let base = path(&world, "base");
    std::fs::copy(&flat, &base).unwrap();
    system("qemu-io", &["-f", "qcow2", "-c", "write -P 99 7M 64k", text(&base)]).unwrap();
    system(
        "qemu-img",
        &["rebase", "-u", "-F", "qcow2", "-b", text(&base), text(&top)],
    )
    .unwrap();
    // libvirt keeps the old base in the configuration until the image is defined again.
    world.put(0, &top, "qcow2");
    world.disks[0][7 << 20..(7 << 20) + 65_536].fill(99);
    world.start();
    world.assert_in_full("another base", "the base of the image");
    // The new base is written to, under the same name.
    world.stop();
    system("qemu-io", &["-f", "qcow2", "-c", "write -P 98 7M 64k", text(&base)]).unwrap();
    world.disks[0][7 << 20..(7 << 20) + 65_536].fill(98);
    world.start();
    world.assert_in_full("a base that was written", "the base of the image");
}

#[test]
fn a_bitmap_changed_by_another_program_is_not_used() {
    let mut world = World::new();
    let mut places = Places(0);
    world.back_up();
    let cases: [(&str, &[&'static str], &str); 4] = [
        ("cleared", &["block-dirty-bitmap-clear"], BEGUN_ANEW),
        (
            "begun anew",
            &["block-dirty-bitmap-remove", "block-dirty-bitmap-add"],
            BEGUN_ANEW,
        ),
        ("removed", &["block-dirty-bitmap-remove"], GONE),
        ("disabled", &["block-dirty-bitmap-disable"], "does not record"),
    ];
    for (what, commands, reason) in cases {
        places.write(&mut world);
        let (node, names) = world.bitmaps_on(0);
        assert_eq!(names.len(), 1, "{what}: {names:?}");
        for command in commands {
            world.qmp(command, json!({ "node": node, "name": names[0] })).unwrap();
        }
        places.write(&mut world);
        world.assert_in_full(what, reason);
    }
    places.write(&mut world);
    world.assert_incremental("nothing was done to it");
    // The image is shrunk and grown again: the content of its end is lost.
    world.write(0, 77, (8 << 20) - (1 << 20), 1 << 20);
    world.back_up_rightly("the end is written");
    let (node, _) = world.bitmaps_on(0);
    for size in [7_u64 << 20, 8 << 20] {
        world
            .qmp("block_resize", json!({ "node-name": node, "size": size }))
            .unwrap();
    }
    world.disks[0][7 << 20..].fill(0);
    world.assert_in_full("smaller for a while", BEGUN_ANEW);
    // A killed QEMU has not stored the bitmap of its overlay; the stored one of the image below is sufficient.
    places.write(&mut world);
    world.snapshot_outside("s1", &["--no-metadata"]);
    places.write(&mut world);
    world.kill();
    world.start();
    places.write(&mut world);
    assert_eq!(world.back_up_rightly("killed on an overlay")[0], None);
    world.kill();
    world.start();
    world.assert_in_full("killed", "bitmap");
}

/// The layers are inspected before the hooks are called, and the disks are frozen after that.
#[test]
fn a_snapshot_between_inspection_and_point_in_time_is_detected() {
    let mut world = World::new();
    let mut places = Places(0);
    let uri = world.lab.uri();
    world.back_up();
    places.write(&mut world);
    let hook = world.hook("pre-freeze", "snapshot-create-as web1 now --disk-only --no-metadata");
    let words = at(&uri, &["backup", "web1", "--hook", text(&hook)]);
    let (kind, message) = world.rig.error(4, &words);
    assert!(
        kind == "locked" && message.contains("was switched to another image"),
        "{kind}: {message}"
    );
    assert!(world.top_image(0).to_string_lossy().ends_with(".now"));
    places.write(&mut world);
    world.assert_incremental("a snapshot in the last moment");
    world.assert_runs_and_is_clean();
}

/// QEMU reverts to an internal snapshot only if no image has a bitmap. By then libvirt has ended the machine's QEMU.
#[test]
fn a_revert_to_an_internal_snapshot_is_detected() {
    let mut world = World::defined(LibvirtLab::new(), |lab| lab.define("web1", &["qcow2", "qcow2"]));
    let mut places = Places(0);
    world.lab.virsh(&["snapshot-create-as", "web1", "before"]);
    let earlier = world.disks.clone();
    places.write(&mut world);
    world.back_up();
    places.write(&mut world);
    world.assert_incremental("with an internal snapshot");
    world.lab.virsh(&["snapshot-revert", "web1", "before"]);
    world.disks = earlier;
    world.assert_in_full("gone back", GONE);
    world.lab.virsh(&["snapshot-delete", "web1", "before"]);

    // The bitmap of this backup is stored in the images, and the internal snapshot is created after it.
    world.back_up();
    world.lab.virsh(&["snapshot-create-as", "web1", "after"]);
    let earlier = world.disks.clone();
    places.write(&mut world);
    let uri = world.lab.uri();
    let revert = ["-q", "-c", &uri, "snapshot-revert", "web1", "after"];
    let refused = system("virsh", &revert).unwrap_err();
    assert!(refused.contains("Device has active dirty bitmaps"), "{refused}");
    assert!(!world.is_running());
    for disk in 0..2 {
        let image = world.top_image(disk);
        let described = system("qemu-img", &["info", "--output=json", text(&image)]).unwrap();
        let described: Value = serde_json::from_str(&described).unwrap();
        let bitmaps = &described["format-specific"]["data"]["bitmaps"];
        for bitmap in bitmaps.as_array().unwrap() {
            let name = bitmap["name"].as_str().unwrap();
            system("qemu-img", &["bitmap", "--remove", text(&image), name]).unwrap();
        }
    }
    world.lab.virsh(&["snapshot-revert", "web1", "after"]);
    world.disks = earlier;
    world.assert_in_full("gone back without the bitmaps", GONE);
    world.assert_runs_and_is_clean();
}

/// An image of version 2 stores no bitmap, and records no writes to an overlay.
#[test]
fn images_of_qcow2_version_2_are_read_in_full_after_an_overlay() {
    let mut world = World::new();
    let mut places = Places(0);
    world.stop();
    let old = world.lab.path("old");
    let image = world.top_image(0);
    system(
        "qemu-img",
        &["convert", "-O", "qcow2", "-o", "compat=0.10", text(&image), text(&old)],
    )
    .unwrap();
    world.put(0, &old, "qcow2");
    world.start();
    world.back_up();
    places.write(&mut world);
    assert_eq!(world.back_up_rightly("version 2"), [None, None]);
    places.write(&mut world);
    world.stop();
    world.start();
    world.assert_in_full("version 2, switched off and on", GONE);
    let overlay = world.lab.path("overlay");
    let options = ["-o", "compat=0.10", "-F", "qcow2", "-b", text(&old)];
    system(
        "qemu-img",
        &[&["create", "-q", "-f", "qcow2"], &options[..], &[text(&overlay)]].concat(),
    )
    .unwrap();
    places.write(&mut world);
    let disk = format!("vda,file={}", overlay.display());
    world.snapshot_outside(
        "s1",
        &[
            "--no-metadata",
            "--reuse-external",
            "--diskspec",
            &disk,
            "--diskspec",
            "vdb,snapshot=no",
        ],
    );
    places.write(&mut world);
    world.assert_in_full("an overlay of version 2", "does not tell what was written");
}
