//! Clones of machines whose guests get an identity of their own.

use super::at;
use super::host_snapshots::machine_on;
use crate::sysprep::{install_failing, install_working, marked, take_arguments};

#[test]
fn virt_sysprep_runs_before_a_clone_starts_or_the_clone_fails() {
    let Some(mut setup) = machine_on("btrfs") else { return };
    let uri = setup.world.lab.uri();
    install_working(&mut setup.world.rig);
    let report = setup.point(0, &["clone", "web1", "trial", "--sysprep", "--start"]);
    let target = &report["machines"][0]["restore"]["target_machine"];
    assert_eq!(
        (&target["name"], &target["is_started"]),
        (&"trial".into(), &true.into())
    );
    let words = take_arguments(&setup.world.rig);
    // All disks are passed at once, each with its format.
    assert!(
        words.contains("--hostname trial --format qcow2 --add ") && words.contains("--format raw --add "),
        "{words}"
    );
    setup.world.lab.virsh(&["destroy", "trial"]);
    setup.world.rig.ok(&at(&uri, &["backup", "trial"]));
    for (disk, bytes) in ["vda", "vdb"].iter().zip(&setup.world.disks) {
        setup
            .world
            .rig
            .ok(&["restore", "--force", &format!("trial@latest:{disk}"), "clone.raw"]);
        assert!(setup.world.rig.read("clone.raw") == marked(bytes), "{disk}");
    }
    setup.world.assert_runs_and_is_clean();
    setup.world.back_up();
    setup.world.assert_snapshot_is_right("the original");
    let before = setup.world.files();
    install_failing(&mut setup.world.rig);
    let (_, text) = setup.point_error(&["clone", "web1", "other", "--sysprep", "--start"]);
    assert!(text.contains("no operating systems"), "{text}");
    assert_eq!((setup.world.files(), setup.world.machines().len()), (before, 2));
    assert_eq!((setup.unfinished(), setup.listed(&["web1"]).len()), (vec![], 0));
}
