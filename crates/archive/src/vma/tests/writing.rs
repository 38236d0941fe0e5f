//! Writing of archives, which an independent parser then reads.

use std::num::NonZero;
use std::sync::{Arc, Mutex};

use holdfast_block::{BlockDevice, BlockDeviceMut as _, ExtentKind, ExtentList, MemoryDevice, SeededRandom};

use super::{UUID, read_bytes, seal};
use crate::reader::ArchiveReader;
use crate::vma::{VmaDisk, VmaReader, VmaWriteOptions, VmaWritten, write_vma};
use crate::{Error, Result};

/// The content of an archive, by an independent parser.
struct ParsedVma {
    configs: Vec<(String, Vec<u8>)>,
    disks: Vec<(String, Vec<u8>)>,
    /// Blocks that are stored.
    block_count: usize,
}

fn number(bytes: &[u8]) -> usize {
    bytes.iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}

fn assert_sealed(bytes: &[u8], place: usize) {
    let mut again = bytes.to_vec();
    seal(&mut again, place);
    assert!(again == bytes, "the MD5 is wrong");
}

fn found(archive: &[u8]) -> ParsedVma {
    assert_eq!(&archive[..8], b"VMA\0\0\0\0\x01");
    let header = &archive[..number(&archive[56..60])];
    assert_sealed(header, 32);
    assert_eq!(header.len() % 512, 0);
    let uuid = &header[8..24];
    // As Proxmox does: reads the blobs in order, and references must be to one of them.
    let (offset, size) = (number(&header[48..52]), number(&header[52..56]));
    assert!(offset >= 12288 && offset + size <= header.len());
    let mut blobs = std::collections::BTreeMap::new();
    let mut at = 1;
    while at < size {
        let length = usize::from(u16::from_le_bytes(header[offset + at..][..2].try_into().unwrap()));
        blobs.insert(at, &header[offset + at + 2..][..length]);
        at += 2 + length;
    }
    assert_eq!(at, size);
    let name = |place: usize| {
        let (last, name) = blobs[&place].split_last().unwrap();
        assert_eq!(*last, 0);
        String::from_utf8(name.to_vec()).unwrap()
    };
    let places = |at: usize, count: usize| (0..count).map(move |n| number(&header[at + 4 * n..][..4]));
    let configs = places(2044, 256).zip(places(3068, 256)).filter(|(name, _)| *name != 0);
    let configs = configs.map(|(place, content)| (name(place), blobs[&content].to_vec()));
    let devices = header[4096..12288]
        .chunks(32)
        .skip(1)
        .take_while(|device| number(&device[..4]) != 0);
    let mut disks: Vec<_> = devices
        .map(|device| (name(number(&device[..4])), vec![0; number(&device[8..16])]))
        .collect();
    let mut seen = std::collections::BTreeSet::new();
    let (mut rest, mut block_count) = (&archive[header.len()..], 0);
    while !rest.is_empty() {
        let (header, blocks) = rest.split_at(512);
        assert_eq!(&header[..4], b"VMAE");
        assert_sealed(header, 24);
        assert_eq!(&header[8..24], uuid);
        let (blocks, after) = blocks.split_at(4096 * number(&header[6..8]));
        let mut blocks = blocks.chunks(4096);
        for info in header[40..].chunks(8).filter(|info| info[3] != 0) {
            let (mask, device, cluster) = (number(&info[..2]), usize::from(info[3]) - 1, number(&info[4..]));
            assert!(seen.insert((device, cluster)), "twice");
            let disk = &mut disks[device].1;
            assert!(cluster * 65536 < disk.len());
            for bit in (0..16).filter(|bit| mask >> bit & 1 == 1) {
                let start = cluster * 65536 + bit * 4096;
                let end = disk.len().min(start + 4096);
                let block = blocks.next().unwrap();
                assert!(block.iter().any(|byte| *byte != 0), "a zero block is stored");
                disk[start..end].copy_from_slice(&block[..end - start]);
                block_count += 1;
            }
        }
        assert!(blocks.next().is_none());
        rest = after;
    }
    assert_eq!(
        seen.len(),
        disks.iter().map(|(_, disk)| disk.len().div_ceil(65536)).sum::<usize>()
    );
    ParsedVma {
        configs: configs.collect(),
        disks,
        block_count,
    }
}

fn write(config: &[(String, Vec<u8>)], disks: &[(&str, Arc<dyn BlockDevice>)]) -> Result<(Vec<u8>, VmaWritten)> {
    let disks: Vec<VmaDisk<'_>> = disks
        .iter()
        .map(|(name, device)| VmaDisk {
            device_name: (*name).to_owned(),
            device: Arc::clone(device),
        })
        .collect();
    let options = VmaWriteOptions {
        threads: NonZero::new(3).unwrap(),
        time: 1_700_000_000,
        uuid: UUID,
    };
    let (mut archive, mut reported) = (Vec::new(), 0);
    let report = write_vma(&mut archive, config, &disks, options, &mut |done| {
        assert!(done > reported, "{done} after {reported}");
        reported = done;
        Ok(())
    })?;
    assert_eq!(report.bytes, archive.len() as u64);
    assert_eq!(reported, disks.iter().map(|disk| disk.device.size_bytes()).sum::<u64>());
    Ok((archive, report))
}

#[test]
fn written_archives_are_read_by_two_readers() {
    let mut random = SeededRandom::new(23);
    for round in 0..40 {
        let mut devices: Vec<Arc<MemoryDevice>> = Vec::new();
        for _ in 0..=random.below(3) {
            // More than an extent, often ending within a block.
            let size = (random.below(10 << 11) + 1) * 512;
            let device = Arc::new(MemoryDevice::new(size));
            for _ in 0..random.below(6) {
                let offset = random.below(size);
                let mut bytes = vec![0; usize::try_from(random.below(3 << 20).min(size - offset)).unwrap()];
                random.fill(&mut bytes);
                device.write_at(&bytes, offset).unwrap();
            }
            devices.push(device);
        }
        let names: Vec<String> = (0..devices.len()).map(|number| format!("drive-scsi{number}")).collect();
        let disks: Vec<(&str, Arc<dyn BlockDevice>)> = names
            .iter()
            .zip(&devices)
            .map(|(name, device)| (&**name, Arc::clone(device) as Arc<dyn BlockDevice>))
            .collect();
        let config = [("qemu-server.conf".to_owned(), b"cores: 4\n".to_vec())];
        let (archive, report) = write(&config, &disks).unwrap();
        let contents: Vec<_> = devices.iter().map(|device| device.to_bytes()).collect();
        assert!(read_bytes(&archive).unwrap() == contents, "{round}");
        let reader = VmaReader::open(&archive[..]).unwrap();
        assert_eq!(reader.documents()[0].content, config[0].1);
        assert!(reader.disks().iter().map(|disk| &disk.key).eq(&names));
        let found = found(&archive);
        assert_eq!(found.configs, config);
        assert!(
            found.disks == names.into_iter().zip(contents).collect::<Vec<_>>(),
            "{round}"
        );
        let stored = found.block_count as u64 * 4096;
        assert!(
            (stored - report.data_bytes) < 4096 * devices.len() as u64,
            "{stored} {report:?}"
        );
    }
}

/// Records which ranges are queried and read.
struct RecordingDevice {
    device: MemoryDevice,
    reads: Mutex<Vec<(u64, u64)>>,
    queried: Mutex<Vec<u64>>,
}

impl BlockDevice for RecordingDevice {
    fn size_bytes(&self) -> u64 {
        self.device.size_bytes()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> holdfast_block::Result<()> {
        self.reads.lock().unwrap().push((offset, offset + buffer.len() as u64));
        self.device.read_at(buffer, offset)
    }

    fn extents(&self, range: std::ops::Range<u64>, _: usize) -> holdfast_block::Result<ExtentList> {
        self.queried.lock().unwrap().push(range.start);
        // One at a time: of each MiB, the second half is data.
        let half = range.start / (1 << 19);
        let end = ((half + 1) << 19).min(range.end);
        let kind = if half % 2 == 1 {
            ExtentKind::Data
        } else {
            ExtentKind::Zero
        };
        let mut list = ExtentList::new(range.start, 1);
        list.push(end - range.start, kind);
        Ok(list)
    }
}

#[test]
fn extents_are_queried_once_and_only_data_is_read() {
    let device = Arc::new(RecordingDevice {
        device: MemoryDevice::from_bytes(&vec![5; 20 << 20]),
        reads: Mutex::default(),
        queried: Mutex::default(),
    });
    let (archive, report) = write(&[], &[("drive-scsi0", Arc::clone(&device) as _)]).unwrap();
    assert_eq!(report.data_bytes, 10 << 20);
    let disk = &found(&archive).disks[0].1;
    assert!(
        disk.chunks(1 << 19)
            .enumerate()
            .all(|(half, bytes)| bytes.iter().all(|byte| usize::from(*byte) == half % 2 * 5))
    );
    let mut reads = device.reads.lock().unwrap().clone();
    reads.sort_unstable();
    assert!(reads.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{reads:?}");
    assert_eq!(reads.iter().map(|(start, end)| end - start).sum::<u64>(), 10 << 20);
    let queried = device.queried.lock().unwrap();
    assert!(queried.windows(2).all(|pair| pair[0] < pair[1]), "{queried:?}");
}

#[test]
fn content_beyond_the_limits_of_the_format_is_refused() {
    let device = |size: u64| Arc::new(MemoryDevice::new(size)) as Arc<dyn BlockDevice>;
    let config = |name: &str, length: usize| vec![(name.to_owned(), vec![b'#'; length])];
    let many = vec![("one".to_owned(), Vec::new()); 257];
    let names: Vec<String> = (0..255).map(|number| format!("drive-scsi{number}")).collect();
    let disks = names.iter().map(|name| (&**name, device(512))).collect::<Vec<_>>();
    let cases = [
        (write(&config("a/b", 5), &[]), "is no name"),
        (write(&config("", 5), &[]), "is no name"),
        (write(&config("one", 65536), &[]), "\"one\" has 65536 bytes"),
        (write(&many, &[]), "there are 257"),
        (write(&[], &disks), "there are 255"),
        (
            write(&[], &[("one", device(512)), ("one", device(512))]),
            "one is there twice",
        ),
        (write(&[], &[("vmstate", device(512))]), "the memory of a machine"),
        (write(&[], &[("one", device(0))]), "one has 0 bytes"),
        (write(&[], &[("one", device(513))]), "one has 513 bytes"),
        (
            write(&[], &[("one", device((1 << 48) + 512))]),
            "one has 281474976711168 bytes",
        ),
    ];
    for (result, expected) in cases {
        let error = result.map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::InvalidOption { .. }));
        assert!(error.to_string().contains(expected), "{error}; expected {expected}");
    }
    let (archive, _) = write(&config("qemu-server.conf", 65535), &disks[..254]).unwrap();
    assert_eq!(found(&archive).disks.len(), 254);
    assert_eq!(read_bytes(&archive).unwrap().len(), 254);
}
