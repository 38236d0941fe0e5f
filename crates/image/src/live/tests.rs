//! Containers in a real folder.

use std::collections::BTreeMap;
use std::path::Path;

use holdfast_block::conformance::Conformance;
use holdfast_block::{BlockDevice, BlockDeviceMut as _, SeededRandom, to_usize};

use super::chain::{LiveChain, LiveOptions};
use super::collapse::{MergeObserver, MergeProgress};
use super::duplicate::{ContainerDuplicate, duplicate_container};
use super::point::PointInTime;
use super::snapshot::NewSnapshot;
use super::switch::{NewContainer, create_container};
use crate::pipeline::copy_pipeline::Continue;
use crate::{Error, Format, ImageId};

const DISK_BYTES: u64 = 3 << 20;
const LAYER_COUNT: usize = 5;

struct Unobserved;

impl MergeObserver for Unobserved {
    fn advanced(&self, _progress: &MergeProgress) -> Continue {
        Continue::Go
    }
}

fn content(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0; to_usize(device.size_bytes())];
    device.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Writes and zeroes of random lengths.
fn change(chain: &LiveChain, expected: &mut [u8], random: &mut SeededRandom) {
    for _ in 0..12 {
        let range = random.range_within(DISK_BYTES, 200_000);
        let bytes = &mut expected[to_usize(range.start)..to_usize(range.end)];
        if random.one_in(4) {
            bytes.fill(0);
            chain.write_zeroes(range).unwrap();
        } else {
            random.fill(bytes);
            chain.write_at(bytes, range.start).unwrap();
        }
    }
}

/// A new container that is open.
fn container(place: &Path, format: Format) -> LiveChain {
    let new = NewContainer {
        size_bytes: DISK_BYTES,
        format,
        properties: BTreeMap::from([("filesystem".to_owned(), "none".to_owned())]),
    };
    create_container(place, &new).unwrap();
    LiveChain::open(place, LiveOptions::default()).unwrap()
}

fn snapshot(chain: &LiveChain, name: &str) -> ImageId {
    let new = NewSnapshot {
        name: Some(name.to_owned()),
        ..NewSnapshot::default()
    };
    chain.prepare_snapshot(new).unwrap().commit().unwrap()
}

#[test]
fn a_duplicate_has_the_snapshot_and_those_below_it() {
    for format in [Format::Qcow2, Format::Parallels] {
        let folder = tempfile::tempdir().unwrap();
        let (place, target) = (folder.path().join("web1"), folder.path().join("web2"));
        let chain = container(&place, format);
        let mut random = SeededRandom::new(25);
        let mut expected = vec![0; to_usize(DISK_BYTES)];
        change(&chain, &mut expected, &mut random);
        let first = snapshot(&chain, "first");
        change(&chain, &mut expected, &mut random);
        let second = snapshot(&chain, "second");
        let of_second = expected.clone();
        change(&chain, &mut expected, &mut random);
        snapshot(&chain, "third");
        let point = PointInTime::open(&place, second).unwrap();
        let new = ContainerDuplicate {
            source: &place,
            snapshot: second,
            target: &target,
            hidden: &[first],
        };
        let mut copied = 0;
        let report = duplicate_container(&new, &mut |bytes| {
            copied += bytes;
            Continue::Go
        })
        .unwrap();
        drop(point);
        assert_eq!(report.copied_bytes, copied);
        assert_eq!(report.shared_count + report.copied_count, 2);
        let duplicate = LiveChain::open(&target, LiveOptions::default()).unwrap();
        let tree = duplicate.tree();
        assert_ne!(tree.id(), chain.tree().id());
        assert_eq!(tree.properties(), chain.tree().properties());
        let names: Vec<_> = tree.snapshots().into_iter().map(|(_, entry)| entry.name).collect();
        assert_eq!(names, [Some("second".to_owned())]);
        assert!(content(&duplicate) == of_second);
        // Neither changes the other.
        let mut of_duplicate = of_second;
        change(&duplicate, &mut of_duplicate, &mut random);
        duplicate.collapse(&Unobserved).unwrap();
        chain.hide_snapshots(&[first, second]).unwrap();
        chain.collapse(&Unobserved).unwrap();
        assert!(content(&duplicate) == of_duplicate);
        assert!(content(&chain) == expected);
        duplicate.flush().unwrap();
        drop(duplicate);
        let again = LiveChain::open(&target, LiveOptions::default()).unwrap();
        assert!(content(&again) == of_duplicate);
    }
}

#[test]
fn an_existing_folder_and_a_copy_that_is_stopped_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("web1");
    let chain = container(&place, Format::Qcow2);
    chain.write_at(&[7; 4096], 0).unwrap();
    let id = snapshot(&chain, "first");
    let duplicate = |snapshot, target: &Path| {
        let new = ContainerDuplicate {
            source: &place,
            snapshot,
            target,
            hidden: &[],
        };
        duplicate_container(&new, &mut |_| Continue::Stop)
    };
    assert!(matches!(duplicate(id, folder.path()), Err(Error::Io { .. })));
    let top = chain.tree().top();
    assert!(matches!(
        duplicate(top, &folder.path().join("web2")),
        Err(Error::NotFound { .. })
    ));
    // A file system that shares bytes copies nothing, and does not stop.
    if let Err(error) = duplicate(id, &folder.path().join("web3")) {
        assert!(matches!(error, Error::Device(_)), "{error}");
    }
}

#[test]
fn a_chain_of_layers_keeps_the_contract_of_devices() {
    for format in [Format::Qcow2, Format::Parallels] {
        let folder = tempfile::tempdir().unwrap();
        let chain = container(&folder.path().join("web1"), format);
        let mut random = SeededRandom::new(25);
        let mut expected = vec![0; to_usize(DISK_BYTES)];
        let mut snapshots = Vec::new();
        for _ in 0..LAYER_COUNT {
            change(&chain, &mut expected, &mut random);
            snapshots.push(snapshot(&chain, &format!("s{}", snapshots.len())));
        }
        change(&chain, &mut expected, &mut random);
        assert!(content(&chain) == expected);
        Conformance::new().check_read_only(&chain, &expected);
        chain.hide_snapshots(&snapshots[1..4]).unwrap();
        chain.collapse(&Unobserved).unwrap();
        Conformance::new().check_read_only(&chain, &expected);
    }
}
