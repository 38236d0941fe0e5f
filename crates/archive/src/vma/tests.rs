//! Archives that are built and parsed independently of the tested code, with the numbers of the specification.

use md5::{Digest as _, Md5};

use std::num::NonZero;
use std::sync::{Arc, Mutex};

use holdfast_block::{BlockDevice, BlockDeviceMut as _, ExtentKind, ExtentList, MemoryDevice, SeededRandom};

use super::{VmaDisk, VmaReader, VmaWriteOptions, VmaWritten, write_vma};
use crate::reader::{ArchiveReader, DocumentKind, Piece};
use crate::{ArchiveKind, Error, OpenOptions, Ordered, Result, StreamImages, Threads, open};

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

#[test]
fn clusters_in_any_order_are_read_and_sorted() {
    let mut random = SeededRandom::new(7);
    let folder = tempfile::tempdir().unwrap();
    for round in 0..40 {
        let count = random.below(4) + 1;
        let disks: Vec<_> = (0..count)
            .map(|_| {
                let size = random.below(1 << 20) + 1;
                disk(&mut random, size)
            })
            .collect();
        let per_extent = usize::try_from(random.below(59)).unwrap() + 1;
        let bytes = archive(&disks, per_extent, |clusters| {
            for at in (1..clusters.len()).rev() {
                clusters.swap(at, usize::try_from(random.below(at as u64 + 1)).unwrap());
            }
        });
        assert!(read_bytes(&bytes).unwrap() == disks, "{round}");
        let reader = VmaReader::open(std::io::Cursor::new(bytes)).unwrap();
        let mut ordered = Ordered::new(Box::new(reader), folder.path());
        assert!(ordered.is_in_order());
        assert_eq!(ordered.disks().len(), disks.len());
        assert!(read(&mut ordered).unwrap() == disks, "{round}");
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_header_lists_configurations_and_disks_and_memory_is_skipped() {
    let configs: [(&str, &[u8]); 2] = [
        ("qemu-server.conf", b"cores: 2\n"),
        ("qemu-server.fw", &vec![b'#'; 65535]),
    ];
    let mut bytes = header(
        &configs,
        &[("drive-scsi0", 10_000), ("vmstate", 4096), ("drive-efidisk0", 540_672)],
    );
    let memory = vec![9; CLUSTER];
    bytes.extend(extent(&[(2, 0, &memory), (1, 0, &[1; 10_000]), (2, 1, &memory)]));
    let zero = (0..9).map(|number| (3, number, &[][..]));
    bytes.extend(extent(&zero.collect::<Vec<_>>()));
    let mut reader = VmaReader::open(&bytes[..]).unwrap();
    let documents = reader.documents();
    assert_eq!(documents[0].kind, DocumentKind::Proxmox);
    assert_eq!((&*documents[0].name, &documents[0].content[..]), configs[0]);
    assert_eq!(documents[1].kind, DocumentKind::Other);
    assert_eq!((&*documents[1].name, &documents[1].content[..]), configs[1]);
    let disks: Vec<_> = reader
        .disks()
        .iter()
        .map(|disk| (&*disk.key, disk.size_bytes))
        .collect();
    assert_eq!(disks, [("drive-scsi0", 10_000), ("drive-efidisk0", 540_672)]);
    assert_eq!(reader.left_out(), ["vmstate"]);
    assert!(!reader.is_in_order());
    assert!(read(&mut reader).unwrap() == [vec![1; 10_000], vec![0; 540_672]]);
}

#[test]
fn adjacent_blocks_are_one_piece_and_zeroes_are_none() {
    let mut content = vec![0; CLUSTER];
    content[4096..3 * 4096].fill(1);
    content[15 * 4096..].fill(2);
    let mut bytes = header(&[], &[("drive-ide0", 3 * CLUSTER as u64)]);
    bytes.extend(extent(&[(1, 2, &content), (1, 0, &[]), (1, 1, &vec![7; CLUSTER])]));
    let mut reader = VmaReader::open(&bytes[..]).unwrap();
    let mut pieces = Vec::new();
    while let Some(piece) = reader.next().unwrap() {
        pieces.push(match piece {
            Piece::Data { disk, offset, bytes } => (disk, offset, bytes.len()),
            Piece::End { disk } => (disk, 0, 0),
        });
    }
    let base = 2 * 65536;
    let expected = [
        (0, base + 4096, 8192),
        (0, base + 15 * 4096, 4096),
        (0, 65536, CLUSTER),
        (0, 0, 0),
    ];
    assert_eq!(pieces, expected);
}

#[test]
fn the_last_cluster_may_be_stored_whole() {
    let mut bytes = header(&[], &[("drive-ide0", 5000)]);
    bytes.extend(extent(&[(1, 0, &vec![3; CLUSTER])]));
    assert_eq!(read_bytes(&bytes).unwrap(), [vec![3; 5000]]);
}

/// The error of an archive with one disk of two clusters and these extents.
fn refusal(extents: &[Vec<u8>]) -> String {
    let mut bytes = header(&[], &[("drive-ide0", 2 * CLUSTER as u64)]);
    bytes.extend(extents.concat());
    read_bytes(&bytes).unwrap_err().to_string()
}

#[test]
fn malformed_extents_are_errors() {
    let data = vec![1; CLUSTER];
    let good = extent(&[(1, 0, &data), (1, 1, &data)]);
    let changed = |change: &dyn Fn(&mut [u8])| {
        let mut bytes = good.clone();
        change(&mut bytes);
        seal(&mut bytes[..512], 24);
        refusal(&[bytes])
    };
    let cases = [
        (refusal(&[]), "2 of its 2 clusters are missing from drive-ide0"),
        (refusal(&[extent(&[(1, 1, &data)])]), "1 of its 2 clusters are missing"),
        (
            refusal(&[good.clone(), extent(&[(1, 0, &[])])]),
            "the cluster 0 of drive-ide0 comes twice",
        ),
        (refusal(&[extent(&[(1, 1, &data), (1, 1, &data)])]), "comes twice"),
        (
            refusal(&[extent(&[(1, 2, &data)])]),
            "the cluster 2 reaches beyond the end of drive-ide0",
        ),
        (refusal(&[extent(&[(1, 2, &[])])]), "reaches beyond the end"),
        (refusal(&[extent(&[(1, u32::MAX, &data)])]), "reaches beyond the end"),
        (
            refusal(&[extent(&[(2, 0, &data)])]),
            "the device 2, which the header does not have",
        ),
        (changed(&|bytes| bytes[3] = b'F'), "an extent begins with"),
        (changed(&|bytes| bytes[8] ^= 1), "it is of another archive"),
        (
            changed(&|bytes| bytes[7] -= 1),
            "it has 31 blocks, and its clusters have 32",
        ),
        (
            changed(&|bytes| bytes[40] = 0x7f),
            "it has 32 blocks, and its clusters have 31",
        ),
        (refusal(&[[&good[..], b"more"].concat()]), "it was cut off"),
        (refusal(&[[&good[..], &[0; 512]].concat()]), "an extent begins with"),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected), "{found}, and not {expected}");
    }
    let mut bytes = good.clone();
    bytes[511] ^= 1;
    assert!(refusal(&[bytes]).contains("its MD5 is not the one that it carries"));
    // A disk that ends within a block ends in it.
    let mut bytes = header(&[], &[("drive-ide0", 5000)]);
    let beyond = [[0; 8192], [1; 8192]].concat();
    bytes.extend(extent(&[(1, 0, &beyond)]));
    let found = read_bytes(&bytes).unwrap_err().to_string();
    assert!(found.contains("reaches beyond the end"), "{found}");
}

#[test]
fn malformed_headers_are_errors() {
    let good = header(
        &[("qemu-server.conf", b"cores: 2\n")],
        &[("drive-ide0", 5000), ("drive-ide1", 5000)],
    );
    let refusal = |bytes: &[u8]| VmaReader::open(bytes).map(|_| ()).unwrap_err().to_string();
    let changed = |place: usize, with: &[u8]| {
        let mut bytes = good.clone();
        bytes[place..place + with.len()].copy_from_slice(with);
        seal(&mut bytes, 32);
        refusal(&bytes)
    };
    let cases = [
        (changed(0, b"VMB"), "a VMA begins with"),
        (changed(7, &[2]), "version 2 of the VMA format"),
        (changed(56, &[0, 0, 0x2f, 0xff]), "it claims to have 12287 bytes"),
        (changed(56, &[0xff; 4]), "it claims to have 4294967295 bytes"),
        (changed(56, &[0, 0x10, 0, 0]), "it was cut off"),
        (changed(48, &[0; 4]), "place of the blobs"),
        (changed(52, &[0, 0, 2, 1]), "place of the blobs"),
        (changed(52, &[0xff; 4]), "place of the blobs"),
        (changed(2044, &[0xff; 4]), "place of a blob"),
        (changed(3068, &[0, 0, 0, 60]), "place of a blob"),
        // The text of the configuration as a name.
        (
            changed(4096 + 32, &good[3068..3072]),
            "it is no name with a zero byte at its end",
        ),
        (
            changed(4096 + 32, &good[4096 + 64..4096 + 68]),
            "drive-ide1 is there twice",
        ),
        (
            changed(4096 + 32 + 8, &[0, 1, 0, 0, 0, 0, 0, 1]),
            "claims to have 281474976710657 bytes",
        ),
    ];
    for (found, expected) in cases {
        assert!(found.contains(expected), "{found}, and not {expected}");
    }
    let path = refusal(&header(&[("../qemu-server.conf", b"cores: 2\n")], &[]));
    assert!(path.contains("it is no name"), "{path}");
    let mut bytes = good.clone();
    bytes[12288 + 100] ^= 1;
    assert!(refusal(&bytes).contains("its MD5 is not the one that it carries"));
}

#[test]
fn a_truncated_archive_is_an_error() {
    let mut random = SeededRandom::new(3);
    let disks = [disk(&mut random, 300_000), disk(&mut random, 200_000)];
    let bytes = archive(&disks, 3, |clusters| clusters.reverse());
    for length in (0..bytes.len()).step_by(512).chain([bytes.len() - 1]) {
        let error = read_bytes(&bytes[..length]).unwrap_err();
        assert!(
            matches!(error, Error::CutOff { .. } | Error::Corrupt { .. }),
            "{length}: {error}"
        );
        assert!(error.to_string().contains("cut off"), "{length}: {error}");
    }
    assert!(read_bytes(&bytes).unwrap() == disks);
}

#[test]
fn a_vma_is_detected_by_its_first_bytes_packed_or_not() {
    let options = OpenOptions {
        threads: Threads {
            count: NonZero::<usize>::MIN,
            load_max: None,
        },
        images: StreamImages::AsTheyCome,
    };
    let bytes = archive(&[vec![5; 70_000]], 59, |_| {});
    let packed = zstd::bulk::compress(&bytes, 1).unwrap();
    for stream in [bytes, packed] {
        let mut archive = open(Box::new(std::io::Cursor::new(stream)), options).unwrap();
        assert_eq!(archive.kind, ArchiveKind::Vma);
        assert_eq!(read(&mut *archive.reader).unwrap(), [vec![5; 70_000]]);
    }
    let refusal = |bytes: &'static [u8]| open(Box::new(bytes), options).map(|_| ()).unwrap_err();
    for packed in [
        &b"\x89LZO\0\r\n\x1a\n"[..],
        b"\xfd7zXZ\0\0",
        b"BZh91AY",
        b"\x04\x22\x4d\x18",
    ] {
        assert!(matches!(refusal(packed), Error::Unsupported { .. }), "{packed:?}");
    }
    for other in [&b""[..], b"VM", b"VMA", b"VMDK and so on"] {
        assert!(matches!(refusal(other), Error::Unknown { .. }), "{other:?}");
    }
}

#[test]
fn a_failed_temporary_file_is_an_error_with_its_folder() {
    let bytes = archive(&[vec![5; 70_000]], 59, |_| {});
    let reader = VmaReader::open(std::io::Cursor::new(bytes)).unwrap();
    let mut ordered = Ordered::new(Box::new(reader), std::path::Path::new("/nowhere"));
    let error = ordered.next().unwrap_err();
    assert!(
        matches!(error, Error::Spool { .. }) && error.to_string().contains("/nowhere"),
        "{error}"
    );
}

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
                assert!(block.iter().any(|byte| *byte != 0), "a block is stored that is zero");
                disk[start..end].copy_from_slice(&block[..end - start]);
                block_count += 1;
            }
        }
        assert!(blocks.next().is_none());
        rest = after;
    }
    assert_eq!(
        seen.len(),
        disks.iter().map(|(_, disk)| disk.len().div_ceil(65536)).sum()
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
    asked: Mutex<Vec<u64>>,
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
        self.asked.lock().unwrap().push(range.start);
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
        asked: Mutex::default(),
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
    let asked = device.asked.lock().unwrap();
    assert!(asked.windows(2).all(|pair| pair[0] < pair[1]), "{asked:?}");
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
        assert!(error.to_string().contains(expected), "{error}, and not {expected}");
    }
    let (archive, _) = write(&config("qemu-server.conf", 65535), &disks[..254]).unwrap();
    assert_eq!(found(&archive).disks.len(), 254);
    assert_eq!(read_bytes(&archive).unwrap().len(), 254);
}
