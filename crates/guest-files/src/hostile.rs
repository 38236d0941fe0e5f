//! The parsers of this crate, for fuzzers and for tests without a fuzzer.
//!
//! File systems are large and mostly zero, so the input describes a device: its size in KiB (4 bytes), and sectors with
//! their numbers (4 + 512 bytes each). The seeds were made by mkfs, sfdisk, sgdisk and LVM.
//!
//! The module exists only with the feature `hostile`, and is not part of the public API.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::sync::Arc;

use holdfast_block::hostile::{Outcome, Parser};
use holdfast_block::{BlockDevice, BlockDeviceMut, MemoryDevice};

use crate::protocol::{Appliance, ReaderProcess, RemoteFileSystem, ScanRequest};
use crate::{
    Content, DirectoryEntry, DiskSource, ExtendedAttribute, FileKind, FilePiece, FileSystem, find_volumes,
    open_file_system,
};

/// Devices of hostile bytes are not larger.
const DEVICE_BYTES_MAX: u64 = 64 << 20;
const SECTOR_BYTES: usize = 512;
/// Nodes that are visited, and pieces that are read of each file.
const NODE_COUNT_MAX: usize = 200;
const PIECE_COUNT_MAX: usize = 16;

/// The parsers of this crate.
pub const PARSERS: &[Parser] = &[
    Parser {
        name: "guest_volumes",
        feed: volumes,
    },
    Parser {
        name: "guest_lvm_text",
        feed: lvm_text,
    },
    Parser {
        name: "guest_ext",
        feed: ext,
    },
    Parser {
        name: "guest_ntfs",
        feed: ntfs,
    },
    Parser {
        name: "guest_fat",
        feed: fat,
    },
    Parser {
        name: "guest_exfat",
        feed: exfat,
    },
    Parser {
        name: "guest_xfs",
        feed: xfs,
    },
    Parser {
        name: "guest_reader_answers",
        feed: reader_answers,
    },
    Parser {
        name: "guest_appliance_answers",
        feed: appliance_answers,
    },
];

/// Valid bytes for every parser of this crate: name of the parser, bytes.
pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    macro_rules! seed {
        ($parser:literal, $name:literal) => {
            (
                $parser,
                include_bytes!(concat!("../../../fuzz/seeds/", $parser, "/", $name)).to_vec(),
            )
        };
    }
    vec![
        seed!("guest_volumes", "mbr"),
        seed!("guest_volumes", "gpt"),
        seed!("guest_lvm_text", "linear"),
        seed!("guest_ext", "ext2"),
        seed!("guest_ext", "ext4"),
        seed!("guest_ext", "ext4-journal"),
        seed!("guest_ntfs", "compressed"),
        seed!("guest_fat", "fat12"),
        seed!("guest_fat", "fat32"),
        seed!("guest_exfat", "small"),
        seed!("guest_xfs", "small"),
        seed!("guest_xfs", "version4"),
        seed!("guest_reader_answers", "all"),
        seed!("guest_appliance_answers", "all"),
    ]
}

/// The device that the bytes describe; none if they describe none.
fn device_of(bytes: &[u8]) -> Option<Arc<MemoryDevice>> {
    let (size, sectors) = bytes.split_first_chunk::<4>()?;
    let size_bytes = u64::from(u32::from_le_bytes(*size)) * 1024;
    let device = MemoryDevice::new(size_bytes.min(DEVICE_BYTES_MAX));
    for sector in sectors.chunks_exact(4 + SECTOR_BYTES) {
        let (number, content) = sector.split_first_chunk::<4>()?;
        let offset = u64::from(u32::from_le_bytes(*number)) * SECTOR_BYTES as u64;
        // A sector behind the end is left out.
        device.write_at(content, offset).ok();
    }
    Some(Arc::new(device))
}

/// Partition tables, labels of LVM, and the detection of contents. Checksums of a GPT are corrected.
pub fn volumes(bytes: &[u8]) -> Outcome {
    let Some(device) = device_of(bytes) else {
        return Outcome::Refused;
    };
    correct_gpt(&device);
    let size_bytes = device.size_bytes();
    let disks = [DiskSource {
        name: "vda".to_owned(),
        device,
    }];
    let found = find_volumes(&disks).expect("memory can be read");
    for volume in &found.volumes {
        assert!(
            volume.size_bytes <= size_bytes || volume.unreadable.is_some(),
            "{volume:?}"
        );
        let part = volume.device(&disks);
        let mut buffer = [0; 64];
        if part.size_bytes() >= 64 {
            part.read_at(&mut buffer, part.size_bytes() - 64)
                .expect("a volume lies on its disk");
        }
    }
    if found.notes.is_empty() && found.volumes.iter().any(|volume| volume.name != "whole") {
        Outcome::Decoded
    } else {
        Outcome::Refused
    }
}

/// Corrects the checksums of a GPT with sectors of 512 bytes, as an attacker would.
fn correct_gpt(device: &MemoryDevice) {
    let mut header = [0; SECTOR_BYTES];
    if device.read_at(&mut header, SECTOR_BYTES as u64).is_err() || !header.starts_with(b"EFI PART") {
        return;
    }
    let number = |at: usize, width: usize| -> u64 {
        header
            .iter()
            .skip(at)
            .take(width)
            .rev()
            .fold(0, |sum, byte| (sum << 8) | u64::from(*byte))
    };
    let (table_at, length) = (
        number(72, 8).saturating_mul(512),
        number(80, 4).saturating_mul(number(84, 4)),
    );
    let header_length = number(12, 4);
    if length > 1 << 20 || header_length > 512 {
        return;
    }
    let mut table = vec![0; holdfast_block::to_usize(length)];
    if device.read_at(&mut table, table_at).is_err() {
        return;
    }
    let put = |header: &mut [u8], at: usize, value: u32| {
        header
            .iter_mut()
            .skip(at)
            .zip(value.to_le_bytes())
            .for_each(|(byte, new)| *byte = new);
    };
    put(&mut header, 88, crate::volumes::checksum_of(&table));
    put(&mut header, 16, 0);
    let checksum = crate::volumes::checksum_of(&header[..holdfast_block::to_usize(header_length)]);
    put(&mut header, 16, checksum);
    device.write_at(&header, SECTOR_BYTES as u64).ok();
}

/// The text of LVM's metadata.
pub fn lvm_text(bytes: &[u8]) -> Outcome {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return Outcome::Refused;
    };
    match crate::volumes::parse_lvm_text(text) {
        Ok(_) => Outcome::Decoded,
        Err(_) => Outcome::Refused,
    }
}

/// ext2, ext3 and ext4.
pub fn ext(bytes: &[u8]) -> Outcome {
    file_system(bytes, Content::Ext4)
}

/// NTFS.
pub fn ntfs(bytes: &[u8]) -> Outcome {
    file_system(bytes, Content::Ntfs)
}

/// FAT12, FAT16 and FAT32.
pub fn fat(bytes: &[u8]) -> Outcome {
    file_system(bytes, Content::Fat)
}

/// exFAT. Checksums of entries are not corrected: most changes are found by them.
pub fn exfat(bytes: &[u8]) -> Outcome {
    file_system(bytes, Content::ExFat)
}

/// XFS. Version 5 finds most changes by checksums, which are not corrected; version 4 has none.
pub fn xfs(bytes: &[u8]) -> Outcome {
    file_system(bytes, Content::Xfs)
}

fn file_system(bytes: &[u8], content: Content) -> Outcome {
    let Some(device) = device_of(bytes) else {
        return Outcome::Refused;
    };
    match open_file_system(device, content) {
        Ok(mut file_system) => walk(&mut *file_system),
        Err(_) => Outcome::Refused,
    }
}

/// What a process that reads a file system answers to the first requests.
struct RecordedAnswers(VecDeque<u8>);

impl Read for RecordedAnswers {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for RecordedAnswers {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        Ok(buffer.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ReaderProcess for RecordedAnswers {
    fn end(&mut self, error: &io::Error) -> String {
        error.to_string()
    }
}

/// Answers of a reader, which may be under the control of a guest.
pub fn reader_answers(bytes: &[u8]) -> Outcome {
    let device = Arc::new(MemoryDevice::new(1 << 20));
    match RemoteFileSystem::open(Box::new(recorded(bytes)), device, Content::Ext4) {
        Ok(remote) => use_remote(remote),
        Err(_) => Outcome::Refused,
    }
}

/// Answers of an appliance, whose kernel may be under the control of a guest.
pub fn appliance_answers(bytes: &[u8]) -> Outcome {
    let appliance = Appliance::new(Box::new(recorded(bytes)));
    if appliance.scan(&ScanRequest::default()).is_err() {
        return Outcome::Refused;
    }
    match appliance.mount(0) {
        Ok(remote) => use_remote(remote),
        Err(_) => Outcome::Refused,
    }
}

fn recorded(bytes: &[u8]) -> RecordedAnswers {
    RecordedAnswers(bytes.iter().copied().collect())
}

fn use_remote(mut remote: RemoteFileSystem<'_>) -> Outcome {
    let root = remote.root();
    let mut check = |entry: DirectoryEntry| {
        assert!(
            DirectoryEntry::is_valid_name(&entry.name),
            "an invalid name is passed on"
        );
        Ok(())
    };
    let results = [
        remote.metadata(root).map(drop),
        remote.read_directory(root, &mut check),
        remote.read_file(root, 0, 100).map(|piece| match piece {
            FilePiece::Data(bytes) => assert!((1..=100).contains(&bytes.len()), "more than was asked for"),
            FilePiece::Hole(length) => assert!(length > 0, "a hole without length"),
            FilePiece::End => {}
        }),
        remote
            .read_link(root)
            .map(|target| assert!(!target.contains(&0), "an invalid target is passed on")),
        remote.attributes(root).map(|attributes| {
            let is_valid = attributes.iter().all(ExtendedAttribute::is_valid);
            assert!(is_valid, "an invalid attribute is passed on");
        }),
    ];
    if results.iter().all(Result::is_ok) {
        Outcome::Decoded
    } else {
        Outcome::Refused
    }
}

/// Reads some of all files. Accepted if every read succeeds.
fn walk(file_system: &mut dyn FileSystem) -> Outcome {
    let mut nodes = vec![file_system.root()];
    let mut error_count = 0;
    let mut at = 0;
    while let Some(node) = nodes.get(at).copied() {
        at += 1;
        let kind = file_system.metadata(node).map(|metadata| metadata.kind);
        let read = match kind {
            Ok(FileKind::Directory) => file_system.read_directory(node, &mut |entry| {
                if nodes.len() < NODE_COUNT_MAX {
                    nodes.push(entry.node);
                }
                Ok(())
            }),
            Ok(FileKind::File) => read_file(file_system, node),
            Ok(FileKind::Link) => file_system.read_link(node).map(drop),
            Ok(FileKind::Special) => Ok(()),
            Err(error) => Err(error),
        };
        error_count += u32::from(read.is_err());
    }
    if error_count == 0 {
        Outcome::Decoded
    } else {
        Outcome::Refused
    }
}

fn read_file(file_system: &mut dyn FileSystem, node: crate::NodeId) -> crate::Result<()> {
    let mut offset = 0u64;
    for _ in 0..PIECE_COUNT_MAX {
        match file_system.read_file(node, offset, 64 << 10)? {
            FilePiece::End => break,
            FilePiece::Data(bytes) => offset += bytes.len() as u64,
            FilePiece::Hole(length) => offset = offset.saturating_add(length),
        }
    }
    Ok(())
}
