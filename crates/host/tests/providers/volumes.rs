//! Host snapshots of ZFS volumes.

use std::fs::read;

use holdfast_host::provider::{HostSnapshotLabel, HostSnapshotName, HostSnapshotScope, Located, ProviderError, locate};
use holdfast_test_kit::file_systems::{FileSystem as _, Pool};

/// A volume is found by any path of its device. A snapshot contains data written to the device, even without a flush.
#[test]
fn volumes_are_snapshotted_and_viewed() {
    if !Pool::is_in_kernel() {
        return println!("skipped: volumes need a ZFS in the kernel: make test-kernel");
    }
    let place = tempfile::tempdir().unwrap();
    let pool = Pool::at(&place.path().join("mounted")).unwrap();
    let device = pool.volume("disk", "8M").unwrap();
    let provider = pool.provider();
    let node = device.canonicalize().unwrap();
    for path in [&device, &node] {
        let Located::In(found) = locate(path, "test").unwrap() else {
            panic!("{} is in no dataset", path.display());
        };
        assert!(found.dataset.name.ends_with("/disk") && found.path.as_os_str().is_empty());
    }
    let Located::In(found) = locate(&device, "test").unwrap() else {
        unreachable!("it was found before");
    };
    let one = HostSnapshotName {
        dataset: found.dataset.clone(),
        name: "one".to_owned(),
    };
    assert!(provider.dataset(&found.dataset.name).unwrap().is_volume);
    // A writer that has the device open and does not flush.
    let open = std::fs::File::options().write(true).open(&device).unwrap();
    let put = |byte: u8| std::io::Write::write_all(&mut &open, &vec![byte; 65_536]).unwrap();
    put(7);
    let wanted = [HostSnapshotScope::all_of(found.dataset.clone())];
    let label = HostSnapshotLabel {
        name: "one",
        time_s: 1,
        record: "{}",
    };
    provider.prepare(&wanted, &label).unwrap();
    put(8);
    provider.create(&wanted, &label).unwrap();
    provider.commit(&wanted, &label).unwrap();
    put(9);
    drop(open);
    for label in ["look", "look"] {
        let view = provider.view(&one, label).unwrap();
        let bytes = read(view.path()).unwrap();
        assert!(bytes[..65_536] == vec![7; 65_536] && bytes[65_536..131_072] == vec![8; 65_536]);
        assert!(bytes.len() == 8 << 20 && bytes[131_072..].iter().all(|byte| *byte == 0));
        assert!(std::fs::File::options().write(true).open(view.path()).is_err());
        let needed = provider.destroy(&one).unwrap_err();
        assert!(matches!(needed, ProviderError::HasClones { .. }), "{needed}");
    }
    provider.destroy(&one).unwrap();
}
