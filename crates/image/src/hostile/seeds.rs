//! Builds small valid images of several kinds, with plain, compressed and zero clusters, a snapshot and a bitmap.

use std::sync::Arc;

use holdfast_block::to_usize;

use crate::file::ImageFile;
use crate::file::memory::MemoryFile;
use crate::formats::qcow2::codec::ClusterCompressor;
use crate::formats::qcow2::features::{AUTOCLEAR_BITMAPS, EXTENSION_BITMAPS, Extension};
use crate::formats::qcow2::header::Qcow2Header;
use crate::formats::qcow2::layout::new_header;
use crate::formats::vdi::create::NewVdi;
use crate::formats::vhd::create::NewVhd;
use crate::formats::vmdk::create::NewVmdk;
use crate::formats::vmdk::stream::specimen::{GRAIN_BYTES, TablePlacement, grain, progress, stream};
use crate::formats::{ploop, vdi, vhd, vmdk};
use crate::model::create_options::{CreateOptions, Qcow2Options};
use crate::model::info::ImageKind;
use crate::{BulkWriter, Compression, DiskDescriptor, ImageId};

const DISK_BYTES: u64 = 8192;

/// Valid input for every parser of this crate: name of the parser, name of the seed, bytes.
pub fn seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let base = Qcow2Options {
        cluster_bytes: 512,
        ..Qcow2Options::default()
    };
    let kinds = [
        ("v3", base.clone()),
        (
            "v2",
            Qcow2Options {
                version: 2,
                ..base.clone()
            },
        ),
        (
            "zstd",
            Qcow2Options {
                compression: Compression::Zstd,
                cluster_bytes: 1024,
                ..base.clone()
            },
        ),
        (
            "extended",
            Qcow2Options {
                extended_l2: true,
                cluster_bytes: 16_384,
                ..base.clone()
            },
        ),
        (
            "wide-refcounts",
            Qcow2Options {
                refcount_bits: 64,
                ..base
            },
        ),
    ];
    let mut seeds = vec![
        ("image_format", "raw", b"nothing that is known".to_vec()),
        ("image_format", "empty", Vec::new()),
    ];
    seeds.extend(block_seeds());
    for (name, options) in kinds {
        if options.extended_l2 {
            // It has large clusters: one image without a snapshot and a bitmap is enough.
            seeds.push(("qcow2", name, write(&options, None)));
            continue;
        }
        let image = image(&options);
        if name == "v3" {
            seeds.push(("image_format", name, image.clone()));
        }
        seeds.push(("qcow2", name, image));
        // For writing: the snapshot and bitmap of the other seeds have no refcounts, which a write would report.
        seeds.push(("qcow2_write", name, write(&options, None)));
    }
    seeds
}

/// An image followed by a snapshot and a bitmap; its number of clusters is known only after writing it.
fn image(options: &Qcow2Options) -> Vec<u8> {
    let length = write(options, Some(0)).len() as u64;
    let start = length.next_multiple_of(options.cluster_bytes);
    let mut bytes = write(options, Some(start));
    bytes.resize(to_usize(start), 0);
    // The location of the L1 table as in a row: offset and number of entries.
    let l1 = [&bytes[40..48], &bytes[36..40]].concat();
    let header = header(options, Some(start));
    let mut append = |content: Vec<u8>| {
        bytes.extend_from_slice(&content);
        bytes.resize(bytes.len().next_multiple_of(to_usize(options.cluster_bytes)), 0);
    };
    append(snapshot_row(&header, &l1));
    if header.version == 3 {
        append(bitmap_row(start + 2 * options.cluster_bytes));
        append((start + 3 * options.cluster_bytes).to_be_bytes().to_vec());
        append(vec![0b0101_1100; 5]);
    }
    bytes
}

fn snapshot_row(header: &Qcow2Header, l1: &[u8]) -> Vec<u8> {
    let mut row = l1.to_vec();
    row.extend(1u16.to_be_bytes());
    row.extend(6u16.to_be_bytes());
    row.extend(1_800_000_000u32.to_be_bytes());
    row.extend([0; 4 + 8 + 4]);
    row.extend(16u32.to_be_bytes());
    row.extend(0u64.to_be_bytes());
    row.extend(header.size_bytes.to_be_bytes());
    row.extend(b"1before");
    row
}

fn bitmap_row(table: u64) -> Vec<u8> {
    let mut row = table.to_be_bytes().to_vec();
    row.extend(1u32.to_be_bytes());
    row.extend(2u32.to_be_bytes());
    row.extend([1, 9]);
    row.extend(5u16.to_be_bytes());
    row.extend(0u32.to_be_bytes());
    row.extend(b"dirty");
    row
}

fn header(options: &Qcow2Options, start: Option<u64>) -> Qcow2Header {
    let mut header = new_header(&CreateOptions {
        qcow2: options.clone(),
        ..CreateOptions::qcow2(DISK_BYTES)
    })
    .expect("the options are legal");
    let Some(start) = start else { return header };
    header.snapshot_count = 1;
    header.snapshot_table_offset = start;
    if header.version == 3 {
        let mut data = vec![0, 0, 0, 1, 0, 0, 0, 0];
        data.extend(32u64.to_be_bytes());
        data.extend((start + options.cluster_bytes).to_be_bytes());
        header.autoclear |= AUTOCLEAR_BITMAPS;
        header.extensions.push(Extension {
            kind: EXTENSION_BITMAPS,
            data,
        });
    }
    header
}

/// An image whose header refers to a snapshot table at `start`, followed by the bitmaps; none of both without `start`.
fn write(options: &Qcow2Options, start: Option<u64>) -> Vec<u8> {
    let cluster_bytes = options.cluster_bytes;
    let file = Arc::new(MemoryFile::default());
    let shared = Arc::clone(&file) as Arc<dyn ImageFile>;
    let mut compressor = ClusterCompressor::new(options.compression, None).expect("the default level");
    let mut writer = BulkWriter::new(shared, None, header(options, start), None).expect("memory can be written");
    for number in 0..DISK_BYTES.div_ceil(cluster_bytes) {
        let offset = number * cluster_bytes;
        let length = cluster_bytes.min(DISK_BYTES - offset);
        let cluster = vec![number.to_le_bytes()[0]; to_usize(length)];
        let appended = match number % 3 {
            0 => writer.append(&cluster, offset),
            1 => {
                let packed = compressor.compress(&cluster).expect("equal bytes compress");
                writer.append_compressed(&packed, offset)
            }
            _ => Ok(()),
        };
        appended.expect("memory can be written");
    }
    writer.finish().expect("memory can be written");
    let mut bytes = vec![0; to_usize(file.length_bytes().expect("memory has a length"))];
    file.read_at(&mut bytes, 0).expect("memory can be read");
    bytes
}

fn bytes_of(file: &MemoryFile) -> Vec<u8> {
    let mut bytes = vec![0; to_usize(file.length_bytes().expect("memory has a length"))];
    file.read_at(&mut bytes, 0).expect("memory can be read");
    bytes
}

/// Small images in block formats; for VHDX, the changes to an empty one.
fn block_seeds() -> Vec<(&'static str, &'static str, Vec<u8>)> {
    let vdi = |kind, parent| {
        let file = MemoryFile::default();
        let new = NewVdi {
            size_bytes: 20_000,
            block_bytes: 4096,
            sector_bytes: 512,
            kind,
            id: ImageId([1; 16]),
            parent,
            parent_modification: parent,
        };
        vdi::create::write_empty(&file, &new).expect("memory can be written");
        bytes_of(&file)
    };
    let vmdk = || {
        let file = MemoryFile::default();
        let new = NewVmdk {
            size_bytes: 20_480,
            grain_bytes: 4096,
            name: "image.vmdk".to_owned(),
            id: ImageId([7; 16]),
            parent: None,
        };
        vmdk::create::write_empty(&file, &new).expect("memory can be written");
        bytes_of(&file)
    };
    let parallels = || {
        let file = MemoryFile::default();
        ploop::create::write_empty(&file, 20_480, 4096).expect("memory can be written");
        bytes_of(&file)
    };
    let (new_disk, tree) = descriptor_seeds();
    let parent = Some((ImageId([7; 16]), 5, "parent.vhd".to_owned()));
    vec![
        ("parallels", "empty", parallels()),
        ("disk_descriptor", "new", new_disk),
        ("disk_descriptor", "tree", tree),
        ("vmdk", "sparse", vmdk()),
        ("vmdk_stream", "at-end", vmdk_stream(TablePlacement::AtEnd)),
        ("vmdk_stream", "in-front", vmdk_stream(TablePlacement::InFront)),
        ("vdi", "dynamic", vdi(vdi::header::VdiKind::Dynamic, ImageId::NIL)),
        ("vdi", "fixed", vdi(vdi::header::VdiKind::Fixed, ImageId::NIL)),
        (
            "vdi",
            "differencing",
            vdi(vdi::header::VdiKind::Differencing, ImageId([7; 16])),
        ),
        ("vhd", "dynamic", vhd(ImageKind::Dynamic, None)),
        ("vhd", "fixed", vhd(ImageKind::Fixed, None)),
        ("vhd", "differencing", vhd(ImageKind::Differencing, parent.clone())),
        ("vhd_stream", "dynamic", vhd(ImageKind::Dynamic, None)),
        ("vhd_stream", "differencing", vhd(ImageKind::Differencing, parent)),
        ("vhdx", "empty", vec![0]),
        ("vhdx", "differencing", vec![1]),
        // The second block is zero.
        ("vhdx", "zero", vec![0, 7, 8, 0, 1, 2]),
    ]
}

fn vhd(kind: ImageKind, parent: Option<(ImageId, u32, String)>) -> Vec<u8> {
    let file = MemoryFile::default();
    let new = NewVhd {
        size_bytes: 20_480,
        block_bytes: 4096,
        kind,
        id: ImageId([1; 16]),
        created_s: 0,
        parent,
    };
    vhd::create::write_empty(&file, &new).expect("memory can be written");
    bytes_of(&file)
}

/// A stream with grains at both ends of the disk, in two tables.
fn vmdk_stream(tables: TablePlacement) -> Vec<u8> {
    let items = [
        grain(0, 1),
        progress(),
        grain(3 * GRAIN_BYTES, 2),
        grain(11 * GRAIN_BYTES, 3),
    ];
    stream(tables, 12 * GRAIN_BYTES - 512, &items)
}

/// The descriptor of a new disk, and that of one with two snapshots, one of which is a branch.
fn descriptor_seeds() -> (Vec<u8>, Vec<u8>) {
    let new = DiskDescriptor::of_new(DISK_BYTES, 4096, "root.hds", ImageId([1; 16])).expect("the size is legal");
    let text = new.as_text();
    let rows = [(2, 0), (3, 2), (4, 2)].map(|(number, parent)| (number, ImageId([number; 16]), ImageId([parent; 16])));
    let image =
        |number, id| format!("<Image><GUID>{{{id}}}</GUID><Type>Compressed</Type><File>{number}.hds</File></Image>");
    let shot = |id, parent| format!("<Shot><GUID>{{{id}}}</GUID><ParentGUID>{{{parent}}}</ParentGUID></Shot>");
    let images: String = rows.iter().map(|(number, id, _)| image(number, id)).collect();
    let shots: String = rows.iter().map(|(_, id, parent)| shot(id, parent)).collect();
    let root = format!("<ParentGUID>{{{}}}</ParentGUID>", ImageId::NIL);
    let above = format!("<ParentGUID>{{{}}}</ParentGUID>", ImageId([4; 16]));
    let tree = text.replace(&root, &above);
    let tree = tree.replace("</Storage>", &(images + "</Storage>"));
    let tree = tree.replace("</Snapshots>", &(shots + "</Snapshots>"));
    (text.as_bytes().to_vec(), tree.into_bytes())
}
