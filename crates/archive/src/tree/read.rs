//! Reads an archive of a tree, member by member, from a stream.

use std::io::Read;

use super::attributes::PaxRecords;
use super::header::{MemberHeader, shown, wrong_member};
use super::sparse::{EXTENT_COUNT_MAX, about, checked_extents, continue_gnu_map, gnu_map, map_in_data};
use super::{TreeEntry, TreeEntryKind};
use crate::tar::{BLOCK_BYTES, corrupt, read_error};
use crate::{Error, Result};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Limit of a name in a member of its own. Linux has paths of up to 4096 bytes.
const LONG_NAME_BYTES_MAX: u64 = 64 << 10;
/// Limit of the attributes of one file, in all members with them together.
const ATTRIBUTES_BYTES_MAX: u64 = 8 << 20;
/// Limit of the attributes of all files that are kept at a time. Each file gets a copy, so a larger limit would let a small
/// archive take hours.
const GLOBAL_BYTES_MAX: usize = 64 << 10;

/// Whether an archive needs its end marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndMarker {
    /// An archive without it is truncated.
    Required,
    /// It may be missing: the length of the archive was checked in another way.
    Optional,
}

/// Reads an archive. [`Read`] returns the stored data of the current file: its ranges with data, one after another.
pub struct TreeTarReader<R> {
    stream: R,
    end: EndMarker,
    at: u64,
    /// Unread bytes of the member.
    left: u64,
    /// Bytes between the member's end and the next header.
    padding: u64,
    is_finished: bool,
    /// Records for all following members.
    global: PaxRecords,
}

/// What the members before a file say about it.
#[derive(Default)]
struct Announced {
    records: Option<PaxRecords>,
    /// Bytes of the members that the records are from.
    record_bytes: u64,
    path: Option<Vec<u8>>,
    link_path: Option<Vec<u8>>,
}

impl<R: Read> TreeTarReader<R> {
    /// Reads from `stream`, which is not compressed.
    pub fn new(stream: R, end: EndMarker) -> Self {
        Self {
            stream,
            end,
            at: 0,
            left: 0,
            padding: 0,
            is_finished: false,
            global: PaxRecords::default(),
        }
    }

    /// The stream, of which everything was read after the last entry.
    pub fn into_stream(self) -> R {
        self.stream
    }

    /// Bytes read so far.
    pub fn offset(&self) -> u64 {
        self.at
    }

    /// The next file, or `None` at the end, after which the stream is read to its end. Skips unread data of the previous file.
    ///
    /// # Errors
    /// Reading; a truncated archive, or one that violates the format.
    pub fn next_entry(&mut self) -> Result<Option<TreeEntry>> {
        let mut announced = Announced::default();
        while !self.is_finished {
            self.skip(self.left.saturating_add(self.padding))?;
            (self.left, self.padding) = (0, 0);
            let offset = self.at;
            let Some(block) = self.read_header()? else {
                self.is_finished = true;
                break;
            };
            let header = MemberHeader::parse(&block, offset)?;
            self.set_left(header.size_bytes, &header.path, offset)?;
            match header.kind {
                b'L' => announced.path = Some(self.read_name()?),
                b'K' => announced.link_path = Some(self.read_name()?),
                // X: pax headers of Solaris before the standard.
                b'x' | b'X' => {
                    announced.record_bytes = announced.record_bytes.saturating_add(self.left);
                    check_length(
                        "the attributes of a file",
                        announced.record_bytes,
                        ATTRIBUTES_BYTES_MAX,
                        offset,
                    )?;
                    let bytes = self.read_whole("the attributes of a file", ATTRIBUTES_BYTES_MAX)?;
                    let records = announced.records.get_or_insert_with(|| self.global.clone());
                    records.apply(&bytes, offset)?;
                }
                b'g' => {
                    let what = "the attributes of all files";
                    let bytes = self.read_whole(what, ATTRIBUTES_BYTES_MAX)?;
                    self.global.apply(&bytes, offset)?;
                    let kept_bytes = self.global.kept_bytes();
                    check_length(what, kept_bytes as u64, GLOBAL_BYTES_MAX as u64, offset)?;
                }
                // The label of a volume.
                b'V' => announced = Announced::default(),
                b'M' => {
                    return Err(Error::Unsupported {
                        feature: format!("a file that continues from another volume ({})", shown(&header.path)),
                        detail: "give all volumes as one archive: cat VOLUME...".to_owned(),
                    });
                }
                _ => return self.entry(&block, header, announced, offset).map(Some),
            }
        }
        Ok(None)
    }

    /// The entry of a member that is a file.
    fn entry(
        &mut self,
        block: &[u8; BLOCK_BYTES],
        header: MemberHeader,
        announced: Announced,
        offset: u64,
    ) -> Result<TreeEntry> {
        let mut records = announced.records.unwrap_or_else(|| self.global.clone());
        let attributes = records.take_attributes(offset)?;
        let path = records.sparse.name.take().or(records.path.take());
        let path = path.or(announced.path).unwrap_or(header.path);
        if path.is_empty() {
            return Err(corrupt("a member", offset, "its name is empty"));
        }
        let link_path = records.link_path.take().or(announced.link_path);
        let link_path = link_path.unwrap_or(header.link_path);
        let kind = match header.kind {
            b'0' | 0 | b'7' | b'S' if path.ends_with(b"/") => TreeEntryKind::Directory,
            b'0' | 0 | b'7' | b'S' => TreeEntryKind::File,
            b'1' => TreeEntryKind::HardLink(link_path),
            b'2' => TreeEntryKind::SymbolicLink(link_path),
            b'3' => TreeEntryKind::CharacterDevice(header.device),
            b'4' => TreeEntryKind::BlockDevice(header.device),
            // D: a directory with the list of its content.
            b'5' | b'D' => TreeEntryKind::Directory,
            b'6' => TreeEntryKind::Fifo,
            other => TreeEntryKind::Unknown(other),
        };
        let has_data =
            matches!(header.kind, b'0' | 0 | b'7' | b'S' | b'D') || matches!(kind, TreeEntryKind::Unknown(_));
        // Other kinds have no data, whatever their size.
        let stored = if has_data {
            records.size_bytes.unwrap_or(header.size_bytes)
        } else {
            0
        };
        self.set_left(stored, &path, offset)?;
        let mut entry = TreeEntry {
            path,
            mode: header.mode,
            uid: records.uid.unwrap_or(header.uid),
            gid: records.gid.unwrap_or(header.gid),
            modified: records.modified.unwrap_or(header.modified),
            attributes: attributes.attributes,
            unresolved_acl_count: attributes.unresolved_acl_count,
            size_bytes: 0,
            extents: Vec::new(),
            offset,
            kind,
        };
        if entry.kind == TreeEntryKind::File {
            self.map_data(&mut entry, &records, Some(block).filter(|_| header.kind == b'S'))?;
        }
        Ok(entry)
    }

    /// Sets length and ranges of a regular file.
    fn map_data(
        &mut self,
        entry: &mut TreeEntry,
        records: &PaxRecords,
        gnu_header: Option<&[u8; BLOCK_BYTES]>,
    ) -> Result<()> {
        let wrong = about(&entry.path, entry.offset);
        let sparse = &records.sparse;
        let (numbers, real_size_bytes) = if let Some(block) = gnu_header {
            let bad = || wrong("its map of holes is no list of numbers");
            let mut map = gnu_map(block).ok_or_else(bad)?;
            while map.is_continued {
                let mut block = [0; BLOCK_BYTES];
                self.fill(&mut block, "a map of holes")?;
                map.is_continued = continue_gnu_map(&mut map.numbers, &block).ok_or_else(bad)?;
                if map.numbers.len() > EXTENT_COUNT_MAX * 2 {
                    return Err(wrong("its map of holes has too many ranges"));
                }
            }
            (map.numbers, map.real_size_bytes)
        } else if sparse.has_map_in_data() {
            let map = map_in_data(&mut self.stream, self.left);
            let map = map.map_err(|source| read_error(source, "a map of holes", self.at))?;
            let map = map.ok_or_else(|| wrong("its map of holes is no list of numbers, or is too long"))?;
            self.at += map.stored_bytes;
            self.left -= map.stored_bytes;
            let real = sparse.real_size_bytes;
            (
                map.numbers,
                real.ok_or_else(|| wrong("its map of holes has no length"))?,
            )
        } else if let Some((map, real)) = sparse.map.as_ref().zip(sparse.real_size_bytes) {
            (map.clone(), real)
        } else {
            entry.size_bytes = self.left;
            if self.left > 0 {
                entry.extents.push(0..self.left);
            }
            return Ok(());
        };
        if i64::try_from(real_size_bytes).is_err() {
            return Err(wrong("its length is not possible"));
        }
        entry.extents = checked_extents(&numbers, real_size_bytes, self.left, &wrong)?;
        entry.size_bytes = real_size_bytes;
        Ok(())
    }

    fn set_left(&mut self, stored_bytes: u64, path: &[u8], offset: u64) -> Result<()> {
        if i64::try_from(stored_bytes).is_err() {
            return Err(wrong_member(path, offset, "its length is not possible"));
        }
        self.left = stored_bytes;
        self.padding = stored_bytes.next_multiple_of(BLOCK) - stored_bytes;
        Ok(())
    }

    /// The next header, or `None` at the end.
    fn read_header(&mut self) -> Result<Option<[u8; BLOCK_BYTES]>> {
        let mut start = Vec::with_capacity(BLOCK_BYTES);
        let read = self.stream.by_ref().take(BLOCK).read_to_end(&mut start);
        read.map_err(|source| read_error(source, "the header of a member", self.at))?;
        let is_missing = start.is_empty() && self.end == EndMarker::Optional;
        self.at += start.len() as u64;
        if is_missing {
            return Ok(None);
        }
        let Ok(block) = <[u8; BLOCK_BYTES]>::try_from(start) else {
            let what = "the header of a member";
            return Err(Error::CutOff { what, offset: self.at });
        };
        if block.iter().all(|byte| *byte == 0) {
            self.read_to_end()?;
            return Ok(None);
        }
        Ok(Some(block))
    }

    fn read_name(&mut self) -> Result<Vec<u8>> {
        let mut bytes = self.read_whole("a name", LONG_NAME_BYTES_MAX)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        bytes.truncate(end);
        Ok(bytes)
    }

    fn read_whole(&mut self, what: &'static str, bytes_max: u64) -> Result<Vec<u8>> {
        check_length(what, self.left, bytes_max, self.at)?;
        let mut bytes = Vec::new();
        let read = self.stream.by_ref().take(self.left).read_to_end(&mut bytes);
        let read = read.map_err(|source| read_error(source, what, self.at))? as u64;
        self.at += read;
        self.left -= read;
        if self.left > 0 {
            return Err(Error::CutOff { what, offset: self.at });
        }
        Ok(bytes)
    }

    fn fill(&mut self, buffer: &mut [u8], what: &'static str) -> Result<()> {
        let read = self.stream.read_exact(buffer);
        read.map_err(|source| read_error(source, what, self.at))?;
        self.at += buffer.len() as u64;
        Ok(())
    }

    fn skip(&mut self, count: u64) -> Result<()> {
        let copied = std::io::copy(&mut self.stream.by_ref().take(count), &mut std::io::sink());
        let copied = copied.map_err(|source| read_error(source, "a member", self.at))?;
        self.at += copied;
        if copied < count {
            let what = "a member";
            return Err(Error::CutOff { what, offset: self.at });
        }
        Ok(())
    }

    /// Reads the rest: the writer must not get a broken pipe, and checksums of a compressed stream follow it.
    fn read_to_end(&mut self) -> Result<()> {
        let copied = std::io::copy(&mut self.stream, &mut std::io::sink());
        self.at += copied.map_err(|source| read_error(source, "the end", self.at))?;
        Ok(())
    }
}

fn check_length(what: &'static str, bytes: u64, bytes_max: u64, offset: u64) -> Result<()> {
    if bytes <= bytes_max {
        return Ok(());
    }
    let detail = format!("{bytes} bytes, more than the limit of {bytes_max}");
    Err(corrupt(what, offset, detail))
}

impl<R: Read> Read for TreeTarReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.stream.read(buffer.get_mut(..most).unwrap_or_default())?;
        if count == 0 && most > 0 {
            let text = format!(
                "the archive ends at offset {}, in the middle of a file: it was cut off",
                self.at
            );
            return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, text));
        }
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}
