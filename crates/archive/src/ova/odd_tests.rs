//! Packages of tools that deviate from the specification, or use rare parts of it.

use holdfast_image::{Continue, Error as ImageError, ImageId, StreamOptions, write_stream_optimized};

use super::tests::{MIB, READING, STREAM, THREADS, archive, descriptor, devices};
use super::{ImageReading, OvaReader};
use crate::ova::disk::StreamImages;
use crate::reader::{ArchiveReader as _, DiskContent, Piece};
use crate::tar::TarReader;
use crate::{Error, Result};

struct ReadPackage {
    disks: Vec<Vec<u8>>,
    contents: Vec<DiskContent>,
    corrections: Vec<String>,
}

fn read_by(archive: &[u8], reading: ImageReading) -> Result<ReadPackage> {
    let mut tar = TarReader::new(archive);
    let first = tar.next()?.unwrap();
    let mut reader = OvaReader::open_at_descriptor(tar, &first, reading)?;
    let mut disks: Vec<Vec<u8>> = vec![Vec::new(); reader.disks().len()];
    let mut ended = vec![false; disks.len()];
    while let Some(piece) = reader.next()? {
        match piece {
            Piece::Data { disk, offset, bytes } => {
                let start = usize::try_from(offset).unwrap();
                assert!(bytes.iter().any(|byte| *byte != 0), "zeroes are not returned");
                disks[disk].resize(start, 0);
                disks[disk].extend_from_slice(bytes);
            }
            Piece::End { disk } => ended[disk] = true,
        }
    }
    assert!(ended.iter().all(|has_ended| *has_ended));
    for (bytes, disk) in disks.iter_mut().zip(reader.disks()) {
        bytes.resize(usize::try_from(disk.size_bytes).unwrap(), 0);
    }
    Ok(ReadPackage {
        contents: reader.disks().iter().map(|disk| disk.content).collect(),
        corrections: reader.corrections(),
        disks,
    })
}

fn read(archive: &[u8]) -> Result<ReadPackage> {
    read_by(archive, READING)
}

/// The first device as a stream-optimized VMDK.
fn stream() -> Vec<u8> {
    let [device, _] = devices();
    let options = StreamOptions {
        name: "d.vmdk",
        id: ImageId::NIL,
        threads: THREADS,
        level: None,
    };
    let mut bytes = Vec::new();
    write_stream_optimized(&*device, &mut bytes, &options, &mut |_| Continue::Go).unwrap();
    bytes
}

/// A disk without a file is blank: the importer creates it, full of zeroes.
#[test]
fn disks_without_a_file_are_blank() {
    let blank = "<Disk ovf:capacity=\"3\" ovf:capacityAllocationUnits=\"byte * 2^20\" ovf:diskId=\"log\"/>";
    let text = descriptor(&[("d.vmdk", 5 * MIB)], STREAM).replace("<Info/><Disk", &format!("<Info/>{blank}<Disk"));
    let found = read(&archive(&[("w.ovf", text.as_bytes()), ("d.vmdk", &stream())])).unwrap();
    assert_eq!(found.contents, [DiskContent::Stored, DiskContent::Blank]);
    assert!(found.disks[0] == devices()[0].to_bytes());
    assert_eq!(found.disks[1], vec![0; 3 << 20]);
    // A package may have nothing else.
    let text = descriptor(&[], STREAM).replace("<Info/></DiskSection>", &format!("<Info/>{blank}</DiskSection>"));
    let found = read(&archive(&[("w.ovf", text.as_bytes())])).unwrap();
    assert_eq!(
        (found.contents, found.disks),
        (vec![DiskContent::Blank], vec![vec![0; 3 << 20]])
    );
    // A blank disk without a capacity has no size, and one with a parent is a difference image: both are refused.
    for (from, to) in [
        (" ovf:capacity=\"3\"", ""),
        (" ovf:diskId", " ovf:parentRef=\"other\" ovf:diskId"),
    ] {
        let text = text.replace(from, to);
        let error = read(&archive(&[("w.ovf", text.as_bytes())])).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    }
}

#[test]
fn file_names_are_normalized() {
    let stream = stream();
    for (href, member) in [
        ("./d.vmdk", "d.vmdk"),
        ("d.vmdk", "./d.vmdk"),
        ("a/../d.vmdk", "d.vmdk"),
        ("disks//d.vmdk", "disks/./d.vmdk"),
        ("./my%20disk.vmdk", "my disk.vmdk"),
        ("%2e/d.vmdk", "d.vmdk"),
        ("d%2evmdk", "d%2evmdk"),
    ] {
        let text = descriptor(&[(href, 5 * MIB)], STREAM);
        let manifest = format!("SHA1({href})= {}\n", crate::checksum::sha1_hex(&stream));
        let members: [(&str, &[u8]); 3] = [
            ("w.ovf", text.as_bytes()),
            (member, &stream),
            ("w.mf", manifest.as_bytes()),
        ];
        let found = read(&archive(&members)).unwrap_or_else(|error| panic!("{href}: {error}"));
        assert!(found.disks[0] == devices()[0].to_bytes(), "{href}");
    }
    for href in ["../d.vmdk", "a/../../d.vmdk", "/d.vmdk", "%2e%2e/d.vmdk", "."] {
        let text = descriptor(&[(href, 5 * MIB)], STREAM);
        let refused = read(&archive(&[("w.ovf", text.as_bytes()), ("d.vmdk", &stream)]));
        assert!(refused.is_err(), "{href}");
    }
}

/// On Windows, names that differ only in case name one file: descriptor and archive may have different ones.
#[test]
fn names_may_differ_in_case_unless_an_exact_match_exists() {
    let (stream, other) = (stream(), b"something else".as_slice());
    let text = descriptor(&[("Disk-Ä.VMDK", 5 * MIB)], STREAM);
    let sum = crate::checksum::sha1_hex(&stream);
    let wrong = crate::checksum::sha1_hex(other);
    for (member, listed) in [
        ("disk-ä.vmdk", "DISK-Ä.vmdk"),
        ("disk-ä.vmdk", "disk-ä.vmdk"),
        ("Disk-Ä.VMDK", "disk-ä.vmdk"),
    ] {
        let package = |sum: &str| {
            let manifest = format!("SHA1({listed})= {sum}\n");
            let members: [(&str, &[u8]); 3] = [
                ("w.ovf", text.as_bytes()),
                ("w.mf", manifest.as_bytes()),
                (member, &stream),
            ];
            archive(&members)
        };
        let found = read(&package(&sum)).unwrap_or_else(|error| panic!("{member}: {error}"));
        assert!(found.disks[0] == devices()[0].to_bytes(), "{member}");
        let error = read(&package(&wrong)).map(|_| ()).unwrap_err();
        assert!(
            matches!(error, Error::Corrupt { what: "file", .. }),
            "{member}: {error}"
        );
    }
    // The member with the exact name is the disk; the other one is an unrelated file.
    let both: [(&str, &[u8]); 3] = [
        ("w.ovf", text.as_bytes()),
        ("Disk-Ä.VMDK", &stream),
        ("disk-ä.vmdk", other),
    ];
    assert!(read(&archive(&both)).unwrap().disks[0] == devices()[0].to_bytes());
    // The member with the similar name comes first, so it is read before the exact match is found.
    let both: [(&str, &[u8]); 3] = [
        ("w.ovf", text.as_bytes()),
        ("disk-ä.vmdk", &stream),
        ("Disk-Ä.VMDK", &stream),
    ];
    let error = read(&archive(&both)).map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("disk-ä.vmdk") && error.contains("Disk-Ä.VMDK"),
        "{error}"
    );
    // Two disks whose names differ in case only are two disks.
    let text = descriptor(&[("d.vmdk", 5 * MIB), ("D.vmdk", 5 * MIB)], STREAM);
    let two: [(&str, &[u8]); 3] = [("w.ovf", text.as_bytes()), ("d.vmdk", &stream), ("D.vmdk", &stream)];
    assert_eq!(read(&archive(&two)).unwrap().disks.len(), 2);
    let ambiguous: [(&str, &[u8]); 2] = [("w.ovf", text.as_bytes()), ("d.VMDK", &stream)];
    let error = read(&archive(&ambiguous)).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Unsupported { .. }), "{error}");
    // The error names the missing file and the existing ones.
    let neither: [(&str, &[u8]); 2] = [("w.ovf", text.as_bytes()), ("e.vmdk", &stream)];
    let error = read(&archive(&neither)).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("\"d.vmdk\"") && error.contains("\"e.vmdk\""), "{error}");
}

/// Oracle's tools write the length of the file as the capacity of the disk.
#[test]
fn a_capacity_equal_to_the_file_length_is_corrected_by_the_image() {
    let stream = stream();
    let length = stream.len() as u64;
    for size in ["", &format!(" ovf:size=\"{length}\"")] {
        let text = descriptor(&[("d.vmdk", length)], STREAM).replace("d.vmdk\"/>", &format!("d.vmdk\"{size}/>"));
        let found = read(&archive(&[("w.ovf", text.as_bytes()), ("d.vmdk", &stream)])).unwrap();
        assert!(found.disks[0] == devices()[0].to_bytes(), "{size}");
        let [correction] = &found.corrections[..] else {
            panic!("{:?}", found.corrections);
        };
        assert!(correction.contains("5242880 bytes by its image"), "{correction}");
    }
    // Any other capacity is an error.
    let text = descriptor(&[("d.vmdk", length + 2 * MIB)], STREAM);
    let error = read(&archive(&[("w.ovf", text.as_bytes()), ("d.vmdk", &stream)]))
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(error, Error::Corrupt { what: "disk", .. }), "{error}");
    let text = descriptor(&[("d.vmdk", 5 * MIB)], STREAM);
    let found = read(&archive(&[("w.ovf", text.as_bytes()), ("d.vmdk", &stream)])).unwrap();
    assert!(found.corrections.is_empty(), "{:?}", found.corrections);
}

/// Grains may be out of order: such an image can only be read from a file.
#[test]
fn streams_with_unordered_grains_are_read_from_a_stored_file() {
    let stream = swapped(&stream());
    let text = descriptor(&[("d.vmdk", 5 * MIB)], STREAM);
    let bytes = archive(&[("w.ovf", text.as_bytes()), ("d.vmdk", &stream)]);
    let error = read(&bytes).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Image(ImageError::NotInOrder { .. })), "{error}");
    let reading = ImageReading {
        images: StreamImages::Spooled,
        ..READING
    };
    let found = read_by(&bytes, reading).unwrap();
    assert!(found.disks[0] == devices()[0].to_bytes());
}

/// A stream whose first two grains are swapped, with a matching table.
fn swapped(stream: &[u8]) -> Vec<u8> {
    let number = |at: usize| u64::from_le_bytes(stream[at..at + 8].try_into().unwrap());
    let start = usize::try_from(number(64)).unwrap() * 512;
    let length = |at: usize| {
        let stored = u32::from_le_bytes(stream[at + 8..at + 12].try_into().unwrap());
        (usize::try_from(stored).unwrap() + 12).next_multiple_of(512)
    };
    let second = start + length(start);
    let third = second + length(second);
    let mut swapped = stream.to_vec();
    swapped[start..third].rotate_left(second - start);
    let sector = |at: usize| u32::try_from(at / 512).unwrap().to_le_bytes();
    let behind = start + third - second;
    // The table has both offsets in succession.
    let old = [sector(start), sector(second)].concat();
    let places: Vec<usize> = (third..stream.len() - 8)
        .filter(|at| stream[*at..at + 8] == old)
        .collect();
    assert!(!places.is_empty(), "the table follows the grains");
    for at in places {
        swapped[at..at + 8].copy_from_slice(&[sector(behind), sector(start)].concat());
    }
    swapped
}

/// Stored images are sparse files; raw images are not stored.
#[test]
fn stored_zeroes_take_no_space_and_oversized_images_are_refused() {
    let mut disk = vec![0; 40 << 20];
    disk[30 << 20] = 1;
    for uri in ["raw", "unspecified"] {
        let text = descriptor(&[("d.img", 40 << 20)], uri);
        let found = read(&archive(&[("w.ovf", text.as_bytes()), ("d.img", &disk)])).unwrap();
        assert!(found.disks[0] == disk, "{uri}");
    }
    // Tables and snapshots may make an image larger than its disk, within a limit.
    let text = descriptor(&[("d.img", MIB)], "unspecified");
    let error = read(&archive(&[("w.ovf", text.as_bytes()), ("d.img", &vec![7; 67 << 20])]))
        .map(|_| ())
        .unwrap_err();
    assert!(
        error.to_string().contains("more than 69206016 bytes of data"),
        "{error}"
    );
    let error = read(&archive(&[("w.ovf", text.as_bytes()), ("d.img", &vec![0; 67 << 20])]))
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(error, Error::Corrupt { what: "disk", .. }), "{error}");
}

#[test]
fn descriptors_in_utf_16_are_read() {
    let text = descriptor(&[("d.vmdk", 5 * MIB)], STREAM);
    let text = format!("<?xml version=\"1.0\" encoding=\"UTF-16\"?>{text}");
    let bytes: Vec<u8> = "\u{feff}"
        .encode_utf16()
        .chain(text.encode_utf16())
        .flat_map(u16::to_le_bytes)
        .collect();
    let found = read(&archive(&[("w.ovf", &bytes), ("d.vmdk", &stream())])).unwrap();
    assert!(found.disks[0] == devices()[0].to_bytes());
    let error = read(&archive(&[("w.ovf", &bytes[..bytes.len() - 1])]))
        .map(|_| ())
        .unwrap_err();
    assert!(matches!(error, Error::Corrupt { what: "descriptor", .. }), "{error}");
}
