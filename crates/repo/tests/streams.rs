//! Small streams of one snapshot share a frame, and each of them is read by itself.

#![allow(clippy::unwrap_used, reason = "all of it is test")]

mod common;

use common::{Rig, request, source};
use holdfast_block::BlockDevice as _;
use holdfast_repo::{Parent, SourceData};

/// A part of a frame was decoded, and all of its chunks were checked.
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
