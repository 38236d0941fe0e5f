//! Reading of archives: order of clusters, malformed headers and extents, and truncated files.

use std::num::NonZero;

use holdfast_block::{SeededRandom, Threads};

use super::{CLUSTER, archive, disk, extent, header, read, read_bytes, seal};
use crate::reader::{ArchiveReader, DocumentKind, Piece};
use crate::vma::VmaReader;
use crate::{ArchiveKind, Error, OpenOptions, Ordered, StreamImages, open};

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
        assert!(found.contains(expected), "{found}; expected {expected}");
    }
    let mut bytes = good.clone();
    bytes[511] ^= 1;
    assert!(refusal(&[bytes]).contains("its MD5 is not the one that it carries"));
    // Nothing may follow the end of a disk, even if that end is inside a block.
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
        // The name of the configuration refers to its text.
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
        assert!(found.contains(expected), "{found}; expected {expected}");
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
        images: StreamImages::Streamed,
    };
    let bytes = archive(&[vec![5; 70_000]], 59, |_| {});
    let packed = zstd::bulk::compress(&bytes, 1).unwrap();
    for stream in [bytes, packed] {
        let mut archive = open(Box::new(std::io::Cursor::new(stream)), options).unwrap();
        assert_eq!(archive.kind, ArchiveKind::Vma);
        assert_eq!(read(&mut *archive.reader).unwrap(), [vec![5; 70_000]]);
    }
    let refusal = |bytes: &'static [u8]| open(Box::new(bytes), options).map(|_| ()).unwrap_err();
    for packed in [&b"\x89LZO\0\r\n\x1a\n"[..], b"BZh91AY", b"\x04\x22\x4d\x18"] {
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
