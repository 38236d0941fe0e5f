//! Clones of machines whose guests get an identity of their own.

use super::at;
use super::host_snapshots::on;
use crate::sysprep::{asked, fails, marked, works};

#[test]
fn virt_sysprep_runs_before_a_clone_starts_or_the_clone_fails() {
    let Some(mut on) = on("btrfs") else { return };
    let uri = on.world.lab.uri();
    works(&mut on.world.rig);
    let report = on.point(0, &["clone", "web1", "trial", "--sysprep", "--start"]);
    let target = &report["machines"][0]["restore"]["target_machine"];
    assert_eq!(
        (&target["name"], &target["is_started"]),
        (&"trial".into(), &true.into())
    );
    let words = asked(&on.world.rig);
    // All disks are passed at once, each with its format.
    assert!(
        words.contains("--hostname trial --format qcow2 --add ") && words.contains("--format raw --add "),
        "{words}"
    );
    on.world.lab.virsh(&["destroy", "trial"]);
    on.world.rig.ok(&at(&uri, &["backup", "trial"]));
    for (disk, bytes) in ["vda", "vdb"].iter().zip(&on.world.disks) {
        on.world
            .rig
            .ok(&["restore", "--force", &format!("trial@latest:{disk}"), "clone.raw"]);
        assert!(on.world.rig.read("clone.raw") == marked(bytes), "{disk}");
    }
    on.world.assert_runs_and_is_clean();
    on.world.back_up();
    on.world.assert_snapshot_is_right("the original");
    let before = on.world.files();
    fails(&mut on.world.rig);
    let (_, said) = on.point_refused(&["clone", "web1", "other", "--sysprep", "--start"]);
    assert!(said.contains("no operating systems"), "{said}");
    assert_eq!((on.world.files(), on.world.machines().len()), (before, 2));
    assert_eq!((on.unfinished(), on.listed(&["web1"]).len()), (vec![], 0));
}
