//! Copies whole disks.

use std::fs;
use std::num::NonZero;

use holdfast_block::{BlockDevice as _, MemoryDevice, to_usize};
use holdfast_image::{
    Continue, CreateOptions, DataFile, DataFileKind, FillOptions, Format, OpenOptions, Preallocation, Qcow2Options,
    Storage, TargetContent, create, create_bulk, fill, fill_device, open, open_mut,
};

use super::MIB;
use super::matrix::matrix;
use super::work::{assert_is, create_bulk_with, over_base};
use crate::peer::work;
use crate::peer::{Lab, Random, path_text, sample_disk};

#[test]
fn fill_copies_the_disk() {
    let lab = Lab::new();
    let disk = sample_disk(9 * MIB + 512, 21);
    let source = MemoryDevice::from_bytes(&disk);
    for (what, options) in matrix() {
        for storage in [Storage::Plain, Storage::Compressed { level: None }] {
            let image = lab.path("image.qcow2");
            fs::remove_file(&image).ok();
            let options = Qcow2Options {
                preallocation: Preallocation::Off,
                ..options.clone()
            };
            let options_cluster_bytes = options.cluster_bytes;
            let create = CreateOptions {
                qcow2: options,
                ..CreateOptions::qcow2(disk.len() as u64)
            };
            let mut writer = create_bulk(&image, &create).unwrap();
            let fill_options = FillOptions {
                threads: NonZero::new(2).unwrap(),
                storage,
            };
            let report = fill(&source, &mut writer, &fill_options, &mut |_| Continue::Go).unwrap();
            assert!(
                open(
                    &image,
                    &OpenOptions {
                        format: Some(Format::Qcow2),
                        ..OpenOptions::default()
                    }
                )
                .is_err()
            );
            writer.finish().unwrap();
            assert_is(&image, &disk, &lab, what);
            let total = report.plain_bytes + report.compressed_bytes + report.zero_bytes;
            assert!(total.abs_diff(disk.len() as u64) < options_cluster_bytes, "{report:?}");
            assert_eq!(report.compressed_bytes > 0, storage != Storage::Plain, "{what}");
            // An image written in bulk can be written like any other.
            let mut copy = disk.clone();
            work(&image, &mut copy, &mut Random(9), 10);
            assert_is(&image, &copy, &lab, what);
        }
    }
}

#[test]
fn fill_writes_data_files_and_overlays() {
    let lab = Lab::new();
    let (_, base) = lab.raw("base.raw", 2 * MIB, 4);
    let disk = sample_disk(2 * MIB, 5);
    for kind in [DataFileKind::Plain, DataFileKind::Raw] {
        let image = lab.path(&format!("{kind:?}.qcow2"));
        let data_file = Some(DataFile {
            name: path_text(&lab.path(&format!("{kind:?}.data"))).to_owned(),
            kind,
            made_at: None,
        });
        let qcow2 = Qcow2Options {
            data_file,
            ..Qcow2Options::default()
        };
        let mut writer = create_bulk_with(&image, qcow2, 2 * MIB);
        let options = FillOptions {
            threads: NonZero::<usize>::MIN,
            storage: Storage::Plain,
        };
        fill(&MemoryDevice::from_bytes(&disk), &mut writer, &options, &mut |_| {
            Continue::Go
        })
        .unwrap();
        writer.finish().unwrap();
        assert_is(&image, &disk, &lab, "data file");
    }
    let image = lab.path("overlay.qcow2");
    let mut writer = create_bulk_with(&image, over_base(), 2 * MIB);
    writer.append(&disk[..65_536], 0).unwrap();
    writer.append_zeroes(131_072..262_144).unwrap();
    assert!(
        writer.append(&disk[..65_536], 131_072).is_err(),
        "offsets only increase"
    );
    writer.finish().unwrap();
    let mut expected = base.clone();
    expected[..65_536].copy_from_slice(&disk[..65_536]);
    expected[131_072..262_144].fill(0);
    assert_is(&image, &expected, &lab, "overlay");
    // A whole disk over a backing file: its zeroes hide the backing file.
    let image = lab.path("full.qcow2");
    let mut writer = create_bulk_with(&image, over_base(), 2 * MIB);
    let options = FillOptions {
        threads: NonZero::<usize>::MIN,
        storage: Storage::Compressed { level: None },
    };
    fill(&MemoryDevice::from_bytes(&disk), &mut writer, &options, &mut |_| {
        Continue::Go
    })
    .unwrap();
    writer.finish().unwrap();
    assert_is(&image, &disk, &lab, "full overlay");
    assert!(base != disk);
}

#[test]
fn raw_copy_is_sparse_and_equal() {
    let lab = Lab::new();
    let (_, disk) = lab.raw("source.raw", 7 * MIB + 100, 33);
    let image = lab.path("image.qcow2");
    lab.qemu_img("convert -f raw -c -O qcow2 source.raw image.qcow2");
    let source = open(&image, &OpenOptions::default()).unwrap();
    let copy = lab.path("copy.raw");
    create(&copy, &CreateOptions::raw(source.size_bytes())).unwrap();
    let target = open_mut(
        &copy,
        &OpenOptions {
            format: Some(Format::Raw),
            ..OpenOptions::default()
        },
    )
    .unwrap();
    let report = fill_device(
        &source,
        &target,
        TargetContent::Zeroes,
        NonZero::new(2).unwrap(),
        &mut |_| Continue::Go,
    )
    .unwrap();
    assert!(report.zero_bytes > 0);
    let found = fs::read(&copy).unwrap();
    assert!(found[..disk.len()] == disk[..] && found[disk.len()..].iter().all(|byte| *byte == 0));
    let stopped = fill_device(
        &source,
        &target,
        TargetContent::Zeroes,
        NonZero::new(2).unwrap(),
        &mut |_| Continue::Stop,
    );
    assert!(stopped.is_err());
}

/// A block device has old content: zeroes must be written, and bytes past the disk must stay.
#[test]
fn fill_device_overwrites_old_content() {
    let mut disk = sample_disk(3 * MIB, 9);
    disk.truncate(to_usize(3 * MIB - 100));
    let source = MemoryDevice::from_bytes(&disk);
    let target = MemoryDevice::from_bytes(&vec![0xEE; to_usize(4 * MIB)]);
    let threads = NonZero::new(2).unwrap();
    fill_device(&source, &target, TargetContent::Unknown, threads, &mut |_| Continue::Go).unwrap();
    let mut found = vec![0; to_usize(4 * MIB)];
    target.read_at(&mut found, 0).unwrap();
    assert!(found[..disk.len()] == disk[..]);
    assert!(found[disk.len()..].iter().all(|byte| *byte == 0xEE));
    let empty = MemoryDevice::new(4 * MIB);
    let stopped = fill_device(&empty, &target, TargetContent::Unknown, threads, &mut |_| {
        Continue::Stop
    });
    assert!(stopped.is_err());
}
