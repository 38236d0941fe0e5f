//! The reader of trees, for fuzzing.

use std::io::Read as _;

use holdfast_block::hostile::Outcome;

use crate::tar::{BLOCK_BYTES, checksum};

use super::{
    DeviceNumber, EndMarker, ExtendedAttribute, TreeEntry, TreeEntryKind, TreeTarReader, TreeTarWriter, TreeTime,
};

/// Limit of the data that is read of each file.
const DATA_BYTES_MAX: u64 = 1 << 16;

/// Reads an archive. If it is valid, an archive with the same entries must give the same entries.
pub(crate) fn tree_tar(bytes: &[u8]) -> Outcome {
    let bytes = with_checksums(bytes);
    let mut reader = TreeTarReader::new(&bytes[..], EndMarker::Optional);
    let mut entries = Vec::new();
    loop {
        match reader.next_entry() {
            Ok(Some(entry)) => {
                let stored: u64 = entry.extents.iter().map(|extent| extent.end - extent.start).sum();
                assert!(
                    entry.extents.iter().all(|extent| extent.end <= entry.size_bytes),
                    "ranges"
                );
                let mut data = Vec::new();
                if reader.by_ref().take(DATA_BYTES_MAX).read_to_end(&mut data).is_err() {
                    return Outcome::Refused;
                }
                if entry.kind == TreeEntryKind::File {
                    assert_eq!(data.len() as u64, stored.min(DATA_BYTES_MAX));
                }
                if stored <= DATA_BYTES_MAX {
                    entries.push((entry, data));
                }
            }
            Ok(None) => break,
            Err(_) => return Outcome::Refused,
        }
    }
    let mut written = Vec::new();
    let mut writer = TreeTarWriter::new(&mut written);
    for (entry, data) in &entries {
        writer.append(entry).expect("memory");
        if entry.kind == TreeEntryKind::File {
            writer.data(data).expect("memory");
        }
    }
    writer.finish().expect("memory");
    let mut again = TreeTarReader::new(&written[..], EndMarker::Required);
    for (entry, data) in entries {
        let mut read = again.next_entry().expect("a valid archive").expect("as many entries");
        let mut same = Vec::new();
        again.by_ref().read_to_end(&mut same).expect("as much data");
        read.offset = entry.offset;
        read.unresolved_acl_count = entry.unresolved_acl_count;
        let is_letter_kept = !matches!(entry.kind, TreeEntryKind::Unknown(_));
        if is_letter_kept {
            assert_eq!(read, entry);
            assert!(entry.kind != TreeEntryKind::File || same == data, "data differs");
        }
    }
    Outcome::Decoded
}

/// The archive with correct checksums of its headers, as an attacker would write it.
fn with_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for block in bytes.as_chunks_mut::<BLOCK_BYTES>().0 {
        if block.get(257..262) == Some(b"ustar") {
            let text = format!("{:06o}\0 ", checksum(block));
            if let Some(field) = block.get_mut(148..156) {
                field.copy_from_slice(text.as_bytes());
            }
        }
    }
    bytes
}

fn entry(path: &str, kind: TreeEntryKind) -> TreeEntry {
    TreeEntry {
        path: path.as_bytes().to_vec(),
        kind,
        mode: 0o755,
        uid: 1000,
        gid: 3_000_000,
        modified: TreeTime {
            seconds: 1_700_000_000,
            nanoseconds: 5,
        },
        attributes: Vec::new(),
        unresolved_acl_count: 0,
        size_bytes: 0,
        extents: Vec::new(),
        offset: 0,
    }
}

/// Archives with every kind of entry: name of the seed, bytes.
pub(crate) fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let device = DeviceNumber { major: 1, minor: 3 };
    let mut file = entry("etc/hosts", TreeEntryKind::File);
    (file.size_bytes, file.extents) = (5, std::iter::once(0..5).collect());
    file.attributes.push(ExtendedAttribute {
        name: b"user.a=b".to_vec(),
        value: vec![0, 10, 255],
    });
    let mut sparse = entry(&format!("{}/sparse", "long".repeat(40)), TreeEntryKind::File);
    (sparse.size_bytes, sparse.extents) = (1 << 20, vec![4096..4099, 9000..9002]);
    let entries = [
        entry("etc/", TreeEntryKind::Directory),
        file,
        sparse,
        entry("etc/link", TreeEntryKind::SymbolicLink(b"../hosts".to_vec())),
        entry("etc/hard", TreeEntryKind::HardLink(b"etc/hosts".to_vec())),
        entry("dev/null", TreeEntryKind::CharacterDevice(device)),
        entry("dev/disk", TreeEntryKind::BlockDevice(device)),
        entry("run/pipe", TreeEntryKind::Fifo),
    ];
    let mut bytes = Vec::new();
    let mut writer = TreeTarWriter::new(&mut bytes);
    for entry in entries {
        writer.append(&entry).expect("memory");
        for extent in &entry.extents {
            let length = usize::try_from(extent.end - extent.start).expect("small");
            writer.data(&vec![7; length]).expect("memory");
        }
    }
    writer.finish().expect("memory");
    vec![("pax", bytes)]
}
