//! Random histories of a container: each backup restores to what was on the disk.

use holdfast_block::{BlockDeviceMut as _, SeededRandom, to_usize};
use holdfast_image::{ContainerLock, LiveChain, LiveOptions};

use crate::rig::{Rig, noise};

const DISK_BYTES: usize = 4 << 20;
const HISTORY_COUNT: u64 = 6;
const STEP_COUNT: usize = 14;

/// The state of a container as it should be.
struct Model {
    disk: Vec<u8>,
    snapshots: Vec<(String, Vec<u8>)>,
}

#[test]
fn every_backup_of_a_history_restores_to_what_was_there() {
    let mut incremental_count = 0;
    for seed in 0..HISTORY_COUNT {
        let mut random = SeededRandom::new(seed);
        let rig = Rig::new();
        let format = ["qcow2", "parallels"][to_usize(seed % 2)];
        rig.ok(&[
            "container",
            "create",
            "web1",
            "4M",
            "--filesystem",
            "none",
            "--format",
            format,
        ]);
        let mut model = Model {
            disk: vec![0; DISK_BYTES],
            snapshots: Vec::new(),
        };
        for step in 0..STEP_COUNT {
            match random.below(8) {
                0..=2 => write(&rig, &mut model, &mut random),
                3 => {
                    let name = format!("s{step}");
                    rig.ok(&["container", "snapshot", "web1", &name]);
                    model.snapshots.push((name, model.disk.clone()));
                }
                4 if !model.snapshots.is_empty() => {
                    let chosen = to_usize(random.below(model.snapshots.len() as u64));
                    let (name, _) = model.snapshots.remove(chosen);
                    rig.ok(&["container", "delete", "web1", &name]);
                }
                5 if !model.snapshots.is_empty() => {
                    let chosen = to_usize(random.below(model.snapshots.len() as u64));
                    let (name, disk) = model.snapshots[chosen].clone();
                    rig.ok(&["container", "switch", "web1", &name, "--discard"]);
                    model.disk = disk;
                }
                _ => {
                    let report = rig.report(&["backup", "web1"]);
                    incremental_count += usize::from(report["machines"][0]["disks"][0]["is_incremental"] == true);
                    rig.ok(&["restore", "web1:disk", "web1.raw", "--force"]);
                    assert!(rig.read("web1.raw") == model.disk, "seed {seed}, step {step}");
                }
            }
        }
    }
    assert!(incremental_count > 5, "only {incremental_count} backups read changes");
}

/// Writes data or zeroes, or trims, at a random place.
fn write(rig: &Rig, model: &mut Model, random: &mut SeededRandom) {
    let path = rig.path("web1");
    let _lock = ContainerLock::take(&path).unwrap();
    let chain = LiveChain::open(&path, LiveOptions::default()).unwrap();
    let offset = to_usize(random.below(DISK_BYTES as u64 / 512)) * 512;
    let length = (to_usize(random.below(512)) + 1) * 512;
    let range = offset..DISK_BYTES.min(offset + length);
    if random.below(4) == 0 {
        chain.write_zeroes(range.start as u64..range.end as u64).unwrap();
        model.disk[range].fill(0);
    } else {
        let bytes = noise(range.len(), random.below(1 << 40));
        chain.write_at(&bytes, range.start as u64).unwrap();
        model.disk[range].copy_from_slice(&bytes);
    }
    chain.flush().unwrap();
}
