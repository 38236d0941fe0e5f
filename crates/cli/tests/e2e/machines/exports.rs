//! `export --now`: exports the current state of a machine without a repository. The archive is of one point in time,
//! and the machine is unchanged afterwards.

use std::time::Duration;

use holdfast_block::{Clock as _, SystemClock};
use holdfast_host::domain_xml::DomainXml;
use holdfast_host::qemu::{disks, runs_in};
use holdfast_host::{DiskSource, MachineState};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::{World, at};
use crate::program::stderr;
use crate::rig::{Rig, assert_runs};

impl World {
    fn export_now(&self, words: &[&str]) -> Value {
        let words = [&["export", "--now"], words].concat();
        self.rig.report(&at(&self.lab.uri(), &words))
    }

    /// Asserts that an archive has the content of the disks.
    fn assert_archive_is_right(&self, archive: &str) {
        let rig = Rig::new();
        let path = self.rig.path(archive);
        rig.ok(&["import", path.to_str().unwrap()]);
        let shown = rig.report(&["show", "web1"]);
        let names = shown["snapshot"]["disks"].as_array().unwrap().iter();
        let mut names: Vec<&str> = names.filter_map(|disk| disk["name"].as_str()).collect();
        // Other files have an extension.
        names.retain(|name| !name.contains('.'));
        assert_eq!(names.len(), 2, "{archive}: {names:?}");
        for (target, bytes) in names.iter().zip(&self.disks) {
            rig.ok(&["restore", "--force", &format!("web1@latest:{target}"), "disk"]);
            assert!(rig.read("disk") == *bytes, "{archive}: {target}");
        }
    }

    /// The names in the folder, without the state of the program.
    fn created_names(&self) -> Vec<String> {
        let mut names = self.rig.names("");
        names.retain(|name| name != "state");
        names
    }

    fn bitmaps(&self) -> Vec<String> {
        let disks = disks(self.machine().monitor()).unwrap().into_iter();
        disks.flat_map(|disk| disk.bitmaps).map(|bitmap| bitmap.name).collect()
    }
}

#[test]
fn a_running_machine_is_exported_to_every_kind_of_archive() {
    let mut world = World::new();
    world.rig = Rig::empty();
    world.write(0, 7, 1 << 20, 65_536);
    world.write(1, 9, 3000, 100_000);
    let planned = world.export_now(&["web1", "web1.xva", "--dry-run"]);
    assert_eq!(
        (&planned["dry_run"], &planned["method"]),
        (&true.into(), &"filter".into()),
        "{planned}"
    );
    assert_eq!(world.created_names(), [""; 0], "a dry run creates no file");
    world.assert_runs_and_is_clean();
    for archive in ["web1.xva", "web1.xva.zst", "web1.ova", "web1.vma", "web1.vma.gz"] {
        let report = world.export_now(&["web1", archive]);
        assert!(report["snapshot"].is_null() && report["machine"] == "web1", "{report}");
        assert_eq!(report["instant"]["method"], "filter");
        assert_eq!(report["instant"]["consistency"], "crash");
        assert_eq!(report["instant"]["paused_us"], 0);
        assert!(report["written_bytes"].as_u64().unwrap() > 0, "{report}");
        world.assert_runs_and_is_clean();
        world.assert_archive_is_right(archive);
    }
    world.export_now(&["web1", "folder", "--format", "dir", "--disk-format", "raw"]);
    assert_eq!(world.rig.names("folder"), ["domain.xml", "vda.raw", "vdb.raw"]);
    // The folder is a machine: its configuration refers to these images, not to those of the running one.
    let configuration = DomainXml::parse(&String::from_utf8(world.rig.read("folder/domain.xml")).unwrap()).unwrap();
    let sources = configuration.disks.iter().map(|disk| disk.source.clone());
    let sources = sources.filter(|source| *source != DiskSource::Empty);
    let expected = ["vda", "vdb"].map(|disk| DiskSource::File(world.rig.path(&format!("folder/{disk}.raw"))));
    assert_eq!(sources.collect::<Vec<_>>(), expected);
    assert!(world.rig.read("folder/vda.raw") == world.disks[0] && world.rig.read("folder/vdb.raw") == world.disks[1]);
    let report = world.export_now(&["web1", "box", "--format", "vbox", "--exclude", "vdb"]);
    assert_eq!(report["disks"].as_array().unwrap().len(), 1);
    assert!(report["dropped"].to_string().contains("disk vdb"), "{report}");
    world.rig.ok(&["image", "convert", "box/web1-vda.vdi", "vda.raw"]);
    assert!(world.rig.read("vda.raw") == world.disks[0]);
    let uri = world.lab.uri();
    let output = world
        .rig
        .run(&at(&uri, &["export", "--now", "web1", "-", "--format", "xva"]));
    assert!(output.status.success(), "{}", stderr(&output));
    world.rig.write("piped.xva", &output.stdout);
    world.assert_archive_is_right("piped.xva");
    world.assert_runs_and_is_clean();
    assert!(world.bitmaps().is_empty());
    let shown = world.rig.ok(&at(&uri, &["export", "--now", "web1", "again.xva"]));
    assert!(
        shown.contains("as it was at this moment") && shown.contains("; not paused"),
        "{shown}"
    );
}

/// Writes of the guest during the export are not in the archive; and later backups remain incremental.
#[test]
fn an_export_is_of_one_point_in_time_and_keeps_backups_incremental() {
    let mut world = World::new();
    world.back_up();
    let known = world.bitmaps();
    assert_eq!(known.len(), 2);
    let uri = world.lab.uri();
    let words = ["export", "--now", "web1", "web1.xva", "--bwlimit=4M"];
    let mut child = world.rig.command(&at(&uri, &words)).spawn().unwrap();
    let machine = world.machine();
    while runs_in(machine.monitor()).unwrap().is_empty() {
        assert_runs(&mut child);
        world.lab.clock.sleep(Duration::from_millis(5));
    }
    // The filter exists before the point in time; wait until the point in time has passed.
    world.lab.clock.sleep(Duration::from_millis(500));
    let before = world.disks.clone();
    world.write(0, 33, 7 << 20, 65_536);
    world.write(1, 34, 7 << 20, 65_536);
    assert_runs(&mut child);
    assert!(child.wait().unwrap().success());
    let now = std::mem::replace(&mut world.disks, before);
    world.assert_archive_is_right("web1.xva");
    world.disks = now;
    world.assert_runs_and_is_clean();
    assert_eq!(world.bitmaps(), known);
    let next = world.back_up();
    for disk in next["disks"].as_array().unwrap() {
        assert_eq!(
            (&disk["is_incremental"], &disk["dirty_bytes"]),
            (&true.into(), &65_536.into()),
            "{disk}"
        );
    }
    world.assert_snapshot_is_right("after an export");
}

#[test]
fn machines_are_exported_by_every_method() {
    let mut world = World::new();
    world.rig = Rig::empty();
    world.write(0, 7, 65_536, 65_536);
    for method in ["overlay", "pause"] {
        let report = world.export_now(&["web1", &format!("{method}.xva"), "--method", method]);
        assert_eq!(report["instant"]["method"], method);
        world.assert_archive_is_right(&format!("{method}.xva"));
        world.assert_runs_and_is_clean();
    }
    world.lab.virsh(&["suspend", "web1"]);
    let report = world.export_now(&["web1", "paused.xva"]);
    assert!(report["instant"]["paused_us"].is_null());
    assert_eq!(world.machine().describe().unwrap().summary.state, MachineState::Paused);
    world.assert_archive_is_right("paused.xva");
    world.lab.virsh(&["resume", "web1"]);
    world.lab.virsh(&["destroy", "web1"]);
    let report = world.export_now(&["web1", "off.ova"]);
    assert_eq!(report["instant"]["method"], "images");
    assert_eq!(report["instant"]["consistency"], "shut off");
    world.assert_archive_is_right("off.ova");
}

/// A machine that is resumed during the pause is not of one point in time: no file is left that looks like an archive.
#[test]
fn an_export_of_a_machine_resumed_during_the_pause_is_not_kept() {
    let mut world = World::new();
    world.rig = Rig::empty();
    for (target, kind) in [("web1.xva", "xva"), ("folder", "dir")] {
        let words = [
            "export",
            "--now",
            "web1",
            target,
            "--format",
            kind,
            "--method=pause",
            "--bwlimit=3M",
        ];
        let mut command = world.rig.command(&at(&world.lab.uri(), &words));
        let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        while world.lab.virsh(&["domstate", "web1"]).trim() != "paused" {
            world.lab.clock.sleep(Duration::from_millis(5));
        }
        world.lab.virsh(&["resume", "web1"]);
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(
            stderr(&output).contains("it was resumed while it was read"),
            "{}",
            stderr(&output)
        );
        assert!(world.created_names().is_empty(), "{:?}", world.created_names());
    }
}

#[test]
fn a_killed_export_leaves_the_machine_running_and_no_archive() {
    let mut world = World::new();
    world.rig = Rig::empty();
    let words = ["export", "--now", "web1", "web1.xva", "--bwlimit=2M"];
    let mut child = world.rig.command(&at(&world.lab.uri(), &words)).spawn().unwrap();
    let (machine, clock) = (world.machine(), SystemClock::new());
    while runs_in(machine.monitor()).unwrap().is_empty() {
        clock.sleep(Duration::from_millis(5));
    }
    clock.sleep(Duration::from_millis(300));
    kill_process(Pid::from_child(&child), Signal::KILL).unwrap();
    child.wait().unwrap();
    let dead_since = clock.now();
    while !runs_in(machine.monitor()).unwrap().is_empty() {
        let waited = clock.now().saturating_sub(dead_since);
        assert!(
            waited < Duration::from_secs(20),
            "the watchdog has not cleaned up after {waited:?}"
        );
        clock.sleep(Duration::from_millis(50));
    }
    world.assert_runs_and_is_clean();
    let left = world.created_names();
    assert!(
        left.iter()
            .all(|name| name.starts_with('.') && name.ends_with(".partial")),
        "{left:?}"
    );
    world.export_now(&["web1", "web1.xva"]);
    world.assert_archive_is_right("web1.xva");
    assert_eq!(world.created_names(), ["web1.xva"]);
}

#[test]
fn impossible_exports_are_refused_before_the_machine_is_touched() {
    let mut world = World::new();
    world.rig = Rig::empty();
    world.rig.write("taken.xva", b"mine");
    world.rig.write("full/mine", b"mine");
    let uri = world.lab.uri();
    for (code, words, text) in [
        (1, &["web1", "taken.xva"][..], "exists"),
        (1, &["web1", "full", "--format", "dir"], "not empty"),
        (1, &["web1", "x.xva", "--exclude", "vdz"], "vdz"),
        (1, &["missing", "x.xva"], "missing"),
        (2, &["web*", "x.xva"], "may mean several"),
        (2, &["tag:x", "x.xva"], "may mean several"),
        (2, &["vbox:web1", "x.xva"], "another's"),
        (2, &["xen://xen1/web1", "x.xva"], "another's"),
        (2, &["./disk.raw", "x.xva"], "no machine"),
        (
            2,
            &["web1", "x.xva", "--method=pause", "--quiesce=require"],
            "do not go together",
        ),
    ] {
        let (_, error) = world
            .rig
            .error(code, &at(&uri, &[&["export", "--now"], words].concat()));
        assert!(error.contains(text), "{words:?}: {error}");
    }
    let (_, error) = world.rig.error(2, &["export", "web1", "x.xva", "--quiesce=off"]);
    assert!(error.contains("add --now"), "{error}");
    assert!(world.rig.read("taken.xva") == b"mine" && world.rig.names("full") == ["mine"]);
    assert_eq!(world.created_names(), ["full", "taken.xva"]);
    world.assert_runs_and_is_clean();
}
