//! Allocation and release of clusters.

use holdfast_block::{BlockDeviceMut as _, to_usize};
use holdfast_image::{CreateOptions, OpenOptions, Qcow2Options, create, open, open_mut};

use super::MIB;
use super::work::{assert_is, create_with};
use crate::peer::{Lab, Random, qemu_check};

#[test]
fn full_refcount_table_moves() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    // A table of one 512-byte cluster covers 2 MiB with 64-bit refcounts.
    let qcow2 = Qcow2Options {
        cluster_bytes: 512,
        refcount_bits: 64,
        ..Qcow2Options::default()
    };
    create_with(&image, qcow2, 12 * MIB);
    let mut disk = vec![0; to_usize(12 * MIB)];
    Random(5).fill(&mut disk);
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    for (number, piece) in disk.chunks(100_000).enumerate() {
        device.write_at(piece, number as u64 * 100_000).unwrap();
        if number % 7 == 0 {
            device.flush().unwrap();
        }
    }
    device.flush().unwrap();
    drop(device);
    assert_is(&image, &disk, &lab, "moved table");
}

#[test]
fn freed_clusters_are_punched() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    create(&image, &CreateOptions::qcow2(32 * MIB)).unwrap();
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    device.write_at(&vec![1; to_usize(16 * MIB)], 0).unwrap();
    device.flush().unwrap();
    device.trim(0..16 * MIB).unwrap();
    device.flush().unwrap();
    let info = open(&image, &OpenOptions::default()).unwrap().layers()[0].clone();
    assert!(info.allocated_bytes.unwrap() < MIB, "{:?}", info.allocated_bytes);
    device.write_at(&vec![2; to_usize(16 * MIB)], 16 * MIB).unwrap();
    device.flush().unwrap();
    drop(device);
    let info = open(&image, &OpenOptions::default()).unwrap().layers()[0].clone();
    assert!(
        info.file_bytes < 18 * MIB,
        "freed clusters are used again: {}",
        info.file_bytes
    );
    assert_eq!(qemu_check(&image), (0, 0));
}
