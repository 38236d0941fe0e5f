//! Random operations, compared with a vector and with what QEMU reads.

use std::fs;

use holdfast_block::to_usize;
use holdfast_image::{
    BackingFile, Compression, DataFile, DataFileKind, Format, OpenOptions, Preallocation, Qcow2Options, open,
};

use super::MIB;
use super::matrix::matrix;
use super::work::{assert_is, create_with};
use crate::peer::work;
use crate::peer::{Lab, Random, assert_reads_as, path_text};

#[test]
fn random_writes_in_every_image_kind() {
    for (seed, (what, options)) in (1..).zip(matrix()) {
        let lab = Lab::new();
        let image = lab.path("image.qcow2");
        let size_bytes = 6 * MIB + 1536;
        create_with(&image, options, size_bytes);
        let mut disk = vec![0; to_usize(size_bytes)];
        assert_is(&image, &disk, &lab, what);
        let mut random = Random(seed);
        for _ in 0..2 {
            work(&image, &mut disk, &mut random, 60);
            assert_is(&image, &disk, &lab, what);
        }
    }
}

#[test]
fn random_writes_with_overlays_snapshots_and_compression() {
    for (seed, (what, mut options)) in (100..).zip(matrix()) {
        let lab = Lab::new();
        let image = lab.path("image.qcow2");
        let size_bytes = 5 * MIB;
        // The base is shorter than the disk, and compressed.
        let (_, base) = lab.raw("base.raw", 3 * MIB + 512, seed);
        let mut disk = vec![0; to_usize(size_bytes)];
        disk[..base.len()].copy_from_slice(&base);
        lab.qemu_img("convert -c -O qcow2 base.raw base.qcow2");
        options.preallocation = Preallocation::Off;
        options.backing = Some(BackingFile {
            name: "base.qcow2".to_owned(),
            format: Format::Qcow2,
        });
        let has_snapshots = options.refcount_bits > 1;
        create_with(&image, options, size_bytes);
        let mut random = Random(seed);
        work(&image, &mut disk, &mut random, 30);
        assert_is(&image, &disk, &lab, what);
        if has_snapshots {
            lab.qemu_img("snapshot -c kept image.qcow2");
            let kept = disk.clone();
            work(&image, &mut disk, &mut random, 40);
            assert_is(&image, &disk, &lab, what);
            let opened = open(&image, &OpenOptions::default()).unwrap();
            assert_reads_as(&*opened.snapshot("kept").unwrap(), &kept, what);
            drop(opened);
            // QEMU reverts to and deletes the snapshot: our refcounts and flags must suit it.
            lab.qemu_img("snapshot -a kept image.qcow2");
            let mut other = kept.clone();
            work(&image, &mut other, &mut random, 20);
            lab.qemu_img("snapshot -a kept image.qcow2");
            assert_is(&image, &kept, &lab, what);
            lab.qemu_img("snapshot -d kept image.qcow2");
            disk = kept;
            work(&image, &mut disk, &mut random, 20);
            assert_is(&image, &disk, &lab, what);
        }
    }
}

#[test]
fn writes_replace_compressed_clusters() {
    for (compression, cluster_bytes) in [
        (Compression::Zlib, 65_536),
        (Compression::Zstd, 65_536),
        (Compression::Zlib, 4096),
    ] {
        let lab = Lab::new();
        let (_, mut disk) = lab.raw("source.raw", 4 * MIB, 77);
        let image = lab.path("image.qcow2");
        let option = format!("compression_type={},cluster_size={cluster_bytes}", compression.name());
        lab.qemu_img(&format!("convert -c -O qcow2 -o {option} source.raw image.qcow2"));
        work(&image, &mut disk, &mut Random(7), 60);
        assert_is(&image, &disk, &lab, &option);
    }
}

#[test]
fn random_writes_with_external_data_files() {
    for kind in [DataFileKind::Plain, DataFileKind::Raw] {
        for extended_l2 in [false, true] {
            let lab = Lab::new();
            let image = lab.path("image.qcow2");
            let data_file = Some(DataFile {
                name: path_text(&lab.path("data")).to_owned(),
                kind,
                made_at: None,
            });
            let qcow2 = Qcow2Options {
                data_file,
                extended_l2,
                ..Qcow2Options::default()
            };
            create_with(&image, qcow2, 4 * MIB);
            let mut disk = vec![0; to_usize(4 * MIB)];
            work(&image, &mut disk, &mut Random(3), 80);
            assert_is(&image, &disk, &lab, "data file");
            if kind == DataFileKind::Raw {
                assert!(fs::read(lab.path("data")).unwrap() == disk, "the data file is the disk");
            }
        }
    }
}
