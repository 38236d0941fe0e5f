//! The parser of VMA archives, for fuzzing: see [`crate::hostile`].

use std::collections::HashSet;
use std::num::NonZero;
use std::sync::Arc;

use holdfast_block::MemoryDevice;
use holdfast_block::hostile::Outcome;

use super::format::{
    BLOCK_BYTES, CLUSTER_BYTES, ClusterInfo, EXTENT_BLOCK_COUNT_AT, EXTENT_BYTES, EXTENT_MD5_AT, HEADER_BYTES, MD5_AT,
    MEMORY_NAME, UUID_AT, header_bytes, md5_without, put, write_extent, write_header,
};
use super::{VmaDisk, VmaReader, VmaWriteOptions, write_vma};
use crate::reader::{ArchiveReader as _, Piece};

const UUID: [u8; 16] = [1; 16];

/// An archive of Holdfast's writer with two disks, one of which ends within a block.
pub(crate) fn written() -> Vec<u8> {
    let disk = |name: &str, content: &[u8]| VmaDisk {
        device_name: name.to_owned(),
        device: Arc::new(MemoryDevice::from_bytes(content)),
    };
    let disks = [disk("drive-scsi0", &[7; 512]), disk("drive-scsi1", &vec![0; 70_144])];
    let options = VmaWriteOptions {
        threads: NonZero::<usize>::MIN,
        time: 0,
        uuid: UUID,
    };
    let mut bytes = Vec::new();
    write_vma(&mut bytes, &config(), &disks, options, &mut |_| Ok(())).expect("memory");
    bytes
}

/// Clusters of two disks and of the machine's memory, interleaved.
pub(crate) fn interleaved() -> Vec<u8> {
    let devices = [("drive-scsi0", 70_144), (MEMORY_NAME, 512), ("drive-ide1", 5000)];
    let mut bytes = write_header(&UUID, 0, &config(), &devices).expect("they have a place");
    for clusters in [
        &[(1, 1, 0), (2, 0, 0b10)][..],
        &[(3, 0, 0b11), (2, 1, 0), (1, 0, 0b1000_0000_0110_0001)],
    ] {
        let info = |(device, cluster, mask): &(u8, u32, u16)| ClusterInfo {
            device: *device,
            cluster: *cluster,
            mask: *mask,
        };
        let infos: Vec<ClusterInfo> = clusters.iter().map(info).collect();
        bytes.extend(write_extent(&UUID, &infos));
        let stored_bytes: usize = infos.iter().map(|info| info.stored_bytes()).sum();
        bytes.resize(bytes.len() + stored_bytes, 7);
    }
    bytes
}

fn config() -> [(String, Vec<u8>); 1] {
    [("qemu-server.conf".to_owned(), b"scsi0: local:disk\n".to_vec())]
}

/// Reads an archive unchanged, and with corrected MD5s: few inputs would get past wrong ones.
pub fn vma(bytes: &[u8]) -> Outcome {
    match read(bytes) {
        Outcome::Decoded => Outcome::Decoded,
        Outcome::Refused => read(&sealed(bytes)),
    }
}

/// The same with correct MD5s in the header and in each extent.
fn sealed(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    let size = bytes.get(..HEADER_BYTES).and_then(|start| header_bytes(start).ok());
    let Some(header) = size.and_then(|size| bytes.get_mut(..size)) else {
        return bytes;
    };
    let md5 = md5_without(header, MD5_AT);
    put(header, MD5_AT, &md5);
    let (uuid, mut at) = (header[UUID_AT..UUID_AT + UUID.len()].to_vec(), header.len());
    while let Some(extent) = bytes.get_mut(at..at + EXTENT_BYTES) {
        put(extent, UUID_AT, &uuid);
        let md5 = md5_without(extent, EXTENT_MD5_AT);
        put(extent, EXTENT_MD5_AT, &md5);
        let [high, low] = [extent[EXTENT_BLOCK_COUNT_AT], extent[EXTENT_BLOCK_COUNT_AT + 1]];
        let block_count = u64::from(u16::from_be_bytes([high, low]));
        at += EXTENT_BYTES + holdfast_block::to_usize(block_count * BLOCK_BYTES);
    }
    bytes
}

fn read(bytes: &[u8]) -> Outcome {
    let Ok(mut reader) = VmaReader::open(bytes) else {
        return Outcome::Refused;
    };
    let sizes: Vec<u64> = reader.disks().iter().map(|disk| disk.size_bytes).collect();
    let (mut starts, mut ended) = (HashSet::new(), vec![false; sizes.len()]);
    loop {
        match reader.next() {
            Ok(Some(Piece::Data { disk, offset, bytes })) => {
                let length = bytes.len() as u64;
                assert!(!bytes.is_empty() && length <= CLUSTER_BYTES && !ended[disk]);
                assert!(offset + length <= sizes[disk], "a piece is beyond its disk");
                for block in offset / BLOCK_BYTES..(offset + length).div_ceil(BLOCK_BYTES) {
                    assert!(starts.insert((disk, block)), "pieces overlap");
                }
            }
            Ok(Some(Piece::End { disk })) => assert!(!std::mem::replace(&mut ended[disk], true)),
            Ok(None) => {
                assert!(ended.iter().all(|ended| *ended), "a disk has no end");
                return Outcome::Decoded;
            }
            Err(_) => return Outcome::Refused,
        }
    }
}
