//! Providers of host snapshots on real file systems: one test suite, which all of them pass.
#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "tests run the system's programs"
)]

mod reflinks;
mod volumes;

use std::fs::{read, write};
use std::path::Path;

use holdfast_host::provider::{
    Dataset, HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, Located, Provider, ProviderError, locate,
};

use holdfast_test_kit::file_systems::{FileSystem, Mounted, system, with_each};

/// A dataset of a file system, with two files.
struct World {
    provider: Box<dyn Provider>,
    dataset: Dataset,
    folder: std::path::PathBuf,
}

impl World {
    fn new(file_system: &dyn FileSystem) -> Self {
        let provider = file_system.provider();
        let (name, folder) = file_system.dataset();
        write(folder.join("disk.raw"), vec![1; 300_000]).unwrap();
        std::fs::create_dir_all(folder.join("more")).unwrap();
        write(folder.join("more/b c.raw"), vec![2; 5000]).unwrap();
        let provider_kind = provider.kind();
        Self {
            provider,
            dataset: Dataset {
                provider: provider_kind,
                name,
            },
            folder,
        }
    }

    fn wanted(&self) -> HostSnapshotScope {
        HostSnapshotScope::all_of(self.dataset.clone())
    }

    fn name(&self, name: &str) -> HostSnapshotName {
        HostSnapshotName {
            dataset: self.dataset.clone(),
            name: name.to_owned(),
        }
    }

    fn take(&self, name: &str, time_s: i64) -> Result<(), ProviderError> {
        let label = HostSnapshotLabel {
            name,
            time_s,
            record: "{\"first\": 1}",
        };
        let groups = self.provider.groups(&[self.wanted()])?;
        assert_eq!(groups.len(), 1);
        self.provider.prepare(&groups[0], &label)?;
        self.provider.create(&groups[0], &label)?;
        self.provider.commit(&groups[0], &label)
    }

    fn names(&self) -> Vec<String> {
        let snapshots = self.provider.snapshots(&self.dataset.name).unwrap();
        snapshots.into_iter().map(|snapshot| snapshot.name.name).collect()
    }
}

fn is_missing(error: &ProviderError) -> bool {
    matches!(error, ProviderError::NotFound { .. })
}

#[test]
fn a_snapshot_does_not_change() {
    with_each(|file_system| {
        let world = World::new(file_system);
        assert_eq!(world.names(), [""; 0], "{}", file_system.name());
        world.take("one", 100).unwrap();
        write(world.folder.join("disk.raw"), vec![9; 100]).unwrap();
        std::fs::remove_file(world.folder.join("more/b c.raw")).unwrap();
        world.take("two", 200).unwrap();
        assert_eq!(world.names(), ["one", "two"], "{}", file_system.name());

        let view = world.provider.view(&world.name("one"), "look").unwrap();
        assert!(read(view.path().join("disk.raw")).unwrap() == vec![1; 300_000]);
        assert!(read(view.path().join("more/b c.raw")).unwrap() == vec![2; 5000]);
        assert!(!view.path().join(".holdfast/snapshots/one").exists());
        drop(view);
        let view = world.provider.view(&world.name("two"), "look").unwrap();
        assert!(read(view.path().join("disk.raw")).unwrap() == vec![9; 100]);
        assert!(!view.path().join("more/b c.raw").exists());
    });
}

/// After the inspection, another process replaces the snapshot by one of the same name: that one stays.
#[test]
fn a_replacement_of_an_inspected_snapshot_is_not_removed() {
    with_each(|file_system| {
        let world = World::new(file_system);
        let looked_at = || world.provider.snapshots(&world.dataset.name).unwrap().remove(0);
        world.take("one", 100).unwrap();
        let first = looked_at();
        if file_system.name() == "zfs" {
            // Without a GUID in its list, the time in seconds identifies it.
            holdfast_block::Clock::sleep(
                &holdfast_block::SystemClock::new(),
                std::time::Duration::from_millis(1100),
            );
        }
        world.provider.destroy(&first.name).unwrap();
        write(world.folder.join("disk.raw"), vec![9; 100]).unwrap();
        world.take("one", 100).unwrap();
        let second = looked_at();
        assert!(!first.is_still(&second), "{}", file_system.name());
        let kept = world.provider.destroy_this(&first);
        assert!(matches!(kept, Err(ProviderError::Replaced { .. })), "{kept:?}");
        assert_eq!(looked_at(), second);
        let view = world.provider.view(&world.name("one"), "look").unwrap();
        assert!(read(view.path().join("disk.raw")).unwrap() == vec![9; 100]);
        drop(view);
        world.provider.destroy_this(&second).unwrap();
        assert_eq!(world.names(), [""; 0]);
        let error = world.provider.destroy_this(&second).unwrap_err();
        assert!(is_missing(&error), "{error}");
    });
}

/// A prepared snapshot that is never created leaves nothing, and does not block another attempt.
#[test]
fn a_prepared_snapshot_can_be_abandoned() {
    with_each(|file_system| {
        let world = World::new(file_system);
        let label = HostSnapshotLabel {
            name: "one",
            time_s: 100,
            record: "{}",
        };
        for _ in 0..2 {
            world.provider.prepare(&[world.wanted()], &label).unwrap();
            world.provider.abandon(&[world.wanted()], &label);
            assert_eq!(world.provider.leftovers(&world.dataset.name).unwrap(), []);
            assert!(!world.provider.is_making(&world.dataset.name));
        }
        let snapshots = std::fs::read_dir(world.folder.join(".holdfast/snapshots"));
        assert_eq!(snapshots.map_or(0, std::iter::Iterator::count), 0);
        world.take("one", 100).unwrap();
        // The prepared snapshot of another process is not abandoned.
        file_system.provider().abandon(&[world.wanted()], &label);
        assert_eq!(world.names(), ["one"]);
        let noted = world.provider.noted(&world.dataset.name).unwrap();
        let record = noted.iter().map(|one| (&one.name.name[..], one.record.as_deref()));
        assert_eq!(record.collect::<Vec<_>>(), [("one", Some("{\"first\": 1}"))]);
    });
}

#[test]
fn clones_of_a_snapshot_are_listed() {
    with_each(|file_system| {
        let world = World::new(file_system);
        world.take("one", 100).unwrap();
        let clones = || world.provider.clones(&world.name("one")).unwrap();
        assert_eq!(clones(), [""; 0]);
        let name = file_system.clone_name();
        world.provider.clone_to(&world.name("one"), &name).unwrap();
        // Clones of other providers share blocks, and do not depend on the snapshot.
        let is_needed = file_system.name() == "zfs";
        assert_eq!(clones(), if is_needed { vec![name] } else { Vec::new() });
    });
}

#[test]
fn snapshots_are_described() {
    with_each(|file_system| {
        let world = World::new(file_system);
        world.take("one", 1_000_000_000).unwrap();
        let settled = HostSnapshotLabel {
            name: "one",
            time_s: 1_000_000_000,
            record: "{\"second\": \"a b\"}",
        };
        world.provider.commit(&[world.wanted()], &settled).unwrap();
        let mut snapshots = world.provider.snapshots(&world.dataset.name).unwrap();
        world.provider.measure(&mut snapshots).unwrap();
        let snapshot = &snapshots[0];
        assert_eq!(snapshot.record.as_deref(), Some("{\"second\": \"a b\"}"));
        assert_eq!(snapshot.hold_count, 0);
        match file_system.name() {
            // Only the clock of ZFS itself is real here.
            "zfs" => assert!(snapshot.time_s > 1_700_000_000),
            _ => assert_eq!(snapshot.time_s, 1_000_000_000),
        }
        if file_system.name() != "xfs" {
            assert!(snapshot.referenced_bytes.unwrap() >= 305_000, "{snapshot:?}");
            assert!(snapshot.used_bytes.unwrap() < 305_000, "{snapshot:?}");
        }
        let state = world.provider.dataset(&world.dataset.name).unwrap();
        assert_eq!(state.folder.as_deref(), Some(&*world.folder));
        let all = world.provider.datasets().unwrap();
        let is_listed = all.iter().any(|one| one.dataset == world.dataset);
        assert!(is_listed != (file_system.name() == "xfs"), "{all:?}");
        assert!(all.iter().all(|one| !one.dataset.name.contains(".holdfast")));
        assert!(!state.is_volume && state.available_bytes.unwrap() > 1 << 20);
    });
}

#[test]
fn names_are_unique_and_checked() {
    with_each(|file_system| {
        let world = World::new(file_system);
        world.take("one", 1).unwrap();
        let again = world.take("one", 2).unwrap_err();
        assert!(
            matches!(again, ProviderError::Exists { .. }),
            "{}: {again}",
            file_system.name()
        );
        for name in ["", "a/b", "a@b", "../x", ".x", "-x", "a b", "ä", &"x".repeat(300)] {
            assert!(
                matches!(world.take(name, 1), Err(ProviderError::Name { .. })),
                "{name:?}"
            );
        }
        assert_eq!(world.names(), ["one"]);
    });
}

#[test]
fn a_held_snapshot_cannot_be_removed() {
    with_each(|file_system| {
        let world = World::new(file_system);
        let provider = &world.provider;
        for (name, time_s) in [("one", 1), ("two", 2), ("three", 3)] {
            world.take(name, time_s).unwrap();
        }
        provider.hold(&world.name("two"), "keep").unwrap();
        let twice = provider.hold(&world.name("two"), "keep");
        assert!(matches!(twice, Err(ProviderError::Held { .. })), "{twice:?}");
        provider.hold(&world.name("two"), "other").unwrap();
        if let Some(mut tags) = provider.hold_tags(&world.name("two")).unwrap() {
            tags.sort();
            assert_eq!(tags, ["keep", "other"]);
            assert_eq!(provider.hold_tags(&world.name("one")).unwrap(), Some(Vec::new()));
        }
        assert_eq!(provider.snapshots(&world.dataset.name).unwrap()[1].hold_count, 2);
        let held = provider.destroy(&world.name("two")).unwrap_err();
        assert!(
            matches!(held, ProviderError::Held { .. }),
            "{}: {held}",
            file_system.name()
        );
        provider.destroy(&world.name("one")).unwrap();
        assert_eq!(world.names(), ["two", "three"]);
        provider.release(&world.name("two"), "keep").unwrap();
        assert!(provider.destroy(&world.name("two")).is_err());
        provider.release(&world.name("two"), "other").unwrap();
        assert!(is_missing(&provider.release(&world.name("two"), "other").unwrap_err()));
        provider.destroy(&world.name("two")).unwrap();
        assert_eq!(world.names(), ["three"]);

        assert!(is_missing(&provider.destroy(&world.name("two")).unwrap_err()));
        assert!(is_missing(&provider.hold(&world.name("two"), "keep").unwrap_err()));
        assert!(provider.view(&world.name("two"), "look").is_err());
        // The name is free again, and nothing is left of the removed snapshot.
        world.take("two", 9).unwrap();
        assert_eq!(
            provider
                .snapshots(&world.dataset.name)
                .unwrap()
                .last()
                .unwrap()
                .hold_count,
            0
        );
        assert_eq!(read(world.folder.join("disk.raw")).unwrap().len(), 300_000);
    });
}

#[test]
fn a_clone_can_be_written_and_changes_nothing_else() {
    with_each(|file_system| {
        let world = World::new(file_system);
        world.take("one", 1).unwrap();
        let clone = world
            .provider
            .clone_to(&world.name("one"), &file_system.clone_name())
            .unwrap();
        let file = clone.folder.unwrap().join("disk.raw");
        assert_eq!(read(&file).unwrap().len(), 300_000);
        write(&file, [7; 10]).unwrap();
        let view = world.provider.view(&world.name("one"), "look").unwrap();
        assert!(read(view.path().join("disk.raw")).unwrap() == vec![1; 300_000]);
        assert!(read(world.folder.join("disk.raw")).unwrap() == vec![1; 300_000]);
        let again = world.provider.clone_to(&world.name("one"), &file_system.clone_name());
        assert!(matches!(again, Err(ProviderError::Exists { .. })));
        if file_system.name() == "zfs" {
            drop(view);
            let needed = world.provider.destroy(&world.name("one")).unwrap_err();
            assert!(
                matches!(&needed, ProviderError::HasClones { clones, .. } if clones.ends_with("/clone")),
                "{needed}"
            );
        }
    });
}

#[test]
fn files_are_located_by_any_path() {
    with_each(|file_system| {
        let world = World::new(file_system);
        let expected = |path: &str| match file_system.name() {
            // Each dataset needs a folder of its own.
            "xfs" => {
                let path = world.folder.join(path);
                let folder = path.parent().unwrap().to_str().unwrap().to_owned();
                (folder, Path::new(path.file_name().unwrap()).to_owned())
            }
            _ => (world.dataset.name.clone(), Path::new(path).to_owned()),
        };
        let place_of = |path: &Path| match locate(path, "test").unwrap() {
            Located::In(place) => {
                assert_eq!(place.dataset.provider, world.dataset.provider);
                (place.dataset.name, place.path)
            }
            Located::Nowhere(reason) => panic!("{}: {reason}", file_system.name()),
        };
        assert_eq!(place_of(&world.folder.join("more/b c.raw")), expected("more/b c.raw"));
        let elsewhere = tempfile::tempdir().unwrap();
        let link = elsewhere.path().join("link");
        std::os::unix::fs::symlink(world.folder.join("disk.raw"), &link).unwrap();
        assert_eq!(place_of(&link), expected("disk.raw"));
        assert!(locate(&world.folder.join("missing"), "test").is_err());

        let bound = elsewhere.path().join("bound");
        std::fs::create_dir(&bound).unwrap();
        system(
            "mount",
            &[
                "--bind",
                world.folder.join("more").to_str().unwrap(),
                bound.to_str().unwrap(),
            ],
        )
        .unwrap();
        let found = locate(&bound.join("b c.raw"), "test");
        system("umount", &[bound.to_str().unwrap()]).unwrap();
        match (file_system.name(), found.unwrap()) {
            ("zfs", Located::In(place)) => {
                assert_eq!(
                    (place.dataset, &*place.path),
                    (world.dataset.clone(), Path::new("more/b c.raw"))
                );
            }
            // The root of the subvolume is not accessible by that path, but the file can be cloned in place.
            (_, Located::In(place)) => assert_eq!(place.dataset.name, bound.to_str().unwrap()),
            (name, Located::Nowhere(reason)) => panic!("{name}: {reason}"),
        }
    });
}

#[test]
fn a_file_on_ext4_is_in_no_dataset() {
    let place = tempfile::tempdir().unwrap();
    let point = place.path().join("mounted");
    let Ok(_mounted) = Mounted::at("ext4", &point) else {
        return;
    };
    write(point.join("disk"), [1; 10]).unwrap();
    match locate(&point.join("disk"), "test").unwrap() {
        Located::Nowhere(reason) => assert!(
            reason.contains("cannot clone files") && reason.contains("ext4"),
            "{reason}"
        ),
        Located::In(place) => panic!("{place:?}"),
    }
    assert_eq!(
        std::fs::read_dir(&point).unwrap().count(),
        2,
        "nothing is left of the trial"
    );
}
