use std::io::Read as _;

use super::acl::{from_text, to_text};
use super::header::number;
use super::{EndMarker, ExtendedAttribute, TreeEntry, TreeEntryKind, TreeTarReader, TreeTarWriter, TreeTime};
use crate::Error;
use crate::tar::{BLOCK_BYTES, checksum};

fn file(path: &[u8], size_bytes: u64) -> TreeEntry {
    TreeEntry {
        path: path.to_vec(),
        kind: TreeEntryKind::File,
        mode: 0o4755,
        uid: 0,
        gid: u32::MAX - 1,
        modified: TreeTime::default(),
        attributes: Vec::new(),
        unresolved_acl_count: 0,
        size_bytes,
        extents: (size_bytes > 0).then_some(0..size_bytes).into_iter().collect(),
        offset: 0,
    }
}

fn written(entries: &[TreeEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut writer = TreeTarWriter::new(&mut bytes);
    for entry in entries {
        writer.append(entry).unwrap();
        for extent in &entry.extents {
            writer
                .data(&vec![7; usize::try_from(extent.end - extent.start).unwrap()])
                .unwrap();
        }
    }
    assert_eq!(writer.finish().unwrap(), bytes.len() as u64);
    bytes
}

fn read(bytes: &[u8]) -> crate::Result<Vec<TreeEntry>> {
    let mut reader = TreeTarReader::new(bytes, EndMarker::Required);
    let mut entries = Vec::new();
    while let Some(mut entry) = reader.next_entry()? {
        entry.offset = 0;
        entries.push(entry);
    }
    Ok(entries)
}

#[test]
fn what_is_written_is_read_again() {
    let mut entries = Vec::new();
    // Every length of names around the limits of the fields, also without a slash to split at.
    for length in [1, 99, 100, 101, 155, 156, 157, 255, 256, 257, 300, 4000] {
        entries.push(file(&vec![b'n'; length], 3));
        let mut split = vec![b'd'; length];
        split[length / 2] = b'/';
        entries.extend((length > 2).then(|| file(&split, 512)));
        let link = TreeEntryKind::SymbolicLink(vec![0xff; length]);
        entries.push(TreeEntry {
            kind: link,
            ..file(b"\xe9\xff", 0)
        });
    }
    for (seconds, nanoseconds) in [
        (-1, 0),
        (-1, 500_000_000),
        (-2, 1),
        (0, 999_999_999),
        (1 << 40, 120),
        (i64::MIN, 0),
        (i64::MIN, 1),
    ] {
        entries.push(TreeEntry {
            modified: TreeTime { seconds, nanoseconds },
            ..file(b"time", 0)
        });
    }
    let mut holes = file(b"holes", 1 << 40);
    holes.extents = vec![0..1, 600..1800, (1 << 40) - 5..1 << 40];
    entries.push(holes.clone());
    entries.push(TreeEntry {
        extents: std::iter::once(512..1024).collect(),
        ..holes.clone()
    });
    entries.push(TreeEntry {
        extents: Vec::new(),
        ..holes
    });
    let attribute = |name: &str, value: &[u8]| ExtendedAttribute {
        name: name.into(),
        value: value.into(),
    };
    let acl = from_text(b"user::rw-,user:5:r--,group::r--,mask::r--,other::---")
        .unwrap()
        .binary
        .unwrap();
    let attributes = vec![
        attribute("security.capability", &[1, 0, 0, 2, 10, 61]),
        attribute("system.posix_acl_access", &acl),
        attribute("user.%3D=", b""),
    ];
    entries.push(TreeEntry {
        attributes,
        ..file(b"attributes", 1)
    });
    let bytes = written(&entries);
    assert_eq!(read(&bytes).unwrap(), entries);
    assert_eq!(bytes, written(&entries), "the same entries have the same bytes");
}

#[test]
fn data_is_that_of_the_ranges() {
    let mut entry = file(b"holes", 10_000);
    entry.extents = vec![100..103, 9000..9001];
    let bytes = written(&[entry, file(b"next", 2)]);
    let mut reader = TreeTarReader::new(&bytes[..], EndMarker::Required);
    for expected in [4, 2] {
        reader.next_entry().unwrap().unwrap();
        let mut data = Vec::new();
        reader.read_to_end(&mut data).unwrap();
        assert_eq!(data, vec![7; expected]);
    }
    assert!(reader.next_entry().unwrap().is_none());
    assert_eq!(reader.offset(), bytes.len() as u64);
}

#[test]
fn a_cut_at_any_byte_is_noticed() {
    let bytes = written(&[file(b"a", 600), file(&[b'b'; 200], 3)]);
    // The end marker starts at the last header's end; a cut inside of the padding after it harms nothing.
    let end = bytes.len() - bytes.iter().rev().position(|byte| *byte != 0).unwrap();
    for length in 0..end.next_multiple_of(512) {
        assert!(matches!(read(&bytes[..length]), Err(Error::CutOff { .. })), "{length}");
    }
    let mut reader = TreeTarReader::new(&bytes[..end.next_multiple_of(512)], EndMarker::Optional);
    assert!(reader.next_entry().unwrap().is_some() && reader.next_entry().unwrap().is_some());
    assert!(reader.next_entry().unwrap().is_none());
}

#[test]
fn impossible_maps_are_refused_with_the_name_of_the_file() {
    let mut entry = file(b"holes", 5000);
    entry.extents = vec![0..512, 1024..1536];
    let bytes = written(&[entry]);
    let map = b"3\n0\n512\n1024\n512\n5000\n0\n";
    let at = bytes.windows(map.len()).position(|window| window == map).unwrap();
    for wrong in [
        &b"3\n0\n512\n0100\n512\n5000\n0\n"[..],
        b"3\n0\n512\n4900\n512\n5000\n0\n",
        b"3\n0\n512\n1024\n511\n5000\n0\n",
        b"9999999999999999999999999",
        b"1000000\n0\n512\n1024\n512\n5",
        b"x\n0\n512\n1024\n512\n5000\n0\n",
    ] {
        let mut damaged = bytes.clone();
        damaged[at..at + wrong.len()].copy_from_slice(wrong);
        let error = read(&damaged).unwrap_err().to_string();
        assert!(error.contains("\"holes\": its map of holes"), "{error}");
    }
}

#[test]
fn acls_are_text_and_binary() {
    let parsed =
        from_text(b"user::rwx\nuser:joe:r-x:1000,user:joe:---,group::r-x #effective:r-x\nmask::rwx\nother:r--\n")
            .unwrap();
    assert_eq!(parsed.unresolved_count, 1);
    let text = to_text(&parsed.binary.unwrap()).unwrap();
    assert_eq!(text, "user::rwx,user:1000:r-x,group::r-x,mask::rwx,other::r--");
    for wrong in ["user", "person::rwx", "user::rwz", "user:1:2:3:4"] {
        assert_eq!(from_text(wrong.as_bytes()), None, "{wrong}");
    }
    assert_eq!(to_text(&[2, 0, 0, 0, 1]), None);
    assert_eq!(to_text(&[3, 0, 0, 0]), None);
    let with_id_of_mask = [2, 0, 0, 0, 0x10, 0, 7, 0, 5, 0, 0, 0];
    assert_eq!(to_text(&with_id_of_mask), None, "text has no place for this id");
}

#[test]
fn numbers_in_base_256_have_a_sign() {
    let mut field = [0xff; 12];
    assert_eq!(number(&field), Some(-1));
    field[11] = 0;
    assert_eq!(number(&field), Some(-256));
    assert_eq!(number(&[0x80, 0, 0, 0, 0, 0, 1, 0]), Some(256));
    assert_eq!(number(&[0x80, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), None);
    assert_eq!(number(b"0000755 "), Some(0o755));
    assert_eq!(number(b"00x"), None);
}

/// A member of a kind, with content.
fn member(kind: u8, name: &[u8], data: &[u8]) -> Vec<u8> {
    let mut block = [0; BLOCK_BYTES];
    block[..name.len()].copy_from_slice(name);
    block[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
    block[156] = kind;
    let sum = format!("{:06o}\0 ", checksum(&block));
    block[148..156].copy_from_slice(sum.as_bytes());
    let mut bytes = [&block[..], data].concat();
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    bytes
}

/// One record of a pax header.
fn record(key: &str, value: &[u8]) -> Vec<u8> {
    let rest = [b" ", key.as_bytes(), b"=", value, b"\n"].concat();
    let length = (1..=9).map(|digits| rest.len() + digits);
    let mut length = length.filter(|length| length.to_string().len() + rest.len() == *length);
    let length = length.next_back().unwrap();
    [length.to_string().as_bytes(), &rest].concat()
}

/// The members before a file once were limited one by one, and filled the memory together.
#[test]
fn attributes_in_several_members_have_one_limit() {
    let data = |number: u32| record(&format!("SCHILY.xattr.user.{number}"), &vec![b'v'; 1 << 20]);
    let archive = |kind: u8, count: u32| -> Vec<u8> {
        let members = (0..count).flat_map(|number| member(kind, b"pax", &data(number)));
        members.chain(member(b'0', b"file", b"")).collect()
    };
    let read = |bytes: &[u8]| -> crate::Result<TreeEntry> {
        let next = TreeTarReader::new(bytes, EndMarker::Optional).next_entry();
        next.map(|entry| entry.expect("there is a file"))
    };
    assert_eq!(read(&archive(b'x', 7)).unwrap().attributes.len(), 7);
    let error = read(&archive(b'x', 8)).unwrap_err().to_string();
    assert!(
        error.contains("the attributes of a file") && error.contains("limit of 8388608"),
        "{error}"
    );
    let error = read(&archive(b'g', 1)).unwrap_err().to_string();
    assert!(
        error.contains("the attributes of all files") && error.contains("limit of 65536"),
        "{error}"
    );
}

#[test]
fn attributes_of_all_files_are_limited_by_what_is_kept() {
    // Each replaces the one before it: only the last one counts.
    let mut bytes: Vec<u8> = (0..100)
        .flat_map(|_| member(b'g', b"pax", &record("SCHILY.xattr.user.a", &[b'v'; 1000])))
        .collect();
    bytes.extend(member(b'0', b"file", b""));
    let entry = TreeTarReader::new(&bytes[..], EndMarker::Optional)
        .next_entry()
        .unwrap();
    assert_eq!(entry.unwrap().attributes.len(), 1);
    let mut bytes: Vec<u8> = Vec::new();
    for _ in 0..10_000 {
        bytes.extend(member(b'g', b"pax", &record("GNU.sparse.offset", b"0")));
    }
    let error = TreeTarReader::new(&bytes[..], EndMarker::Optional).next_entry();
    assert!(error.unwrap_err().to_string().contains("limit of 65536"));
}
