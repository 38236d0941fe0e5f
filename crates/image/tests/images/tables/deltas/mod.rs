//! Parallels and ploop disks: chains of deltas with a descriptor.
//!
//! No peer reads the descriptor. Therefore each delta is written by QEMU or Holdfast, a simple model that only reads
//! the table of a delta merges their clusters, and the result is compared with what is read through the descriptor.

mod chains;
mod checking;
mod refusals;

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use holdfast_block::BlockDevice;
use holdfast_image::{CreateOptions, DiskDescriptor, Format, ImageId, create};

use crate::peer::{Lab, overwrite, path_text, qemu_img, qemu_io_as};

const MIB: u64 = 1 << 20;
const TOP: ImageId = DiskDescriptor::TOP;

/// A row of the descriptor: GUID, GUID of the parent, type, file.
type Row<'a> = (ImageId, ImageId, &'a str, &'a str);

fn id(number: u8) -> ImageId {
    ImageId([number; 16])
}

fn descriptor(size_bytes: u64, top: Option<ImageId>, rows: &[Row<'_>]) -> String {
    let (mut images, mut shots) = (String::new(), String::new());
    for (guid, parent, kind, file) in rows {
        let file = format!("<File>{file}</File>");
        writeln!(
            images,
            "<Image><GUID>{{{guid}}}</GUID><Type>{kind}</Type>{file}</Image>"
        )
        .unwrap();
        writeln!(
            shots,
            "<Shot><GUID>{{{guid}}}</GUID><ParentGUID>{{{parent}}}</ParentGUID></Shot>"
        )
        .unwrap();
    }
    let top = top.map_or(String::new(), |top| format!("<TopGUID>{{{top}}}</TopGUID>\n"));
    let sectors = size_bytes / 512;
    format!(
        "<?xml version='1.0' encoding='UTF-8'?>\n<Parallels_disk_image Version=\"1.0\">\n<Disk_Parameters>\n\
         <Disk_size>{sectors}</Disk_size><Cylinders>{sectors}</Cylinders><Heads>1</Heads><Sectors>1</Sectors>\n\
         <Padding>0</Padding>\n</Disk_Parameters>\n<StorageData>\n<Storage>\n<Start>0</Start>\n<End>{sectors}</End>\n\
         <Blocksize>2048</Blocksize>\n{images}</Storage>\n</StorageData>\n<Snapshots>\n{top}{shots}</Snapshots>\n\
         </Parallels_disk_image>\n"
    )
}

/// Creates the folder of a disk with its descriptor.
fn folder(lab: &Lab, size_bytes: u64, top: Option<ImageId>, rows: &[Row<'_>]) -> PathBuf {
    let path = lab.path("web1.hdd");
    fs::create_dir_all(&path).unwrap();
    let text = descriptor(size_bytes, top, rows);
    let place = path.join("DiskDescriptor.xml");
    fs::File::create(&place).unwrap();
    overwrite(&place, text.as_bytes());
    path
}

/// The model of one expanding delta: copies the clusters in its table over `disk`, which gets the size of the delta.
fn overlay(disk: &mut Vec<u8>, delta: &Path) {
    let bytes = fs::read(delta).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let (cluster, size) = (u32_at(28) * 512, u32_at(36) * 512);
    let entry = match &bytes[..16] {
        b"WithoutFreeSpace" => 512,
        b"WithouFreSpacExt" => cluster,
        other => panic!("the magic number {other:?}"),
    };
    disk.resize(size, 0);
    for (index, piece) in disk.chunks_mut(cluster).enumerate() {
        let host = u32_at(64 + index * 4) * entry;
        if host != 0 {
            // Bytes past the end of the file are zero.
            let held = &bytes[host..bytes.len().min(host + piece.len())];
            piece[..held.len()].copy_from_slice(held);
            piece[held.len()..].fill(0);
        }
    }
}

fn contents(device: &dyn BlockDevice) -> Vec<u8> {
    let mut bytes = vec![0xee; usize::try_from(device.size_bytes()).unwrap()];
    device.read_at(&mut bytes, 0).unwrap();
    bytes
}

fn made_by_qemu(path: &Path, cluster: &str, size_bytes: u64, commands: &[&str]) {
    let (options, size) = (format!("cluster_size={cluster}"), size_bytes.to_string());
    qemu_img(&["create", "-f", "parallels", "-o", &options, path_text(path), &size]);
    qemu_io_as("parallels", path, commands);
}

/// Four deltas with three cluster sizes, of a disk that grew with each, and a branch.
///
/// ```text
/// root (QEMU) ── middle (QEMU) ── top (ours)
///                     └── branch (QEMU)
/// ```
fn grown(lab: &Lab) -> PathBuf {
    let rows = [
        (id(1), ImageId::NIL, "Compressed", "root.hds"),
        (id(2), id(1), "Compressed", "middle.hds"),
        (id(3), id(2), "Compressed", "branch.hds"),
        (TOP, id(2), "Compressed", "top.hds"),
    ];
    let path = folder(lab, 9 * MIB, None, &rows);
    let (raw, _) = lab.raw("disk.raw", 5 * MIB + 512, 3);
    let words = ["convert", "-f", "raw", "-O", "parallels", "-o", "cluster_size=256k"];
    qemu_img(&[&words[..], &[path_text(&raw), path_text(&path.join("root.hds"))]].concat());
    // Whole clusters of the middle hide those of the root, also where they are zero.
    let writes = [
        "write -P 7 1M 64k",
        "write -P 8 4M 100k",
        "write -z 3M 1M",
        "write -P 9 6M 1000",
    ];
    made_by_qemu(&path.join("middle.hds"), "64k", 7 * MIB, &writes);
    made_by_qemu(&path.join("branch.hds"), "1M", 7 * MIB, &["write -P 3 100k 2M"]);
    make_old(&path.join("branch.hds"));
    // Data in the last cluster of the root past the end of its disk is ignored.
    let root = fs::File::options()
        .read(true)
        .write(true)
        .open(path.join("root.hds"))
        .unwrap();
    let mut last = [0; 4];
    root.read_exact_at(&mut last, 64 + 20 * 4).unwrap();
    let host = u64::from(u32::from_le_bytes(last)) * (256 << 10);
    assert!(host > 0, "the root has its last cluster");
    root.write_all_at(&[0xee; 10_000], host + 512).unwrap();
    create(&path.join("top.hds"), &CreateOptions::new(Format::Parallels, 9 * MIB)).unwrap();
    path
}

/// Converts a delta to version 1, as Parallels and ploop before Virtuozzo 7 write it: entries are in sectors.
fn make_old(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let sectors = u32::from_le_bytes(bytes[28..32].try_into().unwrap());
    let entry_count = u32::from_le_bytes(bytes[32..36].try_into().unwrap()) as usize;
    bytes[..16].copy_from_slice(b"WithoutFreeSpace");
    for entry in bytes[64..64 + entry_count * 4].chunks_exact_mut(4) {
        let old = u32::from_le_bytes((&*entry).try_into().unwrap()) * sectors;
        entry.copy_from_slice(&old.to_le_bytes());
    }
    overwrite(path, &bytes);
}

fn files(folder: &Path, names: &[&str]) -> Vec<Vec<u8>> {
    names.iter().map(|name| fs::read(folder.join(name)).unwrap()).collect()
}
