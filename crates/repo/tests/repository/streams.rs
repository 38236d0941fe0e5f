//! Small streams of one snapshot share a frame, and can be read individually.

use holdfast_block::{BlockDevice as _, MemoryDevice};
use holdfast_repo::{Parent, SourceData};

use crate::common::{Rig, request, source};

/// The decoded start of a frame ends with a whole block, even if the disk does not, because fingerprints are of whole
/// blocks.
#[test]
fn the_end_of_a_disk_within_a_block_is_read_and_checked() {
    for seed in 60..68 {
        let rig = Rig::new(seed);
        let bytes: Vec<u8> = (0..300_700_u32).map(|number| (number % 251) as u8).collect();
        let disk = MemoryDevice::from_bytes(&bytes);
        let sources = vec![source("vda", SourceData::Disk(&disk))];
        let request = request("m", 1, sources, Parent::None, 1);
        let snapshot = rig.repository.backup(request, &rig.progress).unwrap().snapshot;
        for length in [1, 700, 5000, 200_000] {
            let device = rig.repository.device_checking_prints(&snapshot.disks[0]);
            let mut end = vec![0; length];
            device.read_at(&mut end, (bytes.len() - length) as u64).unwrap();
            assert!(end == bytes[bytes.len() - length..], "{length}");
        }
    }
}

/// Only a part of a frame is decoded, and all chunks in that part are checked.
#[test]
fn one_of_several_streams_is_read_and_checked() {
    let rig = Rig::new(51);
    let texts: Vec<Vec<u8>> = (1..4).map(|number| vec![number; 1000 * usize::from(number)]).collect();
    let mut readers: Vec<&[u8]> = texts.iter().map(|text| &text[..]).collect();
    let sources = readers.iter_mut().zip(["a.xml", "b.xml", "nvram"]);
    let sources = sources.map(|(reader, name)| source(name, SourceData::Stream(reader)));
    let request = request("m", 1, sources.collect(), Parent::None, 1);
    let snapshot = rig.repository.backup(request, &rig.progress).unwrap().snapshot;
    for (disk, text) in snapshot.disks.iter().zip(&texts) {
        let device = rig.repository.device_checking_prints(disk);
        let mut bytes = vec![0; text.len()];
        device.read_at(&mut bytes[..10], 0).unwrap();
        device.read_at(&mut bytes, 0).unwrap();
        assert!(bytes == *text, "{}", disk.name);
    }
}
