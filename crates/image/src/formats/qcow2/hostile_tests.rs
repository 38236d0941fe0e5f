//! Damages valid images thousands of times. Any result is fine except a panic, a hang or a large allocation.

use std::sync::Arc;

use holdfast_block::{BlockDeviceMut as _, to_usize};
use proptest::prelude::{Strategy, any, prop};
use proptest::test_runner::{Config, TestRunner};

use super::check::check;
use super::codec::ClusterCompressor;
use super::header::{Qcow2Header, load_header};
use super::layer::Qcow2Layer;
use super::layout::new_header;
use super::writer::Qcow2Mut;
use super::{bitmap, snapshot};
use crate::file::ImageFile;
use crate::file::memory::MemoryFile;
use crate::model::create_options::{CreateOptions, Qcow2Options};
use crate::model::layered::{BackingUse, Layered as _};
use crate::{BulkWriter, Compression, Result};

const DISK_BYTES: u64 = 200_000;

/// Small valid images of several kinds, with plain, compressed and zero clusters.
fn seeds() -> Vec<Vec<u8>> {
    let base = Qcow2Options {
        cluster_bytes: 512,
        ..Qcow2Options::default()
    };
    let kinds = [
        base.clone(),
        Qcow2Options {
            version: 2,
            ..base.clone()
        },
        Qcow2Options {
            compression: Compression::Zstd,
            cluster_bytes: 4096,
            ..base.clone()
        },
        Qcow2Options {
            extended_l2: true,
            cluster_bytes: 16_384,
            ..base.clone()
        },
        Qcow2Options {
            refcount_bits: 64,
            ..base
        },
    ];
    kinds.into_iter().map(seed).collect()
}

fn seed(qcow2: Qcow2Options) -> Vec<u8> {
    let cluster_bytes = qcow2.cluster_bytes;
    let mut compressor = ClusterCompressor::new(qcow2.compression, None).unwrap();
    let mut header = new_header(&CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(DISK_BYTES)
    })
    .unwrap();
    // A snapshot and a bitmap in data clusters, as input for their parsers.
    header.snapshot_count = 1;
    header.snapshot_table_offset = 2 * cluster_bytes;
    let mut bitmaps = vec![0, 0, 0, 1, 0, 0, 0, 0];
    bitmaps.extend(64u64.to_be_bytes());
    bitmaps.extend((3 * cluster_bytes).to_be_bytes());
    if header.version == 3 {
        header.autoclear |= 1;
        header.extensions.push(crate::formats::qcow2::features::Extension {
            kind: crate::formats::qcow2::features::EXTENSION_BITMAPS,
            data: bitmaps,
        });
    }
    let file = Arc::new(MemoryFile::default());
    let mut writer = BulkWriter::new(Arc::clone(&file) as Arc<dyn ImageFile>, None, header, None).unwrap();
    for number in 0..DISK_BYTES / cluster_bytes {
        let cluster = vec![u8::try_from(number % 251).unwrap(); to_usize(cluster_bytes)];
        match number % 3 {
            0 => writer.append(&cluster, number * cluster_bytes).unwrap(),
            1 => {
                let packed = compressor.compress(&cluster).unwrap();
                writer.append_compressed(&packed, number * cluster_bytes).unwrap();
            }
            _ => {}
        }
    }
    writer.finish().unwrap();
    let mut bytes = vec![0; to_usize(file.length_bytes().unwrap())];
    file.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// Calls every reader, and the writer, for a file.
fn use_everything(bytes: &[u8]) -> Result<()> {
    let fresh = || -> Arc<dyn ImageFile> { Arc::new(MemoryFile::new(bytes.to_vec())) };
    let file = fresh();
    let header = load_header(&*file, "image")?;
    ignore(check(&file, &header, "image", None));
    if let Ok(bitmaps) = bitmap::load(&*file, &header, "image") {
        for bitmap in bitmaps.iter().take(3) {
            let mut ranges = 0u32;
            ignore(bitmap::for_each_dirty(&*file, &header, bitmap, "image", &mut |_| {
                ranges += 1;
            }));
        }
    }
    ignore(read_snapshots(&file, &header));
    let layer = Qcow2Layer::new("image".into(), header.clone(), Arc::clone(&file), None, None)?;
    read_some(&layer);
    let writer = Qcow2Mut::new(Qcow2Layer::new("image".into(), header.clone(), fresh(), None, None)?)?;
    let end = header.size_bytes.min(DISK_BYTES);
    for offset in [0, 700, end / 2] {
        if end > offset + 3000 {
            ignore(writer.write_at(&[1; 3000], offset));
            ignore(writer.trim(offset..offset + 2000));
        }
    }
    ignore(writer.flush());
    Ok(())
}

fn ignore<T, E>(result: std::result::Result<T, E>) {
    drop(result);
}

fn read_snapshots(file: &Arc<dyn ImageFile>, header: &Qcow2Header) -> Result<()> {
    let (snapshots, _) = snapshot::load(&**file, header, "image")?;
    for found in snapshots.iter().take(3) {
        let image = "image".into();
        let layer = Qcow2Layer::with_l1(
            image,
            header.clone(),
            found.l1,
            found.disk_bytes,
            Arc::clone(file),
            None,
            None,
        )?;
        read_some(&layer);
    }
    Ok(())
}

fn read_some(layer: &Qcow2Layer) {
    let end = layer.size_bytes;
    let mut buffer = vec![0; 20_000];
    for offset in [0, 1000, end / 2, end.saturating_sub(20_000)] {
        let length = to_usize(end.saturating_sub(offset).min(20_000));
        ignore(layer.read(&mut buffer[..length], offset, BackingUse::Backing));
    }
    ignore(layer.list_extents(0..end.min(1 << 40), 100, BackingUse::Backing));
}

/// A change of a file: an extreme value in a field, flipped bits, or a truncation.
#[derive(Debug, Clone)]
enum Damage {
    Bit { at: usize },
    Number { at: usize, bytes: usize, value: u64 },
    CutOff { length: usize },
}

fn damage() -> impl Strategy<Value = Damage> {
    let extreme = prop::sample::select(vec![
        0,
        1,
        511,
        512,
        0xffff,
        0x7fff_ffff,
        0xffff_ffff,
        1 << 40,
        (1 << 63) | (1 << 20),
        1 << 62,
        (1 << 62) | 0x1ff,
        u64::MAX,
        !511,
        0x00ff_ffff_ffff_fe00,
    ]);
    // Most important fields are in the header; others are in tables throughout the file.
    let place = || proptest::prop_oneof![0usize..200, 0usize..4096, any::<usize>()];
    let width = prop::sample::select(vec![1usize, 2, 4, 8]);
    proptest::prop_oneof![
        4 => place().prop_map(|at| Damage::Bit { at }),
        5 => (place(), width, extreme).prop_map(|(at, bytes, value)| Damage::Number { at, bytes, value }),
        1 => any::<usize>().prop_map(|length| Damage::CutOff { length }),
    ]
}

fn apply(bytes: &mut Vec<u8>, damage: &Damage) {
    if bytes.is_empty() {
        return;
    }
    let length = bytes.len();
    match *damage {
        Damage::Bit { at } => bytes[at / 8 % length] ^= 1 << (at % 8),
        Damage::Number {
            at,
            bytes: width,
            value,
        } => {
            let at = at % length / width * width;
            for (byte, new) in bytes[at..].iter_mut().zip(&value.to_be_bytes()[8 - width..]) {
                *byte = *new;
            }
        }
        Damage::CutOff { length: kept } => bytes.truncate(kept % length),
    }
}

#[test]
fn seeds_are_valid_except_added_structures() {
    for bytes in seeds() {
        let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(bytes));
        let header = load_header(&*file, "image").unwrap();
        let layer = Qcow2Layer::new("image".into(), header, file, None, None).unwrap();
        let mut all = vec![0; to_usize(DISK_BYTES)];
        layer.read(&mut all, 0, BackingUse::Backing).unwrap();
    }
}

#[test]
fn damage_never_panics() {
    let seeds = seeds();
    let strategy = (0..seeds.len(), prop::collection::vec(damage(), 1..6));
    let mut runner = TestRunner::new(Config {
        cases: 6000,
        failure_persistence: None,
        ..Config::default()
    });
    runner
        .run(&strategy, |(number, damages)| {
            let mut bytes = seeds[number].clone();
            for one in &damages {
                apply(&mut bytes, one);
            }
            ignore(use_everything(&bytes));
            Ok(())
        })
        .unwrap();
    let peak_kib = peak_memory_kib();
    assert!(
        peak_kib < RESIDENT_KIB_MAX,
        "{peak_kib} KiB of memory for images of 200 KB"
    );
}

/// An image of `size_bytes` with `clusters` zeroed clusters; the first one has the header.
fn blank(header: &Qcow2Header, clusters: u64) -> Vec<u8> {
    let mut bytes = header.encode().unwrap();
    bytes.resize(to_usize(clusters * header.geometry.cluster_bytes()), 0);
    bytes
}

fn put_words(bytes: &mut [u8], offset: u64, words: impl IntoIterator<Item = u64>) {
    let places = bytes[to_usize(offset)..].chunks_exact_mut(8);
    places
        .zip(words)
        .for_each(|(place, word)| place.copy_from_slice(&word.to_be_bytes()));
}

/// A small image with its refcount table in the second cluster; the third one is free for tests.
fn small_header(refcount_bits: u32) -> Qcow2Header {
    let qcow2 = Qcow2Options {
        cluster_bytes: 512,
        refcount_bits,
        ..Qcow2Options::default()
    };
    let mut header = new_header(&CreateOptions {
        qcow2,
        ..CreateOptions::qcow2(0)
    })
    .unwrap();
    header.refcount_table_offset = 512;
    header.refcount_table_clusters = 1;
    header
}

/// With a table that refers to one block repeatedly, the time of a check was the size of the table times that of the
/// block: hours for a file of a few MiB.
#[test]
fn repeated_refcount_block_is_checked_once() {
    let header = small_header(1);
    let mut bytes = blank(&header, 3);
    put_words(&mut bytes, 512, std::iter::repeat_n(1024, 64));
    bytes[1024..].fill(0xff);
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(bytes));
    let report = check(&file, &header, "image", None).unwrap();
    assert!(
        report.corruption_count >= 63,
        "each further use is an overlap: {report:?}"
    );
    assert!(
        report.leak_count <= 512 * 8,
        "one block of counts: {}",
        report.leak_count
    );
}

/// A large table can describe clusters past the largest valid offset; their offsets overflowed.
#[test]
fn refcounts_of_impossible_clusters_are_reported() {
    let mut header = small_header(1);
    header.geometry.cluster_bits = 21;
    let cluster_bytes = header.geometry.cluster_bytes();
    header.refcount_table_offset = cluster_bytes;
    header.refcount_table_clusters = 4;
    let mut bytes = blank(&header, 6);
    let last = 5 * cluster_bytes - 8;
    put_words(&mut bytes, last, [5 * cluster_bytes]);
    bytes[to_usize(5 * cluster_bytes)..].fill(0xff);
    let file: Arc<dyn ImageFile> = Arc::new(MemoryFile::new(bytes));
    let report = check(&file, &header, "image", None).unwrap();
    assert!(report.corruption_count > 0, "{report:?}");
    assert!(report.image_end <= 6 * cluster_bytes, "{report:?}");
}

/// With a table that refers to one cluster of bits repeatedly, the time of reading was the size of the table times
/// that of the cluster.
#[test]
fn overlapping_bitmap_clusters_are_damage() {
    let mut header = small_header(16);
    header.size_bytes = 64 * 512 * 8 * 512;
    let mut bytes = blank(&header, 3);
    put_words(&mut bytes, 512, std::iter::repeat_n(1024, 64));
    bytes[1024..].fill(0b0101_0101);
    let file = MemoryFile::new(bytes);
    let table = crate::model::qcow2_info::TableLocation {
        offset: 512,
        entries: 64,
    };
    let found = crate::PersistentBitmap {
        name: "b".to_owned(),
        granularity_bytes: 512,
        state: crate::BitmapState::Valid,
        recording: crate::Recording::Enabled,
        table,
    };
    let mut ranges = 0;
    let result = bitmap::for_each_dirty(&file, &header, &found, "image", &mut |_| ranges += 1);
    assert!(matches!(result, Err(crate::Error::Corrupt { .. })), "{result:?}");
    assert!(ranges <= 4 * 512 * 4, "{ranges} ranges in a file of three clusters");
}

/// All caches and tables at their limits, together with the other tests of this process, need less.
const RESIDENT_KIB_MAX: u64 = 512 << 10;

/// The peak memory of this process.
fn peak_memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}
