//! Truncated images, as after an interrupted copy: no data is invented, and a check finds what a reader finds.

use std::fs::{self, File};
use std::io::Write as _;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use holdfast_block::{BlockDevice as _, MemoryDevice, to_usize};
use holdfast_image::{
    Compression, Continue, CreateOptions, FillOptions, Format, ImageId, OpenOptions, Qcow2Options, RepairIntent,
    RepairMode, Storage, StreamOptions, TargetContent, check, create, create_bulk, fill, fill_device, open, open_mut,
    plan_repair, write_stream_optimized,
};

use crate::peer::{Lab, path_text, qemu_img, sample_disk};

/// Not a multiple of a cluster, block or grain.
const DISK_BYTES: u64 = 5_000_192;
const PIECE: usize = 4096;

fn options(format: Format) -> OpenOptions {
    OpenOptions {
        format: Some(format),
        ..OpenOptions::default()
    }
}

/// Lengths of a truncated file, including those around its last sectors and clusters.
fn lengths(file_bytes: u64) -> Vec<u64> {
    let ends = [
        1, 17, 300, 511, 512, 513, 1024, 2000, 4096, 9000, 30_000, 65_536, 66_000, 700_000,
    ];
    let parts = (1..24).map(|part| file_bytes * part / 24);
    let mut lengths: Vec<u64> = ends.iter().filter_map(|end| file_bytes.checked_sub(*end)).collect();
    lengths.extend(parts);
    lengths
}

/// Reads all pieces of the image; returns whether all were readable. Those must be equal to `disk`.
fn reads_whole(path: &Path, format: Format, disk: &[u8], what: &str) -> bool {
    let image = match open(path, &options(format)) {
        Ok(image) => image,
        Err(error) => {
            assert!(error.is_corrupt(), "{what}: {error}");
            return false;
        }
    };
    let mut is_whole = true;
    let mut found = vec![0; PIECE];
    for (number, piece) in disk.chunks(PIECE).enumerate() {
        let offset = (number * PIECE) as u64;
        match image.read_at(&mut found[..piece.len()], offset) {
            Ok(()) => assert!(found[..piece.len()] == *piece, "{what}: other data at {offset}"),
            Err(_) => is_whole = false,
        }
    }
    is_whole
}

fn is_found(path: &Path, format: Format, what: &str) -> bool {
    match check(path, &options(format)) {
        Ok(report) => report.corruption_count > 0,
        Err(error) => {
            assert!(error.is_corrupt(), "{what}: {error}");
            true
        }
    }
}

/// Truncates the image at all lengths.
fn try_all(lab: &Lab, path: &Path, format: Format, disk: &[u8]) {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    assert!(reads_whole(path, format, disk, &name), "{name} before the truncation");
    assert!(!is_found(path, format, &name), "{name} before the truncation");
    let file_bytes = fs::metadata(path).unwrap().len();
    let cut = lab.path(&format!("cut-{name}"));
    for length in lengths(file_bytes) {
        fs::copy(path, &cut).unwrap();
        File::options().write(true).open(&cut).unwrap().set_len(length).unwrap();
        let what = format!("{name}, {length} of {file_bytes} bytes");
        let is_whole = reads_whole(&cut, format, disk, &what);
        assert!(
            is_whole || is_found(&cut, format, &what),
            "{what}: the check finds nothing"
        );
        if !is_whole && format == Format::Qcow2 {
            assert!(
                open_mut(&cut, &options(format)).is_err(),
                "{what}: the image was opened for writing"
            );
            repaired(&cut, disk, &what);
        }
    }
    fs::remove_file(&cut).unwrap();
}

/// A repair discards what is missing, which reads as zero from then on, and nothing else.
fn repaired(cut: &Path, disk: &[u8], what: &str) {
    let Ok(plan) = plan_repair(cut, &options(Format::Qcow2), RepairMode::All, RepairIntent::Repair) else {
        return;
    };
    let Ok(report) = plan.execute() else {
        return;
    };
    let image = open(cut, &options(Format::Qcow2));
    if report.corruption_count > 0 {
        assert!(image.is_err(), "{what}: {:?}", report.problems);
        return;
    }
    let image = image.unwrap();
    let mut found = vec![0; disk.len()];
    image.read_at(&mut found, 0).unwrap();
    for (number, (piece, expected)) in found.chunks(512).zip(disk.chunks(512)).enumerate() {
        // If the file ends inside a sector, its rest reads as zero.
        let common = piece
            .iter()
            .zip(expected)
            .take_while(|(left, right)| left == right)
            .count();
        assert!(
            piece[common..].iter().all(|byte| *byte == 0),
            "{what}: other data in sector {number}"
        );
    }
}

fn filled(path: PathBuf, options: &CreateOptions, storage: Storage, disk: &[u8]) -> PathBuf {
    let mut writer = create_bulk(&path, options).unwrap();
    let fill_options = FillOptions {
        threads: NonZero::new(2).unwrap(),
        storage,
    };
    fill(&MemoryDevice::from_bytes(disk), &mut writer, &fill_options, &mut |_| {
        Continue::Go
    })
    .unwrap();
    writer.finish().unwrap();
    path
}

fn text_disk() -> Vec<u8> {
    let mut text = Vec::new();
    let mut number = 7_u64;
    while text.len() < to_usize(DISK_BYTES) {
        number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        text.extend(format!("line of text {}\n", number >> 40).as_bytes());
    }
    text.truncate(to_usize(DISK_BYTES));
    text
}

#[test]
fn truncated_qcow2_never_reads_wrong_data() {
    let lab = Lab::new();
    let disk = sample_disk(DISK_BYTES, 11);
    let text = text_disk();
    let raw = lab.path("disk.raw");
    File::create(&raw).unwrap().write_all(&text).unwrap();
    for (name, qcow2, storage, disk) in [
        ("plain", Qcow2Options::default(), Storage::Plain, &disk),
        (
            "large",
            Qcow2Options {
                cluster_bytes: 2 << 20,
                ..Qcow2Options::default()
            },
            Storage::Plain,
            &disk,
        ),
        (
            "subclusters",
            Qcow2Options {
                extended_l2: true,
                ..Qcow2Options::default()
            },
            Storage::Plain,
            &disk,
        ),
        (
            "zlib",
            Qcow2Options::default(),
            Storage::Compressed { level: None },
            &text,
        ),
        (
            "zstd",
            Qcow2Options {
                compression: Compression::Zstd,
                ..Qcow2Options::default()
            },
            Storage::Compressed { level: None },
            &text,
        ),
    ] {
        let options = CreateOptions {
            qcow2,
            ..CreateOptions::qcow2(DISK_BYTES)
        };
        let path = filled(lab.path(&format!("{name}.qcow2")), &options, storage, disk);
        try_all(&lab, &path, Format::Qcow2, disk);
    }
    for (name, arguments) in [
        ("peer-plain", &["-o", "cluster_size=64k"][..]),
        ("peer-subclusters", &["-o", "extended_l2=on,cluster_size=64k"]),
        ("peer-zlib", &["-c"]),
        ("peer-zstd", &["-c", "-o", "compression_type=zstd"]),
        ("peer-metadata", &["-o", "preallocation=metadata"]),
    ] {
        let path = lab.path(&format!("{name}.qcow2"));
        let mut all = vec!["convert", "-f", "raw", "-O", "qcow2"];
        all.extend(arguments);
        all.extend([path_text(&raw), path_text(&path)]);
        qemu_img(&all);
        try_all(&lab, &path, Format::Qcow2, &text);
    }
}

/// Tables at the end of the file, as writes of a guest leave them.
#[test]
fn truncated_last_table_is_damage() {
    let lab = Lab::new();
    for cluster_bytes in [512, 65_536] {
        let path = lab.path(&format!("guest-{cluster_bytes}.qcow2"));
        let options = CreateOptions {
            qcow2: Qcow2Options {
                cluster_bytes,
                ..Qcow2Options::default()
            },
            ..CreateOptions::qcow2(DISK_BYTES)
        };
        create(&path, &options).unwrap();
        let disk = sample_disk(DISK_BYTES, 3);
        let device = open_mut(&path, &OpenOptions::default()).unwrap();
        // Backwards, so that the table of the first range is stored last.
        let source = MemoryDevice::from_bytes(&disk);
        fill_device(
            &source,
            &device,
            TargetContent::Unknown,
            NonZero::<usize>::MIN,
            &mut |_| Continue::Go,
        )
        .unwrap();
        drop(device);
        try_all(&lab, &path, Format::Qcow2, &disk);
    }
}

#[test]
fn truncated_block_formats_never_read_wrong_data() {
    let lab = Lab::new();
    let disk = sample_disk(DISK_BYTES, 12);
    for format in [Format::Vdi, Format::Vhd, Format::Vhdx, Format::Vmdk, Format::Parallels] {
        let path = lab.path(&format!("image.{}", format.name()));
        create(&path, &CreateOptions::new(format, DISK_BYTES)).unwrap();
        let device = open_mut(&path, &options(format)).unwrap();
        let source = MemoryDevice::from_bytes(&disk);
        fill_device(
            &source,
            &device,
            TargetContent::Zeroes,
            NonZero::<usize>::MIN,
            &mut |_| Continue::Go,
        )
        .unwrap();
        drop(device);
        let size = to_usize(open(&path, &options(format)).unwrap().size_bytes());
        let mut whole = disk.clone();
        whole.resize(size, 0);
        try_all(&lab, &path, format, &whole);
    }
}

#[test]
fn truncated_compressed_vmdk_never_reads_wrong_data() {
    let lab = Lab::new();
    let disk = text_disk();
    let path = lab.path("stream.vmdk");
    let mut bytes = Vec::new();
    let stream = StreamOptions {
        name: "stream.vmdk",
        id: ImageId([0x42; 16]),
        level: None,
        threads: NonZero::new(2).unwrap(),
    };
    let source = MemoryDevice::from_bytes(&disk);
    write_stream_optimized(&source, &mut bytes, &stream, &mut |_| Continue::Go).unwrap();
    File::create(&path).unwrap().write_all(&bytes).unwrap();
    try_all(&lab, &path, Format::Vmdk, &disk);
}
