//! FAT12, FAT16 and FAT32; exFAT in a module of its own.
//!
//! A file is a chain of clusters, which the table (FAT) links. A node is the position of its directory entry. Times are
//! local times of the guest, and are taken for UTC.

mod codepage;
mod directory;
mod exfat;
mod table;

use std::sync::Arc;

use holdfast_block::{BlockDevice, to_usize};

use self::directory::{ENTRY_BYTES, ShortEntry};
pub(crate) use self::exfat::ExFatFileSystem;
use self::table::{ChainPosition, FatTable, FatWidth};
use crate::fields::Fields;
use crate::{DirectoryEntry, Error, FileKind, FilePiece, FileSystem, Metadata, NodeId, PIECE_BYTES_MAX, Result};

/// No directory entry is at the start of a volume.
const ROOT: NodeId = NodeId(0);
/// FAT allows at most 65,536 entries in a directory; FAT32's root has no other limit.
const DIRECTORY_BYTES_MAX: u64 = 65_536 * ENTRY_BYTES as u64;

/// A file system of the FAT family.
pub(crate) struct FatFileSystem {
    device: Arc<dyn BlockDevice>,
    table: FatTable,
    root: RootDirectory,
    cluster_bytes: u64,
    /// Position of cluster 2.
    data_start: u64,
    /// Where the last read ended: a file is read in many pieces.
    last: Option<FilePosition>,
}

#[derive(Debug, Clone, Copy)]
enum RootDirectory {
    /// FAT12 and FAT16: a fixed range.
    Fixed(FixedRange),
    /// FAT32: a chain that begins at this cluster.
    Chain(u32),
}

#[derive(Debug, Clone, Copy)]
struct FixedRange {
    start: u64,
    size_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct FilePosition {
    node: NodeId,
    position: ChainPosition,
}

impl FatFileSystem {
    pub(crate) fn open(device: Arc<dyn BlockDevice>) -> Result<Self> {
        let mut sector = [0; 512];
        device.read_at(&mut sector, 0)?;
        let fields = Fields::new("FAT boot sector", &sector);
        let sector_bytes = u64::from(fields.u16(11)?);
        let cluster_bytes = sector_bytes * u64::from(fields.u8(13)?);
        let root_entries = u64::from(fields.u16(17)?);
        let small_count = u64::from(fields.u16(19)?);
        let sector_count = if small_count == 0 {
            u64::from(fields.u32(32)?)
        } else {
            small_count
        };
        let small_table = u64::from(fields.u16(22)?);
        let is_fat32 = small_table == 0;
        let table_sectors = if is_fat32 {
            u64::from(fields.u32(36)?)
        } else {
            small_table
        };
        let is_valid = matches!(sector_bytes, 512 | 1024 | 2048 | 4096)
            && cluster_bytes.is_power_of_two()
            && cluster_bytes <= 256 << 10
            && sector_count * sector_bytes <= device.size_bytes();
        if !is_valid {
            return Err(fields.damaged(format!(
                "sectors of {sector_bytes} bytes, clusters of {cluster_bytes} bytes, {sector_count} sectors"
            )));
        }
        let reserved = u64::from(fields.u16(14)?);
        let table_start = (reserved + active_table(&fields, is_fat32)? * table_sectors) * sector_bytes;
        let root_start = (reserved + u64::from(fields.u8(16)?) * table_sectors) * sector_bytes;
        let root_bytes = (root_entries * ENTRY_BYTES as u64).next_multiple_of(sector_bytes);
        let data_start = root_start + root_bytes;
        let data_bytes = (sector_count * sector_bytes).checked_sub(data_start);
        let data_bytes = data_bytes.ok_or_else(|| fields.damaged("its tables are larger than the volume"))?;
        let cluster_count = data_bytes / cluster_bytes;
        let width = match cluster_count {
            _ if is_fat32 => FatWidth::Bits32,
            ..4085 => FatWidth::Bits12,
            _ => FatWidth::Bits16,
        };
        Ok(Self {
            table: FatTable {
                width,
                start: table_start,
                size_bytes: table_sectors * sector_bytes,
                cluster_count,
            },
            root: if is_fat32 {
                RootDirectory::Chain(fields.u32(44)?)
            } else {
                RootDirectory::Fixed(FixedRange {
                    start: root_start,
                    size_bytes: root_entries * ENTRY_BYTES as u64,
                })
            },
            cluster_bytes,
            data_start,
            device,
            last: None,
        })
    }

    fn cluster_at(&self, cluster: u32) -> Result<u64> {
        self.table.check(cluster)?;
        Ok(self.data_start + u64::from(cluster - 2) * self.cluster_bytes)
    }

    fn entry(&self, node: NodeId) -> Result<ShortEntry> {
        let is_aligned = node.0.is_multiple_of(ENTRY_BYTES as u64);
        if node == ROOT || !is_aligned || node.0 < self.table.start {
            return Err(Error::damaged("FAT directory entry", format!("none is at {}", node.0)));
        }
        let mut bytes = [0; ENTRY_BYTES];
        self.device.read_at(&mut bytes, node.0)?;
        let entry = ShortEntry::parse(&bytes, self.table.width)?;
        if !entry.names_a_file() {
            return Err(Error::damaged("FAT directory entry", format!("none is at {}", node.0)));
        }
        Ok(entry)
    }

    /// The ranges that hold the entries of a directory.
    fn directory_ranges(&self, node: NodeId) -> Result<Vec<FixedRange>> {
        let first = match (node, self.root) {
            (ROOT, RootDirectory::Fixed(range)) => return Ok(vec![range]),
            (ROOT, RootDirectory::Chain(cluster)) => cluster,
            _ => {
                let entry = self.entry(node)?;
                if !entry.is_directory() {
                    return Err(Error::NotADirectory);
                }
                entry.first_cluster
            }
        };
        let mut ranges = Vec::new();
        let mut next = Some(first);
        while let Some(cluster) = next {
            let length = self.cluster_bytes * (ranges.len() as u64 + 1);
            if length > DIRECTORY_BYTES_MAX.max(self.cluster_bytes) {
                return Err(Error::damaged(
                    "FAT directory",
                    "it is longer than any, or its chain does not end",
                ));
            }
            ranges.push(FixedRange {
                start: self.cluster_at(cluster)?,
                size_bytes: self.cluster_bytes,
            });
            next = self.table.next(&*self.device, cluster)?;
        }
        Ok(ranges)
    }

    /// The cluster of a file that contains `offset`. Its chain must be long enough.
    fn position(&self, node: NodeId, entry: &ShortEntry, index: u64) -> Result<ChainPosition> {
        let start = ChainPosition {
            index: 0,
            cluster: entry.first_cluster,
        };
        let known = self
            .last
            .filter(|last| last.node == node && last.position.index <= index);
        let mut position = known.map_or(start, |last| last.position);
        self.table.check(position.cluster)?;
        while position.index < index {
            let next = self.table.next(&*self.device, position.cluster)?;
            position = ChainPosition {
                index: position.index + 1,
                cluster: next.ok_or_else(|| Error::damaged("FAT", "the chain of a file ends before the file"))?,
            };
        }
        Ok(position)
    }
}

/// The copy of the table that is in use: FAT32 can switch the copying off.
fn active_table(fields: &Fields<'_>, is_fat32: bool) -> Result<u64> {
    const NOT_MIRRORED: u16 = 0x80;
    if !is_fat32 {
        return Ok(0);
    }
    let flags = fields.u16(40)?;
    Ok(if flags & NOT_MIRRORED != 0 {
        u64::from(flags & 0xf)
    } else {
        0
    })
}

impl FileSystem for FatFileSystem {
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
            let entry = self.entry(node)?;
            metadata.modified = entry.modified();
            if !entry.is_directory() {
                metadata.kind = FileKind::File;
                metadata.size_bytes = u64::from(entry.size_bytes);
            }
        }
        Ok(metadata)
    }

    fn read_directory(&mut self, node: NodeId, visit: &mut dyn FnMut(DirectoryEntry) -> Result<()>) -> Result<()> {
        let mut names = directory::NameReader::new(self.table.width);
        for range in self.directory_ranges(node)? {
            let mut bytes = vec![0; to_usize(range.size_bytes)];
            self.device.read_at(&mut bytes, range.start)?;
            for (number, entry) in (0u64..).zip(bytes.chunks_exact(ENTRY_BYTES)) {
                match names.next(entry)? {
                    directory::NamedEntry::Last => return Ok(()),
                    directory::NamedEntry::None => {}
                    directory::NamedEntry::File(name) => visit(DirectoryEntry {
                        name,
                        node: NodeId(range.start + number * ENTRY_BYTES as u64),
                    })?,
                }
            }
        }
        Ok(())
    }

    fn read_file(&mut self, node: NodeId, offset: u64, length_max: usize) -> Result<FilePiece> {
        if node == ROOT {
            return Err(Error::NotAFile);
        }
        let entry = self.entry(node)?;
        if entry.is_directory() {
            return Err(Error::NotAFile);
        }
        let left = u64::from(entry.size_bytes).saturating_sub(offset);
        if left == 0 || length_max == 0 {
            return Ok(FilePiece::End);
        }
        let first = self.position(node, &entry, offset / self.cluster_bytes)?;
        let inside = offset % self.cluster_bytes;
        let wanted = left.min(length_max.min(PIECE_BYTES_MAX) as u64);
        // Clusters that follow one another are read at once.
        let mut last = first;
        let mut length = self.cluster_bytes - inside;
        while length < wanted && self.table.next(&*self.device, last.cluster)? == Some(last.cluster + 1) {
            last = ChainPosition {
                index: last.index + 1,
                cluster: last.cluster + 1,
            };
            length += self.cluster_bytes;
        }
        self.last = Some(FilePosition { node, position: last });
        let mut bytes = vec![0; to_usize(length.min(wanted))];
        self.device
            .read_at(&mut bytes, self.cluster_at(first.cluster)? + inside)?;
        self.table.check(last.cluster)?;
        Ok(FilePiece::Data(bytes))
    }

    fn read_link(&mut self, _node: NodeId) -> Result<Vec<u8>> {
        Err(Error::NotAFile)
    }
}
