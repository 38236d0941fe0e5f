//! Files that cannot be compared.

use std::fs::{self, File};

use holdfast_host::changed_blocks::{ExtentError, by_extents};

use crate::mounts::Mount;

fn files(mount: &Mount) -> (File, File) {
    let [first, second] = ["first", "second"].map(|name| {
        fs::write(mount.path(name), [1; 10_000]).unwrap();
        File::open(mount.path(name)).unwrap()
    });
    (first, second)
}

/// ext4 overwrites in place: two files without shared blocks prove nothing, and it has no snapshots.
#[test]
fn other_file_systems_are_refused() {
    let Some(mount) = Mount::new("mkfs.ext4", &["-q"], "noatime") else {
        return;
    };
    let (first, second) = files(&mount);
    let result = by_extents(&first, &second);
    assert!(
        matches!(result, Err(ExtentError::FileSystem { magic: 0xef53 })),
        "{result:?}"
    );
}

#[test]
fn files_on_different_devices_are_refused() {
    let makers = [
        ("mkfs.xfs", "-q"),
        ("mkfs.xfs", "-q"),
        ("mkfs.btrfs", "-q"),
        ("mkfs.btrfs", "-q"),
    ];
    let mounts: Vec<_> = makers
        .iter()
        .filter_map(|(program, argument)| Mount::new(program, &[argument], "noatime"))
        .collect();
    let pairs: Vec<_> = mounts.iter().map(files).collect();
    for (number, (first, second)) in pairs.iter().enumerate() {
        by_extents(first, second).unwrap();
        let mut strangers = vec![
            File::open(mounts[number].path("")).unwrap(),
            File::open(mounts[number].path("first")).unwrap(),
        ];
        let elsewhere = pairs.iter().enumerate().filter(|(other, _)| *other != number);
        strangers.extend(elsewhere.map(|(_, (other, _))| other.try_clone().unwrap()));
        for other in &strangers {
            for (before, after) in [(first, other), (other, first)] {
                let result = by_extents(before, after);
                assert!(matches!(result, Err(ExtentError::Unusable { .. })), "{result:?}");
            }
        }
    }
}
