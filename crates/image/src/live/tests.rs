//! Containers in a real folder.

use std::collections::BTreeMap;

use holdfast_block::conformance::Conformance;
use holdfast_block::{BlockDevice, BlockDeviceMut as _, SeededRandom, to_usize};

use super::chain::{LiveChain, LiveOptions};
use super::collapse::{MergeObserver, MergeProgress};
use super::snapshot::NewSnapshot;
use super::switch::{NewContainer, create_container};
use crate::Format;
use crate::pipeline::copy_pipeline::Continue;

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

#[test]
fn a_chain_of_layers_keeps_the_contract_of_devices() {
    for format in [Format::Qcow2, Format::Parallels] {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("web1");
        let new = NewContainer {
            size_bytes: DISK_BYTES,
            format,
            properties: BTreeMap::new(),
        };
        create_container(&place, &new).unwrap();
        let chain = LiveChain::open(&place, LiveOptions::default()).unwrap();
        let mut random = SeededRandom::new(25);
        let mut expected = vec![0; to_usize(DISK_BYTES)];
        let mut snapshots = Vec::new();
        for _ in 0..LAYER_COUNT {
            change(&chain, &mut expected, &mut random);
            let taken = chain.prepare_snapshot(NewSnapshot::default()).unwrap();
            snapshots.push(taken.commit_then(|_| ()).unwrap());
        }
        change(&chain, &mut expected, &mut random);
        assert!(content(&chain) == expected);
        Conformance::new().check_read_only(&chain, &expected);
        chain.hide_snapshots(&snapshots[1..4]).unwrap();
        chain.collapse(&Unobserved).unwrap();
        Conformance::new().check_read_only(&chain, &expected);
    }
}
