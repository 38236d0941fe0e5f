//! exFAT.
//!
//! A file is a set of entries: its attributes, its place, and its name in parts of 15 letters, with a checksum over all of
//! them. A file whose clusters follow one another needs no chain in the table. A node is the position of the first entry,
//! and whether the clusters of its directory follow one another, because a set can continue in the next cluster.

use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use super::directory::{ENTRY_BYTES, dos_time};
use super::table::{ChainPosition, FatTable, FatWidth};
use crate::fields::{Fields, utf8_of_utf16};
use crate::{
    DirectoryEntry, Error, FileKind, FilePiece, FileSystem, Metadata, ModifiedTime, NodeId, PIECE_BYTES_MAX, Result,
};

/// No directory entry is at the start of a volume.
const ROOT: NodeId = NodeId(0);
/// A flag in the lower bits of a node, which its position leaves free.
const NODE_CONTIGUOUS: u64 = 1;
/// The specification allows 256 MiB.
const DIRECTORY_BYTES_MAX: u64 = 256 << 20;

const KIND_END: u8 = 0;
const KIND_IN_USE: u8 = 0x80;
const KIND_FILE: u8 = 0x85;
const KIND_STREAM: u8 = 0xc0;
const KIND_NAME: u8 = 0xc1;
/// Bitmap, upcase table and label of the volume.
const KINDS_OF_VOLUME: [u8; 3] = [0x81, 0x82, 0x83];
/// A kind without these bits must be understood.
const KIND_BENIGN_OR_SECONDARY: u8 = 0x60;
const SECONDARY_COUNT_MAX: u8 = 18;
const FLAG_CONTIGUOUS: u8 = 2;
const ATTRIBUTE_DIRECTORY: u16 = 0x10;

/// A file system of flash storage.
pub(crate) struct ExFatFileSystem {
    device: Arc<dyn BlockDevice>,
    table: FatTable,
    cluster_bytes: u64,
    /// Position of cluster 2.
    heap_start: u64,
    root_cluster: u32,
    /// Where the last read ended: a file is read in many pieces.
    last: Option<ExFatPosition>,
}

#[derive(Debug, Clone, Copy)]
struct ExFatPosition {
    node: NodeId,
    position: ChainPosition,
}

/// How the clusters of a file follow one another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClusterOrder {
    Contiguous,
    Chain,
}

/// A place in a directory.
#[derive(Debug, Clone, Copy)]
struct EntryCursor {
    cluster: u32,
    offset: u64,
    order: ClusterOrder,
}

/// A file or directory.
#[derive(Debug)]
struct FileSet {
    attributes: u16,
    modified: Option<ModifiedTime>,
    order: ClusterOrder,
    first_cluster: u32,
    size_bytes: u64,
    /// Bytes behind this offset were never written, and read as zero.
    valid_bytes: u64,
    name: Vec<u8>,
}

impl FileSet {
    fn is_directory(&self) -> bool {
        self.attributes & ATTRIBUTE_DIRECTORY != 0
    }

    fn parse(entries: &[u8]) -> Result<Self> {
        let fields = Fields::new("exFAT directory entry", entries);
        let checksum = entries.iter().enumerate().filter(|(at, _)| !matches!(at, 2 | 3));
        let checksum = checksum.fold(0u16, |sum, (_, byte)| {
            sum.rotate_right(1).wrapping_add(u16::from(*byte))
        });
        if checksum != fields.u16(2)? {
            return Err(fields.damaged("its checksum differs"));
        }
        let stream = fields.from(ENTRY_BYTES)?;
        if stream.u8(0)? != KIND_STREAM {
            return Err(fields.damaged("the place of a file is missing"));
        }
        let name_bytes = usize::from(stream.u8(3)?) * 2;
        let mut name = Vec::new();
        let parts = entries.chunks_exact(ENTRY_BYTES).skip(2);
        for part in parts.filter(|part| part.first() == Some(&KIND_NAME)) {
            name.extend_from_slice(part.get(2..).unwrap_or_default());
        }
        let name = name
            .get(..name_bytes)
            .ok_or_else(|| fields.damaged("a name is too short"))?;
        let (size_bytes, valid_bytes) = (stream.u64(24)?, stream.u64(8)?);
        if valid_bytes > size_bytes {
            return Err(fields.damaged("more bytes are written than there are"));
        }
        Ok(Self {
            attributes: fields.u16(4)?,
            modified: modified(&fields)?,
            order: if stream.u8(1)? & FLAG_CONTIGUOUS != 0 {
                ClusterOrder::Contiguous
            } else {
                ClusterOrder::Chain
            },
            first_cluster: stream.u32(20)?,
            size_bytes,
            valid_bytes,
            name: utf8_of_utf16(name),
        })
    }
}

/// The time of the last change. Its difference to UTC is stored in quarters of an hour, if it is known.
fn modified(fields: &Fields<'_>) -> Result<Option<ModifiedTime>> {
    const OFFSET_IS_KNOWN: u8 = 0x80;
    let (time, date) = (fields.u16(12)?, fields.u16(14)?);
    let (hundredths, offset) = (fields.u8(21)?, fields.u8(23)?);
    // The seven lower bits have a sign.
    let quarters = if offset & OFFSET_IS_KNOWN != 0 {
        i64::from((offset << 1).cast_signed() >> 1)
    } else {
        0
    };
    Ok(dos_time(date, time).map(|local| ModifiedTime {
        seconds: local.seconds + i64::from(hundredths / 100) - quarters * 900,
        nanoseconds: u32::from(hundredths % 100) * 10_000_000,
    }))
}

impl ExFatFileSystem {
    pub(crate) fn open(device: Arc<dyn BlockDevice>) -> Result<Self> {
        const CLUSTER_SHIFT_MAX: u32 = 25;
        let mut sector = [0; 512];
        device.read_at(&mut sector, 0)?;
        let fields = Fields::new("exFAT boot sector", &sector);
        let sector_shift = u32::from(fields.u8(108)?);
        let cluster_shift = sector_shift + u32::from(fields.u8(109)?);
        if !(9..=12).contains(&sector_shift) || cluster_shift > CLUSTER_SHIFT_MAX || fields.bytes(3, 8)? != b"EXFAT   "
        {
            return Err(fields.damaged(format!(
                "sectors of 2^{sector_shift}, clusters of 2^{cluster_shift} bytes"
            )));
        }
        let bytes_of = |sectors: u32| u64::from(sectors) << sector_shift;
        // The second table is used only by a variant for transactions.
        if fields.u8(110)? != 1 {
            return Err(Error::unsupported("exFAT with two tables"));
        }
        let cluster_count = u64::from(fields.u32(92)?);
        let heap_start = bytes_of(fields.u32(88)?);
        if heap_start + (cluster_count << cluster_shift) > device.size_bytes() {
            return Err(fields.damaged(format!("{cluster_count} clusters do not fit on the volume")));
        }
        Ok(Self {
            table: FatTable {
                width: FatWidth::Exfat,
                start: bytes_of(fields.u32(80)?),
                size_bytes: bytes_of(fields.u32(84)?),
                cluster_count,
            },
            cluster_bytes: 1 << cluster_shift,
            heap_start,
            root_cluster: fields.u32(96)?,
            last: None,
            device,
        })
    }

    fn cluster_at(&self, cluster: u32) -> Result<u64> {
        self.table.check(cluster)?;
        Ok(self.heap_start + u64::from(cluster - 2) * self.cluster_bytes)
    }

    fn next(&self, cluster: u32, order: ClusterOrder) -> Result<Option<u32>> {
        match order {
            ClusterOrder::Chain => self.table.next(&*self.device, cluster),
            ClusterOrder::Contiguous => Ok(Some(cluster + 1).filter(|next| self.table.check(*next).is_ok())),
        }
    }

    /// The entry at a cursor, which moves on; none at the end of the directory's clusters.
    fn entry(&self, cursor: &mut EntryCursor) -> Result<Option<[u8; ENTRY_BYTES]>> {
        if cursor.offset == self.cluster_bytes {
            match self.next(cursor.cluster, cursor.order)? {
                None => return Ok(None),
                Some(next) => {
                    cursor.cluster = next;
                    cursor.offset = 0;
                }
            }
        }
        let mut entry = [0; ENTRY_BYTES];
        self.device
            .read_at(&mut entry, self.cluster_at(cursor.cluster)? + cursor.offset)?;
        cursor.offset += ENTRY_BYTES as u64;
        Ok(Some(entry))
    }

    /// The rest of a set whose first entry was read.
    fn set(&self, first: [u8; ENTRY_BYTES], cursor: &mut EntryCursor) -> Result<FileSet> {
        let [_, secondary_count, ..] = first;
        if !(2..=SECONDARY_COUNT_MAX).contains(&secondary_count) {
            return Err(Error::damaged(
                "exFAT directory entry",
                format!("a set of {secondary_count} entries"),
            ));
        }
        let mut entries = first.to_vec();
        for _ in 0..secondary_count {
            let entry = self.entry(cursor)?;
            let entry = entry.ok_or_else(|| Error::damaged("exFAT directory entry", "a set does not end"))?;
            entries.extend_from_slice(&entry);
        }
        FileSet::parse(&entries)
    }

    /// The file or directory of a node other than the root.
    fn file(&self, node: NodeId) -> Result<FileSet> {
        let missing = || Error::damaged("exFAT directory entry", format!("none is at {}", node.0));
        let at = (node.0 & !(ENTRY_BYTES as u64 - 1))
            .checked_sub(self.heap_start)
            .ok_or_else(missing)?;
        let cluster = u32::try_from(at / self.cluster_bytes + 2).map_err(|_| missing())?;
        let mut cursor = EntryCursor {
            cluster,
            offset: at % self.cluster_bytes,
            order: if node.0 & NODE_CONTIGUOUS != 0 {
                ClusterOrder::Contiguous
            } else {
                ClusterOrder::Chain
            },
        };
        match self.entry(&mut cursor)? {
            Some(first) if first.first() == Some(&KIND_FILE) => self.set(first, &mut cursor),
            _ => Err(missing()),
        }
    }

    /// The cluster of a file that contains `offset`.
    fn position(&self, node: NodeId, file: &FileSet, index: u64) -> Result<ChainPosition> {
        if file.order == ClusterOrder::Contiguous {
            let cluster = u64::from(file.first_cluster).saturating_add(index);
            let cluster = u32::try_from(cluster).map_err(|_| Error::damaged("exFAT", "a file is past the end"))?;
            self.table.check(cluster)?;
            return Ok(ChainPosition { index, cluster });
        }
        let known = self
            .last
            .filter(|last| last.node == node && last.position.index <= index);
        let mut position = known.map_or(
            ChainPosition {
                index: 0,
                cluster: file.first_cluster,
            },
            |last| last.position,
        );
        self.table.check(position.cluster)?;
        while position.index < index {
            let next = self.table.next(&*self.device, position.cluster)?;
            position = ChainPosition {
                index: position.index + 1,
                cluster: next.ok_or_else(|| Error::damaged("exFAT", "the chain of a file ends before the file"))?,
            };
        }
        Ok(position)
    }
}

impl FileSystem for ExFatFileSystem {
    fn root(&self) -> NodeId {
        ROOT
    }

    fn ignores_case(&self) -> bool {
        true
    }

    fn metadata(&mut self, node: NodeId) -> Result<Metadata> {
        let mut metadata = Metadata {
            kind: FileKind::Directory,
            size_bytes: 0,
            mode: None,
            uid: None,
            gid: None,
            modified: None,
            shared_id: None,
        };
        if node != ROOT {
            let file = self.file(node)?;
            metadata.modified = file.modified;
            if !file.is_directory() {
                metadata.kind = FileKind::File;
                metadata.size_bytes = file.size_bytes;
            }
        }
        Ok(metadata)
    }

    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
        let mut cursor = EntryCursor {
            cluster: self.root_cluster,
            offset: 0,
            order: ClusterOrder::Chain,
        };
        // The root directory ends where its chain ends.
        let mut left = DIRECTORY_BYTES_MAX;
        if node != ROOT {
            let file = self.file(node)?;
            if !file.is_directory() {
                return Err(Error::NotADirectory);
            }
            cursor.cluster = file.first_cluster;
            cursor.order = file.order;
            left = left.min(file.size_bytes);
        }
        while left >= ENTRY_BYTES as u64 {
            left -= ENTRY_BYTES as u64;
            let Some(entry) = self.entry(&mut cursor)? else {
                return Ok(());
            };
            let [kind, secondary_count, ..] = entry;
            if kind == KIND_END {
                return Ok(());
            }
            if kind == KIND_FILE {
                let flag = if cursor.order == ClusterOrder::Contiguous {
                    NODE_CONTIGUOUS
                } else {
                    0
                };
                let at = self.cluster_at(cursor.cluster)? + cursor.offset - ENTRY_BYTES as u64;
                let file = self.set(entry, &mut cursor)?;
                left = left.saturating_sub(u64::from(secondary_count) * ENTRY_BYTES as u64);
                if !DirectoryEntry::is_valid_name(&file.name) {
                    return Err(Error::damaged("exFAT directory", "a name in it is invalid"));
                }
                visit(DirectoryEntry {
                    name: file.name,
                    node: NodeId(at | flag),
                })?;
            } else if kind & KIND_IN_USE != 0
                && kind & KIND_BENIGN_OR_SECONDARY == 0
                && !KINDS_OF_VOLUME.contains(&kind)
            {
                return Err(Error::unsupported(format!("an entry of exFAT of kind {kind:#x}")));
            }
        }
        if node == ROOT {
            return Err(Error::damaged(
                "exFAT directory",
                "it is longer than any, or its chain does not end",
            ));
        }
        Ok(())
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        if node == ROOT {
            return Err(Error::NotAFile);
        }
        let file = self.file(node)?;
        if file.is_directory() {
            return Err(Error::NotAFile);
        }
        if offset >= file.size_bytes || length_max == 0 {
            return Ok(FilePiece::End);
        }
        if offset >= file.valid_bytes {
            return Ok(FilePiece::Hole(file.size_bytes - offset));
        }
        let first = self.position(node, &file, offset / self.cluster_bytes)?;
        let inside = offset % self.cluster_bytes;
        let wanted = (file.valid_bytes - offset).min(length_max.min(PIECE_BYTES_MAX) as u64);
        // Clusters that follow one another are read at once.
        let mut last = first;
        let mut length = self.cluster_bytes - inside;
        while length < wanted && self.next(last.cluster, file.order)? == Some(last.cluster + 1) {
            last = ChainPosition {
                index: last.index + 1,
                cluster: last.cluster + 1,
            };
            length += self.cluster_bytes;
        }
        self.last = Some(ExFatPosition { node, position: last });
        let mut bytes = vec![0; to_usize(length.min(wanted))];
        self.device
            .read_at(&mut bytes, self.cluster_at(first.cluster)? + inside)?;
        Ok(FilePiece::Data(bytes))
    }

    fn read_link(&mut self, _node: NodeId) -> Result<Vec<u8>> {
        Err(Error::NotAFile)
    }
}
