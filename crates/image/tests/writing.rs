//! What we write, QEMU reads.

#![expect(clippy::unwrap_used, reason = "the helpers of tests unwrap like the tests")]

mod peer;

use std::fs;
use std::num::NonZero;
use std::path::Path;

use holdfast_block::{BlockDevice as _, BlockDeviceMut as _, MemoryDevice, to_usize};
use holdfast_image::{
    BackingFile, BitmapState, Compression, Continue, CreateOptions, DataFile, DataFileKind, Error, FillOptions, Format,
    OpenOptions, Preallocation, Qcow2Options, Storage, TargetContent, create, create_bulk, fill, fill_device, open,
    open_mut,
};
use peer::{
    Lab, Random, assert_clean, assert_reads_as, flatten, path_text, qemu_check, qemu_img, qemu_io, sample_disk,
};

const MIB: u64 = 1 << 20;

/// Options that differ in what the writer has to do.
fn matrix() -> Vec<(&'static str, Qcow2Options)> {
    let base = Qcow2Options::default();
    vec![
        ("plain", base.clone()),
        (
            "version 2",
            Qcow2Options {
                version: 2,
                ..base.clone()
            },
        ),
        (
            "512",
            Qcow2Options {
                cluster_bytes: 512,
                ..base.clone()
            },
        ),
        (
            "512, 1 bit",
            Qcow2Options {
                cluster_bytes: 512,
                refcount_bits: 1,
                ..base.clone()
            },
        ),
        (
            "512, 64 bit",
            Qcow2Options {
                cluster_bytes: 512,
                refcount_bits: 64,
                ..base.clone()
            },
        ),
        (
            "4k, zstd",
            Qcow2Options {
                cluster_bytes: 4096,
                compression: Compression::Zstd,
                ..base.clone()
            },
        ),
        (
            "2M",
            Qcow2Options {
                cluster_bytes: 2 * MIB,
                ..base.clone()
            },
        ),
        (
            "extended",
            Qcow2Options {
                extended_l2: true,
                ..base.clone()
            },
        ),
        (
            "extended, 16k",
            Qcow2Options {
                extended_l2: true,
                cluster_bytes: 16_384,
                refcount_bits: 32,
                ..base.clone()
            },
        ),
        (
            "lazy",
            Qcow2Options {
                lazy_refcounts: true,
                ..base.clone()
            },
        ),
        (
            "preallocated",
            Qcow2Options {
                preallocation: Preallocation::Metadata,
                ..base.clone()
            },
        ),
        (
            "preallocated, extended",
            Qcow2Options {
                preallocation: Preallocation::Metadata,
                extended_l2: true,
                ..base
            },
        ),
    ]
}

/// Random operations on the image and on a plain vector.
fn work(image: &Path, disk: &mut [u8], random: &mut Random, operations: u32) {
    let device = open_mut(image, &OpenOptions::default()).unwrap();
    assert_eq!(device.size_bytes(), disk.len() as u64);
    for _ in 0..operations {
        let start = random.below(disk.len() as u64);
        let longest = [512, 70_000, 600_000][to_usize(random.below(3))];
        let (mut start, mut end) = (start, (start + 1 + random.below(longest)).min(disk.len() as u64));
        if random.below(2) == 0 {
            start = start / 4096 * 4096;
            end = end.next_multiple_of(4096).min(disk.len() as u64);
        }
        let place = to_usize(start)..to_usize(end);
        match random.below(10) {
            0..6 => {
                random.fill(&mut disk[place.clone()]);
                device.write_at(&disk[place], start).unwrap();
            }
            6 | 7 => {
                disk[place].fill(0);
                device.write_zeroes(start..end).unwrap();
            }
            8 => {
                device.trim(start..end).unwrap();
                let mut found = vec![0; place.len()];
                device.read_at(&mut found, start).unwrap();
                for (now, before) in found.iter().zip(&disk[place.clone()]) {
                    assert!(now == before || *now == 0, "trimmed bytes are as before, or zero");
                }
                disk[place].copy_from_slice(&found);
            }
            _ => device.flush().unwrap(),
        }
    }
    assert_reads_as(&device, disk, "before the flush");
    device.flush().unwrap();
    assert_reads_as(&device, disk, "after the flush");
}

/// Both checks find nothing, and both sides read `disk`.
fn assert_is(image: &Path, disk: &[u8], lab: &Lab, what: &str) {
    assert_clean(image);
    assert_eq!(qemu_check(image), (0, 0), "{what}");
    assert!(flatten(image, lab) == disk, "{what}: the peer reads something else");
    assert_reads_as(&open(image, &OpenOptions::default()).unwrap(), disk, what);
}

#[test]
fn random_work_on_every_kind_of_image() {
    for (seed, (what, options)) in (1..).zip(matrix()) {
        let lab = Lab::new();
        let image = lab.path("image.qcow2");
        let size_bytes = 6 * MIB + 1536;
        create(
            &image,
            &CreateOptions {
                qcow2: options,
                ..CreateOptions::qcow2(size_bytes)
            },
        )
        .unwrap();
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
fn random_work_on_overlays_snapshots_and_compressed_clusters() {
    for (seed, (what, mut options)) in (100..).zip(matrix()) {
        let lab = Lab::new();
        let image = lab.path("image.qcow2");
        let size_bytes = 5 * MIB;
        // The base is shorter than the disk, and compressed.
        let (raw, base) = lab.raw("base.raw", 3 * MIB + 512, seed);
        let mut disk = vec![0; to_usize(size_bytes)];
        disk[..base.len()].copy_from_slice(&base);
        qemu_img(&[
            "convert",
            "-c",
            "-O",
            "qcow2",
            path_text(&raw),
            path_text(&lab.path("base.qcow2")),
        ]);
        options.preallocation = Preallocation::Off;
        options.backing = Some(BackingFile {
            name: "base.qcow2".to_owned(),
            format: Format::Qcow2,
        });
        let has_snapshots = options.refcount_bits > 1;
        create(
            &image,
            &CreateOptions {
                qcow2: options,
                ..CreateOptions::qcow2(size_bytes)
            },
        )
        .unwrap();
        let mut random = Random(seed);
        work(&image, &mut disk, &mut random, 30);
        assert_is(&image, &disk, &lab, what);
        if has_snapshots {
            qemu_img(&["snapshot", "-c", "kept", path_text(&image)]);
            let kept = disk.clone();
            work(&image, &mut disk, &mut random, 40);
            assert_is(&image, &disk, &lab, what);
            let opened = open(&image, &OpenOptions::default()).unwrap();
            assert_reads_as(&*opened.snapshot("kept").unwrap(), &kept, what);
            drop(opened);
            // Going back and deleting are the peer's: it must find our refcounts and flags as it needs them.
            qemu_img(&["snapshot", "-a", "kept", path_text(&image)]);
            let mut other = kept.clone();
            work(&image, &mut other, &mut random, 20);
            qemu_img(&["snapshot", "-a", "kept", path_text(&image)]);
            assert_is(&image, &kept, &lab, what);
            qemu_img(&["snapshot", "-d", "kept", path_text(&image)]);
            disk = kept;
            work(&image, &mut disk, &mut random, 20);
            assert_is(&image, &disk, &lab, what);
        }
    }
}

#[test]
fn compressed_clusters_are_rewritten_by_writes() {
    for (compression, cluster_bytes) in [
        (Compression::Zlib, 65_536),
        (Compression::Zstd, 65_536),
        (Compression::Zlib, 4096),
    ] {
        let lab = Lab::new();
        let (raw, mut disk) = lab.raw("source.raw", 4 * MIB, 77);
        let image = lab.path("image.qcow2");
        let option = format!("compression_type={},cluster_size={cluster_bytes}", compression.name());
        qemu_img(&[
            "convert",
            "-c",
            "-O",
            "qcow2",
            "-o",
            &option,
            path_text(&raw),
            path_text(&image),
        ]);
        work(&image, &mut disk, &mut Random(7), 60);
        assert_is(&image, &disk, &lab, &option);
    }
}

#[test]
fn random_work_on_external_data_files() {
    for kind in [DataFileKind::Plain, DataFileKind::Raw] {
        for extended_l2 in [false, true] {
            let lab = Lab::new();
            let image = lab.path("image.qcow2");
            let data_file = Some(DataFile {
                name: path_text(&lab.path("data")).to_owned(),
                kind,
            });
            let qcow2 = Qcow2Options {
                data_file,
                extended_l2,
                ..Qcow2Options::default()
            };
            create(
                &image,
                &CreateOptions {
                    qcow2,
                    ..CreateOptions::qcow2(4 * MIB)
                },
            )
            .unwrap();
            let mut disk = vec![0; to_usize(4 * MIB)];
            work(&image, &mut disk, &mut Random(3), 80);
            assert_is(&image, &disk, &lab, "data file");
            if kind == DataFileKind::Raw {
                assert!(fs::read(lab.path("data")).unwrap() == disk, "the data file is the disk");
            }
        }
    }
}

#[test]
fn the_refcount_table_moves_when_it_is_full() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    // A table of one 512-byte cluster reaches 2 MiB with 64-bit refcounts.
    let qcow2 = Qcow2Options {
        cluster_bytes: 512,
        refcount_bits: 64,
        ..Qcow2Options::default()
    };
    create(
        &image,
        &CreateOptions {
            qcow2,
            ..CreateOptions::qcow2(12 * MIB)
        },
    )
    .unwrap();
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
fn freed_clusters_give_their_space_back() {
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

#[test]
fn a_write_without_the_bitmap_makes_it_stale() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    qemu_img(&["create", "-f", "qcow2", path_text(&image), "4M"]);
    qemu_img(&["bitmap", "--add", path_text(&image), "daily"]);
    let state = || {
        let opened = open(&image, &OpenOptions::default()).unwrap();
        opened.layers()[0].qcow2.as_ref().unwrap().bitmaps[0].state
    };
    drop(open_mut(&image, &OpenOptions::default()).unwrap());
    assert_eq!(state(), BitmapState::Valid, "opening changes nothing");
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    device.write_at(&[1], 0).unwrap();
    assert_eq!(state(), BitmapState::Stale, "at once, not at the flush");
    device.flush().unwrap();
    drop(device);
    let (corruptions, _) = qemu_check(&image);
    assert_eq!(corruptions, 0);
}

#[test]
fn unsafe_images_are_not_written() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    for bit in [1u8, 2] {
        fs::remove_file(&image).ok();
        create(&image, &CreateOptions::qcow2(MIB)).unwrap();
        let mut bytes = fs::read(&image).unwrap();
        bytes[79] = bit;
        peer::overwrite(&image, &bytes);
        assert!(matches!(
            open_mut(&image, &OpenOptions::default()),
            Err(Error::NotWritable { .. })
        ));
        assert_eq!(open(&image, &OpenOptions::default()).unwrap().notes().len(), 1);
    }
    // An entry that points at the header: found before the header is overwritten, and marked.
    fs::remove_file(&image).ok();
    create(&image, &CreateOptions::qcow2(MIB)).unwrap();
    qemu_io(&image, &["write 0 64k"]);
    let mut bytes = fs::read(&image).unwrap();
    let l2 = bytes
        .windows(8)
        .rposition(|word| word[0] == 0x80 && word[7] == 0 && word[1..7] != [0; 6])
        .unwrap();
    let at_l1 = 65_536;
    bytes[l2..l2 + 8].copy_from_slice(&(1u64 << 63 | at_l1).to_be_bytes());
    peer::overwrite(&image, &bytes);
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    assert!(device.write_at(&[1], 0).is_err());
    assert!(
        device.write_at(&[1], 512 * 1024).is_err(),
        "nothing is written any more"
    );
    drop(device);
    assert_eq!(fs::read(&image).unwrap()[79], 2, "marked as corrupt");
}

#[test]
fn an_image_in_use_by_the_peer_is_locked() {
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    create(&image, &CreateOptions::qcow2(MIB)).unwrap();
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    assert!(peer::qemu_img_fails(&["snapshot", "-c", "x", path_text(&image)]).contains("lock"));
    drop(device);
    let running = peer::QemuIo::hold(&image);
    assert!(matches!(
        open_mut(&image, &OpenOptions::default()),
        Err(Error::Locked { .. })
    ));
    drop(running);
    open_mut(&image, &OpenOptions::default()).unwrap();
}

#[test]
fn a_bulk_copy_is_the_same_disk() {
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
            // What is made in bulk can be written like any other.
            let mut copy = disk.clone();
            work(&image, &mut copy, &mut Random(9), 10);
            assert_is(&image, &copy, &lab, what);
        }
    }
}

#[test]
fn a_bulk_copy_into_a_data_file_and_over_a_backing_file() {
    let lab = Lab::new();
    let (_, base) = lab.raw("base.raw", 2 * MIB, 4);
    let disk = sample_disk(2 * MIB, 5);
    for kind in [DataFileKind::Plain, DataFileKind::Raw] {
        let image = lab.path(&format!("{kind:?}.qcow2"));
        let data_file = Some(DataFile {
            name: path_text(&lab.path(&format!("{kind:?}.data"))).to_owned(),
            kind,
        });
        let qcow2 = Qcow2Options {
            data_file,
            ..Qcow2Options::default()
        };
        let mut writer = create_bulk(
            &image,
            &CreateOptions {
                qcow2,
                ..CreateOptions::qcow2(2 * MIB)
            },
        )
        .unwrap();
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
    let backing = Some(BackingFile {
        name: "base.raw".to_owned(),
        format: Format::Raw,
    });
    let qcow2 = Qcow2Options {
        backing,
        ..Qcow2Options::default()
    };
    let mut writer = create_bulk(
        &image,
        &CreateOptions {
            qcow2,
            ..CreateOptions::qcow2(2 * MIB)
        },
    )
    .unwrap();
    writer.append(&disk[..65_536], 0).unwrap();
    writer.append_zeroes(131_072..262_144).unwrap();
    assert!(writer.append(&disk[..65_536], 131_072).is_err(), "offsets only go up");
    writer.finish().unwrap();
    let mut expected = base.clone();
    expected[..65_536].copy_from_slice(&disk[..65_536]);
    expected[131_072..262_144].fill(0);
    assert_is(&image, &expected, &lab, "overlay");
    // A whole disk over a backing file: its zeroes hide what is below.
    let image = lab.path("full.qcow2");
    let backing = Some(BackingFile {
        name: "base.raw".to_owned(),
        format: Format::Raw,
    });
    let qcow2 = Qcow2Options {
        backing,
        ..Qcow2Options::default()
    };
    let mut writer = create_bulk(
        &image,
        &CreateOptions {
            qcow2,
            ..CreateOptions::qcow2(2 * MIB)
        },
    )
    .unwrap();
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
fn a_raw_copy_is_sparse_and_the_same() {
    let lab = Lab::new();
    let (raw, disk) = lab.raw("source.raw", 7 * MIB + 100, 33);
    let image = lab.path("image.qcow2");
    qemu_img(&[
        "convert",
        "-f",
        "raw",
        "-c",
        "-O",
        "qcow2",
        path_text(&raw),
        path_text(&image),
    ]);
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

/// On a block device there is whatever was there before: its zeroes must be written, and nothing behind the disk.
#[test]
fn a_device_that_held_something_else_is_written_over() {
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

#[test]
fn options_that_make_no_sense_are_refused() {
    let lab = Lab::new();
    let base = Qcow2Options::default();
    let raw = Some(DataFile {
        name: "data".to_owned(),
        kind: DataFileKind::Raw,
    });
    let backing = Some(BackingFile {
        name: "gone".to_owned(),
        format: Format::Raw,
    });
    for options in [
        Qcow2Options {
            cluster_bytes: 1000,
            ..base.clone()
        },
        Qcow2Options {
            cluster_bytes: 4 * MIB,
            ..base.clone()
        },
        Qcow2Options {
            version: 2,
            extended_l2: true,
            ..base.clone()
        },
        Qcow2Options {
            version: 4,
            ..base.clone()
        },
        Qcow2Options {
            cluster_bytes: 4096,
            extended_l2: true,
            ..base.clone()
        },
        Qcow2Options {
            refcount_bits: 3,
            ..base.clone()
        },
        Qcow2Options {
            refcount_bits: 0,
            ..base.clone()
        },
        Qcow2Options {
            data_file: raw,
            backing: backing.clone(),
            ..base.clone()
        },
        Qcow2Options {
            backing,
            preallocation: Preallocation::Metadata,
            ..base
        },
    ] {
        let result = create(
            &lab.path("x"),
            &CreateOptions {
                qcow2: options,
                ..CreateOptions::qcow2(MIB)
            },
        );
        assert!(matches!(result, Err(Error::InvalidOption { .. })), "{result:?}");
        assert!(!lab.path("x").exists());
    }
    let large = Qcow2Options {
        cluster_bytes: 512,
        ..Qcow2Options::default()
    };
    let result = create(
        &lab.path("x"),
        &CreateOptions {
            qcow2: large,
            ..CreateOptions::qcow2(MIB * MIB)
        },
    );
    assert!(matches!(result, Err(Error::InvalidOption { option: "size", .. })));
    create(&lab.path("x"), &CreateOptions::qcow2(MIB)).unwrap();
    assert!(
        matches!(create(&lab.path("x"), &CreateOptions::raw(MIB)), Err(Error::Io { .. })),
        "never over a file"
    );
}

#[test]
fn odd_sizes_work() {
    let lab = Lab::new();
    for size_bytes in [0, 1, 511, 65_535, 65_537] {
        let image = lab.path(&format!("{size_bytes}.qcow2"));
        create(&image, &CreateOptions::qcow2(size_bytes)).unwrap();
        assert_clean(&image);
        assert_eq!(qemu_check(&image), (0, 0));
        let device = open_mut(&image, &OpenOptions::default()).unwrap();
        let disk = vec![7; to_usize(size_bytes)];
        device.write_at(&disk, 0).unwrap();
        device.flush().unwrap();
        assert!(device.write_at(&[1], size_bytes).is_err());
        if size_bytes > 0 {
            assert_reads_as(&device, &disk, "odd");
        }
        drop(device);
        assert_clean(&image);
        assert_eq!(qemu_check(&image), (0, 0));
    }
}

/// Threads that write to different places, flush and read at once: nothing is lost, and nobody waits for ever.
#[test]
fn many_threads_share_one_image() {
    const THREADS: u64 = 4;
    const SHARE_BYTES: u64 = MIB + 3072;
    let lab = Lab::new();
    let image = lab.path("image.qcow2");
    let (_, base) = lab.raw("base.raw", THREADS * SHARE_BYTES, 50);
    let backing = Some(BackingFile {
        name: "base.raw".to_owned(),
        format: Format::Raw,
    });
    let qcow2 = Qcow2Options {
        backing,
        ..Qcow2Options::default()
    };
    create(
        &image,
        &CreateOptions {
            qcow2,
            ..CreateOptions::qcow2(base.len() as u64)
        },
    )
    .unwrap();
    let device = open_mut(&image, &OpenOptions::default()).unwrap();
    let mut disk = base;
    // The shares end inside clusters: neighbours copy the same cluster from below at the same time.
    std::thread::scope(|scope| {
        for (number, share) in (0..THREADS).zip(disk.chunks_mut(to_usize(SHARE_BYTES))) {
            let device = &device;
            scope.spawn(move || {
                let mut random = Random(number);
                let first = number * SHARE_BYTES;
                for _ in 0..150 {
                    let start = random.below(SHARE_BYTES);
                    let end = (start + 1 + random.below(90_000)).min(SHARE_BYTES);
                    let place = to_usize(start)..to_usize(end);
                    match random.below(8) {
                        0 => {
                            share[place].fill(0);
                            device.write_zeroes(first + start..first + end).unwrap();
                        }
                        1 => device.flush().unwrap(),
                        2 | 3 => {
                            let mut found = vec![0; place.len()];
                            device.read_at(&mut found, first + start).unwrap();
                            assert!(found == share[place], "a thread sees its own writes");
                        }
                        _ => {
                            random.fill(&mut share[place.clone()]);
                            device.write_at(&share[place], first + start).unwrap();
                        }
                    }
                }
            });
        }
    });
    device.flush().unwrap();
    drop(device);
    assert_is(&image, &disk, &lab, "threads");
}
