//! Snapshots whose files are reflinks: unfinished ones, links, and concurrent processes.

use std::fs::{read, write};

use holdfast_host::provider::{HostSnapshotLabel, HostSnapshotScope, ProviderError};
use holdfast_test_kit::file_systems::Mounted;

use super::{World, is_missing};

/// An uncommitted reflink snapshot does not count, and the next one of its name replaces it.
#[test]
fn an_uncommitted_reflink_snapshot_does_not_count() {
    let place = tempfile::tempdir().unwrap();
    let Ok(mounted) = Mounted::at("xfs", &place.path().join("mounted")) else {
        return;
    };
    let world = World::new(&mounted);
    let label = HostSnapshotLabel {
        name: "one",
        time_s: 1,
        record: "",
    };
    world.provider.prepare(&[world.wanted()], &label).unwrap();
    world.provider.create(&[world.wanted()], &label).unwrap();
    assert_eq!(world.names(), [""; 0]);
    drop(world);
    // Its maker is dead, so a snapshot of the same name replaces it.
    let world = World::new(&mounted);
    write(world.folder.join("disk.raw"), [3; 3]).unwrap();
    world.take("one", 5).unwrap();
    let view = world.provider.view(&world.name("one"), "look").unwrap();
    assert_eq!(read(view.path().join("disk.raw")).unwrap(), [3; 3]);
}

/// The owner of a dataset may put links into it, and the process that takes snapshots may be root.
#[test]
fn links_are_not_followed() {
    let place = tempfile::tempdir().unwrap();
    let Ok(mounted) = Mounted::at("xfs", &place.path().join("mounted")) else {
        return;
    };
    let world = World::new(&mounted);
    let elsewhere = place.path().join("elsewhere");
    std::fs::create_dir_all(elsewhere.join("snapshots/one")).unwrap();
    write(elsewhere.join("secret"), [5; 10_000]).unwrap();
    std::os::unix::fs::symlink(&elsewhere, world.folder.join(".holdfast")).unwrap();
    for refused in [
        world.take("two", 1),
        world.provider.destroy(&world.name("one")),
        world.provider.hold(&world.name("one"), "keep"),
        world.provider.snapshots(&world.dataset.name).map(drop),
    ] {
        assert!(matches!(refused, Err(ProviderError::Refused { .. })), "{refused:?}");
    }
    assert!(elsewhere.join("snapshots/one").exists());
    // A folder that other users own or may read is not trusted either.
    std::fs::remove_file(world.folder.join(".holdfast")).unwrap();
    std::fs::create_dir(world.folder.join(".holdfast")).unwrap();
    std::os::unix::fs::chown(world.folder.join(".holdfast"), Some(12345), None).unwrap();
    assert!(world.take("two", 1).is_err());
    std::fs::remove_dir(world.folder.join(".holdfast")).unwrap();

    // Links to files, and folders that became links, are not followed.
    std::os::unix::fs::symlink(elsewhere.join("secret"), world.folder.join("link")).unwrap();
    world.take("two", 1).unwrap();
    let view = world.provider.view(&world.name("two"), "look").unwrap();
    assert!(!view.path().join("link").exists() && view.path().join("disk.raw").exists());
    let wanted = HostSnapshotScope {
        files: vec!["link".into()],
        ..world.wanted()
    };
    let label = HostSnapshotLabel {
        name: "three",
        time_s: 1,
        record: "",
    };
    world.provider.prepare(std::slice::from_ref(&wanted), &label).unwrap();
    assert!(world.provider.create(&[wanted], &label).is_err());
    assert_eq!(world.names(), ["two"]);
}

/// Two processes create one snapshot at the same time: the second gets an error, and does no harm.
#[test]
fn a_snapshot_of_another_maker_is_not_touched() {
    let place = tempfile::tempdir().unwrap();
    let Ok(mounted) = Mounted::at("xfs", &place.path().join("mounted")) else {
        return;
    };
    let (first, second) = (World::new(&mounted), World::new(&mounted));
    let label = HostSnapshotLabel {
        name: "one",
        time_s: 1,
        record: "",
    };
    first.provider.prepare(&[first.wanted()], &label).unwrap();
    first.provider.create(&[first.wanted()], &label).unwrap();
    let refused = second.take("one", 1).unwrap_err();
    assert!(refused.to_string().contains("another process is creating"), "{refused}");
    assert!(is_missing(&second.provider.destroy(&second.name("one")).unwrap_err()));
    first.provider.commit(&[first.wanted()], &label).unwrap();
    assert_eq!(first.names(), ["one"]);
    // A snapshot that is abandoned after its creation leaves nothing.
    let label = HostSnapshotLabel { name: "two", ..label };
    first.provider.prepare(&[first.wanted()], &label).unwrap();
    first.provider.create(&[first.wanted()], &label).unwrap();
    first.provider.destroy(&first.name("two")).unwrap();
    assert!(first.provider.commit(&[first.wanted()], &label).is_err());
    let left = std::fs::read_dir(first.folder.join(".holdfast/snapshots")).unwrap();
    assert_eq!(left.count(), 1);
}
