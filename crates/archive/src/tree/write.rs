//! Writes an archive of a tree in the pax format.
//!
//! The bytes depend only on the entries: names of pax headers have no process id, and no time of writing is stored.

use std::io::Write;
use std::ops::Range;

use super::attributes::{ACL_ACCESS, ACL_DEFAULT, XATTR, encoded_name};
use super::{TreeEntry, TreeEntryKind, TreeTime, acl};
use crate::tar::{BLOCK_BYTES, checksum};
use crate::{Error, Result};

/// Archives end at a multiple of this: the record of tapes, which GNU tar writes as well.
const RECORD_BYTES: u64 = 10240;
const NAME_BYTES: usize = 100;
const PREFIX_BYTES: usize = 155;
/// The largest number in a field of 8 bytes.
const SMALL_MAX: u32 = 0o7_777_777;
/// The largest number in a field of 12 bytes.
const LARGE_MAX: u64 = 0o77_777_777_777;

/// Writes an archive. After [`append`](Self::append) of a file with data, [`data`](Self::data) takes the bytes of its ranges.
pub struct TreeTarWriter<W> {
    output: W,
    at: u64,
    /// Data of the current file that is missing.
    left: u64,
    /// Padding after it.
    padding: u64,
}

/// A field of a header: its place, and its text.
struct Field {
    at: usize,
    text: String,
}

impl<W: Write> TreeTarWriter<W> {
    /// Writes to `output`.
    pub fn new(output: W) -> Self {
        Self {
            output,
            at: 0,
            left: 0,
            padding: 0,
        }
    }

    /// Bytes written so far.
    pub fn offset(&self) -> u64 {
        self.at
    }

    /// Writes the header of an entry. The path must be relative, without `.` and `..`, and end with a slash for a
    /// directory.
    ///
    /// # Panics
    /// The previous file is not complete.
    ///
    /// # Errors
    /// Writing.
    pub fn append(&mut self, entry: &TreeEntry) -> Result<()> {
        assert!(self.left == 0, "data of the previous file is missing");
        let mut records = Vec::new();
        let data_bytes: u64 = entry.extents.iter().map(|extent| extent.end - extent.start).sum();
        let map = has_holes(entry).then(|| map_text(&entry.extents, entry.size_bytes));
        let stored_bytes = data_bytes + map.as_ref().map_or(0, |map| map.len() as u64);
        let mut name = NameFields::of(&entry.path);
        if map.is_some() {
            push_record(&mut records, b"GNU.sparse.major", b"1");
            push_record(&mut records, b"GNU.sparse.minor", b"0");
            push_record(&mut records, b"GNU.sparse.name", &entry.path);
            push_record(
                &mut records,
                b"GNU.sparse.realsize",
                entry.size_bytes.to_string().as_bytes(),
            );
            // Programs that do not know the format unpack the stored data, under this name.
            name = NameFields::cut(b"GNUSparseFile.0/", &entry.path);
        } else if name.is_cut {
            push_record(&mut records, b"path", &entry.path);
        }
        let link = match &entry.kind {
            TreeEntryKind::HardLink(target) | TreeEntryKind::SymbolicLink(target) => target.as_slice(),
            _ => &[],
        };
        if link.len() > NAME_BYTES {
            push_record(&mut records, b"linkpath", link);
        }
        push_numbers(&mut records, entry, stored_bytes);
        push_attributes(&mut records, entry);
        if !records.is_empty() {
            let header_name = NameFields::cut(b"PaxHeaders/", &entry.path);
            self.write(&header(&header_name, b'x', &[], &plain_numbers(records.len() as u64)))?;
            let padding = records.len().next_multiple_of(BLOCK_BYTES) - records.len();
            self.write(&records)?;
            self.pad(padding as u64)?;
        }
        self.write(&header(&name, letter(&entry.kind), link, &numbers(entry, stored_bytes)))?;
        if let Some(map) = map {
            self.write(&map)?;
        }
        self.left = data_bytes;
        let block = BLOCK_BYTES as u64;
        self.padding = data_bytes.next_multiple_of(block) - data_bytes;
        Ok(())
    }

    /// Writes a part of the data of the current file.
    ///
    /// # Panics
    /// It is longer than its ranges.
    ///
    /// # Errors
    /// Writing.
    pub fn data(&mut self, bytes: &[u8]) -> Result<()> {
        let count = bytes.len() as u64;
        assert!(count <= self.left, "more data than the ranges of the file have");
        self.write(bytes)?;
        self.left -= count;
        if self.left == 0 {
            let padding = std::mem::take(&mut self.padding);
            self.pad(padding)?;
        }
        Ok(())
    }

    /// Writes the end of the archive, and returns its length in bytes.
    ///
    /// # Panics
    /// The last file is not complete.
    ///
    /// # Errors
    /// Writing.
    pub fn finish(mut self) -> Result<u64> {
        assert!(self.left == 0, "data of the last file is missing");
        let end = (self.at + 2 * BLOCK_BYTES as u64).next_multiple_of(RECORD_BYTES);
        self.pad(end - self.at)?;
        let (offset, flushed) = (self.at, self.output.flush());
        flushed.map_err(|source| Error::Write { offset, source })?;
        Ok(self.at)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let offset = self.at;
        let written = self.output.write_all(bytes);
        written.map_err(|source| Error::Write { offset, source })?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    fn pad(&mut self, count: u64) -> Result<()> {
        const ZEROES: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];
        let mut left = count;
        while left > 0 {
            let part = usize::try_from(left).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
            self.write(ZEROES.get(..part).unwrap_or_default())?;
            left -= part as u64;
        }
        Ok(())
    }
}

fn has_holes(entry: &TreeEntry) -> bool {
    let whole: Range<u64> = 0..entry.size_bytes;
    entry.kind == TreeEntryKind::File && entry.size_bytes > 0 && entry.extents != [whole]
}

/// The map of version 1.0, padded to whole blocks. A hole at the end is an empty range there.
fn map_text(extents: &[Range<u64>], size_bytes: u64) -> Vec<u8> {
    let ends_with_hole = extents.last().is_none_or(|last| last.end < size_bytes);
    let mut numbers = vec![extents.len() as u64 + u64::from(ends_with_hole)];
    numbers.extend(
        extents
            .iter()
            .flat_map(|extent| [extent.start, extent.end - extent.start]),
    );
    if ends_with_hole {
        numbers.extend([size_bytes, 0]);
    }
    let text: String = numbers
        .iter()
        .flat_map(|number| [number.to_string(), "\n".to_owned()])
        .collect();
    let mut map = text.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK_BYTES), 0);
    map
}

/// Appends `LENGTH KEY=VALUE\n`; the length includes its own digits.
fn push_record(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest;
    while rest + length.to_string().len() != length {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(format!("{length} ").as_bytes());
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

/// Records of numbers that the header cannot hold.
fn push_numbers(records: &mut Vec<u8>, entry: &TreeEntry, stored_bytes: u64) {
    if stored_bytes > LARGE_MAX {
        push_record(records, b"size", stored_bytes.to_string().as_bytes());
    }
    if entry.uid > SMALL_MAX {
        push_record(records, b"uid", entry.uid.to_string().as_bytes());
    }
    if entry.gid > SMALL_MAX {
        push_record(records, b"gid", entry.gid.to_string().as_bytes());
    }
    if entry.modified.nanoseconds > 0 || header_time(entry.modified).is_none() {
        push_record(records, b"mtime", time_text(entry.modified).as_bytes());
    }
}

/// Seconds as a header can hold them.
fn header_time(time: TreeTime) -> Option<u64> {
    u64::try_from(time.seconds).ok().filter(|seconds| *seconds <= LARGE_MAX)
}

fn time_text(time: TreeTime) -> String {
    let (sign, seconds, nanoseconds) = if time.seconds < 0 && time.nanoseconds > 0 {
        let whole = time.seconds + 1;
        (
            if whole == 0 { "-" } else { "" },
            whole,
            1_000_000_000 - time.nanoseconds,
        )
    } else {
        ("", time.seconds, time.nanoseconds)
    };
    if nanoseconds == 0 {
        return seconds.to_string();
    }
    let digits = format!("{nanoseconds:09}");
    format!("{sign}{seconds}.{}", digits.trim_end_matches('0'))
}

/// Records of extended attributes. ACLs are stored as text: that is what `tar --acls` and libarchive read.
fn push_attributes(records: &mut Vec<u8>, entry: &TreeEntry) {
    for attribute in &entry.attributes {
        let key = match attribute.name.as_slice() {
            acl::ACCESS => Some(ACL_ACCESS),
            acl::DEFAULT => Some(ACL_DEFAULT),
            _ => None,
        };
        if let Some((key, text)) = key.zip(acl::to_text(&attribute.value)) {
            push_record(records, key, text.as_bytes());
        } else {
            let key = [XATTR, &encoded_name(&attribute.name)].concat();
            push_record(records, &key, &attribute.value);
        }
    }
}

fn letter(kind: &TreeEntryKind) -> u8 {
    match kind {
        TreeEntryKind::File => b'0',
        TreeEntryKind::HardLink(_) => b'1',
        TreeEntryKind::SymbolicLink(_) => b'2',
        TreeEntryKind::CharacterDevice(_) => b'3',
        TreeEntryKind::BlockDevice(_) => b'4',
        TreeEntryKind::Directory => b'5',
        TreeEntryKind::Fifo => b'6',
        TreeEntryKind::Unknown(letter) => *letter,
    }
}

/// A path in the two fields of a header.
struct NameFields<'a> {
    name: &'a [u8],
    prefix: &'a [u8],
    start: &'static [u8],
    /// Whether the fields do not hold all of it.
    is_cut: bool,
}

impl<'a> NameFields<'a> {
    /// Splits a path at a slash, if it is too long for the first field.
    fn of(path: &'a [u8]) -> Self {
        let whole = Self {
            name: path,
            prefix: &[],
            start: b"",
            is_cut: false,
        };
        if path.len() <= NAME_BYTES {
            return whole;
        }
        let slashes = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        for (at, _) in slashes {
            let (prefix, rest) = path.split_at(at);
            let name = rest.get(1..).unwrap_or_default();
            if !prefix.is_empty() && prefix.len() <= PREFIX_BYTES && !name.is_empty() && name.len() <= NAME_BYTES {
                return Self { name, prefix, ..whole };
            }
        }
        Self::cut(b"", path)
    }

    /// As much of the end of a path as fits behind `start`.
    fn cut(start: &'static [u8], path: &'a [u8]) -> Self {
        let path = path.strip_suffix(b"/").unwrap_or(path);
        let room = NAME_BYTES - start.len();
        let name = path.get(path.len().saturating_sub(room)..).unwrap_or_default();
        Self {
            // It must not begin with a slash: a name without its start would become absolute.
            name: name.strip_prefix(b"/").unwrap_or(name),
            prefix: &[],
            start,
            is_cut: true,
        }
    }
}

/// The fields with numbers; those that records replace are 0.
fn numbers(entry: &TreeEntry, stored_bytes: u64) -> Vec<Field> {
    let small = |value: u32| if value > SMALL_MAX { 0 } else { value };
    let stored = if stored_bytes > LARGE_MAX { 0 } else { stored_bytes };
    let field = |at, text| Field { at, text };
    let mut fields = vec![
        field(100, format!("{:07o}\0", entry.mode & 0o7777)),
        field(108, format!("{:07o}\0", small(entry.uid))),
        field(116, format!("{:07o}\0", small(entry.gid))),
        field(124, format!("{stored:011o}\0")),
        field(136, format!("{:011o}\0", header_time(entry.modified).unwrap_or(0))),
    ];
    if let TreeEntryKind::CharacterDevice(device) | TreeEntryKind::BlockDevice(device) = entry.kind {
        fields.push(field(329, format!("{:07o}\0", small(device.major))));
        fields.push(field(337, format!("{:07o}\0", small(device.minor))));
    }
    fields
}

fn plain_numbers(size_bytes: u64) -> Vec<Field> {
    let field = |at, text| Field { at, text };
    vec![
        field(100, "0000644\0".to_owned()),
        field(108, "0000000\0".to_owned()),
        field(116, "0000000\0".to_owned()),
        field(124, format!("{size_bytes:011o}\0")),
        field(136, "00000000000\0".to_owned()),
    ]
}

#[expect(
    clippy::indexing_slicing,
    reason = "places and lengths are those of the format, and names were cut to their fields"
)]
fn header(name: &NameFields<'_>, kind: u8, link: &[u8], numbers: &[Field]) -> [u8; BLOCK_BYTES] {
    let mut header = [0; BLOCK_BYTES];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, name.start);
    put(name.start.len(), name.name);
    put(345, name.prefix);
    put(156, &[kind]);
    put(157, link.get(..NAME_BYTES).unwrap_or(link));
    put(257, b"ustar\x0000");
    for field in numbers {
        put(field.at, field.text.as_bytes());
    }
    let sum = checksum(&header);
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    header
}
