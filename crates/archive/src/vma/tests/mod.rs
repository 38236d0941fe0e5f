//! Test archives, built and parsed independently of the tested code, with the numbers of the specification.

mod reading;
mod writing;

use holdfast_block::SeededRandom;
use md5::{Digest as _, Md5};

use super::VmaReader;
use crate::Result;
use crate::reader::{ArchiveReader, Piece};

const CLUSTER: usize = 65536;
const UUID: [u8; 16] = *b"0123456789abcdef";

/// Writes the MD5 of all bytes, with the 16 bytes at `place` as zeroes, to `place`.
fn seal(bytes: &mut [u8], place: usize) {
    bytes[place..place + 16].fill(0);
    let md5: [u8; 16] = Md5::digest(&*bytes).into();
    bytes[place..place + 16].copy_from_slice(&md5);
}

/// A header whose devices are numbered from 1.
fn header(configs: &[(&str, &[u8])], devices: &[(&str, u64)]) -> Vec<u8> {
    let mut bytes = vec![0; 12288];
    let mut blobs = vec![0];
    let mut add = |content: &[u8]| {
        let place = u32::try_from(blobs.len()).unwrap();
        blobs.extend(u16::try_from(content.len()).unwrap().to_le_bytes());
        blobs.extend(content);
        place.to_be_bytes()
    };
    bytes[..8].copy_from_slice(b"VMA\0\0\0\0\x01");
    bytes[8..24].copy_from_slice(&UUID);
    for (number, (name, content)) in configs.iter().enumerate() {
        bytes[2044 + 4 * number..][..4].copy_from_slice(&add(format!("{name}\0").as_bytes()));
        bytes[3068 + 4 * number..][..4].copy_from_slice(&add(content));
    }
    for (number, (name, size)) in devices.iter().enumerate() {
        let place = 4096 + 32 * (number + 1);
        bytes[place..place + 4].copy_from_slice(&add(format!("{name}\0").as_bytes()));
        bytes[place + 8..place + 16].copy_from_slice(&size.to_be_bytes());
    }
    bytes[48..52].copy_from_slice(&12288_u32.to_be_bytes());
    bytes[52..56].copy_from_slice(&u32::try_from(blobs.len()).unwrap().to_be_bytes());
    blobs.resize(blobs.len().next_multiple_of(512), 0);
    bytes[56..60].copy_from_slice(&u32::try_from(12288 + blobs.len()).unwrap().to_be_bytes());
    bytes.extend(blobs);
    seal(&mut bytes, 32);
    bytes
}

/// A cluster: device, number, content of 64 KiB, whose zero blocks are left out.
type TestCluster<'a> = (u8, u32, &'a [u8]);

fn extent(clusters: &[TestCluster]) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    bytes[..4].copy_from_slice(b"VMAE");
    bytes[8..24].copy_from_slice(&UUID);
    let mut data = Vec::new();
    for (number, (device, cluster, content)) in clusters.iter().enumerate() {
        let mut mask = 0_u16;
        for (block, content) in content.chunks(4096).enumerate() {
            if content.iter().any(|byte| *byte != 0) {
                mask |= 1 << block;
                data.extend(content);
                data.resize(data.len().next_multiple_of(4096), 0);
            }
        }
        let info = u64::from(mask) << 48 | u64::from(*device) << 32 | u64::from(*cluster);
        bytes[40 + 8 * number..][..8].copy_from_slice(&info.to_be_bytes());
    }
    bytes[6..8].copy_from_slice(&u16::try_from(data.len() / 4096).unwrap().to_be_bytes());
    seal(&mut bytes, 24);
    bytes.extend(data);
    bytes
}

/// An archive of these disks with clusters reordered by `order`, in extents of `per_extent` clusters.
fn archive(disks: &[Vec<u8>], per_extent: usize, order: impl FnOnce(&mut Vec<TestCluster>)) -> Vec<u8> {
    let names: Vec<String> = (0..disks.len()).map(|number| format!("drive-scsi{number}")).collect();
    let devices: Vec<(&str, u64)> = names
        .iter()
        .map(String::as_str)
        .zip(disks.iter().map(|disk| disk.len() as u64))
        .collect();
    let mut bytes = header(&[("qemu-server.conf", b"cores: 2\n")], &devices);
    let mut clusters: Vec<TestCluster> = Vec::new();
    for (disk, device) in disks.iter().zip(1..) {
        clusters.extend(
            disk.chunks(CLUSTER)
                .zip(0..)
                .map(|(content, number)| (device, number, content)),
        );
    }
    order(&mut clusters);
    for clusters in clusters.chunks(per_extent) {
        bytes.extend(extent(clusters));
    }
    bytes
}

/// The disks of an archive; checks the guarantees of readers about pieces.
fn read(reader: &mut dyn ArchiveReader) -> Result<Vec<Vec<u8>>> {
    let sizes = reader
        .disks()
        .iter()
        .map(|disk| usize::try_from(disk.size_bytes).unwrap());
    let mut disks: Vec<Vec<u8>> = sizes.map(|size| vec![0; size]).collect();
    let mut ended = vec![false; disks.len()];
    let is_in_order = reader.is_in_order();
    let mut before = (0, 0);
    while let Some(piece) = reader.next()? {
        match piece {
            Piece::Data { disk, offset, bytes } => {
                let start = usize::try_from(offset).unwrap();
                assert!(!bytes.is_empty() && !ended[disk]);
                assert!(
                    !is_in_order || (disk, start) >= before,
                    "{disk} {start} after {before:?}"
                );
                before = (disk, start + bytes.len());
                let place = &mut disks[disk][start..start + bytes.len()];
                assert!(place.iter().all(|byte| *byte == 0), "pieces overlap");
                place.copy_from_slice(bytes);
            }
            Piece::End { disk } => {
                assert!(!ended[disk]);
                assert!(!is_in_order || ended[..disk].iter().all(|ended| *ended));
                ended[disk] = true;
            }
        }
    }
    assert!(ended.iter().all(|ended| *ended), "{ended:?}");
    assert!(reader.next()?.is_none());
    Ok(disks)
}

fn read_bytes(archive: &[u8]) -> Result<Vec<Vec<u8>>> {
    read(&mut VmaReader::open(archive)?)
}

/// A disk with scattered data.
fn disk(random: &mut SeededRandom, size: u64) -> Vec<u8> {
    let mut disk = vec![0; usize::try_from(size).unwrap()];
    for _ in 0..random.below(6) {
        let offset = random.below(size);
        let length = random.below(200_000).min(size - offset);
        let range = usize::try_from(offset).unwrap()..usize::try_from(offset + length).unwrap();
        random.fill(&mut disk[range]);
    }
    disk
}
