use std::num::NonZero;
use std::sync::Arc;

use holdfast_block::{BlockDevice, BlockDeviceMut as _, MemoryDevice, SeededRandom};

use super::{XvaDisk, XvaReader, XvaWriteOptions, write_xva};
use crate::checksum::{sha1_hex, xxh64};
use crate::reader::{ArchiveReader as _, Piece};
use crate::tar::{header, padding_of};
use crate::{Error, Result};

const MIB: u64 = 1 << 20;

/// Minimal records.
fn records(disks: &[(&str, u64)], version: &str) -> String {
    let member = |name: &str, value: &str| format!("<member><name>{name}</name><value>{value}</value></member>");
    let object = |class: &str, id: &str, record: &str| {
        let members =
            member("class", class) + &member("id", id) + &member("snapshot", &format!("<struct>{record}</struct>"));
        format!("<value><struct>{members}</struct></value>")
    };
    let mut objects = String::new();
    for (id, size) in disks {
        objects += &object("VDI", id, &member("virtual_size", &size.to_string()));
    }
    let version = member(
        "version",
        &format!("<struct>{}</struct>", member("export_vsn", version)),
    );
    let objects = member("objects", &format!("<array><data>{objects}</data></array>"));
    format!("<value><struct>{version}{objects}</struct></value>")
}

/// Builds an archive independently of the writer.
struct ArchiveBuilder(Vec<u8>);

impl ArchiveBuilder {
    fn new(disks: &[(&str, u64)]) -> Self {
        let mut builder = Self(Vec::new());
        builder.add("ova.xml", records(disks, "2").as_bytes());
        builder
    }

    fn add(&mut self, name: &str, content: &[u8]) {
        self.0.extend(header(name, content.len() as u64, 0));
        self.0.extend(content);
        self.0.resize(self.0.len() + padding_of(content.len() as u64), 0);
    }

    fn block(&mut self, name: &str, content: &[u8]) -> &mut Self {
        self.add(name, content);
        self.add(&format!("{name}.xxhash"), format!("{:016X}", xxh64(content)).as_bytes());
        self
    }

    fn end(&self) -> Vec<u8> {
        let mut bytes = self.0.clone();
        bytes.resize(bytes.len() + 1024, 0);
        bytes
    }
}

fn read(archive: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut reader = XvaReader::open(archive)?;
    let sizes = reader
        .disks()
        .iter()
        .map(|disk| usize::try_from(disk.size_bytes).unwrap());
    let mut disks: Vec<Vec<u8>> = sizes.map(|size| vec![0; size]).collect();
    let mut ended = Vec::new();
    while let Some(piece) = reader.next()? {
        match piece {
            Piece::Data { disk, offset, bytes } => {
                let start = usize::try_from(offset).unwrap();
                disks[disk][start..start + bytes.len()].copy_from_slice(bytes);
            }
            Piece::End { disk } => ended.push(disk),
        }
    }
    assert_eq!(ended, (0..disks.len()).collect::<Vec<_>>());
    assert!(reader.next()?.is_none());
    Ok(disks)
}

fn written(disks: &[(&str, &Arc<MemoryDevice>)]) -> Vec<u8> {
    let mut archive = Vec::new();
    let sizes: Vec<_> = disks.iter().map(|(id, device)| (*id, device.size_bytes())).collect();
    let all: Vec<XvaDisk<'_>> = disks
        .iter()
        .map(|(id, device)| XvaDisk {
            id: (*id).to_owned(),
            device: Arc::clone(device) as Arc<dyn BlockDevice>,
        })
        .collect();
    let options = XvaWriteOptions {
        threads: NonZero::new(3).unwrap(),
        time: 1,
    };
    let mut reported = 0;
    let report = write_xva(&mut archive, &records(&sizes, "2"), &all, options, &mut |done| {
        assert!(done >= reported, "{done} after {reported}");
        reported = done;
        Ok(())
    });
    assert_eq!(report.unwrap().bytes, archive.len() as u64);
    assert_eq!(reported, sizes.iter().map(|(_, size)| size).sum::<u64>());
    archive
}

#[test]
fn written_archives_are_read_again() {
    let mut random = SeededRandom::new(11);
    for round in 0..40 {
        let mut devices = Vec::new();
        for _ in 0..2 {
            let size = random.below(12 * MIB) + 1;
            let device = Arc::new(MemoryDevice::new(size));
            for _ in 0..random.below(5) {
                let offset = random.below(size);
                let mut bytes = vec![0; usize::try_from(random.below(3 * MIB).min(size - offset)).unwrap()];
                random.fill(&mut bytes);
                device.write_at(&bytes, offset).unwrap();
            }
            devices.push(device);
        }
        // Ids are ordered as text, not as numbers.
        let archive = written(&[("Ref:9", &devices[0]), ("Ref:10", &devices[1])]);
        let found = read(&archive).unwrap();
        assert!(
            found[0] == devices[1].to_bytes() && found[1] == devices[0].to_bytes(),
            "{round}"
        );
    }
}

/// The ids of a suspended machine come from its pool, or from the archive that it was imported from.
#[test]
fn an_id_too_long_for_member_names_is_refused() {
    let mut archive = Vec::new();
    let disk = XvaDisk {
        id: "R".repeat(200),
        device: Arc::new(MemoryDevice::new(512)),
    };
    let options = XvaWriteOptions {
        threads: NonZero::new(1).unwrap(),
        time: 1,
    };
    let refused = write_xva(&mut archive, "", &[disk], options, &mut |_| Ok(()));
    assert!(matches!(refused, Err(Error::InvalidOption { .. })) && archive.is_empty());
}

#[test]
fn only_data_and_the_first_and_last_block_are_written() {
    let device = Arc::new(MemoryDevice::new(3 << 40));
    device.write_at(&[7; 100], 2 << 40).unwrap();
    let archive = written(&[("Ref:7", &device)]);
    let text = String::from_utf8_lossy(&archive);
    let names = ["Ref:7/00000000", "Ref:7/02097152", "Ref:7/03145727"];
    let at: Vec<_> = names
        .iter()
        .map(|name| text.find(&format!("{name}\0")).unwrap())
        .collect();
    assert!(at[0] < at[1] && at[1] < at[2]);
    assert!(archive.len() < 4 << 20, "{}", archive.len());
    let mut reader = XvaReader::open(&archive[..]).unwrap();
    let mut offsets = Vec::new();
    while let Some(piece) = reader.next().unwrap() {
        if let Piece::Data { offset, .. } = piece {
            offsets.push(offset);
        }
    }
    assert_eq!(offsets, [0, 2 << 40, (3 << 40) - MIB]);
}

#[test]
fn skipped_numbers_are_zeroes_and_empty_members_are_ignored() {
    let block = |fill: u8| vec![fill; 1 << 20];
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 6 * MIB + 100)]);
    builder
        .block("Ref:5/00000000", &block(1))
        // Two empty members kept a slow connection open; the next number follows them.
        .block("Ref:5/00000001", b"")
        .block("Ref:5/00000002", b"")
        .block("Ref:5/00000003", &block(2))
        // Two zero blocks are left out.
        .block("Ref:5/00000006", &block(3))
        .block("Ref:5/00000007", &block(4))
        // The last block, as Xen Orchestra writes it.
        .block("Ref:5/8", &[5; 100]);
    let found = read(&builder.end()).unwrap().remove(0);
    let expected = [
        &block(1)[..],
        &block(2),
        &block(0),
        &block(0),
        &block(3),
        &block(4),
        &[5; 100],
    ]
    .concat();
    assert!(found == expected);
}

#[test]
fn older_checksums_and_none_at_all_are_read() {
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 4)]);
    builder.add("Ref:5/00000000", b"data");
    builder.add("Ref:5/00000000.checksum", sha1_hex(b"data").as_bytes());
    assert_eq!(read(&builder.end()).unwrap(), [b"data".to_vec()]);

    let mut builder = ArchiveBuilder(Vec::new());
    builder.add("ova.xml", records(&[("Ref:5", 4)], "0").as_bytes());
    builder.add("Ref:5/00000000", b"data");
    assert_eq!(read(&builder.end()).unwrap(), [b"data".to_vec()]);
}

/// The medium in a drive may be in the archive: it is checked and skipped.
#[test]
fn media_of_drives_are_skipped() {
    let drive = "<value><struct><member><name>class</name><value>VBD</value></member><member><name>id</name><value>Ref:7</value></member>\
         <member><name>snapshot</name><value><struct><member><name>type</name><value>CD</value></member><member><name>VDI</name>\
         <value>Ref:8</value></member></struct></value></member></struct></value>";
    let records = records(&[("Ref:5", 4), ("Ref:8", 6)], "2").replace("<data>", &format!("<data>{drive}"));
    let archive = |medium: &[u8]| {
        let mut builder = ArchiveBuilder(Vec::new());
        builder.add("ova.xml", records.as_bytes());
        builder
            .block("Ref:5/00000000", b"data")
            .block("Ref:8/00000000", b"medium");
        let end = builder.end();
        let at = end.windows(6).position(|window| window == b"medium").unwrap();
        [&end[..at], medium, &end[at + 6..]].concat()
    };
    assert_eq!(read(&archive(b"medium")).unwrap(), [b"data".to_vec()]);
    assert!(read(&archive(b"Medium")).unwrap_err().to_string().contains("checksum"));
}

#[test]
fn malformed_archives_are_errors() {
    let refused = |builder: &ArchiveBuilder, words: &str| {
        let error = read(&builder.end()).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 8)]);
    builder.add("Ref:5/00000000", b"data");
    builder.add("Ref:5/00000000.xxhash", b"0123456789ABCDEF");
    refused(&builder, "the checksum of Ref:5/00000000 is");
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 8)]);
    refused(builder.block("Ref:5/00000000", b"data"), "ends at 4 of 8 bytes");
    refused(builder.block("Ref:5/00000001", b"data+"), "beyond the end");
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 8)]);
    refused(builder.block("Ref:5/00000001", b"data"), "has the number 1");
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 8)]);
    refused(builder.block("Ref:6/00000000", b"data"), "does not have");
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 8)]);
    builder
        .block("Ref:5/00000000", b"data")
        .block("Ref:5/00000000", b"data");
    refused(&builder, "comes after the block 0");
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 8)]);
    builder.add("Ref:5/00000000", b"data");
    builder.add("Ref:5/00000001", b"data");
    refused(&builder, "not its checksum");
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 8)]);
    builder
        .block("Ref:5/00000000", b"data")
        .block("../../etc/passwd", b"data");
    refused(&builder, "is no block of a disk");
    let mut builder = ArchiveBuilder::new(&[("Ref:5", 4), ("Ref:6", 4)]);
    refused(builder.block("Ref:5/00000000", b"data"), "nothing of Ref:6");
}

#[test]
fn a_truncated_archive_is_an_error() {
    let device = Arc::new(MemoryDevice::new(2 * MIB + 700));
    device.write_at(&[9; 3000], MIB - 1000).unwrap();
    let archive = written(&[("Ref:7", &device)]);
    for length in (0..archive.len() - 1024).step_by(509) {
        let error = read(&archive[..length]).unwrap_err();
        assert!(matches!(error, Error::CutOff { .. }), "{length}: {error}");
    }
}
