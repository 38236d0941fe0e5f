//! The image chain of a disk changes between two backups from host snapshots.

use super::host_snapshots::machine_on;
use super::{World, at};
use crate::host::{system, text};

/// Host snapshots contain all images of a folder: the current image of a disk, and its previous one.
#[test]
fn an_image_in_a_host_snapshot_is_compared_with_that_of_its_own_disk() {
    let Some(mut setup) = machine_on("btrfs") else { return };
    let uri = setup.world.lab.uri();
    let words = at(&uri, &["backup", "web1", "--method", "snapshot"]);
    let reasons = |world: &World| {
        let report = world.rig.report(&words)["machines"][0].clone();
        world.assert_snapshot_is_right("from host snapshots");
        [0, 1].map(|disk| report["disks"][disk]["reason"].as_str().map(str::to_owned))
    };
    let other = setup.world.lab.path("other");
    setup.world.stop();
    system(
        "qemu-img",
        &["convert", "-O", "raw", text(&setup.world.top_image(1)), text(&other)],
    )
    .unwrap();
    system("qemu-io", &["-f", "raw", "-c", "write -P 9 1M 4k", text(&other)]).unwrap();
    reasons(&setup.world);
    assert_eq!(reasons(&setup.world), [None, None]);
    setup.world.put(1, &other, "raw");
    setup.world.disks[1][1 << 20..(1 << 20) + 4096].fill(9);
    let [first, second] = reasons(&setup.world);
    assert!(first.is_none() && second.unwrap().contains("another image"));
    assert_eq!(reasons(&setup.world), [None, None]);

    // Both snapshots contain the previous and the current base.
    let image = setup.world.top_image(0);
    let bases = ["one", "two"].map(|name| setup.world.lab.path(name));
    for base in &bases {
        system("qemu-img", &["convert", "-O", "qcow2", text(&image), text(base)]).unwrap();
    }
    system("qemu-io", &["-f", "qcow2", "-c", "write -P 8 2M 4k", text(&bases[1])]).unwrap();
    let top = setup.world.lab.path("top");
    let based = ["-F", "qcow2", "-b", text(&bases[0])];
    system(
        "qemu-img",
        &[&["create", "-q", "-f", "qcow2"], &based[..], &[text(&top)]].concat(),
    )
    .unwrap();
    setup.world.put(0, &top, "qcow2");
    reasons(&setup.world);
    assert_eq!(reasons(&setup.world), [None, None]);
    system(
        "qemu-img",
        &["rebase", "-u", "-F", "qcow2", "-b", text(&bases[1]), text(&top)],
    )
    .unwrap();
    setup.world.disks[0][2 << 20..(2 << 20) + 4096].fill(8);
    let [first, second] = reasons(&setup.world);
    assert!(first.unwrap().contains("the disk was on one") && second.is_none());
}
