//! Extents and dirty bitmaps of other servers.

use std::fs::File;
use std::os::unix::fs::FileExt;

use holdfast_block::{BlockDevice, BlockDeviceMut, Extent, ExtentKind, for_each_extent};
use holdfast_serve::nbd::client::{Error, ExportContent, NbdDevice, NbdOptions, StatusExtent, describe_export};

use super::peer::{Server, run};

fn all_extents(device: &dyn BlockDevice) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for_each_extent(device, 0..device.size_bytes(), |extent| {
        match extents.last_mut() {
            Some(last) if last.kind == extent.kind => last.length += extent.length,
            _ => extents.push(extent),
        }
        Ok(())
    })
    .unwrap();
    extents
}

/// 1 TiB with 10,000 islands of 4 KiB: more than one query can cover, and more extents than one reply returns.
#[test]
fn a_large_sparse_file_is_mapped_exactly() {
    const ISLAND_COUNT: u64 = 10_000;
    const STEP_BYTES: u64 = (1 << 40) / ISLAND_COUNT / 65_536 * 65_536;
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 40).unwrap();
    for number in 0..ISLAND_COUNT {
        file.as_file().write_at(&[7; 4096], number * STEP_BYTES).unwrap();
    }
    let path = file.path().to_str().unwrap();
    for server in [Server::nbdkit(&["file", path]), Server::qemu_nbd(&["-f", "raw", path])] {
        let device = server.device();
        let extents = all_extents(&device);
        assert_eq!(extents.len() as u64, 2 * ISLAND_COUNT);
        for (number, pair) in (0u64..).zip(extents.chunks(2)) {
            let offset = number * STEP_BYTES;
            assert_eq!(
                pair[0],
                Extent {
                    offset,
                    length: 4096,
                    kind: ExtentKind::Data
                }
            );
            assert_eq!((pair[1].offset, pair[1].kind), (offset + 4096, ExtentKind::Zero));
        }
        // Reads from the middle of an island in small steps, with read-ahead.
        let (start, end) = (STEP_BYTES * 50 + 1000, STEP_BYTES * 60 + 1000);
        let (mut at, mut data_bytes) = (start, 0);
        while at < end {
            let list = device.extents(at..end.min(at + 777_777), 1).unwrap();
            assert!(list.start() == at && list.end() > at);
            data_bytes += list
                .iter()
                .filter(|one| one.kind == ExtentKind::Data)
                .map(|one| one.length)
                .sum::<u64>();
            at = list.end();
        }
        assert_eq!(data_bytes, 10 * 4096);
    }
}

/// The read-ahead is invalidated when the device changes.
#[test]
fn writes_are_visible_to_the_next_query() {
    let server = Server::nbdkit(&["memory", "64M"]);
    let device = server.device_mut();
    for number in 0..64u64 {
        device.write_at(&vec![1; 32_768], number << 20).unwrap();
    }
    // The caller takes 2 of 128 extents: the rest is cached.
    let list = device.extents(0..64 << 20, 2).unwrap();
    assert_eq!(list.end(), 1 << 20);
    device.write_zeroes(1 << 20..2 << 20).unwrap();
    device.write_at(&vec![1; 32_768], (2 << 20) + 65_536).unwrap();
    let list = device.extents(1 << 20..64 << 20, 3).unwrap();
    let ends: Vec<u64> = list.iter().map(Extent::end).collect();
    assert_eq!(ends, [2 << 20, (2 << 20) + 32_768, (2 << 20) + 65_536]);
}

/// Status of later ranges that the server reports with an earlier one is out of date when they are queried.
#[test]
fn the_status_of_an_export_that_others_change_is_current() {
    let server = Server::nbdkit(&["memory", "64M"]);
    let other = server.device_mut();
    for number in 0..64u64 {
        other.write_at(&vec![1; 32_768], number << 20).unwrap();
    }
    let options = NbdOptions {
        content: ExportContent::Changing,
        ..NbdOptions::default()
    };
    let device = NbdDevice::connect(&server.endpoint(), "", options).unwrap();
    for number in 0..63u64 {
        let (start, next) = (number << 20, (number + 1) << 20);
        let list = device.extents(start..start + (64 << 10), 2).unwrap();
        assert!(list.iter().any(|extent| extent.kind == ExtentKind::Data), "{number}");
        other.write_zeroes(next..next + (64 << 10)).unwrap();
        let list = device.extents(next..next + (64 << 10), 2).unwrap();
        assert!(list.iter().all(|extent| extent.kind == ExtentKind::Zero), "{number}");
        other.write_at(&vec![1; 32_768], next).unwrap();
    }
}

/// The server answers every query with a single extent.
#[test]
fn one_extent_at_a_time_is_enough() {
    let script = "echo $(( $4 )) 4096 $(( $4 / 4096 % 2 * 3 ))";
    let extents = format!("extents={script}");
    let server = Server::nbdkit(&[
        "eval",
        "get_size=echo 1M",
        "can_extents=exit 0",
        &extents,
        "pread=dd if=/dev/zero count=$3 iflag=count_bytes",
    ]);
    let device = server.device();
    let found = all_extents(&device);
    assert_eq!(found.len(), 256);
    assert!((0u64..).zip(&found).all(|(number, extent)| {
        let kind = if number % 2 == 0 {
            ExtentKind::Data
        } else {
            ExtentKind::Zero
        };
        *extent
            == Extent {
                offset: number * 4096,
                length: 4096,
                kind,
            }
    }));
}

/// A qcow2 image with a persistent bitmap, written by QEMU.
#[test]
fn a_dirty_bitmap_of_qemu_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.qcow2");
    let image = image.to_str().unwrap();
    run("qemu-img", &["create", "-q", "-f", "qcow2", image, "10G"]);
    run("qemu-img", &["bitmap", "--add", "-g", "32K", image, "since"]);
    run("qemu-img", &["bitmap", "--add", image, "idle"]);
    run("qemu-img", &["bitmap", "--disable", image, "idle"]);
    run(
        "qemu-io",
        &[
            "-f",
            "qcow2",
            "-c",
            "write 1M 1",
            "-c",
            "write 5G 96k",
            "-c",
            "write -z 10737410048 8192",
            image,
        ],
    );
    let server = Server::qemu_nbd(&["-f", "qcow2", "--read-only", "-B", "since", image]);
    let (_, contexts) = describe_export(&server.endpoint(), "", &NbdOptions::default()).unwrap();
    assert_eq!(contexts, ["base:allocation", "qemu:dirty-bitmap:since"]);
    let mut options = NbdOptions::default();
    options.contexts.push("qemu:dirty-bitmap:since".to_owned());
    let device = NbdDevice::connect(&server.endpoint(), "", options.clone()).unwrap();
    let bitmap = device.dirty_bitmap("since").unwrap();
    assert_eq!(bitmap.granularity_bytes(), 32 << 10);
    let expected = [
        1 << 20..(1 << 20) + 32_768,
        5 << 30..(5 << 30) + 98_304,
        (10 << 30) - 32_768..10 << 30,
    ];
    assert_eq!(bitmap.iter().collect::<Vec<_>>(), expected);
    let status = device
        .block_status("qemu:dirty-bitmap:since", 1 << 20..2 << 20, 10)
        .unwrap();
    assert_eq!(
        status,
        [
            StatusExtent {
                offset: 1 << 20,
                length: 32_768,
                flags: 1
            },
            StatusExtent {
                offset: (1 << 20) + 32_768,
                length: (1 << 20) - 32_768,
                flags: 0
            },
        ]
    );
    let error = device.dirty_bitmap("idle").unwrap_err().to_string();
    assert!(error.contains("qemu:dirty-bitmap:idle"), "{error}");
    options.contexts.push("qemu:dirty-bitmap:idle".to_owned());
    let error = NbdDevice::connect(&server.endpoint(), "", options).unwrap_err();
    assert!(
        matches!(&error, Error::ContextMissing { context, .. } if context == "qemu:dirty-bitmap:idle"),
        "{error}"
    );
    let server = Server::qemu_nbd(&["-f", "raw", "--read-only", File::open(image).map(|_| image).unwrap()]);
    assert!(server.device().dirty_bitmap("since").is_err());
}

/// Reads the allocation in the upper layers of a chain. Zeroes and discards count as allocated.
#[test]
fn the_layers_of_a_chain_are_distinguished() {
    const MIB: u64 = 1 << 20;
    let directory = tempfile::tempdir().unwrap();
    let image = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (base, middle, top) = (image("base"), image("middle"), image("top"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", &base, "64M"]);
    let write = |line: &str, file: &str| run("qemu-io", &["-d", "unmap", "-f", "qcow2", "-c", line, file]);
    write("write 0 8M", &base);
    for (above, below) in [(&middle, &base), (&top, &middle)] {
        run(
            "qemu-img",
            &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", below, above],
        );
    }
    write("write 4M 1M", &middle);
    write("write 20M 512", &middle);
    write("write -z 1M 64k", &top);
    write("discard 2M 64k", &top);
    write("write 4M 64k", &top);
    let server = Server::qemu_nbd(&["-f", "qcow2", "--read-only", "-A", &top]);
    let mut options = NbdOptions::default();
    options.contexts.push("qemu:allocation-depth".to_owned());
    let device = NbdDevice::connect(&server.endpoint(), "", options).unwrap();
    let written = |layer_count: u64| device.allocated_above(layer_count).unwrap().iter().collect::<Vec<_>>();
    let piece = |start: u64| start..start + 65_536;
    assert_eq!(written(0), []);
    assert_eq!(written(1), [piece(MIB), piece(2 * MIB), piece(4 * MIB)]);
    assert_eq!(
        written(2),
        [piece(MIB), piece(2 * MIB), 4 * MIB..5 * MIB, piece(20 * MIB)]
    );
    assert_eq!(written(3), [0..8 * MIB, piece(20 * MIB)]);
    assert!(server.device().allocated_above(1).is_err(), "it was not requested");
}
